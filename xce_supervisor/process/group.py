"""Trees without cgroups: the leader's session and group, what the subreaper is given, and the marks in the environment.

As child subreaper every descendant stays below us, whatever it does: when its parent dies it becomes our child. So the members of
all trees are found by walking down from our own children. A child that we did not spawn was orphaned; whose it is tell, in this
order: having been seen in a tree before, its session or group, its mark. An orphan that hides from all three counts as a member
of every tree that was alive at its birth, because two schedulers are worse than one process killed too many (docs/rules.md S5).

One scan is not a snapshot: a process can be born behind its back. So a tree is empty after two clean rounds. Nothing is scanned
while nothing happens: a pidfd of every member known is in the loop, and each end leads to another look.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection

from xce_supervisor.core.words import Identity
from xce_supervisor.process.births import Births
from xce_supervisor.process.identity import Stat, identity_of, is_alive, open_pidfd, read_stat, send_signal
from xce_supervisor.process.mark import TOKEN, marked
from xce_supervisor.process.table import all_stats, descendants, environment, is_executing, own_children

_SIGNAL_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
_LOOK_S = 0.001  # ends that come together are looked at together
_CLEAN_ROUNDS = 2


class GroupForest:
    """The trees of one supervisor that is child subreaper. See `tree.Forest` for what the methods promise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, births: Births, why: str) -> None:
        """why: what to tell the operator. `Exits.reap_orphans` must have been called: it makes us the subreaper."""
        self.loop = loop
        self.births = births
        self.why = why
        self.in_doubt = False  # the last scan met a child that may be a newborn: look again when its birth is over
        self._trees: dict[str, GroupTree] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._end_listening = births.when_over(self._on_birth_over)

    def tree(self, unit: str) -> GroupTree:
        if unit not in self._trees:
            self._trees[unit] = GroupTree(self, unit)
        return self._trees[unit]

    def survivors(self, mark: str) -> dict[str, list[Identity]]:
        return marked(mark)

    def close(self) -> None:
        self._end_listening()
        if self._timer is not None:
            self._timer.cancel()
        for tree in self._trees.values():
            tree.drop()

    def scan(self, wanted: Collection[GroupTree]) -> dict[str, dict[Identity, Stat]]:
        """Return the living members of the wanted trees, found now, by unit. Other trees' leaders cost nothing."""
        trees = [tree for tree in self._trees.values() if tree.leader is not None]
        found: dict[str, dict[Identity, Stat]] = {tree.unit: {} for tree in wanted}
        leaders = {tree.leader.pid: tree for tree in trees if tree.leader is not None}
        self.in_doubt = False
        for root in own_children():
            if self.births.claimed(root) or (root in leaders and leaders[root] not in wanted):
                continue
            for tree in self._owners(root, trees):
                if tree.unit in found:
                    found[tree.unit].update(_alive(descendants([root])))
        for tree in wanted:
            if tree.foreign:
                found[tree.unit].update(_alive(tree.elsewhere()))
        return found

    def _owners(self, root: int, trees: list[GroupTree]) -> list[GroupTree]:
        """Return the trees to which one of our own children belongs, with all that is below it."""
        births_open = self.births.any_open()  # asked before the evidence is read: a claim ends a birth
        top = read_stat(root)
        if top is None or top.dead:
            return []
        certain = [tree for tree in trees if tree.knows(top)]
        if certain:
            return certain
        shown = environment(root, (TOKEN,)).get(TOKEN)
        if not shown and (births_open or is_executing(root)):
            self.in_doubt = True  # perhaps a newborn whose lane is about to claim it; an environment shows late
            return []
        if self.births.claimed(root):
            return []
        return [tree for tree in trees if tree.may_own(top, shown)]

    def look_soon(self) -> None:
        """Look at all trees that wait for their end, shortly."""
        if self._timer is None:
            self._timer = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        waiting = [tree for tree in self._trees.values() if tree.waits]
        if waiting:
            found = self.scan(waiting)
            for tree in waiting:
                tree.looked(found[tree.unit])

    def _on_birth_over(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._look_if_awaited)

    def _look_if_awaited(self) -> None:
        if self.in_doubt and any(tree.waits for tree in self._trees.values()):
            self.look_soon()


def _alive(stats: dict[int, Stat]) -> dict[Identity, Stat]:
    return {identity_of(stat): stat for stat in stats.values() if not stat.dead}


