"""Trees: what is caught, how emptiness is told, what is left behind. Every test plays on both forests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.process.stage import Stage, play, shell
from xce_supervisor.process.identity import read_stat
from xce_supervisor.process.table import own_children

FORESTS = [pytest.param("cgroup", marks=pytest.mark.needs("cgroup2")), "group"]
both = pytest.mark.parametrize("forest", FORESTS)


# What children do, and how many of them there are then at least.
ESCAPES = {
    "a child in the group": ("sleep 50 & exec sleep 50", 2),
    "a child in its own session": ("setsid sleep 50 & exec sleep 50", 2),
    "setsid and double fork": ("(setsid sh -c 'sleep 50 & exec sleep 51' &) ; exec sleep 50", 3),
    "the leader ends first": ("(setsid sleep 50 &) ; exit 0", 1),
    "hides session, parent and environment": ("(env -i setsid sleep 50 &) ; exec sleep 50", 2),
    "stopped": ("sh -c 'kill -STOP $$' & kill -STOP $$", 2),
    "deaf": ("trap '' TERM HUP INT; n=0; while [ $((n += 1)) -lt 120 ]; do sleep 1; done", 1),
    "fork loop": ("n=0; while [ $((n += 1)) -lt 5000 ]; do (sleep 0.02 &) ; done", 5),
    "chain of forks": ("f() { sleep 0.01; f & wait; }; f", 3),
}


async def caught(stage: Stage, name: str) -> None:
    script, count = ESCAPES[name]
    identity = await stage.start(name, shell(script))
    tree = stage.forest.tree(name)
    await stage.until(lambda: len(tree.members()) >= count, f"{count} members of: {name}")
    assert not tree.empty(), name
    tree.kill()
    await stage.emptied(name)
    assert tree.empty() and tree.members() == [], name
    await stage.ended(identity)


async def caught_one_by_one(stage: Stage) -> None:
    for name in ESCAPES:
        await caught(stage, name)


async def caught_at_once(stage: Stage) -> None:
    await asyncio.gather(*(caught(stage, name) for name in ESCAPES))


@both
def test_nothing_escapes_a_tree(forest: str) -> None:
    """Whatever a child does to its session, group, parents or signals, its members are seen and `kill` ends them all."""
    play(caught_one_by_one, forest=forest)


async def hidden(stage: Stage) -> dict[str, Any]:
    leader = await stage.start("u", shell("(env -i setsid sleep 50 &) ; exec sleep 50"))

    def orphan() -> int:
        """The hiding process, by the kernel's own list: nobody has looked at the tree yet."""
        for pid in own_children():
            stat = read_stat(pid)
            if stat is not None and pid != leader.pid and stat.session == pid and stat.name == "sleep":
                return pid
        return 0

    pid = await stage.until(orphan, "it hides")
    members = [identity.pid for identity, _ in stage.forest.tree("u").members()]
    stage.forest.tree("u").kill()
    await stage.emptied("u")
    return {"found": sorted(members) == sorted([leader.pid, pid]), "gone": not is_alive_pid(pid)}


