"""Joined sessions: pinned to one controller, or following the primary (docs/rules.md S3, S4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.shell.link.conftest import Run
from tests.shell.link.peers import Pair, Script, address, join, serving, until
from xce_supervisor.errors import ConfigError, DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.failover import FailoverConnection
from xce_supervisor.link.pinned import LostKind, PinnedConnection
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import (
    Done,
    ErrorCode,
    Heartbeat,
    HostRole,
    JobDispatch,
    JobQuery,
    JobSubmit,
    Join,
    Joined,
    Message,
    Resync,
    SchedulerExit,
)


async def open_pinned(server: Server, tls: TlsSource | None = None, asked: Join | None = None) -> PinnedConnection:
    """A pinned session with it."""
    return await PinnedConnection.open(address(server), tls, asked or join(), on_push=lambda _: None, deadline_s=2)


def test_a_pinned_session_carries_what_its_join_named(run: Run, pair: Pair) -> None:
    """The spawn token is shown, requests and pushes go through, pushes arrive."""

    async def scene() -> None:
        script, pushed = Script(), list[Message]()
        async with serving(pair.server, script) as server:
            pinned = await PinnedConnection.open(address(server), pair.client, join(), on_push=pushed.append, deadline_s=2)
            assert (pinned.joined.controller_id, pinned.joined.term) == ("c1", 3)
            assert isinstance(script.seen[0], Join) and script.seen[0].spawn_token == "token"
            assert await pinned.request(JobQuery(), 1) == Done(index=2)
            pinned.push(Resync(session_id="s"))
            script.connections[0].push(SchedulerExit(reason="demoted"))
            await until(lambda: pushed == [SchedulerExit(reason="demoted")])
            pinned.close("seen")
            assert (await pinned.watch()).kind is LostKind.CONNECTION

    run(scene())


@pytest.mark.parametrize(
    ("asked", "says", "code", "why"),
    [
        (join(controller_id="c2"), Script(), ErrorCode.WRONG_CONTROLLER, "is xce://test/controller/c1; wanted is controller c2"),
        (join(), Script(controller_id="c7"), ErrorCode.WRONG_CONTROLLER, "is controller 'c7'; wanted is 'c1'"),
        (join(term=9), Script(), ErrorCode.WRONG_TERM, "is in term 3; wanted is 9"),
        (join(), Script(refuse={Join: ErrorCode.SESSION_ALIVE}), ErrorCode.SESSION_ALIVE, "as the script says"),
    ],
)
def test_a_join_of_another_controller_or_term_is_refused_by_the_client_too(
    run: Run, pair: Pair, asked: Join, says: Script, code: ErrorCode, why: str
) -> None:
    """docs/rules.md S3: by its certificate, by its answer, or by its word; nothing stays open."""

    async def scene() -> None:
        async with serving(pair.server, says) as server:
            with pytest.raises(RequestRefused, match=why) as refused:
                await open_pinned(server, pair.client, asked)
            assert refused.value.code == code
            await until(lambda: not server.connections)

    says.connections, says.seen = [], []
    run(scene())


def test_a_standby_redirects_the_join_and_is_left(run: Run) -> None:
    """A pinned child does not follow: it ends (its supervisor decides what is next)."""

    async def scene() -> None:
        async with serving(None, Script(redirect="c2.example:7001")) as server:
            with pytest.raises(Redirected) as redirected:
                await open_pinned(server)
            assert redirected.value.address == "c2.example:7001"
            await until(lambda: not server.connections)

    run(scene())


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"role": "standby"}, LostKind.NOT_PRIMARY, "says that its role is 'standby'"),
        ({"term": 4}, LostKind.WRONG_TERM, "is in term 4; joined was term 3"),
        ({"role": "king"}, LostKind.NOT_PRIMARY, "'king'"),
        ({"refuse": {Heartbeat: ErrorCode.NOT_JOINED}}, LostKind.CONNECTION, "the controller has ended the session"),
        ({"refuse": {Heartbeat: ErrorCode.WRONG_TERM}}, LostKind.WRONG_TERM, "joined was term 3"),
        ({"refuse": {Heartbeat: ErrorCode.UNAVAILABLE}}, LostKind.CONNECTION, "has confirmed no heartbeat for 1."),
    ],
)
def test_the_role_check_ends_a_pinned_session(run: Run, change: dict[str, object], kind: LostKind, why: str) -> None:
    """docs/rules.md S4: not primary, another term, a session that the controller has ended, or no confirmation for too long."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server:
            pinned = await open_pinned(server)
            watching = asyncio.create_task(pinned.watch())
            await until(lambda: Heartbeat(session_id="session-1") in script.seen)
            for name, value in change.items():
                setattr(script, name, value)
            began = time.monotonic()
            lost = await watching
            assert (lost.kind, why in lost.text) == (kind, True), lost
            assert time.monotonic() - began < 5
            await pinned.connection.closed

    run(scene())


