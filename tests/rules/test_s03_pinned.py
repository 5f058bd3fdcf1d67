"""docs/rules.md S3, the scheduler's side: one controller, one address, and an end rather than another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.controller import FakeController
from tests.testbed.stage import SCHEDULER, Stage
from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed.scheduler import ExitCode, parse_address
from xce_supervisor.wire.words import HostRole

# The same scheduler on a loop whose resolver gives several addresses, and others at every later look.
MANY_ADDRESSES = SCHEDULER.replace(
    "code = scheduler.serve(config)",
    """
    import asyncio, socket
    class Resolving(asyncio.SelectorEventLoop):
        looks = 0
        async def getaddrinfo(self, host, port, **how):
            if host != "controller.test":
                return await super().getaddrinfo(host, port, **how)
            Resolving.looks += 1
            first = ["127.0.0.1", "127.0.0.2"] if Resolving.looks == 1 else ["127.0.0.2", "127.0.0.1"]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in first]
    with asyncio.Runner(loop_factory=Resolving) as runner:
        code = runner.run(scheduler.run_scheduler(config))
    print("looks", Resolving.looks)
""",
)


def test_a_scheduler_is_given_exactly_one_address() -> None:
    """docs/rules.md S3: there is no way to name several."""
    for text in ("c1:7301,c2:7301", "c1:7301 c2:7301", "c1", ":7301", "c1:0", "c1:http"):
        with pytest.raises(ConfigError):
            parse_address(text)
    assert parse_address("[::1]:7301") == ("::1", 7301)


def test_two_addresses_end_the_process_as_a_configuration_error(tmp_path: Path) -> None:
    """docs/rules.md S3: exit code 78, and nothing is connected to."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(f"{fake.address},{fake.address}")
            assert await program.exit_code() == ExitCode.CONFIG
            assert "exactly one address" in program.output()
            assert fake.accepted == 0

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


@pytest.mark.parametrize("given_by", ["argument", "environment"])
def test_a_join_shows_controller_term_and_token(tmp_path: Path, given_by: str) -> None:
    """docs/rules.md S3: the spawn token that the supervisor made is reported back by ctrlstatus."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(term=7, tls=stage.tls("controller", "c1")) as fake:
            token = "drawn-for-this-spawn"
            if given_by == "argument":
                stage.scheduler(fake.address, term=7, spawn_token=token, environment={"XCE_SPAWN_TOKEN": "another"})
            else:
                stage.scheduler(fake.address, term=7, spawn_token="", environment={"XCE_SPAWN_TOKEN": token})
            await fake.until(lambda: fake.session_of(HostRole.SCHEDULER))
            session = fake.session_of(HostRole.SCHEDULER)
            assert session is not None
            assert (session.join.controller_id, session.join.term) == ("c1", 7)
            assert session.join.spawn_token == "drawn-for-this-spawn"

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


@pytest.mark.parametrize("secure", [True, False], ids=["by its certificate", "by its answer"])
def test_the_wrong_controller_ends_the_scheduler_with_13(tmp_path: Path, secure: bool) -> None:
    """docs/rules.md S3: the controller is not who it should be; the scheduler ends and does not look for another."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1") if secure else None) as fake:
            program = stage.scheduler(fake.address, controller_id="c2", secure=secure)
            assert await program.exit_code() == ExitCode.WRONG_CONTROLLER
            assert fake.session_of(HostRole.SCHEDULER) is None

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_the_wrong_term_ends_the_scheduler_with_14(tmp_path: Path) -> None:
    """docs/rules.md S3: a scheduler that was started for an earlier term never serves a later one."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(term=8, tls=stage.tls("controller", "c1")) as fake:
            assert await stage.scheduler(fake.address, term=7).exit_code() == ExitCode.WRONG_TERM

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_second_scheduler_ends_with_15_while_the_first_is_alive(tmp_path: Path) -> None:
    """docs/rules.md S3: while a session is alive the controller refuses a second join; the first goes on."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            first = stage.scheduler(fake.address)
            await fake.until(lambda: fake.session_of(HostRole.SCHEDULER))
            assert await stage.scheduler(fake.address, spawn_token="other").exit_code() == ExitCode.SESSION_ALIVE
            assert first.process.poll() is None

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_standby_is_not_joined_and_its_redirect_not_followed(tmp_path: Path) -> None:
    """docs/rules.md S3: a redirect names another controller, which a pinned scheduler must not serve."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as primary:
            async with FakeController(role="standby", tls=stage.tls("controller", "c1")) as standby:
                await standby.say(primary_address=primary.address, primary_id="c1")
                assert await stage.scheduler(standby.address).exit_code() == ExitCode.NOT_PRIMARY
            assert primary.accepted == 0

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


@pytest.mark.parametrize("listening", ["the second address", "the first address"])
def test_a_name_with_several_addresses_is_resolved_once_and_only_the_first_is_spoken_to(tmp_path: Path, listening: str) -> None:
    """docs/rules.md S3: also when a name resolves to several addresses, and later to another one.

    Where only the second listens, the scheduler retries the first until its deadline and ends with 16. Where only the first
    listens and goes away, it ends with 10, though the name now names the second first.
    """

    async def scenario(stage: Stage) -> None:
        tls = stage.tls("controller", "c1")
        first, second = FakeController(tls=tls), FakeController(tls=tls)
        if listening == "the second address":
            await second.start("127.0.0.2")
            port = second.address.rpartition(":")[2]
            program = stage.scheduler(f"controller.test:{port}", connect_deadline_s=1.0, code=MANY_ADDRESSES)
            assert await program.exit_code() == ExitCode.NOT_CONNECTED
        else:
            await first.start("127.0.0.1")
            port = first.address.rpartition(":")[2]
            await second.start("127.0.0.2", int(port))
            program = stage.scheduler(f"controller.test:{port}", code=MANY_ADDRESSES)
            await first.until(lambda: first.session_of(HostRole.SCHEDULER))
            await first.close()
            assert await program.exit_code() == ExitCode.CONNECTION_LOST
        assert second.accepted == 0
        assert "looks 1\n" in program.output()
        await first.close()
        await second.close()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))
