"""What the controller's answers mean, and what no answer means.

States: Primary (a binding to run children for), Standby, Unknown. Unknown is a state with a countdown, not a guess: until
its limit the binding that held before is still held (children go on, nothing new is started); at the limit it is let go
(docs/rules.md S7). A primary whose quorum confirmation is old is Unknown too, because a partitioned primary that does not
step down by itself says "primary" for ever.

A role that flaps earns a hold-down: the n-th promotion within the calm period is started only after a wait that doubles
(docs/rules.md S8). The first promotion after calm is started at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from xce_supervisor.core.words import NS_PER_S, Binding, Deadline, Gap, Now, Role


@dataclass(frozen=True, slots=True)
class RolePolicy:
    """All in nanoseconds. unknown_limit: S7 (3 s). quorum_age_limit: S7 (5 s). hold_down: S8 (0.25 to 5 s). calm: S8 (60 s)."""

    controller_id: str
    unknown_limit_ns: int = 3 * NS_PER_S
    quorum_age_limit_ns: int = 5 * NS_PER_S
    hold_down_ns_min: int = NS_PER_S // 4
    hold_down_ns_max: int = 5 * NS_PER_S
    calm_ns: int = 60 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Session:
    """The scheduler session of an answer: see wire.words.SchedulerSession. oldest_unacked_ns: None when all is acted on."""

    joined: bool
    name: str
    spawn_token: str
    last_push_seq: int
    last_acted_seq: int
    oldest_unacked_ns: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the controller. asked_at: read before the request was sent. quorum_age_ns, session: None if not told."""

    asked_at: Now
    controller_id: str
    instance_id: str
    role: Role
    term: int
    gate: str = ""
    gate_detail: str = ""
    primary_address: str = ""
    primary_id: str = ""
    quorum_age_ns: int | None = None
    session: Session | None = None
    loop_gap_ns: int = 0


@dataclass(frozen=True, slots=True)
class Primary:
    """Our controller is primary. confirmed_at: when the last answer that said so was asked for."""

    binding: Binding
    since: Now
    confirmed_at: Now


@dataclass(frozen=True, slots=True)
class Standby:
    """Our controller is standby; `gate` names what refused its promotion, if anything did."""

    instance_id: str
    term: int
    since: Now
    gate: str
    gate_detail: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """We cannot tell. held: the binding that children may go on for until `limit`; None once it passed or if there was none."""

    since: Now
    reason: str
    limit: Deadline
    held: Binding | None


RoleIs = Primary | Standby | Unknown


@dataclass(frozen=True, slots=True)
class RoleState:
    """is_: what we hold true. last: the last answer of our controller, also a doubtful one.

    term_max: highest term that we believed. answered_at: when the last believed answer was asked for. flaps: promotions within
    the calm period. lost_at: when a binding was last given up. startable_at: end of the hold-down of the newest binding.
    """

    is_: RoleIs
    last: Answer | None = None
    term_max: int = 0
    answered_at: Now | None = None
    flaps: int = 0
    lost_at: Now | None = None
    startable_at: Deadline | None = None


@dataclass(frozen=True, slots=True)
class RoleAnswered:
    answer: Answer


