"""Who has joined: one session a peer, alive while its heartbeats come (docs/rules.md S3)."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from xce_supervisor.errors import RequestRefused
from xce_supervisor.link.connection import Connection
from xce_supervisor.testbed.controller_clock import AwakeClock
from xce_supervisor.wire.words import ErrorCode, HostRole, Join

log = structlog.get_logger("controller")

SESSIONS_MAX = 10_000


@dataclass(slots=True, eq=False)
class Session:
    """One joined peer. joined_s, heard_s: on the controller's awake clock. alive: as last judged, so that a change is seen once.

    resumed: the same process had a session before, here or at another controller.
    """

    session_id: str
    role: HostRole
    name: str
    connection: Connection
    joined_s: float
    heard_s: float
    spawn_token: str = ""
    slots: int = 0
    resumed: bool = False
    alive: bool = True
    started: set[tuple[str, int]] = field(default_factory=set)  # a worker's: attempts whose start was pushed on this session


class Sessions:
    """All sessions. A peer's second join replaces its first only when that is not alive any more, or is the very same process.

    ended: called with each session that is over. changed: called when a session begins, ends, falls silent or is heard again.
    """

    def __init__(
        self, clock: AwakeClock, timeout_ms: int, ended: Callable[[Session], None], changed: Callable[[Session], None]
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_ms / 1000
        self._ended, self._changed = ended, changed
        self._by_id: dict[str, Session] = {}
        self._by_peer: dict[tuple[HostRole, str], Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def join(self, connection: Connection, message: Join) -> Session:
        """Begin a session.

        Raises:
            RequestRefused: SESSION_ALIVE, LIMIT.
        """
        # Schedulers are one of a kind, whatever they call themselves; others are known by name.
        key = (message.host_role, "" if message.host_role is HostRole.SCHEDULER else message.name)
        before = self._by_peer.get(key)
        if before is not None:
            same = message.resume == before.session_id != ""
            if not same and before.connection is not connection and self.is_alive(before):
                raise RequestRefused(
                    ErrorCode.SESSION_ALIVE,
                    f"{message.host_role.name.lower()} {before.name} has a session from {before.connection.remote},"
                    f" heard {self._clock.age_ms(before.heard_s)} ms ago",
                )
            self._end(before, "replaced by a new join", tell=before.connection is not connection)
        if len(self._by_id) >= SESSIONS_MAX:
            raise RequestRefused(ErrorCode.LIMIT, f"{SESSIONS_MAX} sessions are open, which is the limit")
        now_s = self._clock.now_s()
        session = Session(
            uuid.uuid4().hex, message.host_role, message.name, connection, now_s, now_s,
            spawn_token=message.spawn_token, slots=max(0, message.slots), resumed=bool(message.resume),
        )  # fmt: skip
        self._by_id[session.session_id] = self._by_peer[key] = session
        connection.closed.add_done_callback(lambda closed: self._end(session, closed.result()))
        log.info("session.joined", role=session.role.name.lower(), peer=session.name, session=session.session_id)
        self._changed(session)
        return session

    def heard(self, session_id: str, connection: Connection, role: HostRole | None = None) -> Session:
        """Return the session, which has just been heard of.

        Raises:
            RequestRefused: NOT_JOINED: there is none of that id on this connection, or not of that role.
        """
        session = self._by_id.get(session_id)
        if session is None or session.connection is not connection or (role is not None and session.role is not role):
            raise RequestRefused(ErrorCode.NOT_JOINED, "there is no such session on this connection; join first")
        session.heard_s = self._clock.now_s()
        if not session.alive:
            session.alive = True
            log.info("session.heard_again", role=session.role.name.lower(), peer=session.name)
            self._changed(session)
        return session

    def is_alive(self, session: Session) -> bool:
        """Have its heartbeats come in time?"""
        return not session.connection.closed.done() and self._clock.now_s() - session.heard_s <= self._timeout_s

    def judge_all(self) -> None:
        """Notice who fell silent; call it at least every quarter of a second."""
        for session in list(self._by_id.values()):
            if session.alive and not self.is_alive(session):
                session.alive = False
                log.warning("session.silent", role=session.role.name.lower(), peer=session.name)
                self._changed(session)

    def scheduler(self) -> Session | None:
        """The scheduler's session, silent ones included."""
        return self._by_peer.get((HostRole.SCHEDULER, ""))

    def worker(self, name: str) -> Session | None:
        """A worker's session, silent ones included."""
        return self._by_peer.get((HostRole.WORKER, name))

    def workers(self) -> list[Session]:
        """All workers' sessions in order of joining."""
        return [session for session in self._by_id.values() if session.role is HostRole.WORKER]

    def end_all(self) -> None:
        """Forget all sessions (demotion). Their connections stay: the peers are told the new role on them."""
        for session in list(self._by_id.values()):
            self._end(session, "demoted")

    def _end(self, session: Session, reason: str, *, tell: bool = False) -> None:
        if self._by_id.pop(session.session_id, None) is None:
            return
        key = (session.role, "" if session.role is HostRole.SCHEDULER else session.name)
        if self._by_peer.get(key) is session:
            del self._by_peer[key]
        session.alive = False
        log.info("session.ended", role=session.role.name.lower(), peer=session.name, reason=reason)
        if tell:
            session.connection.close(reason)
        self._ended(session)
        self._changed(session)
