"""A worker's directory: one process at a time, a mark for its jobs, their output, and the log behind one thread.

DIR/worker.lock   locked while a worker runs on the directory; no job inherits it
DIR/worker.mark   a random number, made once, that every process of ours carries in its environment
DIR/jobs.log      see worker_log
DIR/output/       JOB.ATTEMPT.out, bounded in size and number
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import structlog

from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed.worker_log import JobLog

log = structlog.get_logger()

SAFE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
MARK = re.compile(r"[0-9a-f]{32}")
T = TypeVar("T")


class DirectoryTaken(ConfigError):
    """Another worker runs on the directory."""


class WorkerDisk:
    """The open directory. Blocking work goes through `soon`, one piece after the other."""

    def __init__(self, directory: Path, output_files_max: int) -> None:
        """Take the directory (made if missing).

        Raises:
            DirectoryTaken: another worker has it.
            ConfigError: it cannot be used (permissions, full disk, no directory).
        """
        self._output = directory / "output"
        self._output_files_max = output_files_max
        self._lock = _locked(directory)
        try:
            self._output.mkdir(mode=0o700, exist_ok=True)
            self.mark = _mark(directory / "worker.mark")
            self.log, self.remembered = JobLog.open(directory)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(directory, error) from error
        except ConfigError:
            os.close(self._lock)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker-disk")
        self._made = 0

    async def soon(self, act: Callable[[], T]) -> T:
        """Do something blocking in the directory's thread, in the order asked. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    def output_path(self, job_id: str, attempt: int) -> Path:
        """Return where the output of an attempt goes. A job id that is no safe file name is hashed."""
        stem = job_id if SAFE_ID.fullmatch(job_id) else "id-" + sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self._output / f"{stem}.{attempt}.out"

    def sweep_output(self) -> None:
        """Remove the oldest output beyond the bound; looked at once in 50 calls. Blocking."""
        self._made += 1
        if self._made % 50 != 1:
            return
        try:
            files = sorted(self._output.glob("*.out"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[: max(0, len(files) - self._output_files_max)]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("output.not_swept", path=str(self._output), error=error.strerror)

    def close(self) -> None:
        """Finish what was asked, then let the directory go. Blocking, briefly."""
        self._thread.shutdown(wait=True)
        self.log.close()
        os.close(self._lock)


def _locked(directory: Path) -> int:
    """Return the descriptor that holds the lock of the directory, which is made if missing."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DirectoryTaken(f"another worker runs on {directory}: end it, or give this one a directory of its own") from None
    return handle


def _unusable(directory: Path, error: OSError) -> ConfigError:
    where = error.filename or directory
    return ConfigError(f"cannot use the worker directory {directory}: {where}: {error.strerror}; give rights or make room")


def _mark(path: Path) -> str:
    """Return the directory's mark, made once. One that is damaged is replaced: no process of ours can carry it."""
    try:
        found = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        found = ""
    if MARK.fullmatch(found):
        return found
    mark = uuid.uuid4().hex
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(mark + "\n", "ascii")
    os.replace(aside, path)
    return mark
