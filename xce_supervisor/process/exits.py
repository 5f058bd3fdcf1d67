"""Notices that processes end, and collects them: a pidfd per child in the event loop, and every orphan that falls to us.

Three facts of the kernel shape this file. A pidfd that is closed while it is still in the poller can fire for the next child that
gets its slot, so the reader is always taken out first; and a wake-up proves nothing, so every wait is a WNOHANG one. SIGCHLD
signals are merged, so one of them may stand for any number of exits. And uvloop refuses a handler for SIGCHLD, so the
signal is blocked and read from a signalfd, which costs nothing while nobody dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from xce_supervisor.core.words import Identity
from xce_supervisor.process.births import Births
from xce_supervisor.process.identity import open_pidfd, read_identity, read_stat
from xce_supervisor.process.table import own_children

_PR_SET_CHILD_SUBREAPER = 36
_SIGSET_BYTES = 128
_SWEEP_S = 0.05  # S19 gives an orphan a second
_SIGNAL_RECORDS = 64 * 128  # struct signalfd_siginfo is 128 bytes


@dataclass(frozen=True, slots=True)
class Exited:
    """One process is gone.

    code: exit code, or None. signal: the number of the signal that ended it, or None. Both None: nobody can tell, because it was
    not our child (adopted after a crash of the supervisor). core: it left a core dump.
    """

    identity: Identity
    code: int | None = None
    signal: int | None = None
    core: bool = False

    @property
    def known(self) -> bool:
        """Is the exit status known?"""
        return self.code is not None or self.signal is not None

    @property
    def text(self) -> str:
        """The exit in words, for events and status."""
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}{', core dumped' if self.core else ''}"
        return "ended, status unknown" if self.code is None else f"exit code {self.code}"


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15, and the number itself for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True)
class _Watch:
    identity: Identity
    fd: int
    callback: Callable[[Exited], None]


class Exits:
    """Watches children, and with `reap_orphans` everything else that dies as our child. All methods: the loop's thread.

    births: shared with `spawn`, so that a child that dies at birth is not mistaken for an orphan.
    on_orphan: told of each orphan that was collected; a line in a debug log, nothing more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        births: Births | None = None,
        on_orphan: Callable[[Exited], None] | None = None,
    ) -> None:
        self._loop = loop
        self.births = births or Births()
        self._on_orphan = on_orphan
        self._watches: dict[int, _Watch] = {}  # by pid
        self._signals = -1
        self._sweeping: asyncio.TimerHandle | None = None
        self._end_listening: Callable[[], None] = _nothing
        self._seen: dict[int, int] = {}  # zombies that nobody claims, to the births begun at their first sight

    def reap_orphans(self) -> None:
        """Become the reaper of everything below us: child subreaper, and SIGCHLD read in the loop (docs/rules.md S19).

        Call it in the main thread BEFORE any other thread starts (lanes included), because a thread that does not block SIGCHLD
        would swallow it. Nothing else in this process may start or wait for children, `subprocess` included.

        Raises OSError when the kernel refuses.
        """
        # An inherited "ignore" would make the kernel reap for us and throw every exit status away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot become the child subreaper (prctl)")
        wanted = ctypes.create_string_buffer(_SIGSET_BYTES)
        libc.sigemptyset(wanted)
        libc.sigaddset(wanted, int(signal.SIGCHLD))
        fd = libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "cannot read SIGCHLD from a descriptor (signalfd)")
        self._signals = fd
        self._loop.add_reader(fd, self._on_sigchld)
        self._end_listening = self.births.when_over(self._on_birth_over)
        self._sweep()  # what died before we listened

    def watch(self, identity: Identity, callback: Callable[[Exited], None]) -> None:
        """Call `callback` on the loop, exactly once, when that process has ended; its zombie is collected by then.

        A process that is gone already, or was never ours, is told with an unknown status, also through the loop.
        """
        former = self._watches.get(identity.pid)
        if former is not None:
            if former.identity == identity:
                raise AssertionError(f"process {identity.pid} is watched already")
            self._drop(former)  # not our child, gone, and its pid was given out again before the loop saw its end
            self._loop.call_soon(former.callback, Exited(former.identity))
        try:
            # A child that nobody has waited for keeps its pid, so ours need no second look; others' pids may be used again.
            fd = os.pidfd_open(identity.pid) if self.births.claimed(identity.pid) else open_pidfd(identity)
        except ProcessLookupError:
            self.births.release(identity.pid)
            self._loop.call_soon(callback, Exited(identity))
            return
        self._watches[identity.pid] = _Watch(identity, fd, callback)
        self._loop.add_reader(fd, self._on_readable, identity.pid)
        self.births.release(identity.pid)

    def unwatch(self, identity: Identity) -> None:
        """Forget a process; its callback will not be called. No-op when it is not watched."""
        watch = self._watches.get(identity.pid)
        if watch is not None and watch.identity == identity:
            self._drop(watch)

    def close(self) -> None:
        """Forget everything and give back all descriptors. Children go on."""
        for watch in list(self._watches.values()):
            self._drop(watch)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        if self._signals >= 0:
            self._end_listening()
            self._loop.remove_reader(self._signals)
            os.close(self._signals)
            self._signals = -1

    @property
    def watched(self) -> int:
        """How many processes are watched."""
        return len(self._watches)

    def _drop(self, watch: _Watch) -> None:
        """Reader first, then close: the other order can wake the next owner of the descriptor (see the head of this file)."""
        del self._watches[watch.identity.pid]
        self._loop.remove_reader(watch.fd)
        os.close(watch.fd)

    def _on_readable(self, pid: int) -> None:
        watch = self._watches.get(pid)
        if watch is not None:
            self._collect(watch)

    def _collect(self, watch: _Watch) -> bool:
        """Take the status without waiting. Returns False when the process has not ended: a wake-up proves nothing."""
        try:
            info = os.waitid(os.P_PIDFD, watch.fd, os.WEXITED | os.WNOHANG)
            if info is None:
                return False
            exited = _exited(watch.identity, info)
        except ChildProcessError:  # not our child: a survivor of a former supervisor
            exited = Exited(watch.identity)
        self._drop(watch)
        watch.callback(exited)
        return True

    def _on_sigchld(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals, _SIGNAL_RECORDS)
        if self._sweeping is None:  # watched children are told of by their pidfds; orphans are in no hurry, and come in crowds
            self._sweeping = self._loop.call_later(_SWEEP_S, self._on_sweep)

    def _on_sweep(self) -> None:
        self._sweeping = None
        self._sweep()

    def _on_birth_over(self) -> None:
        """In a lane's thread: look again at zombies that might have been the child of that birth."""
        if self._seen:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reaps any more
                self._loop.call_soon_threadsafe(self._sweep)

    def _sweep(self) -> None:
        """Collect every zombie that is ours: watched ones through their watch, orphans at once, doubtful ones later."""
        if self._signals < 0:
            return
        while (pid := _next_zombie()) and self._settle(pid):
            pass
        if pid:  # the kernel shows the same one again and again until it is collected: look at all of them instead
            for each in _zombies():
                self._settle(each)
            self._seen = {each: mark for each, mark in self._seen.items() if _is_zombie(each)}

    def _settle(self, pid: int) -> bool:
        """Deal with one zombie. Returns False when it has to stay for now, because a lane may be about to claim it."""
        watch = self._watches.get(pid)
        if watch is not None:
            return self._collect(watch)
        mark = self._seen.setdefault(pid, self.births.mark())
        if not self.births.over_since(mark) or self.births.claimed(pid):
            return False
        del self._seen[pid]
        self._collect_orphan(pid)
        return True

    def _collect_orphan(self, pid: int) -> None:
        identity = read_identity(pid)
        try:
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        if info is not None and identity is not None and self._on_orphan is not None:
            self._on_orphan(_exited(identity, info))


def _nothing() -> None:
    """Stand in for a listener that was never registered."""


def _next_zombie() -> int:
    """Return a child that has ended and leave it there; 0 when there is none."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return 0 if info is None else info.si_pid


def _zombies() -> list[int]:
    return [pid for pid in own_children() if _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.dead and stat.ppid == os.getpid()


def _exited(identity: Identity, info: os.waitid_result) -> Exited:
    if info.si_code == os.CLD_EXITED:
        return Exited(identity, code=info.si_status)
    return Exited(identity, signal=info.si_status, core=info.si_code == os.CLD_DUMPED)
