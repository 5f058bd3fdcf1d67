"""The reference worker: runs real commands, once each, follows the primary, and keeps jobs running across fail-overs.

What must hold, whatever dies: an attempt is started at most once, and what became of it is told until a controller has answered.
The parts: `worker_jobs` decides, `worker_disk` and `worker_log` remember, `worker_spawn` starts and reaps, `worker_reports`
tells, `worker_survivors` cleans up after a former process. This file is the order in which they are asked:

    JobStart -> judge -> begin -> log "begun" (synced) -> spawn -> report running
    exit     -> log "ended" (synced) -> end -> report -> answered -> log "told"

The loop must be asyncio's own, not uvloop's: pidfds and pipes are plain readers of it, in the thread that spawns.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import structlog

from xce_supervisor.errors import ConfigError
from xce_supervisor.link.failover import FailoverConnection
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.testbed.worker_disk import DirectoryTaken, WorkerDisk
from xce_supervisor.testbed.worker_jobs import FAILED, HOST_LOST, JobTable, Verdict
from xce_supervisor.testbed.worker_reports import Reports
from xce_supervisor.testbed.worker_spawn import CannotStart, RunningJob, job_environment, keep_descriptors, start
from xce_supervisor.testbed.worker_survivors import kill_marked
from xce_supervisor.wire.words import HostRole, JobAttempt, JobStart, JobStateQuery, Join, Message

log = structlog.get_logger()

LAST_REPORT_S = 2.0
RUNNING_MAX = 1000  # attempts at once, whatever the slots: a bound against a mad peer


class ExitCode(IntEnum):
    """Why the worker ended. docs/worker.md has the same table."""

    ASKED = 0
    BUG = 70
    LOCK_LOST = 75
    CONFIG = 78


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker.

    controllers: "host:port" of each controller. directory: the worker's own, for its log, lock and job output. slots: how many
    job slots it offers. output_bytes_max: kept of each attempt's output. output_files_max: attempts whose output is kept.
    stop_grace_s: between SIGTERM and SIGKILL to the jobs when the worker is told to end.
    """

    name: str
    controllers: tuple[str, ...]
    directory: Path
    slots: int = 1
    tls: TlsFiles | None = None
    output_bytes_max: int = 1024 * 1024
    output_files_max: int = 500
    stop_grace_s: float = 2.0


def serve(config: WorkerConfig) -> int:
    """Run one worker until SIGTERM or SIGINT and return its exit code. Raises ConfigError for what an operator got wrong."""
    keep_descriptors()
    try:
        disk = WorkerDisk(config.directory, config.output_files_max)
    except DirectoryTaken as error:
        log.error("directory.taken", path=str(config.directory), reason=str(error))
        return ExitCode.LOCK_LOST
    try:
        with asyncio.Runner() as runner:
            return runner.run(Worker(config, disk).run())
    except ConfigError:
        raise
    except Exception:
        log.exception("worker.failed")
        return ExitCode.BUG
    finally:
        disk.close()


