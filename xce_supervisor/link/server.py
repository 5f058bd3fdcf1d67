"""The accepting side: limits before TLS, an exact reason for every refusal, one handler a connection (docs/rules.md A1, A3).

The accept loop is our own, because asyncio's tells nobody why a handshake failed, and holds one TLS context for good.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable

import structlog

from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.link.connection import Connection, Handler
from xce_supervisor.link.limits import Budget, Counters, Limits
from xce_supervisor.link.peer import peer_name
from xce_supervisor.link.stream import lost_reason, set_options
from xce_supervisor.link.tls import TlsSource

log = structlog.get_logger("link")

_BACKLOG = 512
_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S = 0.1  # how long accepting rests when the process is out of descriptors: others are served meanwhile
_GRACE_S = 1.0  # for handlers and unsent replies when the server closes
_LOG_EVERY_S = 60.0  # one refused peer is logged once in so long, with a count
_LOGGED_PEERS_MAX = 1024


class Server:
    """Accepts connections and serves each by the handler that `accept` returns for it.

    tls: None for plain TCP. accept: called with each connection once its peer is known; may raise PeerError to turn it away.
    """

    def __init__(self, tls: TlsSource | None, limits: Limits, accept: Callable[[Connection], Handler]) -> None:
        self._tls = tls
        self._limits = limits
        self._accept = accept
        self._budget = Budget(limits.buffered_bytes)
        self._listening: socket.socket | None = None
        self._hosts: dict[Connection, str] = {}  # every accepted socket, its handshake done or not
        self._named: dict[Connection, str] = {}
        self._per_peer: Counter[str] = Counter()  # by address, and by certificate name
        self._opening: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._logged: dict[str, tuple[float, int]] = {}
        self.counters = Counters()
        self.port = 0

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All that have not ended, those in their handshake included."""
        return tuple(self._hosts)

    async def start(self, host: str, port: int) -> None:
        """Listen on host (a name or address; the first that it resolves to) and port (0: any free one, then in `port`).

        Raises:
            ConfigError: the address cannot be resolved or used.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, proto, _, target = found[0]
            sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(target)
                sock.listen(_BACKLOG)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}: free it, or give another address"
            ) from error
        self._listening = sock
        self.port = sock.getsockname()[1]
        self._loops = [loop.create_task(self._accept_loop(sock)), loop.create_task(self._end_idle_ones())]

    async def close(self) -> None:
        """Stop accepting, end every connection (running handlers and unsent replies get a second). Idempotent."""
        for task in (*self._loops, *self._opening):
            task.cancel()
        await asyncio.gather(*self._loops, *self._opening, return_exceptions=True)
        self._loops = []
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        ending = list(self._hosts)
        for connection in ending:
            connection.close("the server closes")
        if ending:
            await asyncio.wait([connection.closed for connection in ending], timeout=2 * _GRACE_S)
            await asyncio.gather(*(connection.finish(_GRACE_S) for connection in ending))

    # ---------------------------------------------------------------- accepting

    async def _accept_loop(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _OUT_OF:
                    log.error("accept.failed", reason=error.strerror, delay_s=_RETRY_S)
                    await asyncio.sleep(_RETRY_S)
                continue  # else the peer was gone before it was accepted
            host = str(address[0])
            refusal = self._over_limit(host)
            if refusal:
                sock.close()
                self.counters.refused_connections += 1
                self._told(host, "connection.refused", refusal)
                continue
            task = loop.create_task(self._open(sock, host, f"{host}:{address[1]}"))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _over_limit(self, host: str) -> str:
        if len(self._hosts) >= self._limits.connections:
            return f"{self._limits.connections} connections are open, which is the limit"
        if self._per_peer[host] >= self._limits.per_peer:
            return f"{self._limits.per_peer} connections of this address are open, which is the limit"
        return ""

    async def _open(self, sock: socket.socket, host: str, remote: str) -> None:
        """Bring one accepted socket through its handshake. `_welcome` goes on from there, within the loop's very turn."""
        connection = Connection(remote, self._limits, on_open=self._welcome, budget=self._budget, counters=self.counters)
        self._hosts[connection] = host
        self._per_peer[host] += 1
        connection.closed.add_done_callback(lambda closed: self._forget(connection, closed.result()))
        context = self._tls.server() if self._tls is not None else None
        handshake_s = self._limits.handshake_s if context is not None else None
        try:
            set_options(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection.stream, sock, ssl=context, ssl_handshake_timeout=handshake_s
            )
        except (OSError, ssl.SSLError) as error:
            sock.close()
            self.counters.failed_handshakes += 1
            self._told(host, "handshake.failed", handshake_cause(error))
            self._forget(connection, "")
        except BaseException:
            sock.close()
            self._forget(connection, "")
            raise

    def _welcome(self, connection: Connection) -> None:
        """The handshake is done: learn the peer's name, hold its limit, and ask the program for a handler."""
        host = self._hosts[connection]
        try:
            connection.peer = peer_name(connection.certificate)
            if connection.peer is not None:
                named = str(connection.peer)
                if self._per_peer[named] >= self._limits.per_peer:
                    raise PeerError(f"{self._limits.per_peer} connections of this name are open, which is the limit")
                self._per_peer[named] += 1
                self._named[connection] = named
            connection.serve(self._accept(connection))
        except PeerError as error:
            self.counters.refused_connections += 1
            self._told(host, "connection.refused", str(error))
            connection.close(str(error))
            return
        self.counters.accepted += 1
        log.debug("connection.accepted", remote=connection.remote, peer=str(connection.peer))

    def _forget(self, connection: Connection, reason: str) -> None:
        """Give back what the connection held of the limits; idempotent."""
        for holder in (self._hosts.pop(connection, None), self._named.pop(connection, None)):
            if holder is not None:
                self._per_peer[holder] -= 1
                if not self._per_peer[holder]:
                    del self._per_peer[holder]
        if reason:
            log.debug("connection.ended", remote=connection.remote, peer=str(connection.peer), reason=reason)

    async def _end_idle_ones(self) -> None:
        """End connections without a whole frame for idle_s. One that trickles is idle; one that waits for a reply is not."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.idle_s / 4)
            oldest = loop.time() - self._limits.idle_s
            for connection in list(self._hosts):
                if connection.last_frame_at < oldest and (connection.stream.partial or not connection.waits):
                    self.counters.idle_ended += 1
                    connection.close(f"idle for {self._limits.idle_s:g} s")

    def _told(self, host: str, event: str, reason: str) -> None:
        """Log what was refused: at once, then once a minute and peer with a count (a flood of peers must not be one of lines)."""
        now = asyncio.get_running_loop().time()
        since, count = self._logged.get(host, (now - _LOG_EVERY_S, 0))
        if now - since < _LOG_EVERY_S:
            self._logged[host] = (since, count + 1)
            return
        if len(self._logged) >= _LOGGED_PEERS_MAX:
            self._logged.clear()
        self._logged[host] = (now, 0)
        log.warning(event, remote=host, reason=reason, unlogged=count)


def handshake_cause(error: OSError) -> str:
    """Why a handshake that we accepted failed, in words for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client shows no certificate"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "the client does not speak TLS"
    if isinstance(error, ConnectionAbortedError):
        return "the client was silent for too long"
    if isinstance(error, ConnectionResetError):
        return "the client went away during the handshake; it may refuse our certificate"
    return lost_reason(error)
