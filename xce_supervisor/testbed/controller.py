"""The reference controller: one process that campaigns, serves the primary's opcodes while it is primary, and redirects else.

It is the executable specification of the controller's side of docs/protocol.md and docs/rules.md. The parts:

    controller_role      drives core.promotion: elected -> gates -> NOOP -> applied -> primary
    controller_ledger    propose, commit, apply: every answer about a job rests on a committed fact
    controller_sessions  who has joined;  controller_pushes  what the scheduler is told;  controller_workers  who runs what
    controller_status    ctrlstatus and its long poll;  controller_access  which certificate may do what
    controller_requests  one method an opcode

This file builds them and tells each what the others did.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from enum import IntEnum
from typing import Any

import structlog
import uvloop

from xce_supervisor.core import promotion
from xce_supervisor.core.jobs import Job, JobState
from xce_supervisor.core.promotion import Policy
from xce_supervisor.core.words import NS_PER_S, Role
from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.link.connection import Connection, Handler
from xce_supervisor.link.peer import PeerName
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.store.engine import Candidate
from xce_supervisor.store.open import open_engine
from xce_supervisor.testbed.controller_access import Access
from xce_supervisor.testbed.controller_clock import TICK_S, AwakeClock
from xce_supervisor.testbed.controller_config import ControllerConfig, gate_named, listen_address
from xce_supervisor.testbed.controller_ledger import Ledger
from xce_supervisor.testbed.controller_pushes import SchedulerPushes
from xce_supervisor.testbed.controller_requests import Plugs, Requests
from xce_supervisor.testbed.controller_role import RoleDriver
from xce_supervisor.testbed.controller_sessions import Session, Sessions
from xce_supervisor.testbed.controller_status import Status
from xce_supervisor.testbed.controller_workers import Workers
from xce_supervisor.wire.words import CtrlStatusReply, HostRole, SchedulerExit, SchedulerSession

log = structlog.get_logger("controller")

WORKERS_JUDGED_S = 0.5
TLS_LOOKED_AT_S = 10.0


class ExitCode(IntEnum):
    """Why the controller ended. docs/controller.md has the same table."""

    ASKED = 0
    BUG = 70
    CONFIG = 78


def serve(config: ControllerConfig) -> int:
    """Run one controller until SIGTERM or SIGINT and return its exit code. Raises ConfigError for what an operator got wrong."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_controller(config))


async def run_controller(config: ControllerConfig) -> int:
    """Run one controller until SIGTERM or SIGINT and return its exit code. Call it in the main thread.

    Raises:
        ConfigError: an address, the store or the TLS files cannot be used.
    """
    controller = Controller(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.end)
    loop.add_signal_handler(signal.SIGHUP, controller.reload_tls)
    loop.set_exception_handler(controller.on_loop_error)
    try:
        return await controller.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


