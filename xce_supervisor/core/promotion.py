"""How a controller comes to be primary, and how it stops: pure decisions.

    Standby --Won--> Gated <--gate--> Committing --NoopWritten--> Applying --FactsApplied--> Primary --Lost--> Standby
                       |                                                                        |
                       +--patience over: Resign                    not stepping down: Stranded -+--AnotherLeads, Won--> Standby

Winning the election is not yet being primary. First no gate may be closed (docs/rules.md S1); then a NOOP fact of the own term
is committed, which also settles what earlier terms left in doubt; then everything up to it is applied (docs/rules.md L4). Only
then is the role told. A gate matters at promotion alone: closing one later does not demote. A controller that is refused by a
gate keeps the others waiting only for a while, then resigns so that one of them may lead.

The election engine fences by itself; every event carries its term, and one of another term than the phase's is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Deadline, Now, Role


class Gate(StrEnum):
    """What can refuse a promotion."""

    RECOVERY_TRUNCATED = "recovery-truncated"
    APPLY_DIVERGENT = "apply-divergent"
    SELF_RESTART_PENDING = "self-restart-pending"
    APPLY_RESOURCE_FENCED = "apply-resource-fenced"
    CONFIG_SERVE_FENCED = "config-serve-fenced"


@dataclass(frozen=True, slots=True)
class ClosedGate:
    """A gate that is closed now. detail: for people."""

    gate: Gate
    detail: str


@dataclass(frozen=True, slots=True)
class Policy:
    """refusal_patience_ns: how long a refused winner waits for its gate to open. refusal_hold_ms: how long it stays out of
    elections afterwards. noop_retry_ns: wait after a NOOP whose outcome is not known. steps_down: False is the mode of a
    controller that stays primary although it lost its quorum (docs/rules.md S7)."""

    refusal_patience_ns: int = 1 * NS_PER_S
    refusal_hold_ms: int = 5_000
    noop_retry_ns: int = 100 * NS_PER_MS
    steps_down: bool = True


# ---------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class Standby:
    """Does not lead."""


@dataclass(frozen=True, slots=True)
class Gated:
    """Won `term`, and a closed gate refuses the promotion until `patience_until`; then it resigns."""

    term: int
    patience_until: Deadline
    resigning: bool = False


@dataclass(frozen=True, slots=True)
class Committing:
    """The NOOP of `term` is being written (retry_at None), or will be tried again."""

    term: int
    retry_at: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Applying:
    """Facts up to the own NOOP at `index` are being read and applied."""

    term: int
    index: int


@dataclass(frozen=True, slots=True)
class Primary:
    """Promotion is complete: the only phase, with Stranded, in which the role is primary."""

    term: int
    noop_index: int


@dataclass(frozen=True, slots=True)
class Stranded:
    """Lost the store and does not step down: still says primary, while its quorum confirmation grows old."""

    term: int
    noop_index: int


Phase = Standby | Gated | Committing | Applying | Primary | Stranded


@dataclass(frozen=True, slots=True)
class Promotion:
    """The whole state. refused_by: the gate that refused the last promotion, for as long as it stays closed."""

    phase: Phase = Standby()
    closed: tuple[ClosedGate, ...] = ()
    refused_by: ClosedGate | None = None

    @property
    def role(self) -> Role:
        """The role that the controller tells."""
        return Role.PRIMARY if isinstance(self.phase, Primary | Stranded) else Role.STANDBY


# ---------------------------------------------------------------- events and effects


class LossKind(StrEnum):
    """Why leadership ended, as far as it matters here."""

    QUORUM = "quorum"  # the lease ran out or the store is lost; nobody else is known to lead
    TAKEN = "taken"  # another leader, or a later term
    GIVEN = "given"  # resigned or closed


@dataclass(frozen=True, slots=True)
class Won:
    """Elected in `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class Lost:
    """No longer leads in `term`."""

    term: int
    kind: LossKind
    reason: str


@dataclass(frozen=True, slots=True)
class AnotherLeads:
    """The store names another controller as leader of `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class GateTurned:
    """A gate was closed or opened."""

    gate: Gate
    closed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NoopWritten:
    """The NOOP of `term` is committed at `index`."""

    term: int
    index: int


@dataclass(frozen=True, slots=True)
class NoopUnknown:
    """Writing the NOOP of `term` ended without an answer, or was refused. Fencing, if it was that, arrives as Lost."""

    term: int


@dataclass(frozen=True, slots=True)
class FactsApplied:
    """Everything up to `index` is applied, read for the promotion to `term`."""

    term: int
    index: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """The deadline of `next_deadline` was reached."""


Event = Won | Lost | AnotherLeads | GateTurned | NoopWritten | NoopUnknown | FactsApplied | Ticked


@dataclass(frozen=True, slots=True)
class WriteNoop:
    """Append the NOOP of `term`; ends in NoopWritten or NoopUnknown."""

    term: int


@dataclass(frozen=True, slots=True)
class ApplyUpTo:
    """Read and apply facts up to `index`; ends in FactsApplied, or in nothing if leadership is lost first."""

    term: int
    index: int


@dataclass(frozen=True, slots=True)
class ServeAsPrimary:
    """Promotion is complete."""

    term: int
    noop_index: int


