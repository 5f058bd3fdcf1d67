"""What the scheduler does about its queue: bounded cycles, each acknowledged after its answers (docs/rules.md S9)."""

from __future__ import annotations

import asyncio

import structlog

from xce_supervisor.errors import DeadlinePassed, PeerError, RequestRefused
from xce_supervisor.link.pinned import PinnedConnection
from xce_supervisor.testbed.placement import Placement
from xce_supervisor.testbed.scheduler_faults import Faults
from xce_supervisor.testbed.scheduler_view import QueueView
from xce_supervisor.wire.words import ErrorCode, JobDispatch, JobList, JobQuery, Push, PushAck, Resync

log = structlog.get_logger()

REQUEST_DEADLINE_S = 3.0
# Enough to let the controller commit several dispatches in one write, few enough to leave its other peers room.
IN_FLIGHT_MAX = 16
RETRY_S = 0.2
# A refused answer that says no more than "not now": the job is tried again soon, and nothing is doubtful.
NOT_NOW = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.LIMIT})


class Acts:
    """The scheduler's hands. `pushed` is called from the connection; `run` does the rest."""

    def __init__(self, faults: Faults) -> None:
        self._view = QueueView()
        self._woken = asyncio.Event()
        self._faults = faults
        self._acked_seq = 0
        self._retry = False

    def pushed(self, push: Push) -> None:
        """Take one push in; it is acted on in the next cycle."""
        self._view.apply(push)
        self._woken.set()

    async def run(self, connection: PinnedConnection) -> None:
        """Act until cancelled.

        Raises:
            RequestRefused: with a code that is neither "not now" nor about one job: we are not its scheduler (any more).
            Redirected: it is a standby now.
            PeerError: the connection is gone.
        """
        while True:
            try:
                await asyncio.wait_for(self._woken.wait(), RETRY_S if self._retry else None)
            except TimeoutError:
                pass  # something was refused for now: its time has come
            self._woken.clear()
            self._retry = False
            try:
                await self._cycle(connection)
            except DeadlinePassed as error:
                # Unanswered: what came of it is unknown, so nothing is acknowledged and everything is asked for afresh.
                log.warning("cycle.unanswered", reason=str(error))
                self._view.gap = self._retry = True
            except RequestRefused as error:
                if error.code not in NOT_NOW:
                    raise
                log.warning("cycle.refused", code=int(error.code), reason=error.text)
                self._retry = True

    async def _cycle(self, connection: PinnedConnection) -> None:
        if self._view.gap:
            self._view.gap = False
            await connection.request(Resync(session_id=connection.joined.session_id), REQUEST_DEADLINE_S)
        seq = self._view.seen_seq
        placements = self._view.placements()
        if len(placements) >= self._view.dispatch_max:
            self._woken.set()
        slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        outcomes = await asyncio.gather(*(self._dispatch(connection, placement, slots) for placement in placements))
        unanswered = [outcome for outcome in outcomes if outcome is not None]
        if unanswered:
            # An end of the session is a better reason than a passed deadline, which it may have caused.
            raise min(unanswered, key=lambda error: isinstance(error, DeadlinePassed))
        await self._acknowledge(connection, seq)

    async def _dispatch(self, connection: PinnedConnection, placement: Placement, slots: asyncio.Semaphore) -> PeerError | None:
        """Dispatch one job and put the answer into the view. Returns what kept it from being answered; None when it was."""
        message = JobDispatch(
            session_id=connection.joined.session_id,
            job_id=placement.job_id,
            worker=placement.worker,
            attempt=placement.attempt,
        )
        async with slots:
            try:
                await connection.request(message, REQUEST_DEADLINE_S)
            except RequestRefused as error:
                return await self._refused(connection, placement, error)
            except PeerError as error:
                return error
        self._view.dispatched(placement)
        log.info("job.dispatched", job=placement.job_id, attempt=placement.attempt, worker=placement.worker)
        return None

    async def _refused(self, connection: PinnedConnection, placement: Placement, refusal: RequestRefused) -> PeerError | None:
        log.info("dispatch.refused", job=placement.job_id, code=int(refusal.code), reason=refusal.text)
        if refusal.code in NOT_NOW:
            self._retry = True
            return None
        if refusal.code not in (ErrorCode.CONFLICT, ErrorCode.NOT_FOUND):
            return refusal
        # The job is not what we took it for. Look before trying anything again.
        try:
            answer = await connection.request(JobQuery(job_ids=(placement.job_id,)), REQUEST_DEADLINE_S)
        except PeerError as error:
            return error
        found = (
            next((job for job in answer.jobs if job.job_id == placement.job_id), None) if isinstance(answer, JobList) else None
        )
        self._view.reread(placement, found)
        self._woken.set()
        return None

    async def _acknowledge(self, connection: PinnedConnection, seq: int) -> None:
        if seq <= self._acked_seq or self._faults.never_ack:
            return
        if self._faults.slow_ack:
            await asyncio.sleep(self._faults.slow_ack / 1000)
        await connection.request(PushAck(session_id=connection.joined.session_id, seq=seq), REQUEST_DEADLINE_S)
        self._acked_seq = seq
