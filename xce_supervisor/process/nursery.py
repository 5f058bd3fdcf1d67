"""Who was born in the supervisor's own cgroup, and to whom it belongs.

A child is spawned first and moved to its unit's group right after; what it forks before the move is born in the supervisor's
group. Each such process is given to its unit by evidence: its session or group, its ancestors, the spawn token in its
environment. One that hides from all of that can only come from a child that is being moved just then, so it goes by
elimination; but not before it was seen to hide twice, because an environment reads as empty in the middle of an exec, nor
while it may be a newborn that its own lane is about to claim. So that elimination is exact, children are born one at a time;
a child that takes too long with it loses its turn, and then the first one is held to be the parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from xce_supervisor.core.words import Identity
from xce_supervisor.process.births import Births
from xce_supervisor.process.identity import Stat, read_stat
from xce_supervisor.process.mark import TOKEN
from xce_supervisor.process.table import environment, is_executing

_SETTLE_S = 2.0  # a child that forks faster than we can move for so long is left to `kill`
_TURN_S = 0.1  # so long a child waits for the ones before it
_PATIENCE_S = 0.25  # then a process that several children may have forked is given to the first of them
_LOOK_AGAIN_S = 0.0005


class _Verdict(Enum):
    OURS = 1
    NOT_OURS = 2
    DOUBTFUL = 3  # look again: what it has forked, or what it is, cannot be known yet


@dataclass(frozen=True, slots=True)
class Newborn:
    """A child whose descendants are looked for. inside: returns who is in its unit's group. move: puts one there; False: gone."""

    unit: str
    leader: Identity
    token: str
    inside: Callable[[], list[int]]
    move: Callable[[int], bool]


@dataclass(slots=True)
class _Search:
    """What is remembered from one sweep to the next. dead: found dead. hiding: showed no evidence."""

    newborn: Newborn
    dead: set[int] = field(default_factory=set)
    hiding: set[int] = field(default_factory=set)
    impatient: bool = False


class Nursery:
    """The supervisor's own group. Its methods are the lanes' work and may be called in several threads at once."""

    def __init__(self, births: Births) -> None:
        self._births = births
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._windows: list[str] = []  # units whose next child is being spawned and moved, in order

    @contextlib.contextmanager
    def expecting(self, unit: str) -> Iterator[None]:
        """Announce that the unit's child is about to be spawned, and wait for its turn. It may be entered again inside itself."""
        if unit in self._windows:
            yield
            return
        turn = self._turn.acquire(timeout=_TURN_S)
        with self._lock:
            self._windows.append(unit)
        try:
            yield
        finally:
            with self._lock:
                if unit in self._windows:
                    self._windows.remove(unit)
            if turn:
                self._turn.release()

    def settle(self, newborn: Newborn, pids: Callable[[], list[int]]) -> bool:
        """Move the newborn's descendants until none is left behind. pids: returns who is in the nursery.

        Returns False when they are born faster than they can be moved. One sweep at a time, and the last one ends the window
        under the same lock, so that no other lane leaves a process to us that we do not look for any more.
        """
        began = time.monotonic()
        search = _Search(newborn)
        while (waited := time.monotonic() - began) < _SETTLE_S:
            with self._lock:
                search.impatient = waited > _PATIENCE_S
                moved, doubtful = self._sweep(search, pids())
                if not moved and not doubtful:
                    if newborn.unit in self._windows:
                        self._windows.remove(newborn.unit)
                    return True
            if not moved:
                time.sleep(_LOOK_AGAIN_S)
        return False

    def _sweep(self, search: _Search, pids: list[int]) -> tuple[int, int]:
        """Look once at everyone. Returns how many were moved, and how many are doubtful: who died since he was listed, too."""
        newborn = search.newborn
        others = [pid for pid in pids if pid not in (0, os.getpid())]
        if not others:
            return 0, 0
        inside = {newborn.leader.pid, *newborn.inside()}
        moved = doubtful = 0
        for pid in others:
            verdict = self._judge(pid, search, inside)
            if verdict is _Verdict.OURS and newborn.move(pid):
                inside.add(pid)
                moved += 1
            elif verdict is not _Verdict.NOT_OURS and pid not in search.dead:
                doubtful += 1
                if _is_dead(pid):
                    search.dead.add(pid)
        return moved, doubtful

    def _judge(self, pid: int, search: _Search, inside: set[int]) -> _Verdict:
        newborn = search.newborn
        if self._births.claimed(pid):
            return _Verdict.NOT_OURS
        births_open = self._births.any_open()  # asked before the evidence is read: a claim ends a birth
        stat = read_stat(pid)
        if stat is None or stat.dead:
            return _Verdict.DOUBTFUL
        if stat.start_ticks < newborn.leader.start_ticks:
            return _Verdict.NOT_OURS
        if newborn.leader.pid in (stat.session, stat.pgrp) or _descends(stat, inside):
            return _Verdict.OURS
        shown = environment(pid, (TOKEN,)).get(TOKEN, "")
        if shown and newborn.token:
            return _Verdict.OURS if shown == newborn.token else _Verdict.NOT_OURS
        if births_open or is_executing(pid) or pid not in search.hiding:
            search.hiding.add(pid)
            return _Verdict.DOUBTFUL
        if self._births.claimed(pid):
            return _Verdict.NOT_OURS
        if self._windows == [newborn.unit]:
            return _Verdict.OURS
        if not search.impatient:
            return _Verdict.DOUBTFUL
        return _Verdict.OURS if self._windows[:1] == [newborn.unit] else _Verdict.NOT_OURS


def _is_dead(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.dead


def _descends(stat: Stat, inside: set[int]) -> bool:
    """Is one of its ancestors, up to ourselves, in that set?"""
    seen: Stat | None = stat
    while seen is not None and seen.ppid not in (0, 1, os.getpid()):
        if seen.ppid in inside:
            return True
        seen = read_stat(seen.ppid)
    return False


def pids_in(folder: str) -> list[int]:
    """Return the processes of one cgroup itself; empty when there is no such group."""
    try:
        fd = os.open(f"{folder}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        chunks = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
        return [int(line) for line in b"".join(chunks).split()]
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EOPNOTSUPP):  # the group went away meanwhile, or is a threaded one
            raise
        return []
    finally:
        os.close(fd)


def pids_of(folder: Path) -> list[int]:
    """Return the processes of a cgroup and of all below it; empty when there is no such group."""
    return [pid for path, _, _ in os.walk(folder) for pid in pids_in(path)]