@dataclass(frozen=True, slots=True)
class ServeAsStandby:
    """Demotion: tell the scheduler to exit, answer primary-only opcodes with a redirect."""

    term: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up leadership of `term`, and stay out of elections for hold_ms."""

    term: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class TellRefused:
    """A gate refuses the promotion to `term`."""

    term: int
    gate: ClosedGate


Effect = WriteNoop | ApplyUpTo | ServeAsPrimary | ServeAsStandby | Resign | TellRefused
Step = tuple[Promotion, tuple[Effect, ...]]


def step(state: Promotion, event: Event, now: Now, policy: Policy) -> Step:
    """Return the next state and the effects to begin, in order."""
    match event:
        case Won():
            return _on_won(state, event, now, policy)
        case Lost():
            return _on_lost(state, event, policy)
        case AnotherLeads():
            return _on_another_leads(state, event)
        case GateTurned():
            return _on_gate_turned(state, event, now, policy)
        case NoopWritten():
            return _on_noop_written(state, event)
        case NoopUnknown():
            return _on_noop_unknown(state, event, now, policy)
        case FactsApplied():
            return _on_facts_applied(state, event, now, policy)
        case Ticked():
            return _on_ticked(state, now, policy)
        case _:
            assert_never(event)


def next_deadline(state: Promotion) -> Deadline | None:
    """Return when to come back with Ticked, None when nothing is waited for."""
    match state.phase:
        case Gated(resigning=False, patience_until=until):
            return until
        case Committing(retry_at=retry_at):
            return retry_at
        case _:
            return None


def _term(phase: Phase) -> int:
    return 0 if isinstance(phase, Standby) else phase.term


def _on_won(state: Promotion, event: Won, now: Now, policy: Policy) -> Step:
    if event.term <= _term(state.phase):
        return state, ()
    # Whatever the phase was, it belonged to an earlier term, whose end was missed: that comes first (docs/rules.md S2).
    before: tuple[Effect, ...] = ()
    if state.role is Role.PRIMARY:
        before = (ServeAsStandby(_term(state.phase), "elected anew in a later term"),)
    after, effects = _past_gates(state, event.term, now, policy)
    return after, before + effects


def _past_gates(state: Promotion, term: int, now: Now, policy: Policy) -> Step:
    if state.closed:
        gate = state.closed[0]
        gated = Gated(term, now.after(policy.refusal_patience_ns))
        return replace(state, phase=gated, refused_by=gate), (TellRefused(term, gate),)
    return replace(state, phase=Committing(term), refused_by=None), (WriteNoop(term),)


def _on_lost(state: Promotion, event: Lost, policy: Policy) -> Step:
    phase = state.phase
    if event.term != _term(phase):
        return state, ()
    if isinstance(phase, Primary) and event.kind is LossKind.QUORUM and not policy.steps_down:
        return replace(state, phase=Stranded(phase.term, phase.noop_index)), ()
    return _to_standby(state, event.reason)


def _on_another_leads(state: Promotion, event: AnotherLeads) -> Step:
    # While we lead by the engine's word, a sight of somebody else is an old one: only the stranded believe it.
    if isinstance(state.phase, Stranded) and event.term > state.phase.term:
        return _to_standby(state, "another controller leads")
    return state, ()


def _to_standby(state: Promotion, reason: str) -> Step:
    after = replace(state, phase=Standby())
    return after, (ServeAsStandby(_term(state.phase), reason),) if state.role is Role.PRIMARY else ()


def _on_gate_turned(state: Promotion, event: GateTurned, now: Now, policy: Policy) -> Step:
    closed = tuple(gate for gate in state.closed if gate.gate is not event.gate)
    if event.closed:
        closed = (*closed, ClosedGate(event.gate, event.detail))
    still = next((gate for gate in closed if state.refused_by is not None and gate.gate is state.refused_by.gate), None)
    state = replace(state, closed=closed, refused_by=still)
    if isinstance(state.phase, Gated) and not state.phase.resigning:
        if not closed:
            return _past_gates(state, state.phase.term, now, policy)
        state = replace(state, refused_by=closed[0])
    return state, ()


def _on_noop_written(state: Promotion, event: NoopWritten) -> Step:
    if not isinstance(state.phase, Committing) or state.phase.term != event.term:
        return state, ()
    return replace(state, phase=Applying(event.term, event.index)), (ApplyUpTo(event.term, event.index),)


def _on_noop_unknown(state: Promotion, event: NoopUnknown, now: Now, policy: Policy) -> Step:
    if not isinstance(state.phase, Committing) or state.phase.term != event.term:
        return state, ()
    return replace(state, phase=Committing(event.term, now.after(policy.noop_retry_ns))), ()


def _on_facts_applied(state: Promotion, event: FactsApplied, now: Now, policy: Policy) -> Step:
    phase = state.phase
    if not isinstance(phase, Applying) or phase.term != event.term or event.index < phase.index:
        return state, ()
    if state.closed:  # one was closed meanwhile, perhaps by what was just applied
        return _past_gates(state, phase.term, now, policy)
    return replace(state, phase=Primary(phase.term, phase.index)), (ServeAsPrimary(phase.term, phase.index),)


def _on_ticked(state: Promotion, now: Now, policy: Policy) -> Step:
    match state.phase:
        case Gated(term=term, patience_until=until, resigning=False) as gated if until.waited_out(now):
            return replace(state, phase=replace(gated, resigning=True)), (Resign(term, policy.refusal_hold_ms),)
        case Committing(term=term, retry_at=retry_at) if retry_at is not None and retry_at.waited_out(now):
            return replace(state, phase=Committing(term)), (WriteNoop(term),)
        case _:
            return state, ()
