"""The whole of one supervisor: hands each event to its part and holds the rules between the parts.

Parts: the role of our controller (`core.role`) and one child a unit (`core.child`). The rules between them:

* What the role holds is what role-bound children are wanted for (docs/rules.md S1, S2, S7); a doubted role keeps running
  children and starts none.
* An answer's scheduler session is judged only for the binding it belongs to (S3, S9).
* After our own absence the role is verified before anybody is judged (S10): the gap goes to the role first, and the
  controller is asked at once.
* When the supervisor leaves, units say whether their child stays (S17) or is stopped.

At most one child per unit is alive (S5) because a unit has one Child and a Child has one life.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from xce_supervisor.core import child as child_part
from xce_supervisor.core import role as role_part
from xce_supervisor.core.child_words import (
    ALWAYS,
    Child,
    ChildEffect,
    ChildEvent,
    GapSeen,
    Pause,
    PollRole,
    Record,
    RestartAsked,
    Resting,
    RoleConfirmed,
    Running,
    SessionSeen,
    StopReason,
    Ticked,
    UnitPolicy,
    Unkillable,
    Unwanted,
    Waiting,
    Want,
    WantChanged,
    live_run,
)
from xce_supervisor.core.role import (
    Answer,
    Primary,
    RoleAnswered,
    RoleEvent,
    RoleGapSeen,
    RolePolicy,
    RoleSilent,
    RoleState,
    RoleTicked,
    Standby,
    Unknown,
)
from xce_supervisor.core.words import Binding, Deadline, Gap, Now


@dataclass(frozen=True, slots=True)
class Policy:
    """role: numbers of the role. units: by name; each name is a key of State.children."""

    role: RolePolicy
    units: Mapping[str, UnitPolicy]


@dataclass(frozen=True, slots=True)
class State:
    """children: by unit name; a removed unit stays until its child is gone. leaving: the supervisor was told to end.

    stop_all: ... and to stop also the children that would outlive it. removed: policies of units whose file is gone.
    """

    role: RoleState
    children: Mapping[str, Child]
    leaving: bool = False
    stop_all: bool = False
    removed: Mapping[str, UnitPolicy] = field(default_factory=dict)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Answered:
    """The controller answered ctrlstatus."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Silent:
    """The controller gave no usable answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChildHappened:
    """Something happened to one unit's child, or somebody asked something of it."""

    unit: str
    event: ChildEvent


@dataclass(frozen=True, slots=True)
class LoopGapSeen:
    """Our own loop stood still beyond when it should have woken."""

    gap: Gap


@dataclass(frozen=True, slots=True)
class UnitsReloaded:
    """The configuration changed. policy: holds from here on. restart: units that changed. removed: units whose file is gone."""

    restart: frozenset[str]
    removed: Mapping[str, UnitPolicy]
    policy: Policy


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """SIGTERM or SIGINT. stop_all: stop every child, also those that would survive us."""

    stop_all: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = Answered | Silent | ChildHappened | LoopGapSeen | UnitsReloaded | LeaveAsked | TimePassed


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class ForUnit:
    """An effect on one unit's child."""

    unit: str
    effect: ChildEffect


@dataclass(frozen=True, slots=True)
class Leave:
    """Everything that had to end has ended: exit. May be told more than once."""


Effect = ForUnit | PollRole | Record | Leave
Step = tuple[State, tuple[Effect, ...]]


def initial(
    now: Now,
    policy: Policy,
    held: Binding | None = None,
    pauses: Mapping[str, Pause] | None = None,
    generations: Mapping[str, int] | None = None,
    strays: Collection[str] = (),
) -> State:
    """Return the first state. held: binding of survivors to be adopted (S17). pauses: kept from before (S24).

    generations: the highest ones ever used, so that none comes twice. strays: units that are configured no more but have a
    survivor, to be adopted and stopped.
    """
    removed = {name: UnitPolicy(name) for name in strays}
    state = State(role_part.initial(now, policy.role, held), {}, removed=removed)
    pauses, generations = pauses or {}, generations or {}
    children = {
        name: Child(_want(state, name, unit), Resting(now), generation=generations.get(name, 0), pause=pauses.get(name))
        for name, unit in {**removed, **policy.units}.items()
    }
    return replace(state, children=children)


