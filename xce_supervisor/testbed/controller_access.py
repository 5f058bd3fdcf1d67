"""Which role may use which opcode, by the peer's certificate (docs/rules.md A1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from xce_supervisor.errors import RequestRefused
from xce_supervisor.link.connection import Connection
from xce_supervisor.link.peer import PeerName
from xce_supervisor.wire.words import ErrorCode, HostRole, Join, Message, Opcode

log = structlog.get_logger("controller")

LOG_EVERY_S = 60.0
_LOGGED_MAX = 1024

_SESSION = frozenset({Opcode.JOIN, Opcode.HEARTBEAT, Opcode.CTRL_STATUS})
ALLOWED: dict[HostRole, frozenset[Opcode]] = {
    HostRole.CONTROLLER: frozenset({Opcode.CTRL_STATUS}),
    HostRole.SUPERVISOR: frozenset({Opcode.CTRL_STATUS}),
    HostRole.SCHEDULER: _SESSION | {Opcode.PUSH_ACK, Opcode.RESYNC, Opcode.JOB_DISPATCH, Opcode.JOB_QUERY},
    HostRole.WORKER: _SESSION | {Opcode.JOB_STATE_REPORT},
    HostRole.PROVISIONER: _SESSION,
    HostRole.OPERATOR: _SESSION | {Opcode.JOB_SUBMIT, Opcode.JOB_QUERY, Opcode.STEP_DOWN, Opcode.GATE_SET, Opcode.PUSH_PLUG},
}


@dataclass(slots=True)
class Access:
    """own: our own name, None without TLS: then everything is allowed, which was said loudly at the start."""

    own: PeerName | None
    denied: int = 0
    _logged: dict[str, float] = field(default_factory=dict)

    def check(self, connection: Connection, message: Message, now_s: float) -> None:
        """Raises RequestRefused (DENIED) where the peer's certificate does not allow the message. now_s: any steady clock."""
        if self.own is None:
            return
        why = self._denial(connection.peer, message)
        if why:
            self.denied += 1
            self._log(connection, message.opcode, why, now_s)
            raise RequestRefused(ErrorCode.DENIED, why)

    def _denial(self, peer: PeerName | None, message: Message) -> str:
        assert self.own is not None
        if peer is None:
            return "your certificate names no role; it needs the URI SAN xce://CLUSTER/ROLE/NAME"
        if peer.cluster != self.own.cluster:
            return f"your certificate is of cluster {peer.cluster}, this is {self.own.cluster}"
        if message.opcode not in ALLOWED[peer.role]:
            return f"a {peer.role.name.lower()} may not use {message.opcode.name}"
        if isinstance(message, Join) and message.host_role is not peer.role:
            return f"you join as {message.host_role.name.lower()}, your certificate says {peer.role.name.lower()}"
        # A worker's name decides which jobs it answers for; nobody else may take it.
        if isinstance(message, Join) and peer.role is HostRole.WORKER and message.name != peer.name:
            return f"you join as worker {message.name}, your certificate says {peer.name}"
        return ""

    def _log(self, connection: Connection, opcode: Opcode, why: str, now_s: float) -> None:
        """Once per peer and minute (docs/rules.md A1)."""
        who = str(connection.peer or connection.remote.rpartition(":")[0])
        if now_s - self._logged.get(who, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        if len(self._logged) >= _LOGGED_MAX:
            self._logged.clear()
        self._logged[who] = now_s
        log.warning("opcode.denied", peer=who, opcode=opcode.name, reason=why, denied=self.denied)
