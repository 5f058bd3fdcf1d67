"""What a controller answers to whom: one method an opcode.

Everything but a status query, a gate and a plug is for the primary alone; a standby answers it with a redirect that names the
primary (docs/protocol.md). A heartbeat is the exception: its answer is the role.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from xce_supervisor.core.facts import Submitted
from xce_supervisor.core.jobs import OPEN_STATES, admit_submit
from xce_supervisor.core.words import Role
from xce_supervisor.errors import ConfigError, Redirected, RequestRefused
from xce_supervisor.link.connection import Connection
from xce_supervisor.store.engine import Engine
from xce_supervisor.testbed.controller_access import Access
from xce_supervisor.testbed.controller_clock import AwakeClock
from xce_supervisor.testbed.controller_config import ControllerConfig, gate_named
from xce_supervisor.testbed.controller_ledger import Ledger
from xce_supervisor.testbed.controller_pushes import SchedulerPushes, views
from xce_supervisor.testbed.controller_role import RoleDriver
from xce_supervisor.testbed.controller_sessions import Session, Sessions
from xce_supervisor.testbed.controller_status import Status
from xce_supervisor.testbed.controller_workers import Workers
from xce_supervisor.wire.words import (
    Body,
    CtrlStatus,
    Done,
    ErrorCode,
    GateSet,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobDispatch,
    JobList,
    JobQuery,
    JobStateReport,
    JobSubmit,
    Join,
    Joined,
    Message,
    PushAck,
    PushPlug,
    Resync,
    StepDown,
)

log = structlog.get_logger("controller")

OPEN_JOBS_MAX = 100_000
QUERY_LIMIT_MAX = 10_000
HOLD_MS_MAX = 600_000
# A plug that nobody opens again must not hold answers, and with them memory, for good.
PLUG_S_MAX = 60.0
PLUGS = ("exit-push", "ctrlstatus", "heartbeat", "join", "submit")


class Plugs:
    """Fault injection: what is plugged is held back until it is opened, or for a minute."""

    def __init__(self) -> None:
        self._open = {name: asyncio.Event() for name in PLUGS}
        for event in self._open.values():
            event.set()

    def turn(self, name: str, closed: bool) -> None:
        """Close or open one. Raises RequestRefused (NOT_FOUND)."""
        if name not in self._open:
            raise RequestRefused(ErrorCode.NOT_FOUND, f"there is no plug {name!r}; there are {', '.join(PLUGS)}")
        if closed:
            self._open[name].clear()
        else:
            self._open[name].set()

    def closed(self, name: str) -> bool:
        """Is it plugged?"""
        return not self._open[name].is_set()

    async def passed(self, name: str) -> None:
        """Wait while it is plugged."""
        if self._open[name].is_set():
            return
        try:
            async with asyncio.timeout(PLUG_S_MAX):
                await self._open[name].wait()
        except TimeoutError:
            return


class Parts(Protocol):
    """The controller, as far as requests need it. pushes: of the scheduler's session, None while there is none."""

    config: ControllerConfig
    instance_id: str
    engine: Engine
    access: Access
    clock: AwakeClock
    plugs: Plugs
    ledger: Ledger
    role: RoleDriver
    sessions: Sessions
    workers: Workers
    pushes: SchedulerPushes | None
    status: Status

    def after_join(self, session: Session) -> None:
        """To be called once the join's answer is on its way."""


