"""A stage for tests with real processes: certificates, reference schedulers and workers, and their end whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.testbed.pki import Subject, make_pki

CLUSTER = "stage"
PRELUDE = """
import json, os, sys
from pathlib import Path
from xce_supervisor.errors import ConfigError
from xce_supervisor.link.tls import TlsFiles
given = json.loads(os.environ["STAGE"])
tls = TlsFiles(*map(Path, given.pop("tls"))) if given.get("tls") else None
given.pop("tls", None)
"""
SCHEDULER = (
    PRELUDE
    + """
from xce_supervisor.testbed import scheduler
from xce_supervisor.testbed.scheduler_faults import parse_faults
config = scheduler.SchedulerConfig(faults=parse_faults(given.pop("faults")), tls=tls, **given)
try:
    code = scheduler.serve(config)
except ConfigError as error:
    print(error)
    code = 78
sys.exit(code)
"""
)
WORKER = (
    PRELUDE
    + """
from xce_supervisor.testbed import worker
given["directory"] = Path(given["directory"])
given["controllers"] = tuple(given["controllers"])
try:
    code = worker.serve(worker.WorkerConfig(tls=tls, **given))
except ConfigError as error:
    print(error)
    code = 78
sys.exit(code)
"""
)


class Program:
    """One real process of ours. Its output goes to a file."""

    def __init__(self, name: str, code: str, given: Mapping[str, object], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "STAGE": json.dumps(given), "NO_COLOR": "1"},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        """Return what it wrote so far."""
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; Popen does not signal a reaped pid."""
        self.process.send_signal(number)

    async def exit_code(self, within_s: float = 30.0) -> int:
        """Wait for the end and return the exit code; fails with the output if it does not end."""
        try:
            return await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {within_s} s:\n{self.output()}") from None

    async def says(self, text: str, within_s: float = 30.0) -> None:
        """Wait until its output holds `text`."""
        await until(lambda: text in self.output(), within_s, lambda: f"{self.name} did not say {text!r}:\n{self.output()}")

    def end(self) -> None:
        """Kill and reap it, if it lives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


async def until(fact: object, within_s: float, complaint: object = "not so in time") -> None:
    """Wait until the callable `fact` is true, looking often."""
    assert callable(fact)
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    while not fact():
        assert loop.time() < give_up_at, complaint() if callable(complaint) else complaint
        await asyncio.sleep(0.01)


class Notices:
    """A NOTIFY_SOCKET and what was sent to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._channel.bind(str(path))
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """Return every KEY=VALUE that came so far."""
        while True:
            try:
                self._lines.extend(self._channel.recv(65536).decode().split("\n"))
            except BlockingIOError:
                return self._lines

    def close(self) -> None:
        self._channel.close()


class Stage:
    """Everything that one test starts. Ends it all on exit."""

    def __init__(self, directory: Path, hosts: Sequence[str] = ()) -> None:
        self.directory = directory
        self._pki = directory / "pki"
        self._hosts = tuple(hosts)
        self._programs: list[Program] = []
        self._notices: list[Notices] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for program in self._programs:
            program.end()
            if error is not None:
                print(f"--- {program.name} (pid {program.pid}):\n{program.output()}", file=sys.stderr)
        for notices in self._notices:
            notices.close()

    def files(self, role: str, name: str) -> TlsFiles:
        """Return the TLS files of a peer, made at the first call."""
        made = make_pki(self._pki, CLUSTER, [Subject(role, name)], hosts=self._hosts).certificates[0]
        return TlsFiles(self._pki / "ca.pem", made.cert, made.key)

    def tls(self, role: str, name: str) -> TlsSource:
        """Return a peer's TLS source, for use in the test's own process."""
        return TlsSource(self.files(role, name))

    def notices(self) -> Notices:
        """Return a fresh NOTIFY_SOCKET."""
        notices = Notices(self.directory / f"notify-{len(self._notices)}")
        self._notices.append(notices)
        return notices

    def scheduler(
        self,
        address: str,
        *,
        controller_id: str = "c1",
        term: int = 1,
        faults: str = "",
        spawn_token: str = "token-1",
        secure: bool = True,
        connect_deadline_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
        code: str = SCHEDULER,
    ) -> Program:
        """Start a reference scheduler."""
        files = self.files("scheduler", "scheduler") if secure else None
        given = {
            "address": address,
            "controller_id": controller_id,
            "term": term,
            "spawn_token": spawn_token,
            "faults": faults,
            "connect_deadline_s": connect_deadline_s,
            "tls": [str(files.ca), str(files.cert), str(files.key)] if files else None,
        }
        return self.start("scheduler", code, given, environment or {})

    def worker(
        self,
        controllers: Sequence[str],
        *,
        name: str = "w1",
        slots: int = 4,
        environment: Mapping[str, str] | None = None,
        code: str = WORKER,
        **more: object,
    ) -> Program:
        """Start a reference worker; its directory is the same for the same name."""
        files = self.files("worker", name)
        given = {
            "name": name,
            "controllers": list(controllers),
            "directory": str(self.worker_directory(name)),
            "slots": slots,
            "tls": [str(files.ca), str(files.cert), str(files.key)],
            **more,
        }
        return self.start(name, code, given, environment or {})

    def worker_directory(self, name: str = "w1") -> Path:
        """Where a worker keeps its log."""
        return self.directory / f"worker-{name}"

    def start(self, name: str, code: str, given: Mapping[str, object], environment: Mapping[str, str]) -> Program:
        """Start a program of this project from its code."""
        log = self.directory / f"{name}-{len(self._programs)}.log"
        program = Program(name, code, given, log, environment)
        self._programs.append(program)
        return program
