"""A3: limits on connections, frame size, handshake time and idle time, per peer; memory stays bounded under garbage."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.shell.link.certificates import Authority
from tests.shell.link.peers import Bytes, Pair, Script, address, connected, raw, serving, until
from xce_supervisor.errors import PeerError
from xce_supervisor.link.connection import connect
from xce_supervisor.link.limits import Limits
from xce_supervisor.link.server import Server
from xce_supervisor.wire.codec import encode
from xce_supervisor.wire.words import CtrlStatus, Frame, Heartbeat

ROOT = Path(__file__).resolve().parents[2]
BEAT = encode(Frame(id=1, body=Heartbeat(session_id="s")))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Contexts of a controller and of a supervisor."""
    authority = Authority(tmp_path_factory.mktemp("pki"))
    return Pair(authority.source("controller", "c1"), authority.source("supervisor", "s1"))


async def silent(server: Server, count: int, host: str = "127.0.0.2") -> list[asyncio.StreamWriter]:
    """Connections from another address that say nothing, all accepted by the server."""
    before = len(server.connections)
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", server.port, local_addr=(host, 0)) for _ in range(count))
    )
    await until(lambda: len(server.connections) == before + count)
    return [writer for _, writer in opened]


def hang_up(writers: list[asyncio.StreamWriter]) -> None:
    """Close them all."""
    for writer in writers:
        writer.transport.abort()


def test_four_hundred_silent_connections_do_not_keep_a_good_one_out(pair: Pair) -> None:
    """docs/rules.md A3: limits come before TLS; who says nothing costs a descriptor for the handshake's time, and no more."""

    async def scene() -> None:
        async with serving(pair.server, Script(), Limits(handshake_s=3.0)) as server:
            writers = await silent(server, 400)
            began = time.monotonic()
            async with connected(server, pair.client) as connection:
                assert await connection.request(Heartbeat(session_id="s"), 1)
                took_s = time.monotonic() - began
                assert took_s < 2.5, "the good client waited for the silent ones"
                await until(lambda: server.counters.failed_handshakes == 400, 10)
                assert len(server.connections) == 1
                assert await connection.request(Heartbeat(session_id="s"), 1)
            hang_up(writers)

    asyncio.run(scene())


def test_the_limits_on_connections_are_kept_before_tls(pair: Pair) -> None:
    """docs/rules.md A3: so many of one address, so many in all; what is over is closed at once, and counted; places come back."""

    async def scene() -> None:
        limits = Limits(connections=8, per_peer=5, handshake_s=30)
        async with serving(pair.server, Script(), limits) as server:
            first = await silent(server, 5, "127.0.0.2")
            _, sixth = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
            await until(lambda: server.counters.refused_connections == 1)
            others = await silent(server, 3, "127.0.0.3")
            with pytest.raises(PeerError, match="closed during the TLS handshake: a limit of the peer"):
                await connect(address(server), pair.client, deadline_s=2, on_push=lambda _: None)
            hang_up([*first, sixth])
            await until(lambda: len(server.connections) == 3)
            async with connected(server, pair.client):
                pass
            hang_up(others)
            await until(lambda: not server.connections)
            assert not server._per_peer

    asyncio.run(scene())


def test_one_certificate_has_a_limit_whatever_its_addresses(pair: Pair) -> None:
    """docs/rules.md A3: per peer means the name that the certificate gives, once it is known."""

    async def scene() -> None:
        async with serving(pair.server, Script(), Limits(per_peer=2)) as server:
            context = pair.client.client()
            opened = [
                await asyncio.open_connection(
                    "127.0.0.1", server.port, local_addr=(f"127.0.0.{last}", 0), ssl=context, server_hostname="c1"
                )
                for last in (2, 3, 4)
            ]
            reader, _ = opened[2]
            assert await Bytes(*opened[2]).ended()
            assert reader.at_eof() and server.counters.refused_connections == 1 and server.counters.accepted == 2
            hang_up([writer for _, writer in opened])
            await until(lambda: not server.connections)

    asyncio.run(scene())


