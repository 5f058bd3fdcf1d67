"""docs/rules.md S9 and S10: alive, and not acting on pushed work."""

from __future__ import annotations

import pytest

from tests.core.world import World
from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import Pause, PauseChanged, Running, Stopping, StopReason
from xce_supervisor.core.role import Session
from xce_supervisor.core.words import NS_PER_S, Gap, Now


def joined_world() -> World:
    world = World()
    world.answer(term=1)
    world.advance(200)
    world.joined()
    assert "child.joined" in world.kinds()
    return world


def poll(world: World, seconds: float, *, pushed: int, acted: int, oldest_ms: int | None = None) -> None:
    """Answers every 250 ms for a while; oldest_ms grows by itself where it is given."""
    oldest = oldest_ms
    for _ in range(int(seconds * 4)):
        world.advance(250)
        if oldest is not None:
            oldest += 250
        world.joined(pushed=pushed, acted=acted, oldest_ms=oldest)


def test_s9_an_idle_scheduler_is_never_wedged() -> None:
    """docs/rules.md S9: nothing pushed, nothing owed."""
    world = joined_world()
    poll(world, 120, pushed=5, acted=5)
    assert isinstance(world.child.life, Running) and len(world.processes) == 1


def test_s9_a_stall_is_a_wedge_only_when_confirmed_a_second_later_without_progress() -> None:
    """docs/rules.md S9: oldest push 10 s old, seen again at least 1 s later, nothing acted on between."""
    world = joined_world()
    poll(world, 9.5, pushed=6, acted=5, oldest_ms=0)
    assert "child.stall_suspected" not in world.kinds()
    poll(world, 1.0, pushed=6, acted=5, oldest_ms=9_750)
    assert "child.wedged" not in world.kinds()
    poll(world, 1.0, pushed=6, acted=5, oldest_ms=10_750)
    assert "child.wedged" in world.kinds()
    assert world.evidence and world.processes[0].signals[:2] == ["TERM", "CONT"]


def test_s9_progress_between_two_looks_clears_the_suspicion() -> None:
    """docs/rules.md S9: a slow scheduler that moves is not wedged."""
    world = joined_world()
    for acted in range(60):
        world.advance(900)
        world.joined(pushed=1000, acted=acted, oldest_ms=30_000)
    assert len(world.processes) == 1 and "child.wedged" not in world.kinds()


def test_s9_a_child_that_never_joins_is_treated_as_wedged_after_the_join_timeout() -> None:
    """docs/rules.md S9: 10 s from its spawn; the class says so."""
    world = World()
    none = Session(False, "", "", 0, 0, None)
    world.answer(term=1)
    for _ in range(39):
        world.advance(250)
        world.answer(term=1, session=none)
    assert "child.wedged" not in world.kinds()
    for _ in range(3):
        world.advance(250)
        world.answer(term=1, session=none)
    wedged = next(record for _, record in world.records if record.kind == "child.wedged")
    assert wedged.reason == "not joined"


def test_s9_a_stopped_child_that_loses_its_session_still_owes_what_it_owed() -> None:
    """docs/rules.md S9: heartbeats end after 3 s; the stall is found out at 10 s plus the confirmation, not at 3 s plus 10 s."""
    world = joined_world()
    poll(world, 3, pushed=6, acted=5, oldest_ms=0)
    none = Session(False, "", "", 0, 0, None)
    for _ in range(4 * 7 - 1):
        world.advance(250)
        world.answer(term=1, session=none)
    assert "child.wedged" not in world.kinds()
    for _ in range(6):
        world.advance(250)
        world.answer(term=1, session=none)
    wedged = next(record for _, record in world.records if record.kind == "child.wedged")
    assert wedged.reason != "not joined"


