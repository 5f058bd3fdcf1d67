"""The log of facts in etcd: how it lies in keys, and how facts are appended and read.

    PREFIX/head                 index of the newest fact
    PREFIX/log/INDEX            one append: its facts, under the index of the last one (16 hex digits, so that keys sort)
    PREFIX/fact/KIND/KEY        index and digest of a fact: what makes an append idempotent and finds a conflict

One append is one transaction: if the leader key is still the one that we created, and the head is the one that we know, and none
of the facts exists, write all. Whatever fails, the other branch reads leader, head and facts at that same instant, so that the
next step is decided from one consistent sight; that also settles an append whose answer was lost.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from xce_supervisor.store import etcd_messages as m
from xce_supervisor.store.engine import Behind, Conflict, Fact, Fenced, StoredFact, Unavailable
from xce_supervisor.store.etcd_calls import EtcdCalls

BATCHES_PER_READ = 100


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    index: int
    term: int
    kind: str
    key: str
    body: bytes


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    index: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LeaderKey:
    """The key whose creation made us leader. create_revision: never the same again, also for the same name."""

    name: str
    create_revision: int
    term: int


@dataclass(frozen=True, slots=True)
class _Head:
    index: int
    revision: int


_entries = msgspec.msgpack.Decoder(tuple[_Entry, ...])
_mark = msgspec.msgpack.Decoder(_Mark)


class EtcdLog:
    """Appends for one leader at a time, and reads. prefix: e.g. "/xce/main"."""

    def __init__(self, calls: EtcdCalls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix
        self._head: _Head | None = None
        self._one_at_a_time = asyncio.Lock()

    async def append(self, leader: LeaderKey, facts: Sequence[Fact], after: int | None, deadline_s: float) -> int:
        """See Engine.append. Raises Fenced, Conflict, Behind, Unavailable."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise Unavailable(f"other appends took all of {deadline_s:.1f} s") from None
        try:
            return await self._append(leader, facts, after, ends_at)
        finally:
            self._one_at_a_time.release()

    async def _append(self, leader: LeaderKey, facts: Sequence[Fact], after: int | None, ends_at: float) -> int:
        loop = asyncio.get_running_loop()
        known: dict[Fact, int] = {}
        looked = False
        while True:
            fresh = [fact for fact in facts if fact not in known]
            left_s = ends_at - loop.time()
            if not fresh:
                return known[facts[-1]]
            if left_s <= 0:
                raise Unavailable("the log changed under every attempt to append")
            if self._head is None or (after is not None and self._head.index != after):
                if looked and self._head is not None:
                    raise Behind(f"the log ends at {self._head.index}, the appender has seen {after}")
                known |= await self._look(leader, fresh, left_s)
                looked = True
                continue
            written = await self._write(leader, self._head, fresh, known, left_s)
            if written:
                known |= written

    async def _look(self, leader: LeaderKey, facts: Sequence[Fact], deadline_s: float) -> dict[Fact, int]:
        """Read the head and which of the facts exist, if we still lead."""
        reads = [m.get(self._head_key), *(m.get(self._fact_key(fact)) for fact in facts)]
        reply = await self._calls.txn([m.created_at(leader.name, leader.create_revision)], reads, [], deadline_s)
        if not reply.succeeded:
            raise Fenced(f"term {leader.term} is over: its key is gone")
        return self._take_in(reply.responses, facts)

    async def _write(
        self, leader: LeaderKey, head: _Head, fresh: Sequence[Fact], known: dict[Fact, int], deadline_s: float
    ) -> dict[Fact, int]:
        """One attempt; returns what is now known to be written. Where it failed, the head is known afresh."""
        indexes = {fact: head.index + place for place, fact in enumerate(fresh, 1)}
        last = head.index + len(fresh)
        batch = tuple(_Entry(index, leader.term, fact.kind, fact.key, fact.body) for fact, index in indexes.items())
        marks = [m.put(self._fact_key(f), msgspec.msgpack.encode(_Mark(i, _digest(f.body)))) for f, i in indexes.items()]
        entry = m.put(f"{self._prefix}/log/{last:016x}", msgspec.msgpack.encode(batch))
        # Cleared until the answer is here: after a lost one the head is not known.
        self._head = None
        reply = await self._calls.txn(
            [
                m.created_at(leader.name, leader.create_revision),
                m.changed_at(self._head_key, head.revision),
                *(m.absent(self._fact_key(fact)) for fact in fresh),
            ],
            [entry, m.put(self._head_key, str(last).encode()), *marks],
            [m.get(leader.name), m.get(self._head_key), *(m.get(self._fact_key(fact)) for fact in fresh)],
            deadline_s,
        )
        if reply.succeeded:
            self._head = _Head(last, reply.header.revision)
            return indexes
        owner = reply.responses[0].response_range.kvs
        if not owner or owner[0].create_revision != leader.create_revision:
            raise Fenced(f"term {leader.term} is over: its key is gone")
        return self._take_in(reply.responses[1:], fresh)

    def _take_in(self, responses: Sequence[Any], facts: Sequence[Fact]) -> dict[Fact, int]:
        heads = responses[0].response_range.kvs
        self._head = _Head(int(heads[0].value), heads[0].mod_revision) if heads else _Head(0, 0)
        known: dict[Fact, int] = {}
        for fact, response in zip(facts, responses[1:], strict=True):
            found = response.response_range.kvs
            if not found:
                continue
            mark = _mark.decode(found[0].value)
            if mark.digest != _digest(fact.body):
                raise Conflict(f"{fact.kind} {fact.key} exists at index {mark.index} with another body")
            known[fact] = mark.index
        return known

    async def read(self, after: int, limit: int, deadline_s: float) -> list[StoredFact]:
        """See Engine.read. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        facts: list[StoredFact] = []
        seen = after
        while len(facts) < limit:
            reply = await self._calls.range(
                m.RangeRequest(
                    key=f"{self._prefix}/log/{seen + 1:016x}".encode(),
                    range_end=f"{self._prefix}/log0".encode(),  # "0" follows "/"
                    limit=min(BATCHES_PER_READ, limit - len(facts)),
                ),
                max(ends_at - loop.time(), 0.0),
            )
            for pair in reply.kvs:
                batch = _entries.decode(pair.value)
                facts += (StoredFact(e.index, e.term, e.kind, e.key, e.body) for e in batch if e.index > after)
                seen = batch[-1].index
            if not reply.more:
                break
        return facts[:limit]

    def forget(self) -> None:
        """A new term begins: what was known of the head may be old."""
        self._head = None

    @property
    def _head_key(self) -> str:
        return f"{self._prefix}/head"

    def _fact_key(self, fact: Fact) -> str:
        return f"{self._prefix}/fact/{fact.kind}/{fact.key}"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
