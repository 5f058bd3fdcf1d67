"""docs/rules.md S12, S13, S24: restarts, spawn failures, pauses."""

from __future__ import annotations

import itertools

import pytest

from tests.core.world import World
from xce_supervisor.core.backoff import BackoffPolicy, delay_ns
from xce_supervisor.core.child_words import (
    Blocked,
    Fault,
    Pause,
    PauseChanged,
    ProgramChanged,
    Running,
    SpawnFailed,
    Starting,
    Waiting,
)
from xce_supervisor.core.gates import degraded
from xce_supervisor.core.words import NS_PER_S, Role


def test_s12_the_first_retry_comes_at_once_and_later_ones_wait_longer_up_to_the_ceiling() -> None:
    """docs/rules.md S12: 0, then 0.5 s doubling to 30 s, whatever the draw."""
    policy = BackoffPolicy(NS_PER_S // 2, 30 * NS_PER_S, 0.2)
    assert delay_ns(1, policy, 0.9) == 0
    middle = [delay_ns(attempt, policy, 0.5) for attempt in range(2, 12)]
    assert middle[:4] == [NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 4 * NS_PER_S] and middle[-1] == 30 * NS_PER_S
    for attempt in range(2, 2000):
        for draw in (0.0, 0.3, 0.999):
            delay = delay_ns(attempt, policy, draw)
            assert 0.8 * min(policy.delay_ns_max, policy.delay_ns * 2 ** min(attempt - 2, 60)) <= delay + 1
            assert delay <= policy.delay_ns_max


def test_s12_a_child_that_crashes_for_ever_is_retried_for_ever_at_a_capped_rate() -> None:
    """docs/rules.md S12: a thousand crashes: alive, never given up, state does not grow."""
    world = World()
    world.answer(term=1)
    starts = []
    for _ in range(1_000):
        starts.append(world.now.mono_ns)
        world.die(signal=11)
        world.advance(1)
        while not world.alive:
            world.advance(1_000)
            world.answer(term=1)
    assert starts[1] - starts[0] <= 2_000_000
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts[20:])]
    assert min(gaps) >= 23 * NS_PER_S and max(gaps) <= 32 * NS_PER_S


def test_s12_a_healthy_period_resets_the_backoff_and_a_short_one_does_not() -> None:
    """docs/rules.md S12: 60 s after ready; a child that gets ready and dies a second later keeps its backoff."""
    world = World()
    world.answer(term=1)
    for _ in range(6):
        world.joined()
        world.advance(1_000)
        world.die(signal=6)
        world.advance(40_000)
        world.answer(term=1)
    assert world.child.failures == 6
    world.joined()
    world.advance(61_000)
    world.answer(term=1)
    assert world.child.failures == 0
    before = len(world.processes)
    world.die(signal=6)
    assert len(world.processes) == before + 1, "base delay again: at once"


def test_s12_an_exit_with_a_code_is_confirmed_by_a_fresh_answer_before_the_next_start() -> None:
    """docs/rules.md S1, S4, S12: its controller may have told it of a demotion that we have not seen."""
    world = World()
    world.answer(term=1)
    world.advance(100)
    world.die(code=11, signal=None)
    assert len(world.processes) == 1 and world.polls == 1
    world.advance(5_000)
    assert len(world.processes) == 1
    world.answer(Role.STANDBY)
    assert len(world.processes) == 1


def test_s12_an_exit_with_a_code_is_followed_by_a_start_once_confirmed() -> None:
    """docs/rules.md S12: still primary: go on at once."""
    world = World()
    world.answer(term=1)
    world.advance(100)
    world.die(code=1, signal=None)
    world.advance(1)
    world.answer(term=1)
    assert len(world.processes) == 2


FAULT = Fault(True, "open program", "/opt/scheduler", 2, "cannot start: ENOENT /opt/scheduler")


def test_s13_a_permanent_spawn_failure_waits_for_the_file_or_a_slow_retry_and_is_no_crash() -> None:
    """docs/rules.md S13: own state, path named, crash budget untouched."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    generation = world.child.generation
    world.in_flight = []
    world.happened("scheduler", SpawnFailed(generation, FAULT, 0.5))
    assert isinstance(world.child.life, Blocked) and world.watched == ["/opt/scheduler"]
    assert world.child.failures == 0
    world.advance(29_000)
    assert isinstance(world.child.life, Blocked)
    world.happened("scheduler", ProgramChanged())
    assert isinstance(world.child.life, Starting)
    world.in_flight = []
    world.happened("scheduler", SpawnFailed(world.child.generation, FAULT, 0.5))
    world.advance(30_001)
    assert isinstance(world.child.life, Starting)


def test_s13_a_transient_spawn_failure_is_retried_shortly_with_jitter() -> None:
    """docs/rules.md S13: ETXTBSY, EAGAIN, ENOMEM: from 100 ms up to 2 s (and half of it in jitter), crash budget untouched."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    waits = []
    for _ in range(12):
        world.in_flight = []
        asked = world.now.mono_ns
        world.happened("scheduler", SpawnFailed(world.child.generation, Fault(False, "exec", "/x", 26, "ETXTBSY"), 0.5))
        while isinstance(world.child.life, Waiting):
            world.advance(10)
        waits.append((world.now.mono_ns - asked) // 1_000_000)
    assert waits[0] <= 160 and max(waits) <= 3_010 and world.child.failures == 0
    world.finish_spawns()
    assert isinstance(world.child.life, Running) and world.child.spawn_faults == 0


@pytest.mark.parametrize("crash", [True, False])
def test_s24_a_pause_starts_and_restarts_nothing_until_resumed(crash: bool) -> None:
    """docs/rules.md S24: neither a promotion nor a crash starts a paused unit."""
    world = World()
    if crash:
        world.answer(term=1)
    world.happened("scheduler", PauseChanged(Pause("anna", "upgrade", 0.0)))
    if crash:
        world.die()
    world.answer(term=1)
    world.advance(100_000)
    world.answer(term=1)
    assert not world.alive
    world.happened("scheduler", PauseChanged(None))
    assert world.alive


def test_s13_a_spawn_that_hangs_in_its_lane_is_shown() -> None:
    """docs/rules.md S12, S13: nothing can be done about a hung file system, but it is loud."""
    world = World()
    world.slow_spawn = True
    world.answer(term=1)
    assert degraded(world.state, "scheduler", world.policy.units["scheduler"], world.now) == ()
    world.advance(11_000)
    world.answer(term=1)
    assert "lane" in degraded(world.state, "scheduler", world.policy.units["scheduler"], world.now)[0]
