"""Runs the real supervisor as a process, with units that a test writes, beside a controller that a test scripts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from xce_supervisor.core.words import Identity
from xce_supervisor.process.identity import is_alive, read_identity, send_signal
from xce_supervisor.supervisor.asking import NotResponding, NotRunning, ask

# A child that says where it is, and does what its flags say: deaf, stopping, forking.
CHILD = """
import os, signal, sys, time
flags = sys.argv[2:]
if "deaf" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "grandchild" in flags and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1] + ".grand", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
with open(sys.argv[1], "a") as out:
    out.write(f"{os.getpid()}\\n")
if "exit" in flags:
    sys.exit(3)
time.sleep(600)
"""


class Supervisor:
    """One supervisor process in a folder of its own.

    units: name to the body of its unit file. Started by `start`; whatever it started is killed at the end by `close`.
    """

    def __init__(
        self, folder: Path, address: str, units: dict[str, str], *, role: str = "", extra: str = "", cgroup: str = "auto"
    ) -> None:
        self.folder = folder
        self.config = folder / "supervisor.toml"
        self.units = folder / "units"
        self.units.mkdir(parents=True)
        self.state_dir = folder / "state"
        self.run_dir = folder / "run"
        for name, body in units.items():
            self.unit(name, body)
        self.config.write_text(
            f'[supervisor]\nstate_dir = "{self.state_dir}"\nrun_dir = "{self.run_dir}"\nlog_level = "debug"\n'
            f'[controller]\nid = "c1"\naddress = "{address}"\n[tls]\ninsecure = true\n[role]\n{role}\n'
            f'[units]\ndirectories = ["{self.units}"]\ncgroup_root = "{cgroup}"\n{extra}'
        )
        self.log = folder / "supervisor.log"
        self.pid = 0
        self._process: psutil.Popen | None = None
        self.seen: set[Identity] = set()

    def unit(self, name: str, body: str) -> None:
        (self.units / f"{name}.toml").write_text(body)

    def child(self, name: str, *flags: str, binding: str = "role", more: str = "", stop: str = "") -> str:
        """Return the body of a unit whose child appends its pid to `pids(name)`."""
        script = self.folder / "child.py"
        script.write_text(CHILD)
        command = json.dumps(
            [sys.executable, "-I", "-S", str(script), str(self.folder / f"{name}.pids"), *flags, "{spawn_token}"]
        )
        return (
            f'[unit]\nname = "{name}"\nbinding = "{binding}"\ncommand = {command}\n'
            f'[output]\nkind = "file"\npath = "{self.folder}/{name}.out"\n[stop]\n{stop}\n{more}'
        )

    def start(self, *, env: dict[str, str] | None = None, error_to: int | None = None) -> Supervisor:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        with open(self.log, "ab") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", "xce_supervisor", "run", "--config", str(self.config)],
                stdin=-3, stdout=log, stderr=log if error_to is None else error_to, env=environment,
            )  # fmt: skip
        self.pid = self._process.pid
        return self

    # ---- facts

    def ask(self, verb: str, **args: Any) -> Any:
        return ask(self.run_dir / "control.sock", verb, args)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("status")
        for unit in found["units"]:
            if unit.get("pid"):
                identity = read_identity(unit["pid"])
                if identity is not None:
                    self.seen.add(identity)
        return found

    def of(self, unit: str) -> dict[str, Any]:
        return next(each for each in self.status()["units"] if each["name"] == unit)

    def pids(self, unit: str) -> list[int]:
        path = self.folder / f"{unit}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def alive(self, unit: str) -> list[int]:
        return [pid for pid in self.pids(unit) if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def events(self) -> list[str]:
        path = self.state_dir / "journal.jsonl"
        return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []

    async def until(self, fact: Callable[[], Any], within_s: float = 10.0) -> Any:
        """Wait until fact() is true; a supervisor that does not answer yet counts as false. Fails with its log."""
        give_up = time.monotonic() + within_s
        while True:
            try:
                found = fact()
            except (NotRunning, NotResponding, psutil.NoSuchProcess, StopIteration):
                found = None
            if found:
                return found
            if time.monotonic() > give_up:
                raise AssertionError(f"not so after {within_s} s\n{self.log.read_text()[-6000:]}")
            await asyncio.sleep(0.01)

    async def running(self, unit: str = "scheduler") -> dict[str, Any]:
        return await self.until(lambda: (lambda u: u if u["is"] == "running" else None)(self.of(unit)))  # type: ignore[no-any-return]

    # ---- acts

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    async def end(self, number: int = signal.SIGTERM, within_s: float = 15.0) -> int:
        """Signal the supervisor and wait for its end. Returns its exit code."""
        assert self._process is not None
        self.send(number)
        return await self.ended(within_s)

    async def ended(self, within_s: float = 15.0) -> int:
        assert self._process is not None
        process = self._process
        code = await self.until(lambda: (process.poll() is not None) or None, within_s)
        assert code
        self._process = None
        return int(process.returncode)

    async def close(self) -> None:
        """Kill the supervisor and everything that it is known to have started."""
        if self._process is not None:
            self.send(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None
        for path in self.folder.glob("*.pids*"):
            for line in path.read_text().split():
                identity = read_identity(int(line))
                if identity is not None and _is_ours(identity.pid, str(self.folder)):
                    self.seen.add(identity)
        for identity in self.seen:
            send_signal(identity, signal.SIGCONT)
            send_signal(identity, signal.SIGKILL)
        give_up = time.monotonic() + 5
        while any(is_alive(identity) for identity in self.seen) and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        _remove_cgroups(str(self.state_dir))


def _is_ours(pid: int, folder: str) -> bool:
    try:
        return folder in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def _remove_cgroups(state_dir: str) -> None:
    """Remove the groups of a supervisor that was killed."""
    import zlib

    name = f"xce-c1-{zlib.crc32(state_dir.encode()):08x}."
    for mount in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        for top in Path(mount).glob(f"**/{name}*"):
            for path, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    continue
