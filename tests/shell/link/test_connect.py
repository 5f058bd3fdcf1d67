"""Opening a connection: one address, tried once; every failure names the address, the step and the cause."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Any

import pytest

from tests.shell.link.certificates import Authority
from tests.shell.link.conftest import Run
from tests.shell.link.peers import Pair, Script, address, connected, playing, serving
from xce_supervisor.errors import DeadlinePassed, PeerError
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.limits import DEFAULT_LIMITS, Limits
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.codec import encode
from xce_supervisor.wire.words import ErrorCode, Frame, Heartbeat, Refusal


async def fails(where: str, tls: TlsSource | None, why: str, deadline_s: float = 2) -> PeerError:
    """Try to connect; it must fail in time, for this reason, naming the address."""
    began = time.monotonic()
    with pytest.raises(PeerError, match=why) as failed:
        await connect(where, tls, deadline_s=deadline_s, on_push=lambda _: None)
    assert time.monotonic() - began < deadline_s + 1
    assert where.split(":", maxsplit=1)[0] in str(failed.value)
    return failed.value


def test_a_refused_port_is_told_as_such(run: Run, pair: Pair) -> None:
    """Nobody listens: known at once, with and without TLS."""

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        for tls in (None, pair.client):
            await fails(f"127.0.0.1:{port}", tls, r"127\.0\.0\.1:\d+: connecting failed: Connection refused")

    run(scene())


def test_a_name_that_does_not_resolve_is_told_as_such(run: Run) -> None:
    """The resolver's own words."""
    run(as_scene(fails("no-such-host.invalid:7001", None, "resolving the name failed: ", deadline_s=10)))


@pytest.mark.parametrize(
    "text", ["", "c1", "c1:", ":7001", "c1:0", "c1:65536", "c1:7001x", "::1:7001", "[::1]", "c1:¹", "c1:-1", "c1: 7"]
)
def test_what_is_no_address_is_refused_before_anything_is_tried(run: Run, text: str) -> None:
    """Addresses come from operators and, in redirects, from peers."""
    run(as_scene(fails(text, None, "is no address: write host:port")))


async def as_scene(failing: Any) -> None:
    """Drop a coroutine's result."""
    await failing


def test_a_silent_peer_is_given_up_at_the_deadline(run: Run, pair: Pair) -> None:
    """It accepts and says nothing: in the TLS handshake, or instead of the first answer; the step is named."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async def scene() -> None:
        async with playing(mute) as where:
            error = await fails(where, None, r"no answer within 0\.2 s while waiting for the first answer", 0.2)
            assert isinstance(error, DeadlinePassed)
            await fails(where, pair.client, "within 0.2 s while the TLS handshake|TLS handshake took too long", 0.2)

    run(scene())


def test_a_backlog_that_is_full_is_given_up_at_the_deadline(run: Run) -> None:
    """The peer's kernel does not even accept."""

    async def scene() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            where = full.getsockname()
            waiting = [socket.socket() for _ in range(3)]
            try:
                for each in waiting:
                    each.setblocking(False)
                    each.connect_ex(where)
                await fails(f"127.0.0.1:{where[1]}", None, r"no answer within 0\.3 s while (connecting|waiting)", 0.3)
            finally:
                for each in waiting:
                    each.close()

    run(scene())


def test_a_tls_client_at_a_plain_port_and_the_reverse(run: Run, pair: Pair) -> None:
    """Each side says what the other seems to be; the server counts and goes on."""

    async def scene() -> None:
        async with serving(None, Script()) as plain:
            await fails(address(plain), pair.client, "the TLS handshake failed: (closed during|the peer does not speak TLS)")
        async with serving(pair.server, Script()) as secure:
            await fails(address(secure), None, "it may want TLS")
            assert secure.counters.failed_handshakes == 1
            async with connected(secure, pair.client):
                pass

    run(scene())


