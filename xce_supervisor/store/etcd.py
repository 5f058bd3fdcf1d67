"""The etcd engine: controllers of several machines share an etcd cluster.

    PREFIX/term      the durable term: last elected one
    PREFIX/leader    exists while somebody leads; tied to a lease of etcd, so that it goes away with a leader that does not renew

An election is one transaction: if there is no leader key and the term is the one that was read, create the key with a nonce made
for this candidacy and raise the term. A key is never taken up again: the candidate knows its own by nonce and create revision.

Own authority counts from before a renewal was *sent*, by the TTL that the reply grants, less a margin; and only if a linearizable
read sent after the renewal was answered still finds the key, in the same term of etcd's own leader. Without that a renewal may
have been answered by an etcd leader that was deposed long ago and whose word binds nobody.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from xce_supervisor.core.words import NS_PER_S, Deadline, Now
from xce_supervisor.store import engine as e
from xce_supervisor.store import etcd_messages as m
from xce_supervisor.store.clocks import read_now
from xce_supervisor.store.etcd_calls import EtcdCalls, EtcdTls
from xce_supervisor.store.etcd_log import EtcdLog, LeaderKey

TTL_S_DEFAULT = 5
PREFIX_DEFAULT = "/xce/main"
# A standby asks this often whether there is a leader; a watch would be quicker, but one on a cut-off member hangs in silence.
LOOK_S = 0.2
RETRY_S = 0.05


class _LeaderValue(msgspec.Struct, frozen=True):
    controller_id: str
    instance_id: str
    address: str
    term: int
    nonce: str


@dataclass(frozen=True, slots=True)
class _Bid:
    """One candidacy. granted_ns: of the lease. anchor: both clocks before the lease was asked for."""

    nonce: str
    lease_id: int
    granted_ns: int
    anchor: Now

    def until(self) -> Deadline:
        return _until(self.anchor, self.granted_ns)


@dataclass(frozen=True, slots=True)
class _Lead:
    term: int
    bid: _Bid
    key: LeaderKey
    until: Deadline


def _until(anchor: Now, granted_ns: int) -> Deadline:
    # A tenth covers clocks that differ in rate by a percent each, and the listener's work.
    return anchor.after(granted_ns - granted_ns // 10)


class EtcdEngine:
    """See store.engine.Engine. endpoints: "host:port" of the members. ttl_s: whole seconds to ask for; etcd may grant more."""

    name = "etcd"

    def __init__(self, endpoints: Sequence[str], prefix: str, ttl_s: int, tls: EtcdTls | None) -> None:
        self._ttl_s = ttl_s
        self._prefix = prefix
        # Three members can be tried within the part of a lease that a renewal may take.
        self._calls = EtcdCalls(endpoints, tls, attempt_s=max(0.3, ttl_s / 8))
        self._log_facts = EtcdLog(self._calls, prefix)
        self._lead: _Lead | None = None
        self._bid: _Bid | None = None
        # The bid of a leadership that ended here: its lease is to be revoked, its key never to be taken up again.
        self._spent: _Bid | None = None
        self._seen: e.Leader | None = None
        self._told_none = False
        self._hold_until_s = 0.0
        self._term_seen = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger().bind(engine=self.name)

    @property
    def _leader_key(self) -> str:
        return f"{self._prefix}/leader"

    @property
    def _term_key(self) -> str:
        return f"{self._prefix}/term"

    # ------------------------------------------------------------ life

    async def start(self, candidate: e.Candidate, listener: Callable[[e.StoreEvent], None]) -> None:
        """See Engine.start. An etcd cluster that does not answer yet is no error: the campaign goes on until it does."""
        assert self._task is None, "an engine is started once"
        self._candidate, self._listener = candidate, listener
        self._task = asyncio.get_running_loop().create_task(self._campaign(), name="store-etcd-campaign")
        self._task.add_done_callback(e.tell_bug)

    async def close(self) -> None:
        """See Engine.close."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.wait({task})
        lead, self._lead = self._lead, None
        for bid in (lead.bid if lead else None, self._bid, self._spent):
            if bid is not None:
                await self._revoke(bid)
        await self._calls.close()

    # ------------------------------------------------------------ campaigning

    async def _campaign(self) -> None:
        while True:
            lead = self._lead
            if lead is None:
                await self._follow()
            else:
                await self._renew(lead)

    async def _follow(self) -> None:
        spent, self._spent = self._spent, None
        if spent is not None:
            await self._revoke(spent)
        try:
            reply = await self._calls.range(m.RangeRequest(key=self._leader_key.encode()), self._ttl_s / 2)
        except e.Unavailable:
            self._see(None)
            await self._pause(RETRY_S)
            return
        if reply.kvs:
            await self._follow_leader(reply.kvs[0])
        elif self._held_back_s() > 0:
            self._see(None)
            await self._pause(min(LOOK_S, self._held_back_s()))
        else:
            self._see(None)
            await self._stand()

    def _held_back_s(self) -> float:
        return self._hold_until_s - asyncio.get_running_loop().time()

    async def _follow_leader(self, pair: Any) -> None:
        value = msgspec.json.decode(pair.value, type=_LeaderValue)
        if await self._went_back(value.term):
            return
        bid = self._bid
        if bid is not None and value.nonce == bid.nonce and not bid.until().ended(read_now()):
            # The transaction whose answer was lost had been carried out after all.
            self._elected(bid, value.term, pair.create_revision)
            return
        if value.instance_id == self._candidate.instance_id:
            # A key of ours that came too late, or that we gave up: it is never taken up again, only removed.
            self._see(None)
            if bid is not None and value.nonce == bid.nonce:
                await self._drop_bid()
        else:
            self._see(e.Leader(value.controller_id, value.instance_id, value.address, value.term))
            await self._drop_bid()
        await self._pause(LOOK_S)

    async def _stand(self) -> None:
        """Stand for election once."""
        try:
            bid = await self._lease_for_bid()
            read = await self._calls.range(m.RangeRequest(key=self._term_key.encode()), self._ttl_s / 2)
            term, revision = (int(read.kvs[0].value), read.kvs[0].mod_revision) if read.kvs else (0, 0)
            if await self._went_back(term):
                return
            value = msgspec.json.encode(
                _LeaderValue(
                    self._candidate.controller_id, self._candidate.instance_id, self._candidate.address, term + 1, bid.nonce
                )
            )
            reply = await self._calls.txn(
                [m.absent(self._leader_key), m.changed_at(self._term_key, revision)],
                [m.put(self._leader_key, value, bid.lease_id), m.put(self._term_key, str(term + 1).encode())],
                [m.get(self._leader_key)],
                self._ttl_s / 2,
            )
        except e.Unavailable as error:
            # Unknown: the next look finds our nonce, if it is there.
            self._log.warning("store.election_failed", reason=str(error))
            await self._pause(RETRY_S)
            return
        except e.Fenced:  # the lease ran out before it was used
            self._bid = None
            return
        if reply.succeeded:
            self._elected(bid, term + 1, reply.header.revision)
        elif reply.responses[0].response_range.kvs:
            await self._follow_leader(reply.responses[0].response_range.kvs[0])
        else:  # only the term had moved: somebody was elected and is gone again
            await self._pause(RETRY_S + random.random() * RETRY_S)

    async def _went_back(self, term: int) -> bool:
        """A term lower than one seen before means that an older copy of the store was put back: it is not campaigned in."""
        if term >= self._term_seen:
            self._term_seen = term
            return False
        self._log.error("store.lost", prefix=self._prefix, reason=f"term {term} after term {self._term_seen}: an older copy")
        self._see(None)
        await self._pause(LOOK_S)
        return True

    async def _lease_for_bid(self) -> _Bid:
        """The lease of a bid that lost is used again while more than half of it is left; the nonce always is a new one."""
        bid = self._bid
        now = read_now()
        if bid is not None and bid.until().remaining_ns(now) > bid.granted_ns // 2:
            self._bid = _Bid(uuid.uuid4().hex, bid.lease_id, bid.granted_ns, bid.anchor)
            return self._bid
        await self._drop_bid()
        granted = await self._calls.grant(self._ttl_s, self._ttl_s / 2)
        self._bid = _Bid(uuid.uuid4().hex, granted.ID, granted.TTL * NS_PER_S, now)
        return self._bid

    def _elected(self, bid: _Bid, term: int, create_revision: int) -> None:
        self._bid = None
        self._term_seen = term
        self._lead = _Lead(term, bid, LeaderKey(self._leader_key, create_revision, term), bid.until())
        self._seen, self._told_none = None, False
        self._log_facts.forget()
        if self._lead.until.ended(read_now()):
            self._lead, self._spent = None, bid
            self._log.warning("store.election_came_late", term=term)
            return
        self._listener(e.Elected(term))

    async def _renew(self, lead: _Lead) -> None:
        """Wait until the next renewal is due, renew, and depose ourselves where that does not succeed in time."""
        await self._pause(min(lead.bid.granted_ns / NS_PER_S / 4, self._left_s(lead)))
        while self._lead is lead:
            left_s = self._left_s(lead)
            if left_s <= 0:
                self._depose(lead, e.Loss.RAN_OUT, "no renewal was confirmed in time")
                return
            anchor = read_now()
            try:
                kept = await self._calls.keep_alive(lead.bid.lease_id, left_s)
                if kept.TTL <= 0:
                    self._depose(lead, e.Loss.SUPERSEDED, "etcd has ended the lease")
                    return
                read = await self._read_own_key(lead, self._left_s(lead))
            except e.Fenced as error:
                self._depose(lead, e.Loss.SUPERSEDED, str(error))
                return
            except e.Unavailable as error:
                self._log.warning("store.renewal_failed", term=lead.term, reason=str(error))
                await self._pause(min(RETRY_S, self._left_s(lead)))
                continue
            if kept.header.raft_term == read.header.raft_term and self._lead is lead:
                until = _until(anchor, kept.TTL * NS_PER_S)
                self._lead = _Lead(lead.term, lead.bid, lead.key, until)
                return
            await self._pause(min(RETRY_S, self._left_s(lead)))

    async def _read_own_key(self, lead: _Lead, deadline_s: float) -> Any:
        """A linearizable read that was started now still finds the key that made us leader. Raises Fenced, Unavailable."""
        reply = await self._calls.range(m.RangeRequest(key=self._leader_key.encode()), max(deadline_s, 0.0))
        if not reply.kvs or reply.kvs[0].create_revision != lead.key.create_revision:
            raise e.Fenced(f"term {lead.term} is over: its key is gone")
        return reply

    def _left_s(self, lead: _Lead) -> float:
        return lead.until.remaining_ns(read_now()) / NS_PER_S

    def _depose(self, lead: _Lead, reason: e.Loss, detail: str) -> None:
        """Tell the listener once; whoever deposes first is right. A renewed lead has the same nonce."""
        if self._lead is None or self._lead.bid.nonce != lead.bid.nonce:
            return
        self._lead, self._spent = None, lead.bid
        self._wake.set()
        self._listener(e.Deposed(lead.term, reason, detail))

    def _see(self, leader: e.Leader | None) -> None:
        if self._lead is not None or (leader == self._seen and (leader is not None or self._told_none)):
            return
        self._seen, self._told_none = leader, leader is None
        self._listener(e.LeaderSeen(leader))

    async def _drop_bid(self) -> None:
        bid, self._bid = self._bid, None
        if bid is not None:
            await self._revoke(bid)

    async def _revoke(self, bid: _Bid) -> None:
        """Best effort: a lease that is not revoked runs out by itself."""
        try:
            await self._calls.revoke(bid.lease_id, min(1.0, self._ttl_s / 4))
        except e.Unavailable as error:
            self._log.info("store.release_failed", reason=str(error))

    # ------------------------------------------------------------ requests

    def leads(self, term: int) -> bool:
        """See Engine.leads."""
        return self._lead is not None and self._lead.term == term and not self._lead.until.ended(read_now())

    async def append(self, term: int, facts: Sequence[e.Fact], after: int | None = None) -> int:
        """See Engine.append."""
        e.check_facts(facts)
        lead = self._leading(term)
        try:
            return await self._log_facts.append(lead.key, facts, after, e.APPEND_DEADLINE_S)
        except e.Fenced as error:
            self._depose(lead, e.Loss.SUPERSEDED, str(error))
            raise

    async def read(self, after: int = 0, limit: int = 1000) -> list[e.StoredFact]:
        """See Engine.read."""
        return await self._log_facts.read(after, limit, e.READ_DEADLINE_S)

    async def confirm(self, term: int) -> int:
        """See Engine.confirm."""
        lead = self._leading(term)
        asked_at = read_now()
        try:
            await self._read_own_key(lead, e.CONFIRM_DEADLINE_S)
        except e.Fenced as error:
            self._depose(lead, e.Loss.SUPERSEDED, str(error))
            raise
        return asked_at.mono_ns

    async def resign(self, term: int, hold_ms: int = 0) -> None:
        """See Engine.resign."""
        lead = self._lead
        if lead is None or lead.term != term:
            return
        self._hold_until_s = asyncio.get_running_loop().time() + hold_ms / 1000
        self._depose(lead, e.Loss.RESIGNED, "")
        await self._revoke(lead.bid)  # at once, although the campaign would come to it

    def _leading(self, term: int) -> _Lead:
        lead = self._lead
        if lead is None or lead.term != term:
            raise e.Fenced(f"this candidate does not lead in term {term}")
        if lead.until.ended(read_now()):
            self._depose(lead, e.Loss.RAN_OUT, "no renewal was confirmed in time")
            raise e.Fenced(f"the lease of term {term} ran out")
        return lead

    async def _pause(self, delay_s: float) -> None:
        """Sleep, or until something changes what there is to do."""
        self._wake.clear()
        try:
            async with asyncio.timeout(max(delay_s, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return
