"""The controller's side of workers: what they are told to start, what they report, and when one is given up.

An attempt is pushed to its worker only after its dispatch is committed; the worker starts it at most once, however often it is
told. What a worker does not know any more is settled by its full report, which follows every join:

* dispatched, and the worker's process is the one it was: told again, it was never begun;
* dispatched before this process of the worker, or running: it is lost with the process that had it.

A worker that is gone (no connection, and none again for `worker_lost_s` of the controller's awake time) loses all its attempts.
One that is merely silent on an open connection may be stopped, and its jobs may be running: it gets no new work, and only what
may be run again is taken from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from xce_supervisor.core.facts import Dispatched, JobFact
from xce_supervisor.core.jobs import (
    Admitted,
    Job,
    JobState,
    JobTable,
    Refusal,
    Refused,
    Report,
    admit_dispatch,
    admit_report,
    host_lost,
)
from xce_supervisor.errors import PeerError, RequestRefused
from xce_supervisor.testbed.controller_clock import AwakeClock
from xce_supervisor.testbed.controller_ledger import Ledger
from xce_supervisor.testbed.controller_sessions import Session, Sessions
from xce_supervisor.wire.words import JobAttempt, JobDispatch, JobStart, JobStateQuery, JobStateReport, WorkerView

log = structlog.get_logger("controller")

ATTEMPTS_PER_PROPOSAL = 100


class Workers:
    """Of one controller. `promoted` begins a term as primary."""

    def __init__(self, ledger: Ledger, sessions: Sessions, clock: AwakeClock, lost_s: float) -> None:
        self._ledger, self._sessions, self._clock, self._lost_s = ledger, sessions, clock, lost_s
        self._term = 0
        self._gone_since: dict[str, float] = {}
        self._settling: set[str] = set()

    def promoted(self, term: int) -> None:
        """Every worker that holds attempts gets the whole time to come back."""
        self._term = term
        now_s = self._clock.now_s()
        self._gone_since = dict.fromkeys(self._ledger.table.workers(), now_s)

    def joined(self, session: Session) -> None:
        """Ask what it knows."""
        self._gone_since.pop(session.name, None)
        self._push(session, JobStateQuery(term=self._term))

    def ended(self, session: Session) -> None:
        """Its session is over; unless it joins again, it is gone from now on."""
        self._gone_since[session.name] = self._clock.now_s()

    def views(self) -> tuple[WorkerView, ...]:
        """As pushed to the scheduler."""
        return tuple(
            WorkerView(name=session.name, slots=session.slots, alive=session.alive) for session in self._sessions.workers()
        )

    # ------------------------------------------------------------ dispatch

    async def dispatch(self, message: JobDispatch) -> int:
        """Commit a dispatch and tell the worker; return the commit index. Raises RequestRefused."""
        fact = Dispatched(message.job_id, message.attempt, message.worker)
        return await self._ledger.propose(frozenset({message.job_id}), lambda table: self._admit(table, fact))

    def _admit(self, table: JobTable, fact: Dispatched) -> Admitted | Refused:
        admitted = admit_dispatch(table, fact)
        if isinstance(admitted, Refused) or not admitted.facts:
            return admitted
        session, job = self._sessions.worker(fact.worker), table.get(fact.job_id)
        if session is None or not session.alive or job is None:
            return Refused(Refusal.CONFLICT, f"worker {fact.worker} has not joined, or is silent")
        taken = sum(held.spec.slots for held in table.held_by(fact.worker))
        if taken + job.spec.slots > session.slots:
            return Refused(Refusal.CONFLICT, f"worker {fact.worker} has {session.slots - taken} slots left, not {job.spec.slots}")
        return admitted

    def job_changed(self, job: Job) -> None:
        """Called after a fact was applied: a dispatched attempt goes to its worker."""
        if job.state is not JobState.DISPATCHED:
            return
        session = self._sessions.worker(job.worker)
        if session is not None:
            self._start(session, job)

    def _start(self, session: Session, job: Job) -> None:
        session.started.add((job.job_id, job.attempt))
        self._push(
            session, JobStart(job_id=job.job_id, attempt=job.attempt, command=job.spec.command, term=self._term)
        )  # fmt: skip

    @staticmethod
    def _push(session: Session, message: JobStart | JobStateQuery) -> None:
        try:
            session.connection.push(message)
        except PeerError as error:
            # It comes back on a new connection, and its full report then tells what it did not get.
            log.warning("push.failed", peer=session.name, opcode=message.opcode.name, reason=str(error))
            session.connection.close("a push could not be sent")

    # ------------------------------------------------------------ reports

    async def report(self, session: Session, message: JobStateReport) -> int:
        """Commit what a worker reports; return the commit index. Stale words are dropped. Raises RequestRefused."""
        index = self._ledger.applied
        for start in range(0, len(message.attempts), ATTEMPTS_PER_PROPOSAL):
            portion = message.attempts[start : start + ATTEMPTS_PER_PROPOSAL]
            # What is known already needs no place in a round: a full report is mostly that.
            fresh = [attempt for attempt in portion if self._is_news(session.name, attempt)]
            if fresh:
                jobs = frozenset(attempt.job_id for attempt in fresh)
                index = await self._ledger.propose(jobs, partial(_admit_all, worker=session.name, attempts=fresh))
        if message.full:
            index = max(index, await self._settle_unknown(session, message))
        return index

    def _is_news(self, worker: str, attempt: JobAttempt) -> bool:
        admitted = admit_report(self._ledger.table, worker, _report(attempt))
        if isinstance(admitted, Refused):
            log.debug("report.dropped", worker=worker, job=attempt.job_id, attempt=attempt.attempt, reason=admitted.text)
            return False
        return bool(admitted.facts)

    async def _settle_unknown(self, session: Session, message: JobStateReport) -> int:
        """What the worker should have by the facts, and does not know."""
        known = {(attempt.job_id, attempt.attempt) for attempt in message.attempts}
        lost: list[Job] = []
        for job in self._ledger.table.held_by(session.name):
            key = (job.job_id, job.attempt)
            if key in known:
                continue
            if job.state is JobState.DISPATCHED and (session.resumed or key in session.started):
                self._start(session, job)
            else:
                lost.append(job)
        return await self._lose(session.name, lost, "its worker does not know it any more")

    # ------------------------------------------------------------ workers that are gone

    async def judge(self) -> None:
        """Give up workers that are gone for too long; call it about twice a second."""
        now_s = self._clock.now_s()
        for worker in self._ledger.table.workers():
            session = self._sessions.worker(worker)
            if session is None:
                since_s = self._gone_since.setdefault(worker, now_s)
                jobs = self._ledger.table.held_by(worker)
                why = "its worker is gone"
            elif not session.alive:
                since_s = session.heard_s
                jobs = [job for job in self._ledger.table.held_by(worker) if job.spec.rerunnable]
                why = "its worker is silent"
            else:
                continue
            if now_s - since_s > self._lost_s and worker not in self._settling:
                self._settling.add(worker)
                try:
                    await self._lose(worker, jobs, why)
                except RequestRefused as error:
                    log.warning("host_lost.not_committed", worker=worker, reason=error.text)
                finally:
                    self._settling.discard(worker)

    async def _lose(self, worker: str, jobs: Sequence[Job], why: str) -> int:
        index = self._ledger.applied
        for start in range(0, len(jobs), ATTEMPTS_PER_PROPOSAL):
            portion = jobs[start : start + ATTEMPTS_PER_PROPOSAL]
            log.warning("host.lost", worker=worker, jobs=len(portion), reason=why)
            attempts = {job.job_id: job.attempt for job in portion}
            index = await self._ledger.propose(frozenset(attempts), partial(_admit_lost, worker=worker, attempts=attempts))
        return index


def _report(attempt: JobAttempt) -> Report:
    return Report(attempt.job_id, attempt.attempt, attempt.state, attempt.exit_code, attempt.reason)


def _admit_all(table: JobTable, worker: str, attempts: Sequence[JobAttempt]) -> Admitted:
    facts: dict[str, JobFact] = {}
    for attempt in attempts:
        admitted = admit_report(table, worker, _report(attempt))
        if isinstance(admitted, Admitted):
            # One word a job and report: a second one would have to be decided on what the first did.
            facts |= {fact.job_id: fact for fact in admitted.facts if fact.job_id not in facts}
    return Admitted(tuple(facts.values()))


def _admit_lost(table: JobTable, worker: str, attempts: dict[str, int]) -> Admitted:
    """Decided afresh: meanwhile the worker may have told more."""
    held = [job for job in table.held_by(worker) if attempts.get(job.job_id) == job.attempt]
    return Admitted(host_lost(held))