def test_a_controller_without_heartbeats_keeps_its_sessions(run: Run) -> None:
    """One that does not know the opcode is alive; the role check is off with it (docs/protocol.md)."""

    async def scene() -> None:
        script = Script(refuse={Heartbeat: ErrorCode.UNSUPPORTED}, heartbeat_ms=50)
        async with serving(None, script) as server:
            pinned = await open_pinned(server)
            watching = asyncio.create_task(pinned.watch())
            await until(lambda: script.seen.count(Heartbeat(session_id="session-1")) > 25)  # longer than the time-out
            assert not watching.done()
            script.connections[0].close("shut down")
            assert (await watching).kind is LostKind.CONNECTION

    run(scene())


class Follower:
    """A fail-over connection under test, and what happened to it."""

    def __init__(self, *candidates: str) -> None:
        self.joins: list[Joined] = []
        self.pushed: list[Message] = []
        self.fail: BaseException | None = None
        self.link = FailoverConnection(
            candidates, None, lambda resume: join(HostRole.WORKER, "", 0, resume), self.pushed.append, self._joined
        )

    async def _joined(self, joined: Joined) -> None:
        self.joins.append(joined)
        if self.fail is not None:
            raise self.fail
        assert isinstance(await self.link.request(JobQuery(), 2), Done)  # what a resync does: ask on the new session

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Follow meanwhile."""
        task = asyncio.create_task(self.link.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_it_finds_the_primary_by_redirect_and_follows_it(run: Run) -> None:
    """One candidate, a standby; the primary moves; each join is followed by a resync."""

    async def scene() -> None:
        first, second = Script(), Script(controller_id="c2", term=4)
        async with serving(None, first) as one, serving(None, second) as two:
            second.redirect = address(one)
            follower = Follower(address(two))
            async with follower.running():
                assert isinstance(await follower.link.request(JobQuery(), 2), Done)
                assert [joined.controller_id for joined in follower.joins] == ["c1"]
                first.connections[-1].push(SchedulerExit(reason="a push"))
                await until(lambda: follower.pushed == [SchedulerExit(reason="a push")])
                first.redirect, second.redirect = address(two), None
                began = time.monotonic()
                assert isinstance(await follower.link.request(JobQuery(), 2), Done)
                assert time.monotonic() - began < 3
                await until(lambda: [joined.controller_id for joined in follower.joins] == ["c1", "c2"])

    run(scene())


def test_a_demotion_that_a_heartbeat_tells_makes_it_look_further(run: Run) -> None:
    """Nobody asks anything; the heartbeat's answer says standby."""

    async def scene() -> None:
        first, second = Script(), Script(controller_id="c2", term=4)
        async with serving(None, first) as one, serving(None, second) as two:
            second.redirect = address(one)
            follower = Follower(address(one), address(two))
            async with follower.running():
                await until(lambda: len(follower.joins) == 1)
                first.role, first.redirect, second.redirect = "standby", address(two), None
                await until(lambda: [joined.controller_id for joined in follower.joins] == ["c1", "c2"])

    run(scene())


def test_two_standbys_that_name_each_other_make_no_busy_loop(run: Run) -> None:
    """Redirects in circles are slowed down like failures; so are an unknown primary, and an address that is none."""

    async def scene() -> None:
        first, second = Script(redirect=""), Script(redirect="")
        async with serving(None, first) as one, serving(None, second) as two:
            for named in ((address(two), address(one)), ("", ""), ("not an address", "::1")):
                first.redirect, second.redirect = named
                first.seen.clear()
                follower = Follower(address(one), address(two))
                async with follower.running():
                    with pytest.raises(
                        DeadlinePassed, match=r"no session with a primary within 0\.6 s: .*not the primary|address"
                    ):
                        await follower.link.request(JobQuery(), 0.6)
                    assert follower.link.joined is None
                    with pytest.raises(PeerError, match="no session with a primary"):
                        follower.link.push(Resync(session_id=""))
                assert 2 <= len(first.seen) <= 40

    run(scene())


