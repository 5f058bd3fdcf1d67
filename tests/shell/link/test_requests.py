"""Requests, replies and pushes on one connection: correlation, deadlines, bounds (docs/rules.md S7, A3)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.shell.link.conftest import Run
from tests.shell.link.peers import QUESTION, Pair, Script, address, connected, playing, raw, serving, unknown, until
from xce_supervisor.errors import DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.limits import Limits
from xce_supervisor.wire.codec import encode
from xce_supervisor.wire.words import (
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    Frame,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobList,
    JobSubmit,
    Message,
    Ping,
    Refusal,
    Resync,
    SchedulerExit,
    StepDown,
)

BEAT = Heartbeat(session_id="s")


def test_a_reply_finds_its_request_whatever_the_order(run: Run, pair: Pair) -> None:
    """A long poll asked first is answered last; each caller gets its own answer. The server knows the client's name."""

    async def scene() -> None:
        script = Script()
        async with serving(pair.server, script) as server, connected(server, pair.client) as connection:
            slow = asyncio.create_task(connection.request(CtrlStatus(wait_ms=77), 5))
            fast = [await connection.request(BEAT, 1) for _ in range(3)]
            assert fast == [HeartbeatReply(role="primary", term=3)] * 3 and not slow.done()
            script.held.set()
            reply = await slow
            assert isinstance(reply, CtrlStatusReply) and reply.version == 77
            name = script.connections[0].peer
            assert name is not None and (name.cluster, name.role, name.name) == ("test", HostRole.SUPERVISOR, "s1")
            assert connection.peer is not None and connection.peer.role is HostRole.CONTROLLER

    run(scene())


def test_every_request_ends_at_its_deadline_and_the_late_reply_is_dropped(run: Run) -> None:
    """The caller is free in time; the reply that comes later is counted, and the connection goes on."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, connected(server, None) as connection:
            began = time.monotonic()
            with pytest.raises(DeadlinePassed, match=r"CTRL_STATUS to 127\.0\.0\.1:\d+: no answer in 0\.1 s"):
                await connection.request(CtrlStatus(wait_ms=1), 0.1)
            assert 0.09 < time.monotonic() - began < 3
            script.held.set()
            await until(lambda: connection.counters.late_replies == 1)
            assert await connection.request(BEAT, 1) == HeartbeatReply(role="primary", term=3)

    run(scene())


def test_a_no_and_a_redirect_are_told_apart(run: Run) -> None:
    """RequestRefused carries the code, Redirected the primary's address; a bug of the handler is UNAVAILABLE to the peer."""

    async def scene() -> None:
        script = Script(refuse={JobSubmit: ErrorCode.CONFLICT})
        async with serving(None, script) as server, connected(server, None) as connection:
            with pytest.raises(RequestRefused, match="as the script says") as refused:
                await connection.request(JobSubmit(job_id="j", command=("true",)), 1)
            assert refused.value.code == ErrorCode.CONFLICT
            with pytest.raises(RequestRefused, match="RESYNC failed at the peer: RuntimeError") as bug:
                await connection.request(Resync(session_id="s"), 1)
            assert bug.value.code == ErrorCode.UNAVAILABLE and server.counters.handler_bugs == 1
            script.redirect = "c2.example:7001"
            with pytest.raises(Redirected) as redirected:
                await connection.request(QUESTION, 1)
            assert (redirected.value.address, redirected.value.controller_id, redirected.value.term) == (
                "c2.example:7001",
                "c2",
                3,
            )

    run(scene())


def test_pushes_go_both_ways(run: Run, pair: Pair) -> None:
    """From the server to `on_push`, in order; from the client to the handler, whose answer is dropped."""

    async def scene() -> None:
        script, pushed = Script(), list[Message]()
        async with serving(pair.server, script) as server, connected(server, pair.client, pushed) as connection:
            for number in range(5):
                script.connections[0].push(SchedulerExit(reason=f"{number}"))
            await until(lambda: len(pushed) == 5)
            assert pushed == [SchedulerExit(reason=f"{number}") for number in range(5)]
            connection.push(BEAT)
            await until(lambda: script.seen == [BEAT])
            assert await connection.request(BEAT, 1)
        with pytest.raises(PeerError, match="the connection is over"):
            connection.push(BEAT)
        with pytest.raises(PeerError, match=r"HEARTBEAT to .* the connection is over: the test ends"):
            await connection.request(BEAT, 1)

    run(scene())


