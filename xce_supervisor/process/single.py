"""One supervisor per controller: a lock on a file that no child inherits (docs/rules.md S16).

The lock is flock(2) on an open file that is closed on exec; the kernel gives it back when the process ends, however it ends.
The file holds the winner's pid for the loser to read and is never removed, because a removed file can be locked twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from pathlib import Path

from xce_supervisor.process.identity import read_stat

_READ_WAIT_S = 0.5


class AlreadyRunning(Exception):
    """Another live process holds the lock. pid: who it is, None when it has not said so. path: the lock file."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.path = path
        self.pid = pid
        who = f"pid {pid}" if pid is not None else "a process that has not written its pid yet"
        super().__init__(f"already running: {who} holds {path}; stop that one first")


class Single:
    """The lock, held. Use `acquire`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; the file stays, empty. No-op the second time."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a full or read-only disk must not keep the lock held
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Single:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def acquire(path: Path) -> Single:
    """Take the lock or fail at once. Blocks for half a second at most, and only while it loses.

    Raises AlreadyRunning (the loser has touched nothing), OSError when the file cannot be made or locked.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _winner(fd)
            os.close(fd)
            raise AlreadyRunning(path, pid) from None
        except OSError:
            os.close(fd)
            raise
        if _is_still(path, fd):
            break
        os.close(fd)  # somebody removed or replaced the file between opening and locking it
    with contextlib.suppress(OSError):  # a full disk costs a rival our pid, not us the lock
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return Single(path, fd)


def _is_still(path: Path, fd: int) -> bool:
    try:
        there, ours = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _winner(fd: int) -> int | None:
    """Read the winner's pid. It writes it right after locking; until then the file holds nothing, or a dead predecessor's."""
    give_up = time.monotonic() + _READ_WAIT_S
    while True:
        text = os.pread(fd, 32, 0).strip()
        if text.isdigit() and read_stat(int(text)) is not None:
            return int(text)
        if time.monotonic() > give_up:
            return None
        time.sleep(0.005)


class Claim:
    """A name that one process of this host holds at a time. Use `claim`."""

    def __init__(self, held: socket.socket) -> None:
        self._held = held

    def attend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let rivals learn who we are for as long as the loop runs; without it only the first few of them do."""
        loop.add_reader(self._held.fileno(), self._turn_away)

    def _turn_away(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._held.accept()[0].close()  # the kernel has told the rival our pid by now

    def release(self) -> None:
        """Give the name back. No-op the second time; the end of the process does it too."""
        self._held.close()


def claim(name: str) -> Claim:
    """Take a name for this process, or fail at once: two state directories do not make two controllers out of one.

    The name is an abstract socket's: it belongs to the network namespace in which the controller's address means the same to all,
    leaves no file behind, and no child inherits it.

    Raises AlreadyRunning with the pid of the holder.
    """
    address = b"\0xce-supervisor/" + name.encode("utf-8", "surrogateescape")[:90]
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        held.bind(address)
        held.listen(8)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise AlreadyRunning(Path(name), _holder(address)) from None
    return Claim(held)


def _holder(address: bytes) -> int | None:
    """Return who listens on a name, as the kernel tells it; None when it ended meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as asked:
        try:
            asked.connect(address)
        except OSError:
            return None
        return int(struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])
