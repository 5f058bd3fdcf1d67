"""How a status looks: at 3 a.m., in one look, what runs, what should run, since when, and why not (docs/rules.md S22, S23)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xce_supervisor.cli.asking import Said
from xce_supervisor.cli.paper import BAD, DOUBT, GOOD, PLAIN, QUIET, STRONG, Cell, Line, Table
from xce_supervisor.cli.words import span, stamp
from xce_supervisor.config import Places
from xce_supervisor.supervisor.view import LastExit, Plain, RoleView, UnitView, View

if TYPE_CHECKING:  # it brings TLS and more, which `status` need not load
    from xce_supervisor.supervisor.journal import Entry
    from xce_supervisor.supervisor.survey import Finding, Plan

_STATE_STYLES = {"running": GOOD, "stopped": PLAIN, "starting": DOUBT, "stopping": DOUBT, "waiting": DOUBT}
_ROLE_STYLES = {"primary": GOOD, "standby": PLAIN, "unknown": BAD}


def status(said: Said, places: Places) -> list[Line]:
    """Return the lines of `status`."""
    view = said.view
    lines: list[Line] = []
    if said.trouble:
        lines.append((("xce-supervisor: ", STRONG), (said.trouble, BAD)))
        if view is None:
            lines.append(((f"No last status in {places.last_status}.", QUIET),))
            return lines
        lines.append(((f"What follows is the last status, {_age(view)} old, of {stamp(view.wall)}:", DOUBT),))
    assert view is not None
    lines.append(_headline(view, live=not said.trouble))
    lines += _role_lines(view)
    lines.append(())
    if view.units:
        lines.append(_units(view))
    else:
        lines.append((("No units.", DOUBT),))
    complaints = list(view.complaints())
    if complaints:
        lines.append(())
        lines += [(("! ", BAD), (text, DOUBT)) for text in complaints]
        lines.append((("`xce-supervisor why` lists what is in the way.", QUIET),))
    return lines


def why(view: View, units: list[UnitView]) -> list[Line]:
    """Return the lines of `why`: for each unit its state, every gate, and what happened last."""
    lines: list[Line] = list(_role_lines(view))
    for unit in units:
        lines.append(())
        lines += _why_unit(unit)
    return lines


def _headline(view: View, *, live: bool) -> Line:
    about = view.supervisor
    verdict: Cell = ("all as wanted", GOOD) if view.as_wanted else ("DEGRADED", BAD)
    if not live:
        verdict = ("was " + verdict[0], QUIET)
    return (
        (about.controller_id, STRONG),
        (f" on {about.host}: ", PLAIN),
        verdict,
        (f"  (supervisor {about.version}, pid {about.pid}, up {span(about.since_s)}, trees by {about.tree})", QUIET),
    )


def _role_lines(view: View) -> Iterator[Line]:
    role = view.role
    style = _ROLE_STYLES[role.is_]
    text = f" since {span(role.since_s)}" + (f", term {role.term}" if role.term else "")
    yield (("role     ", QUIET), (role.is_, style), (text, PLAIN), (f"  {role.reason}" if role.reason else "", DOUBT))
    if role.unknown_remaining_s is not None:
        yield (("         ", PLAIN), (f"role-bound units are stopped in {span(role.unknown_remaining_s)}", BAD))
    if role.gate:
        detail = f": {role.gate_detail}" if role.gate_detail else ""
        yield (("gate     ", QUIET), (f"promotion refused by {role.gate}{detail}", BAD))
    yield (("answers  ", QUIET), *_answers(role, view.supervisor.controller_address))
    if role.is_ == "primary":
        jobs = view.jobs
        yield (("jobs     ", QUIET), (f"{jobs.pending} pending, {jobs.running} running, {jobs.finished} finished", PLAIN))


def _answers(role: RoleView, address: str) -> tuple[Cell, ...]:
    if role.last_answer_age_ms is None:
        return ((f"{address} has not answered yet", DOUBT),)
    said = f"{address} {span(role.last_answer_age_ms / 1000)} ago, {'long poll' if role.long_poll else 'polled'}"
    if role.quorum_age_ms is not None:
        said += f", quorum {span(role.quorum_age_ms / 1000)} old"
    if role.primary_id and role.is_ != "primary":
        said += f"; primary is {role.primary_id} at {role.primary_address}"
    return ((said, PLAIN),)


def _units(view: View) -> Table:
    rows = []
    for unit in view.units:
        rows.append(
            (
                (unit.name, STRONG),
                ("yes" if unit.wanted else "no", PLAIN),
                (unit.is_, BAD if unit.is_ in ("cannot start", "unkillable") else _STATE_STYLES.get(unit.is_, DOUBT)),
                (unit.ready, BAD if unit.ready == "not joined" else PLAIN),
                (span(unit.since_s), PLAIN),
                (str(unit.pid) if unit.pid else "-", PLAIN),
                (f"term {unit.binding.term}" if unit.binding else "-", PLAIN),
                (str(unit.restarts), DOUBT if unit.restarts else PLAIN),
                (_remark(unit), PLAIN if unit.as_wanted else DOUBT),
            )
        )
    heads = ("UNIT", "WANTED", "IS", "READY", "SINCE", "PID", "BINDING", "RESTARTS", "WHY")
    return Table(heads=heads, rows=tuple(rows))


def _remark(unit: UnitView) -> str:
    """Return the one thing about a unit that matters most."""
    parts: list[str] = []
    if unit.paused:
        parts.append(f"paused by {unit.paused.by} since {stamp(unit.paused.since)[:16]}: {unit.paused.why}")
    if unit.is_reason:
        parts.append(unit.is_reason)
    if unit.next_attempt_s is not None:
        parts.append(f"next attempt in {span(unit.next_attempt_s)}")
    if unit.stall_ms:
        parts.append(f"oldest push not acted on for {span(unit.stall_ms / 1000)}")
    if not parts or not unit.wanted:
        parts.append(unit.wanted_reason)
    if unit.last_exit and unit.wanted:
        parts.append(f"last exit: {_exit(unit.last_exit)}")
    return "; ".join(part for part in parts if part)


def _exit(ended: LastExit) -> str:
    how = ended.signal or (f"code {ended.code}" if ended.code is not None else "not seen")
    reason = f" ({ended.reason})" if ended.reason else ""
    return f"{how}{reason}, {span(ended.ago_s)} ago"


def _why_unit(unit: UnitView) -> Iterator[Line]:
    style = GOOD if unit.as_wanted else BAD
    state = f"is {unit.is_}" + (f", {unit.ready}," if unit.ready != "-" else "") + f" since {span(unit.since_s)}"
    yield ((unit.name, STRONG), (f" {state}", style), (f"; {unit.is_reason}" if unit.is_reason else "", DOUBT))
    yield ((f"  {'wanted' if unit.wanted else 'not wanted'}: ", QUIET), (unit.wanted_reason or "-", PLAIN))
    if unit.pid:
        bound = f", bound to {unit.binding.controller_id} term {unit.binding.term}" if unit.binding else ""
        yield (("  process: ", QUIET), (f"pid {unit.pid}, generation {unit.generation}{bound}", PLAIN))
    for gate in unit.gates:
        mark: Cell = ("  CLOSED  ", BAD) if gate.closed else ("  open    ", GOOD)
        yield (mark, (gate.name, STRONG), (f": {gate.detail}" if gate.detail else "", PLAIN))
    if unit.paused:
        paused = unit.paused
        yield (("  paused: ", QUIET), (f"by {paused.by} since {stamp(paused.since)}: {paused.why}", DOUBT))
    if unit.next_attempt_s is not None:
        yield (("  next attempt: ", QUIET), (f"in {span(unit.next_attempt_s)}", PLAIN))
    if unit.last_exit:
        yield (("  last exit: ", QUIET), (_exit(unit.last_exit), PLAIN))
    for text in unit.degraded:
        yield (("  ! ", BAD), (text, DOUBT))
    if unit.events:
        yield (("  last events:", QUIET),)
        for event in unit.events:
            yield (("    ", PLAIN), *_event(event.wall, event.kind, event.reason, event.fields))


def event_line(entry: Entry) -> Line:
    """Return the line of one event."""
    head = _event(entry.wall, entry.kind, "", {})
    unit: Cell = (f" {entry.unit}" if entry.unit else "", PLAIN)
    return (*head, unit, *_event_tail(entry.reason, entry.fields))


def _event(wall: float, kind: str, reason: str, fields: dict[str, Plain]) -> tuple[Cell, ...]:
    return ((stamp(wall), QUIET), (f"  {kind:<22}", STRONG), *_event_tail(reason, fields))


def _event_tail(reason: str, fields: dict[str, Plain]) -> tuple[Cell, ...]:
    pairs = " ".join(f"{key}={value}" for key, value in fields.items() if value not in (None, ""))
    return ((f"  {reason}" if reason else "", PLAIN), (f"  {pairs}" if pairs else "", QUIET))


def _age(view: View) -> str:
    return span(max(0.0, time.time() - view.wall))


def check(file: Path, findings: list[Finding], plans: list[Plan]) -> list[Line]:
    """Return the lines of `check`."""
    styles = {"error": BAD, "warning": DOUBT, "note": QUIET}
    lines: list[Line] = [((str(file), STRONG), (": the configuration is sound", GOOD))]
    lines += [
        ((f"{finding.level}: ", styles[finding.level]), (f"{finding.file}: {finding.key}: ", PLAIN), (finding.text, PLAIN))
        for finding in findings
    ]
    for plan in plans:
        lines.append(())
        lines.append(((plan.unit, STRONG), (f" would run {plan.when}", PLAIN)))
        for head, text in (
            ("command", shlex.join(plan.command)),
            ("ready", plan.ready),
            ("stop", plan.stop),
            ("again", plan.again),
            ("output", plan.output),
        ):
            lines.append(((f"  {head:<8} ", QUIET), (text, PLAIN)))
    return lines