class Requests:
    """The handler of one connection."""

    def __init__(self, controller: Parts, connection: Connection) -> None:
        self._c = controller
        self._connection = connection

    async def handle(self, message: Message) -> Body:
        """Answer one request. Raises RequestRefused, Redirected; anything else is a bug."""
        self._c.access.check(self._connection, message, self._c.clock.now_s())
        match message:
            case CtrlStatus():
                await self._c.plugs.passed("ctrlstatus")
                return await self._c.status.answer(message)
            case Heartbeat():
                await self._c.plugs.passed("heartbeat")
                return self._heartbeat(message)
            case GateSet():
                return self._gate(message)
            case PushPlug():
                self._c.plugs.turn(message.name, message.closed)
                log.warning("plug.turned", plug=message.name, closed=message.closed)
                return Done()
            case Join():
                await self._c.plugs.passed("join")
                return self._join(message)
            case _:
                return await self._as_primary(message)

    async def _as_primary(self, message: Message) -> Body:
        self._primary_only()
        match message:
            case JobSubmit():
                await self._c.plugs.passed("submit")
                return await self._submit(message)
            case JobQuery():
                return self._query(message)
            case JobDispatch():
                self._c.sessions.heard(message.session_id, self._connection, HostRole.SCHEDULER)
                return Done(index=await self._c.workers.dispatch(message))
            case PushAck():
                self._c.sessions.heard(message.session_id, self._connection, HostRole.SCHEDULER)
                assert self._c.pushes is not None, "a scheduler session has its pushes"
                self._c.pushes.acted(message.seq)
                return Done()
            case Resync():
                self._c.sessions.heard(message.session_id, self._connection, HostRole.SCHEDULER)
                assert self._c.pushes is not None, "a scheduler session has its pushes"
                self._c.pushes.send_all(self._c.config.dispatch_max)
                return Done()
            case JobStateReport():
                session = self._c.sessions.heard(message.session_id, self._connection, HostRole.WORKER)
                if message.worker != session.name:
                    raise RequestRefused(ErrorCode.DENIED, f"worker {session.name} cannot report for {message.worker}")
                return Done(index=await self._c.workers.report(session, message))
            case StepDown():
                return await self._step_down(message)
            case _:
                raise RequestRefused(ErrorCode.UNSUPPORTED, f"a controller does not serve {message.opcode.name}")

    def _primary_only(self) -> None:
        if self._c.role.role() is not Role.PRIMARY:
            leader = self._c.role.leader
            if leader is None:
                raise Redirected("", "", self._c.role.term)
            raise Redirected(leader.address, leader.controller_id, leader.term)

    # ------------------------------------------------------------ sessions

    def _join(self, message: Join) -> Joined:
        """The checks of docs/rules.md S3, the ones that no retry can change first."""
        config = self._c.config
        if message.controller_id and message.controller_id != config.controller_id:
            text = f"this is controller {config.controller_id}, you join {message.controller_id}"
            raise RequestRefused(ErrorCode.WRONG_CONTROLLER, text)
        pinned = message.host_role is HostRole.SCHEDULER
        if pinned and not message.controller_id:
            raise RequestRefused(ErrorCode.WRONG_CONTROLLER, "a scheduler names the one controller that it serves")
        self._primary_only()
        if (pinned or message.term) and message.term != self._c.role.term:
            raise RequestRefused(ErrorCode.WRONG_TERM, f"this is term {self._c.role.term}, you join term {message.term}")
        if not message.name:
            raise RequestRefused(ErrorCode.MALFORMED, "a session needs a name")
        session = self._c.sessions.join(self._connection, message)
        # The answer goes out in the loop's next turn, by a callback that is queued behind this one: hence the turn after that.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._c.after_join, session)
        return Joined(
            session_id=session.session_id,
            controller_id=config.controller_id,
            instance_id=self._c.instance_id,
            term=self._c.role.term,
            heartbeat_ms=config.heartbeat_ms,
            session_timeout_ms=config.session_timeout_ms,
        )

    def _heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        role = self._c.role.role()
        if role is Role.PRIMARY:
            self._c.sessions.heard(message.session_id, self._connection)
        return HeartbeatReply(role=role.value, term=self._c.role.term)

    # ------------------------------------------------------------ jobs

    async def _submit(self, message: JobSubmit) -> Done:
        spec = Submitted(message.job_id, message.command, message.slots, message.rerunnable, message.constraint)
        if self._c.ledger.table.count(*OPEN_STATES) >= OPEN_JOBS_MAX:
            raise RequestRefused(
                ErrorCode.LIMIT, f"{OPEN_JOBS_MAX} jobs are open, which is the limit; submit when some have ended"
            )
        index = await self._c.ledger.propose(frozenset({message.job_id}), lambda table: admit_submit(table, spec))
        return Done(index=index)

    def _query(self, message: JobQuery) -> JobList:
        table = self._c.ledger.table
        limit, offset = min(max(0, message.limit), QUERY_LIMIT_MAX), max(0, message.offset)
        if message.job_ids:
            found = [job for job_id in message.job_ids if (job := table.get(job_id)) is not None]
            return JobList(jobs=tuple(views(found[offset : offset + limit])), total=len(found))
        return JobList(jobs=tuple(views(table.page(offset, limit))), total=len(table))

    # ------------------------------------------------------------ operators

    async def _step_down(self, message: StepDown) -> Done:
        log.warning("step_down.asked", term=self._c.role.term, hold_ms=message.hold_ms)
        await self._c.engine.resign(self._c.role.term, min(max(0, message.hold_ms), HOLD_MS_MAX))
        return Done()

    def _gate(self, message: GateSet) -> Done:
        try:
            gate = gate_named(message.gate)
        except ConfigError as error:
            raise RequestRefused(ErrorCode.NOT_FOUND, str(error)) from error
        log.warning("gate.turned", gate=message.gate, closed=message.closed, detail=message.detail)
        self._c.role.turn_gate(gate, message.closed, message.detail)
        return Done()
