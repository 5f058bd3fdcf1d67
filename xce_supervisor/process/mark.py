"""The marks in a child's environment by which it is known again: by the sweep after a spawn, and by the next supervisor.

A mark is evidence, not a fence: a process may clear its environment. The tree (docs/rules.md S5) is what holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from xce_supervisor.core.words import Identity
from xce_supervisor.process.identity import identity_of
from xce_supervisor.process.table import all_stats, environment

SUPERVISOR = "XCE_SUPERVISOR"
UNIT = "XCE_UNIT"
TOKEN = "XCE_SPAWN_TOKEN"


def marks(mark: str, unit: str, token: str) -> dict[str, str]:
    """Return the variables to add to a child's environment.

    mark: names the supervisor over restarts (one controller on one host, e.g. its lock's path). token: random, one per spawn.
    """
    return {SUPERVISOR: mark, UNIT: unit, TOKEN: token}


def token_of(env: Mapping[str, str]) -> str:
    """Return the spawn token of an environment, "" when it has none."""
    return env.get(TOKEN, "")


def marked(mark: str) -> dict[str, list[Identity]]:
    """Return every living process on this host whose environment bears the mark, by unit, oldest first.

    Blocks for some milliseconds (reads all of /proc). Processes of other users are seen by root only.
    """
    found: dict[str, list[Identity]] = {}
    for stat in all_stats():
        if stat.dead or stat.pid == os.getpid():  # we may have been started from within a child of the former supervisor
            continue
        seen = environment(stat.pid, (SUPERVISOR, UNIT))
        if seen.get(SUPERVISOR) == mark and seen.get(UNIT):
            found.setdefault(seen[UNIT], []).append(identity_of(stat))
    return {unit: oldest_first(identities) for unit, identities in found.items()}


def oldest_first(identities: list[Identity]) -> list[Identity]:
    """Return them by start: the first one of a tree is its leader, or the oldest that is left."""
    return sorted(identities, key=lambda each: (each.start_ticks, each.pid))
