"""What the scheduler is told, numbered, and what it has acted on (docs/rules.md S9)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from xce_supervisor.core.jobs import Job, JobTable
from xce_supervisor.errors import PeerError, RequestRefused
from xce_supervisor.testbed.controller_clock import AwakeClock
from xce_supervisor.testbed.controller_sessions import Session
from xce_supervisor.wire.words import ConfigPush, ErrorCode, JobPush, JobView, Push, QueuePush, SchedulerSession, WorkerView

log = structlog.get_logger("controller")

# Beyond this nothing is sent until something is acknowledged; changes are kept, one a job, and go out then.
UNACKED_MAX = 200
JOBS_PER_PUSH = 1_000


class SchedulerPushes:
    """Pushes of one scheduler session. workers: the list as it is now, asked for when it is sent."""

    def __init__(
        self, session: Session, term: int, clock: AwakeClock, table: JobTable, workers: Callable[[], tuple[WorkerView, ...]]
    ) -> None:
        self._session, self._term, self._clock, self._table, self._workers = session, term, clock, table, workers
        self._seq = 0
        self._acted = 0
        self._unacked: deque[tuple[int, float]] = deque()
        self._jobs: dict[str, None] = {}
        self._workers_changed = False
        self._flush: asyncio.Handle | None = None

    def send_all(self, dispatch_max: int) -> None:
        """Everything afresh: after a join, and on a resync."""
        self._jobs.clear()
        self._workers_changed = False
        self._send(lambda seq: ConfigPush(seq=seq, term=self._term, max_dispatch_per_cycle=dispatch_max))
        self._send(lambda seq: QueuePush(seq=seq, term=self._term, workers=self._workers()))
        self._send_jobs([job.job_id for job in self._table.open()], full=True)

    def job_changed(self, job_id: str) -> None:
        """A fact changed this job; what is told is how it is when the push goes out."""
        self._jobs[job_id] = None
        self._soon()

    def workers_changed(self) -> None:
        """A worker came, went, fell silent or was heard again."""
        self._workers_changed = True
        self._soon()

    def acted(self, seq: int) -> None:
        """The scheduler has acted on every push up to `seq`. Raises RequestRefused (MALFORMED) for a push never sent."""
        if seq > self._seq:
            raise RequestRefused(ErrorCode.MALFORMED, f"push {seq} was never sent; the newest is {self._seq}")
        self._acted = max(self._acted, seq)
        while self._unacked and self._unacked[0][0] <= seq:
            self._unacked.popleft()
        if self._jobs or self._workers_changed:
            self._soon()

    def view(self) -> SchedulerSession:
        """As ctrlstatus shows it. Ages do not count the controller's own absence (docs/rules.md S10)."""
        return SchedulerSession(
            joined=self._session.alive,
            name=self._session.name,
            since_ms=self._clock.age_ms(self._session.joined_s),
            spawn_token=self._session.spawn_token,
            last_push_seq=self._seq,
            last_acted_seq=self._acted,
            oldest_unacked_ms=self._clock.age_ms(self._unacked[0][1]) if self._unacked else None,
        )

    def stop(self) -> None:
        """Send no more."""
        if self._flush is not None:
            self._flush.cancel()
        self._jobs.clear()
        self._workers_changed = False

    def _soon(self) -> None:
        # Changes of one turn of the loop go out together.
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        if len(self._unacked) >= UNACKED_MAX:
            return
        if self._workers_changed:
            self._workers_changed = False
            self._send(lambda seq: QueuePush(seq=seq, term=self._term, workers=self._workers()))
        if self._jobs:
            changed, self._jobs = list(self._jobs), {}
            self._send_jobs(changed, full=False)

    def _send_jobs(self, job_ids: list[str], *, full: bool) -> None:
        """In portions; the first of a full push replaces what the scheduler knew, the others add to it."""
        portions = [job_ids[start : start + JOBS_PER_PUSH] for start in range(0, len(job_ids), JOBS_PER_PUSH)] or [[]]
        for portion in portions:
            jobs = tuple(views(job for job_id in portion if (job := self._table.get(job_id)) is not None))
            self._send(partial(self._job_push, jobs, full))
            full = False

    def _job_push(self, jobs: tuple[JobView, ...], full: bool, seq: int) -> JobPush:
        return JobPush(seq=seq, term=self._term, jobs=jobs, full=full)

    def _send(self, make: Callable[[int], Push]) -> None:
        self._seq += 1
        try:
            self._session.connection.push(make(self._seq))
        except PeerError as error:
            # It does not read, or is gone. A scheduler never comes back on another connection: its supervisor makes a new one.
            log.warning("push.failed", peer=self._session.name, seq=self._seq, reason=str(error))
            self._session.connection.close("a push could not be sent")
            return
        self._unacked.append((self._seq, self._clock.now_s()))


def views(jobs: Iterable[Job]) -> Iterable[JobView]:
    """Jobs as they are told to peers."""
    for job in jobs:
        yield JobView(
            job_id=job.job_id,
            command=job.spec.command,
            slots=job.spec.slots,
            rerunnable=job.spec.rerunnable,
            constraint=job.spec.constraint,
            state=job.state.value,
            attempt=job.attempt,
            worker=job.worker,
            exit_code=job.exit_code,
            reason=job.reason,
        )
