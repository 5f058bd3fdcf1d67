"""docs/rules.md S19: every exit is collected once, any number at an instant, orphans too; no zombie outlives one second."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest

from tests.process.stage import PATH, Stage, play, shell
from xce_supervisor.core.words import Identity
from xce_supervisor.process.exits import Exited, Exits
from xce_supervisor.process.identity import read_identity
from xce_supervisor.process.spawn import SpawnSpec, spawn
from xce_supervisor.process.table import own_children

LOADED_S = 5.0  # a second on a calm machine; the tests run on loaded ones
loops = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])


def zombies() -> list[int]:
    """Our zombies, by the kernel's own list."""
    found = []
    for pid in own_children():
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def all_at_once(stage: Stage, count: int) -> dict[str, Any]:
    started = [await stage.spawn(SpawnSpec(("/bin/sleep", "50"), PATH)) for _ in range(count)]
    told: list[Exited] = []
    for identity in started:
        stage.ends[identity.pid].add_done_callback(lambda future: told.append(future.result()))
    began = time.monotonic()
    for identity in started:
        os.kill(identity.pid, signal.SIGKILL)
    await stage.until(lambda: len(told) >= count, "all told")
    took = time.monotonic() - began
    await asyncio.sleep(0)
    return {
        "told": len(told),
        "different": len({each.identity for each in told}),
        "signals": sorted({each.signal for each in told if each.signal}),
        "zombies": len(zombies()),
        "took_s": took,
        "watched": stage.exits.watched,
    }


@loops
def test_three_hundred_exits_at_an_instant_are_each_told_once(loop: str) -> None:
    """docs/rules.md S19: SIGCHLD signals merge; the exits do not."""
    found = play(all_at_once, 300, forest="group", loop=loop)
    took = found.pop("took_s")
    assert found == {"told": 300, "different": 300, "signals": [9], "zombies": 0, "watched": 0}
    assert took < LOADED_S


async def orphans_at_once(stage: Stage, count: int) -> dict[str, Any]:
    # Each orphan waits for the end of a file, so all of them end in the same instant, with a code of their own.
    read, write = os.pipe()
    script = f"i=0; while [ $i -lt {count} ]; do (read x <&3; exit 3) & i=$((i+1)); done; exit 0"
    parent = await stage.spawn(shell(script, fds=((read, 3),)))
    os.close(read)
    assert (await stage.ended(parent)).code == 0
    await stage.until(lambda: len(own_children()) == count, "the orphans are ours")
    began = time.monotonic()
    os.close(write)
    await stage.until(lambda: len(stage.orphans) >= count, "all collected")
    took = time.monotonic() - began
    return {
        "collected": len(stage.orphans),
        "different": len({each.identity for each in stage.orphans}),
        "codes": sorted({each.code for each in stage.orphans if each.code is not None}),
        "left": own_children(),
        "took_s": took,
    }


@loops
def test_three_hundred_orphans_at_an_instant_are_collected(loop: str) -> None:
    """docs/rules.md S19: what is not ours by birth falls to us as subreaper, ends with an error, and is just collected."""
    found = play(orphans_at_once, 300, forest="group", loop=loop)
    took = found.pop("took_s")
    assert found == {"collected": 300, "different": 300, "codes": [3], "left": []}
    assert took < LOADED_S


async def as_init(stage: Stage) -> dict[str, Any]:
    assert os.getpid() == 1
    child = await stage.spawn(shell("(sleep 0.05; exit 3) & (setsid sh -c 'sleep 0.05; exit 4' &) ; exit 5"))
    exited = await stage.ended(child)
    # the inner shell, the two orphans, and their sleeps, which their shells wait for
    await stage.until(lambda: {3, 4} <= {each.code for each in stage.orphans}, "both orphans")
    await stage.until(lambda: not own_children(), "nobody is left")
    again = await stage.ended(await stage.spawn(shell("exit 6")))
    return {"code": exited.code, "again": again.code, "zombies": zombies()}


