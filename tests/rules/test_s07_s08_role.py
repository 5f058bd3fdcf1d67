"""docs/rules.md S7 and S8: silence, doubt and flapping."""

from __future__ import annotations

from tests.core.world import World
from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import Running
from xce_supervisor.core.role import Unknown
from xce_supervisor.core.words import NS_PER_S, Now, Role


def running() -> World:
    world = World()
    world.answer(term=1)
    world.joined()
    return world


def test_s7_a_silent_controller_is_unknown_with_a_countdown_and_its_children_stop_at_the_limit() -> None:
    """docs/rules.md S7: visible at once, stopped 3 s after the last answer was asked for."""
    world = running()
    world.advance(1_000)
    world.feed(sup.Silent("no answer within 1000 ms"))
    assert isinstance(world.state.role.is_, Unknown)
    assert isinstance(world.child.life, Running)
    world.advance(1_900)
    assert world.processes[0].signals == []
    world.advance(200)
    assert world.processes[0].signals[:2] == ["TERM", "CONT"]


def test_s7_an_answer_before_the_limit_keeps_the_child() -> None:
    """docs/rules.md S7: a hiccup restarts nothing."""
    world = running()
    for _ in range(20):
        world.advance(2_000)
        world.feed(sup.Silent("connection lost"))
        world.advance(500)
        world.joined()
    assert len(world.processes) == 1 and world.alive


def test_s7_nothing_is_started_while_the_role_is_unknown() -> None:
    """docs/rules.md S1, S7: a crash in the countdown is not answered by a start."""
    world = running()
    world.feed(sup.Silent("connection lost"))
    world.die()
    world.advance(1_000)
    assert len(world.processes) == 1
    world.answer(term=1)
    assert len(world.processes) == 2


def test_s7_a_primary_without_fresh_quorum_counts_as_unknown() -> None:
    """docs/rules.md S7: older than 5 s is no longer believed; children stop 3 s after the last good answer."""
    world = running()
    world.advance(1_000)
    world.answer(term=1, quorum_age_ns=4 * NS_PER_S)
    for _ in range(12):
        world.advance(250)
        world.answer(term=1, quorum_age_ns=6 * NS_PER_S)
    assert not isinstance(world.child.life, Running)
    assert world.processes[0].signals[:2] == ["TERM", "CONT"]


def test_s7_the_countdown_uses_the_faster_clock() -> None:
    """docs/rules.md S7, L23: a suspend (BOOTTIME goes on) may not lengthen a binding."""
    world = running()
    world.feed(sup.Silent("no answer"))
    world.now = Now(world.now.mono_ns + NS_PER_S, world.now.boot_ns + 4 * NS_PER_S)
    world.feed(sup.TimePassed())
    assert world.processes[0].signals[:2] == ["TERM", "CONT"]


def test_s7_a_term_that_goes_back_is_not_believed() -> None:
    """docs/rules.md S7: a controller restored from a backup answers garbage, also the second time."""
    world = running()
    world.answer(term=5)
    world.advance(6_000)
    count = len(world.processes)
    for _ in range(40):
        world.advance(100)
        world.answer(term=4)
    assert len(world.processes) == count and not world.alive


def test_s8_a_flapping_role_has_bounded_starts_and_ends_in_one_child_within_the_limit() -> None:
    """docs/rules.md S8: 300 ms toggles for 60 s, then calm: hold-down at most 5 s, plus grace, plus start."""
    world = World()
    world.next_deaf = True
    term = 0
    for _ in range(100):
        term += 1
        world.answer(Role.PRIMARY, term=term)
        world.advance(300)
        world.answer(Role.STANDBY, term=term)
        world.advance(300)
    assert len(world.processes) < 12
    world.answer(Role.PRIMARY, term=term + 1)
    world.advance(5_000 + 1_000 + 5_000 + 10)
    assert [p.binding.term for p in world.alive] == [term + 1]


def test_s8_the_hold_down_is_reset_after_calm() -> None:
    """docs/rules.md S8: after 60 s without loss of the role a promotion starts at once again."""
    world = World()
    for term in range(1, 6):
        world.answer(Role.PRIMARY, term=term)
        world.advance(50)
        world.answer(Role.STANDBY, term=term)
        world.advance(50)
    world.advance(61_000)
    before = len(world.processes)
    world.answer(Role.PRIMARY, term=9)
    assert len(world.processes) == before + 1


def test_s8_the_first_promotion_is_not_held_down() -> None:
    """docs/rules.md S8: milliseconds count when the cluster has no scheduler."""
    world = World()
    world.answer(Role.STANDBY)
    world.advance(250)
    world.answer(Role.PRIMARY, term=1)
    assert len(world.processes) == 1
