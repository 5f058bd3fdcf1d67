"""docs/rules.md S17: after kill -9 of a supervisor the next one finds its children, also one that was not yet recorded."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from tests.process.stage import BOUND_S, ROOT, Stage, play, shell, until
from xce_supervisor.core.words import Identity
from xce_supervisor.process.identity import is_alive
from xce_supervisor.process.mark import marks
from xce_supervisor.process.spawn import spawn

FORESTS = [pytest.param("cgroup", marks=pytest.mark.needs("cgroup2")), "group"]
SCRIPT = "(setsid sleep 50 &) ; sleep 50 & exec sleep 50"


async def leave_children(stage: Stage, by: str, moment: str) -> None:
    """Play the supervisor that is killed: at once after the spawn, or when its trees stand."""
    if moment == "spawned":
        spec = shell(SCRIPT, env={"PATH": "/usr/bin:/bin", **marks(by, "u", secrets.token_hex(4))})

        def crash() -> None:
            spawn(spec, stage.exits.births)
            os.kill(os.getpid(), signal.SIGKILL)

        await stage.lane("spawn", crash)
    for unit in ("u", "provisioner@a b/c"):
        await stage.start(unit, shell(SCRIPT), by)
        await stage.until(lambda unit=unit: len(stage.forest.tree(unit).members()) == 3, "three")  # type: ignore[misc]
    os.kill(os.getpid(), signal.SIGKILL)


async def find_them(stage: Stage, by: str) -> dict[str, Any]:
    found = stage.forest.survivors(by)
    told: list[str] = []
    sizes = {}
    for unit, identities in found.items():
        stage.units.add(unit)
        tree = stage.forest.tree(unit)
        await stage.lane("adopt", partial(tree.adopt_survivors, identities))
        sizes[unit] = [len(identities), len(tree.members())]
        stage.watch(identities[0])
        tree.on_empty(partial(told.append, unit))
    leaders = [identities[0].pid for identities in found.values()]
    names = []
    for pid in leaders:
        with open(f"/proc/{pid}/cmdline", encoding="ascii") as file:
            names.append(file.read().replace("\0", " ").strip())
    for unit in found:
        stage.forest.tree(unit).kill()
    await stage.until(lambda: len(told) == len(found), "all empty")
    ends = [(await stage.ended(identities[0])).known for identities in found.values()]
    again = stage.forest.survivors(by)
    return {"sizes": sizes, "names": names, "known": ends, "again": again, "folder": str(getattr(stage.forest, "folder", ""))}


def crash(forest: str, name: str, by: str, moment: str) -> None:
    """Run a supervisor that ends by SIGKILL; its children stay."""
    play(leave_children, by, moment, forest=forest, name=name, code=-signal.SIGKILL)


@pytest.mark.parametrize("forest", FORESTS)
def test_the_children_of_a_killed_supervisor_are_found_and_adopted(forest: str) -> None:
    """docs/rules.md S17: every unit with its whole tree, the leader first; adopted, they are watched, killed and told as ever."""
    name = f"test-{secrets.token_hex(4)}"
    crash(forest, name, name, "running")
    found = play(find_them, name, forest=forest, name=name)
    assert found["sizes"] == {"u": [3, 3], "provisioner@a b/c": [3, 3]}
    assert found["names"] == ["sleep 50", "sleep 50"] and found["known"] == [False, False]
    assert found["again"] == {}
    assert not found["folder"] or not os.path.exists(found["folder"]), "the predecessor's folder was taken over and removed"


@pytest.mark.parametrize("forest", FORESTS)
def test_a_child_that_was_spawned_but_not_recorded_is_found(forest: str) -> None:
    """docs/rules.md S17: killed between the spawn and everything after it, the supervisor left a child with marks only."""
    name = f"test-{secrets.token_hex(4)}"
    crash(forest, name, name, "spawned")
    found = play(find_them, name, forest=forest, name=name)
    assert list(found["sizes"]) == ["u"] and found["sizes"]["u"][1] == 3
    assert found["again"] == {}


@pytest.mark.needs("cgroup2")
def test_children_are_found_without_the_cgroup_they_were_left_in() -> None:
    """docs/rules.md S17: the next supervisor may have no cgroup, or the one before: marks find them then."""
    name = f"test-{secrets.token_hex(4)}"
    crash("group", name, name, "running")
    found = play(find_them, name, forest="cgroup", name=name)
    assert found["sizes"] == {"u": [3, 3], "provisioner@a b/c": [3, 3]}


@pytest.mark.needs("cgroup2")
def test_children_that_lost_their_marks_are_found_by_their_cgroup() -> None:
    """docs/rules.md S17: another mark (a moved state directory) hides them from the marks; their place tells the unit."""
    name = f"test-{secrets.token_hex(4)}"
    crash("cgroup", name, "another mark", "running")
    found = play(find_them, name, forest="cgroup", name=name)
    assert found["sizes"] == {"u": [3, 3], "provisioner@a b/c": [3, 3]}


@pytest.mark.parametrize("forest", FORESTS)
def test_another_supervisors_children_are_not_found(forest: str) -> None:
    """docs/rules.md S17, S15: a supervisor of another name on the same host sees none of them, and leaves its folders alone."""
    name = f"test-{secrets.token_hex(4)}"
    program = "import asyncio, tests.process.stage as stage; stage.main()"
    about = {"file": __file__, "scene": "hold", "args": [name], "forest": forest, "loop": "uvloop", "name": name}
    other = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(about)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        pid, ticks, boot = other.stdout.readline().split()
        found = play(find_them, name + "x", forest=forest, name=name + "x")
        prefix_only = play(find_them, name[:-1], forest=forest, name=name[:-1])
        assert found["sizes"] == {} and prefix_only["sizes"] == {}
        assert is_alive(Identity(int(pid), int(ticks), boot))
    finally:
        other.terminate()
        other.communicate(timeout=BOUND_S)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the other one has cleaned up")


async def hold(stage: Stage, by: str) -> None:
    import asyncio

    identity = await stage.start("u", shell("exec sleep 50"), by)
    print(identity.pid, identity.start_ticks, identity.boot_id, flush=True)
    await asyncio.sleep(50)
