"""Watches one controller's role through `ctrlstatus` and turns what it says, or that it says nothing, into events.

Where the controller serves long polls, a change is heard of within milliseconds; elsewhere it is asked every poll interval.
Either way each question has a deadline, and what is not answered by then is an event too (docs/rules.md S7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from xce_supervisor.core.role import Answer, Session
from xce_supervisor.core.supervision import Answered, Silent
from xce_supervisor.core.words import NS_PER_MS, Now, Role
from xce_supervisor.errors import DeadlinePassed, PeerError
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.limits import Limits
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.supervisor import clock
from xce_supervisor.wire.words import CtrlStatus, CtrlStatusReply, Message

log = structlog.get_logger()

# A status answer is small; whoever sends more is no controller of ours.
_ANSWER_BYTES_MAX = 1024 * 1024
_PAUSE_S = 0.02


class RoleWatch:
    """Asks one address for as long as `run` runs.

    poll_interval_ms: time between answers at most. request_deadline_ms: for each connection and each answer beyond its wait.
    feed: takes Answered or Silent, on the loop. expect: is told within how many seconds `feed` will be called at the latest.
    seen: the last whole answer, for `status`.
    """

    def __init__(
        self,
        address: str,
        tls: TlsSource | None,
        poll_interval_ms: int,
        request_deadline_ms: int,
        feed: Callable[[Answered | Silent], None],
        expect: Callable[[float], None],
    ) -> None:
        self._address = address
        self._tls = tls
        self.retime(poll_interval_ms, request_deadline_ms)
        self._feed = feed
        self._expect = expect
        self._limits = Limits(frame_bytes=_ANSWER_BYTES_MAX)
        self._connection: Connection | None = None
        self._extra: asyncio.Task[None] | None = None
        self.seen: CtrlStatusReply | None = None

    def retime(self, poll_interval_ms: int, request_deadline_ms: int) -> None:
        """Take other times from the next question on (reload)."""
        self._poll_s = poll_interval_ms / 1000
        self._deadline_s = request_deadline_ms / 1000

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self._visit()
                self._expect(self._poll_s + self._deadline_s)
                await asyncio.sleep(self._poll_s)
        finally:
            if self._extra is not None:
                self._extra.cancel()
            self._hang_up("the watch ends")

    def poll_now(self) -> None:
        """Ask at once, beside a poll under way; no-op while unconnected or while such a question is open."""
        if self._connection is not None and (self._extra is None or self._extra.done()):
            self._extra = asyncio.ensure_future(self._ask_beside(self._connection))

    async def _visit(self) -> None:
        """One connection, from the first answer to the first failure."""
        self._expect(self._deadline_s)
        try:
            self._connection = await connect(
                self._address, self._tls, deadline_s=self._deadline_s, on_push=_ignore, limits=self._limits
            )
            await self._poll(self._connection)
        except PeerError as error:
            self._feed(Silent(str(error)))
        finally:
            self._hang_up("no usable answer")

    async def _poll(self, connection: Connection) -> None:
        version, long_poll, loop = 0, False, asyncio.get_running_loop()
        while True:
            wait_ms, asked_s = int(self._poll_s * 1000) if long_poll else 0, loop.time()
            reply = await self._ask(connection, CtrlStatus(known_version=version, wait_ms=wait_ms), wait_ms / 1000)
            version, long_poll = reply.version, reply.long_poll
            if not long_poll:
                self._expect(self._poll_s + self._deadline_s)
            # A controller that answers every long poll at once costs a question each 20 ms, not a core.
            await asyncio.sleep(max(0.0, _PAUSE_S - (loop.time() - asked_s)) if long_poll else self._poll_s)

    async def _ask(self, connection: Connection, query: CtrlStatus, wait_s: float) -> CtrlStatusReply:
        asked_at = clock.now()
        self._expect(wait_s + self._deadline_s)
        try:
            reply = await connection.request(query, wait_s + self._deadline_s)
        except DeadlinePassed as error:
            raise PeerError(f"{self._address} did not answer ctrlstatus within {self._deadline_s * 1000:.0f} ms") from error
        if not isinstance(reply, CtrlStatusReply):
            raise PeerError(f"{self._address} answered ctrlstatus with {type(reply).__name__}")
        self.seen = reply
        self._feed(Answered(translate(reply, asked_at)))
        return reply

    async def _ask_beside(self, connection: Connection) -> None:
        try:
            await self._ask(connection, CtrlStatus(), 0)
        except PeerError as error:
            log.debug("role.extra_poll_failed", reason=str(error))  # the main poll tells the same, with its own deadline

    def _hang_up(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close(reason)
            self._connection = None


def translate(reply: CtrlStatusReply, asked_at: Now) -> Answer:
    """Return what the core needs of an answer. A role that is neither primary nor standby becomes unknown."""
    scheduler = reply.scheduler
    session = None
    if scheduler is not None:
        oldest = scheduler.oldest_unacked_ms
        session = Session(
            scheduler.joined,
            scheduler.name,
            scheduler.spawn_token,
            scheduler.last_push_seq,
            scheduler.last_acted_seq,
            None if oldest is None else oldest * NS_PER_MS,
        )
    return Answer(
        asked_at=asked_at,
        controller_id=reply.controller_id,
        instance_id=reply.instance_id,
        role=Role(reply.role) if reply.role in {"primary", "standby"} else Role.UNKNOWN,
        term=reply.term,
        gate=reply.gate,
        gate_detail=reply.gate_detail,
        primary_address=reply.primary_address,
        primary_id=reply.primary_id,
        quorum_age_ns=None if reply.quorum_age_ms is None else reply.quorum_age_ms * NS_PER_MS,
        session=session,
        loop_gap_ns=reply.loop_gap_ms * NS_PER_MS,
    )


def _ignore(_message: Message) -> None:
    """A supervisor has no session, so nobody has anything to push to it."""
