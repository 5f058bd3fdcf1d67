"""A connection that carries requests, replies and pushes both ways, and `connect`, which opens one.

Every request has a deadline and ends in exactly one way; a reply that comes after it is counted and dropped. Nothing queues
without a bound. A connection ends once, with a reason in `closed`, and does not come back: reconnecting is FailoverConnection's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import structlog

from xce_supervisor.errors import DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.eager import begin
from xce_supervisor.link.limits import DEFAULT_LIMITS, Budget, Counters, Limits
from xce_supervisor.link.peer import PeerName, check_server, split_address
from xce_supervisor.link.stream import Stream, connect_cause, set_options
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.codec import BadMessage, Incoming, MalformedFrame, encode
from xce_supervisor.wire.words import Body, Done, ErrorCode, Frame, Message, Opcode, Ping, Redirect, Refusal

Handler = Callable[[Message], Awaitable[Body]]
Answer = Message | Done

log = structlog.get_logger("link")

# Nobody waits for these when their connection is gone; all others are run to their end, because they change something.
_QUERIES = frozenset({Opcode.CTRL_STATUS, Opcode.JOB_QUERY})
_PING = Ping()


class Connection:
    """One connection, either side.

    peer: the name in the peer's certificate, None without TLS or without such a name. remote: "address:port", for people.
    closed: done when the connection is over; its result says why. It never holds an exception.
    """

    def __init__(
        self,
        remote: str,
        limits: Limits,
        *,
        on_push: Callable[[Message], None] | None = None,
        on_open: Callable[[Connection], None] | None = None,
        budget: Budget | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer: PeerName | None = None
        self.remote = remote
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self.counters = counters or Counters()
        self.last_frame_at = self._loop.time()  # the loop's clock (CLOCK_MONOTONIC), seconds
        self.certificate: dict[str, Any] | None = None
        self.stream = Stream(limits, budget or Budget(limits.buffered_bytes), self._opened, self._take, self._over)
        self._limits = limits
        self._on_push = on_push
        self._on_open = on_open
        self._handler: Handler | None = None
        self._last_id = 0
        self._waiting: dict[int, tuple[asyncio.Future[Body], Message]] = {}  # requests of ours, by number
        self._queued: deque[asyncio.Future[None]] = deque()  # callers that wait for a place in it
        self._tasks: dict[asyncio.Task[None], Opcode] = {}

    def __repr__(self) -> str:
        return f"<Connection {self.remote} {self.peer or 'unnamed'}>"

    # ---------------------------------------------------------------- asking and telling

    async def request(self, message: Message, deadline_s: float) -> Answer:
        """Send a request and return its reply.

        Args:
            deadline_s: seconds from now, all waiting included.

        Raises:
            RequestRefused: the peer said no; or the message is over a limit and was not sent (ErrorCode.LIMIT).
            Redirected: the peer is not the primary.
            DeadlinePassed: no reply in time. Whether the peer acted is not known.
            PeerError: the connection is over, or ended while waiting. Whether the peer acted is not known.
        """
        loop = self._loop
        ends_at = loop.time() + deadline_s
        if len(self._waiting) >= self._limits.in_flight:
            await self._place(message, ends_at, deadline_s)
        if self.closed.done():
            raise PeerError(self._text(message, f"the connection is over: {self.closed.result()}"))
        self._last_id = number = self._last_id + 1
        data = self._encoded(Frame(id=number, body=message))
        future: asyncio.Future[Body] = loop.create_future()
        timer = loop.call_at(ends_at, self._expire, number, deadline_s)
        self._waiting[number] = (future, message)
        try:
            self.stream.send(data)
            body = await future
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
            if self._queued:
                self._next()
        if isinstance(body, Refusal):
            raise RequestRefused(body.code, body.text)
        if isinstance(body, Redirect):
            raise Redirected(body.address, body.controller_id, body.term)
        return body

    async def _place(self, message: Message, ends_at: float, deadline_s: float) -> None:
        """Wait, in order, until fewer than the limit are in flight."""
        while len(self._waiting) >= self._limits.in_flight:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._queued.append(turn)
            try:
                async with asyncio.timeout_at(ends_at):
                    await turn
            except TimeoutError:
                text = f"{self._limits.in_flight} others were in flight for {deadline_s:g} s"
                raise DeadlinePassed(self._text(message, text)) from None
            finally:
                if turn in self._queued:
                    self._queued.remove(turn)
                elif turn.cancelled() or not turn.done():
                    self._next()  # our turn came, and we do not take it

    def _next(self) -> None:
        """Let one more of those that wait for a place go on."""
        while self._queued:
            turn = self._queued.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def push(self, message: Message) -> None:
        """Send without asking for a reply.

        Raises:
            PeerError: the connection is over, or the peer does not read and its send queue is full; nothing was sent.
            RequestRefused: the message is over a limit (ErrorCode.LIMIT); nothing was sent.
        """
        self.stream.send(self._encoded(Frame(id=0, body=message)))

    def close(self, reason: str) -> None:
        """End the connection gracefully; idempotent. Requests that wait get a PeerError, `closed` gets the reason."""
        self.stream.end(reason)

    def abort(self, reason: str) -> None:
        """End the connection at once, without sending what is queued; idempotent."""
        self.stream.abort(reason)

    def serve(self, handler: Handler) -> None:
        """Answer the peer's requests by `handler` from now on, each in a task. Pushes go to it too; their body is dropped."""
        self._handler = handler

    @property
    def waits(self) -> bool:
        """Is a request in flight, in either direction?"""
        return bool(self._waiting or self._tasks)

    def _text(self, message: Message, what: str) -> str:
        return f"{message.opcode.name} to {self.remote}: {what}"

    def _encoded(self, frame: Frame) -> bytes:
        try:
            data = encode(frame)
        except ValueError as error:
            raise RequestRefused(ErrorCode.LIMIT, str(error)) from None
        if len(data) - 8 > self._limits.frame_bytes:
            raise RequestRefused(
                ErrorCode.LIMIT, f"the message has {len(data) - 8} bytes; the limit is {self._limits.frame_bytes}"
            )
        return data

    def _expire(self, number: int, deadline_s: float) -> None:
        found = self._waiting.pop(number, None)
        if found is not None and not found[0].done():
            found[0].set_exception(DeadlinePassed(self._text(found[1], f"no answer in {deadline_s:g} s")))

    # ---------------------------------------------------------------- what the stream calls

    def _opened(self, transport: asyncio.Transport) -> None:
        self.certificate = transport.get_extra_info("peercert")
        self.last_frame_at = self._loop.time()
        if self._on_open is not None:
            self._on_open(self)

    def _take(self, frames: list[Incoming]) -> None:
        self.last_frame_at = self._loop.time()
        for frame in frames:
            if self.stream.ending:
                return  # what was said after the end is not looked at
            if isinstance(frame, BadMessage):
                self._take_bad(frame)
            elif frame.is_reply:
                self._take_reply(frame.id, frame.body)
            elif frame.id:
                self._take_request(frame.id, cast(Message, frame.body))
            else:
                self._take_push(cast(Message, frame.body))

    def _take_reply(self, number: int, body: Body) -> None:
        found = self._waiting.get(number)
        if found is None:
            if not 0 < number <= self._last_id:
                raise MalformedFrame(f"a reply to request {number}, which was never sent")
            self.counters.late_replies += 1
            return
        future, asked = found
        if isinstance(body, Message) and body.opcode != asked.opcode:
            raise MalformedFrame(f"{type(body).__name__} came as the reply to {asked.opcode.name}")
        del self._waiting[number]
        if not future.done():
            future.set_result(body)

    def _take_push(self, message: Message) -> None:
        self.counters.pushes += 1
        if self._handler is not None:
            self._run(0, message, self._handler)
        elif self._on_push is not None:
            self._on_push(message)

    def _take_request(self, number: int, message: Message) -> None:
        self.counters.requests += 1
        if message.opcode is Opcode.PING:
            self._reply(number, Done())
        elif self._handler is None:
            self.counters.unsupported += 1
            self._reply(number, Refusal(code=ErrorCode.UNSUPPORTED, text=f"{message.opcode.name} is not served here"))
        elif len(self._tasks) >= self._limits.in_flight:
            self.counters.refused_requests += 1
            text = f"{self._limits.in_flight} requests of this connection are in flight; wait for a reply"
            self._reply(number, Refusal(code=ErrorCode.LIMIT, text=text))
        else:
            self._run(number, message, self._handler)

    def _take_bad(self, bad: BadMessage) -> None:
        unsupported = bad.code is ErrorCode.UNSUPPORTED
        self.counters.unsupported += unsupported
        self.counters.malformed += not unsupported
        if bad.id and not bad.is_reply:
            self._reply(bad.id, Refusal(code=bad.code, text=bad.text))
        if not unsupported or bad.is_reply:
            raise MalformedFrame(bad.text)

    def _over(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for future, asked in self._waiting.values():
            if not future.done():
                future.set_exception(PeerError(self._text(asked, f"the connection ended: {reason}")))
        self._waiting.clear()
        while self._queued:
            self._next()
        for task, opcode in self._tasks.items():
            if opcode in _QUERIES:
                task.cancel()

    # ---------------------------------------------------------------- answering

    def _run(self, number: int, message: Message, handler: Handler) -> None:
        task = begin(self._loop, self._serve(number, message, handler))
        if task is not None:
            self._tasks[task] = message.opcode
            task.add_done_callback(self._tasks.pop)

    async def _serve(self, number: int, message: Message, handler: Handler) -> None:
        """The reply goes out in the very step in which the handler returns: before anything that the handler left to the loop."""
        body: Body
        try:
            body = await handler(message)
        except RequestRefused as error:
            body = Refusal(code=ErrorCode(error.code), text=error.text)
        except Redirected as error:
            body = Redirect(address=error.address, controller_id=error.controller_id, term=error.term)
        except Exception as error:  # a bug of the handler: its peer is told "not now", and all others are served
            self.counters.handler_bugs += 1
            log.error("handler.failed", opcode=message.opcode.name, remote=self.remote, peer=str(self.peer), exc_info=error)
            text = f"{message.opcode.name} failed at the peer: {type(error).__name__}"
            body = Refusal(code=ErrorCode.UNAVAILABLE, text=text)
        if number:
            self._reply(number, body)

    def _reply(self, number: int, body: Body) -> None:
        """Send a reply. A peer that does not read its replies, so that its queue is full, loses the connection."""
        if isinstance(body, Refusal):
            self.counters.refused_requests += body.code is not ErrorCode.UNSUPPORTED
            self.counters.denied += body.code is ErrorCode.DENIED
        try:
            self.stream.send(self._encoded(Frame(id=number, body=body, is_reply=True)))
        except RequestRefused as error:
            log.error("reply.refused", remote=self.remote, reason=error.text)
            self._reply(number, Refusal(code=ErrorCode.LIMIT, text=f"the reply {error.text}"))
        except PeerError as error:
            self.stream.abort(str(error))

    async def finish(self, within_s: float) -> None:
        """Wait for the handlers that still run, then cancel the rest; used when a server closes."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within_s)


async def connect(
    address: str,
    tls: TlsSource | None,
    *,
    deadline_s: float,
    on_push: Callable[[Message], None],
    limits: Limits = DEFAULT_LIMITS,
) -> Connection:
    """Open a connection to one address, once: of several addresses that a name resolves to, only the first (docs/rules.md S3).

    The peer has answered a ping when this returns. With TLS 1.3 that is the first proof that it took our certificate.

    Args:
        address: "host:port" or "[v6]:port". tls: None for plain TCP.
        deadline_s: seconds for all of it: name, connection, handshake, first answer.
        on_push: called on the loop for every push; what it raises is a bug and ends the connection.

    Raises:
        PeerError: names the address, the step and the cause. DeadlinePassed if it was time.
    """
    opening = _Opening(address, tls, on_push, limits)
    try:
        async with asyncio.timeout(deadline_s):
            return await opening.run(deadline_s)
    except TimeoutError:
        raise DeadlinePassed(f"{address}: no answer within {deadline_s:g} s while {opening.step}") from None
    except (OSError, ssl.SSLError) as error:
        raise PeerError(f"{address}: {opening.step} failed: {connect_cause(error, tls is not None)}") from error


class _Opening:
    """The steps of `connect`, with the name of the one that is under way."""

    def __init__(self, address: str, tls: TlsSource | None, on_push: Callable[[Message], None], limits: Limits) -> None:
        self._address = address
        self._tls = tls
        self._on_push = on_push
        self._limits = limits
        self.step = "resolving the name"

    async def run(self, deadline_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        host, port = split_address(self._address)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, target = found[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
        connection = Connection(self._address, self._limits, on_push=self._on_push)
        try:
            self.step = "connecting"
            sock.setblocking(False)
            set_options(sock)
            await loop.sock_connect(sock, target)
            self.step = "the TLS handshake" if self._tls else "connecting"
            await self._transport(connection, sock, host, deadline_s)
        except BaseException:
            sock.close()
            raise
        try:
            self.step = "waiting for the first answer"
            if self._tls is not None:
                connection.peer = check_server(connection.certificate, host)
            await connection.request(_PING, deadline_s)
        except RequestRefused:
            pass  # an answer all the same: a peer that does not know pings
        except BaseException as error:
            connection.abort("not taken")
            if isinstance(error, PeerError):
                raise self._not_taken(connection, error) from error
            raise
        return connection

    async def _transport(self, connection: Connection, sock: socket.socket, host: str, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.create_connection(lambda: connection.stream, sock=sock)
            return
        context = self._tls.client()
        await loop.create_connection(
            lambda: connection.stream, sock=sock, ssl=context, server_hostname=host, ssl_handshake_timeout=deadline_s
        )

    def _not_taken(self, connection: Connection, error: PeerError) -> PeerError:
        if isinstance(error, DeadlinePassed) or not connection.closed.done():
            return PeerError(f"{self._address}: {error}")
        reason = connection.closed.result()
        if self._tls is not None and reason in ("closed by the peer", "reset by the peer"):
            reason = "closed by the peer right after the TLS handshake: it refuses our certificate, or a limit of it is reached"
        elif self._tls is None and reason == "closed by the peer":
            reason = "closed by the peer without an answer: it may want TLS, or a limit of it is reached"
        return PeerError(f"{self._address}: {reason}")