def test_the_end_of_a_connection_ends_its_requests_with_the_reason(run: Run, pair: Pair) -> None:
    """Nobody waits for a reply that cannot come; `closed` says why, and holds no exception."""

    async def scene() -> None:
        script = Script()
        async with serving(pair.server, script) as server, connected(server, pair.client) as connection:
            waiting = [asyncio.create_task(connection.request(CtrlStatus(wait_ms=1), 9)) for _ in range(5)]
            await until(lambda: len(script.seen) == 5)
            script.connections[0].abort("gone")
            for task in waiting:
                with pytest.raises(PeerError, match=r"the connection ended: (closed|reset) by the peer"):
                    await task
            assert await connection.closed in ("closed by the peer", "reset by the peer")
            assert await script.connections[0].closed == "gone"

    run(scene())


def test_queries_of_a_lost_peer_are_cancelled_and_changes_are_not(run: Run) -> None:
    """Nobody waits for a status any more; a change that was begun is not cut in half."""

    async def scene() -> None:
        script, ends = Script(), list[str]()

        async def handler(message: Message) -> Done:
            try:
                await script.handle(message)
            except asyncio.CancelledError:
                ends.append(f"{message.opcode.name} cancelled")
                raise
            ends.append(f"{message.opcode.name} done")
            return Done()

        async with serving(None, script, accept=lambda _: handler) as server, connected(server, None) as connection:
            connection.push(CtrlStatus(wait_ms=1))
            connection.push(StepDown())
            await until(lambda: len(script.seen) == 2)
            connection.abort("lost")
            await until(lambda: ends == ["CTRL_STATUS cancelled"])
            script.held.set()
            await until(lambda: ends == ["CTRL_STATUS cancelled", "STEP_DOWN done"])

    run(scene())


def test_requests_in_flight_are_bounded_on_both_sides(run: Run) -> None:
    """The client waits for a free place, at most until the deadline; a server refuses what a rude client sends beyond."""

    async def scene() -> None:
        script = Script()
        limits = Limits(in_flight=4)
        async with serving(None, script, limits) as server:
            async with connected(server, None, limits=limits) as connection:
                waiting = [asyncio.create_task(connection.request(CtrlStatus(wait_ms=1), 9)) for _ in range(4)]
                await until(lambda: len(script.seen) == 4)
                with pytest.raises(DeadlinePassed, match="4 others were in flight"):
                    await connection.request(BEAT, 0.05)
                later = asyncio.create_task(connection.request(BEAT, 9))
                script.held.set()
                assert await later and await asyncio.gather(*waiting)
            script.held.clear()
            async with raw(server) as client:
                for number in range(1, 8):
                    client.say(number, CtrlStatus(wait_ms=1))
                refused = await client.frames(3)
                assert [frame.id for frame in refused] == [5, 6, 7]
                for frame in refused:
                    assert isinstance(frame, Frame) and isinstance(frame.body, Refusal) and frame.body.code is ErrorCode.LIMIT
                script.held.set()
                assert sorted(frame.id for frame in await client.frames(4)) == [1, 2, 3, 4]

    run(scene())


def test_a_cancelled_request_leaves_its_place(run: Run) -> None:
    """The reply that still comes is late, not another request's."""

    async def scene() -> None:
        script, limits = Script(), Limits(in_flight=1)
        async with serving(None, script) as server, connected(server, None, limits=limits) as connection:
            for _ in range(3):
                task = asyncio.create_task(connection.request(CtrlStatus(wait_ms=1), 9))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            script.held.set()
            assert await connection.request(BEAT, 1) == HeartbeatReply(role="primary", term=3)
            await until(lambda: connection.counters.late_replies == 3)

    run(scene())


def test_an_unknown_opcode_is_refused_and_the_connection_goes_on(run: Run) -> None:
    """A newer peer is told, by the id of its request; its pushes are passed over."""

    async def scene() -> None:
        async with serving(None, Script()) as server, raw(server) as client:
            client.send(unknown(41) + unknown(0) + encode(Frame(id=42, body=BEAT)))
            first, second = await client.frames(2)
            assert isinstance(first, Frame) and first.id == 41 and isinstance(first.body, Refusal)
            assert first.body.code is ErrorCode.UNSUPPORTED and "999" in first.body.text
            assert isinstance(second, Frame) and second.id == 42 and isinstance(second.body, HeartbeatReply)
            assert server.counters.unsupported == 2

    run(scene())