class GroupTree:
    """One unit's processes. See `tree.Tree` for what the methods promise."""

    def __init__(self, forest: GroupForest, unit: str) -> None:
        self.unit = unit
        self.leader: Identity | None = None
        self.foreign = False  # not our descendants: what a former supervisor left
        self._forest = forest
        self._token = ""
        self._groups: dict[Identity, int] = {}  # leaders of process groups, by pidfd: kept past their end, to signal the group
        self._known: set[Identity] = set()
        self._watched: dict[Identity, int] = {}
        self._callback: Callable[[], None] | None = None
        self._killing = False
        self._clean = 0

    @property
    def path(self) -> str:
        return ""

    @property
    def waits(self) -> bool:
        """Is there anything to do when a member ends?"""
        return self._callback is not None or self._killing

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def adopt_leader(self, identity: Identity, token: str = "") -> None:
        self._close_groups()
        self._known = {identity}
        self._token = token
        self._killing = False
        self.foreign = False
        self._hold_group(identity)
        self.leader = identity

    def adopt_survivors(self, identities: list[Identity], token: str = "") -> None:
        if identities:
            self.adopt_leader(identities[0], token or environment(identities[0].pid, (TOKEN,)).get(TOKEN, ""))
            self._known.update(identities)
            self.foreign = True

    def signal(self, number: int) -> int:
        return sum(send_signal(identity, number) for identity in self._found())

    def kill(self) -> None:
        self._killing = True
        self._kill(self._found())

    def members(self) -> list[tuple[Identity, str]]:
        return [(identity, stat.state) for identity, stat in self._found().items()]

    def contains(self, pid: int) -> bool:
        """Look upwards: most senders are the leader, or just below it."""
        leader = self.leader
        stat = read_stat(pid)
        while leader is not None and stat is not None and stat.pid > 1:
            if self.knows(stat):
                return True
            stat = read_stat(stat.ppid)
        return False

    def empty(self) -> bool:
        if self.leader is None:
            return True
        return not is_alive(self.leader) and not self._found() and not self._forest.in_doubt

    def on_empty(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback
        self._clean = 0
        if callback is None:
            return
        if self.leader is not None and is_alive(self.leader):
            self._watch(self.leader)
        self._forest.look_soon()

    def remove(self) -> None:
        if self.empty():
            self._forest.loop.call_soon_threadsafe(self.drop)

    def drop(self) -> None:
        """Stop listening (in the loop)."""
        self._callback = None
        self._killing = False
        for identity in list(self._watched):
            self._unwatch(identity)
        self._end()

    def knows(self, stat: Stat) -> bool:
        """Is it certainly a member: seen before, or in the leader's session or group?"""
        if self.leader is None:
            return False
        if identity_of(stat) in self._known:
            return True
        return self.leader.pid in (stat.session, stat.pgrp) and stat.start_ticks >= self.leader.start_ticks

    def may_own(self, stat: Stat, shown: str | None) -> bool:
        """Could an orphan that nobody knows be a member? By its mark, else by the time of its birth."""
        if self.leader is None or stat.start_ticks < self.leader.start_ticks:
            return False
        return shown == self._token if shown else True

    def elsewhere(self) -> dict[int, Stat]:
        """Return members that are not our descendants: all of /proc is looked through."""
        roots = [each.pid for each in self._known if is_alive(each)]
        for stat in all_stats():
            if self.knows(stat) or (self._token and environment(stat.pid, (TOKEN,)).get(TOKEN) == self._token):
                roots.append(stat.pid)
        return descendants(roots)

    def looked(self, found: dict[Identity, Stat]) -> None:
        """Take in what a scan found: watch the living, kill newcomers while killing, tell the end after two clean rounds."""
        self._known.update(found)
        if self._killing:
            self._kill(found)
        for identity in found:
            self._watch(identity)
        if found or self._forest.in_doubt:
            self._clean = 0
            return
        self._clean += 1
        if self._clean < _CLEAN_ROUNDS:
            self._forest.look_soon()
            return
        self._end()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def _end(self) -> None:
        """Nobody is left: from now on no orphan can be ours."""
        self.leader = None
        self.foreign = False
        self._killing = False
        self._clean = 0
        self._known.clear()
        self._close_groups()

    def _found(self) -> dict[Identity, Stat]:
        found = self._forest.scan([self])[self.unit]
        self._known.update(found)
        return found

    def _kill(self, found: dict[Identity, Stat]) -> None:
        """SIGKILL them: whole groups in one call where the kernel can, then each one by itself."""
        for identity, stat in found.items():
            if stat.pgrp == stat.pid:
                self._hold_group(identity)
        for fd in self._groups.values():
            with contextlib.suppress(ProcessLookupError, OSError):  # the group is gone, or the kernel is older than 6.9
                signal.pidfd_send_signal(fd, signal.SIGKILL, None, _SIGNAL_GROUP)
        for identity in found:
            send_signal(identity, signal.SIGKILL)
        if found:
            self._forest.look_soon()

    def _hold_group(self, identity: Identity) -> None:
        if identity not in self._groups:
            with contextlib.suppress(ProcessLookupError):
                self._groups[identity] = open_pidfd(identity)

    def _close_groups(self) -> None:
        for fd in self._groups.values():
            os.close(fd)
        self._groups.clear()

    def _watch(self, identity: Identity) -> None:
        if identity not in self._watched:
            try:
                fd = open_pidfd(identity)
            except ProcessLookupError:
                self._forest.look_soon()
                return
            self._watched[identity] = fd
            self._forest.loop.add_reader(fd, self._on_end, identity)

    def _unwatch(self, identity: Identity) -> None:
        fd = self._watched.pop(identity)
        self._forest.loop.remove_reader(fd)
        os.close(fd)

    def _on_end(self, identity: Identity) -> None:
        self._unwatch(identity)
        if self.waits:
            self._forest.look_soon()
