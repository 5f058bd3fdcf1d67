"""docs/rules.md S4: the scheduler ends itself, and each reason has an exit code of its own."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.fakes.controller import FakeController
from tests.fakes.controller_relay import Mode, Relay
from tests.testbed.stage import SCHEDULER, Stage
from xce_supervisor.testbed.scheduler import ExitCode
from xce_supervisor.wire.words import HostRole, JobPush, Opcode, SchedulerExit


def test_the_exit_push_ends_it_with_0(tmp_path: Path) -> None:
    """docs/rules.md S4: told to exit over the connection."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(fake.address)
            await program.says("scheduler.joined")
            fake.tell(HostRole.SCHEDULER, SchedulerExit(reason="demoted"))
            assert await program.exit_code() == ExitCode.ASKED

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


@pytest.mark.parametrize("how", ["closed", "reset", "half-open"])
def test_a_lost_connection_ends_it_with_10(tmp_path: Path, how: str) -> None:
    """docs/rules.md S4: closed, reset, or silent for the whole session time-out; it never connects anew."""

    async def scenario(stage: Stage) -> None:
        async with (
            FakeController(tls=stage.tls("controller", "c1"), session_timeout_ms=1500) as fake,
            Relay(fake.address) as relay,
        ):
            program = stage.scheduler(relay.address)
            await program.says("scheduler.joined")
            if how == "closed":
                session = fake.session_of(HostRole.SCHEDULER)
                assert session is not None
                session.connection.close("the test closes it")
            elif how == "reset":
                relay.reset()
            else:
                relay.set(Mode.HOLD)
            assert await program.exit_code() == ExitCode.CONNECTION_LOST
            assert relay.connections == 1

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


@pytest.mark.parametrize(
    ("change", "code"),
    [({"role": "standby"}, ExitCode.NOT_PRIMARY), ({"term": 2}, ExitCode.OTHER_TERM)],
    ids=["not primary", "another term"],
)
def test_a_changed_role_or_term_ends_it_within_a_check(tmp_path: Path, change: dict[str, object], code: ExitCode) -> None:
    """docs/rules.md S4: 11 and 12. The check comes every second, though nothing was pushed."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(fake.address)
            await program.says("scheduler.joined")
            loop = asyncio.get_running_loop()
            changed_at = loop.time()
            await fake.say(**change)
            assert await program.exit_code() == code
            assert loop.time() - changed_at < 6, "a check a second, and the process's end on a busy machine"

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_push_of_another_term_ends_it_with_12(tmp_path: Path) -> None:
    """docs/rules.md S4: what another term pushes is never acted on."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1"), heartbeat_ms=0) as fake:
            program = stage.scheduler(fake.address)
            await fake.until(lambda: fake.session_of(HostRole.SCHEDULER))
            fake.push(lambda seq, _: JobPush(seq=seq, term=2, jobs=()))
            assert await program.exit_code() == ExitCode.OTHER_TERM

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_nobody_there_ends_it_with_16_after_its_deadline(tmp_path: Path) -> None:
    """docs/rules.md S4: it tries its one address until the deadline, then ends, and says why."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            address = fake.address
        program = stage.scheduler(address, connect_deadline_s=0.8)
        assert await program.exit_code() == ExitCode.NOT_CONNECTED
        assert "Connection refused" in program.output()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_controller_that_comes_up_late_is_joined(tmp_path: Path) -> None:
    """docs/rules.md S4: before the join there is nothing to lose, so the same address is tried again."""

    async def scenario(stage: Stage) -> None:
        tls = stage.tls("controller", "c1")
        async with FakeController(tls=tls) as gone:
            port = int(gone.address.rpartition(":")[2])
        notices = stage.notices()
        stage.scheduler(gone.address, environment={"NOTIFY_SOCKET": str(notices.path)})
        fake = FakeController(tls=tls)
        await fake.until(lambda: any("refused" in line for line in notices.lines()))
        await fake.start(port=port)
        await fake.until(lambda: fake.session_of(HostRole.SCHEDULER))
        await fake.until(lambda: "READY=1" in notices.lines())
        await fake.close()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_sigterm_ends_it_with_17(tmp_path: Path) -> None:
    """docs/rules.md S4: told to end by a signal, joined or not."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(fake.address)
            await fake.until(lambda: fake.session_of(HostRole.SCHEDULER))
            program.signal(signal.SIGTERM)
            assert await program.exit_code() == ExitCode.SIGNALLED
            fake.trouble.silent.add(Opcode.JOIN)
            waiting = stage.scheduler(fake.address)
            await fake.until(lambda: sum(message.opcode is Opcode.JOIN for message in fake.asked) == 2)
            waiting.signal(signal.SIGTERM)
            assert await waiting.exit_code() == ExitCode.SIGNALLED

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_bug_ends_it_with_70_and_a_trace_in_its_log(tmp_path: Path) -> None:
    """docs/rules.md S4: what nobody foresaw has its own code, so that it is not taken for a fail-over."""
    broken = SCHEDULER.replace("try:", "scheduler.Acts.run = None\ntry:", 1)

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(fake.address, code=broken)
            assert await program.exit_code() == ExitCode.BUG
            assert "scheduler.failed" in program.output() and "TypeError" in program.output()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_missing_certificate_ends_it_with_78_and_names_the_file(tmp_path: Path) -> None:
    """docs/rules.md S4: a configuration error is not worth a restart."""

    async def scenario(stage: Stage) -> None:
        stage.files("scheduler", "scheduler").key.unlink()
        missing = SCHEDULER.replace("tls = TlsFiles(", "(Path(given['tls'][2])).unlink(missing_ok=True)\ntls = TlsFiles(")
        program = stage.scheduler("127.0.0.1:1", code=missing)
        assert await program.exit_code() == ExitCode.CONFIG
        assert "scheduler-scheduler.key" in program.output()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_every_exit_code_is_its_own_and_is_in_the_manual() -> None:
    """docs/rules.md S4: "each with its own documented exit code"."""
    text = (Path(__file__).parents[2] / "docs" / "scheduler.md").read_text("utf-8")
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    for code in ExitCode:
        assert f"| {int(code)} |" in text, f"docs/scheduler.md lacks {code!r}"
