"""Random lives of one supervisor: whatever happens, S1, S2, S5 hold at every step and the end is right (docs/rules.md S8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.world import Process, World
from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import (
    Adopted,
    Fault,
    Pause,
    PauseChanged,
    ProgramChanged,
    RestartAsked,
    Running,
    SpawnFailed,
    Starting,
    Stopping,
    UnitPolicy,
    Unkillable,
    live_run,
)
from xce_supervisor.core.role import RolePolicy, Session
from xce_supervisor.core.words import NS_PER_S, Binding, Gap, Identity, Now, Role

_ACTIONS = st.one_of(
    st.tuples(st.just("primary"), st.integers(0, 1)),
    st.tuples(st.just("standby"), st.integers(0, 1)),
    st.tuples(st.just("silent"), st.just(0)),
    st.tuples(st.just("advance"), st.sampled_from([1, 50, 250, 1_000, 3_100, 7_000, 40_000])),
    st.tuples(st.just("die"), st.sampled_from([-9, 0, 1, 11])),
    st.tuples(st.just("joined"), st.sampled_from([0, 9_000, 12_000])),
    st.tuples(st.just("unjoined"), st.just(0)),
    st.tuples(st.just("gap"), st.sampled_from([2, 30])),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("pause"), st.integers(0, 1)),
    st.tuples(st.just("next"), st.sampled_from(["deaf", "leftovers"])),
    st.tuples(st.just("slow"), st.integers(0, 1)),
    st.tuples(st.just("finish"), st.just(0)),
    st.tuples(st.just("fail"), st.integers(0, 1)),
    st.tuples(st.just("changed"), st.just(0)),
)


def _act(world: World, term: int, name: str, value: Any) -> int:
    life = world.child.life
    if name == "primary":
        term += value
        world.answer(Role.PRIMARY, term=max(1, term))
    elif name == "standby":
        term += value
        world.answer(Role.STANDBY, term=max(1, term))
    elif name == "silent":
        world.feed(sup.Silent("no answer"))
    elif name == "advance":
        world.advance(value)
    elif name == "die" and world.processes and world.processes[-1].alive:
        world.die(code=value if value >= 0 else None, signal=-value if value < 0 else None)
    elif name == "joined" and world.processes:
        world.joined(term=max(1, term), pushed=5, acted=4, oldest_ms=value)
    elif name == "unjoined":
        world.answer(Role.PRIMARY, term=max(1, term), session=Session(False, "", "", 0, 0, None))
    elif name == "gap":
        world.advance(value * 1000, tick=False)
        world.feed(sup.LoopGapSeen(Gap(value * NS_PER_S, value * NS_PER_S)))
    elif name == "restart":
        world.happened("scheduler", RestartAsked("anna"))
    elif name == "pause":
        world.happened("scheduler", PauseChanged(Pause("anna", "why not", 0.0) if value else None))
    elif name == "next":
        setattr(world, f"next_{value}", not getattr(world, f"next_{value}"))
    elif name == "slow":
        world.slow_spawn = bool(value)
    elif name == "finish":
        world.finish_spawns()
    elif name == "fail" and isinstance(life, Starting) and world.in_flight:
        world.in_flight = []
        world.happened("scheduler", SpawnFailed(life.run.generation, Fault(bool(value), "exec", "/x", 2, "no"), 0.5))
    elif name == "changed":
        world.happened("scheduler", ProgramChanged())
    return term


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_ACTIONS, max_size=60), st.booleans())
def test_any_life_keeps_the_invariants_and_ends_in_at_most_one_child_that_matches_the_last_role(
    script: list[tuple[str, Any]], primary: bool
) -> None:
    """docs/rules.md S1, S2, S5, S8, S12: after the last event, calm: hold-down, grace and backoff pass, and all is as wanted."""
    world = World()
    term = 1
    for name, value in script:
        term = _act(world, term, name, value)
    world.slow_spawn = False
    world.finish_spawns()
    world.happened("scheduler", PauseChanged(None))
    term += 1
    for _ in range(200):  # 50 s of polls
        world.answer(Role.PRIMARY if primary else Role.STANDBY, term=term)
        if primary and world.processes and world.processes[-1].alive and isinstance(world.child.life, Running):
            world.joined(term=term)
        world.advance(250)
    if primary:
        assert [p.binding.term for p in world.alive] == [term]
        assert isinstance(world.child.life, Running)
    else:
        assert world.alive == []
        assert live_run(world.child.life) is None


@settings(max_examples=150, deadline=None)
@given(st.lists(_ACTIONS, max_size=40), st.booleans())
def test_a_supervisor_that_is_told_to_end_ends_within_the_ladder(script: list[tuple[str, Any]], stop_all: bool) -> None:
    """docs/rules.md S6, S17: whatever was going on, it leaves; with stop_all nothing of its children is left."""
    world = World()
    term = 1
    for name, value in script:
        term = _act(world, term, name, value)
    world.feed(sup.LeaveAsked(stop_all))
    world.finish_spawns()
    for _ in range(10):
        world.advance(1_000)
        world.finish_spawns()
    assert world.left
    if stop_all:
        assert not world.alive


def test_s17_a_survivor_whose_binding_still_holds_is_kept_and_judged_by_its_own_token() -> None:
    """docs/rules.md S17: no restart, no gap: adopted before the first answer, confirmed by it."""
    binding = Binding("c1", "i1", 7)
    world = World(held=binding)
    world.happened("scheduler", Adopted(3, Identity(4711, 99, "boot"), binding, "tok"))
    assert isinstance(world.child.life, Running)
    world.advance(500)
    world.answer(Role.PRIMARY, term=7, session=Session(True, "s", "tok", 1, 1, None))
    world.advance(60_000)
    assert world.processes == [] and isinstance(world.child.life, Running) and world.child.life.adopted
    assert world.child.life.watch.joined


@pytest.mark.parametrize("answer", ["other term", "standby", "silence"])
def test_s17_a_survivor_whose_binding_no_longer_holds_is_stopped(answer: str) -> None:
    """docs/rules.md S17: and nothing is started beside it."""
    binding = Binding("c1", "i1", 7)
    world = World(held=binding)
    world.next_deaf = True
    world.processes.append(_survivor(binding))
    world.happened("scheduler", Adopted(3, Identity(4711, 99, "boot"), binding, "tok"))
    if answer == "other term":
        world.answer(Role.PRIMARY, term=8)
    elif answer == "standby":
        world.answer(Role.STANDBY, term=8)
    world.advance(3_001)
    assert world.processes[0].signals[:2] == ["TERM", "CONT"] or isinstance(world.child.life, Stopping | Unkillable)
    world.advance(10_000)
    assert not world.processes[0].tree_alive


def _survivor(binding: Binding) -> Any:
    return Process("scheduler", 3, binding, "tok", Identity(4711, 99, "boot"))


def test_a_unit_that_is_bound_to_nothing_runs_from_the_start_whatever_the_role() -> None:
    """A unit with binding `always` needs no answer of a controller; one added by a reload neither."""
    always = UnitPolicy("exporter", role_bound=False, session_readiness=False)
    world = World(units={"scheduler": UnitPolicy("scheduler"), "exporter": always})
    world.feed(sup.TimePassed())
    assert [p.unit for p in world.alive] == ["exporter"]
    more = {**world.policy.units, "second": UnitPolicy("second", role_bound=False, session_readiness=False)}
    world.policy = sup.Policy(world.policy.role, more)
    world.feed(sup.UnitsReloaded(frozenset(), {}, world.policy))
    assert sorted(p.unit for p in world.alive) == ["exporter", "second"]


def test_s17_a_survivor_of_a_unit_that_is_configured_no_more_is_adopted_and_stopped() -> None:
    """docs/rules.md S17, S5: and generations go on where the former supervisor was."""
    binding = Binding("c1", "i1", 7)
    policy = sup.Policy(RolePolicy("c1"), {"scheduler": UnitPolicy("scheduler")})
    world = World()
    world.state = sup.initial(world.now, policy, binding, None, {"scheduler": 41}, ["old"])
    world.processes.append(Process("old", 3, binding, "tok", Identity(4711, 99, "boot")))
    world.happened("old", Adopted(3, Identity(4711, 99, "boot"), binding, "tok"))
    assert world.processes[0].signals[:2] == ["TERM", "CONT"] and not world.alive
    world.answer(Role.PRIMARY, term=8)
    world.advance(300)
    assert [p.generation for p in world.alive] == [42] and set(world.state.children) == {"scheduler"}


def test_s10_a_suspend_is_credited_by_each_clock_as_it_went() -> None:
    """docs/rules.md S10, L23: eight hours of suspend give a deaf child on its way down no second of monotonic time."""
    world = World()
    world.next_deaf = True
    world.answer(term=1)
    world.answer(Role.STANDBY)
    world.advance(1_500)
    hours = 8 * 3600 * NS_PER_S
    world.now = Now(world.now.mono_ns, world.now.boot_ns + hours)
    world.feed(sup.LoopGapSeen(Gap(0, hours)))
    world.advance(4_600)
    assert world.processes[0].signals == ["TERM", "CONT", "KILL"]


def test_s14_sigkill_is_sent_again_to_what_is_still_there_and_does_not_keep_the_supervisor() -> None:
    """docs/rules.md S14: the first one may have been lost; and an upgrade does not wait for a process in D state."""
    world = World()
    world.next_immortal = world.next_deaf = True
    world.answer(term=1)
    world.answer(Role.STANDBY)
    world.advance(30_000)
    assert world.processes[0].signals.count("KILL") >= 4
    world.feed(sup.LeaveAsked(True))
    assert world.left


def test_s6_a_restart_asked_for_while_the_spawn_is_in_flight_is_done_when_it_returns() -> None:
    """docs/rules.md S6, S24: in flight is never a lost request; while paused it waits for the resume."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    world.happened("scheduler", RestartAsked("reload"))
    world.slow_spawn = False
    world.finish_spawns()
    assert len(world.processes) == 2 and len(world.alive) == 1
    world.happened("scheduler", PauseChanged(Pause("anna", "why not", 0.0)))
    world.happened("scheduler", RestartAsked("reload"))
    assert len(world.processes) == 2 and len(world.alive) == 1
    world.happened("scheduler", PauseChanged(None))
    assert len(world.processes) == 3
