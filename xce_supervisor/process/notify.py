"""What children tell about themselves: sd_notify over a datagram socket per child, and the client for our own programs.

A datagram is believed only when the kernel says (SO_PASSCRED) that a process of the child's own tree sent it. It may hold
anything, so sizes, counts and rates are bounded, and nothing in it is evaluated. Listening begins after the spawn; what the
child sends before waits in the socket, so nothing is lost and nothing is judged before the tree is known.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DATAGRAM_BYTES_MAX = 8192
_LINES_MAX = 64
_STATUS_CHARS_MAX = 512
_VALUE_CHARS_MAX = 1024
_PATH_BYTES_MAX = 107  # sun_path, less its final NUL
_PER_TURN_MAX = 16  # datagrams read before the loop gets a turn
_PER_PAUSE_MAX = 256  # datagrams read in one period; a flood then waits in the sender
_PERIOD_S = 0.25
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_KEY = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_OWN = "X_XCE_"


@dataclass(frozen=True, slots=True)
class Notice:
    """One datagram. pid: its sender. extra: the X_XCE_* values, by their full names."""

    pid: int
    ready: bool = False
    stopping: bool = False
    reloading: bool = False
    watchdog: bool = False
    status: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


def parse(data: bytes, pid: int) -> Notice | None:
    """Return what a datagram says, None when it says nothing that we know. Never raises."""
    values: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").split("\n")[:_LINES_MAX]:
        key, equals, value = line.partition("=")
        if equals and _KEY.fullmatch(key):
            values[key] = _printable(value)
    extra = {key: value[:_VALUE_CHARS_MAX] for key, value in values.items() if key.startswith(_OWN)}
    status = values["STATUS"][:_STATUS_CHARS_MAX] if "STATUS" in values else None
    notice = Notice(
        pid=pid,
        ready=values.get("READY") == "1",
        stopping=values.get("STOPPING") == "1",
        reloading=values.get("RELOADING") == "1",
        watchdog=values.get("WATCHDOG") == "1",
        status=status,
        extra=extra,
    )
    return None if notice == Notice(pid) else notice


def _printable(text: str) -> str:
    """Replace control characters: the text goes to terminals and into logs."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


class NotifySocket:
    """The notify socket of one child. All methods belong to the loop's thread.

    refused: datagrams that came from a stranger, were too long or said nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, *, mode: int = 0o600) -> None:
        """Bind, at `path` in a directory of ours; what lies there is replaced. An abstract name is used when it is too long.

        mode: of the socket file; 0o666 for a child of another user (the sender is verified anyhow).

        Raises OSError naming the path.
        """
        self.refused = 0
        self._loop = loop
        self._path: Path | None = path
        self._contains: Callable[[int], bool] | None = None
        self._on_notice: Callable[[Notice], None] | None = None
        self._budget = _PER_PAUSE_MAX
        self._refill: asyncio.TimerHandle | None = None
        self._reading = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
                path.unlink(missing_ok=True)
                self._socket.bind(os.fsencode(path))
                os.chmod(path, mode)
                self.address = str(path)
            else:
                self._path = None
                self._socket.bind("")  # the kernel picks a free abstract name
                self.address = "@" + self._socket.getsockname()[1:].decode("ascii")
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot make the notify socket: {error.strerror}", str(path)) from error

    def listen(self, contains: Callable[[int], bool], on_notice: Callable[[Notice], None]) -> None:
        """Begin to read, or go on. contains: is this pid in the child's tree (`Tree.contains`)? on_notice: called on the loop."""
        self._contains, self._on_notice = contains, on_notice
        self._read()

    def hold(self) -> None:
        """Stop reading until `listen`: from before the spawn of the unit's next child until its tree knows it."""
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        self._pause()

    def close(self) -> None:
        """Stop reading and remove the socket."""
        self.hold()
        self._contains = self._on_notice = None
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _read(self) -> None:
        self._refill = None
        self._budget = _PER_PAUSE_MAX
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _on_readable(self) -> None:
        if self._refill is None:
            self._refill = self._loop.call_later(_PERIOD_S, self._on_period)
        for _ in range(_PER_TURN_MAX):
            if self._budget <= 0:
                self._pause()  # a flood: its sender waits, nobody else does
                return
            if not self._reading or not self._take():
                return
            self._budget -= 1

    def _on_period(self) -> None:
        self._refill = None
        self._read()

    def _take(self) -> bool:
        """Read one datagram. Returns False when there is none."""
        try:
            # Room for the credentials alone: descriptors that somebody attaches are closed by the kernel.
            data, ancillary, flags, _ = self._socket.recvmsg(
                DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        pid = 0
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(body) >= _CREDENTIALS.size:
                pid = _CREDENTIALS.unpack_from(body)[0]
            elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for (fd,) in struct.iter_unpack("i", body[: len(body) // 4 * 4]):
                    os.close(fd)
        notice = None if flags & socket.MSG_TRUNC else parse(data, pid)
        if notice is None or self._contains is None or self._on_notice is None or not (pid > 0 and self._contains(pid)):
            self.refused += 1
            return True
        self._on_notice(notice)
        return True


def sd_notify(address: str | None = None, **values: str | int) -> bool:
    """Tell our supervisor something, e.g. sd_notify(READY=1, STATUS="joined", X_XCE_ACTED=17). Never blocks.

    address: instead of the environment's NOTIFY_SOCKET. Returns False when there is none, or nobody takes it now.
    """
    where = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
    if not where.startswith(("/", "@")):
        return False
    target = b"\0" + os.fsencode(where[1:]) if where[0] == "@" else os.fsencode(where)
    text = "\n".join(f"{key}={_printable(str(value))}" for key, value in values.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as client:
        try:
            client.sendto(text.encode("utf-8", "replace"), target)
        except OSError:
            return False
    return True
