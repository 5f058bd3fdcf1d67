"""A child is a whole tree of processes: the interface to hold one, and the choice between the two ways to do it.

Both catch what left its session or group. The forest of cgroups lets the kernel keep the members; the forest of groups finds
them through the subreaper, the session and the marks in the environment (docs/rules.md S5). Zombies never count as members.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from xce_supervisor.core.words import Identity
from xce_supervisor.process import cgroup, group, mark
from xce_supervisor.process.births import Births
from xce_supervisor.process.failure import SpawnError
from xce_supervisor.process.identity import send_signal
from xce_supervisor.process.spawn import SpawnSpec, spawn
from xce_supervisor.process.stdio import Warn

Member = tuple[Identity, str]


class Tree(Protocol):
    """One unit's processes. Used again by the unit's next child, once it is empty."""

    @property
    def unit(self) -> str:
        """The name of the unit."""

    @property
    def path(self) -> str:
        """Where it is held, for status and the state file: the folder of its cgroup, "" without one."""

    def expecting(self) -> AbstractContextManager[None]:
        """Announce that a child of this tree is about to be spawned, until it is taken in. A lane's work."""

    def adopt_leader(self, identity: Identity, token: str = "") -> None:
        """Take in a process that was just spawned, and all that it has forked meanwhile. Blocks: a lane's work.

        token: the spawn token in its environment. Raises OSError when the kernel refuses; the process then still runs.
        """

    def adopt_survivors(self, identities: list[Identity], token: str = "") -> None:
        """Take in what a former supervisor left, the leader first (as `Forest.survivors` tells it). Blocks: a lane's work."""

    def signal(self, number: int) -> int:
        """Send a signal to every member. Returns to how many."""

    def kill(self) -> None:
        """SIGKILL every member, also those born meanwhile. The end is told by `on_empty`."""

    def members(self) -> list[Member]:
        """Return who lives in it and their states (letters of proc(5))."""

    def contains(self, pid: int) -> bool:
        """Is that process in it? For the sender of a notice; cheap."""

    def empty(self) -> bool:
        """Is nobody alive in it? Cheap; may be asked in the loop."""

    def on_empty(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` on the loop, once, when nobody is alive any more; at the next turn when it is so already.

        One callback at a time: a new one replaces it, None forgets it.
        """

    def remove(self) -> None:
        """Give back what an empty tree holds (folder, descriptors); leave it alone when somebody lives in it. A lane's work."""


class Forest(Protocol):
    """All trees of one supervisor.

    Every process that the supervisor starts belongs into one, hooks too, with a spawn token of its own in its environment
    (`mark.marks`): a child without one could be taken for a hiding descendant of another.
    """

    @property
    def why(self) -> str:
        """What it uses and why, for `check` and `status`: "cgroup v2 at ...", or why not."""

    def tree(self, unit: str) -> Tree:
        """Return the tree of a unit, always the same one."""

    def survivors(self, mark: str) -> dict[str, list[Identity]]:
        """Return the living children of a former supervisor by unit, oldest first: by its place and by the mark. Blocks."""

    def close(self) -> None:
        """Give back everything but trees in which somebody lives, for the next supervisor to find."""


def open_forest(loop: asyncio.AbstractEventLoop, name: str, births: Births, root: str | None = None) -> Forest:
    """Return the forest of cgroups where one can be made, else the one of process groups. Blocks for some milliseconds.

    name: stable over restarts and held by one live supervisor of this host (the caller holds its lock): whatever is found
    under it was left by a dead one. root: an explicit cgroup v2 folder; "auto" or None is the one that we were started in; "off"
    asks for process groups.
    """
    if root == "off":
        return group.GroupForest(loop, births, "process groups and the child subreaper: cgroups are off in the configuration")
    try:
        return cgroup.CgroupForest(loop, name, births, None if root == "auto" else root)
    except cgroup.CgroupUnusable as error:
        return group.GroupForest(loop, births, f"process groups and the child subreaper: {error}")


def start(spec: SpawnSpec, tree: Tree, births: Births, warn: Warn, at_birth: Callable[[], None] | None = None) -> Identity:
    """Spawn a child into its tree: the lane's whole work of a start.

    at_birth: called last of all before the process exists; what it raises prevents the birth.

    Raises SpawnError. A child that the tree would not take is killed and left to the reaper of orphans.
    """
    with contextlib.ExitStack() as opened:

        def expect() -> None:
            opened.enter_context(tree.expecting())
            if at_birth is not None:
                at_birth()

        identity = spawn(spec, births, warn, expect)
        try:
            tree.adopt_leader(identity, mark.token_of(spec.env))
        except OSError as error:
            send_signal(identity, signal.SIGKILL)
            births.release(identity.pid)
            number = error.errno or errno.EIO
            raise SpawnError("tree", str(error.filename or ""), number, permanent=False) from error
    return identity
