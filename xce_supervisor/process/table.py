"""Reads the kernel's table of processes: who is whose child, and which environment a process was started with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from xce_supervisor.process.identity import Stat, read_proc, read_stat

_ENVIRONMENT_BYTES_MAX = 2 * 1024 * 1024


def all_pids() -> list[int]:
    """Return every pid that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def all_stats() -> Iterator[Stat]:
    """Yield the line of every process, leaving out those that went away meanwhile."""
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None:
            yield stat


def children(pid: int) -> list[int]:
    """Return the children of one process, of all its threads; empty when it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    found: list[int] = []
    for thread in threads:
        found += [int(child) for child in (read_proc(f"/proc/{pid}/task/{thread}/children") or b"").split()]
    return found


def own_children() -> list[int]:
    """Return our own children, zombies and adopted orphans included."""
    return children(os.getpid())


def descendants(roots: Iterable[int]) -> dict[int, Stat]:
    """Return every process below and including `roots`, by pid. A moving tree is seen as it was at some time meanwhile."""
    found: dict[int, Stat] = {}
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid in found:
            continue
        stat = read_stat(pid)
        if stat is not None:
            found[pid] = stat
            todo += children(pid)
    return found


def is_executing(pid: int) -> bool:
    """Is it in the middle of an exec? Then neither its arguments nor its environment can be read yet: both look empty."""
    return not read_proc(f"/proc/{pid}/cmdline")


def environment(pid: int, names: Iterable[str]) -> dict[str, str]:
    """Return what the process was started with for the wanted variables. Empty for a zombie, or when it may not be read.

    A process can overwrite or clear this; whoever relies on it must have another leg to stand on.
    """
    wanted = {os.fsencode(name) for name in names}
    text = (read_proc(f"/proc/{pid}/environ") or b"")[:_ENVIRONMENT_BYTES_MAX]
    found: dict[str, str] = {}
    for entry in text.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name in wanted:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found
