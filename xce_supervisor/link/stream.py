"""One socket's worth of frames: bytes in to whole frames, frames out through a bounded queue, one end with one reason."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import cast

from xce_supervisor.errors import PeerError
from xce_supervisor.link.limits import Budget, Limits
from xce_supervisor.wire.codec import Decoder, Incoming, MalformedFrame

_CHUNK_BYTES = 256 * 1024  # what is handed to the transport at once; the rest waits in our queue, where it is counted
_FLUSH_S = 1.0  # how long a graceful end waits for a peer that does not read


class _PerThread(threading.local):
    """Where a loop puts what it has read: one for all connections of a thread.

    The loop fills it and hands it over in one step, and what is handed over is copied at once. Without it both loops would get
    256 KiB from the system for every read, and give it back.
    """

    def __init__(self) -> None:
        self.received = memoryview(bytearray(128 * 1024))


_PER_THREAD = _PerThread()


class Stream(asyncio.BufferedProtocol):
    """The protocol object under a Connection. `on_end` is called once, with a reason, also if the connection never came up.

    Args:
        on_open: the transport is there; with TLS the handshake is done.
        on_frames: whole frames, in order; may raise MalformedFrame to end the connection.
    """

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        on_open: Callable[[asyncio.Transport], None],
        on_frames: Callable[[list[Incoming]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._on_open = on_open
        self._on_frames = on_frames
        self._on_end = on_end
        self._decoder = Decoder(limits.frame_bytes)
        self._into = _PER_THREAD.received
        self._received = 0  # of our bytes in the budget: parts of frames
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._reason = ""
        self._ending: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def ending(self) -> bool:
        """Is it over, or about to be?"""
        return bool(self._reason)

    @property
    def partial(self) -> bool:
        """Has a part of a frame arrived whose rest is missing?"""
        return self._received > 0

    # ---------------------------------------------------------------- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        self._on_open(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        if self._reason:
            return  # ending: what a peer still says changes nothing
        try:
            frames = self._decoder.feed(self._into[:nbytes].tobytes())
            held = self._decoder.buffered
            if held != self._received:
                within = self._budget.add(held - self._received)
                self._received = held
                if not within and held:
                    raise PeerError("the server's memory for unfinished frames and unread replies is used up")
            if frames:
                self._on_frames(frames)
        except PeerError as error:
            self.end(f"{'malformed: ' if isinstance(error, MalformedFrame) else ''}{error}")

    def eof_received(self) -> bool:
        self._reason = self._reason or "closed by the peer"
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._budget.add(-self._received - self._queued)
        self._received = self._queued = 0
        self._queue.clear()
        self._transport = None
        if not self._ended:
            self._ended = True
            self._on_end(self._reason or lost_reason(exc))

    # ---------------------------------------------------------------- what the connection calls

    def send(self, data: bytes) -> None:
        """Queue a whole frame.

        Raises:
            PeerError: the connection is over, or the peer reads too slowly and its queue is full: then nothing of it was queued.
        """
        if self._transport is None or self._reason or self._transport.is_closing():
            raise PeerError(f"the connection is over: {self._reason or 'closed by the peer'}")
        if not self._queue and not self._paused and len(data) <= _CHUNK_BYTES:
            self._transport.write(data)
            return
        if self._queue and self._queued + len(data) > self._limits.send_queue_bytes:
            raise PeerError(
                f"the peer does not read: {self._queued} bytes wait for it, the limit is {self._limits.send_queue_bytes}"
            )
        if not self._budget.add(len(data)):
            self._budget.add(-len(data))
            raise PeerError("the memory for unread messages is used up")
        self._queued += len(data)
        view = memoryview(data)
        self._queue.extend(view[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
        self._pump()

    def end(self, reason: str) -> None:
        """End gracefully: what is queued is sent first, within a second. The first reason stays."""
        if self._reason or self._ended:
            return
        self._reason = reason
        if self._transport is None:
            return
        self._ending = asyncio.get_running_loop().call_later(_FLUSH_S, self.abort, reason)
        if not self._queue:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """End at once."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def _pump(self) -> None:
        while self._queue and not self._paused and self._transport is not None:
            chunk = self._queue.popleft()
            self._queued -= len(chunk)
            self._budget.add(-len(chunk))
            self._transport.write(chunk)
        if not self._queue and self._reason and self._transport is not None:
            self._transport.close()


def lost_reason(exc: BaseException | None) -> str:
    """Why a transport ended, in words for people."""
    if exc is None:
        return "closed by the peer"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"certificate refused: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed: {(exc.reason or str(exc)).replace('_', ' ').lower()}"
    if isinstance(exc, ConnectionResetError | BrokenPipeError):
        return "reset by the peer"
    if isinstance(exc, TimeoutError):
        return "the peer's host does not answer"
    if isinstance(exc, socket.gaierror):
        return exc.strerror or str(exc)
    if isinstance(exc, OSError):
        return os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or type(exc).__name__
    return f"{type(exc).__name__}: {exc}"


def connect_cause(error: OSError, with_tls: bool) -> str:
    """Why a connection that we opened did not come up, in words for people."""
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the peer does not speak TLS"
    if with_tls and isinstance(error, ConnectionResetError):
        return "closed during the TLS handshake: a limit of the peer, or no TLS server"
    if isinstance(error, ConnectionAbortedError):
        return "the TLS handshake took too long"
    return lost_reason(error)


def set_options(sock: socket.socket) -> None:
    """Make the kernel notice a peer that is gone in about 3 s: probes on an idle connection, a limit on unacknowledged data."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