class Controller:
    """One controller's life in one process."""

    def __init__(self, config: ControllerConfig) -> None:
        config.check()
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self._tls = TlsSource(config.tls) if config.tls is not None else None
        self.access = Access(_own_name(config, self._tls))
        self.clock = AwakeClock()
        self.plugs = Plugs()
        self.engine = open_engine(config.store)
        self.ledger = Ledger(self.engine, self._job_changed)
        policy = Policy(
            refusal_patience_ns=int(config.refusal_patience_s * NS_PER_S),
            refusal_hold_ms=int(config.refusal_hold_s * 1000),
            steps_down=config.steps_down,
        )
        self.role = RoleDriver(self.engine, self.ledger, policy, self, self._on_bug)
        self.sessions = Sessions(self.clock, config.session_timeout_ms, self._session_ended, self._session_changed)
        self.workers = Workers(self.ledger, self.sessions, self.clock, config.worker_lost_s)
        self.pushes: SchedulerPushes | None = None
        self.status = Status(self.role.confirm, self._build_status)
        self._server = Server(self._tls, config.limits, self._accept)
        self._address = config.advertise
        self._ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Serve until told to end. Raises ConfigError."""
        host, port = listen_address(self.config.listen)
        await self._server.start(host, port)
        address = self._address = self.config.advertise or f"{f'[{host}]' if ':' in host else host}:{self._server.port}"
        if self._tls is None:
            log.warning("tls.missing", reason="anybody who can reach this port may do anything", listen=address)
        log.info("controller.listening", controller=self.config.controller_id, instance=self.instance_id, address=address)
        for name in self.config.gates:
            self.role.turn_gate(gate_named(name), True, "closed at the start")
        chores: list[asyncio.Task[None]] = []
        try:
            candidate = Candidate(self.config.controller_id, self.instance_id, address)
            await self.engine.start(candidate, self.role.on_store_event)
            self.role.start()
            loop = asyncio.get_running_loop()
            chores = [loop.create_task(work) for work in (self._judge_peers(), self._judge_workers(), self._look_at_tls())]
            for chore in chores:
                chore.add_done_callback(self._chore_ended)
            return await self._ending
        finally:
            await self._close(chores)

    async def _close(self, chores: list[asyncio.Task[None]]) -> None:
        """Give up the role first, so that the scheduler hears of it on a connection that is still there."""
        phase = self.role.state.phase
        if not isinstance(phase, promotion.Standby):
            self.role.on_event(promotion.Lost(phase.term, promotion.LossKind.GIVEN, "the controller ends"))
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        await self.role.close()
        await self.engine.close()
        await self._server.close()
        log.info("controller.ended", controller=self.config.controller_id)

    def end(self) -> None:
        """Ask for the end."""
        if not self._ending.done():
            self._ending.set_result(ExitCode.ASKED)

    def _on_bug(self, error: BaseException) -> None:
        log.error("controller.failed", exc_info=error)
        if not self._ending.done():
            self._ending.set_result(ExitCode.BUG)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: what is marked as a bug ends the process, the rest (a transport's) is told."""
        bug = context.get("bug")
        if isinstance(bug, BaseException):
            self._on_bug(bug)
        else:
            log.error("loop.failed", what=context.get("message", ""), exc_info=context.get("exception"))

    def _chore_ended(self, chore: asyncio.Task[None]) -> None:
        error = None if chore.cancelled() else chore.exception()
        if error is not None:
            self._on_bug(error)

    # ------------------------------------------------------------ chores

    async def _judge_peers(self) -> None:
        """Also what keeps the awake clock awake."""
        while True:
            self.clock.now_s()
            self.sessions.judge_all()
            self.role.role()
            await asyncio.sleep(TICK_S)

    async def _judge_workers(self) -> None:
        while True:
            await asyncio.sleep(WORKERS_JUDGED_S)
            if self.role.role() is Role.PRIMARY:
                await self.workers.judge()

    async def _look_at_tls(self) -> None:
        """Certificates are taken over without a restart (docs/rules.md A2)."""
        while self._tls is not None:
            await asyncio.sleep(TLS_LOOKED_AT_S)
            self.reload_tls()

    def reload_tls(self) -> None:
        """Take over changed TLS files; a pair that does not match is told and left."""
        if self._tls is None:
            return
        warning = self._tls.reload()
        if warning is not None:
            log.warning("tls.not_reloaded", reason=warning)

    # ------------------------------------------------------------ role (controller_role.Serving)

    def promoted(self, term: int) -> None:
        """Begin to serve as primary."""
        self.workers.promoted(term)

    def demoted(self, term: int, reason: str) -> None:
        """Stop serving as primary: the scheduler is asked to go, and everybody has to join elsewhere."""
        scheduler = self.sessions.scheduler()
        if scheduler is not None and not self.plugs.closed("exit-push"):
            try:
                scheduler.connection.push(SchedulerExit(reason=f"demoted: {reason}"))
            except PeerError as error:
                log.warning("push.failed", peer=scheduler.name, opcode="SCHEDULER_EXIT", reason=str(error))
        self.sessions.end_all()

    def role_changed(self) -> None:
        """Answer the long polls."""
        self.status.changed()

    # ------------------------------------------------------------ sessions and jobs

    def after_join(self, session: Session) -> None:
        """Called once the join's answer is on its way: what it pushes must not come before."""
        if session.connection.closed.done() or self.role.role() is not Role.PRIMARY:
            return
        if session.role is HostRole.SCHEDULER and self.sessions.scheduler() is session and self.pushes is not None:
            self.pushes.send_all(self.config.dispatch_max)
        elif session.role is HostRole.WORKER and self.sessions.worker(session.name) is session:
            self.workers.joined(session)

    def _session_changed(self, session: Session) -> None:
        if session.role is HostRole.SCHEDULER:
            if self.sessions.scheduler() is session and self.pushes is None:
                self.pushes = SchedulerPushes(session, self.role.term, self.clock, self.ledger.table, self.workers.views)
            self.status.changed()
        elif session.role is HostRole.WORKER and self.pushes is not None:
            self.pushes.workers_changed()

    def _session_ended(self, session: Session) -> None:
        if session.role is HostRole.SCHEDULER:
            if self.pushes is not None:
                self.pushes.stop()
            self.pushes = None
        elif session.role is HostRole.WORKER:
            self.workers.ended(session)

    def _job_changed(self, job: Job) -> None:
        """A fact was applied; on a standby nobody is there to be told."""
        if self.role.state.role is not Role.PRIMARY:
            return
        self.workers.job_changed(job)
        if self.pushes is not None:
            self.pushes.job_changed(job.job_id)

    def _accept(self, connection: Connection) -> Handler:
        return Requests(self, connection).handle

    # ------------------------------------------------------------ status

    def _build_status(self, version: int) -> CtrlStatusReply:
        role, leader, table, refused = self.role.role(), self.role.leader, self.ledger.table, self.role.state.refused_by
        primary = role is Role.PRIMARY
        return CtrlStatusReply(
            controller_id=self.config.controller_id,
            instance_id=self.instance_id,
            role=role.value,
            term=self.role.term,
            primary_address=self._address if primary else (leader.address if leader else ""),
            primary_id=self.config.controller_id if primary else (leader.controller_id if leader else ""),
            gate=refused.gate.value if refused else "",
            gate_detail=refused.detail if refused else "",
            quorum_age_ms=self.role.quorum_age_ms(),
            commit_index=self.ledger.applied,
            scheduler=self.pushes.view() if self.pushes is not None else SchedulerSession(joined=False),
            jobs_pending=table.count(JobState.PENDING),
            jobs_running=table.count(JobState.DISPATCHED, JobState.RUNNING),
            jobs_finished=table.count(JobState.DONE, JobState.FAILED),
            workers=sum(session.alive for session in self.sessions.workers()),
            version=version,
            long_poll=True,
            uptime_ms=self.clock.uptime_ms(),
            loop_gap_ms=self.clock.gap_ms(),
            engine=self.engine.name,
        )


def _own_name(config: ControllerConfig, tls: TlsSource | None) -> PeerName | None:
    if tls is None:
        return None
    name, path = tls.name, config.tls.cert if config.tls is not None else ""
    if name is None or name.role is not HostRole.CONTROLLER or name.name != config.controller_id:
        raise ConfigError(
            f"{path}: the certificate names {name or 'no XCE peer'}, this is controller {config.controller_id};"
            f" make one with: xce-testbed pki DIR controller/{config.controller_id}"
        )
    return name