@pytest.mark.needs("userns")
@loops
def test_as_pid_1_orphans_are_collected_and_strangers_do_no_harm(loop: str) -> None:
    """docs/rules.md S19: the supervisor as the init of a container; unknown pids with error codes are one debug line each."""
    namespace = [shutil.which("unshare") or "unshare", "-Urpf", "--mount-proc", "--kill-child"]
    assert play(as_init, forest="group", loop=loop, prefix=namespace) == {"code": 5, "again": 6, "zombies": []}


async def dead_at_birth(stage: Stage, count: int) -> dict[str, Any]:
    # The lanes spawn what dies at once, while orphans die too: none of the children may be taken for one.
    noise = await stage.spawn(shell("n=0; while [ $((n += 1)) -lt 5000 ]; do (sleep 0.01 &) ; done"))
    codes = []
    for number in range(count):
        work = partial(spawn, shell(f"exit {number % 250}"), stage.exits.births)
        identities = await asyncio.gather(*(stage.lane(f"k{lane}", work) for lane in range(3)))
        await asyncio.sleep(0.002)  # the loop reaps whatever it thinks is an orphan before anybody watches
        for identity in identities:
            stage.watch(identity)
        codes += [(await stage.ended(identity)).code == number % 250 for identity in identities]
    os.kill(noise.pid, signal.SIGKILL)
    await stage.ended(noise)
    return {"right": sum(codes), "of": len(codes), "orphans": len(stage.orphans) > 0}


@loops
def test_a_child_that_dies_at_birth_keeps_its_status(loop: str) -> None:
    """docs/rules.md S19: a child that is dead before its lane has told who it is is no orphan: its exit code is not lost."""
    assert play(dead_at_birth, 40, forest="group", loop=loop) == {"right": 120, "of": 120, "orphans": True}


async def grandchild_holds_output(stage: Stage) -> dict[str, Any]:
    read, write = os.pipe()
    began = time.monotonic()
    child = await stage.spawn(shell("sleep 50 <&- & echo $!; exit 7", fds=((write, 3),), stdout=_given(write)))
    os.close(write)
    exited = await stage.ended(child)
    took = time.monotonic() - began
    sleeper = int(os.read(read, 100))
    open_still = os.path.exists(f"/proc/{sleeper}")
    os.kill(sleeper, signal.SIGKILL)
    os.close(read)
    return {"code": exited.code, "open_still": open_still, "soon": took < 5.0}


def _given(fd: int) -> Any:
    from xce_supervisor.process.spawn import Given

    return Given(fd)


def test_an_exit_is_told_though_a_grandchild_holds_the_output() -> None:
    """docs/rules.md S19: the pidfd tells the exit, not the end of a pipe that somebody else keeps open."""
    assert play(grandchild_holds_output, forest="group") == {"code": 7, "open_still": True, "soon": True}


async def slot_reused(stage: Stage) -> dict[str, Any]:
    first = await stage.spawn(SpawnSpec(("/bin/sleep", "50"), PATH))
    fd = _pidfd()
    kept = os.dup(fd)  # what a vfork of another lane does for an instant: the closed descriptor's file lives on
    os.kill(first.pid, signal.SIGKILL)
    await stage.ended(first)
    wakes: list[int] = []
    stage.exits._on_readable = wakes.append  # type: ignore  # only counted, for the second child
    second = await stage.spawn(SpawnSpec(("/bin/sleep", "50"), PATH))
    del stage.exits._on_readable
    same = _pidfd(but=kept) == fd
    await asyncio.sleep(0.3)
    told = stage.ends[second.pid].done()
    os.close(kept)
    false_wakes = len(wakes)
    stage.exits.unwatch(second)
    os.kill(second.pid, signal.SIGKILL)
    stage.watch(second)
    exited = await stage.ended(second)
    return {"same_slot": same, "told_early": told, "false_wakes": false_wakes, "signal": exited.signal}


