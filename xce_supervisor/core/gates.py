"""Why a unit runs or does not: every gate between "wanted" and "ready", open or closed (docs/rules.md S23).

`why` prints them in this order. A gate is closed when it alone keeps the unit from running, or from being called ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from xce_supervisor.core import role as role_part
from xce_supervisor.core.child_words import (
    Blocked,
    Child,
    Resting,
    Running,
    Starting,
    Stopping,
    UnitPolicy,
    Unkillable,
    Unwanted,
    Waiting,
    Want,
    live_run,
)
from xce_supervisor.core.role import Primary, Standby, Unknown
from xce_supervisor.core.supervision import State
from xce_supervisor.core.words import NS_PER_S, Deadline, Now

# A spawn takes milliseconds; what is still in its lane after this long waits for a disk.
_SLOW_SPAWN_NS = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition. closed: it holds the unit back. detail: for people, with numbers where there are any."""

    name: str
    closed: bool
    detail: str


def seconds(duration_ns: int) -> str:
    """Return a duration for people, e.g. "2.5 s"."""
    return f"{duration_ns / NS_PER_S:.1f} s"


def gates(state: State, name: str, unit: UnitPolicy, now: Now) -> tuple[Gate, ...]:
    """Return every gate of the unit, from the role down to the child's session."""
    child = state.children[name]
    found: list[Gate] = []
    if unit.role_bound:
        found += _role_gates(state, now)
    found.append(Gate("supervisor", state.leaving, "it is on its way out" if state.leaving else "running"))
    pause = child.pause
    found.append(Gate("pause", pause is not None, f"paused by {pause.by}: {pause.why}" if pause else "not paused"))
    if unit.role_bound and isinstance(child.want, Want) and child.want.not_before is not None:
        found.append(_wait_gate("hold-down", child.want.not_before, now, f"{state.role.flaps} promotions within the calm period"))
    found += _life_gates(child, unit, now)
    if unit.session_readiness:
        found += _session_gates(state, child)
    return tuple(found)


def _role_gates(state: State, now: Now) -> list[Gate]:
    is_ = state.role.is_
    match is_:
        case Primary(binding=binding):
            return [Gate("role", False, f"primary, term {binding.term}, instance {binding.instance_id}")]
        case Standby(gate=gate, gate_detail=detail):
            refused = Gate("promotion", bool(gate), f"refused by {gate}: {detail}" if gate else "not asked for")
            return [Gate("role", True, role_part.reason_not_primary(state.role)), refused]
        case Unknown(reason=reason, held=held, limit=limit):
            if held is None:
                return [Gate("role", True, f"unknown: {reason}")]
            left = seconds(limit.remaining_ns(now))
            return [Gate("role", True, f"unknown: {reason}; a running child is stopped in {left}, none is started")]
        case _:
            assert_never(is_)


def _wait_gate(name: str, until: Deadline, now: Now, detail: str) -> Gate:
    closed = not until.waited_out(now)
    return Gate(name, closed, f"{seconds(until.remaining_ns(now))} left; {detail}" if closed else "over")


def _life_gates(child: Child, unit: UnitPolicy, now: Now) -> list[Gate]:
    life = child.life
    match life:
        case Waiting(until=until, why=why):
            gate = _wait_gate("backoff", until, now, f"{why}, {child.failures} in a row")
            if not gate.closed and life.confirm_after is not None:
                return [Gate("confirmation", True, "the controller has not confirmed the binding since the last exit")]
            return [gate]
        case Blocked(fault=fault, retry=retry):
            return [Gate("spawn", True, f"{fault.text}; tried again when it changes, or in {seconds(retry.remaining_ns(now))}")]
        case Starting(asked_at=asked_at):
            return [Gate("spawn", True, f"in a lane for {seconds(now.since(asked_at))}")]
        case Stopping(text=text, rung=rung, deadline=deadline, exit=ended):
            what = "its leader is gone, its tree is not" if ended else f"rung: {rung.value}"
            return [Gate("predecessor", True, f"stopping ({text}); {what}; next rung in {seconds(deadline.remaining_ns(now))}")]
        case Unkillable(since=since, text=text):
            return [Gate("predecessor", True, f"unkillable for {seconds(now.since(since))} ({text}); no successor beside it")]
        case Resting():
            return [Gate("predecessor", False, "none")]
        case Running():
            return [Gate("spawn", False, f"pid {life.identity.pid}")]
        case _:
            assert_never(life)


def foreign_session(state: State, child: Child) -> str:
    """Return, for people, whose scheduler session the controller holds if it is not our child's; "" otherwise (S3)."""
    last = state.role.last
    if not isinstance(state.role.is_, Primary) or last is None or last.session is None or not last.session.joined:
        return ""
    run = live_run(child.life)
    if run is not None and (run.token == last.session.spawn_token or isinstance(child.life, Starting)):
        return ""
    shown = last.session.spawn_token or "none"
    who = last.session.name or "a nameless peer"
    return f"the controller holds a scheduler session of {who} with spawn token {shown[:8]}, not ours"


def _session_gates(state: State, child: Child) -> list[Gate]:
    foreign = foreign_session(state, child)
    found = [Gate("foreign session", True, foreign)] if foreign else []
    if isinstance(child.life, Running):
        watch = child.life.watch
        if not watch.joined:
            found.append(Gate("session", True, "not joined"))
        elif watch.suspect is not None:
            found.append(Gate("progress", True, f"oldest push not acted on for {seconds(watch.stall_ns)}"))
        else:
            found.append(Gate("session", False, "joined"))
    return found


def degraded(state: State, name: str, unit: UnitPolicy, now: Now) -> tuple[str, ...]:
    """Return every reason why the unit is not as wanted; empty when all is well or nothing is wanted."""
    child = state.children[name]
    reasons: list[str] = []
    if child.pause is not None:
        reasons.append(f"paused by {child.pause.by}: {child.pause.why}")
    foreign = foreign_session(state, child) if unit.session_readiness else ""
    if foreign:
        reasons.append(foreign)
    life = child.life
    match life:
        case Blocked(fault=fault):
            reasons.append(f"cannot start: {fault.text}")
        case Waiting(why=why) if isinstance(child.want, Want):
            reasons.append(f"{why}; waiting to start again")
        case Starting(asked_at=asked_at) if now.since(asked_at) > _SLOW_SPAWN_NS:
            reasons.append(f"the spawn has been in a lane for {seconds(now.since(asked_at))}: a file system may hang")
        case Unkillable():
            reasons.append("unkillable: still there after SIGKILL")
        case Running(watch=watch) if unit.session_readiness and watch.suspect is not None:
            reasons.append(f"oldest push not acted on for {seconds(watch.stall_ns)}")
        case Running(ready_at=ready_at, watch=watch) if unit.session_readiness and (ready_at is None or not watch.joined):
            reasons.append("not joined")
        case _:
            pass
    if child.failures >= 2:
        reasons.append(f"{child.failures} crashes or wedges in a row")
    if unit.role_bound and isinstance(state.role.is_, Unknown):
        reasons.append(f"role unknown: {state.role.is_.reason}")
    if unit.role_bound and isinstance(state.role.is_, Standby) and state.role.is_.gate:
        reasons.append(f"promotion refused by gate {state.role.is_.gate}")
    return tuple(reasons)


def is_wanted(child: Child) -> tuple[bool, str]:
    """Return whether a child should run now, and why (not)."""
    if isinstance(child.want, Unwanted):
        return False, child.want.text
    return True, "" if child.want.startable else "kept while the role is unknown"
