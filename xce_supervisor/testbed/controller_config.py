"""What one reference controller is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from xce_supervisor.core.promotion import Gate
from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.link.limits import Limits
from xce_supervisor.link.peer import split_address
from xce_supervisor.link.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """One controller.

    controller_id: its name, e.g. "c1"; with TLS the certificate must say the same. listen: "host:port", port 0 for any free
    one. advertise: "host:port" that redirects name, "" for what it listens on. store: "sqlite://..." or "etcd://...". tls: None
    is allowed and loud (docs/rules.md A1). heartbeat_ms, session_timeout_ms: of sessions, milliseconds (docs/rules.md S3).
    worker_lost_s: how long a worker that is gone is waited for, seconds. dispatch_max: per scheduling cycle. steps_down: False
    is the mode of a controller that stays primary without its quorum (docs/rules.md S7). gates: closed from the start.
    refusal_patience_s, refusal_hold_s: how long a gate may hold back a won election, and how long it is left to others then.
    """

    controller_id: str
    listen: str
    store: str
    advertise: str = ""
    tls: TlsFiles | None = None
    heartbeat_ms: int = 1000
    session_timeout_ms: int = 3000
    worker_lost_s: float = 10.0
    dispatch_max: int = 50
    steps_down: bool = True
    gates: tuple[str, ...] = ()
    refusal_patience_s: float = 1.0
    refusal_hold_s: float = 5.0
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raises ConfigError naming the field, the reason and what to do."""
        if not 1 <= len(self.controller_id) <= 63:
            raise ConfigError(f"controller id {self.controller_id!r}: give 1 to 63 characters")
        listen_address(self.listen)
        if self.advertise:
            try:
                split_address(self.advertise)
            except PeerError as error:
                raise ConfigError(f"advertise: {error}") from error
        if self.heartbeat_ms < 10 or self.session_timeout_ms < 2 * self.heartbeat_ms:
            raise ConfigError(
                f"session_timeout_ms={self.session_timeout_ms} with heartbeat_ms={self.heartbeat_ms}: a session must outlast"
                " two heartbeats of at least 10 ms"
            )
        if self.worker_lost_s <= 0 or self.refusal_patience_s < 0 or self.refusal_hold_s < 0:
            raise ConfigError("worker_lost_s must be above 0 s; refusal_patience_s and refusal_hold_s must not be below 0 s")
        if not 1 <= self.dispatch_max <= 10_000:
            raise ConfigError(f"dispatch_max={self.dispatch_max}: give 1 to 10000")
        for gate in self.gates:
            gate_named(gate)


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port", "[v6]:port" or "host:0". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigError(f"listen {text!r}: write HOST:PORT, e.g. 127.0.0.1:7301; port 0 takes any free one")
    return host, int(port)


def gate_named(name: str) -> Gate:
    """Return the gate of that name. Raises ConfigError."""
    try:
        return Gate(name)
    except ValueError as error:
        raise ConfigError(f"gate {name!r}: there is none of that name; there are {', '.join(Gate)}") from error
