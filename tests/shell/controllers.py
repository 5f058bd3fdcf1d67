"""Real controllers of one store for a test, and peers that speak to them over the real link."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.testbed.stage import PRELUDE, Program, Stage
from xce_supervisor.errors import PeerError
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.testbed.client import Cluster, ctrlstatus
from xce_supervisor.testbed.etcd_cluster import free_ports
from xce_supervisor.wire.words import (
    CtrlStatusReply,
    Done,
    Heartbeat,
    HostRole,
    Join,
    Joined,
    Message,
)

M = TypeVar("M", bound=Message)

CONTROLLER = (
    PRELUDE
    + """
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from xce_supervisor.testbed import controller
from xce_supervisor.testbed.controller_config import ControllerConfig
given["gates"] = tuple(given.get("gates", ()))
try:
    code = controller.serve(ControllerConfig(tls=tls, **given))
except ConfigError as error:
    print(error)
    code = 78
sys.exit(code)
"""
)


@dataclass
class Host:
    """One controller's place; it keeps its address over restarts."""

    name: str
    address: str
    program: Program


class Controllers:
    """Controllers c1, c2, ... on one store. secure: with certificates."""

    def __init__(self, stage: Stage, store: str, count: int = 1, *, secure: bool = True, **config: object) -> None:
        self.stage, self.store, self._secure, self._config = stage, store, secure, config
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.hosts = [Host(f"c{n}", address, self._start(f"c{n}", address)) for n, address in enumerate(addresses, 1)]
        self._operator = stage.tls("operator", "admin") if secure else None

    def _start(self, name: str, address: str) -> Program:
        given: dict[str, object] = {"controller_id": name, "listen": address, "store": self.store, **self._config}
        if self._secure:
            files = self.stage.files("controller", name)
            given["tls"] = [str(files.ca), str(files.cert), str(files.key)]
        return self.stage.start(name, CONTROLLER, given, {})

    def restart(self, host: Host) -> None:
        """Start it again at the same address, once it has ended."""
        host.program.end()
        host.program = self._start(host.name, host.address)

    @property
    def addresses(self) -> list[str]:
        return [host.address for host in self.hosts]

    @property
    def cluster(self) -> Cluster:
        """As an operator sees it."""
        return Cluster(tuple(self.addresses), self._operator)

    async def status(self, host: Host, *, known_version: int = 0, wait_ms: int = 0) -> CtrlStatusReply:
        """One status query."""
        return await ctrlstatus(host.address, self._operator, known_version=known_version, wait_ms=wait_ms)

    async def says(
        self, host: Host, fact: Callable[[CtrlStatusReply], bool], within_s: float = 10.0, *, query_s: float = 2.0
    ) -> CtrlStatusReply:
        """Ask until the status is as wanted."""
        ends_at = time.monotonic() + within_s
        last: object = None
        while True:
            try:
                last = await ctrlstatus(host.address, self._operator, deadline_s=query_s)
                if fact(last):
                    return last
            except PeerError as error:
                last = error
            assert time.monotonic() < ends_at, f"{host.name} did not come to say so within {within_s} s; last: {last}"
            await asyncio.sleep(0.02)

    async def primary(self, within_s: float = 10.0, *, among: Sequence[Host] = (), above: int = 0) -> Host:
        """Wait until one of the running ones says that it is primary, in a term above `above`."""
        ends_at = time.monotonic() + within_s
        while True:
            for host in among or self.hosts:
                if host.program.process.poll() is not None:
                    continue
                try:
                    status = await ctrlstatus(host.address, self._operator, deadline_s=0.5)
                except PeerError:
                    continue
                if status.role == "primary" and status.term > above:
                    return host
            assert time.monotonic() < ends_at, "nobody became primary"
            await asyncio.sleep(0.02)

    def others(self, host: Host) -> list[Host]:
        """All but one."""
        return [each for each in self.hosts if each is not host]

    def kill(self, host: Host) -> None:
        """kill -9, and reap."""
        host.program.signal(signal.SIGKILL)
        host.program.process.wait(10)


@dataclass
class Peer:
    """A connection with, if it joined, a session that is kept alive until `stop_heartbeats`."""

    connection: Connection
    pushes: list[Message] = field(default_factory=list)
    joined: Joined | None = None
    _heart: asyncio.Task[None] | None = None
    roles: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop_heartbeats()
        self.connection.close("the test ends")
        await asyncio.wait([self.connection.closed], timeout=2)

    async def ask(self, message: Message, deadline_s: float = 5.0) -> Message | Done:
        """One request."""
        return await self.connection.request(message, deadline_s)

    async def join(self, role: HostRole, name: str, **more: object) -> Joined:
        """Join, and begin to send heartbeats."""
        reply = await self.ask(Join(host_role=role, name=name, **more))  # type: ignore[arg-type]
        assert isinstance(reply, Joined)
        self.joined = reply
        self._heart = asyncio.get_running_loop().create_task(self._beat(reply))
        return reply

    @property
    def session_id(self) -> str:
        assert self.joined is not None
        return self.joined.session_id

    async def _beat(self, joined: Joined) -> None:
        while True:
            await asyncio.sleep(joined.heartbeat_ms / 1000)
            try:
                reply = await self.ask(Heartbeat(session_id=joined.session_id), 1.0)
                self.roles.append(reply.role)  # type: ignore[union-attr]
            except PeerError:
                continue

    def stop_heartbeats(self) -> None:
        """Fall silent, with the connection open."""
        if self._heart is not None:
            self._heart.cancel()
            self._heart = None

    async def pushed(self, kind: type[M], fact: Callable[[M], bool] = lambda _: True, within_s: float = 5.0) -> M:
        """Wait for a push of that kind for which `fact` holds; return the first."""
        ends_at = time.monotonic() + within_s
        while True:
            for message in self.pushes:
                if isinstance(message, kind) and fact(message):
                    return message
            assert time.monotonic() < ends_at, f"no such {kind.__name__} came; there came {self.pushes}"
            await asyncio.sleep(0.005)


async def peer(controllers: Controllers, host: Host, role: str, name: str) -> Peer:
    """Connect to one controller with the certificate of role/name."""
    pushes: list[Message] = []
    tls = controllers.stage.tls(role, name) if controllers._secure else None
    return Peer(await connect(host.address, tls, deadline_s=5.0, on_push=pushes.append), pushes)


def sqlite_url(folder: Path, lease_ms: int = 10_000) -> str:
    """A fresh sqlite store. The lease is long, so that a machine busy with other things costs no leader its lease; a test in
    which a lease has to run out asks for a short one."""
    return f"sqlite://{folder / 'store.db'}?lease_ms={lease_ms}"
