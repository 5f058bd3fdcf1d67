"""docs/rules.md S14: a child that survives SIGKILL stays on record; all else goes on, and normal life resumes when it goes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from tests.process.freezer import frozen, need_freezer
from tests.process.stage import Stage, play, shell


async def unkillable(stage: Stage) -> dict[str, Any]:
    stuck = await stage.start("stuck", shell("exec sleep 50"))
    tree = stage.forest.tree("stuck")
    told: list[str] = []
    with frozen(stuck.pid) as state:
        await stage.until(lambda: [each for _, each in tree.members()] == ["D"], "frozen")
        tree.on_empty(lambda: told.append("empty"))
        began = time.monotonic()
        tree.kill()
        tree.kill()
        kill_s = time.monotonic() - began
        # all else goes on: another child is started, ends and is collected
        other = await stage.start("other", shell("exit 4"))
        code = (await stage.ended(other)).code
        await stage.emptied("other")
        gap = await _worst_gap(stage)
        before = {
            "empty": tree.empty(),
            "told": list(told),
            "ended": stage.ends[stuck.pid].done(),
            "members": len(tree.members()),
        }
        state.write_text("THAWED", encoding="ascii")
        exited = await stage.ended(stuck)
        await stage.until(lambda: told, "told after the thaw")
    again = await stage.start("stuck", shell("exit 5"))
    return {
        **before,
        "code": code,
        "signal": exited.signal,
        "again": (await stage.ended(again)).code,
        "quick": kill_s < 2.0 and gap < 1.0,
        "cpu": time.process_time() < 5.0,
    }


async def _worst_gap(stage: Stage) -> float:
    worst = 0.0
    last = time.monotonic()
    give_up = last + 0.3
    while last < give_up:
        await asyncio.sleep(0.001)
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    return worst


@pytest.mark.parametrize("forest", [pytest.param("cgroup", marks=pytest.mark.needs("cgroup2")), "group"])
def test_a_child_in_uninterruptible_sleep_holds_up_nobody(forest: str) -> None:
    """docs/rules.md S14: SIGKILL changes nothing, the tree is not empty, nothing is told; after the thaw all of it is."""
    need_freezer()
    assert play(unkillable, forest=forest) == {
        "empty": False,
        "told": [],
        "ended": False,
        "members": 1,
        "code": 4,
        "signal": signal.SIGKILL,
        "again": 5,
        "quick": True,
        "cpu": True,
    }


async def stubborn_member(stage: Stage) -> dict[str, Any]:
    leader = await stage.start("u", shell("sleep 50 & echo; exec sleep 50"))
    tree = stage.forest.tree("u")
    await stage.until(lambda: len(tree.members()) == 2, "two")
    member = next(identity for identity, _ in tree.members() if identity != leader)
    with frozen(member.pid) as state:
        await stage.until(lambda: "D" in [each for _, each in tree.members()], "frozen")
        told: list[str] = []
        tree.on_empty(lambda: told.append("empty"))
        tree.kill()
        exited = await stage.ended(leader)
        before = {"empty": tree.empty(), "told": list(told)}
        state.write_text("THAWED", encoding="ascii")
        await stage.until(lambda: told, "told after the thaw")
    return {**before, "signal": exited.signal, "gone": not os.path.exists(f"/proc/{member.pid}")}


@pytest.mark.parametrize("forest", [pytest.param("cgroup", marks=pytest.mark.needs("cgroup2")), "group"])
def test_one_unkillable_member_keeps_the_tree_from_being_empty(forest: str) -> None:
    """docs/rules.md S14, S5: the leader is gone and reaped, and still no successor may come: emptiness is told after the last."""
    need_freezer()
    found = play(stubborn_member, forest=forest)
    assert found.pop("gone") in (True, False)  # reaped by us a moment later
    assert found == {"empty": False, "told": [], "signal": signal.SIGKILL}
