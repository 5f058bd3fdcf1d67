"""The controller's job table and the one way to change it: propose, commit, apply.

Proposals queue here and are taken in rounds. Each is decided against the table as it is then; what is admitted in one round is
appended in one go, on the condition that the log ends where the table does; then it is applied and answered. So every answer
rests on a committed fact, whoever is killed when. A round holds at most one proposal a job, because a second one must be
decided on what the first did.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from xce_supervisor.core.facts import JobFact
from xce_supervisor.core.jobs import Admitted, Job, JobTable, Refusal, Refused
from xce_supervisor.errors import RequestRefused
from xce_supervisor.store.engine import (
    APPEND_BYTES_MAX,
    FACT_BYTES_MAX,
    FACTS_PER_APPEND_MAX,
    Behind,
    Conflict,
    Engine,
    Fact,
    Fenced,
    Unavailable,
    tell_bug,
)
from xce_supervisor.testbed.controller_facts import from_stored, to_stored
from xce_supervisor.wire.words import ErrorCode

log = structlog.get_logger("controller")

QUEUED_MAX = 10_000
# Longer than any client waits; a proposal that is older is dropped undecided.
PROPOSAL_DEADLINE_S = 5.0
PAGE = 1000
RETRY_S = 0.05
_CODES = {
    Refusal.MALFORMED: ErrorCode.MALFORMED,
    Refusal.NOT_FOUND: ErrorCode.NOT_FOUND,
    Refusal.CONFLICT: ErrorCode.CONFLICT,
}

Decide = Callable[[JobTable], Admitted | Refused]


@dataclass(slots=True, eq=False)
class _Proposal:
    jobs: frozenset[str]
    decide: Decide
    outcome: asyncio.Future[int]
    facts: tuple[JobFact, ...] = ()


@dataclass(slots=True)
class _Round:
    proposals: list[_Proposal] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    bytes: int = 0

    def takes(self, facts: Sequence[Fact]) -> bool:
        size = sum(len(fact.body) for fact in facts)
        return len(self.facts) + len(facts) <= FACTS_PER_APPEND_MAX and self.bytes + size <= APPEND_BYTES_MAX

    def add(self, proposal: _Proposal, facts: Sequence[Fact]) -> None:
        self.proposals.append(proposal)
        self.facts += facts
        self.bytes += sum(len(fact.body) for fact in facts)


class Ledger:
    """changed: called with each job that a fact changed, after it was applied, also on standbys."""

    def __init__(self, engine: Engine, changed: Callable[[Job], None]) -> None:
        self._engine = engine
        self._changed = changed
        self.table = JobTable()
        self.applied = 0
        self._queue: deque[_Proposal] = deque()
        self._some = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()

    # ------------------------------------------------------------ reading

    async def catch_up(self) -> int:
        """Read and apply everything that is committed now; return the newest index. Raises Unavailable."""
        assert self._task is None or asyncio.current_task() is self._task, "while proposals are taken, rounds alone apply"
        async with self._reading:
            while True:
                stored = await self._engine.read(self.applied, PAGE)
                for each in stored:
                    self._apply_stored(each.index, from_stored(each))
                if len(stored) < PAGE:
                    return self.applied
                await asyncio.sleep(0)  # a long log must not keep the loop from its other peers

    def _apply_stored(self, index: int, fact: object) -> None:
        if index <= self.applied:
            return
        if fact is not None:
            self._apply(fact)  # type: ignore[arg-type]
        self.applied = index

    def _apply(self, fact: JobFact) -> None:
        job = self.table.apply(fact)
        if job is not None:
            self._changed(job)

    # ------------------------------------------------------------ writing

    def open(self, term: int) -> None:
        """Take proposals from now on, as primary of `term`; the table must be applied up to the own NOOP."""
        assert self._task is None and not self._reading.locked()
        self._task = asyncio.get_running_loop().create_task(self._commit_rounds(term), name="ledger")
        self._task.add_done_callback(tell_bug)

    def close(self) -> None:
        """Take no more proposals; what is queued is refused. What is being appended may be committed yet."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        while self._queue:
            _refuse(self._queue.popleft(), ErrorCode.UNAVAILABLE, "this controller is not primary any more; ask again")

    async def propose(self, jobs: frozenset[str], decide: Decide) -> int:
        """Have `decide` decided on the table, its facts committed and applied; return the commit index.

        jobs: the ids of all jobs that the decision looks at.

        Raises:
            RequestRefused: by `decide`; or UNAVAILABLE (no leadership, no quorum: the outcome is unknown), LIMIT.
        """
        if self._task is None:
            raise RequestRefused(ErrorCode.UNAVAILABLE, "this controller is not primary; ask again")
        if len(self._queue) >= QUEUED_MAX:
            raise RequestRefused(ErrorCode.LIMIT, f"{QUEUED_MAX} requests wait to be committed; ask again later")
        proposal = _Proposal(jobs, decide, asyncio.get_running_loop().create_future())
        self._queue.append(proposal)
        self._some.set()
        try:
            async with asyncio.timeout(PROPOSAL_DEADLINE_S):
                return await proposal.outcome
        except TimeoutError:
            text = f"the store did not commit within {PROPOSAL_DEADLINE_S:.0f} s; whether it will is unknown; ask the same again"
            raise RequestRefused(ErrorCode.UNAVAILABLE, text) from None

    async def _commit_rounds(self, term: int) -> None:
        round_ = _Round()
        try:
            while True:
                if not self._queue:
                    self._some.clear()
                    await self._some.wait()
                round_ = self._take_round()
                if not round_.facts:
                    continue
                try:
                    await self._commit(term, round_)
                except Fenced as error:
                    # The demotion follows; in the mode that does not step down this is what every write comes to.
                    log.warning("ledger.fenced", term=term, reason=str(error))
                    self._fail(round_, "this controller does not lead any more; ask again")
        except asyncio.CancelledError:
            # The demotion came first. What is in the round may be committed or not: the next primary knows.
            self._fail(round_, "this controller is not primary any more; whether it was committed is unknown; ask again")
            raise

    @staticmethod
    def _fail(round_: _Round, text: str) -> None:
        for proposal in round_.proposals:
            _refuse(proposal, ErrorCode.UNAVAILABLE, text)

    def _take_round(self) -> _Round:
        """Decide what the queue holds, as far as it goes in one append; the rest keeps its place."""
        round_, seen, left = _Round(), set[str](), deque[_Proposal]()
        while self._queue:
            proposal = self._queue.popleft()
            if proposal.outcome.done():
                continue
            if not seen.isdisjoint(proposal.jobs):
                left.append(proposal)
                seen |= proposal.jobs
                continue
            decided = proposal.decide(self.table)
            if isinstance(decided, Refused):
                _refuse(proposal, _CODES[decided.why], decided.text)
                continue
            facts = [to_stored(fact) for fact in decided.facts]
            if not facts:
                proposal.outcome.set_result(self.applied)
                continue
            if any(len(fact.body) > FACT_BYTES_MAX for fact in facts):
                text = f"it comes to a fact of more than {FACT_BYTES_MAX} bytes, which is the limit"
                _refuse(proposal, ErrorCode.MALFORMED, text)
                continue
            if not round_.takes(facts):
                left.append(proposal)
                break
            proposal.facts = decided.facts
            round_.add(proposal, facts)
            seen |= proposal.jobs
        self._queue.extendleft(reversed(left))
        return round_

    async def _commit(self, term: int, round_: _Round) -> None:
        """Append until the store has said yes or that we are fenced; then apply and answer."""
        before = self.applied
        while True:
            try:
                index = await self._engine.append(term, round_.facts, after=before)
            except Unavailable as error:
                # The outcome is unknown. The same append again is harmless and settles it.
                log.warning("ledger.append_unanswered", term=term, facts=len(round_.facts), reason=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except (Behind, Conflict) as error:
                log.error("ledger.out_of_step", term=term, applied=self.applied, reason=str(error))
                await self._decide_again(round_)
                return
            break
        if self.applied == before:
            for proposal in round_.proposals:
                for fact in proposal.facts:
                    self._apply(fact)
            self.applied = index
        for proposal in round_.proposals:
            if not proposal.outcome.done():
                proposal.outcome.set_result(index)

    async def _decide_again(self, round_: _Round) -> None:
        self._queue.extendleft(reversed(round_.proposals))
        round_.proposals = []
        try:
            await self.catch_up()
        except Unavailable as error:
            log.warning("ledger.read_failed", reason=str(error))
            await asyncio.sleep(RETRY_S)


def _refuse(proposal: _Proposal, code: ErrorCode, text: str) -> None:
    if not proposal.outcome.done():
        proposal.outcome.set_exception(RequestRefused(code, text))
