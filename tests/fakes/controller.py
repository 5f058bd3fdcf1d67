"""A scriptable fake controller on the real `link.Server`, for tests of supervisor, scheduler and worker.

It says what the test tells it to say (`says`), keeps scheduler and worker sessions as a real one does, answers, pushes, and
records what it was asked. Trouble is asked for per opcode (`trouble`) or on the wire (`controller_relay`); `controller_script`
plays a timeline. What it shares with the real controller is held by tests/testbed/test_controller_contract.py.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xce_supervisor.errors import Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, Handler
from xce_supervisor.link.limits import Limits
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import (
    Body,
    ConfigPush,
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    GateSet,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobDispatch,
    JobList,
    JobPush,
    JobQuery,
    JobStateReport,
    JobSubmit,
    JobView,
    Join,
    Joined,
    Message,
    Opcode,
    PushAck,
    PushPlug,
    QueuePush,
    Resync,
    SchedulerExit,
    SchedulerSession,
    StepDown,
    WorkerView,
)

GARBAGE = b"\xff" * 64  # a length of 2^64-1: above any limit


@dataclass(slots=True)
class Session:
    """A joined peer. pushes: those sent and not acknowledged, as (seq, loop time sent)."""

    session_id: str
    join: Join
    connection: Connection
    began_at: float
    beat_at: float
    last_push_seq: int = 0
    last_acted_seq: int = 0
    unacked: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Trouble:
    """What goes wrong, per opcode.

    delay_s: seconds before an answer. silent: never answered. garbage: answered by bytes that are no frame. refuse: answered no.
    hang_up: the connection is closed instead of an answer.
    """

    delay_s: dict[Opcode, float] = field(default_factory=dict)
    silent: set[Opcode] = field(default_factory=set)
    garbage: set[Opcode] = field(default_factory=set)
    refuse: dict[Opcode, ErrorCode] = field(default_factory=dict)
    hang_up: set[Opcode] = field(default_factory=set)

    def clear(self, opcode: Opcode | None = None) -> None:
        """Answer `opcode`, or everything, as it should be again."""
        for kind in (self.delay_s, self.silent, self.garbage, self.refuse, self.hang_up):
            if opcode is None:
                kind.clear()
            elif isinstance(kind, dict):
                kind.pop(opcode, None)
            else:
                kind.discard(opcode)


class FakeController:
    """One fake controller. Starts as primary of term 1 unless told otherwise.

    asked: every request, in order.
    """

    def __init__(
        self,
        *,
        controller_id: str = "c1",
        instance_id: str = "instance-1",
        role: str = "primary",
        term: int = 1,
        tls: TlsSource | None = None,
        heartbeat_ms: int = 1000,
        session_timeout_ms: int = 3000,
        limits: Limits | None = None,
    ) -> None:
        self.says = CtrlStatusReply(
            controller_id=controller_id,
            instance_id=instance_id,
            role=role,
            term=term,
            quorum_age_ms=10,
            version=1,
            long_poll=True,
            engine="sqlite",
        )
        self.trouble = Trouble()
        self.asked: list[Message] = []
        self.jobs: dict[str, JobView] = {}
        self.workers: tuple[WorkerView, ...] = ()
        self.reports: list[JobStateReport] = []
        self.sessions: dict[str, Session] = {}
        self.foreign: SchedulerSession | None = None
        self.forced_stall_ms: int | None = None
        self._heartbeat_ms = heartbeat_ms
        self._session_timeout_s = session_timeout_ms / 1000
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._server = Server(tls, limits or Limits(), self._accept)
        self.address = ""

    # ------------------------------------------------------------ the test's side

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> FakeController:
        """Listen; `address` says where."""
        await self._server.start(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.port}"
        return self

    @property
    def accepted(self) -> int:
        """Connections that came this far since the start, refused ones included."""
        seen = self._server.counters
        return seen.accepted + seen.refused_connections + seen.failed_handshakes

    async def close(self) -> None:
        """Stop and close every connection."""
        await self._server.close()

    async def __aenter__(self) -> FakeController:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def say(self, **fields: Any) -> None:
        """Change what ctrlstatus says, e.g. say(role="standby"); the version rises and long polls are answered."""
        self.says = msgspec.structs.replace(self.says, **fields)
        await self._note()

    async def restart(self) -> None:
        """Be another process: a new instance id, no sessions, every connection closed."""
        for connection in self._server.connections:
            connection.close("restarted")
        self.sessions.clear()
        await self.say(instance_id=uuid.uuid4().hex)

    async def demote(self, *, exit_push: bool = True) -> None:
        """Become a standby, telling the scheduler to end first."""
        session = self.session_of(HostRole.SCHEDULER)
        if session is not None and exit_push:
            session.connection.push(SchedulerExit(reason="demoted"))
        await self.say(role="standby")

    def push(self, build: Callable[[int, int], Message], role: HostRole = HostRole.SCHEDULER) -> int:
        """Push build(seq, term) to the session of `role` and return seq."""
        session = self.session_of(role)
        assert session is not None, f"no {role.name} has joined"
        session.last_push_seq += 1
        session.unacked.append((session.last_push_seq, asyncio.get_running_loop().time()))
        session.connection.push(build(session.last_push_seq, self.says.term))
        return session.last_push_seq

    def push_jobs(self, *jobs: JobView, full: bool = False) -> int:
        """Take jobs in and push them to the scheduler."""
        self.jobs |= {job.job_id: job for job in jobs}
        return self.push(lambda seq, term: JobPush(seq=seq, term=term, jobs=jobs, full=full))

    def push_workers(self, *workers: WorkerView) -> int:
        """Take workers in and push them to the scheduler."""
        self.workers = workers
        return self.push(lambda seq, term: QueuePush(seq=seq, term=term, workers=workers))

    def push_config(self, max_dispatch_per_cycle: int) -> int:
        """Push a configuration to the scheduler."""
        return self.push(lambda seq, term: ConfigPush(seq=seq, term=term, max_dispatch_per_cycle=max_dispatch_per_cycle))

    def tell(self, role: HostRole, message: Message) -> None:
        """Push a message without a number, e.g. JobStart to the worker."""
        session = self.session_of(role)
        assert session is not None, f"no {role.name} has joined"
        session.connection.push(message)

    def session_of(self, role: HostRole) -> Session | None:
        """The living session of a role, the newest if there are several."""
        now = asyncio.get_running_loop().time()
        alive = [
            session
            for session in self.sessions.values()
            if session.join.host_role is role
            and not session.connection.closed.done()
            and now - session.beat_at < self._session_timeout_s
        ]
        return alive[-1] if alive else None

    async def until(self, fact: Callable[[], Any], within_s: float = 20.0) -> None:
        """Wait until fact() is true, looked at after everything that is asked of us. Fails with what was asked so far."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                while not fact():
                    try:
                        # Time alone changes some facts (a session that was not kept alive), so look from time to time, too.
                        async with asyncio.timeout(0.05):
                            await self._changed.wait()
                    except TimeoutError:
                        continue
        except TimeoutError:
            opcodes = [message.opcode.name for message in self.asked[-20:]]
            raise AssertionError(f"not so after {within_s} s; last asked: {opcodes}") from None

    # ------------------------------------------------------------ the peer's side

    def _accept(self, connection: Connection) -> Handler:
        async def handle(message: Message) -> Body:
            return await self._handle(connection, message)

        return handle

    async def _handle(self, connection: Connection, message: Message) -> Body:
        opcode = message.opcode
        self.asked.append(message)
        try:
            if opcode in self.trouble.hang_up:
                connection.abort("told to hang up")
            if opcode in self.trouble.garbage:
                connection.stream.send(GARBAGE)
            if opcode in self.trouble.silent | self.trouble.hang_up | self.trouble.garbage:
                await connection.closed
                return Done()
            await asyncio.sleep(self.trouble.delay_s.get(opcode, 0.0))
            if opcode in self.trouble.refuse:
                raise RequestRefused(self.trouble.refuse[opcode], "told to refuse")
            return await self._answer(connection, message)
        finally:
            await self._wake()

    async def _answer(self, connection: Connection, message: Message) -> Body:
        match message:
            case CtrlStatus():
                return await self._status(message)
            case Join():
                return self._join(connection, message)
            case Heartbeat():
                self._joined(message.session_id).beat_at = asyncio.get_running_loop().time()
                return HeartbeatReply(role=self.says.role, term=self.says.term)
            case GateSet() | PushPlug():
                return Done()
            case _ if self.says.role != "primary":
                raise Redirected(self.says.primary_address, self.says.primary_id, self.says.term)
            case PushAck():
                session = self._joined(message.session_id)
                session.last_acted_seq = max(session.last_acted_seq, message.seq)
                session.unacked = [(seq, at) for seq, at in session.unacked if seq > message.seq]
                return Done()
            case Resync():
                self._joined(message.session_id)
                self._push_all()
                return Done()
            case JobDispatch():
                return self._dispatch(message)
            case JobSubmit():
                job = msgspec.structs.asdict(message)
                self.jobs.setdefault(message.job_id, JobView(**job))
                return Done(index=len(self.jobs))
            case JobQuery():
                wanted = [job for job in self.jobs.values() if not message.job_ids or job.job_id in message.job_ids]
                return JobList(jobs=tuple(wanted[message.offset : message.offset + message.limit]), total=len(wanted))
            case JobStateReport():
                self._joined(message.session_id)
                self.reports.append(message)
                return Done()
            case StepDown():
                await self.demote()
                return Done()
            case _:
                raise RequestRefused(ErrorCode.UNSUPPORTED, f"{message.opcode.name} is not served")

    def _join(self, connection: Connection, join: Join) -> Joined:
        if join.host_role is HostRole.SCHEDULER:
            if join.controller_id != self.says.controller_id:
                raise RequestRefused(ErrorCode.WRONG_CONTROLLER, f"this is {self.says.controller_id}")
            if self.says.role != "primary":
                raise Redirected(self.says.primary_address, self.says.primary_id, self.says.term)
            if join.term != self.says.term:
                raise RequestRefused(ErrorCode.WRONG_TERM, f"the term is {self.says.term}")
            if self.session_of(HostRole.SCHEDULER) is not None or (self.foreign and self.foreign.joined):
                raise RequestRefused(ErrorCode.SESSION_ALIVE, "another scheduler's session is alive")
        elif self.says.role != "primary":
            raise Redirected(self.says.primary_address, self.says.primary_id, self.says.term)
        now = asyncio.get_running_loop().time()
        session = Session(f"session-{next(self._numbers)}", join, connection, now, now)
        self.sessions[session.session_id] = session
        connection.closed.add_done_callback(lambda _: self._gone(session))
        self.says = msgspec.structs.replace(self.says, version=self.says.version + 1)
        if join.host_role is HostRole.SCHEDULER:
            # The loop turns twice until the answer is sent; what is pushed must not come before it.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, loop.call_soon, self._push_all)
        return Joined(
            session_id=session.session_id,
            controller_id=self.says.controller_id,
            instance_id=self.says.instance_id,
            term=self.says.term,
            heartbeat_ms=self._heartbeat_ms,
            session_timeout_ms=int(self._session_timeout_s * 1000),
        )

    def _push_all(self) -> None:
        if self.session_of(HostRole.SCHEDULER) is not None:
            self.push_config(50)
            self.push_workers(*self.workers)
            self.push_jobs(*(job for job in self.jobs.values() if job.state not in ("done", "failed")), full=True)

    def _joined(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise RequestRefused(ErrorCode.NOT_JOINED, f"no session {session_id!r}")
        return self.sessions[session_id]

    def _gone(self, session: Session) -> None:
        if self.sessions.pop(session.session_id, None) is not None:
            self.says = msgspec.structs.replace(self.says, version=self.says.version + 1)

    def _dispatch(self, message: JobDispatch) -> Done:
        self._joined(message.session_id)
        job = self.jobs.get(message.job_id)
        if job is None:
            raise RequestRefused(ErrorCode.NOT_FOUND, f"no job {message.job_id}")
        if job.state != "pending" or job.attempt + 1 != message.attempt:
            raise RequestRefused(ErrorCode.CONFLICT, f"{job.job_id} is {job.state}, attempt {job.attempt}")
        self.jobs[job.job_id] = msgspec.structs.replace(job, state="dispatched", attempt=message.attempt, worker=message.worker)
        return Done(index=len(self.asked))

    async def _status(self, asked: CtrlStatus) -> CtrlStatusReply:
        if asked.wait_ms and asked.known_version == self.says.version:
            try:
                async with asyncio.timeout(asked.wait_ms / 1000), self._changed:
                    await self._changed.wait_for(lambda: asked.known_version != self.says.version)
            except TimeoutError:
                pass  # nothing changed in time: the answer says so by its version
        return msgspec.structs.replace(self.says, scheduler=self._scheduler())

    def _scheduler(self) -> SchedulerSession | None:
        if self.foreign is not None:
            return self.foreign
        session = self.session_of(HostRole.SCHEDULER)
        if session is None:
            return SchedulerSession(joined=False)
        now = asyncio.get_running_loop().time()
        stall = int((now - session.unacked[0][1]) * 1000) if session.unacked else None
        return SchedulerSession(
            joined=True,
            name=session.join.name,
            since_ms=int((now - session.began_at) * 1000),
            spawn_token=session.join.spawn_token,
            last_push_seq=session.last_push_seq,
            last_acted_seq=session.last_acted_seq,
            oldest_unacked_ms=self.forced_stall_ms if self.forced_stall_ms is not None else stall,
        )

    async def _note(self) -> None:
        self.says = msgspec.structs.replace(self.says, version=self.says.version + 1)
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
