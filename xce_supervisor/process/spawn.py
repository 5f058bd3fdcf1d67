"""Starts a child: blocking work for a lane, exact about what went wrong (docs/rules.md S13, S18; docs/decisions/0002-spawn.md).

`os.posix_spawn` cannot set a working directory or a umask; the lane thread has left the file-system context that threads
share (`unshare(CLONE_FS)`), so it sets its own and the child inherits them. Resource limits and users are set by util-linux tools
that are executed before the program, only where the unit asks for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from xce_supervisor.core.words import Identity
from xce_supervisor.process import privilege, program
from xce_supervisor.process.births import Births
from xce_supervisor.process.failure import SpawnError, signature
from xce_supervisor.process.identity import read_identity
from xce_supervisor.process.stdio import Append, Given, Inherit, Journal, Null, Stdio, Warn, open_stream

__all__ = [
    "Append",
    "Given",
    "Inherit",
    "Journal",
    "Null",
    "SpawnError",
    "SpawnSpec",
    "Stdio",
    "seal_descriptors",
    "signature",
    "spawn",
]

_CLONE_FS = 0x200
_CLOSE_RANGE_CLOEXEC = 4
_FIRST_EXTRA_FD = 3
_ALL_SIGNALS = signal.valid_signals()  # asking anew takes a third as long as the whole spawn
_NULL = Null()


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """What to start, wholly given: nothing of the supervisor's own environment, directory or mask is passed on.

    argv: argv[0] is a path, or a name looked up in env["PATH"]. env: exactly the child's environment (no NOTIFY_SOCKET,
    WATCHDOG_* or LISTEN_* unless it is in here). cwd: absolute. limits: resource name of prlimit(1), e.g. "nofile", to
    (soft, hard), -1 for unlimited. user, group: names or numbers, None to stay who we are. fds: (ours, the child's) with the
    child's >= 3, all different. session: True puts it into a session of its own, else into a process group of its own.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    umask: int = 0o022
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    user: str | None = None
    group: str | None = None
    stdin: Stdio = _NULL
    stdout: Stdio = _NULL
    stderr: Stdio = _NULL
    fds: tuple[tuple[int, int], ...] = ()
    session: bool = True


def _silent(_text: str) -> None:
    """Take a warning and drop it: for callers that gave no `warn`."""


def _nothing() -> None:
    """Stand in for an `at_birth` that nobody gave."""


def spawn(
    spec: SpawnSpec, births: Births | None = None, warn: Warn = _silent, at_birth: Callable[[], object] = _nothing
) -> Identity:
    """Start the program and return who it is. Blocks: call it in a lane's thread, never in the main one.

    births: where the birth is announced, so that the reaper of orphans leaves it alone; give the one of `Exits`.
    warn: called in this thread with what went less well than asked (output that goes elsewhere). at_birth: called in this thread
    when everything that may take long is done and the process is about to exist.

    Raises SpawnError, which says whether trying again helps. Any other exception is a bug.
    """
    _check(spec)
    births = births or Births()
    own_context = _own_context()
    with _context_restored() if own_context else contextlib.nullcontext():
        plan = _prepare(spec, own_context)
        with _streams(spec, warn) as actions:
            at_birth()
            with births.expected():
                _close_on_exec()
                if own_context:
                    os.umask(spec.umask)
                pid = _exec(plan, spec, actions)
                identity = read_identity(pid)
                if identity is None:
                    raise AssertionError(
                        f"child {pid} was reaped before it was watched: SIGCHLD is ignored, or another reaper runs"
                    )
                births.claim(identity)
    return identity


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is executed, and what might be wrong with it."""

    path: str
    argv: list[str]
    doubt: SpawnError | None


def _prepare(spec: SpawnSpec, own_context: bool) -> _Plan:
    """Do what may take long or fail: enter the directory, read the program, find the tools."""
    _enter(spec, own_context)
    path = program.find(spec.argv[0], spec.env)
    if not own_context and not path.startswith("/"):
        path = os.path.join(spec.cwd, path)
    doubt = program.examine(path)
    chain = [*_context_chain(spec, own_context), *privilege.limit_chain(spec.limits), *privilege.user_chain(spec, path)]
    if not chain:
        return _Plan(path, list(spec.argv), doubt)
    if doubt is not None and not program.foreign_formats():
        raise doubt  # the tools would run the file as a shell script instead of refusing it
    return _Plan(chain[0], [*chain, path, *spec.argv[1:]], doubt)


def _exec(plan: _Plan, spec: SpawnSpec, actions: list[tuple[int, int, int]]) -> int:
    try:
        return os.posix_spawn(
            plan.path,
            plan.argv,
            spec.env,
            file_actions=actions,
            setsigdef=_ALL_SIGNALS,
            setsigmask=[],
            **({"setsid": True} if spec.session else {"setpgroup": 0}),
        )
    except OSError as error:
        number = error.errno or 0
        if plan.doubt is not None and number == errno.ENOEXEC:
            raise plan.doubt from error
        where = "argv" if number == errno.E2BIG else "exec"
        raise SpawnError(where, plan.path, number) from error
    except ValueError as error:
        raise SpawnError("argv", "", errno.EINVAL, detail=str(error)) from error


def _check(spec: SpawnSpec) -> None:
    """Refuse what no kernel would take. The unit file is checked before; this guards the border."""
    targets = [child for _, child in spec.fds]
    if not spec.argv or not spec.argv[0]:
        raise SpawnError("argv", "", errno.EINVAL, detail="no program named")
    if not spec.cwd.startswith("/"):
        raise SpawnError("cwd", spec.cwd, errno.EINVAL, detail="not an absolute directory")
    if len(set(targets)) != len(targets) or any(target < _FIRST_EXTRA_FD for target in targets):
        raise SpawnError("argv", "", errno.EINVAL, detail=f"declared descriptors {targets} must be different and at least 3")


def _enter(spec: SpawnSpec, own_context: bool) -> None:
    """Go to the child's working directory; without a context of our own only look whether one could."""
    try:
        if own_context:
            os.chdir(spec.cwd)
        elif not stat.S_ISDIR(os.stat(spec.cwd).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        elif not os.access(spec.cwd, os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SpawnError("cwd", spec.cwd, error.errno or 0) from error
    except ValueError as error:
        raise SpawnError("cwd", "", errno.EINVAL, detail=f"{error} in {spec.cwd!r}") from error


def _context_chain(spec: SpawnSpec, own_context: bool) -> list[str]:
    """Where unshare(2) is forbidden (some containers), a shell sets directory and umask before the program."""
    if own_context:
        return []
    script = 'cd "$1" && umask "$2" && shift 2 && exec "$@"'
    return ["/bin/sh", "-c", script, "sh", spec.cwd, f"{spec.umask:04o}"]


@contextlib.contextmanager
def _streams(spec: SpawnSpec, warn: Warn) -> Iterator[list[tuple[int, int, int]]]:
    """Open what the child gets and yield the file actions. All sources lie above all targets, so no dup2 hits a later source."""
    above = max([2, *(child for _, child in spec.fds)]) + 1
    with contextlib.ExitStack() as opened:
        actions = []
        wanted = [(0, spec.stdin), (1, spec.stdout), (2, spec.stderr)]
        try:
            sources: dict[int, int] = {}
            for number, stdio in wanted:
                if number == 2 and stdio == spec.stdout and not isinstance(stdio, Inherit):
                    sources[2] = sources[1]  # one open file: one position, one journal stream
                else:
                    sources[number] = _owned(opened, open_stream(stdio, number, warn))
            sources.update({child: ours for ours, child in spec.fds})
            for target, source in sources.items():
                lifted = source if source >= above else _owned(opened, int(fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, above)))
                actions.append((os.POSIX_SPAWN_DUP2, lifted, target))
        except OSError as error:
            raise SpawnError("output", "", error.errno or 0, permanent=error.errno == errno.EBADF) from error
        yield actions


def _owned(opened: contextlib.ExitStack, fd: int) -> int:
    opened.callback(os.close, fd)
    return fd


@contextlib.contextmanager
def _context_restored() -> Iterator[None]:
    """Give the thread its own umask and a neutral directory back: its next files are our own, and no mount stays busy."""
    before = os.umask(0o077)
    os.umask(before)
    try:
        yield
    finally:
        os.umask(before)
        os.chdir("/")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


_thread = threading.local()


def _own_context() -> bool:
    """Give this thread its own working directory and umask, once. Returns False where the kernel forbids it.

    Refuses the main thread: it would part from all others, whose relative paths would then mean something else.
    """
    known: bool | None = getattr(_thread, "own_context", None)
    if known is None:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("spawn runs in a lane's thread, not in the main one")
        known = _libc().unshare(_CLONE_FS) == 0
        _thread.own_context = known
    return known


def seal_descriptors() -> None:
    """Put our own descriptors in order: call it once, at start, before any is opened (docs/rules.md S18).

    Whoever started us may have left inheritable descriptors (7, 10, a lock, a port): all above 2 are closed on exec from now on.
    A closed standard stream is opened to /dev/null, or the next file of ours would become it, and the child's.
    """
    for fd in (0, 1, 2):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)  # the lowest free number, which is this one
            os.set_inheritable(fd, True)
    _close_on_exec()


def _close_on_exec() -> None:
    """Mark every descriptor above 2. One system call, so it is made again before each spawn: a C library may have opened more.

    Falls back to /proc/self/fd on kernels before 5.11.
    """
    if _libc().close_range(ctypes.c_uint(3), ctypes.c_uint(0xFFFFFFFF), ctypes.c_int(_CLOSE_RANGE_CLOEXEC)) == 0:
        return
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.set_inheritable(int(name), False)
