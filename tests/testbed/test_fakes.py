"""The fakes themselves: the script language, and trouble on the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.controller import FakeController
from tests.fakes.controller_relay import Mode, Relay
from tests.fakes.controller_script import parse, play
from tests.testbed.stage import Stage
from xce_supervisor.errors import DeadlinePassed, PeerError, RequestRefused
from xce_supervisor.testbed.client import ctrlstatus
from xce_supervisor.wire.words import SchedulerSession


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("primary 1", "line 1: 'primary 1' is not MILLISECONDS VERB WORDS"),
        ("0 primary 1\n\n5", "line 3"),
        ("100 primary 1\n50 standby 1", "line 2: 50 ms comes after 100 ms"),
    ],
)
def test_a_broken_script_is_refused_by_line(text: str, complaint: str) -> None:
    """A test with a typo must fail, not pass for nothing."""
    with pytest.raises(ValueError, match=complaint):
        parse(text)


@pytest.mark.parametrize("step", ["0 primry 1", "0 silent nothing", "0 delay join", "0 primary"])
async def test_an_unknown_step_fails_the_play(step: str) -> None:
    """Also what can only be seen when it is played."""
    fake = FakeController()
    with pytest.raises(ValueError, match="line 1"):
        await play(fake, step)


async def test_a_script_is_played_at_its_times() -> None:
    """Roles, restarts, gates, stalls and trouble, as the comment of the language says."""
    async with FakeController() as fake:
        first = fake.says.instance_id
        playing = asyncio.create_task(
            play(
                fake,
                """
                0    standby 7      # a comment
                0    foreign stranger
                0    gate recovery-truncated
                0    quorum 6000
                60   primary 8
                60   restart
                60   foreign
                60   gate
                60   refuse ctrl_status 10
                150  answer
                """,
            )
        )
        await fake.until(lambda: fake.says.quorum_age_ms == 6000)
        before = await ctrlstatus(fake.address, None)
        assert (before.role, before.term, before.gate) == ("standby", 7, "recovery-truncated")
        assert before.scheduler is not None and before.scheduler.spawn_token == "stranger"
        await fake.until(lambda: fake.trouble.refuse)
        with pytest.raises(RequestRefused):
            await ctrlstatus(fake.address, None)
        await playing
        after = await ctrlstatus(fake.address, None)
        assert (after.role, after.term, after.gate, after.scheduler) == ("primary", 8, "", SchedulerSession(joined=False))
        assert after.instance_id != first and after.version > before.version


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("0 silent ctrl_status", DeadlinePassed),
        ("0 delay ctrl_status 900", DeadlinePassed),
        ("0 garbage ctrl_status", PeerError),
        ("0 hang_up ctrl_status", PeerError),
    ],
)
async def test_trouble_with_an_opcode_is_what_the_client_sees(step: str, error: type[Exception]) -> None:
    """Silence and delay pass the deadline; garbage and a closed connection are told at once."""
    async with FakeController() as fake:
        await play(fake, step)
        began = asyncio.get_running_loop().time()
        deadline_s = 0.4 if error is DeadlinePassed else 20.0
        with pytest.raises(error):
            await ctrlstatus(fake.address, None, deadline_s=deadline_s)
        took_s = asyncio.get_running_loop().time() - began
        assert took_s >= 0.35 if error is DeadlinePassed else took_s < 10


@pytest.mark.parametrize("mode", [Mode.HOLD, Mode.GARBAGE, Mode.REFUSE])
async def test_trouble_on_the_wire_is_told_by_the_deadline(tmp_path: Path, mode: Mode) -> None:
    """A silent host, noise in place of TLS, and a port that hangs up."""
    with Stage(tmp_path) as stage:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake, Relay(fake.address) as relay:
            relay.set(mode)
            with pytest.raises(PeerError):
                await ctrlstatus(relay.address, stage.tls("supervisor", "s1"), deadline_s=0.5)
            relay.set(Mode.PASS)
            assert (await ctrlstatus(relay.address, stage.tls("supervisor", "s1"))).role == "primary"


async def test_an_answer_that_comes_byte_by_byte_is_an_answer(tmp_path: Path) -> None:
    """Slow is not broken: TLS records and frames are put together again."""
    with Stage(tmp_path) as stage:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake, Relay(fake.address) as relay:
            relay.set(Mode.BYTEWISE)
            assert (await ctrlstatus(relay.address, stage.tls("supervisor", "s1"), deadline_s=5.0)).term == 1
