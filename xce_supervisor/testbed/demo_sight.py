"""What the demo sees of its cluster while it runs: every controller's status, and every scheduler process that is alive.

Controllers are asked by long poll, so that a change is seen within milliseconds. Schedulers are found by the marks in their
environment, whoever started them and whoever knows of them, twenty times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from xce_supervisor.errors import PeerError
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.process.table import environment
from xce_supervisor.testbed.demo_stage import Host, Stage
from xce_supervisor.wire.words import CtrlStatus, CtrlStatusReply, Message

_WAIT_MS = 250
_ASK_S = 1.0
_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """A scheduler process. term: of its binding. host: the name of the controller it is pinned to."""

    pid: int
    term: int
    host: str


@dataclass(slots=True)
class Sight:
    """statuses: the last answer by host name; a controller that does not answer has none. schedulers: alive at the last look."""

    stage: Stage
    statuses: dict[str, CtrlStatusReply] = field(default_factory=dict)
    schedulers: tuple[Seen, ...] = ()
    per_term_max: int = 0
    changed: Callable[[], None] = lambda: None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """Start to look."""
        tls = self.stage.tls()
        self._tasks = [asyncio.ensure_future(self._ask(host, tls)) for host in self.stage.hosts]
        self._tasks.append(asyncio.ensure_future(self._sample()))

    async def end(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, fact: Callable[[], object], within_s: float) -> bool:
        """Wait until fact() is true, looked at after every change. Returns False when it was not within `within_s` seconds."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + within_s
        while not fact():
            left = give_up - loop.time()
            if left <= 0:
                return False
            self._event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), min(left, 0.25))
        return True

    # ------------------------------------------------------------------ facts

    def primary(self) -> Host | None:
        """Return the host whose controller is primary; the one of the highest term if two say so for a moment."""
        said = [(status.term, name) for name, status in self.statuses.items() if status.role == "primary"]
        if not said:
            return None
        name = max(said)[1]
        return next(host for host in self.stage.hosts if host.name == name)

    def token(self, host: Host) -> str:
        """Return the spawn token of the scheduler session that a host's controller holds, "" for none."""
        status = self.statuses.get(host.name)
        session = status.scheduler if status is not None and status.role == "primary" else None
        return session.spawn_token if session is not None and session.joined else ""

    def served(self) -> str:
        """Return the spawn token of the scheduler that serves the cluster now, "" for none."""
        primary = self.primary()
        return self.token(primary) if primary is not None else ""

    # ------------------------------------------------------------------ looking

    def _note(self) -> None:
        self._event.set()
        self.changed()

    async def _ask(self, host: Host, tls: TlsSource) -> None:
        while True:
            connection: Connection | None = None
            try:
                connection = await connect(host.address, tls, deadline_s=_ASK_S, on_push=_no_push)
                version = 0
                while True:
                    query = CtrlStatus(known_version=version, wait_ms=_WAIT_MS if version else 0)
                    answer = await connection.request(query, _WAIT_MS / 1000 + _ASK_S)
                    assert isinstance(answer, CtrlStatusReply), "a status query is answered by a status"
                    version = answer.version
                    self.statuses[host.name] = answer
                    self._note()
            except PeerError:
                if self.statuses.pop(host.name, None) is not None:
                    self._note()
            finally:
                if connection is not None:
                    connection.close("looked")
            await asyncio.sleep(0.1)

    async def _sample(self) -> None:
        while True:
            seen = tuple(sorted(self.living(), key=lambda each: each.pid))
            if seen != self.schedulers:
                self.schedulers = seen
                terms = Counter(each.term for each in seen)
                self.per_term_max = max(self.per_term_max, *terms.values(), 0)
                self._note()
            await asyncio.sleep(_SAMPLE_S)

    def living(self) -> list[Seen]:
        """Return every living process that a supervisor of this stage started as its scheduler."""
        found: list[Seen] = []
        folder = str(self.stage.folder)
        for process in psutil.Process().children(recursive=True):
            marks = environment(process.pid, ("XCE_UNIT", "XCE_SUPERVISOR", "XCE_BINDING"))
            if marks.get("XCE_UNIT") != "scheduler" or not marks.get("XCE_SUPERVISOR", "").startswith(folder):
                continue
            term, _, rest = marks.get("XCE_BINDING", "").partition(":")
            if term.isdecimal():
                found.append(Seen(process.pid, int(term), rest.rpartition(":")[2]))
        return found


def _no_push(_message: Message) -> None:
    """An operator has no session: nothing is pushed to it."""
