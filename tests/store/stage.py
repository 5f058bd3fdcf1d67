"""What the conformance suite needs of each engine's store: an address, faults, and healing them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from xce_supervisor.store.engine import Candidate, Deposed, Elected, Engine, LeaderSeen, StoreEvent
from xce_supervisor.store.open import open_engine
from xce_supervisor.testbed.etcd_cluster import EtcdCluster

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


class Store(Protocol):
    """One fresh store. lease_s: of leadership. slack_s: what the engine and this machine may take beyond it."""

    name: str
    url: str
    lease_s: float
    slack_s: float

    def lose(self) -> None:
        """Make it unable to confirm anything, without ending it."""

    def heal(self) -> None:
        """Undo `lose`."""

    def usurp(self) -> None:
        """End the leadership behind the leader's back."""


class SqliteStore:
    """A file of its own. It is lost by a stranger who keeps the write lock."""

    name = "sqlite"
    # A process that was stopped inside a transaction is watched for 0.3 s before it is killed.
    slack_s = 1.5

    def __init__(self, folder: Path, lease_ms: int = 500) -> None:
        self.path = folder / "store.db"
        self.lease_s = lease_ms / 1000
        self.url = f"sqlite://{self.path}?lease_ms={lease_ms}"
        self._lock: sqlite3.Connection | None = None

    def lose(self) -> None:
        self._lock = sqlite3.connect(self.path, isolation_level=None, timeout=5)
        self._lock.execute("BEGIN IMMEDIATE")

    def heal(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def usurp(self) -> None:
        self.execute("UPDATE leader SET nonce = 'somebody else', term = term + 1")

    def execute(self, statement: str, *values: object) -> list[Any]:
        """Run one statement from outside."""
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=5)) as db:
            return db.execute(statement, values).fetchall()


class EtcdStore:
    """A prefix of its own in the session's cluster. It is lost by stopping two of three members."""

    name = "etcd"
    lease_s = 1.0
    # An etcd leader deletes a key up to half a second late, and one that was just elected extends every lease.
    slack_s = 3.0

    def __init__(self, cluster: EtcdCluster) -> None:
        self.cluster = cluster
        self._prefix = f"t-{uuid.uuid4().hex}"
        self.url = cluster.url(self._prefix)

    def lose(self) -> None:
        self.cluster.signal(0, signal.SIGSTOP)
        self.cluster.kill(1)

    def heal(self) -> None:
        self.cluster.heal()

    def usurp(self) -> None:
        assert self._etcdctl("del", f"/{self._prefix}/leader") == "1", "there was no leader key"

    def put(self, key: str, value: str) -> None:
        """Write one key from outside."""
        self._etcdctl("put", f"/{self._prefix}/{key}", value)

    def _etcdctl(self, *words: str) -> str:
        command = ["etcdctl", "--endpoints", f"127.0.0.1:{self.cluster.client_ports[2]}", *words]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()


class Contender:
    """An engine in this process, and what it told."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.instance_id = uuid.uuid4().hex
        self.engine: Engine = open_engine(url)
        self.events: list[tuple[float, StoreEvent]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Contender:
        await self.engine.start(Candidate(self.name, self.instance_id, f"{self.name}:7301"), self._listen)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.engine.close()

    def _listen(self, event: StoreEvent) -> None:
        if isinstance(event, LeaderSeen) and event.leader is not None:
            assert event.leader.instance_id != self.instance_id, "told of itself as of somebody else"
        self.events.append((time.monotonic(), event))
        self._changed.set()

    async def until(self, found: Callable[[], T | None], limit_s: float = 10.0) -> T:
        """Wait until `found` finds something among the events."""
        async with asyncio.timeout(limit_s):
            while (value := found()) is None:
                self._changed.clear()
                await self._changed.wait()
        return value

    async def elected(self, *, above: int = 0, limit_s: float = 10.0) -> int:
        """Wait until it leads in a term above `above`; return the term."""
        return await self.until(lambda: next((term for term in self.terms() if term > above), None), limit_s)

    async def deposed(self, term: int, limit_s: float = 10.0) -> Deposed:
        """Wait until it was deposed from `term`."""
        return await self.until(
            lambda: next((e for _, e in self.events if isinstance(e, Deposed) and e.term == term), None), limit_s
        )

    async def sees(self, controller_id: str, limit_s: float = 10.0) -> None:
        """Wait until the newest leader it saw is this one."""

        def seen() -> bool | None:
            sights = [e.leader for _, e in self.events if isinstance(e, LeaderSeen)]
            return (sights[-1] is not None and sights[-1].controller_id == controller_id) or None if sights else None

        await self.until(seen, limit_s)

    def terms(self) -> list[int]:
        """The terms it was elected in, in order."""
        return [event.term for _, event in self.events if isinstance(event, Elected)]


class Member:
    """A process of its own with an engine in it; see member.py."""

    def __init__(self, url: str, name: str, *faults: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.member", url, name, *faults],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self.lines: list[dict[str, Any]] = []

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill and reap it; what it wrote before is kept."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None and not self._process.stdout.closed:
            self.read()
            self._process.stdout.close()

    def read(self) -> None:
        """Take in what it wrote."""
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read():
            self._rest += chunk
        *whole, self._rest = self._rest.split(b"\n")
        self.lines += [json.loads(line) for line in whole]

    def told(self, event: str) -> list[dict[str, Any]]:
        """The lines of that event so far."""
        self.read()
        return [line for line in self.lines if line["event"] == event]

    async def tells(self, event: str, count: int = 1, limit_s: float = 15.0) -> dict[str, Any]:
        """Wait until it has told `event` `count` times; return that line."""
        async with asyncio.timeout(limit_s):
            while len(lines := self.told(event)) < count:
                await asyncio.sleep(0.01)
        return lines[count - 1]

    async def tells_or_ends(self, event: str, limit_s: float = 15.0) -> int | None:
        """Wait until it has told `event` (None), or has ended (its exit code)."""
        async with asyncio.timeout(limit_s):
            while not self.told(event):
                if self.exit_code is not None:
                    return self.exit_code
                await asyncio.sleep(0.01)
        return None