def test_garbage_instead_of_an_answer_is_told_as_such(run: Run, pair: Pair) -> None:
    """Another protocol's greeting."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n")
        await reader.read(-1)

    async def scene() -> None:
        async with playing(greet) as where:
            await fails(where, None, "malformed: a frame of .* no XCE peer, or garbage")
            await fails(where, pair.client, "the peer does not speak TLS")

    run(scene())


def test_a_client_whose_certificate_is_refused_learns_it_from_connect(run: Run, pair: Pair, other_authority: Authority) -> None:
    """With TLS 1.3 the handshake succeeds and the end comes after it: the first answer is the proof. The server knows exactly."""
    foreign = other_authority.issue("supervisor-s1", "xce://test/supervisor/s1")

    async def scene() -> None:
        async with serving(pair.server, Script()) as server:
            # Trusts our authority, shows a certificate of the other one.
            stranger = TlsSource(foreign)
            stranger.client().load_verify_locations(pair.client._files.ca)
            await fails(address(server), stranger, "it refuses our certificate")
            assert server.counters.failed_handshakes == 1 and server.counters.accepted == 0

    run(scene())


def test_an_expired_client_certificate_is_refused(run: Run, authority: Authority, pair: Pair) -> None:
    """By the server; the client can still be started with it, so that the date can be shown."""
    expired = TlsSource(authority.issue("old", "xce://test/supervisor/old", days=-2))
    assert expired.expires_at() < time.time()

    async def scene() -> None:
        async with serving(pair.server, Script()) as server:
            await fails(address(server), expired, "it refuses our certificate")

    run(scene())


@pytest.mark.parametrize(
    ("uri", "host", "why"),
    [
        ("xce://test/worker/w1", "127.0.0.1", "it is xce://test/worker/w1's, not a controller's"),
        ("xce://test/king/k1", "127.0.0.1", "which is not xce://CLUSTER/ROLE/NAME with a role of"),
        ("xce://test/controller/c1/x", "127.0.0.1", "which is not xce://CLUSTER/ROLE/NAME"),
        ("", "elsewhere.example", "names neither a controller .* nor the host 127.0.0.1"),
    ],
)
def test_a_server_that_is_no_controller_is_refused(
    run: Run, authority: Authority, pair: Pair, uri: str, host: str, why: str
) -> None:
    """Any other peer's certificate of the same authority would serve to pose as a controller."""
    files = authority.issue("impostor", *([uri] if uri else []), hosts=() if uri else (host,))

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async def scene() -> None:
        # The impostor is a plain asyncio server: ours would not start with a name that is none.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        server = await asyncio.start_server(mute, "127.0.0.1", 0, ssl=context)
        await fails(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", pair.client, why)
        server.close()
        await asyncio.sleep(0.05)

    run(scene())


def test_a_server_of_another_authority_is_refused(run: Run, pair: Pair, other_authority: Authority) -> None:
    """The client says so, and the server is told that the client went away."""
    foreign = other_authority.source("controller", "c1")

    async def scene() -> None:
        async with serving(foreign, Script()) as server:
            await fails(address(server), pair.client, "certificate refused: ")

    run(scene())


def test_a_plain_server_certificate_must_be_for_the_host(run: Run, authority: Authority, pair: Pair) -> None:
    """A controller that has no XCE name yet is known by its host name."""
    files = authority.issue("plain", hosts=("localhost",))

    async def scene() -> None:
        async with serving(TlsSource(files), Script()) as server:
            await fails(address(server), pair.client, r"nor the host 127\.0\.0\.1")
            named = f"localhost:{server.port}"
            info = await asyncio.get_running_loop().getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM)
            if info[0][4][0] == "127.0.0.1":
                connection = await connect(named, pair.client, deadline_s=2, on_push=lambda _: None)
                assert connection.peer is None
                connection.close("seen")
                await connection.closed

    run(scene())


def test_only_the_first_address_of_a_name_is_tried(pair: Pair) -> None:
    """A name with two addresses: the second one, where somebody listens, is never spoken to (docs/rules.md S3)."""

    class TwoAddresses(asyncio.SelectorEventLoop):
        async def getaddrinfo(self, host: Any, port: Any, **kinds: Any) -> Any:
            kinds["type"] = socket.SOCK_STREAM
            return [
                (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (name, port)) for name in ("127.0.0.9", "127.0.0.1")
            ]

    async def scene() -> None:
        server_loop_free = socket.create_server(("127.0.0.1", 0))
        port = server_loop_free.getsockname()[1]
        try:
            await fails(f"controller.example:{port}", None, "connecting failed: Connection refused")
            server_loop_free.setblocking(False)
            with pytest.raises(BlockingIOError):
                server_loop_free.accept()
        finally:
            server_loop_free.close()

    with asyncio.Runner(loop_factory=TwoAddresses) as runner:
        runner.run(scene())


def test_a_peer_that_does_not_know_pings_is_a_peer_all_the_same(run: Run) -> None:
    """A controller of another make refuses the opcode: that is an answer."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(48)
        writer.write(encode(Frame(id=1, body=Refusal(code=ErrorCode.UNSUPPORTED, text="no"), is_reply=True)))
        await reader.read(-1)

    async def scene() -> None:
        async with playing(refuse) as where:
            connection = await connect(where, None, deadline_s=2, on_push=lambda _: None)
            connection.close("seen")
            await connection.closed

    run(scene())


def test_the_kernel_is_asked_to_notice_a_dead_host(run: Run) -> None:
    """Keepalive probes on both ends, and a limit on unacknowledged data: about 3 s (half-open connections, docs/rules.md S7)."""

    def options(connection: Connection) -> tuple[int, ...]:
        assert connection.stream._transport is not None
        sock = connection.stream._transport.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT, socket.TCP_NODELAY)
        alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return (alive, *(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names))

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, connected(server, None) as connection:
            await connection.request(Heartbeat(session_id=""), 1)
            for end in (connection, script.connections[0]):
                assert options(end) == (1, 1, 1, 2, 3000, 1)

    run(scene())


def test_limits_are_checked_when_they_are_made() -> None:
    """A limit of nothing is a mistake of ours."""
    assert DEFAULT_LIMITS.frame_bytes == 64 << 20
    for wrong in ({"frame_bytes": 0}, {"in_flight": 0}, {"idle_s": 0.0}, {"buffered_bytes": 1}):
        with pytest.raises(AssertionError):
            Limits(**wrong)
