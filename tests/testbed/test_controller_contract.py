"""What the fake controller and the real one have in common: whoever is tested against the fake is tested against the real one.

Each test runs against both: two controllers, one primary and one standby, spoken to as peers do (docs/protocol.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.controller import FakeController
from tests.shell.controllers import Controllers, sqlite_url
from tests.testbed.stage import Stage, until
from xce_supervisor.errors import PeerError, Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.testbed import client
from xce_supervisor.wire.words import (
    ConfigPush,
    Done,
    ErrorCode,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobPush,
    JobQuery,
    JobSubmit,
    Join,
    Joined,
    Message,
    PushAck,
    QueuePush,
    Resync,
    SchedulerSession,
)


@dataclass(slots=True)
class Pair:
    """One primary and one standby, by address and id."""

    stage: Stage
    primary: str
    primary_id: str
    term: int
    standby: str
    standby_id: str
    early: list[Message] = field(default_factory=list)  # pushes that came while the peer waited for an answer

    @asynccontextmanager
    async def peer(self, role: str, address: str, received: list[Message] | None = None) -> AsyncIterator[Connection]:
        """A connection with a certificate of `role`; pushes go to `received`; `early` gets those that come before an answer."""
        early: list[Message] = []

        def on_push(message: Message) -> None:
            if received is not None:
                received.append(message)
            if connection.waits:
                early.append(message)

        tls = self.stage.tls(role, "scheduler" if role == "scheduler" else "w1")
        connection = await connect(address, tls, deadline_s=10.0, on_push=on_push)
        try:
            yield connection
            self.early.extend(early)
        finally:
            connection.close("the test has asked")
            await connection.closed

    def join(self, **changes: object) -> Join:
        """A scheduler's join that is right, with changes."""
        right: dict[str, object] = {
            "host_role": HostRole.SCHEDULER,
            "name": "scheduler",
            "controller_id": self.primary_id,
            "term": self.term,
            "spawn_token": "token-1",
        }
        return Join(**{**right, **changes})  # type: ignore[arg-type]

    async def status(self, address: str, **how: int):  # type: ignore[no-untyped-def]
        """Ctrlstatus, as a supervisor asks for it."""
        return await client.ctrlstatus(address, self.stage.tls("supervisor", "s1"), **how)


@asynccontextmanager
async def fake_pair(stage: Stage) -> AsyncIterator[Pair]:
    """Two fake controllers."""
    primary = FakeController(controller_id="c1", term=5, tls=stage.tls("controller", "c1"))
    standby = FakeController(
        controller_id="c2", instance_id="instance-2", role="standby", term=5, tls=stage.tls("controller", "c2")
    )
    async with primary, standby:
        await primary.say(primary_address=primary.address, primary_id="c1")
        await standby.say(primary_address=primary.address, primary_id="c1")
        yield Pair(stage, primary.address, "c1", 5, standby.address, "c2")


@pytest.fixture(scope="module")
def real_controllers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    """Two real controllers on one sqlite file, for all tests here: no test changes who leads."""
    folder = tmp_path_factory.mktemp("real")
    with Stage(folder) as stage:
        yield Controllers(stage, sqlite_url(folder), 2)


async def real_pair(controllers: Controllers) -> Pair:
    """Who leads among the real ones."""
    leader = await controllers.primary(30)
    [other] = controllers.others(leader)
    await controllers.says(other, lambda status: status.primary_address == leader.address, within_s=30)
    await controllers.says(leader, lambda status: status.scheduler == SchedulerSession(joined=False))
    term = (await controllers.status(leader)).term
    return Pair(controllers.stage, leader.address, leader.name, term, other.address, other.name)


Scenario = Callable[[Pair], Awaitable[None]]
Play = Callable[[Scenario], None]


