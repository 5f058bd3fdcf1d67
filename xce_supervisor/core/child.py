"""One child's life: start, run, stop, back off (docs/rules.md S1, S2, S5, S6, S9 to S14, S24).

States, one type each:

    Resting     nothing runs and nothing is planned, or a gate is closed
    Waiting     a retry is due at a deadline: after a crash, a wedge or a fault that passes by itself
    Blocked     it cannot be started until something on disk changes (S13)
    Starting    the spawn is in a lane
    Running     the leader lives
    Stopping    on the way down: evidence, exit push, SIGTERM and SIGCONT, SIGKILL to the tree
    Unkillable  SIGKILL was sent long ago and the tree is still there (S14)

What is wanted is kept as a level, in `Child.want`; `_reconcile` compares it with the state after every event. So a wish that
arrives while something is in flight is never lost: it is acted on when the flight ends. A successor is spawned only from
Resting, Waiting or Blocked, and those are entered only when the predecessor's whole tree is gone: that is S5.

Every spawn has a generation; an event of an older generation is dropped at the head of `step`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from xce_supervisor.core import child_stop, stall
from xce_supervisor.core.backoff import short_delay_ns
from xce_supervisor.core.child_words import (
    Adopted,
    Blocked,
    CancelSpawn,
    Child,
    ChildEffect,
    ChildEvent,
    EvidenceKept,
    GapSeen,
    KillTree,
    LeaderExited,
    Life,
    PauseChanged,
    Probe,
    Probed,
    ProgramChanged,
    Readied,
    Record,
    RestartAsked,
    Resting,
    RoleConfirmed,
    Run,
    Rung,
    Running,
    SessionSeen,
    Spawn,
    SpawnCancelled,
    Spawned,
    SpawnFailed,
    Starting,
    Step,
    Stopping,
    StopReason,
    Ticked,
    TreeEmptied,
    UnitPolicy,
    Unkillable,
    Unwanted,
    Waiting,
    Want,
    WantChanged,
    WatchProgram,
    live_run,
)
from xce_supervisor.core.words import Deadline, Gap, Now


def step(child: Child, event: ChildEvent, now: Now, policy: UnitPolicy) -> Step:
    """Return the child after the event, and what to do, in order."""
    generation = getattr(event, "generation", None)
    if generation is not None and not isinstance(event, Adopted):
        run = live_run(child.life)
        if run is None or run.generation != generation:
            return child, ()
    child, effects = _handle(child, event, now, policy)
    child, timed = _on_time(child, now, policy)
    child, more = _reconcile(child, now, policy)
    return child, (*effects, *timed, *more)


def _handle(child: Child, event: ChildEvent, now: Now, policy: UnitPolicy) -> Step:
    match event:
        case WantChanged(want):
            return replace(child, want=want), ()
        case RoleConfirmed(asked_at):
            life = child.life
            if isinstance(life, Waiting) and life.confirm_after is not None and asked_at.mono_ns > life.confirm_after.mono_ns:
                return replace(child, life=replace(life, confirm_after=None)), ()
            return child, ()
        case Spawned():
            return _on_spawned(child, event, now, policy)
        case SpawnFailed():
            return _on_spawn_failed(child, event, now, policy)
        case SpawnCancelled(reason=reason):
            # A binding that went stale in the lane is followed by news of the role; until it comes, do not spin.
            return replace(child, life=Waiting(now.after(policy.stale_wait_ns), reason, now)), (
                Record("child.start_cancelled", reason),
            )
        case LeaderExited():
            return child_stop.on_exit(child, event, now, policy)
        case TreeEmptied(draw=draw):
            return child_stop.on_tree_empty(child, draw, now, policy)
        case SessionSeen():
            return _on_session(child, event, now, policy)
        case Readied():
            if isinstance(child.life, Running) and child.life.ready_at is None:
                return replace(child, life=replace(child.life, ready_at=now)), (Record("child.readied", ""),)
            return child, ()
        case Probed(state=state, cpu_ns=cpu_ns):
            if isinstance(child.life, Running):
                return replace(child, life=replace(child.life, probes=(*child.life.probes[-1:], (now, state, cpu_ns)))), ()
            return child, ()
        case EvidenceKept(path=path):
            if isinstance(child.life, Stopping) and child.life.rung is Rung.EVIDENCE:
                noted = Record("evidence.kept", path)
                child, effects = child_stop.descend(child, child.life, now, policy)
                return child, (noted, *effects)
            return child, (Record("evidence.kept", path),)
        case Adopted():
            return _on_adopted(child, event, now, policy)
        case ProgramChanged():
            if isinstance(child.life, Blocked):
                return replace(child, life=Resting(now)), (Record("child.program_changed", child.life.fault.path),)
            return child, ()
        case RestartAsked(by=by):
            return _on_restart_asked(child, by, now, policy)
        case PauseChanged(pause):
            kind = "child.resumed" if pause is None else "child.paused"
            text = "" if pause is None else f"by {pause.by}: {pause.why}"
            return replace(child, pause=pause), (Record(kind, text),)
        case GapSeen(gap=gap):
            return replace(child, life=_credited(child.life, gap)), ()
        case Ticked():
            return child, ()
        case _:
            assert_never(event)


# ------------------------------------------------------------------ starting


def _start(child: Child, now: Now) -> Step:
    assert isinstance(child.want, Want), "only a wanted child is started"
    run = Run(child.generation + 1, child.want.binding, "")
    child = replace(child, life=Starting(run, now, withdrawn=False), generation=run.generation, restart_due=False)
    return child, (Spawn(run.generation, run.binding, child.failures + 1),)


def _on_spawned(child: Child, event: Spawned, now: Now, policy: UnitPolicy) -> Step:
    life = child.life
    if not isinstance(life, Starting):
        return child, ()
    run = replace(life.run, token=event.token)
    ready_at = None if policy.session_readiness or policy.notify_readiness else now
    running = Running(run, event.identity, now, ready_at, stall.begin(now, policy.stall))
    child = replace(child, life=running, spawn_faults=0)
    return child, (
        Record("child.spawned", "", (("pid", event.identity.pid), ("took_us", (now.mono_ns - life.asked_at.mono_ns) // 1000))),
    )


def _on_spawn_failed(child: Child, event: SpawnFailed, now: Now, policy: UnitPolicy) -> Step:
    fault = event.fault
    faults = child.spawn_faults + 1
    record = Record("child.spawn_failed", fault.text, (("path", fault.path), ("errno", fault.errno)))
    if fault.permanent:
        retry = now.after(policy.spawn_retry_slow_ns)
        child = replace(child, life=Blocked(fault, retry, now), spawn_faults=faults)
        return child, (record, WatchProgram(fault.path))
    wait = short_delay_ns(faults, policy.spawn_retry_ns, policy.spawn_retry_ns_max, event.draw)
    child = replace(child, life=Waiting(now.after(wait), fault.text, now), spawn_faults=faults)
    return child, (record,)


def _on_adopted(child: Child, event: Adopted, now: Now, policy: UnitPolicy) -> Step:
    run = Run(event.generation, event.binding, event.token)
    life = Running(run, event.identity, now, None, stall.begin(now, policy.stall), adopted=True)
    child = replace(child, life=life, generation=max(child.generation, event.generation))
    return child, (Record("child.adopted", "", (("pid", event.identity.pid),)),)


# ------------------------------------------------------------------ running


def _on_session(child: Child, event: SessionSeen, now: Now, policy: UnitPolicy) -> Step:
    life = child.life
    if not isinstance(life, Running) or life.run.binding != event.binding or not policy.session_readiness:
        return child, ()
    watch, verdict = stall.judge(life.watch, event.session, life.run.token, event.loop_gap_ns, now, policy.stall)
    effects: tuple[ChildEffect, ...] = ()
    if watch.joined and not life.watch.joined:
        took_ms = (now.mono_ns - life.since.mono_ns) // 1_000_000
        effects = (Record("child.joined", "", (("after_ms", took_ms),)),)
    elif life.watch.joined and not watch.joined:
        effects = (Record("child.session_lost", ""),)
    if watch.suspect is not None and watch.suspect != life.watch.suspect:
        effects = (*effects, Record("child.stall_suspected", "", (("stall_ms", watch.stall_ns // 1_000_000),)))
    near = watch.join_by is not None and watch.join_by.remaining_ns(now) <= policy.stall.stall_confirm_ns
    if watch.suspect is not None or near:
        effects = (*effects, Probe(life.run.generation))
    life = replace(life, watch=watch, ready_at=life.ready_at or (now if watch.joined else None))
    child = replace(child, life=life)
    if verdict is None:
        return child, effects
    if child.pause is not None:  # S24: a paused unit is not killed for a wedge; it is shown
        return child, effects
    verdict_class = wedge_class(life, now, verdict.kind)
    record = Record("child.wedged", verdict_class, (("stall_ms", verdict.stall_ns // 1_000_000),))
    child, more = child_stop.begin(child, life, StopReason.WEDGED, f"wedged: {verdict_class}", now, policy)
    return child, (*effects, record, *more)


def wedge_class(life: Running, now: Now, kind: str) -> str:
    """Name the class of a wedge (S9) from the probes of its process."""
    if not life.probes:
        return kind
    last_at, state, cpu_ns = life.probes[-1]
    if state in {"T", "t"}:
        return "stopped (T)"
    if state == "D":
        return "uninterruptible (D)"
    if kind == "not joined":
        return kind
    if len(life.probes) == 2:
        first_at, _, first_cpu_ns = life.probes[0]
        wall_ns = max(1, last_at.mono_ns - first_at.mono_ns)
        share = (cpu_ns - first_cpu_ns) / wall_ns
        if state == "R" and share < 0.1:
            return "starved"
        if share > 0.5:
            return "busy without progress"
    return "no progress"


def _on_restart_asked(child: Child, by: str, now: Now, policy: UnitPolicy) -> Step:
    child = replace(child, failures=0, spawn_faults=0)
    record = Record("child.restart_asked", f"by {by}")
    match child.life:
        case Running() | Starting():
            return replace(child, restart_due=True), (record,)  # begun by _reconcile as soon as nothing stands against it
        case Waiting() | Blocked():
            return replace(child, life=Resting(now)), (record,)
        case Resting() | Stopping() | Unkillable():
            return child, (record,)
        case _:
            assert_never(child.life)


# ------------------------------------------------------------------ time and level


def _on_time(child: Child, now: Now, policy: UnitPolicy) -> Step:
    life = child.life
    if isinstance(life, Stopping) and life.deadline.waited_out(now):
        return child_stop.descend(child, life, now, policy)
    if isinstance(life, Unkillable) and life.retry.waited_out(now):  # the first SIGKILL may have been lost on its way
        retry = now.after(policy.kill_limit_ns)
        return replace(child, life=replace(life, retry=retry)), (KillTree(life.run.generation),)
    if (
        isinstance(life, Running)
        and child.failures
        and life.ready_at is not None
        and now.waited(life.ready_at) >= policy.healthy_ns
    ):
        return replace(child, failures=0), ()
    return child, ()


def _reconcile(child: Child, now: Now, policy: UnitPolicy) -> Step:
    """Compare what is wanted with what is; begin at most one thing."""
    want, life = child.want, child.life
    match life:
        case Running():
            if isinstance(want, Unwanted):
                return child_stop.begin(child, life, want.reason, want.text, now, policy)
            if want.binding != life.run.binding:
                return child_stop.begin(child, life, StopReason.REBOUND, "binding changed (missed demotion)", now, policy)
            if child.restart_due and child.pause is None:  # S24: a pause is no time to stop what could not be started again
                child = replace(child, restart_due=False)
                return child_stop.begin(child, life, StopReason.RESTART, "restart asked", now, policy)
        case Starting():
            unwanted = isinstance(want, Unwanted) or want.binding != life.run.binding
            if unwanted and not life.withdrawn:
                return replace(child, life=replace(life, withdrawn=True)), (CancelSpawn(life.run.generation),)
        case Waiting() | Blocked() if isinstance(want, Unwanted):
            return replace(_absolved(child, life, want), life=Resting(now)), ()
        case Resting():
            if may_start(child, now):
                return _start(child, now)
        case Waiting():
            if life.confirm_after is None and life.until.waited_out(now) and may_start(child, now):
                return _start(child, now)
        case Blocked():
            if life.retry.waited_out(now) and may_start(child, now):
                return _start(child, now)
        case Stopping() | Unkillable():
            pass
        case _:
            assert_never(life)
    return child, ()


def _absolved(child: Child, life: Life, want: Unwanted) -> Child:
    """An end with a code that a demotion explains was obedience (S4), no crash: it does not count."""
    if isinstance(life, Waiting) and life.confirm_after is not None and want.reason is StopReason.DEMOTED:
        return replace(child, failures=max(0, child.failures - 1), restarts=max(0, child.restarts - 1))
    return child


def startable(child: Child) -> bool:
    """Is a child wanted, and are the gates open that time alone does not open: pause and a fresh role?"""
    return isinstance(child.want, Want) and child.want.startable and child.pause is None


def may_start(child: Child, now: Now) -> bool:
    """Startable, and the hold-down (S8) is over."""
    want = child.want
    return isinstance(want, Want) and startable(child) and (want.not_before is None or want.not_before.waited_out(now))


def _credited(life: Life, gap: Gap) -> Life:
    """Deadlines that judge a child move out by our own absence (S10)."""
    match life:
        case Running():
            return replace(life, watch=stall.credited(life.watch, gap), probes=())
        case Stopping():
            return replace(life, deadline=life.deadline.credited(gap))
        case Resting() | Waiting() | Blocked() | Starting() | Unkillable():
            return life
        case _:
            assert_never(life)


def next_deadline(child: Child, policy: UnitPolicy) -> Deadline | None:
    """Return when to come back with Ticked, None for never."""
    life = child.life
    hold = child.want.not_before if isinstance(child.want, Want) and startable(child) else None
    match life:
        case Stopping(deadline=deadline):
            return deadline
        case Waiting(until=until):
            return later_of(until, hold) if startable(child) and life.confirm_after is None else None
        case Blocked(retry=retry):
            return later_of(retry, hold) if startable(child) else None
        case Resting():
            return hold
        case Running(ready_at=ready_at):
            return ready_at.after(policy.healthy_ns) if child.failures and ready_at is not None else None
        case Unkillable(retry=retry):
            return retry
        case Starting():
            return None
        case _:
            assert_never(life)


def later_of(one: Deadline, other: Deadline | None) -> Deadline:
    """Return the later of two waits."""
    return one if other is None or one.mono_ns >= other.mono_ns else other
