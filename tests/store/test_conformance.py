"""What both engines promise (store/engine.py), on real stores; real processes where one is killed or stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack

import pytest

from tests.store.stage import Contender, Member, Store
from xce_supervisor.store.engine import Behind, Conflict, Deposed, Fact, Fenced, Loss, Unavailable


def facts(*keys: str, body: bytes = b"{}") -> list[Fact]:
    return [Fact("test", key, body) for key in keys]


# ---------------------------------------------------------------- leadership


async def test_the_term_rises_with_every_election_also_of_the_same_candidate(store: Store) -> None:
    """The term is a durable counter: it rises when the same process wins again, and over a restart of everybody."""
    terms: list[int] = []
    for _ in range(2):
        async with Contender(store.url, "c1") as one:
            terms.append(await one.elected())
            await one.engine.resign(terms[-1])
            terms.append(await one.elected(above=terms[-1]))
    assert terms == [1, 2, 3, 4]


async def test_many_racers_never_lead_in_the_same_term(store: Store) -> None:
    """Six candidates, a vacancy as soon as there is a leader: every term has one winner, and terms rise in time."""
    elections: list[tuple[float, int]] = []
    async with AsyncExitStack() as stack:
        racers = [await stack.enter_async_context(Contender(store.url, f"c{number}")) for number in range(6)]

        async def resign_when_elected(racer: Contender) -> None:
            term = 0
            while len(elections) < 20:
                term = await racer.elected(above=term, limit_s=30)
                elections.append((time.monotonic(), term))
                await racer.engine.resign(term)

        running = [asyncio.create_task(resign_when_elected(racer)) for racer in racers]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        everybody = sorted(term for racer in racers for term in racer.terms())
    assert len(everybody) == len(set(everybody)), "a term had two winners"
    assert [term for _, term in elections] == sorted(term for _, term in elections)


async def test_a_leader_that_was_killed_never_takes_its_old_leadership_up_again(store: Store) -> None:
    """The same controller, back at once after kill -9, waits the old lease out and leads in a new term."""
    async with Member(store.url, "c1") as first:
        term = (await first.tells("elected"))["term"]
        first.end()
        killed_at = time.monotonic()
    async with Contender(store.url, "c1") as again:
        assert await again.elected(limit_s=store.lease_s + store.slack_s) == term + 1
        # It was renewed at most a quarter of the lease before it died.
        assert time.monotonic() - killed_at > store.lease_s / 2


async def test_kill_9_of_the_leader_leads_to_another_within_the_lease(store: Store) -> None:
    """Nobody has to say goodbye: the lease runs out."""
    async with Member(store.url, "c1") as leader:
        term = (await leader.tells("elected"))["term"]
        async with Contender(store.url, "c2") as other:
            await other.sees("c1")
            leader.end()
            assert await other.elected(limit_s=store.lease_s + store.slack_s) == term + 1


async def test_a_stopped_leader_is_fenced_when_it_goes_on(store: Store) -> None:
    """SIGSTOP, another leads and writes, SIGCONT: the old one is deposed, and nothing of it is written after that.

    If it was stopped inside a write transaction of sqlite, it is killed before the other can lead, and does not go on.
    """
    async with Member(store.url, "c1", "append") as old:
        term = (await old.tells("elected"))["term"]
        await old.tells("acked", 5)
        old.signal(signal.SIGSTOP)
        async with Contender(store.url, "c2") as new:
            later = await new.elected(limit_s=store.lease_s + store.slack_s)
            await new.engine.append(later, facts("of the new leader"))
            old.signal(signal.SIGCONT)
            ended = await old.tells_or_ends("refused")
            if ended is None:
                assert [line["term"] for line in old.told("deposed")] == [term] and term < later
            else:
                assert store.name == "sqlite" and ended == -signal.SIGKILL
            acked = {line["key"]: line["index"] for line in old.told("acked")}
            log = await new.engine.read(limit=100_000)
    by_key = {fact.key: fact for fact in log}
    assert all(by_key[key].index == index for key, index in acked.items()), "an acknowledged fact is missing"
    assert [fact.term for fact in log] == sorted(fact.term for fact in log), "an old leader wrote after a new one"


async def test_resigning_lets_another_lead_at_once_and_holds_back(store: Store) -> None:
    """A resignation is told, frees the leadership without waiting for the lease, and keeps its candidate out for a while."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        async with Contender(store.url, "c2") as two:
            await two.sees("c1")
            resigned_at = time.monotonic()
            await one.engine.resign(term, hold_ms=700)
            assert (await one.deposed(term)).reason is Loss.RESIGNED
            assert not one.engine.leads(term)
            later = await two.elected()
            assert time.monotonic() - resigned_at < store.lease_s * 0.9
            await two.engine.resign(later, hold_ms=5_000)
            await one.elected(above=later)
            assert time.monotonic() - resigned_at > 0.65


async def test_leadership_ends_by_the_own_clock_when_the_store_is_lost(store: Store) -> None:
    """No confirmation, no leadership: deposed within the lease, writes are refused, and it comes back with a later term."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        await one.engine.append(term, facts("before"))
        store.lose()
        lost_at = time.monotonic()
        deposed = await one.deposed(term, limit_s=store.lease_s + 0.5)
        assert deposed.reason in (Loss.RAN_OUT, Loss.STORE_LOST)
        assert time.monotonic() - lost_at < store.lease_s + 0.2
        assert not one.engine.leads(term)
        with pytest.raises((Fenced, Unavailable)):
            await one.engine.append(term, facts("after"))
        with pytest.raises((Fenced, Unavailable)):
            await one.engine.confirm(term)
        store.heal()
        later = await one.elected(above=term, limit_s=15)
        await one.engine.append(later, facts("again"))
        assert [fact.key for fact in await one.engine.read()] == ["before", "again"]


async def test_standbys_are_told_who_leads(store: Store) -> None:
    """A standby learns the leader's name, address and term, and that there is none any more."""
    async with Contender(store.url, "c1") as one, Contender(store.url, "c2") as two:
        leader, other = (one, two) if await _first_elected(one, two) else (two, one)
        await other.sees(leader.name)
        seen = other.events[-1][1].leader  # type: ignore[union-attr]
        assert seen is not None
        assert (seen.address, seen.term) == (f"{leader.name}:7301", leader.terms()[-1])