@pytest.fixture(params=["fake", "real"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Run one scenario against one kind of pair."""

    async def with_fakes(scenario: Scenario) -> None:
        with Stage(tmp_path) as stage:
            async with fake_pair(stage) as pair:
                await scenario(pair)

    async def with_real_ones(scenario: Scenario) -> None:
        await scenario(await real_pair(request.getfixturevalue("real_controllers")))

    run = with_fakes if request.param == "fake" else with_real_ones
    return lambda scenario: asyncio.run(run(scenario))


async def refusal(connection: Connection, message: Message) -> ErrorCode:
    """The code with which a request is refused."""
    with pytest.raises(RequestRefused) as refused:
        await connection.request(message, 10.0)
    return ErrorCode(refused.value.code)


def test_ctrlstatus_is_answered_in_every_role_with_the_fields_that_supervisors_need(play: Play) -> None:
    """docs/protocol.md, ctrlstatus: identity, role, term, primary, freshness, version; no session needed."""

    async def scenario(pair: Pair) -> None:
        leads, stands = await pair.status(pair.primary), await pair.status(pair.standby)
        assert (leads.controller_id, leads.role, leads.term) == (pair.primary_id, "primary", pair.term)
        assert (stands.controller_id, stands.role) == (pair.standby_id, "standby")
        assert leads.instance_id and stands.instance_id and leads.instance_id != stands.instance_id
        assert stands.primary_address == pair.primary and stands.primary_id == pair.primary_id
        assert leads.quorum_age_ms is not None and leads.quorum_age_ms < 5000
        assert leads.scheduler == SchedulerSession(joined=False)
        assert leads.long_poll and leads.version > 0 and leads.engine == "sqlite"

    play(scenario)


def test_a_standby_redirects_what_only_the_primary_serves(play: Play) -> None:
    """docs/protocol.md, redirects: they name the primary's address and id; the connection goes on."""

    async def scenario(pair: Pair) -> None:
        async with pair.peer("operator", pair.standby) as connection:
            for message in (JobSubmit(job_id="a", command=("true",)), JobQuery()):
                with pytest.raises(Redirected) as redirected:
                    await connection.request(message, 10.0)
                assert (redirected.value.address, redirected.value.controller_id) == (pair.primary, pair.primary_id)
        async with pair.peer("worker", pair.standby) as connection:
            with pytest.raises(Redirected):
                await connection.request(Join(host_role=HostRole.WORKER, name="w1", slots=1), 10.0)
        async with pair.peer("scheduler", pair.standby) as connection:
            with pytest.raises(Redirected):
                await connection.request(pair.join(controller_id=pair.standby_id), 10.0)

    play(scenario)


def test_a_scheduler_is_joined_only_with_the_right_controller_and_term(play: Play) -> None:
    """docs/rules.md S3: each refusal has its code, and the connection goes on to a right join."""

    async def scenario(pair: Pair) -> None:
        async with pair.peer("scheduler", pair.primary) as connection:
            assert await refusal(connection, pair.join(controller_id="other")) is ErrorCode.WRONG_CONTROLLER
            assert await refusal(connection, pair.join(term=pair.term + 1)) is ErrorCode.WRONG_TERM
            assert await refusal(connection, pair.join(term=pair.term - 1)) is ErrorCode.WRONG_TERM
            joined = await connection.request(pair.join(), 10.0)
            assert isinstance(joined, Joined)
            assert (joined.controller_id, joined.term) == (pair.primary_id, pair.term)
            assert joined.session_id and joined.heartbeat_ms > 0 and joined.session_timeout_ms > joined.heartbeat_ms
            assert joined.instance_id == (await pair.status(pair.primary)).instance_id

    play(scenario)


def test_a_second_scheduler_is_refused_until_the_first_one_is_gone(play: Play) -> None:
    """docs/rules.md S3: SESSION_ALIVE while it lives; a closed connection ends the session at once."""

    async def scenario(pair: Pair) -> None:
        async with pair.peer("scheduler", pair.primary) as second:
            async with pair.peer("scheduler", pair.primary) as first:
                await first.request(pair.join(spawn_token="first"), 10.0)
                assert await refusal(second, pair.join(spawn_token="second")) is ErrorCode.SESSION_ALIVE
                session = (await pair.status(pair.primary)).scheduler
                assert session is not None and session.joined and session.spawn_token == "first"
            give_up_at = asyncio.get_running_loop().time() + 20
            while True:
                try:
                    await second.request(pair.join(spawn_token="second"), 10.0)
                    break
                except RequestRefused as error:
                    assert error.code == ErrorCode.SESSION_ALIVE and asyncio.get_running_loop().time() < give_up_at
                    await asyncio.sleep(0.01)
            session = (await pair.status(pair.primary)).scheduler
            assert session is not None and session.spawn_token == "second"

    play(scenario)


def test_pushes_follow_the_join_and_their_acknowledgement_shows_in_ctrlstatus(play: Play) -> None:
    """docs/protocol.md, pushes: after the answer to the join, numbered from 1, of the pusher's term; then acted."""

    async def scenario(pair: Pair) -> None:
        received: list[Message] = []
        async with pair.peer("scheduler", pair.primary, received) as connection:
            joined = await connection.request(pair.join(), 10.0)
            assert isinstance(joined, Joined)
            await until(lambda: len(received) >= 3, 20, "no pushes after the join")
            assert [type(one) for one in received] == [ConfigPush, QueuePush, JobPush]
            assert [getattr(one, "seq", 0) for one in received] == [1, 2, 3]
            assert all(getattr(one, "term", 0) == pair.term for one in received)
            session = (await pair.status(pair.primary)).scheduler
            assert session is not None and session.last_push_seq == 3 and session.oldest_unacked_ms is not None
            assert isinstance(await connection.request(PushAck(session_id=joined.session_id, seq=3), 10.0), Done)
            session = (await pair.status(pair.primary)).scheduler
            assert session is not None and session.last_acted_seq == 3 and session.oldest_unacked_ms is None
            await connection.request(Resync(session_id=joined.session_id), 10.0)
            await until(lambda: len(received) >= 6, 20, "no pushes after the resync")
            assert [getattr(one, "seq", 0) for one in received[3:]] == [4, 5, 6]
            assert isinstance(received[5], JobPush) and received[5].full
        assert not [one for one in pair.early if getattr(one, "seq", 0) <= 3], "a push came before the join was answered"

    play(scenario)


def test_a_heartbeat_is_a_role_check_and_needs_a_session(play: Play) -> None:
    """docs/rules.md S4: its answer is role and term; without a session it is refused with NOT_JOINED."""

    async def scenario(pair: Pair) -> None:
        async with pair.peer("scheduler", pair.primary) as connection:
            assert await refusal(connection, Heartbeat(session_id="none")) is ErrorCode.NOT_JOINED
            joined = await connection.request(pair.join(), 10.0)
            assert isinstance(joined, Joined)
            answer = await connection.request(Heartbeat(session_id=joined.session_id), 10.0)
            assert answer == HeartbeatReply(role="primary", term=pair.term)
            assert await refusal(connection, PushAck(session_id="none", seq=1)) is ErrorCode.NOT_JOINED

    play(scenario)


def test_a_long_poll_is_answered_at_a_change_or_after_its_wait(play: Play) -> None:
    """docs/protocol.md, ctrlstatus: a scheduler that joins is such a change."""

    async def scenario(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        now = await pair.status(pair.primary)
        asked_at = loop.time()
        same = await pair.status(pair.primary, known_version=now.version, wait_ms=300)
        assert same.version == now.version and loop.time() - asked_at >= 0.3
        waiting = asyncio.create_task(pair.status(pair.primary, known_version=now.version, wait_ms=5000))
        async with pair.peer("scheduler", pair.primary) as connection:
            await connection.request(pair.join(), 10.0)
            asked_at = loop.time()
            changed = await waiting
            assert changed.version > now.version and changed.scheduler is not None and changed.scheduler.joined
            assert loop.time() - asked_at < 4.0

    play(scenario)


def test_a_peer_of_another_authority_is_not_let_in(play: Play, tmp_path: Path) -> None:
    """docs/rules.md A1: a certificate of another authority is refused by the server, with a reason for the client."""

    async def scenario(pair: Pair) -> None:
        with Stage(pair.stage.directory / "stranger") as stranger, pytest.raises(PeerError):
            await connect(pair.primary, stranger.tls("scheduler", "scheduler"), deadline_s=10.0, on_push=lambda _: None)

    (tmp_path / "stranger").mkdir()
    play(scenario)
