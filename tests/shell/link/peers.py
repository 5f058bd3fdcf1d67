"""Peers for tests of the link: a server that answers by script, and a client that knows nothing but bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from xce_supervisor.errors import Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, Handler, connect
from xce_supervisor.link.limits import DEFAULT_LIMITS, Limits
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.codec import Decoder, Incoming, encode
from xce_supervisor.wire.words import (
    Body,
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    Frame,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobQuery,
    Join,
    Joined,
    Message,
    Resync,
    StepDown,
)


@dataclass(frozen=True)
class Pair:
    """Contexts of both ends."""

    server: TlsSource
    client: TlsSource


@dataclass
class Script:
    """What a scripted controller says, and what it saw.

    role, term: in heartbeats and status. redirect: None to serve primary-only opcodes, else the address to name ("": none).
    """

    controller_id: str = "c1"
    role: str = "primary"
    term: int = 3
    redirect: str | None = None
    heartbeat_ms: int = 100
    session_timeout_ms: int = 1000
    refuse: dict[type[Message], ErrorCode] = field(default_factory=dict)
    seen: list[Message] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    def accept(self, connection: Connection) -> Handler:
        """The accept function of a Server."""
        self.connections.append(connection)
        return self.handle

    async def handle(self, message: Message) -> Body:
        """CtrlStatus with wait_ms waits for `held`; Resync raises a bug; the rest is answered at once."""
        self.seen.append(message)
        if type(message) in self.refuse:
            raise RequestRefused(self.refuse[type(message)], "as the script says")
        match message:
            case Heartbeat():
                return HeartbeatReply(role=self.role, term=self.term)
            case CtrlStatus():
                if message.wait_ms:
                    await self.held.wait()
                return CtrlStatusReply(
                    controller_id=self.controller_id, instance_id="i", role=self.role, term=self.term, version=message.wait_ms
                )
        if self.redirect is not None:
            raise Redirected(self.redirect, "c2", self.term)
        match message:
            case Join():
                return Joined(
                    session_id=f"session-{len(self.seen)}",
                    controller_id=self.controller_id,
                    instance_id="i",
                    term=self.term,
                    heartbeat_ms=self.heartbeat_ms,
                    session_timeout_ms=self.session_timeout_ms,
                )
            case Resync():
                raise RuntimeError("a bug of the handler")
            case StepDown():
                await self.held.wait()
        return Done(index=len(self.seen))


@asynccontextmanager
async def serving(
    tls: TlsSource | None, script: Script, limits: Limits = DEFAULT_LIMITS, accept: Callable[[Connection], Handler] | None = None
) -> AsyncIterator[Server]:
    """A server on a free port of 127.0.0.1."""
    server = Server(tls, limits, accept or script.accept)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


def address(server: Server) -> str:
    """Where it listens."""
    return f"127.0.0.1:{server.port}"


@asynccontextmanager
async def connected(
    server: Server, tls: TlsSource | None, pushed: list[Message] | None = None, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[Connection]:
    """A connection to it, closed at the end."""
    taken = pushed if pushed is not None else []
    connection = await connect(address(server), tls, deadline_s=2, on_push=taken.append, limits=limits)
    try:
        yield connection
    finally:
        connection.close("the test ends")
        await connection.closed


class Bytes:
    """A client without any manners: sends bytes, reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder()

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self.writer.write(data)

    def say(self, number: int, message: Message) -> None:
        """Send a request, or a push (0)."""
        self.writer.write(encode(Frame(id=number, body=message)))

    async def frames(self, count: int = 1) -> list[Incoming]:
        """Read until so many frames are there; fewer if the server ends the connection."""
        got: list[Incoming] = []
        while len(got) < count:
            data = await self.reader.read(65536)
            if not data:
                break
            got += self.decoder.feed(data)
        return got

    async def ended(self) -> bool:
        """Wait for the server to end the connection; what it still sends is dropped."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        return True


@asynccontextmanager
async def raw(server: Server, tls: TlsSource | None = None) -> AsyncIterator[Bytes]:
    """Bytes to and from it."""
    context = tls.client() if tls is not None else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=context, server_hostname="c1" if context is not None else None
    )
    try:
        yield Bytes(reader, writer)
    finally:
        writer.transport.abort()


def unknown(number: int, opcode: int = 999) -> bytes:
    """A request of an opcode that nobody knows, made by hand."""
    words = struct.pack("<IHH", 0, 2, 1) + struct.pack("<HHIQQ", opcode, 0, 0, number, 0)
    message = struct.pack("<II", 0, len(words) // 8) + words
    return struct.pack("<Q", len(message)) + message


async def until(fact: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for a fact, with a bound."""
    async with asyncio.timeout(within_s):
        while not fact():
            await asyncio.sleep(0.005)


def join(role: HostRole = HostRole.SCHEDULER, controller_id: str = "c1", term: int = 3, resume: str = "") -> Join:
    """A join as a pinned scheduler makes it."""
    return Join(host_role=role, name="peer", controller_id=controller_id, term=term, spawn_token="token", resume=resume)


QUESTION = JobQuery()


@asynccontextmanager
async def playing(act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A plain TCP server that does `act` on each connection; gives its address, and waits for what it began."""
    acts: set[asyncio.Task[None]] = set()

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        acts.add(task)
        try:
            await act(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has had enough
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if acts:
            _, late = await asyncio.wait(acts, timeout=1)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class Relay:
    """A proxy that can stop forwarding without closing anything: the network has swallowed the connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Forward nothing more; both kernels go on acknowledging."""
        self._flowing.clear()

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
            await self._flowing.wait()
            sink.close()
        except ConnectionError:
            sink.close()