def test_s9_a_foreign_session_is_not_taken_for_our_childs() -> None:
    """docs/rules.md S3, S9: only the session with our own spawn token counts as joined."""
    world = World()
    world.answer(term=1)
    for _ in range(44):
        world.advance(250)
        world.joined(token="somebody else")
    assert "child.joined" not in world.kinds() and "child.wedged" in world.kinds()


def test_s9_a_controller_that_tells_nothing_of_sessions_leads_to_no_verdict() -> None:
    """docs/rules.md S9: without the field the rule is off."""
    world = World()
    for _ in range(200):
        world.answer(term=1, session=None)
        world.advance(250)
    assert len(world.processes) == 1 and world.alive


@pytest.mark.parametrize(
    ("state", "cpu", "expected"),
    [
        ("T", 0, "stopped (T)"),
        ("D", 0, "uninterruptible (D)"),
        ("R", 0, "starved"),
        ("R", 1, "busy without progress"),
        ("S", 0, "no progress"),
    ],
)
def test_s9_the_verdict_names_a_class(state: str, cpu: int, expected: str) -> None:
    """docs/rules.md S9: stopped, uninterruptible, starved, busy without progress."""
    world = joined_world()
    world.probe_state = state
    age = 10_000
    while "child.wedged" not in world.kinds():
        world.advance(250)
        age += 250
        world.probe_cpu_ns += cpu * NS_PER_S // 4
        world.joined(pushed=6, acted=5, oldest_ms=age)
    wedged = next(record for _, record in world.records if record.kind == "child.wedged")
    assert wedged.reason == expected


def test_s10_a_judge_who_was_absent_credits_the_gap_and_verifies_the_role_first() -> None:
    """docs/rules.md S10: after 30 s of our own absence nobody is killed on old knowledge, and the controller is asked at once."""
    world = World()
    world.answer(term=1)
    world.advance(2_000)
    gap = 30 * NS_PER_S
    world.now = Now(world.now.mono_ns + gap, world.now.boot_ns + gap)
    world.feed(sup.LoopGapSeen(Gap(gap, gap)))
    world.feed(sup.Silent("no answer within 1000 ms"))
    assert world.polls == 1 and isinstance(world.child.life, Running)
    world.answer(term=1, session=Session(False, "", "", 0, 0, None))
    world.advance(7_000)
    world.answer(term=1, session=Session(False, "", "", 0, 0, None))
    assert "child.wedged" not in world.kinds(), "7 s plus 2 s of its 10 s have passed, the gap does not count"
    world.advance(1_500)
    world.answer(term=1, session=Session(False, "", "", 0, 0, None))
    assert "child.wedged" in world.kinds()


def test_s10_a_binding_that_lapsed_during_the_gap_ends_before_anything_else() -> None:
    """docs/rules.md S10: the answer after the gap says another term."""
    world = joined_world()
    world.feed(sup.LoopGapSeen(Gap(10 * NS_PER_S, 10 * NS_PER_S)))
    world.answer(term=2)
    life = world.child.life
    assert (isinstance(life, Running) and life.run.binding.term == 2) or isinstance(life, Stopping) or not world.alive


def test_s10_the_controllers_own_pause_is_credited() -> None:
    """docs/rules.md S10: an age that grew while the controller's loop stood still is not held against the child."""
    world = joined_world()
    for age in range(0, 4000, 250):
        world.advance(250)
        world.joined_with_gap(age + 11_000, gap_ms=11_000)
    assert "child.stall_suspected" not in world.kinds()


def test_s24_a_paused_unit_is_not_killed_for_a_wedge() -> None:
    """docs/rules.md S24: pause stops wedge kills; demotion still stops the child."""
    world = joined_world()
    world.happened("scheduler", PauseChanged(Pause("anna", "debugging", 0.0)))
    poll(world, 15, pushed=6, acted=5, oldest_ms=10_000)
    assert world.alive and not world.evidence
    from xce_supervisor.core.words import Role

    world.answer(Role.STANDBY)
    world.advance(1_100)
    assert not world.alive
    assert StopReason.DEMOTED
