"""The slow lanes: admission, dedup, room kept for stopping, and what came of a job told exactly once on the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.process.stage import BOUND_S, PATH, ROOT, Stage, play
from xce_supervisor.process.lanes import Closed, Kind, Lanes, Outcome, Submitted
from xce_supervisor.process.spawn import SpawnSpec

ACCEPTED, IN_FLIGHT, FULL = Submitted.ACCEPTED, Submitted.IN_FLIGHT, Submitted.FULL


class Gate:
    """Jobs that wait until they are let through."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._open = threading.Event()
        self._lock = threading.Lock()

    def job(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            with self._lock:
                self.running.append(name)
            assert self._open.wait(BOUND_S)
            return name

        return wait

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def run(scene: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(scene(asyncio.get_running_loop()), 2 * BOUND_S)

    asyncio.run(body())


async def soon(fact: Callable[[], Any], what: str) -> None:
    give_up = time.monotonic() + BOUND_S
    while not fact():
        assert time.monotonic() < give_up, f"not in time: {what}"
        await asyncio.sleep(0.002)


def waiting(lanes: Lanes) -> list[object]:
    """Return the threads that are asleep until somebody wakes them."""
    return [*lanes._work._waiters, *lanes._stop_work._waiters]  # type: ignore[attr-defined]  # of the standard library


def test_a_key_is_under_way_once_and_free_again_when_its_outcome_is_told(gate: Gate) -> None:
    """submit says IN_FLIGHT, never queues a second job of the key; in `done` the key may be submitted anew."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=2, cap=4)
        told: list[str] = []

        def done(outcome: Outcome[str]) -> None:
            assert threading.current_thread() is threading.main_thread(), "outcomes are told on the loop"
            told.append(outcome.unwrap())
            if len(told) == 1:
                assert lanes.submit("k", lambda: "again", done) is ACCEPTED

        assert lanes.submit("k", gate.job("first"), done) is ACCEPTED
        assert lanes.submit("k", gate.job("second"), done) is IN_FLIGHT
        assert lanes.in_flight("k") and lanes.depth == 1
        gate.open()
        await soon(lambda: len(told) == 2, "both outcomes")
        assert told == ["first", "again"] and not lanes.in_flight("k")
        assert await lanes.close(BOUND_S) == []

    run(scene)


def test_a_full_pool_says_so_at_once(gate: Gate) -> None:
    """The cap counts queued and running work; the caller never waits, and there is room again afterwards."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=1, cap=3, reserved=0)
        told: list[Outcome[str]] = []
        answers = [lanes.submit(name, gate.job(name), told.append) for name in "abcd"]
        assert answers == [ACCEPTED, ACCEPTED, ACCEPTED, FULL]
        gate.open()
        await soon(lambda: len(told) == 3, "three outcomes")
        assert lanes.submit("d", gate.job("d"), told.append) is ACCEPTED
        await soon(lambda: len(told) == 4, "the fourth outcome")
        await lanes.close(BOUND_S)
        assert [outcome.unwrap() for outcome in told] == ["a", "b", "c", "d"]

    run(scene)


def test_stop_work_has_threads_and_slots_of_its_own(gate: Gate) -> None:
    """docs/rules.md S6: with every general thread hung and every slot taken, stop work is accepted and runs."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=2, cap=5, reserved=1, reserved_cap=2)
        told: list[Outcome[str]] = []
        await soon(lambda: len(waiting(lanes)) == 3, "all threads wait for work, so that they have to be woken")
        for name in "abcde":
            assert lanes.submit(name, gate.job(name), told.append) is ACCEPTED
        assert lanes.submit("f", gate.job("f"), told.append) is FULL
        await soon(lambda: len(gate.running) == 2, "the general threads hang")
        stops: list[str] = []
        for name in ("s1", "s2"):
            assert lanes.submit(name, partial(str, name), lambda outcome: stops.append(outcome.unwrap()), Kind.STOP) is ACCEPTED
        assert lanes.submit("s3", partial(str, "s3"), told.append, Kind.STOP) is FULL
        await soon(lambda: stops == ["s1", "s2"], "stop work")
        assert len(gate.running) == 2, "the general threads still hang"
        gate.open()
        await lanes.close(BOUND_S)
        assert len(told) == 5

    run(scene)


def test_stop_work_goes_first_and_uses_idle_general_threads(gate: Gate) -> None:
    """Several stops at once are not left to the reserved thread alone, and overtake queued work."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=2, cap=10, reserved=1)
        told: list[Outcome[Any]] = []
        for name in ("s1", "s2", "s3"):
            assert lanes.submit(name, gate.job(name), told.append, Kind.STOP) is ACCEPTED
        await soon(lambda: len(gate.running) == 3, "three stops side by side")
        one = Lanes(loop, threads=1, cap=10, reserved=0)
        order: list[str] = []
        one.submit("hung", gate.job("hung"), told.append)
        one.submit("work", partial(order.append, "work"), told.append)
        one.submit("stop", partial(order.append, "stop"), told.append, Kind.STOP)
        gate.open()
        await soon(lambda: len(told) == 6, "all outcomes")
        assert order == ["stop", "work"]
        await lanes.close(BOUND_S)
        await one.close(BOUND_S)

    run(scene)


def test_a_queued_job_can_be_taken_back(gate: Gate) -> None:
    """docs/rules.md S6: cancel is True only when the job never runs; then nothing is told and the key is free."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=1, cap=3, reserved=0)
        told: list[Outcome[str]] = []
        lanes.submit("running", gate.job("running"), told.append)
        await soon(lambda: gate.running == ["running"], "running")
        lanes.submit("queued", gate.job("queued"), told.append)
        assert lanes.cancel("queued") and not lanes.in_flight("queued") and lanes.depth == 1
        assert not lanes.cancel("running") and not lanes.cancel("queued") and not lanes.cancel("unknown")
        gate.open()
        await lanes.close(BOUND_S)
        assert [outcome.unwrap() for outcome in told] == ["running"] and gate.running == ["running"]

    run(scene)


def test_cancelling_and_running_never_both_happen() -> None:
    """Whoever wins the race: a job ran and was told once, or it was cancelled and was never told."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=2, cap=1000, reserved=0)
        ran: list[int] = []
        told: list[int] = []
        cancelled: list[int] = []
        for number in range(600):
            job = partial(ran.append, number)
            assert lanes.submit(str(number), job, lambda _, number=number: told.append(number)) is ACCEPTED  # type: ignore[misc]
            if number % 2 and lanes.cancel(str(number)):
                cancelled.append(number)
        await soon(lambda: lanes.depth == 0, "all told")
        await lanes.close(BOUND_S)
        assert sorted(ran) == sorted(told) and len(set(told)) == len(told)
        assert not set(told) & set(cancelled) and len(told) + len(cancelled) == 600

    run(scene)


def test_an_exception_is_an_outcome() -> None:
    """What a job raises is told as its outcome; the thread goes on with the next one."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=1, cap=3, reserved=0)
        told: list[Outcome[Any]] = []
        lanes.submit("bad", lambda: 1 // 0, told.append)
        lanes.submit("good", lambda: 1, told.append)
        await soon(lambda: len(told) == 2, "both outcomes")
        await lanes.close(BOUND_S)
        assert isinstance(told[0].error, ZeroDivisionError) and told[1].unwrap() == 1
        with pytest.raises(ZeroDivisionError):
            told[0].unwrap()

    run(scene)


def test_closing_tells_the_queued_and_names_the_hung(gate: Gate) -> None:
    """close returns by its deadline with the keys that still run; queued work is told Closed; nothing is accepted any more."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        lanes = Lanes(loop, threads=1, cap=3, reserved=1)
        told: list[Outcome[str]] = []
        lanes.submit("hung", gate.job("hung"), told.append)
        await soon(lambda: gate.running == ["hung"], "hung")
        lanes.submit("queued", gate.job("queued"), told.append)
        began = time.monotonic()
        assert await lanes.close(0.05) == ["hung"]
        assert time.monotonic() - began < BOUND_S
        assert [type(outcome.error) for outcome in told] == [Closed]
        assert lanes.submit("more", gate.job("more"), told.append) is FULL
        gate.open()
        await soon(lambda: len(told) == 2, "the late outcome is told too")

    run(scene)


def test_a_hung_lane_does_not_keep_the_process_from_exiting() -> None:
    """Lane threads are daemons: a thread that sleeps for an hour is left behind, and what it would tell is dropped."""
    program = (
        "import asyncio, threading, time\n"
        "from xce_supervisor.process.lanes import Lanes\n"
        "async def main():\n"
        "    lanes = Lanes(asyncio.get_running_loop(), threads=1)\n"
        "    began = threading.Event()\n"
        "    lanes.submit('k', lambda: (began.set(), time.sleep(3600)), print)\n"
        "    began.wait(20)\n"
        "    print(await lanes.close(0.01))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "['k']", "")


async def parent_death_signal(stage: Stage) -> dict[str, Any]:
    # The child asks for SIGKILL when the thread that started it ends; every thread then does other work.
    before = [thread.ident for thread in stage.lanes.threads]
    child = await stage.spawn(SpawnSpec(("/usr/bin/env", "setpriv", "--pdeathsig", "KILL", "sleep", "50"), PATH))
    barrier = threading.Barrier(3)
    await asyncio.gather(*(stage.lane(f"work {number}", partial(barrier.wait, BOUND_S)) for number in range(3)))
    alive = [thread.is_alive() for thread in stage.lanes.threads]
    same = before == [thread.ident for thread in stage.lanes.threads]
    still = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    os.kill(child.pid, signal.SIGTERM)
    exited = await stage.ended(child)
    return {"alive": all(alive), "same": same, "still": still, "signal": exited.signal}


def test_the_threads_that_start_children_live_as_long_as_the_pool() -> None:
    """A parent-death signal belongs to the thread, not to the process: no thread is ever let go."""
    assert play(parent_death_signal, forest="group") == {"alive": True, "same": True, "still": True, "signal": 15}


def test_senseless_sizes_are_refused() -> None:
    """A pool without threads or slots would wait for ever."""
    loop = asyncio.new_event_loop()
    for threads, cap, reserved in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="lanes need"):
            Lanes(loop, threads, cap, reserved)
    loop.close()
