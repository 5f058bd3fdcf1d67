"""Drives core.promotion: the engine's events in, its effects carried out.

The listener and everything that it leads to run within one turn of the loop, so that no request is answered between a deposal and
its consequences. After a pause of the whole process a request may be handled before the engine has told that its lease ran out;
therefore whoever asks for the role first asks the engine (`Engine.leads`), and the demotion begins right there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, assert_never

import structlog

from xce_supervisor.core import promotion as p
from xce_supervisor.core.facts import Noop
from xce_supervisor.core.words import NS_PER_S, Now, Role
from xce_supervisor.store.clocks import read_now
from xce_supervisor.store.engine import (
    Conflict,
    Deposed,
    Elected,
    Engine,
    Fenced,
    Leader,
    LeaderSeen,
    Loss,
    StoreEvent,
    Unavailable,
)
from xce_supervisor.testbed.controller_facts import to_stored
from xce_supervisor.testbed.controller_ledger import Ledger

log = structlog.get_logger("controller")

TAIL_S = 0.5
RETRY_S = 0.05
# A confirmation this young is as good as a new one.
CONFIRM_FRESH_S = 0.1
CONFIRM_WAIT_S = 0.2
_LOSS = {
    Loss.RAN_OUT: p.LossKind.QUORUM,
    Loss.STORE_LOST: p.LossKind.QUORUM,
    Loss.SUPERSEDED: p.LossKind.TAKEN,
    Loss.RESIGNED: p.LossKind.GIVEN,
    Loss.CLOSED: p.LossKind.GIVEN,
}


class Serving(Protocol):
    """What the rest of the controller does about a change of role; called on the loop, must not wait."""

    def promoted(self, term: int) -> None:
        """Promotion is complete."""

    def demoted(self, term: int, reason: str) -> None:
        """No longer primary of `term`."""

    def role_changed(self) -> None:
        """Role, term, gate or the known primary changed: who waits for that is to be answered."""


class RoleDriver:
    """One controller's role. `start` after everything else is ready to serve. on_bug: told of an exception that is nobody's."""

    def __init__(
        self, engine: Engine, ledger: Ledger, policy: p.Policy, serving: Serving, on_bug: Callable[[BaseException], None]
    ) -> None:
        self._engine, self._ledger, self._policy, self._serving = engine, ledger, policy, serving
        self._on_bug = on_bug
        self.state = p.Promotion()
        self.leader: Leader | None = None
        self.term = 0
        self._confirmed_ns: int | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to follow the log while standing by."""
        self._spawn(self._tail())

    async def close(self) -> None:
        """Stop all that runs on behalf of the role."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ what others ask

    def role(self) -> Role:
        """The role at this instant. A lease that ran out while nobody looked ends it here."""
        phase = self.state.phase
        if isinstance(phase, p.Primary) and self._policy.steps_down and not self._engine.leads(phase.term):
            self.on_event(p.Lost(phase.term, p.LossKind.QUORUM, Loss.RAN_OUT))
        return self.state.role

    def turn_gate(self, gate: p.Gate, closed: bool, detail: str) -> None:
        """Close or open a gate."""
        self.on_event(p.GateTurned(gate, closed, detail))

    async def confirm(self) -> None:
        """Ask the quorum unless its last word is young, and wait for it a little; `quorum_age_ms` says what came of it."""
        phase = self.state.phase
        if isinstance(phase, p.Primary | p.Stranded) and self._age_s() > CONFIRM_FRESH_S:
            if self._confirming is None or self._confirming.done():
                self._confirming = self._spawn(self._confirm(phase.term))
            await asyncio.wait({self._confirming}, timeout=CONFIRM_WAIT_S)

    def quorum_age_ms(self) -> int | None:
        """The age of the newest confirmation, counted from before it was asked for; None where we are not primary."""
        if self.state.role is not Role.PRIMARY or self._confirmed_ns is None:
            return None
        return int(self._age_s() * 1000)

    def _age_s(self) -> float:
        if self._confirmed_ns is None:
            return float("inf")
        return (time.monotonic_ns() - self._confirmed_ns) / NS_PER_S

    async def _confirm(self, term: int) -> None:
        try:
            confirmed_ns = await self._engine.confirm(term)
        except (Fenced, Unavailable) as error:
            log.info("quorum.not_confirmed", term=term, reason=str(error))
            return
        if self.term == term:
            self._confirmed_ns = confirmed_ns

    # ------------------------------------------------------------ events

    def on_store_event(self, event: StoreEvent) -> None:
        """The engine's listener."""
        match event:
            case Elected(term=term):
                log.info("leader.elected", term=term)
                self.term, self.leader, self._confirmed_ns = term, None, None
                self.on_event(p.Won(term))
            case Deposed(term=term, reason=reason, detail=detail):
                log.warning("leader.deposed", term=term, reason=str(reason), detail=detail)
                self.on_event(p.Lost(term, _LOSS[reason], reason))
            case LeaderSeen(leader=leader):
                self._see(leader)
            case _:
                assert_never(event)

    def _see(self, leader: Leader | None) -> None:
        self.leader = leader
        log.info("leader.seen", leader=leader.controller_id if leader else "", term=leader.term if leader else self.term)
        if leader is not None:
            self.on_event(p.AnotherLeads(leader.term))
            self.term = max(self.term, leader.term)
        self._serving.role_changed()

    def on_event(self, event: p.Event) -> None:
        """One step, and its effects, begun in order."""
        before = self.state
        self.state, effects = p.step(self.state, event, read_now(), self._policy)
        for effect in effects:
            self._act(effect)
        self._arm()
        if (before.role, before.refused_by) != (self.state.role, self.state.refused_by) or isinstance(event, p.Won | p.Lost):
            self._serving.role_changed()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = p.next_deadline(self.state)
        if deadline is None:
            self._timer = None
            return
        delay_s = deadline.remaining_ns(read_now()) / NS_PER_S
        # A wait is over when the slower clock says so: a millisecond more spares a second wake-up.
        self._timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self.on_event, p.Ticked())

    def _act(self, effect: p.Effect) -> None:
        match effect:
            case p.WriteNoop(term=term):
                self._spawn(self._write_noop(term))
            case p.ApplyUpTo(term=term, index=index):
                self._spawn(self._apply_up_to(term, index))
            case p.ServeAsPrimary(term=term, noop_index=index):
                log.info("role.promoted", term=term, noop_index=index, jobs=len(self._ledger.table))
                self._ledger.open(term)
                self._serving.promoted(term)
            case p.ServeAsStandby(term=term, reason=reason):
                log.warning("role.demoted", term=term, reason=reason)
                self._ledger.close()
                self._serving.demoted(term, reason)
            case p.Resign(term=term, hold_ms=hold_ms):
                self._spawn(self._engine.resign(term, hold_ms))
            case p.TellRefused(term=term, gate=gate):
                log.warning("promotion.refused", term=term, gate=str(gate.gate), detail=gate.detail)
            case _:
                assert_never(effect)

    # ------------------------------------------------------------ effects that take time

    async def _write_noop(self, term: int) -> None:
        asked_at: Now = read_now()
        try:
            index = await self._engine.append(term, [to_stored(Noop(term))])
        except (Fenced, Unavailable, Conflict) as error:
            log.warning("noop.not_written", term=term, reason=str(error))
            self.on_event(p.NoopUnknown(term))
            return
        # The append was itself a round of the quorum.
        self._confirmed_ns = asked_at.mono_ns
        self.on_event(p.NoopWritten(term, index))

    async def _apply_up_to(self, term: int, index: int) -> None:
        while isinstance(self.state.phase, p.Applying) and self.state.phase.term == term:
            try:
                applied = await self._ledger.catch_up()
            except Unavailable as error:
                log.warning("facts.not_read", term=term, reason=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._check_divergence()
            if applied >= index:
                self.on_event(p.FactsApplied(term, applied))
                return

    async def _tail(self) -> None:
        """Follow the log while standing by, so that a promotion has little left to read."""
        while True:
            if isinstance(self.state.phase, p.Standby):
                try:
                    await self._ledger.catch_up()
                except Unavailable as error:
                    log.debug("facts.not_read", term=self.term, reason=str(error))
                self._check_divergence()
            await asyncio.sleep(TAIL_S)

    def _check_divergence(self) -> None:
        divergence = self._ledger.table.divergence
        if divergence and all(gate.gate is not p.Gate.APPLY_DIVERGENT for gate in self.state.closed):
            log.error("facts.diverged", reason=divergence, index=self._ledger.applied)
            self.turn_gate(p.Gate.APPLY_DIVERGENT, True, divergence)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A bug: the promotion would stand still for good. The process ends; the service manager starts a clean one.
            self._on_bug(error)
