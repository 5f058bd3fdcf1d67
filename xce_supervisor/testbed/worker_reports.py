"""Telling the primary what became of the attempts, until it has answered (docs/protocol.md, jobStateReport)."""

from __future__ import annotations

import asyncio

import structlog

from xce_supervisor.errors import PeerError, RequestRefused
from xce_supervisor.link.failover import FailoverConnection
from xce_supervisor.testbed.worker_disk import WorkerDisk
from xce_supervisor.testbed.worker_jobs import JobTable
from xce_supervisor.wire.words import ErrorCode, JobAttempt, JobStateReport, Joined

log = structlog.get_logger()

REPORT_DEADLINE_S = 2.0
RETRY_S = 0.2
ATTEMPTS_MAX = 1000
# A controller that says this of a report will say it again: the report is stale, and is dropped.
FINAL = frozenset({ErrorCode.CONFLICT, ErrorCode.NOT_FOUND, ErrorCode.MALFORMED})


class Reports:
    """One report is under way at a time. What changes meanwhile goes with the next."""

    def __init__(self, worker: str, table: JobTable, disk: WorkerDisk, link: FailoverConnection) -> None:
        self._worker = worker
        self._table = table
        self._disk = disk
        self._link = link
        self._full = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    async def joined(self, joined: Joined) -> None:
        """A session is there: what the new primary must know is everything."""
        log.info("worker.joined", controller=joined.controller_id, term=joined.term, session=joined.session_id)
        self.ask_full()

    def ask_full(self) -> None:
        """Send a full report next."""
        self._full = True
        self._wake.set()

    def changed(self) -> None:
        """Something is to be told."""
        self._wake.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._idle.clear()
            while self._full or self._table.untold(1):
                if not await self._send():
                    await asyncio.sleep(RETRY_S)
            self._idle.set()

    async def flush(self, limit_s: float) -> None:
        """Wait until all is told, at most limit_s seconds."""
        if not self._table.untold(1):
            return
        self._idle.clear()
        self._wake.set()
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("reports.left", attempts=len(self._table.untold(ATTEMPTS_MAX)))

    async def _send(self) -> bool:
        """Send one report; return whether it was settled."""
        full = self._full
        attempts = self._table.everything() if full else self._table.untold(ATTEMPTS_MAX)
        self._full = False
        try:
            await self._request(attempts, full)
        except RequestRefused as error:
            if error.code in FINAL and not full:
                return await self._send_singly(attempts)
            log.warning("report.refused", code=int(error.code), reason=error.text, attempts=len(attempts))
        except PeerError as error:
            log.info("report.unanswered", reason=str(error), attempts=len(attempts))
        else:
            await self._settle(attempts)
            return True
        self._full = self._full or full
        return False

    async def _send_singly(self, attempts: tuple[JobAttempt, ...]) -> bool:
        """One of them is stale, and refused the whole report: find out which."""
        for attempt in attempts:
            try:
                await self._request((attempt,), False)
            except RequestRefused as error:
                if error.code not in FINAL:
                    return False
                log.warning("report.dropped", job=attempt.job_id, attempt=attempt.attempt, reason=error.text)
            except PeerError:
                return False
            await self._settle((attempt,))
        return True

    async def _request(self, attempts: tuple[JobAttempt, ...], full: bool) -> None:
        def report(joined: Joined) -> JobStateReport:
            return JobStateReport(session_id=joined.session_id, worker=self._worker, attempts=attempts, full=full)

        await self._link.request(report, REPORT_DEADLINE_S)

    async def _settle(self, attempts: tuple[JobAttempt, ...]) -> None:
        ends = self._table.told(attempts)
        try:
            await self._disk.soon(lambda: self._disk.log.told(ends))
            if self._disk.log.overgrown:
                ended, running = self._table.ended(), self._table.running()
                await self._disk.soon(lambda: self._disk.log.compact(ended, running))
        except OSError as error:
            log.error("log.not_written", error=error.strerror)  # they will be told once more after a restart, which does no harm