@dataclass(frozen=True, slots=True)
class RoleSilent:
    """No usable answer. reason: for people, e.g. "no answer within 1000 ms", "connection refused"."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoleGapSeen:
    """We were not running: what we knew may have lapsed (S10)."""

    gap: Gap


@dataclass(frozen=True, slots=True)
class RoleTicked:
    pass


RoleEvent = RoleAnswered | RoleSilent | RoleGapSeen | RoleTicked


def initial(now: Now, policy: RolePolicy, held: Binding | None = None) -> RoleState:
    """Return the state before the first answer. held: the binding of children that a former supervisor left (S17)."""
    return RoleState(Unknown(now, "no answer yet", now.after(policy.unknown_limit_ns), held))


def step(state: RoleState, event: RoleEvent, now: Now, policy: RolePolicy) -> RoleState:
    """Return the next state."""
    if isinstance(event, RoleGapSeen):
        return _verify(state, event.gap, now, policy)
    state = _let_go(state, now)
    match event:
        case RoleAnswered(answer):
            return _on_answer(state, answer, now, policy)
        case RoleSilent(reason):
            return _doubt(state, reason, now, policy)
        case RoleTicked():
            return state
        case _:
            assert_never(event)


def held_binding(state: RoleState) -> Binding | None:
    """Return the binding that running children may go on for, None if they must end."""
    match state.is_:
        case Primary(binding=binding):
            return binding
        case Standby():
            return None
        case Unknown(held=held):
            return held
        case _:
            assert_never(state.is_)


def next_deadline(state: RoleState) -> Deadline | None:
    """Return when the state changes by itself."""
    if isinstance(state.is_, Unknown) and state.is_.held is not None:
        return state.is_.limit
    return None


def reason_not_primary(state: RoleState) -> str:
    """Return, for people, why there is no binding to start children for; "" when there is one."""
    match state.is_:
        case Primary():
            return ""
        case Standby(gate=gate, gate_detail=detail) if gate:
            return f"promotion refused by gate {gate}" + (f": {detail}" if detail else "")
        case Standby():
            where = state.last.primary_address if state.last else ""
            return "controller is standby" + (f"; primary is {state.last.primary_id} at {where}" if where and state.last else "")
        case Unknown(reason=reason):
            return f"role unknown: {reason}"
        case _:
            assert_never(state.is_)


def _let_go(state: RoleState, now: Now) -> RoleState:
    """Time acts before the event: a doubted binding is let go at its limit, by the faster clock (S7, L23)."""
    is_ = state.is_
    if isinstance(is_, Unknown) and is_.held is not None and is_.limit.ended(now):
        return replace(state, is_=replace(is_, held=None), lost_at=now)
    return state


def _verify(state: RoleState, gap: Gap, now: Now, policy: RolePolicy) -> RoleState:
    """We did not run: what we held may have lapsed. Nobody could answer us meanwhile, so the gap does not count (S10)."""
    reason = f"this supervisor did not run for {gap.longest_ns / NS_PER_S:.1f} s"
    match state.is_:
        case Primary(binding=binding):
            return replace(state, is_=Unknown(now, reason, now.after(policy.unknown_limit_ns), binding))
        case Unknown(held=held) if held is not None:
            return replace(state, is_=replace(state.is_, limit=state.is_.limit.credited(gap)))
        case Standby() | Unknown():
            return state
        case _:
            assert_never(state.is_)


def _doubt(state: RoleState, reason: str, now: Now, policy: RolePolicy) -> RoleState:
    match state.is_:
        case Primary(binding=binding, confirmed_at=confirmed_at):
            # Counted from the last confirmation, not from when we noticed: silence may not lengthen a binding.
            limit = confirmed_at.after(policy.unknown_limit_ns)
            return _let_go(replace(state, is_=Unknown(now, reason, limit, binding)), now)
        case Standby():
            return replace(state, is_=Unknown(now, reason, now.after(policy.unknown_limit_ns), None))
        case Unknown(reason=before):
            return state if before == reason else replace(state, is_=replace(state.is_, reason=reason))
        case _:
            assert_never(state.is_)


def _on_answer(state: RoleState, answer: Answer, now: Now, policy: RolePolicy) -> RoleState:
    doubt = _why_doubtful(state, answer, policy)
    if doubt:
        return _doubt(replace(state, last=answer) if answer.controller_id == policy.controller_id else state, doubt, now, policy)
    state = replace(state, last=answer, answered_at=answer.asked_at, term_max=max(state.term_max, answer.term))
    if answer.role is Role.PRIMARY:
        return _on_primary(state, answer, now, policy)
    if held_binding(state) is not None:
        state = replace(state, lost_at=now)
    since = state.is_.since if isinstance(state.is_, Standby) else now
    return replace(state, is_=Standby(answer.instance_id, answer.term, since, answer.gate, answer.gate_detail))


def _why_doubtful(state: RoleState, answer: Answer, policy: RolePolicy) -> str:
    if answer.controller_id != policy.controller_id:
        return f"the address answers as controller {answer.controller_id}, not {policy.controller_id}"
    if answer.role is Role.UNKNOWN:
        return "the controller names no role we know"
    if answer.role is Role.PRIMARY:
        if answer.term < state.term_max:
            return f"term went back from {state.term_max} to {answer.term}: the store lost history; check it, then restart us"
        if answer.quorum_age_ns is not None and answer.quorum_age_ns > policy.quorum_age_limit_ns:
            return f"primary without fresh quorum: last confirmed {answer.quorum_age_ns / NS_PER_S:.1f} s ago"
    return ""


def _on_primary(state: RoleState, answer: Answer, now: Now, policy: RolePolicy) -> RoleState:
    binding = Binding(answer.controller_id, answer.instance_id, answer.term)
    is_ = state.is_
    if isinstance(is_, Primary) and is_.binding == binding:
        return replace(state, is_=replace(is_, confirmed_at=answer.asked_at))
    if isinstance(is_, Unknown) and is_.held == binding:  # never let go: no flap, no new promotion
        return replace(state, is_=Primary(binding, is_.since, answer.asked_at))
    if held_binding(state) is not None:  # missed demotion (S2)
        state = replace(state, lost_at=now)
    calm = state.lost_at is None or now.waited(state.lost_at) >= policy.calm_ns
    flaps = 0 if calm else state.flaps + 1
    wait = 0 if flaps == 0 else min(policy.hold_down_ns_max, policy.hold_down_ns_min << min(flaps - 1, 20))
    return replace(state, is_=Primary(binding, now, answer.asked_at), flaps=flaps, startable_at=now.after(wait))
