"""Which pending job goes to which worker: first come, first served, with slots and name-prefix constraints. Pure.

Jobs are looked at in order of submission. A job goes to the eligible worker with the most free slots, so that work spreads.
A job that no living worker could hold even when empty does not stand in the way of others. A job that some worker could
hold, only not now, keeps its turn: it reserves the eligible worker with the most free slots, and nothing that was submitted
later may take slots there. The reserved worker empties, so a wide job is never starved by narrow ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xce_supervisor.wire.words import JobView, WorkerView

OCCUPYING = frozenset({"dispatched", "running"})


@dataclass(frozen=True, slots=True)
class Placement:
    """Run attempt `attempt` (from 1) of job `job_id` on `worker`."""

    job_id: str
    attempt: int
    worker: str


def place(jobs: Iterable[JobView], workers: Iterable[WorkerView], limit: int) -> list[Placement]:
    """Return at most `limit` (>= 0) placements for the pending jobs among `jobs`, in order of submission.

    jobs: every open job in order of submission; those dispatched or running take up their worker's slots.
    workers: as last pushed; those not alive take nothing.
    """
    jobs, workers = list(jobs), list(workers)
    free = free_slots(jobs, workers)
    size = {worker.name: worker.slots for worker in workers if worker.alive}
    placements: list[Placement] = []
    for job in jobs:
        if len(placements) >= limit or not free:
            break
        if job.state != "pending":
            continue
        eligible = [name for name in free if name.startswith(job.constraint) and size[name] >= job.slots]
        if not eligible:
            continue
        widest = min(eligible, key=lambda name: (-free[name], name))
        if free[widest] >= job.slots:
            free[widest] -= job.slots
            placements.append(Placement(job.job_id, job.attempt + 1, widest))
        else:
            del free[widest]
    return placements


def free_slots(jobs: Iterable[JobView], workers: Iterable[WorkerView]) -> dict[str, int]:
    """Return the free slots of each living worker, by name; never below 0."""
    taken: dict[str, int] = {}
    for job in jobs:
        if job.state in OCCUPYING:
            taken[job.worker] = taken.get(job.worker, 0) + job.slots
    return {worker.name: max(0, worker.slots - taken.get(worker.name, 0)) for worker in workers if worker.alive}
