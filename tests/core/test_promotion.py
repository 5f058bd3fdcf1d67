"""The promotion: each phase answers each event; and what must hold over any script of events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from xce_supervisor.core.promotion import (
    AnotherLeads,
    Applying,
    ApplyUpTo,
    ClosedGate,
    Committing,
    Effect,
    Event,
    FactsApplied,
    Gate,
    Gated,
    GateTurned,
    LossKind,
    Lost,
    NoopUnknown,
    NoopWritten,
    Policy,
    Primary,
    Promotion,
    Resign,
    ServeAsPrimary,
    ServeAsStandby,
    Standby,
    Stranded,
    TellRefused,
    Ticked,
    Won,
    WriteNoop,
    next_deadline,
    step,
)
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Now, Role

NOW = Now(10 * NS_PER_S, 20 * NS_PER_S)
POLICY = Policy()
STAYS = Policy(steps_down=False)
GATE = ClosedGate(Gate.APPLY_DIVERGENT, "why")


def later(seconds: float, now: Now = NOW) -> Now:
    return Now(now.mono_ns + int(seconds * NS_PER_S), now.boot_ns + int(seconds * NS_PER_S))


def play(
    *events: Event, state: Promotion | None = None, policy: Policy = POLICY, now: Now = NOW
) -> tuple[Promotion, list[Effect]]:
    """The state after the events, and all effects."""
    state, effects = state or Promotion(), list[Effect]()
    for event in events:
        state, more = step(state, event, now, policy)
        effects += more
    return state, effects


def primary(policy: Policy = POLICY) -> Promotion:
    state, _ = play(Won(3), NoopWritten(3, 7), FactsApplied(3, 7), policy=policy)
    assert state.phase == Primary(3, 7)
    return state


def test_promotion_commits_a_noop_and_applies_up_to_it_before_the_role_is_told() -> None:
    """docs/rules.md L4: elected, NOOP, applied, primary; in every step before, the role is standby."""
    state, effects = play(Won(3))
    assert (state.phase, effects, state.role) == (Committing(3), [WriteNoop(3)], Role.STANDBY)
    state, effects = play(NoopWritten(3, 7), state=state)
    assert (state.phase, effects, state.role) == (Applying(3, 7), [ApplyUpTo(3, 7)], Role.STANDBY)
    assert play(FactsApplied(3, 6), state=state) == (state, []), "not applied far enough"
    state, effects = play(FactsApplied(3, 9), state=state)
    assert (state.phase, effects, state.role) == (Primary(3, 7), [ServeAsPrimary(3, 7)], Role.PRIMARY)


def test_a_closed_gate_refuses_and_after_its_patience_resigns() -> None:
    """docs/rules.md S1: the gate is told; the election is given to others when it does not open in time."""
    state, _ = play(GateTurned(GATE.gate, True, GATE.detail))
    state, effects = play(Won(3), state=state)
    assert effects == [TellRefused(3, GATE)] and isinstance(state.phase, Gated) and state.role is Role.STANDBY
    assert state.refused_by == GATE
    assert play(Ticked(), state=state, now=later(0.9)) == (state, []), "patience is not over"
    resigning, effects = play(Ticked(), state=state, now=later(1.0))
    assert effects == [Resign(3, POLICY.refusal_hold_ms)]
    assert next_deadline(resigning) is None and play(Ticked(), state=resigning, now=later(9)) == (resigning, [])
    assert play(GateTurned(GATE.gate, False), state=resigning)[1] == [], "it has resigned already"
    after, effects = play(Lost(3, LossKind.GIVEN, "resigned"), state=resigning)
    assert (after.phase, effects, after.refused_by) == (Standby(), [], GATE)
    opened, _ = play(GateTurned(GATE.gate, False), state=after)
    assert opened == Promotion(), "an open gate refuses nothing and is not shown"


def test_a_gate_that_opens_in_time_lets_the_promotion_go_on() -> None:
    """Only when all gates are open; another one that is still closed becomes the reason."""
    other = ClosedGate(Gate.CONFIG_SERVE_FENCED, "")
    state, _ = play(GateTurned(GATE.gate, True, GATE.detail), GateTurned(other.gate, True), Won(3))
    state, effects = play(GateTurned(GATE.gate, False), state=state)
    assert effects == [] and state.refused_by == other
    state, effects = play(GateTurned(other.gate, False), state=state)
    assert (state.phase, effects, state.refused_by) == (Committing(3), [WriteNoop(3)], None)


def test_a_gate_that_closes_during_the_promotion_still_refuses_it() -> None:
    """What is applied may itself close one: it is looked at again at the end."""
    state, _ = play(Won(3), NoopWritten(3, 7), GateTurned(GATE.gate, True, GATE.detail))
    assert isinstance(state.phase, Applying)
    state, effects = play(FactsApplied(3, 7), state=state)
    assert isinstance(state.phase, Gated) and effects == [TellRefused(3, GATE)]


def test_a_gate_that_closes_later_demotes_nobody() -> None:
    """Gates matter at promotions."""
    state, effects = play(GateTurned(GATE.gate, True), state=primary())
    assert (state.role, effects, state.refused_by) == (Role.PRIMARY, [], None)


def test_a_noop_of_unknown_outcome_is_written_again_after_a_while() -> None:
    """The append is idempotent, so asking again settles it."""
    state, effects = play(Won(3), NoopUnknown(3))
    assert effects == [WriteNoop(3)]
    deadline = next_deadline(state)
    assert deadline is not None and deadline.remaining_ns(NOW) == POLICY.noop_retry_ns
    assert play(Ticked(), state=state) == (state, [])
    state, effects = play(Ticked(), state=state, now=later(0.1))
    assert (state.phase, effects) == (Committing(3), [WriteNoop(3)])


def test_losing_leadership_ends_every_phase_and_only_a_primary_is_demoted() -> None:
    """Standby from wherever; the scheduler is told to go only where there can be one."""
    for before in (
        play(Won(3))[0],
        play(Won(3), NoopWritten(3, 7))[0],
        play(GateTurned(GATE.gate, True), Won(3))[0],
        primary(),
    ):
        state, effects = play(Lost(3, LossKind.QUORUM, "lease ran out"), state=before)
        assert state.phase == Standby()
        assert effects == ([ServeAsStandby(3, "lease ran out")] if before.role is Role.PRIMARY else [])


def test_events_of_another_term_change_nothing() -> None:
    """Fencing: answers to what an earlier term asked, and losses of what is lost already."""
    for state in (Promotion(), play(Won(3))[0], play(Won(3), NoopWritten(3, 7))[0], primary()):
        for event in (
            Lost(2, LossKind.TAKEN, "late"),
            NoopWritten(2, 99),
            NoopUnknown(2),
            FactsApplied(2, 99),
            Won(3) if not isinstance(state.phase, Standby) else NoopWritten(3, 7),
        ):
            assert play(event, state=state) == (state, [])


def test_a_later_election_ends_the_earlier_term_first() -> None:
    """docs/rules.md S2: a changed term while the role reads primary is a missed demotion, and is carried out."""
    state, effects = play(Won(4), state=primary())
    assert state.phase == Committing(4)
    assert effects == [ServeAsStandby(3, "elected anew in a later term"), WriteNoop(4)]


def test_the_mode_that_does_not_step_down_waits_for_somebody_else() -> None:
    """docs/rules.md S7: without its quorum it stays primary, until another leads in a later term or it is elected anew."""
    state, effects = play(Lost(3, LossKind.QUORUM, "lease ran out"), state=primary(STAYS), policy=STAYS)
    assert (state.phase, state.role, effects) == (Stranded(3, 7), Role.PRIMARY, [])
    assert play(AnotherLeads(3), state=state, policy=STAYS) == (state, [])
    after, effects = play(AnotherLeads(4), state=state, policy=STAYS)
    assert (after.phase, effects) == (Standby(), [ServeAsStandby(3, "another controller leads")])
    again, effects = play(Won(5), state=state, policy=STAYS)
    assert again.phase == Committing(5) and isinstance(effects[0], ServeAsStandby)
    for kind in (LossKind.TAKEN, LossKind.GIVEN):
        given_up, _ = play(Lost(3, kind, "x"), state=primary(STAYS), policy=STAYS)
        assert given_up.phase == Standby()


EVENTS = st.one_of(
    st.builds(Won, st.integers(1, 6)),
    st.builds(Lost, st.integers(1, 6), st.sampled_from(LossKind), st.just("x")),
    st.builds(AnotherLeads, st.integers(1, 6)),
    st.builds(GateTurned, st.sampled_from(Gate), st.booleans()),
    st.builds(NoopWritten, st.integers(1, 6), st.integers(1, 9)),
    st.builds(NoopUnknown, st.integers(1, 6)),
    st.builds(FactsApplied, st.integers(1, 6), st.integers(1, 9)),
    st.just(Ticked()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3000)), max_size=40), st.booleans())
def test_over_any_script_the_role_is_told_in_pairs_and_after_its_noop(script: list[tuple[Event, int]], steps_down: bool) -> None:
    """Primary is served once a term, with rising terms, after that term's NOOP; each is ended before the next begins."""
    state, now, policy = Promotion(), NOW, replace(POLICY, steps_down=steps_down)
    serving, noops, last = 0, dict[int, int](), 0
    for event, wait_ms in script:
        now = Now(now.mono_ns + wait_ms * NS_PER_MS, now.boot_ns + wait_ms * NS_PER_MS)
        if isinstance(event, NoopWritten):
            noops.setdefault(event.term, event.index)
        state, effects = step(state, event, now, policy)
        for effect in effects:
            if isinstance(effect, ServeAsPrimary):
                assert not serving and effect.term > last and effect.term in noops
                serving = last = effect.term
            if isinstance(effect, ServeAsStandby):
                assert serving == effect.term
                serving = 0
        assert (state.role is Role.PRIMARY) == bool(serving)
        deadline = next_deadline(state)
        assert deadline is None or step(state, Ticked(), later(60, now), policy)[0] != state, "a timer that leads nowhere"
