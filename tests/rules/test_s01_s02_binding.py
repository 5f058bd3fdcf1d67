"""docs/rules.md S1 and S2: what a role-bound child is started for."""

from __future__ import annotations

from tests.core.world import World
from xce_supervisor.core.child_words import Starting, Stopping, StopReason
from xce_supervisor.core.words import Binding, Role


def test_s1_nothing_is_started_before_the_controller_reports_primary() -> None:
    """docs/rules.md S1: standby, silence and a refused promotion start nothing; primary does, at once."""
    world = World()
    world.answer(Role.STANDBY, term=3)
    world.answer(Role.STANDBY, term=4, gate="apply divergent", gate_detail="index 7")
    world.advance(20_000)
    assert world.processes == []
    assert "role.gate_changed" in world.kinds()
    world.answer(Role.PRIMARY, term=4)
    assert [p.binding for p in world.processes] == [Binding("c1", "i1", 4)]


def test_s1_a_primary_whose_answer_comes_from_another_controller_starts_nothing() -> None:
    """docs/rules.md S1, S3: an address that answers as another controller is unknown, not primary."""
    world = World()
    from xce_supervisor.core import supervision as sup
    from xce_supervisor.core.role import Answer

    world.feed(sup.Answered(Answer(world.now, "c2", "i1", Role.PRIMARY, 1)))
    assert world.processes == []


def test_s2_a_new_term_while_still_primary_is_a_missed_demotion() -> None:
    """docs/rules.md S2: stop, reap, then start for the new binding; never both at once (the world asserts S5)."""
    world = World()
    world.next_deaf = True
    world.answer(term=1)
    world.joined(term=1)
    world.next_deaf = False
    world.answer(term=2)
    assert isinstance(world.child.life, Stopping) and world.child.life.reason is StopReason.REBOUND
    assert len(world.processes) == 1, "the deaf predecessor is still there"
    world.advance(4_900)
    world.answer(term=2)
    world.advance(200)
    assert [p.binding.term for p in world.alive] == [2]


def test_s2_a_new_instance_with_the_same_term_is_a_missed_demotion_too() -> None:
    """docs/rules.md S2: the controller's process was restarted between two looks."""
    world = World()
    world.answer(term=1, instance="i1")
    world.answer(term=1, instance="i2")
    world.advance(6_000)
    assert [p.binding.instance_id for p in world.alive] == ["i2"]
    assert world.processes[0].signals[:2] == ["TERM", "CONT"]


def test_s2_a_start_that_went_stale_in_the_lane_spawns_nothing_and_is_tried_for_the_new_binding() -> None:
    """docs/rules.md S2, S6: a queued start is withdrawn on demotion, and the next promotion starts afresh."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    assert isinstance(world.child.life, Starting)
    world.answer(Role.STANDBY, term=1)
    world.finish_spawns()
    assert world.processes == []
    world.slow_spawn = False
    world.answer(term=2)
    world.advance(300)
    assert [p.binding.term for p in world.alive] == [2]
