"""From the core's state to the picture that `status` and `why` show (docs/rules.md S22, S23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from xce_supervisor.core import child as child_part
from xce_supervisor.core import gates
from xce_supervisor.core.child_words import (
    ALWAYS,
    Blocked,
    Child,
    Resting,
    Running,
    Starting,
    Stopping,
    UnitPolicy,
    Unkillable,
    Waiting,
    live_run,
)
from xce_supervisor.core.role import Primary, RoleState, Standby, Unknown, reason_not_primary
from xce_supervisor.core.supervision import Policy, State
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Now
from xce_supervisor.process.exits import signal_name
from xce_supervisor.supervisor import view
from xce_supervisor.wire.words import CtrlStatusReply


def make(
    state: State,
    policy: Policy,
    now: Now,
    wall: float,
    about: view.SupervisorView,
    seen: CtrlStatusReply | None,
    events: Mapping[str, Sequence[view.Event]],
    degraded: tuple[str, ...],
    counters: Mapping[str, int],
) -> view.View:
    """Return the whole picture at `now`. seen: the controller's last answer. events: by unit, oldest first."""
    units = tuple(
        unit_view(state, name, policy.units.get(name) or state.removed[name], now, tuple(events.get(name, ())))
        for name in sorted(state.children)
    )
    jobs = view.Jobs(pending=seen.jobs_pending, running=seen.jobs_running, finished=seen.jobs_finished) if seen else view.Jobs()
    return view.View(
        supervisor=about,
        role=role_view(state.role, now, seen),
        units=units,
        degraded=degraded,
        jobs=jobs,
        counters=dict(counters),
        wall=wall,
    )


def role_view(role: RoleState, now: Now, seen: CtrlStatusReply | None) -> view.RoleView:
    """Return what is known of the controller."""
    is_, last = role.is_, role.last
    age = now.since(role.answered_at) // NS_PER_MS if role.answered_at is not None else None
    quorum = last.quorum_age_ns // NS_PER_MS if last is not None and last.quorum_age_ns is not None else None
    primary_address = last.primary_address if last is not None else ""
    primary_id = last.primary_id if last is not None else ""
    long_poll = seen.long_poll if seen is not None else False
    term, instance = (last.term, last.instance_id) if last is not None else (0, "")
    gate, detail, remaining = "", "", None
    match is_:
        case Primary():
            word = "primary"
        case Standby():
            word, gate, detail = "standby", is_.gate, is_.gate_detail
        case Unknown():
            word = "unknown"
            remaining = is_.limit.remaining_ns(now) / NS_PER_S if is_.held is not None else None
        case _:
            assert_never(is_)
    return view.RoleView(
        is_=word,  # type: ignore[arg-type]  # one of the three above
        since_s=now.since(is_.since) / NS_PER_S,
        term=term,
        instance_id=instance,
        reason=is_.reason if isinstance(is_, Unknown) else reason_not_primary(role),
        gate=gate,
        gate_detail=detail,
        unknown_remaining_s=remaining,
        quorum_age_ms=quorum,
        primary_address=primary_address,
        primary_id=primary_id,
        last_answer_age_ms=age,
        long_poll=long_poll,
    )


def unit_view(state: State, name: str, unit: UnitPolicy, now: Now, events: tuple[view.Event, ...]) -> view.UnitView:
    """Return one unit's part of the picture."""
    child = state.children[name]
    life = child.life
    wanted, why = gates.is_wanted(child)
    word, reason, since = _life_words(child)
    run = live_run(life)
    binding = None
    if run is not None and run.binding != ALWAYS:
        binding = view.BindingView(
            controller_id=run.binding.controller_id, instance_id=run.binding.instance_id, term=run.binding.term
        )
    due = child_part.next_deadline(child, unit) if isinstance(life, Waiting | Blocked | Resting) else None
    pause = child.pause
    identity = life.identity if isinstance(life, Running | Stopping | Unkillable) else None
    return view.UnitView(
        name=name,
        wanted=wanted,
        wanted_reason=why,
        is_=word,
        is_reason=reason,
        ready=_ready(child, unit),
        since_s=now.since(since) / NS_PER_S,
        pid=identity.pid if identity is not None else None,
        binding=binding,
        generation=child.generation,
        restarts=child.restarts,
        last_exit=_last_exit(child, now),
        next_attempt_s=due.remaining_ns(now) / NS_PER_S if due is not None else None,
        stall_ms=life.watch.stall_ns // NS_PER_MS if isinstance(life, Running) and life.watch.stall_ns else None,
        paused=view.Paused(by=pause.by, since=pause.since_wall_s, why=pause.why) if pause is not None else None,
        degraded=gates.degraded(state, name, unit, now),
        gates=tuple(
            view.Gate(name=gate.name, closed=gate.closed, detail=gate.detail) for gate in gates.gates(state, name, unit, now)
        ),
        events=events[-view.EVENTS_SHOWN :],
    )


def _life_words(child: Child) -> tuple[view.UnitIs, str, Now]:
    """Return the word of the state, why, for people, and since when."""
    life = child.life
    match life:
        case Resting(since=since):
            return "stopped", "", since
        case Waiting(since=since, why=why):
            return "waiting", why, since
        case Blocked(since=since, fault=fault):
            return "cannot start", fault.text, since
        case Starting(asked_at=since):
            return "starting", "", since
        case Running(since=since, adopted=adopted):
            return "running", "adopted" if adopted else "", since
        case Stopping(rung_at=since, text=text, rung=rung):
            return "stopping", f"{text} ({rung.value})", since
        case Unkillable(since=since, text=text):
            return "unkillable", text, since
        case _:
            assert_never(life)


def _ready(child: Child, unit: UnitPolicy) -> view.Ready:
    if not isinstance(child.life, Running):
        return "-"
    if unit.session_readiness:
        return "joined" if child.life.watch.joined else "not joined"
    return "ready" if child.life.ready_at is not None or not unit.notify_readiness else "-"


def _last_exit(child: Child, now: Now) -> view.LastExit | None:
    ended = child.last_exit
    if ended is None:
        return None
    name = None if ended.signal is None else signal_name(ended.signal)
    return view.LastExit(code=ended.code, signal=name, reason=ended.reason, ago_s=now.since(ended.at) / NS_PER_S)