def is_alive_pid(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.dead


@both
def test_who_hides_before_anybody_looks_is_found_too(forest: str) -> None:
    """A descendant without parent, session and environment that was never seen in the tree before: still a member."""
    assert play(hidden, forest=forest) == {"found": True, "gone": True}


@pytest.mark.needs("cgroup2")
def test_nothing_escapes_when_all_of_them_run_at_once() -> None:
    """The same nine children side by side: each tree has its own members only, whoever hides beside it."""
    play(caught_at_once)


async def emptied_by_itself(stage: Stage) -> dict[str, Any]:
    identity = await stage.start("u", shell("sleep 0.3 & exit 7"))
    exited = await stage.ended(identity)
    full = not stage.forest.tree("u").empty()
    await stage.emptied("u")
    return {"code": exited.code, "full": full}


@both
def test_a_tree_outlives_its_leader_until_the_last_member_is_gone(forest: str) -> None:
    """The leader's exit is told at once, also while a grandchild holds its output; emptiness only when that one has ended."""
    assert play(emptied_by_itself, forest=forest) == {"code": 7, "full": True}


async def told_once(stage: Stage) -> list[str]:
    told: list[str] = []
    tree = stage.forest.tree("u")
    tree.on_empty(lambda: told.append("before"))
    await stage.until(lambda: told, "the empty tree tells")
    for number in range(3):
        identity = await stage.start("u", shell("exec sleep 50"))
        tree.on_empty(lambda: told.append("replaced"))
        tree.on_empty(partial(told.append, str(number)))
        os.kill(identity.pid, signal.SIGKILL)
        await stage.until(partial(told.__contains__, str(number)), "told")
    identity = await stage.start("u", shell("exec sleep 50"))
    tree.on_empty(lambda: told.append("forgotten"))
    tree.on_empty(None)
    os.kill(identity.pid, signal.SIGKILL)
    await stage.ended(identity)
    await stage.until(tree.empty, "empty")
    await asyncio.sleep(0)
    return told


@both
def test_emptiness_is_told_once_to_the_last_who_asked(forest: str) -> None:
    """One callback per question, at once when the tree is empty already, for each child anew, and none after None."""
    assert play(told_once, forest=forest) == ["before", "0", "1", "2"]


async def signalled(stage: Stage) -> dict[str, Any]:
    script = "trap 'exit 3' TERM; sleep 50 & wait"
    identity = await stage.start("u", shell(script))
    tree = stage.forest.tree("u")
    await stage.until(lambda: len(tree.members()) == 2, "shell and sleep")
    os.kill(identity.pid, signal.SIGSTOP)
    await stage.until(lambda: "T" in [state for _, state in tree.members()], "stopped")
    count = tree.signal(signal.SIGTERM)
    tree.signal(signal.SIGCONT)
    exited = await stage.ended(identity)
    await stage.emptied("u")
    return {"count": count, "code": exited.code}


@both
def test_a_signal_reaches_every_member(forest: str) -> None:
    """SIGTERM followed by SIGCONT ends a stopped leader and its child."""
    assert play(signalled, forest=forest) == {"count": 2, "code": 3}


async def zombies(stage: Stage) -> dict[str, Any]:
    program = "import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(50)"
    await stage.start("u", shell(f"exec python3 -I -S -c '{program}'"))
    tree = stage.forest.tree("u")

    def zombie() -> bool:
        return any(_state(pid) == "Z" for leader, _ in tree.members() for pid in _children(leader.pid))

    await stage.until(zombie, "a zombie below the leader")
    before = len(tree.members())
    tree.kill()
    await stage.emptied("u")
    return {"members": before}


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


@both
def test_zombies_do_not_count_as_members(forest: str) -> None:
    """A child that its parent has not waited for is no member, and does not keep a tree from being empty."""
    assert play(zombies, forest=forest) == {"members": 1}


async def contained(stage: Stage) -> dict[str, Any]:
    identity = await stage.start("u", shell("(setsid sleep 50 &) ; exec sleep 50"))
    other = await stage.start("v", shell("exec sleep 50"))
    tree = stage.forest.tree("u")
    await stage.until(lambda: len(tree.members()) == 2, "two members")
    return {
        "members": [tree.contains(member.pid) for member, _ in tree.members()],
        "other": tree.contains(other.pid),
        "own": tree.contains(os.getpid()),
        "nobody": tree.contains(2**22 + 1),
        "one": tree.contains(1),
        "leader": tree.contains(identity.pid),
    }


@both
def test_a_tree_knows_its_own(forest: str) -> None:
    """`contains` is true for members, false for another unit's, for the supervisor, for init and for nobody."""
    assert play(contained, forest=forest) == {
        "members": [True, True],
        "other": False,
        "own": False,
        "nobody": False,
        "one": False,
        "leader": True,
    }


async def two_units(stage: Stage, count: int) -> dict[str, Any]:
    script = "(setsid sleep 50 &) ; (env -i sleep 50 &) ; sleep 50 & exec sleep 50"
    await asyncio.gather(*(stage.start(f"u{number}", shell(script)) for number in range(count)))
    trees = [stage.forest.tree(f"u{number}") for number in range(count)]
    await stage.until(lambda: all(len(tree.members()) == 4 for tree in trees), "four members each")
    everyone = [{identity.pid for identity, _ in tree.members()} for tree in trees]
    return {"apart": len(set().union(*everyone)) == 4 * count}


@both
def test_units_that_start_at_once_get_their_own_descendants(forest: str) -> None:
    """Many spawns at the same instant: whatever they fork before they are moved is put into the right tree."""
    assert play(two_units, 12, forest=forest) == {"apart": True}


async def left_behind(stage: Stage) -> dict[str, Any]:
    await stage.start("weird/unit name@x", shell("exec sleep 50"))
    folder = getattr(stage.forest, "folder", None)
    assert folder is not None
    group = next(path for path in folder.iterdir() if path.name.startswith("unit-"))
    inner = group / "made-by-the-child"
    inner.mkdir()
    return {"folder": str(folder), "why": stage.forest.why, "unit": group.name}


@pytest.mark.needs("cgroup2")
def test_no_cgroup_is_left_behind() -> None:
    """After the end every folder is gone, also one that the child made in its own, and unit names are quoted."""
    seen = play(left_behind)
    assert not os.path.exists(seen["folder"])
    assert seen["folder"] in seen["why"]
    assert seen["unit"] == "unit-weird%2Funit%20name@x"


async def in_root(stage: Stage, root: str) -> dict[str, Any]:
    from xce_supervisor.process.tree import open_forest

    own = open_forest(stage.loop, "inner", stage.exits.births, root)
    off = open_forest(stage.loop, "inner", stage.exits.births, "off")
    text = {"own": own.why, "off": off.why}
    own.close()
    off.close()
    return text


@pytest.mark.needs("cgroup2")
def test_the_place_of_the_trees_can_be_given(machine_offers: dict[str, str], tmp_path: Any) -> None:
    """A configured folder is used; one that is no cgroup, or "off", leads to process groups with the reason in `why`."""
    base = machine_offers["cgroup2"]
    assert f"cgroup v2 at {base}/xce-inner." in play(in_root, base, forest="group")["own"]
    assert "is no cgroup v2 folder" in play(in_root, str(tmp_path), forest="group")["own"]
    assert "off in the configuration" in play(in_root, base, forest="group")["off"]


async def removed_under_us(stage: Stage) -> dict[str, Any]:
    first = await stage.start("u", shell("exit 0"))
    await stage.ended(first)
    await stage.emptied("u")
    os.rmdir(stage.forest.tree("u").path)
    assert stage.forest.tree("u").empty()
    second = await stage.start("u", shell("exec sleep 50"))
    stage.forest.tree("u").kill()
    await stage.emptied("u")
    exited = await stage.ended(second)
    await stage.lane("remove", stage.forest.tree("u").remove)
    gone = not os.path.exists(stage.forest.tree("u").path)
    third = await stage.start("u", shell("exec sleep 50"))
    stage.forest.tree("u").kill()
    await stage.emptied("u")
    await stage.ended(third)
    return {"signal": exited.signal, "gone": gone}


@pytest.mark.needs("cgroup2")
def test_a_group_that_somebody_removed_is_made_again() -> None:
    """An empty unit's folder may vanish, by our own `remove` or by a stranger; the next child gets a new one."""
    assert play(removed_under_us) == {"signal": 9, "gone": True}


async def quiet(stage: Stage) -> dict[str, Any]:
    for number in range(3):
        await stage.start(f"u{number}", shell("exec sleep 50"))
        stage.forest.tree(f"u{number}").on_empty(lambda: None)
    await asyncio.sleep(0.2)  # let the starts settle
    before = _switches()
    began = time.monotonic()
    await asyncio.sleep(1.0)
    return {"switches": _switches() - before, "took": time.monotonic() - began}


def _switches() -> int:
    """Voluntary context switches of all threads: how often one of them went to sleep, so how often one was woken."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("voluntary"))
    return total


@both
def test_supervision_of_idle_children_wakes_nothing(forest: str) -> None:
    """A second with three idle children: the one timer of the test wakes the loop, and nothing else does."""
    assert play(quiet, forest=forest)["switches"] <= 4