def test_a_request_that_cannot_be_read_is_refused_and_ends_the_connection(run: Run) -> None:
    """Its sender learns why, by the id; what it says after that is not looked at."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, raw(server) as client:
            whole = bytearray(encode(Frame(id=5, body=BEAT)))
            whole[-16:-8] = b"\xff" * 8  # the pointer to the text
            client.send(bytes(whole) + encode(Frame(id=6, body=BEAT)))
            got = await client.frames(2)
            assert len(got) == 1 and isinstance(got[0], Frame) and got[0].id == 5
            assert isinstance(got[0].body, Refusal) and got[0].body.code is ErrorCode.MALFORMED
            assert "malformed" in await script.connections[0].closed
            assert server.counters.malformed == 1 and script.seen == []

    run(scene())


@pytest.mark.parametrize(
    ("number", "body", "reason"),
    [
        (9, Done(), "a reply to request 9, which was never sent"),
        (0, Done(), "a reply to request 0, which was never sent"),
        (2, JobList(jobs=(), total=0), "JobList came as the reply to HEARTBEAT"),
    ],
)
def test_a_reply_that_nobody_asked_for_ends_the_connection(run: Run, number: int, body: Done | JobList, reason: str) -> None:
    """A peer that answers what was not asked, or with another message's reply, has lost the thread."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(encode(Frame(id=1, body=Ping()))))
        writer.write(encode(Frame(id=1, body=Done(), is_reply=True)))
        await reader.readexactly(len(encode(Frame(id=2, body=BEAT))))
        writer.write(encode(Frame(id=number, body=body, is_reply=True)))
        await reader.read()

    async def scene() -> None:
        async with playing(answer) as where:
            connection = await connect(where, None, deadline_s=2, on_push=lambda _: None)
            with pytest.raises(PeerError, match=reason):
                await connection.request(BEAT, 2)
            assert reason in await connection.closed

    run(scene())


def test_a_message_over_a_limit_is_refused_before_it_is_sent(run: Run) -> None:
    """An operator's too long argument, or a frame too large for this connection: a clear no, and the connection goes on."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, connected(server, None, limits=Limits(frame_bytes=1000)) as connection:
            for command in (("x" * 200_000,), ("x" * 2000,)):
                with pytest.raises(RequestRefused, match="limit is") as refused:
                    await connection.request(JobSubmit(job_id="j", command=command), 1)
                assert refused.value.code == ErrorCode.LIMIT
            with pytest.raises(RequestRefused, match="limit is"):
                connection.push(JobSubmit(job_id="j", command=("x" * 2000,)))
            assert await connection.request(BEAT, 1) and script.seen == [BEAT]

    run(scene())


def test_what_is_queued_is_sent_before_a_graceful_end(run: Run, pair: Pair) -> None:
    """Megabytes that the socket does not take at once still arrive; then comes the end."""

    async def scene() -> None:
        script, pushed = Script(), list[Message]()
        async with serving(pair.server, script) as server, connected(server, pair.client, pushed) as connection:
            argument = "x" * 100_000
            for number in range(60):
                script.connections[0].push(JobSubmit(job_id=f"{number}", command=(argument,)))
            script.connections[0].close("all said")
            assert await connection.closed == "closed by the peer"
            assert [message.job_id for message in pushed if isinstance(message, JobSubmit)] == [
                f"{number}" for number in range(60)
            ]
            assert await script.connections[0].closed == "all said"

    run(scene())


@pytest.mark.parametrize("secure", [False, True])
def test_a_peer_that_does_not_read_fills_a_bounded_queue(run: Run, pair: Pair, secure: bool) -> None:
    """Then a push fails, with nothing of it sent; a reply that cannot be queued ends the connection; no memory stays booked."""

    async def scene() -> None:
        script = Script()
        limits = Limits(send_queue_bytes=1 << 20, frame_bytes=1 << 20, buffered_bytes=8 << 20)
        tls, client_tls = (pair.server, pair.client) if secure else (None, None)
        async with serving(tls, script, limits) as server, raw(server, client_tls) as client:
            client.say(1, BEAT)
            await client.frames(1)
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            (connection,) = script.connections
            sent = push_until_full(connection, 100_000)
            assert sent * 100_000 < 64 << 20  # the kernel's buffers and ours, no more
            push_until_full(connection, 1)
            await asyncio.sleep(0)
            assert not connection.closed.done()
            for number in range(2, 12):
                client.say(number, BEAT)
            assert "the peer does not read" in await connection.closed
            assert server._budget.held == 0

    run(scene())


def push_until_full(connection: Connection, size: int) -> int:
    """Push until it raises; return how often it went well."""
    for sent in range(20_000):
        try:
            connection.push(JobSubmit(job_id="j", command=("x" * size,)))
        except PeerError as error:
            assert "does not read" in str(error)
            return sent
    raise AssertionError("the queue has no bound")


def test_a_ping_is_answered_by_the_connection_itself(run: Run) -> None:
    """Also by one without a handler, in both directions; a request to a peer that serves nothing is UNSUPPORTED."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server, connected(server, None) as connection:
            assert await connection.request(Ping(), 1) == Done()
            assert await script.connections[0].request(Ping(), 1) == Done()
            with pytest.raises(RequestRefused) as refused:
                await script.connections[0].request(BEAT, 1)
            assert refused.value.code == ErrorCode.UNSUPPORTED
            assert script.seen == []
            assert address(server) == connection.remote

    run(scene())
