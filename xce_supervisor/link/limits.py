"""What one connection, and one server with all of its connections, may use (docs/rules.md A3)."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """frame_bytes: longest frame taken or sent, bytes. handshake_s: from accept to the end of the TLS handshake, seconds.
    idle_s: a server ends a connection that completed no frame for so long and waits for no answer, seconds.
    connections: at once, handshakes included. per_peer: of those, from one address, and then from one certificate name.
    in_flight: requests of one connection that wait for their answer, in each direction.
    send_queue_bytes: queued for a peer that does not read, bytes; one frame is always taken when the queue is empty.
    buffered_bytes: received parts of frames and queued sends of all connections of one server together, bytes.
    """

    frame_bytes: int = 64 * MIB
    handshake_s: float = 5.0
    idle_s: float = 60.0
    connections: int = 1024
    per_peer: int = 512
    in_flight: int = 64
    send_queue_bytes: int = 16 * MIB
    buffered_bytes: int = 256 * MIB

    def __post_init__(self) -> None:
        assert min(self.frame_bytes, self.in_flight, self.connections, self.per_peer, self.send_queue_bytes) > 0
        assert self.handshake_s > 0 and self.idle_s > 0 and self.buffered_bytes >= self.frame_bytes


DEFAULT_LIMITS = Limits()


class Budget:
    """The bytes that all connections of one server hold together. Connections add to it and take back what they added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def add(self, delta: int) -> bool:
        """Book `delta` bytes (less than 0 to give back). Returns False if the limit is passed; booked all the same."""
        self.held += delta
        assert self.held >= 0, "more given back than booked"
        return self.held <= self.limit


@dataclass(slots=True)
class Counters:
    """What a server, or one client connection, has seen since it began. Only rises."""

    accepted: int = 0
    refused_connections: int = 0  # over a limit, before TLS or after
    failed_handshakes: int = 0
    requests: int = 0
    pushes: int = 0
    refused_requests: int = 0
    denied: int = 0  # of those: opcodes that the peer's role may not use (A1)
    unsupported: int = 0
    malformed: int = 0
    late_replies: int = 0
    idle_ended: int = 0
    handler_bugs: int = 0
