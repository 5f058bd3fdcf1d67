"""Starting one job's command: its own session, default signals, output kept in a bounded file, its end through a pidfd.

The command is chained through `setpriv --pdeathsig KILL` where util-linux offers it, so that the kernel kills a job's leader
when the worker is killed -9. The parent-death signal belongs to the thread that spawned, therefore `start` is called on the
loop's own thread and never in a pool. A job's environment carries XCE_WORKER_MARK, by which `worker_survivors` knows it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

log = structlog.get_logger()

READ_CHUNK = 64 * 1024
# What is still in the pipe when a job ends: the kernel's buffer, which F_SETPIPE_SZ may raise to 1 MiB.
LAST_READ_MAX = 1024 * 1024
PIPE_BYTES = 256 * 1024
TRUNCATED = b"\n[xce: output cut here]\n"
# Signals that Python ignores, or that a parent may have ignored or blocked, must be as the kernel makes them (S18).
ALL_SIGNALS = tuple(sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}))
# What belongs to the worker alone and would confuse a job, or let it speak in the worker's name.
NOT_INHERITED = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "XCE_SPAWN_TOKEN",
)


class CannotStart(Exception):
    """The command was not started. The text says why, for the job's reason."""


class RunningJob:
    """One started command. `ended` is called once, on the loop, with the exit code (128 + signal if killed by one)."""

    def __init__(self, pid: int, pidfd: int, output: OutputFile, pipe: int, ended: Callable[[int], None]) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._pidfd = pidfd
        self._pipe = pipe
        self._output = output
        self._ended = ended
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(pipe, self._on_output)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the job's process group. The leader is not reaped before `ended`, so the number is still its own."""
        if self._pidfd >= 0:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass  # nobody of the group is left
            except PermissionError:
                log.warning("job.signal_refused", pid=self.pid, signal=int(number))

    def _on_output(self) -> None:
        try:
            chunk = os.read(self._pipe, READ_CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self._output.write(chunk)
        else:
            self._close_pipe()

    def _on_exit(self) -> None:
        found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return  # a wake-up is no promise
        # The zombie leader keeps the group's number from being given to others: the rest of the group is hit, nobody else.
        self.signal(signal.SIGKILL)
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._drain()
        self._output.close()
        exited = found.si_code == os.CLD_EXITED
        self._ended(found.si_status if exited else 128 + found.si_status)

    def _drain(self) -> None:
        """Take what the pipe holds; not to its end, which a descendant of another session could delay for ever."""
        taken = 0
        while self._pipe >= 0 and taken < LAST_READ_MAX:
            try:
                chunk = os.read(self._pipe, READ_CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            taken += len(chunk)
            self._output.write(chunk)
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


class OutputFile:
    """A file of at most `limit` bytes; more is dropped and marked, and so it is on a full disk: no job waits for its output."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._left = limit
        self._marked = False
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, chunk: bytes) -> None:
        """Append what fits."""
        kept = chunk[: self._left]
        self._left -= len(kept)
        if len(kept) < len(chunk) and not self._marked:
            self._marked = True
            kept += TRUNCATED
        if not kept:
            return
        try:
            os.write(self._handle, kept)
        except OSError as error:
            self._left, self._marked = 0, True
            log.warning("output.dropped", path=str(self._path), errno=errno.errorcode.get(error.errno or 0, "?"))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def start(
    command: Sequence[str], environment: Mapping[str, str], output: Path, output_bytes_max: int, ended: Callable[[int], None]
) -> RunningJob:
    """Start `command`; call it on the loop's thread. Raises CannotStart: then nothing runs, and `ended` is not called."""
    argv = _argv(command, environment)
    try:
        sink = OutputFile(output, output_bytes_max)
    except OSError as error:
        raise CannotStart(f"cannot write {output}: {error.strerror}") from error
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(read_end, False)
        _widen(read_end)
        pid = _spawn(argv, environment, write_end)
        pidfd = _watchable(pid)
    except OSError as error:
        os.close(read_end)
        sink.close()
        raise CannotStart(
            f"cannot start {command[0]}: {error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
        ) from error
    finally:
        os.close(write_end)
    return RunningJob(pid, pidfd, sink, read_end, ended)


def keep_descriptors() -> None:
    """Make every descriptor that this process was started with its own: no job inherits it. Call it once, at the start."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass  # the listing's own, closed by now


def job_environment(job_id: str, attempt: int, mark: str, worker: str) -> dict[str, str]:
    """Return the environment of a job: the worker's, less what is the worker's alone, plus what tells the job who it is."""
    environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return environment | {
        "XCE_JOB_ID": job_id,
        "XCE_JOB_ATTEMPT": str(attempt),
        "XCE_WORKER": worker,
        "XCE_WORKER_MARK": mark,
    }


def _argv(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the argument vector, chained through setpriv if it is there. Raises CannotStart if the program cannot be found.

    setpriv would say "not found" by exit code 127 alone, which a job may also mean by itself; so the program is looked up here.
    """
    if not command or not command[0] or any("\0" in part for part in command):
        raise CannotStart("the command is empty or holds a NUL byte")
    program = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if program is None:
        raise CannotStart(f"cannot start {command[0]}: no such program, or not executable (PATH={environment.get('PATH', '')})")
    setpriv = shutil.which("setpriv")
    chain = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    return [*chain, program, *command[1:]]


def _spawn(argv: list[str], environment: Mapping[str, str], write_end: int) -> int:
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
    ]
    return os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=ALL_SIGNALS)


def _watchable(pid: int) -> int:
    """Return a pidfd of the new child. Raises OSError (out of descriptors): a child that nobody watches is ended first."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # over the user's pipe quota: 64 KiB do as well