def test_idle_connections_end_and_those_that_wait_for_an_answer_do_not() -> None:
    """docs/rules.md A3: silence, and a frame that trickles in byte by byte, are idle; a long poll is not."""

    async def scene() -> None:
        script = Script()
        async with (
            serving(None, script, Limits(idle_s=0.4)) as server,
            raw(server) as mute,
            raw(server) as trickling,
            raw(server) as both,
            raw(server) as waiting,
            raw(server) as busy,
        ):
            waiting.say(1, CtrlStatus(wait_ms=1))
            both.say(1, CtrlStatus(wait_ms=1))  # waits for an answer, and trickles: that is no reason to wait for ever
            ends = [asyncio.create_task(each.ended()) for each in (mute, trickling, both)]
            polled = asyncio.create_task(waiting.frames(1))
            for byte in BEAT[:60]:
                trickling.send(bytes([byte]))
                both.send(bytes([byte]))
                busy.send(BEAT)
                await asyncio.sleep(0.02)
            assert await asyncio.gather(*ends) == [True, True, True]
            assert server.counters.idle_ended == 3
            busy.send(BEAT)
            assert len(await busy.frames(61)) == 61
            script.held.set()
            assert len(await polled) == 1

    asyncio.run(scene())


def test_a_claimed_hundred_megabytes_ends_the_connection_at_once() -> None:
    """docs/rules.md A3: from the header alone; other connections go on."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, raw(server) as good, raw(server) as bad:
            bad.send(struct.pack("<Q", 100_000_000))
            assert await bad.ended()
            assert "100000000 bytes is announced; the limit is 67108864" in await script.connections[1].closed
            good.send(BEAT)
            assert await good.frames(1)

    asyncio.run(scene())


def test_unfinished_frames_of_all_connections_together_have_a_limit() -> None:
    """docs/rules.md A3: a hundred peers with half a frame each are not a hundred times the largest frame."""

    async def scene() -> None:
        mib = 1 << 20
        script = Script()
        async with serving(None, script, Limits(frame_bytes=mib, buffered_bytes=4 * mib)) as server:
            clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
            for _, writer in clients:
                writer.write(struct.pack("<Q", mib) + b"\0" * (mib - 1000))
            await until(lambda: len(script.connections) == 12 and sum(c.closed.done() for c in script.connections) >= 8)
            assert server._budget.held <= 4 * mib
            reasons = [connection.closed.result() for connection in script.connections if connection.closed.done()]
            assert all("memory for unfinished frames" in reason for reason in reasons)
            hang_up([writer for _, writer in clients])
            await until(lambda: not server.connections)
            assert server._budget.held == 0

    asyncio.run(scene())


def test_memory_stays_bounded_under_garbage(tmp_path: Path) -> None:
    """docs/rules.md A3: seconds of random frames, claimed lengths and half frames from many peers cost a server few megabytes."""
    code = "from tests.shell.link.victim import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout is not None
            port = int(victim.stdout.readline())
            process = psutil.Process(victim.pid)
            before = process.memory_info().rss
            asyncio.run(_attack(port, rounds=12))
            grown = process.memory_info().rss - before
            assert grown < 60 << 20, f"{grown >> 20} MiB"
            asyncio.run(_still_serves(port))
        finally:
            victim.kill()


async def _attack(port: int, rounds: int) -> None:
    for number in range(rounds):
        for said in (
            os.urandom(200_000),
            struct.pack("<Q", 60 << 20) + b"\0" * 500_000,
            struct.pack("<Q", 40) + os.urandom(40),
            BEAT[:-8] + os.urandom(8),
            BEAT * 2000 + os.urandom(100),
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            try:
                async with asyncio.timeout(0.05 if number % 2 else 0.005):
                    await writer.drain()
            except (ConnectionError, TimeoutError):
                pass  # it hangs up, which is what it should do
            writer.transport.abort()


async def _still_serves(port: int) -> None:
    connection = await connect(f"127.0.0.1:{port}", None, deadline_s=20, on_push=lambda _: None)
    assert await connection.request(Heartbeat(session_id="s"), 20)
    connection.close("seen")
    await connection.closed


def test_a_server_out_of_descriptors_rests_and_comes_back(tmp_path: Path) -> None:
    """docs/rules.md A3: accepting fails for a while; the loop does not spin, those who are connected are served."""
    code = "from tests.shell.link.victim import main; main(descriptors=64)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as victim:
        try:
            assert victim.stdout is not None
            port = int(victim.stdout.readline())
            asyncio.run(_exhaust(port, psutil.Process(victim.pid)))
        finally:
            victim.kill()


async def _exhaust(port: int, victim: psutil.Process) -> None:
    connection = await connect(f"127.0.0.1:{port}", None, deadline_s=5, on_push=lambda _: None)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
    await until(lambda: victim.num_fds() >= 64)
    before = sum(victim.cpu_times()[:2])
    for _ in range(10):
        assert await connection.request(Heartbeat(session_id="s"), 2)
        await asyncio.sleep(0.05)
    assert sum(victim.cpu_times()[:2]) - before < 0.25, "it spins"
    hang_up([writer for _, writer in opened])
    await _still_serves(port)
    connection.close("seen")
    await connection.closed
