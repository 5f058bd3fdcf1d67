"""S7, the link's part: every request has its own deadline; a peer that is silent, stopped or swallowed is noticed in time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell.link.certificates import Authority
from tests.shell.link.peers import Pair, Relay, Script, address, connected, join, serving, until
from xce_supervisor.errors import DeadlinePassed, PeerError
from xce_supervisor.link.connection import connect
from xce_supervisor.link.failover import FailoverConnection
from xce_supervisor.link.pinned import LostKind, PinnedConnection
from xce_supervisor.wire.words import CtrlStatus, Done, ErrorCode, Heartbeat, HostRole, JobQuery, Joined

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Contexts of a controller and of a supervisor."""
    authority = Authority(tmp_path_factory.mktemp("pki"))
    return Pair(authority.source("controller", "c1"), authority.source("supervisor", "s1"))


@pytest.fixture
def victim() -> Iterator[tuple[int, int]]:
    """Pid and port of a controller in a process of its own."""
    code = "from tests.shell.link.victim import main; main(heartbeat_ms=100, session_timeout_ms=1000)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


async def resync(_: Joined) -> None:
    """Nothing to resync."""


def test_a_request_to_a_swallowed_peer_ends_at_its_deadline(pair: Pair) -> None:
    """docs/rules.md S7: a proxy that stops forwarding sends no end and no error; a second later the caller knows."""

    async def scene() -> None:
        async with serving(pair.server, Script()) as server, Relay(server.port) as relay:
            connection = await connect(relay.address, pair.client, deadline_s=2, on_push=lambda _: None)
            assert await connection.request(Heartbeat(session_id="s"), 1)
            relay.swallow()
            began = time.monotonic()
            with pytest.raises(DeadlinePassed):
                await connection.request(CtrlStatus(), 1.0)
            assert 0.95 < time.monotonic() - began < 3
            assert not connection.closed.done()  # the kernel knows nothing of it
            connection.close("given up")
            began = time.monotonic()
            assert await connection.closed == "given up"
            assert time.monotonic() - began < 3  # also where the peer never says goodbye

    asyncio.run(scene())


def test_a_stopped_peer_is_noticed_by_the_deadline_alone(victim: tuple[int, int]) -> None:
    """docs/rules.md S7: SIGSTOP; its kernel accepts connections and acknowledges bytes, and nothing else happens."""
    pid, port = victim

    async def scene() -> None:
        connection = await connect(f"127.0.0.1:{port}", None, deadline_s=5, on_push=lambda _: None)
        assert await connection.request(Heartbeat(session_id="s"), 5)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeadlinePassed):
            await connection.request(CtrlStatus(), 0.5)
        with pytest.raises(DeadlinePassed, match="while waiting for the first answer"):
            await connect(f"127.0.0.1:{port}", None, deadline_s=0.5, on_push=lambda _: None)
        assert time.monotonic() - began < 4
        os.kill(pid, signal.SIGCONT)
        assert await connection.request(Heartbeat(session_id="s"), 5)
        assert connection.counters.late_replies == 1
        connection.close("seen")
        await connection.closed

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["swallowed", "stopped"])
def test_a_pinned_session_with_a_silent_controller_is_lost_within_its_time_out(victim: tuple[int, int], how: str) -> None:
    """docs/rules.md S4, S7: heartbeats have deadlines; when none is confirmed for the session's time-out, it is over."""
    pid, port = victim

    async def scene() -> None:
        async with Relay(port) as relay:
            pinned = await PinnedConnection.open(relay.address, None, join(), on_push=lambda _: None, deadline_s=5)
            watching = asyncio.create_task(pinned.watch())
            await asyncio.sleep(0.3)
            assert not watching.done()
            if how == "swallowed":
                relay.swallow()
            else:
                os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            lost = await watching
            assert lost.kind is LostKind.CONNECTION and "has confirmed no heartbeat for 1." in lost.text
            assert 0.9 < time.monotonic() - began < 5
            await pinned.connection.closed

    asyncio.run(scene())


def test_a_session_is_not_lost_because_we_were_away_ourselves() -> None:
    """docs/rules.md S10: our own loop stood still for longer than the time-out, and the controller did not confirm for a moment.

    Only the moment is the controller's; the rest is not held against it.
    """

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server:
            pinned = await PinnedConnection.open(address(server), None, join(), on_push=lambda _: None, deadline_s=5)
            watching = asyncio.create_task(pinned.watch())
            beat = Heartbeat(session_id="session-1")
            await until(lambda: script.seen.count(beat) >= 2)
            script.refuse = {Heartbeat: ErrorCode.UNAVAILABLE}
            asked = script.seen.count(beat)
            await until(lambda: script.seen.count(beat) > asked)
            await asyncio.sleep(0.02)
            time.sleep(1.3)  # the whole loop stands still, as under SIGSTOP
            await until(lambda: script.seen.count(beat) > asked + 1)
            await asyncio.sleep(0.02)
            assert not watching.done()
            script.refuse = {}
            await asyncio.sleep(0.3)
            assert not watching.done()
            pinned.close("seen")
            assert "seen" in (await watching).text

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["swallowed", "stopped", "killed"])
def test_a_fail_over_connection_leaves_a_silent_primary(victim: tuple[int, int], how: str) -> None:
    """docs/rules.md S7: and a request that was under way is answered by the next one, within its deadline."""
    pid, port = victim

    async def scene() -> None:
        other = Script(controller_id="c2", term=4)
        async with Relay(port) as relay, serving(None, other) as second:
            follow = FailoverConnection(
                [relay.address, address(second)],
                None,
                lambda resume: join(HostRole.WORKER, "", 0, resume),
                lambda _: None,
                resync,
            )
            running = asyncio.create_task(follow.run())
            assert await follow.request(JobQuery(), 5) is not None
            assert follow.joined is not None and follow.joined.controller_id == "c1"
            if how == "swallowed":
                relay.swallow()
            else:
                os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
            began = time.monotonic()
            assert isinstance(await follow.request(JobQuery(), 10), Done)
            assert follow.joined.controller_id == "c2"
            assert time.monotonic() - began < (4.0 if how == "killed" else 8.0)
            assert other.seen[0] == join(HostRole.WORKER, "", 0, "session-1")  # the session before is shown
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scene())


def test_a_hundred_rounds_with_a_half_open_peer_leave_nothing(pair: Pair) -> None:
    """docs/rules.md S7: no task and no descriptor is left by connections that came up, were refused, or hung in the middle."""

    async def scene() -> None:
        async with serving(pair.server, Script()) as server, Relay(server.port) as relay:
            relay.swallow()
            async with connected(server, pair.client) as connection:
                await connection.request(Heartbeat(session_id="s"), 1)
            tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
            for number in range(100):
                if number % 4 == 0:
                    with pytest.raises(PeerError):
                        await connect(relay.address, pair.client, deadline_s=0.02, on_push=lambda _: None)
                elif number % 4 == 1:
                    with pytest.raises(PeerError):
                        await connect(address(server), None, deadline_s=1, on_push=lambda _: None)
                else:
                    async with connected(server, pair.client) as connection:
                        await connection.request(Heartbeat(session_id="s"), 1)
            for writer in relay._writers:
                writer.transport.abort()
            relay._flowing.set()
            await until(lambda: not server.connections)
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)

    asyncio.run(scene())