async def _first_elected(one: Contender, two: Contender) -> bool:
    async with asyncio.timeout(10):
        while not one.terms() and not two.terms():
            await asyncio.sleep(0.01)
    return bool(one.terms())


# ---------------------------------------------------------------- facts


async def test_facts_are_appended_and_read_in_order(store: Store) -> None:
    """Indexes rise, reads are in order, page, and see at once what another candidate's append was answered for."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        async with Contender(store.url, "c2") as two:
            assert await two.engine.read() == []
            indexes = [await one.engine.append(term, facts(*(f"{batch}/{n}" for n in range(7)))) for batch in range(5)]
            log = await two.engine.read()
            assert [fact.key for fact in log] == [f"{batch}/{n}" for batch in range(5) for n in range(7)]
            assert [fact.index for fact in log] == sorted({fact.index for fact in log})
            assert [log[7 * (batch + 1) - 1].index for batch in range(5)] == indexes
            paged, after = [], 0
            while page := await two.engine.read(after, limit=3):
                paged += page
                after = page[-1].index
            assert paged == log
            assert {fact.term for fact in log} == {term}


async def test_the_largest_append_is_one_transaction(store: Store) -> None:
    """A hundred facts go in together, and bodies come back as they were."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        many = [Fact("test", f"{number:03}", bytes([number]) * 9_000) for number in range(100)]
        await one.engine.append(term, many)
        assert [(fact.key, fact.body) for fact in await one.engine.read()] == [(fact.key, fact.body) for fact in many]


async def test_appending_the_same_again_changes_nothing(store: Store) -> None:
    """Idempotent by kind and key: the same index, also within a batch that is new for the rest, also in a later term."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        first = await one.engine.append(term, facts("a"))
        assert await one.engine.append(term, facts("a")) == first
        second = await one.engine.append(term, facts("a", "b"))
        assert second > first
        await one.engine.resign(term)
        term = await one.elected(above=term)
        assert await one.engine.append(term, facts("b", "a")) == first
        assert [fact.key for fact in await one.engine.read()] == ["a", "b"]


async def test_a_conflict_writes_nothing(store: Store) -> None:
    """The same key with another body is refused, and so is everything in the same append."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        await one.engine.append(term, facts("a"))
        with pytest.raises(Conflict, match="test a"):
            await one.engine.append(term, [*facts("new"), *facts("a", body=b"other")])
        assert [fact.key for fact in await one.engine.read()] == ["a"]


async def test_an_appender_that_has_not_seen_everything_is_told_so(store: Store) -> None:
    """A decision never rests on a log that lags: `after` must be the newest index, unless nothing new would be written."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        first = await one.engine.append(term, facts("a"), after=0)
        second = await one.engine.append(term, facts("b"), after=first)
        with pytest.raises(Behind):
            await one.engine.append(term, facts("c"), after=first)
        assert await one.engine.append(term, facts("b"), after=first) == second
        await one.engine.append(term, facts("c"), after=second)
        assert [fact.key for fact in await one.engine.read()] == ["a", "b", "c"]


async def test_an_append_is_fenced_in_its_own_transaction(store: Store) -> None:
    """Leadership that ended behind the appender's back: nothing is written, although the appender still believes in it."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        await one.engine.append(term, facts("before"))
        store.usurp()
        outcome: BaseException | None = None
        try:
            await one.engine.append(term, facts("after"))
        except Fenced as error:
            outcome = error
        assert outcome is not None
        assert (await one.deposed(term)).reason is Loss.SUPERSEDED
        assert [fact.key for fact in await one.engine.read()] == ["before"]
        with pytest.raises(Fenced):
            await one.engine.append(term + 100, facts("in a term that never was"))


async def test_appends_at_the_same_time_do_not_mix(store: Store) -> None:
    """Thirty appends at once: each is whole, and each index is the one that the log gives."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        batches = [facts(*(f"{batch}/{n}" for n in range(3))) for batch in range(30)]
        indexes = await asyncio.gather(*(one.engine.append(term, batch) for batch in batches))
        log = await one.engine.read()
        assert len(log) == 90
        by_index = {fact.index: fact for fact in log}
        for batch, index in zip(batches, indexes, strict=True):
            assert by_index[index].key == batch[-1].key
        for start in range(0, 90, 3):
            assert len({fact.key.partition("/")[0] for fact in log[start : start + 3]}) == 1


# ---------------------------------------------------------------- freshness


async def test_a_confirmation_counts_from_before_it_was_asked_for(store: Store) -> None:
    """The stamp is older than the first thing that happens after the call, and a usurped leader gets none."""
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        before = time.monotonic_ns()
        asked = asyncio.create_task(one.engine.confirm(term))
        await asyncio.sleep(0)
        sent = time.monotonic_ns()
        assert before <= await asked <= sent
        with pytest.raises(Fenced):
            await one.engine.confirm(term + 1)
        store.usurp()
        with pytest.raises(Fenced):
            await one.engine.confirm(term)
        assert isinstance(await one.deposed(term), Deposed)
