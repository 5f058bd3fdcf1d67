"""A whole reference cluster of real processes for tests: controllers on one sqlite store, and who leads it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.testbed.stage import PRELUDE, Program, Stage
from xce_supervisor.errors import PeerError
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.testbed import client
from xce_supervisor.testbed.client import Cluster
from xce_supervisor.wire.words import CtrlStatusReply

CONTROLLER = (
    PRELUDE
    + """
from xce_supervisor.testbed import controller
from xce_supervisor.testbed.controller_config import ControllerConfig
try:
    code = controller.serve(ControllerConfig(tls=tls, **given))
except ConfigError as error:
    print(error)
    code = 78
sys.exit(code)
"""
)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. They are held open together, so that they differ."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@dataclass(slots=True)
class RealCluster:
    """Controllers c1, c2, ... on one sqlite file, started by `start`."""

    stage: Stage
    count: int = 3
    worker_lost_s: float = 3.0
    addresses: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)

    def start(self) -> RealCluster:
        """Start all controllers."""
        ports = free_ports(self.count)
        self.addresses = {f"c{number + 1}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
        for name in self.addresses:
            self.start_one(name)
        return self

    def start_one(self, name: str) -> Program:
        """Start one controller, again if it was there before."""
        files = self.stage.files("controller", name)
        given: dict[str, object] = {
            "controller_id": name,
            "listen": self.addresses[name],
            "store": f"sqlite://{self.stage.directory}/store.db",
            "tls": [str(files.ca), str(files.cert), str(files.key)],
            "worker_lost_s": self.worker_lost_s,
        }
        self.programs[name] = self.stage.start(name, CONTROLLER, given, {})
        return self.programs[name]

    @property
    def operator(self) -> TlsSource:
        """An operator's certificate."""
        return self.stage.tls("operator", "tester")

    @property
    def client(self) -> Cluster:
        """For the functions of testbed.client."""
        return Cluster(tuple(self.addresses.values()), self.operator)

    async def statuses(self, names: Sequence[str] = ()) -> dict[str, CtrlStatusReply]:
        """What each controller says that answers."""
        found: dict[str, CtrlStatusReply] = {}
        for name in names or self.addresses:
            try:
                found[name] = await client.ctrlstatus(self.addresses[name], self.operator, deadline_s=1.0)
            except PeerError:
                continue
        return found

    async def primary(self, than: Callable[[CtrlStatusReply], bool] = lambda _: True, within_s: float = 10.0) -> CtrlStatusReply:
        """Wait for a primary of which `than` is true."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + within_s
        while True:
            found = await self.statuses()
            for status in found.values():
                if status.role == "primary" and than(status):
                    return status
            assert loop.time() < give_up_at, f"no such primary within {within_s} s: {found}"
            await asyncio.sleep(0.05)
