"""What the scheduler knows of the queue, made from pushes, and what it makes of it. Pure: no I/O, clock or await.

The view is a level: pushes change it as they come, and a cycle acts on whatever it is then. A job's attempt number only rises,
so a picture of a job with a lower one than we know is old and is dropped. What a dispatch did is put into the view at once; the
push that tells it follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from xce_supervisor.testbed.placement import Placement, place
from xce_supervisor.wire.words import ConfigPush, JobPush, JobView, Push, QueuePush, WorkerView

OPEN = frozenset({"pending", "dispatched", "running"})
# Dispatches of one cycle before the controller tells its own number.
DISPATCH_MAX_DEFAULT = 50


@dataclass(slots=True)
class QueueView:
    """Open jobs in order of submission, workers, and the newest push seen.

    held: jobs that are left alone until the next push: the controller refused them as they are, for a reason that we cannot see.
    gap: a push was missed; everything must be asked for afresh.
    """

    dispatch_max: int = DISPATCH_MAX_DEFAULT
    seen_seq: int = 0
    gap: bool = False
    jobs: dict[str, JobView] = field(default_factory=dict)
    workers: tuple[WorkerView, ...] = ()
    held: set[str] = field(default_factory=set)

    def apply(self, push: Push) -> None:
        """Take one push in."""
        self.gap = self.gap or push.seq != self.seen_seq + 1
        self.seen_seq = max(self.seen_seq, push.seq)
        self.held.clear()
        match push:
            case JobPush(jobs=jobs, full=full):
                if full:
                    self._replace(jobs)
                else:
                    self._update(jobs)
            case QueuePush(workers=workers):
                self.workers = workers
            case ConfigPush(max_dispatch_per_cycle=limit):
                self.dispatch_max = max(1, limit)

    def placements(self) -> list[Placement]:
        """What this cycle dispatches: at most dispatch_max."""
        jobs = [job for job in self.jobs.values() if job.job_id not in self.held]
        return place(jobs, self.workers, self.dispatch_max)

    def dispatched(self, placement: Placement) -> None:
        """The controller committed this dispatch."""
        job = self.jobs.get(placement.job_id)
        if job is not None and job.attempt < placement.attempt:
            self.jobs[placement.job_id] = msgspec.structs.replace(
                job, state="dispatched", attempt=placement.attempt, worker=placement.worker
            )

    def reread(self, asked: Placement, found: JobView | None) -> None:
        """The controller refused `asked` with CONFLICT; `found` is the job as it is now, None if there is none.

        If the job is as we thought it was, the refusal has a cause that we cannot see (a worker that just left): it is held.
        """
        if found is None:
            self.jobs.pop(asked.job_id, None)
            return
        if found.state == "pending" and found.attempt + 1 == asked.attempt:
            self.held.add(asked.job_id)
        self._update((found,))

    def _update(self, jobs: Iterable[JobView]) -> None:
        for job in jobs:
            known = self.jobs.get(job.job_id)
            if known is not None and job.attempt < known.attempt:
                continue
            if job.state in OPEN:
                self.jobs[job.job_id] = job
            else:
                self.jobs.pop(job.job_id, None)

    def _replace(self, jobs: Iterable[JobView]) -> None:
        before, self.jobs = self.jobs, {}
        for job in jobs:
            known = before.get(job.job_id)
            newest = known if known is not None and job.attempt < known.attempt else job
            if newest.state in OPEN:
                self.jobs[job.job_id] = newest