class Worker:
    """One worker's life in one process."""

    def __init__(self, config: WorkerConfig, disk: WorkerDisk) -> None:
        self._config = config
        self._disk = disk
        self._table = JobTable(running_max=max(RUNNING_MAX, 2 * config.slots))
        self._jobs: dict[tuple[str, int], RunningJob] = {}
        self._signalled: set[tuple[str, int]] = set()
        self._ending = asyncio.Event()
        self._quiet = asyncio.Event()
        self._link = FailoverConnection(
            config.controllers,
            TlsSource(config.tls) if config.tls else None,
            self._join,
            on_push=self._on_push,
            on_joined=lambda joined: self._reports.joined(joined),
        )
        self._reports = Reports(config.name, self._table, disk, self._link)

    async def run(self) -> int:
        """Clean up after a former process, then serve until told to end. Raises ConfigError."""
        await self._disk.soon(self._recover)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        try:
            async with asyncio.TaskGroup() as self._acts:
                following = self._acts.create_task(_for_ever(self._link.run()))
                telling = self._acts.create_task(_for_ever(self._reports.run()))
                await self._ending.wait()
                await self._stop()
                following.cancel()
                telling.cancel()
        finally:
            self._kill(signal.SIGKILL)
        return ExitCode.ASKED

    def _join(self, resume: str) -> Join:
        return Join(host_role=HostRole.WORKER, name=self._config.name, slots=self._config.slots, resume=resume)

    def _recover(self) -> None:
        """Blocking: kill what a former process left running, and note its lost attempts as ended."""
        remembered = self._disk.remembered
        killed = kill_marked(self._disk.mark)
        for end, told in remembered.ended:
            self._table.restore(end, told=told)
        for job_id, attempt in remembered.lost:
            lost = JobAttempt(job_id=job_id, attempt=attempt, state=FAILED, reason=HOST_LOST)
            self._table.restore(lost, told=False)
        try:
            self._disk.log.compact(self._table.ended(), ())
        except OSError as error:
            raise ConfigError(
                f"cannot write the job log in {self._config.directory}: {error.strerror or error}; make room there"
            ) from error
        log.info("worker.recovered", lost=len(remembered.lost), killed=killed, damaged_lines=remembered.damaged)

    # ------------------------------------------------------------ starting

    def _on_push(self, message: Message) -> None:
        match message:
            case JobStart() if self._ending.is_set():
                log.info("start.refused", job=message.job_id, reason="the worker is ending")
            case JobStart():
                self._judge(message)
            case JobStateQuery():
                self._reports.ask_full()
            case _:
                log.warning("push.ignored", opcode=int(message.opcode))

    def _judge(self, wanted: JobStart) -> None:
        verdict = self._table.judge(wanted.job_id, wanted.attempt)
        log.info("start.judged", job=wanted.job_id, attempt=wanted.attempt, verdict=verdict.value)
        match verdict:
            case Verdict.START:
                superseded = self._table.begin(wanted.job_id, wanted.attempt)
                self._acts.create_task(self._start(wanted, superseded))
            case Verdict.REPORT:
                self._table.tell_again(wanted.job_id, wanted.attempt)
                self._reports.changed()
            case Verdict.STALE:
                pass  # the sender will learn from the newer attempt's report
            case Verdict.FULL:
                self._table.begin(wanted.job_id, wanted.attempt)
                reason = f"worker {self._config.name} runs {self._table.running_max} attempts, which is its limit"
                self._acts.create_task(self._end(wanted.job_id, wanted.attempt, None, reason))

    async def _start(self, wanted: JobStart, superseded: JobAttempt | None) -> None:
        if superseded is not None and (older := self._jobs.get((superseded.job_id, superseded.attempt))):
            older.signal(signal.SIGKILL)
        await self._disk.soon(self._disk.sweep_output)
        try:
            await self._disk.soon(lambda: self._disk.log.begun(wanted.job_id, wanted.attempt))
        except OSError as error:
            await self._end(wanted.job_id, wanted.attempt, None, f"cannot write the worker's job log: {error.strerror or error}")
            return
        # From here to the spawn nothing else runs on the loop.
        if self._ending.is_set():
            await self._end(wanted.job_id, wanted.attempt, None, HOST_LOST)
            return
        if self._table.superseded(wanted.job_id, wanted.attempt):
            await self._end(wanted.job_id, wanted.attempt, None, "superseded by a newer attempt before it was started")
            return
        environment = job_environment(wanted.job_id, wanted.attempt, self._disk.mark, self._config.name)
        try:
            job = start(
                wanted.command,
                environment,
                self._disk.output_path(wanted.job_id, wanted.attempt),
                self._config.output_bytes_max,
                lambda exit_code: self._on_ended(wanted.job_id, wanted.attempt, exit_code),
            )
        except CannotStart as error:
            await self._end(wanted.job_id, wanted.attempt, None, str(error))
            return
        self._jobs[(wanted.job_id, wanted.attempt)] = job
        log.info("job.started", job=wanted.job_id, attempt=wanted.attempt, pid=job.pid)
        self._reports.changed()

    # ------------------------------------------------------------ ending

    def _on_ended(self, job_id: str, attempt: int, exit_code: int) -> None:
        reason = ""
        if (job_id, attempt) in self._signalled:
            reason = HOST_LOST  # we ended it because we end, whatever it made of the signal
        elif exit_code - 128 in set(signal.Signals):
            reason = f"killed by {signal.Signals(exit_code - 128).name}"
        self._acts.create_task(self._end(job_id, attempt, exit_code, reason))

    async def _end(self, job_id: str, attempt: int, exit_code: int | None, reason: str) -> None:
        ended = self._table.ending(job_id, attempt, exit_code=exit_code, reason=reason)
        try:
            await self._disk.soon(lambda: self._disk.log.ended(ended))
        except OSError as error:
            # The end is told all the same. After a restart it would be reported as lost, which the controller, told, ignores.
            log.error("log.not_written", job=job_id, attempt=attempt, error=error.strerror)
        self._table.end(ended)
        self._jobs.pop((job_id, attempt), None)
        log.info("job.ended", job=job_id, attempt=attempt, exit_code=exit_code, reason=reason)
        self._reports.changed()
        if not self._table.running():
            self._quiet.set()

    async def _stop(self) -> None:
        """End every job by the ladder, then tell; each step has its own limit."""
        log.info("worker.ending", running=len(self._table.running()))
        self._kill(signal.SIGTERM)
        await self._settled(self._config.stop_grace_s)
        self._kill(signal.SIGKILL)
        await self._settled(1.0)
        await self._disk.soon(lambda: kill_marked(self._disk.mark, deadline_s=1.0))
        await self._reports.flush(LAST_REPORT_S)

    def _kill(self, number: signal.Signals) -> None:
        for key, job in self._jobs.items():
            self._signalled.add(key)
            job.signal(number)
            if number is signal.SIGTERM:
                job.signal(signal.SIGCONT)

    async def _settled(self, limit_s: float) -> None:
        self._quiet.clear()
        if self._table.running():
            try:
                await asyncio.wait_for(self._quiet.wait(), limit_s)
            except TimeoutError:
                pass  # the next rung follows


async def _for_ever(act: Coroutine[Any, Any, None]) -> None:
    await act
    raise AssertionError("what must run as long as the worker ended by itself")