def _pidfd(but: int = -1) -> int:
    names = (int(name) for name in os.listdir("/proc/self/fd"))
    return next(fd for fd in sorted(names) if fd != but and _is_pidfd(fd))


def _is_pidfd(fd: int) -> bool:
    try:
        return "pidfd" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


@loops
def test_a_closed_pidfd_does_not_fire_for_the_next_child_in_its_slot(loop: str) -> None:
    """docs/rules.md S19: the reader goes before the descriptor; the next child with its number lives in peace."""
    found = play(slot_reused, forest="group", loop=loop)
    assert found == {"same_slot": True, "told_early": False, "false_wakes": 0, "signal": 9}


async def spurious(stage: Stage) -> dict[str, Any]:
    child = await stage.spawn(SpawnSpec(("/bin/sleep", "50"), PATH))
    began = time.monotonic()
    stage.exits._on_readable(child.pid)  # a wake-up that means nothing
    stage.exits._on_readable(1)
    stage.exits._sweep()
    quick = time.monotonic() - began < 5.0
    told = stage.ends[child.pid].done()
    os.kill(child.pid, signal.SIGKILL)
    return {"quick": quick, "told": told, "signal": (await stage.ended(child)).signal}


def test_a_wake_up_never_leads_to_a_blocking_wait() -> None:
    """docs/rules.md S19: every wait is a WNOHANG one, so a false wake-up costs nothing and tells nothing."""
    assert play(spurious, forest="group") == {"quick": True, "told": False, "signal": 9}


async def ignored_sigchld(stage: Stage) -> dict[str, Any]:
    return {"code": (await stage.ended(await stage.spawn(shell("exit 9")))).code}


def test_an_inherited_ignored_sigchld_loses_no_status() -> None:
    """docs/rules.md S19: with SIGCHLD ignored the kernel would reap for us and throw every status away."""
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    prefix = [sys.executable, "-c", ignore]  # a shell would not pass it on
    assert play(ignored_sigchld, forest="group", prefix=prefix) == {"code": 9}


async def not_our_child(stage: Stage, pid: int) -> dict[str, Any]:
    identity = read_identity(pid)
    assert identity is not None
    stage.watch(identity)
    gone = Identity(pid, identity.start_ticks + 1, identity.boot_id)
    other_boot = Identity(pid, identity.start_ticks, "another boot")
    never: list[Exited] = []
    stage.exits.unwatch(gone)  # a stranger: nothing is forgotten
    for stranger in (gone, other_boot):
        exits = Exits(stage.loop)
        exits.watch(stranger, never.append)
        exits.close()
    await stage.until(lambda: len(never) == 2, "told of what is not there")
    print("ready", flush=True)
    exited = await stage.ended(identity)
    return {"known": exited.known, "text": exited.text, "never": [each.known for each in never]}


def test_the_end_of_a_survivor_is_told_without_a_status() -> None:
    """docs/rules.md S19, S17: what a former supervisor left is not our child: its end is seen, its status is nobody's."""
    import subprocess
    import threading

    sleeper = subprocess.Popen(["sleep", "50"])
    timer = threading.Timer(1.0, sleeper.kill)
    timer.start()
    try:
        found = play(not_our_child, sleeper.pid, forest="group")
    finally:
        timer.join()
        sleeper.kill()
        sleeper.wait()
    assert found == {"known": False, "text": "ended, status unknown", "never": [False, False]}


def test_exits_are_told_in_words() -> None:
    """docs/rules.md S19: code, signal by name, core dump, or unknown."""
    who = Identity(1, 1, "b")
    texts = [Exited(who, 3).text, Exited(who, None, 15).text, Exited(who, None, 11, True).text, Exited(who, None, 63).text]
    assert texts == ["exit code 3", "killed by SIGTERM", "killed by SIGSEGV, core dumped", "killed by signal 63"]
