"""The control socket: how verbs ask the running supervisor (docs/rules.md S22).

One request a line, {"verb": ..., "args": {...}}, answered by one line, {"ok": true, "result": ...} or {"ok": false, "error": ...,
"code": ...}. The socket is 0600. Nothing that a client does delays anything else: clients, bytes and time are bounded, an idle
client makes room for a new one, and a client that does not read its answer is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from xce_supervisor.supervisor.asking import Refused as Refused
from xce_supervisor.supervisor.asking import socket_name

CLIENTS_MAX = 32
REQUEST_BYTES_MAX = 65_536
IDLE_S = 10.0  # without a whole request
ANSWER_S = 5.0  # without having taken the answer
BACKLOG = 128


class Caller(Struct, frozen=True, kw_only=True):
    """Who asks, as the kernel tells it."""

    pid: int
    uid: int
    gid: int


# Given verb, arguments and caller; returns at once (answers come from memory) what msgspec can encode, or raises Refused.
Handler = Callable[[str, dict[str, Any], Caller], Any]


class _Request(Struct, frozen=True):
    verb: str
    args: dict[str, Any] = field(default_factory=dict)


class ControlServer:
    """The listening end. All methods belong to the loop's thread."""

    def __init__(
        self, path: Path, handler: Handler, *, clients_max: int = CLIENTS_MAX, idle_s: float = IDLE_S, answer_s: float = ANSWER_S
    ) -> None:
        self._path = path
        self._handler = handler
        self._clients_max = clients_max
        self.idle_s = idle_s
        self.answer_s = answer_s
        self._server: asyncio.AbstractServer | None = None
        self._inode: tuple[int, int] | None = None
        self._clients: dict[_Client, None] = {}  # in order of arrival
        self.counters = {"control.accepted": 0, "control.evicted": 0, "control.refused": 0, "control.recreated": 0}

    async def start(self) -> None:
        """Listen. Replaces a stale socket file in one step. Raises OSError where the folder cannot be used."""
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            os.fchmod(listening.fileno(), 0o600)  # before it has a name: nobody else can connect, not even for a moment
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            with socket_name(temporary) as name:
                listening.bind(name)
            listening.listen(BACKLOG)
            os.rename(temporary, self._path)
        except OSError:
            listening.close()
            raise
        before = self._server
        seen = os.stat(self._path)
        self._inode = (seen.st_dev, seen.st_ino)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Client(self), sock=listening)
        if before is not None:
            before.close()

    async def ensure(self) -> str:
        """Make the socket anew if somebody removed or replaced it.

        One `stat`; meant to ride on something that the driver does anyway, so that it costs no wake-up. Returns "" when all is
        well, else what was found, or why it could not be mended (it is tried again next time).
        """
        try:
            seen = os.stat(self._path)
            if (seen.st_dev, seen.st_ino) == self._inode:
                return ""
            found = f"{self._path} was replaced"
        except FileNotFoundError:
            found = f"{self._path} was removed"
        except OSError as error:
            found = f"{self._path} cannot be seen: {error.strerror}"
        try:
            await self.start()
        except OSError as error:
            return f"{found}, and cannot be made anew: {error.strerror}"
        self.counters["control.recreated"] += 1
        return found

    async def close(self) -> None:
        """Close all clients, stop listening and remove the socket file if it is still ours."""
        for client in list(self._clients):
            client.cut()
        if self._server is not None:
            self._server.close()
            self._server = None
        with contextlib.suppress(OSError):
            seen = os.stat(self._path)
            if (seen.st_dev, seen.st_ino) == self._inode:
                os.unlink(self._path)
        await asyncio.sleep(0)  # transports close on the loop's next turn

    def _joined(self, client: _Client) -> None:
        self.counters["control.accepted"] += 1
        if len(self._clients) >= self._clients_max:
            # Requests are answered at once, so whoever is still here asks nothing: the oldest makes room.
            self.counters["control.evicted"] += 1
            next(iter(self._clients)).cut()
        self._clients[client] = None

    def _left(self, client: _Client) -> None:
        self._clients.pop(client, None)

    def _answer(self, line: bytes, caller: Caller) -> bytes:
        try:
            request = msgspec.json.decode(line, type=_Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.counters["control.refused"] += 1
            return _no('not a request: write {"verb": ..., "args": {...}} on one line', "malformed")
        try:
            result = self._handler(request.verb, request.args, caller)
        except Refused as refused:
            self.counters["control.refused"] += 1
            return _no(refused.text, refused.code)
        return msgspec.json.encode({"ok": True, "result": result}) + b"\n"


def _no(text: str, code: str) -> bytes:
    return msgspec.json.encode({"ok": False, "error": text, "code": code}) + b"\n"


class _Client(asyncio.Protocol):
    """One connection: reads one line at a time, and the next only after the answer was taken."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from asyncio's
        self._transport.set_write_buffer_limits(high=0)  # "writable" then means that the kernel took the whole answer
        self._server._joined(self)
        self._arm(self._server.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._transport = None
        self._server._left(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._work()

    def eof_received(self) -> bool:
        return False  # an answer that is still in the buffer is sent before the transport closes

    def pause_writing(self) -> None:
        self._writable = False
        self._arm(self._server.answer_s)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._arm(self._server.idle_s)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._work()

    def cut(self) -> None:
        """End the connection without waiting for the peer."""
        if self._transport is not None:
            self._transport.abort()

    def _work(self) -> None:
        while self._writable and self._transport is not None and not self._transport.is_closing():
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                break
            self._buffer = rest
            self._arm(self._server.idle_s)
            if line.strip():
                self._transport.write(self._server._answer(bytes(line), self._caller(self._transport)))
        if len(self._buffer) > REQUEST_BYTES_MAX and self._transport is not None:
            self._transport.write(_no(f"a request is longer than {REQUEST_BYTES_MAX} bytes", "limit"))
            self._transport.close()

    def _caller(self, transport: asyncio.Transport) -> Caller:
        peer = transport.get_extra_info("socket")
        pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return Caller(pid=pid, uid=uid, gid=gid)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cut)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
