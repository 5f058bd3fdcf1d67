"""docs/rules.md S5, S6 and S14: one child at a time, and the way down."""

from __future__ import annotations

import pytest

from tests.core.world import World
from xce_supervisor.core.child_words import CancelSpawn, Resting, Running, Starting, Stopping, Unkillable
from xce_supervisor.core.words import Role


def started(**next_: bool) -> World:
    world = World()
    for key, value in next_.items():
        setattr(world, f"next_{key}", value)
    world.answer(term=1)
    world.joined()
    for key in next_:
        setattr(world, f"next_{key}", False)
    return world


def test_s6_demotion_gives_the_exit_push_a_second_then_term_and_cont_then_kill_after_the_grace() -> None:
    """docs/rules.md S6: 1 s for the exit push, SIGTERM followed at once by SIGCONT, 5 s of grace, SIGKILL to the tree."""
    world = started(deaf=True)
    process = world.processes[0]
    world.answer(Role.STANDBY)
    world.advance(999)
    assert process.signals == []
    world.advance(2)
    assert process.signals == ["TERM", "CONT"]
    world.advance(4_990)
    assert process.signals == ["TERM", "CONT"]
    world.advance(20)
    assert process.signals == ["TERM", "CONT", "KILL"]
    assert isinstance(world.child.life, Resting)


def test_s6_a_child_that_obeys_the_exit_push_gets_no_signal() -> None:
    """docs/rules.md S6: the push is enough for a healthy scheduler, and its end is no crash."""
    world = started()
    world.answer(Role.STANDBY)
    world.advance(200)
    world.die(code=0, signal=None)
    world.advance(10_000)
    assert world.processes[0].signals == []
    assert world.child.failures == 0


@pytest.mark.parametrize("again", ["standby", "silent", "restart"])
def test_s6_there_is_one_stop_sequence_and_later_requests_join_it(again: str) -> None:
    """docs/rules.md S6: neither a second demotion, nor silence, nor an operator's restart begins the ladder anew."""
    world = started(deaf=True)
    world.answer(Role.STANDBY)
    world.advance(3_000)
    if again == "standby":
        world.answer(Role.STANDBY, term=2)
    elif again == "silent":
        from xce_supervisor.core import supervision as sup

        world.feed(sup.Silent("no answer"))
    else:
        from xce_supervisor.core.child_words import RestartAsked

        world.happened("scheduler", RestartAsked("anna"))
    world.advance(3_001)
    assert world.processes[0].signals == ["TERM", "CONT", "KILL"]


def test_s6_a_stop_that_arrives_while_the_start_is_queued_cancels_it() -> None:
    """docs/rules.md S6: the core asks for the cancellation, and the lane's answer ends the flight."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    world.answer(Role.STANDBY)
    assert world.in_flight == [] and world.processes == []


def test_s6_a_stop_that_arrives_while_the_spawn_runs_stops_the_child_as_soon_as_it_returns() -> None:
    """docs/rules.md S6: "already in flight" is never a lost request."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    flight = list(world.in_flight)
    world.in_flight = []  # it runs already: the cancellation comes too late
    world.answer(Role.STANDBY)
    assert isinstance(world.child.life, Starting) and world.child.life.withdrawn
    world.in_flight = flight
    world.finish_spawns()
    world.advance(1_100)
    assert world.processes[0].signals[:2] == ["TERM", "CONT"]
    assert not world.alive
    assert CancelSpawn is not None


def test_s5_what_a_dead_leader_leaves_behind_is_killed_before_a_successor_starts() -> None:
    """docs/rules.md S5: the whole tree is gone first; the world asserts it at every spawn."""
    world = started(leftovers=True)
    world.die(signal=11)
    assert world.processes[0].signals == ["KILL"]
    assert len(world.processes) == 2


def test_s5_the_end_of_the_leader_does_not_end_the_ladder() -> None:
    """docs/rules.md S5, S6: the leader obeys SIGTERM, a process of its tree does not; the tree is killed after the grace."""
    world = started(leftovers=True)
    world.answer(Role.STANDBY)
    world.advance(1_001)
    assert isinstance(world.child.life, Stopping) and world.child.life.exit is not None
    world.answer(Role.PRIMARY, term=2)
    world.advance(4_000)
    assert len(world.processes) == 1
    world.advance(1_100)
    assert [p.binding.term for p in world.alive] == [2]


def test_s14_a_tree_that_survives_kill_is_unkillable_and_has_no_successor_until_it_goes() -> None:
    """docs/rules.md S14: alarm once, no successor, normal life when it is gone."""
    world = started(immortal=True, deaf=True)
    world.answer(Role.STANDBY)
    world.advance(12_000)
    assert isinstance(world.child.life, Unkillable)
    world.answer(Role.PRIMARY, term=2)
    world.advance(60_000)
    assert len(world.processes) == 1
    assert world.kinds().count("child.unkillable") == 1
    world.bury(world.processes[0])
    world.answer(Role.PRIMARY, term=2)
    world.advance(6_000)
    assert isinstance(world.child.life, Running) and world.child.life.run.binding.term == 2
