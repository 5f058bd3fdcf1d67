"""A connection pinned to one controller and one term: it ends rather than change (docs/rules.md S3, S4)."""

from __future__ import annotations

from collections.abc import Callable

from xce_supervisor.link.connection import Answer, Connection
from xce_supervisor.link.limits import DEFAULT_LIMITS, Limits
from xce_supervisor.link.session import Lost, LostKind, enter, watch
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import Join, Joined, Message

__all__ = ["Lost", "LostKind", "PinnedConnection"]


class PinnedConnection:
    """A joined session with one controller. It never reconnects; when `watch` returns, it is over for good.

    joined: what the controller answered to the join.
    """

    def __init__(self, connection: Connection, joined: Joined) -> None:
        self.connection = connection
        self.joined = joined

    @staticmethod
    async def open(
        address: str,
        tls: TlsSource | None,
        join: Join,
        *,
        on_push: Callable[[Message], None],
        deadline_s: float,
        limits: Limits = DEFAULT_LIMITS,
    ) -> PinnedConnection:
        """Connect to the one address and join; the deadline, in seconds, is for both together.

        Raises:
            RequestRefused, Redirected, DeadlinePassed, PeerError: as link.session.enter. Nothing stays open.
        """
        return PinnedConnection(*await enter(address, tls, join, on_push=on_push, deadline_s=deadline_s, limits=limits))

    async def request(self, message: Message, deadline_s: float) -> Answer:
        """As Connection.request."""
        return await self.connection.request(message, deadline_s)

    def push(self, message: Message) -> None:
        """As Connection.push."""
        self.connection.push(message)

    def close(self, reason: str) -> None:
        """End the connection gracefully; idempotent."""
        self.connection.close(reason)

    async def watch(self) -> Lost:
        """Keep the session alive and check the role every second; return why it must end. The connection is closed then."""
        lost = await watch(self.connection, self.joined)
        self.connection.close(lost.text)
        return lost
