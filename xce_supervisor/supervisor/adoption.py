"""Finds what a former supervisor left running, and says of each unit who is to be adopted (docs/rules.md S15, S17).

Two sources that need not agree: the state file, which a crash may have left behind the truth, and the processes themselves, which
bear marks in their environment and live in our cgroups. A process counts only with its full identity; a record without a
living process of that identity is nobody, and a process without a record is judged by its own marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xce_supervisor.core.words import Binding, Identity
from xce_supervisor.process.identity import is_alive
from xce_supervisor.process.mark import TOKEN
from xce_supervisor.process.table import environment
from xce_supervisor.supervisor.children import Living, parse_binding
from xce_supervisor.supervisor.statefile import ChildRecord

# The binding of a survivor that cannot say what it belongs to: held by no role, so it is stopped.
NOBODYS = Binding("?", "?", -1)


@dataclass(frozen=True, slots=True)
class Survivor:
    """One unit's living tree. members: all of it that was found, the leader first. recorded: the state file knew it."""

    unit: str
    living: Living
    members: list[Identity]
    recorded: bool


def survivors(
    records: tuple[ChildRecord, ...], found: Mapping[str, list[Identity]], generations: Mapping[str, int]
) -> list[Survivor]:
    """Return who is alive, at most one tree a unit, in order of unit. Reads /proc; blocks briefly.

    records: of this boot, from the state file. found: by the forest, oldest first. generations: highest known, by unit.
    """
    by_unit = {record.unit: record for record in records}
    kept: list[Survivor] = []
    for unit in sorted({*by_unit, *found}):
        members = found.get(unit, [])
        record = by_unit.get(unit)
        if record is not None:
            leader = Identity(record.pid, record.start_ticks, record.boot_id)
            if is_alive(leader):
                binding = Binding(record.controller_id, record.instance_id, record.term)
                living = Living(record.generation, binding, record.token, leader, record.started_wall_s)
                kept.append(Survivor(unit, living, [leader, *(each for each in members if each != leader)], True))
                continue
        if members:
            if record is not None and environment(members[0].pid, (TOKEN,)).get(TOKEN, "") == record.token:
                # Its leader is dead, and this is what it left behind: to be ended, not to be taken for a child that works (S5).
                left = Living(record.generation, NOBODYS, record.token, members[0], record.started_wall_s)
                kept.append(Survivor(unit, left, members, True))
                continue
            generation = generations.get(unit, 0) + 1
            kept.append(Survivor(unit, _from_marks(members[0], generation), members, False))
    return kept


def held_binding(kept: list[Survivor], controller_id: str) -> Binding | None:
    """Return the newest binding of our controller that a survivor runs for: what is to be confirmed by the first answer."""
    ours = [each.living.binding for each in kept if each.living.binding.controller_id == controller_id]
    return max(ours, key=lambda binding: binding.term, default=None)


def _from_marks(leader: Identity, generation: int) -> Living:
    """Return what a process says of itself: spawned by a supervisor that died before it could write it down."""
    seen = environment(leader.pid, (TOKEN, "XCE_BINDING", "XCE_GENERATION"))
    binding = parse_binding(seen.get("XCE_BINDING", "")) or NOBODYS
    told = seen.get("XCE_GENERATION", "")
    number = max(generation, int(told)) if told.isdecimal() and len(told) < 12 else generation
    return Living(number, binding, seen.get(TOKEN, ""), leader, 0.0)