def test_what_is_not_idempotent_is_sent_again_only_if_it_was_surely_not_done(run: Run) -> None:
    """The connection ends in the middle: an error for the one, another try for the other; a redirect was surely not done."""

    async def scene() -> None:
        first, second = Script(), Script(controller_id="c2", term=4)
        async with serving(None, first) as one, serving(None, second) as two:
            follower = Follower(address(one), address(two))
            dispatch = JobDispatch(session_id="s", job_id="j", worker="w", attempt=1)
            async with follower.running():
                await until(lambda: len(follower.joins) == 1)
                first.role, first.redirect = "standby", address(two)
                assert isinstance(await follower.link.request(dispatch, 2, idempotent=False), Done)
                assert second.seen.count(dispatch) == 1
                second.refuse = {JobDispatch: ErrorCode.NOT_JOINED}
                held = asyncio.create_task(follower.link.request(dispatch, 5, idempotent=False))
                await until(lambda: second.seen.count(dispatch) >= 2)
                second.refuse = {}
                assert isinstance(await held, Done)

                async def hang(_: Message) -> Done:
                    second.connections[-1].abort("crash")
                    return Done()

                second.connections[-1].serve(hang)
                with pytest.raises(PeerError, match="the connection ended"):
                    await follower.link.request(dispatch, 2, idempotent=False)

    run(scene())


def test_a_definite_no_is_raised_and_try_again_is_tried_again(run: Run) -> None:
    """UNAVAILABLE passes by itself; CONFLICT does not."""

    async def scene() -> None:
        script = Script(refuse={JobSubmit: ErrorCode.UNAVAILABLE})
        submit = JobSubmit(job_id="j", command=("true",))
        async with serving(None, script) as server:
            follower = Follower(address(server))
            async with follower.running():
                trying = asyncio.create_task(follower.link.request(submit, 5))
                await until(lambda: script.seen.count(submit) >= 3)
                script.refuse = {}
                assert isinstance(await trying, Done)
                for code in (ErrorCode.UNAVAILABLE, ErrorCode.CONFLICT):
                    script.refuse = {JobSubmit: code}
                    with pytest.raises(RequestRefused) as refused:
                        await follower.link.request(submit, 0.3)
                    assert refused.value.code == code

    run(scene())


def test_a_request_can_be_made_for_the_session_that_it_goes_to(run: Run) -> None:
    """A message that names its session is made anew for each try."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server:
            follower = Follower(address(server))
            async with follower.running():
                assert await follower.link.request(lambda joined: Heartbeat(session_id=joined.session_id), 2)
                assert follower.link.joined is not None
                assert Heartbeat(session_id=follower.link.joined.session_id) in script.seen

    run(scene())


def test_a_resync_that_fails_ends_the_session_and_the_next_one_gets_another(run: Run) -> None:
    """A PeerError is the peer's; anything else is a bug, and ends `run`."""

    async def scene() -> None:
        script = Script()
        async with serving(None, script) as server:
            follower = Follower(address(server))
            follower.fail = PeerError("not this time")
            async with follower.running():
                await until(lambda: len(follower.joins) >= 3)
                await asyncio.sleep(0.5)
                assert len(follower.joins) < 15  # with growing pauses
                follower.fail = None
                count = len(follower.joins)
                await until(
                    lambda: len(follower.joins) > count and Heartbeat(session_id=follower.joins[-1].session_id) in script.seen
                )
            follower = Follower(address(server))
            follower.fail = ZeroDivisionError("a bug")
            with pytest.raises(ZeroDivisionError):
                await follower.link.run()

    run(scene())


@pytest.mark.parametrize(
    ("candidates", "why"), [((), "no controller address"), (("c1",), "is no address"), (("a:1", "b:x"), "is no address")]
)
def test_candidates_are_checked_when_it_is_made(candidates: tuple[str, ...], why: str) -> None:
    """An operator's mistake is told at the start, not after a minute of trying."""
    with pytest.raises(ConfigError, match=why):
        FailoverConnection(candidates, None, lambda resume: join(), lambda _: None, Follower("a:1")._joined)