def step(state: State, event: Event, now: Now, policy: Policy) -> Step:
    """Return the next state and the effects to begin, in order. Asserts after every step what `check` names."""
    every: ChildEvent = Ticked()
    restart: frozenset[str] = frozenset()
    role_event: RoleEvent = RoleTicked()
    effects: tuple[Effect, ...] = ()
    match event:
        case Answered(answer):
            role_event = RoleAnswered(answer)
        case Silent(reason):
            role_event = RoleSilent(reason)
        case ChildHappened(unit, child_event):
            if role_part.next_deadline(state.role) is None:  # nothing but this child can have changed
                return _one(state, unit, child_event, now, policy)
            state, effects = _one(state, unit, child_event, now, policy)
        case LoopGapSeen(gap):
            role_event, every = RoleGapSeen(gap), GapSeen(gap)
            effects = (Record("loop.gap_seen", "", (("gap_ms", gap.longest_ns // 1_000_000),)), PollRole())
        case UnitsReloaded(restart, removed, _):
            state = _reloaded(state, removed, policy, now)
            effects = (Record("config.reloaded", "", (("restarted", ",".join(sorted(restart))),)),)
        case LeaveAsked(stop_all):
            state = replace(state, leaving=True, stop_all=state.stop_all or stop_all)
            effects = (Record("supervisor.leaving", "stopping all children" if stop_all else ""),)
        case TimePassed():
            pass
        case _:
            assert_never(event)
    before = state.role
    state = replace(state, role=role_part.step(before, role_event, now, policy.role))
    effects = (*effects, *_role_records(before, state.role))
    told = _told(state.role, event.answer) if isinstance(event, Answered) else ()
    for name, child in tuple(state.children.items()):
        unit_policy = _unit(state, policy, name)
        happened: list[ChildEvent] = [RestartAsked("reload")] if name in restart else []
        if unit_policy.role_bound:
            happened += (each for each in told if _concerns(each, child, unit_policy))
        if not isinstance(every, Ticked) or (not happened and _is_due(state, child, name, unit_policy, now)):
            happened.insert(0, every)
        for child_event in happened:
            state, more = _one(state, name, child_event, now, policy)
            effects = (*effects, *more)
    if state.leaving and settled(state):
        effects = (*effects, Leave())
    check(state)
    return state, effects


def _is_due(state: State, child: Child, name: str, unit: UnitPolicy, now: Now) -> bool:
    """Has a deadline of the child passed, or is something else wanted now? All others need no look: a hundred units may idle."""
    deadline = child_part.next_deadline(child, unit)
    if (deadline is not None and deadline.waited_out(now)) or _want(state, name, unit) != child.want:
        return True
    return isinstance(child.life, Resting) and child_part.may_start(child, now)


def _told(role: RoleState, answer: Answer) -> tuple[SessionSeen | RoleConfirmed, ...]:
    """Return what a believed answer of a primary tells role-bound children: the binding holds, and what session there is."""
    if not isinstance(role.is_, Primary) or role.last is not answer:
        return ()
    confirmed = RoleConfirmed(answer.asked_at)
    if answer.session is None:
        return (confirmed,)
    return confirmed, SessionSeen(role.is_.binding, answer.session, answer.loop_gap_ns)


def _concerns(event: SessionSeen | RoleConfirmed, child: Child, unit: UnitPolicy) -> bool:
    """Would this child do anything about it?"""
    if isinstance(event, SessionSeen):
        return unit.session_readiness
    return isinstance(child.life, Waiting) and child.life.confirm_after is not None


def _one(state: State, name: str, event: ChildEvent, now: Now, policy: Policy) -> Step:
    """Step one child; tell it first what is wanted now. An event for a unit that is gone is dropped."""
    child = state.children.get(name)
    if child is None:
        return state, ()
    unit = _unit(state, policy, name)
    effects: tuple[ChildEffect, ...] = ()
    want = _want(state, name, unit)
    if want != child.want:
        child, effects = child_part.step(child, WantChanged(want), now, unit)
    child, more = child_part.step(child, event, now, unit)
    children = {**state.children, name: child}
    removed = state.removed
    if name in removed and live_run(child.life) is None:
        del children[name]
        removed = {key: value for key, value in removed.items() if key != name}
    state = replace(state, children=children, removed=removed)
    out: tuple[Effect, ...] = tuple(ForUnit(name, effect) for effect in (*effects, *more))
    if state.leaving and not isinstance(event, Ticked) and settled(state):
        out = (*out, Leave())
    return state, out


def settled(state: State) -> bool:
    """Has every child that must end with the supervisor ended, and is no spawn in flight?"""
    for child in state.children.values():
        if live_run(child.life) is None or isinstance(child.life, Unkillable):
            continue  # what not even SIGKILL ends is left to the next supervisor; waiting would only block its coming
        if isinstance(child.life, Running) and not isinstance(child.want, Unwanted):
            continue  # it stays, on its own self-checks, until the next supervisor adopts it (S4, S17)
        return False
    return True


def next_deadline(state: State, policy: Policy) -> Deadline | None:
    """Return when to come back with TimePassed at the latest; None for never."""
    soonest = role_part.next_deadline(state.role)
    for name in state.children:
        deadline = child_deadline(state, name, policy)
        if deadline is not None and (soonest is None or deadline.mono_ns < soonest.mono_ns):
            soonest = deadline
    return soonest


def child_deadline(state: State, name: str, policy: Policy) -> Deadline | None:
    """Return one unit's part of `next_deadline`, for a driver that remembers the others'; None for never, or no such unit."""
    child = state.children.get(name)
    return None if child is None else child_part.next_deadline(child, _unit(state, policy, name))


def check(state: State) -> None:
    """Assert what must always hold; run after every step, in production too."""
    held = role_part.held_binding(state.role)
    for name, child in state.children.items():
        if isinstance(child.life, Running) and isinstance(child.want, Want):
            assert child.life.run.binding == child.want.binding, f"{name} runs for a binding that nobody wants (S2)"
        if isinstance(child.want, Want) and child.want.binding != ALWAYS:
            assert child.want.binding == held, f"{name} is wanted for a binding that the role does not hold (S1)"


def _unit(state: State, policy: Policy, name: str) -> UnitPolicy:
    return state.removed[name] if name in state.removed else policy.units[name]


def _want(state: State, name: str, unit: UnitPolicy) -> Want | Unwanted:
    """Return what the role and the supervisor's own end mean for a unit."""
    role, leaving = state.role, state.leaving
    if name in state.removed:
        return Unwanted(StopReason.REMOVED, "its unit file was removed")
    if leaving and (unit.stop_on_leave or state.stop_all):
        return Unwanted(StopReason.LEAVING, "the supervisor ends")
    if not unit.role_bound:
        return Want(ALWAYS, startable=not leaving)
    match role.is_:
        case Primary(binding=binding):
            return Want(binding, not leaving, role.startable_at)
        case Standby(gate=gate):
            text = f"promotion refused by gate {gate}" if gate else "controller is standby"
            return Unwanted(StopReason.DEMOTED, text)
        case Unknown(held=held, reason=reason):
            if held is not None:
                return Want(held, startable=False)
            return Unwanted(StopReason.ROLE_LOST, f"role unknown: {reason}")
        case _:
            assert_never(role.is_)


def _role_records(before: RoleState, after: RoleState) -> tuple[Record, ...]:
    was, is_ = before.is_, after.is_
    match is_:
        case Primary(binding=binding):
            if isinstance(was, Primary) and was.binding == binding:
                return ()
            kind = "role.confirmed" if role_part.held_binding(before) == binding else "role.promoted"
            return (Record(kind, "", (("term", binding.term), ("instance", binding.instance_id), ("flaps", after.flaps))),)
        case Standby(term=term, gate=gate):
            if isinstance(was, Standby):
                return (Record("role.gate_changed", gate),) if was.gate != gate else ()
            kind = "role.demoted" if role_part.held_binding(before) is not None else "role.standby_seen"
            return (Record(kind, role_part.reason_not_primary(after), (("term", term),)),)
        case Unknown(reason=reason, held=held):
            if not isinstance(was, Unknown):
                return (Record("role.doubted", reason),)
            if was.held is not None and held is None:
                return (Record("role.let_go", reason),)
            return ()
        case _:
            assert_never(is_)


def _reloaded(state: State, removed: Mapping[str, UnitPolicy], policy: Policy, now: Now) -> State:
    """New units get a child; removed ones keep theirs until it is gone; all others are left alone (S25)."""
    children = dict(state.children)
    for name, unit in policy.units.items():
        if name not in children:
            children[name] = Child(_want(state, name, unit), Resting(now))
    kept = {name: unit for name, unit in {**state.removed, **removed}.items() if name not in policy.units and name in children}
    return replace(state, children=children, removed=kept)
