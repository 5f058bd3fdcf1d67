"""The sqlite engine: several controllers of one machine share one database file.

A leader renews its row at a quarter of the lease, each renewal counted from a reading of CLOCK_BOOTTIME that was taken before
it was written; others may be elected once that clock has passed the row's end. The leader deposes itself a margin earlier, by
the faster of its clocks. All blocking work is done by one thread (`sqlite_file.SqliteFile`); standbys only read, ten times a
lease.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Deadline, Now
from xce_supervisor.errors import ConfigError
from xce_supervisor.store import engine as e
from xce_supervisor.store.blocking import BlockingThread
from xce_supervisor.store.clocks import boot_ns, read_now
from xce_supervisor.store.sqlite_fence import Fence, Holder
from xce_supervisor.store.sqlite_file import Busy, LeaderRow, SqliteFile, StoreLost

T = TypeVar("T")
LEASE_S_DEFAULT = 1.0
LEASE_S_MIN = 0.2
OPEN_DEADLINE_S = 10.0
RETRY_S = 0.02
# A stopped process holds the lock for good; a slow disk holds it for a while. Only the first is quick to be judged.
STOPPED_PATIENCE_NS = 300 * NS_PER_MS
HUNG_PATIENCE_NS = 5 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _Lead:
    term: int
    nonce: str
    until: Deadline


@dataclass(frozen=True, slots=True)
class _Suspect:
    holder: Holder
    since: Now


class SqliteEngine:
    """See store.engine.Engine. lease_s: how long a silent leader keeps others out, in seconds, at least 0.2."""

    name = "sqlite"

    def __init__(self, path: Path, lease_s: float = LEASE_S_DEFAULT) -> None:
        if lease_s < LEASE_S_MIN:
            raise ConfigError(f"sqlite://{path}: a lease of {lease_s} s is too short to be renewed in time; give {LEASE_S_MIN} s")
        self._lease_s = lease_s
        self._lease_ns = int(lease_s * NS_PER_S)
        # Own authority ends this much before the row does: a tenth covers a clock read and a listener's work in between.
        self._margin_ns = self._lease_ns // 10
        self._path = path
        self._file = SqliteFile(path, self._lease_ns)
        self._fence: Fence | None = None
        self._lead: _Lead | None = None
        self._seen: e.Leader | None = None
        self._told_none = False
        self._suspect: _Suspect | None = None
        self._hold_until_s = 0.0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger().bind(engine=self.name)

    # ------------------------------------------------------------ life

    async def start(self, candidate: e.Candidate, listener: Callable[[e.StoreEvent], None]) -> None:
        """See Engine.start."""
        assert self._task is None, "an engine is started once"
        self._candidate, self._listener = candidate, listener
        self._thread = BlockingThread("store-sqlite")
        try:
            await self._open()
        except BaseException:
            self._thread.stop()
            raise
        self._task = asyncio.get_running_loop().create_task(self._campaign(), name="store-sqlite-campaign")
        self._task.add_done_callback(e.tell_bug)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + OPEN_DEADLINE_S
        while True:
            try:
                await self._thread.run(self._declare_and_open, deadline_s=OPEN_DEADLINE_S)
                return
            except (Busy, e.Unavailable) as error:
                if loop.time() >= ends_at:
                    raise ConfigError(
                        f"sqlite://{self._path}: locked by another process for {OPEN_DEADLINE_S:.0f} s ({error});"
                        " see who has it open (fuser), then start again"
                    ) from error
                await asyncio.sleep(RETRY_S + random.random() * RETRY_S)

    def _declare_and_open(self) -> None:
        if not self._path.parent.is_dir():
            self._file.open()  # says what is wrong
        if self._fence is None:
            self._fence = Fence(self._path)
        try:
            self._fence.declare()
        except OSError as error:
            what = f"{error.filename}: {error.strerror}"
            raise ConfigError(f"sqlite://{self._path}: {what}; make it writable for this user") from error
        self._file.open()

    async def close(self) -> None:
        """See Engine.close."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.wait({task})
        lead, self._lead = self._lead, None
        if lead is not None:
            await self._release(lead.nonce)
        assert self._fence is not None
        try:
            await self._thread.run(self._file.close, deadline_s=1.0)
        except e.Unavailable as error:
            self._log.warning("store.close_failed", path=str(self._path), reason=str(error))
        self._fence.withdraw()
        self._thread.stop()
        await self._thread.joined(1.0)

    # ------------------------------------------------------------ campaigning

    async def _campaign(self) -> None:
        while True:
            lead = self._lead
            try:
                if lead is None:
                    await self._follow()
                else:
                    await self._renew(lead)
            except StoreLost as error:
                self._depose(lead, e.Loss.STORE_LOST, str(error))
                self._see(None)
                await self._pause(self._lease_s / 4)
                await self._reopen()

    async def _reopen(self) -> None:
        try:
            await self._run(self._file.reopen, self._lease_s)
        except (Busy, e.Unavailable):
            return
        except StoreLost as error:
            self._log.error("store.lost", path=str(self._path), reason=str(error))
            raise

    async def _follow(self) -> None:
        """One look at the row; take it where it is vacant."""
        try:
            row = await self._run(self._file.look, self._lease_s)
        except e.Unavailable:
            self._see(None)
            await self._pause(self._lease_s / 10)
            return
        vacant = row.vacant(self._file.boot_id, boot_ns())
        # A row of our own that we gave up (its writing ended too late) only has to run out; it names no leader.
        self._see(None if vacant or row.instance_id == self._candidate.instance_id else _leader_of(row))
        if not vacant:
            self._suspect = None
            left_s = max(0, row.until_boot_ns - boot_ns()) / NS_PER_S
            await self._pause(min(self._lease_s / 10, left_s + 0.001))
        elif self._held_back_s() > 0:
            await self._pause(min(self._lease_s / 10, self._held_back_s()))
        else:
            await self._take()

    def _held_back_s(self) -> float:
        return self._hold_until_s - asyncio.get_running_loop().time()

    async def _take(self) -> None:
        nonce = uuid.uuid4().hex
        try:
            granted = await self._run(lambda: self._file.take(self._candidate, nonce), self._lease_s)
        except Busy:
            await self._judge_lock_holder()
            await self._pause(RETRY_S + random.random() * RETRY_S)
            return
        except e.Unavailable as error:
            # Unknown: it may be written yet. The nonce is given up, so the row, if it is, runs out by itself.
            self._log.warning("store.election_failed", path=str(self._path), reason=str(error))
            await self._pause(self._lease_s / 4)
            return
        if granted is None:
            return
        until = granted.anchor.after(self._lease_ns - self._margin_ns)
        if until.ended(read_now()):  # the disk was so slow that the lease is over before it began
            self._log.warning("store.election_came_late", term=granted.term)
            return
        self._suspect = None
        self._lead = _Lead(granted.term, nonce, until)
        self._told_none = False
        self._seen = None
        self._listener(e.Elected(granted.term))

    async def _renew(self, lead: _Lead) -> None:
        """Wait until the next renewal is due, renew, and depose ourselves where that does not succeed in time."""
        await self._pause(min(self._lease_s / 4, self._left_s(lead)))
        while self._lead is lead:
            left_s = self._left_s(lead)
            if left_s <= 0:
                self._depose(lead, e.Loss.RAN_OUT, "no renewal was written in time")
                return
            try:
                anchor = await self._run(lambda: self._file.renew(lead.term, lead.nonce), left_s)
            except e.Fenced as error:
                self._depose(lead, e.Loss.SUPERSEDED, str(error))
            except (Busy, e.Unavailable):
                await self._pause(min(RETRY_S, self._left_s(lead)))
            else:
                if self._lead is lead:  # a resignation may have come in between
                    self._lead = _Lead(lead.term, lead.nonce, anchor.after(self._lease_ns - self._margin_ns))
                return

    def _left_s(self, lead: _Lead) -> float:
        return lead.until.remaining_ns(read_now()) / NS_PER_S

    def _depose(self, lead: _Lead | None, reason: e.Loss, detail: str) -> None:
        """Tell the listener once; whoever deposes first is right. A renewed lease has the same nonce."""
        if lead is None or self._lead is None or self._lead.nonce != lead.nonce:
            return
        self._lead = None
        self._listener(e.Deposed(lead.term, reason, detail))

    def _see(self, leader: e.Leader | None) -> None:
        if self._lead is not None or (leader == self._seen and (leader is not None or self._told_none)):
            return
        self._seen, self._told_none = leader, leader is None
        self._listener(e.LeaderSeen(leader))

    async def _judge_lock_holder(self) -> None:
        """The lease has run out and somebody holds the write lock: kill it if it is a candidate that does not move."""
        assert self._fence is not None
        now, holder = read_now(), self._fence.holder()
        if holder is None:
            self._suspect = None
            return
        if self._suspect is None or self._suspect.holder.identity != holder.identity:
            self._suspect = _Suspect(holder, now)
            return
        patience_ns = STOPPED_PATIENCE_NS if holder.stopped else HUNG_PATIENCE_NS
        if now.waited(self._suspect.since) < patience_ns:
            return
        pid, stopped = holder.identity.pid, holder.stopped
        self._suspect = None
        if not holder.candidate:
            self._log.error("store.blocked_by_stranger", path=str(self._path), pid=pid, stopped=stopped)
        elif self._fence.kill(holder):
            self._log.error("store.holder_killed", path=str(self._path), pid=pid, stopped=stopped)

    # ------------------------------------------------------------ requests

    def leads(self, term: int) -> bool:
        """See Engine.leads."""
        return self._lead is not None and self._lead.term == term and not self._lead.until.ended(read_now())

    async def append(self, term: int, facts: Sequence[e.Fact], after: int | None = None) -> int:
        """See Engine.append."""
        e.check_facts(facts)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + e.APPEND_DEADLINE_S
        while True:
            lead = self._leading(term)
            job = partial(self._file.append, term, lead.nonce, facts, after)
            try:
                return await self._run(job, ends_at - loop.time(), urgent=False)
            except e.Fenced as error:
                self._depose(lead, e.Loss.SUPERSEDED, str(error))
                raise
            except StoreLost as error:
                self._depose(lead, e.Loss.STORE_LOST, str(error))
                raise e.Unavailable(str(error)) from error
            except Busy as error:
                if loop.time() + RETRY_S >= ends_at:
                    raise e.Unavailable(f"the store stayed locked: {error}") from error
                await asyncio.sleep(RETRY_S)

    async def read(self, after: int = 0, limit: int = 1000) -> list[e.StoredFact]:
        """See Engine.read."""
        try:
            return await self._run(lambda: self._file.read(after, limit), e.READ_DEADLINE_S, urgent=False)
        except StoreLost as error:
            raise e.Unavailable(str(error)) from error

    async def confirm(self, term: int) -> int:
        """See Engine.confirm."""
        lead = self._leading(term)
        asked_at = read_now()
        try:
            await self._run(lambda: self._file.confirm(term, lead.nonce), e.CONFIRM_DEADLINE_S, urgent=False)
        except e.Fenced as error:
            self._depose(lead, e.Loss.SUPERSEDED, str(error))
            raise
        except StoreLost as error:
            self._depose(lead, e.Loss.STORE_LOST, str(error))
            raise e.Unavailable(str(error)) from error
        return asked_at.mono_ns

    async def resign(self, term: int, hold_ms: int = 0) -> None:
        """See Engine.resign."""
        lead = self._lead
        if lead is None or lead.term != term:
            return
        self._hold_until_s = asyncio.get_running_loop().time() + hold_ms / 1000
        self._depose(lead, e.Loss.RESIGNED, "")
        await self._release(lead.nonce)
        self._wake.set()

    def _leading(self, term: int) -> _Lead:
        lead = self._lead
        if lead is None or lead.term != term:
            raise e.Fenced(f"this candidate does not lead in term {term}")
        if lead.until.ended(read_now()):
            self._depose(lead, e.Loss.RAN_OUT, "no renewal was written in time")
            raise e.Fenced(f"the lease of term {term} ran out")
        return lead

    async def _release(self, nonce: str) -> None:
        """Best effort: a row that is not released runs out by itself."""
        try:
            await self._run(lambda: self._file.release(nonce), self._lease_s)
        except (Busy, StoreLost, e.Unavailable) as error:
            self._log.info("store.release_failed", path=str(self._path), reason=str(error))

    async def _run(self, job: Callable[[], T], deadline_s: float, *, urgent: bool = True) -> T:
        return await self._thread.run(job, deadline_s=max(deadline_s, 0.0), urgent=urgent)

    async def _pause(self, delay_s: float) -> None:
        """Sleep, or until a resignation changes what there is to do."""
        self._wake.clear()
        try:
            async with asyncio.timeout(max(delay_s, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return


def _leader_of(row: LeaderRow) -> e.Leader:
    return e.Leader(row.controller_id, row.instance_id, row.address, row.term)
