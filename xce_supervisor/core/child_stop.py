"""How a child goes down, and what follows its end (docs/rules.md S5, S6, S12, S14).

The ladder has four rungs, each with a deadline: evidence (wedges only), exit push (demotion only: the controller tells its
scheduler to end), SIGTERM followed at once by SIGCONT so that a stopped process can obey, SIGKILL to the whole tree. There is
one sequence a child: a second wish to stop joins it. The ladder ends when the *tree* is empty, not when the leader has
exited; a tree that outlives SIGKILL is Unkillable, and no successor is started beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from xce_supervisor.core.backoff import delay_ns
from xce_supervisor.core.child_words import (
    ALWAYS,
    Blocked,
    Child,
    ChildEffect,
    CollectEvidence,
    Exit,
    ForgetTree,
    KillTree,
    LeaderExited,
    PollRole,
    Record,
    Resting,
    Rung,
    Running,
    SignalLeader,
    Starting,
    Step,
    Stopping,
    StopReason,
    UnitPolicy,
    Unkillable,
    Waiting,
)
from xce_supervisor.core.words import Now

_OWN_FAULT = frozenset({StopReason.CRASHED, StopReason.WEDGED})


def begin(child: Child, life: Running, reason: StopReason, text: str, now: Now, policy: UnitPolicy) -> Step:
    rungs: list[Rung] = []
    if reason is StopReason.WEDGED:
        rungs.append(Rung.EVIDENCE)
    elif reason is StopReason.DEMOTED and policy.exit_push_ns > 0:
        rungs.append(Rung.EXIT_PUSH)
    first = rungs[0] if rungs else Rung.TERM
    stopping = Stopping(life.run, life.identity, first, now, now.after(0), reason, text, life.since, life.ready_at, life.adopted)
    child, effects = _enter(child, stopping, first, now, policy)
    return child, (Record("child.stopping", text), *effects)


def _enter(child: Child, life: Stopping, rung: Rung, now: Now, policy: UnitPolicy) -> Step:
    """Stand on `rung` from now on; begin what it does."""
    generation = life.run.generation
    effects: tuple[ChildEffect, ...]
    match rung:
        case Rung.EVIDENCE:
            wait, effects = policy.evidence_ns, (CollectEvidence(generation, life.text),)
        case Rung.EXIT_PUSH:
            wait, effects = policy.exit_push_ns, ()
        case Rung.TERM:
            wait = policy.wedge_grace_ns if life.reason is StopReason.WEDGED else policy.grace_ns
            effects = (SignalLeader(generation, "TERM"), SignalLeader(generation, "CONT"))
        case Rung.KILL:
            wait, effects = policy.kill_limit_ns, (KillTree(generation),)
        case _:
            assert_never(rung)
    return replace(child, life=replace(life, rung=rung, rung_at=now, deadline=now.after(wait))), effects


def descend(child: Child, life: Stopping, now: Now, policy: UnitPolicy) -> Step:
    """The rung's time is over: take the next one."""
    match life.rung:
        case Rung.EVIDENCE | Rung.EXIT_PUSH:
            return _enter(child, life, Rung.TERM, now, policy)
        case Rung.TERM:
            child, effects = _enter(child, life, Rung.KILL, now, policy)
            return child, (Record("child.killed", "grace is over"), *effects)
        case Rung.KILL:
            after = Unkillable(
                life.run,
                life.identity,
                now,
                life.reason,
                life.text,
                life.exit,
                now.after(policy.kill_limit_ns),
                life.started_at,
                life.ready_at,
            )
            return replace(child, life=after), (Record("child.unkillable", "still there after SIGKILL; no successor is started"),)
        case _:
            assert_never(life.rung)


def on_exit(child: Child, event: LeaderExited, now: Now, policy: UnitPolicy) -> Step:
    text = child.life.text if isinstance(child.life, Stopping | Unkillable) else "exited by itself"
    child = replace(child, last_exit=Exit(event.code, event.signal, now, text))
    record = Record("child.exited", "", (("exit_code", event.code), ("signal", event.signal)))
    life = child.life
    match life:
        case Running():
            stopping = Stopping(
                life.run, life.identity, Rung.KILL, now, now.after(policy.kill_limit_ns), StopReason.CRASHED, text,
                life.since, life.ready_at, life.adopted, exit=child.last_exit,
            )  # fmt: skip
            child = replace(child, life=stopping)
            if not event.tree_empty:  # S5: what is left of the tree goes before a successor comes
                return child, (record, Record("child.leftovers_killed", ""), KillTree(life.run.generation))
        case Stopping() | Unkillable():
            child = replace(child, life=replace(life, exit=child.last_exit))
            if not event.tree_empty:
                return child, (record,)
        case Resting() | Waiting() | Blocked() | Starting():
            return child, (record,)
        case _:
            assert_never(life)
    child, effects = _ended(child, event.draw, now, policy)
    return child, (record, *effects)


def on_tree_empty(child: Child, draw: float, now: Now, policy: UnitPolicy) -> Step:
    life = child.life
    if isinstance(life, Stopping | Unkillable) and life.exit is not None:
        return _ended(child, draw, now, policy)
    return child, ()


def _ended(child: Child, draw: float, now: Now, policy: UnitPolicy) -> Step:
    """The whole tree is gone: rest, or wait for the next attempt (S12)."""
    life = child.life
    assert isinstance(life, Stopping | Unkillable), "only a child on its way down ends"
    forget = ForgetTree(life.run.generation)
    if life.reason not in _OWN_FAULT:
        return replace(child, life=Resting(now)), (Record("child.stopped", life.text), forget)
    healthy = life.ready_at is not None and now.waited(life.ready_at) >= policy.healthy_ns
    failures = 1 if healthy else child.failures + 1
    wait = delay_ns(failures, policy.backoff, draw)
    # A child that ended with a code of its own may have been told something by its controller that we have not heard yet
    # (S4): one answer asked for after its end must confirm the binding first. A signal's death says nothing of the kind.
    told = life.exit is not None and life.exit.code is not None and life.run.binding != ALWAYS
    confirm_after = now if told and life.reason is StopReason.CRASHED else None
    child = replace(
        child, failures=failures, restarts=child.restarts + 1, life=Waiting(now.after(wait), life.text, now, confirm_after)
    )
    poll: tuple[ChildEffect, ...] = (PollRole(),) if confirm_after is not None else ()
    return child, (forget, *poll)
