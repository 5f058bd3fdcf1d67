"""The demo's stage: a whole cluster of real processes in one folder, and nothing left of it afterwards.

Three controllers (or as many as asked) on one store, a supervisor beside each, workers, certificates. This process becomes the
child subreaper, so that everything that the cluster starts stays a descendant of it and can be counted and ended, also what
outlived a killed supervisor (docs/rules.md S17).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from xce_supervisor.errors import ConfigError
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.process.cgroup import CgroupUnusable, own_group
from xce_supervisor.testbed.client import Cluster
from xce_supervisor.testbed.etcd_cluster import EtcdCluster
from xce_supervisor.testbed.pki import Subject, make_pki

_PR_SET_CHILD_SUBREAPER = 36
_CLUSTER = "demo"
_WORKERS = 2
_SLOTS = 8
# A cluster's clocks of life and death, shortened so that a story of five faults fits into a minute; the defaults are ten times as
# patient (docs/rules.md S6, S9).
_UNIT = """[unit]
name = "scheduler"
binding = "role"
command = [
    "{python}", "-m", "xce_supervisor.cli.testbed", "scheduler",
    "--controller", "{{controller_address}}", "--controller-id", "{{controller_id}}", "--term", "{{term}}",
    "--spawn-token", "{{spawn_token}}", "--tls-ca", "{{tls_ca}}", "--tls-cert", "{{tls_cert}}", "--tls-key", "{{tls_key}}",
    "--fault", "{fault}",
]
[environment]
pass = ["PATH", "HOME", "LANG", "PYTHONPATH"]
[output]
kind = "file"
path = "scheduler.log"
[readiness]
kind = "session"
join_timeout_s = 5
[stop]
exit_push_s = 0.5
grace_s = 1
wedge_grace_s = 0.5
[stall]
timeout_s = 2
confirm_s = 0.5
"""
_SUPERVISOR = """[supervisor]
state_dir = "{folder}/state"
run_dir = "{folder}/run"
[controller]
id = "{name}"
address = "{address}"
[tls]
ca = "{pki}/ca.pem"
cert = "{pki}/supervisor-{name}.pem"
key = "{pki}/supervisor-{name}.key"
[tls.children.scheduler]
cert = "{pki}/scheduler-{name}.pem"
key = "{pki}/scheduler-{name}.key"
[units]
directories = ["{folder}/units"]
cgroup_root = "{group}"
"""


@dataclass(slots=True)
class Host:
    """One host: a controller and the supervisor beside it. name: e.g. "c1". address: of the controller."""

    name: str
    address: str
    folder: Path
    controller: subprocess.Popen[bytes] | None = None
    supervisor: subprocess.Popen[bytes] | None = None

    @property
    def journal(self) -> Path:
        return self.folder / "state" / "journal.jsonl"


@dataclass(slots=True)
class Stage:
    """The whole cluster. Use `open_stage`, then `start`, and `close` whatever happens."""

    folder: Path
    engine: str
    hosts: list[Host]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    etcd: EtcdCluster | None = None
    store: str = ""
    group: Path | None = None

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def runs(self) -> Path:
        """Every job appends one line when it runs."""
        return self.folder / "runs.log"

    def tls(self) -> TlsSource:
        """Return the operator's certificate."""
        return TlsSource(TlsFiles(self.pki / "ca.pem", self.pki / "operator-demo.pem", self.pki / "operator-demo.key"))

    def cluster(self) -> Cluster:
        """Return where the controllers are."""
        return Cluster(tuple(host.address for host in self.hosts), self.tls())

    # ------------------------------------------------------------------ processes

    async def start(self) -> None:
        """Start everything; returns when all processes are started, not when they are ready."""
        subjects = [Subject("operator", "demo")]
        for host in self.hosts:
            subjects += [Subject(role, host.name) for role in ("controller", "supervisor", "scheduler")]
        subjects += [Subject("worker", f"w{n + 1}") for n in range(_WORKERS)]
        make_pki(self.pki, _CLUSTER, subjects)
        if self.engine == "etcd":
            await self._start_etcd()
        for host in self.hosts:
            host.folder.mkdir(parents=True)
            (host.folder / "units").mkdir()
            self.write_unit(host, "")
            (host.folder / "supervisor.toml").write_text(
                _SUPERVISOR.format(
                    folder=host.folder, name=host.name, address=host.address, pki=self.pki, group=self.group or "off"
                )
            )
        for host in self.hosts:  # first, as on a host that boots: a promotion is then seen when it happens
            self.start_supervisor(host)
        await self._supervisors_up()
        for host in self.hosts:
            self.start_controller(host)
        for n in range(_WORKERS):
            name = f"w{n + 1}"
            argv = ["worker", "--name", name, "--controllers", ",".join(each.address for each in self.hosts)]
            argv += ["--dir", str(self.folder / name), "--slots", str(_SLOTS), "--pki", str(self.pki)]
            self.workers.append(self._spawn("testbed", argv, self.folder / f"{name}.log"))

    async def _supervisors_up(self) -> None:
        """Wait, for a bounded time, until every supervisor has its control socket."""
        give_up = asyncio.get_running_loop().time() + 10.0
        while not all((host.folder / "run" / "control.sock").exists() for host in self.hosts):
            if asyncio.get_running_loop().time() > give_up:
                return  # the story will tell; its own bounds hold
            await asyncio.sleep(0.02)

    async def _start_etcd(self) -> None:
        binary = shutil.which("etcd")
        if binary is None:
            raise ConfigError("--engine etcd needs the etcd server: install etcd-server, or use --engine sqlite")
        (self.folder / "etcd").mkdir()
        self.etcd = EtcdCluster(binary, self.folder / "etcd")
        await asyncio.to_thread(self.etcd.start)
        self.store = self.etcd.url("demo", ttl_s=2)

    def start_controller(self, host: Host) -> None:
        """Start (or start again) a host's controller."""
        argv = ["controller", "--id", host.name, "--listen", host.address, "--store", self.store, "--pki", str(self.pki)]
        host.controller = self._spawn("testbed", argv, host.folder / "controller.log")

    def start_supervisor(self, host: Host) -> None:
        """Start (or start again, as systemd would) a host's supervisor."""
        argv = ["run", "--config", str(host.folder / "supervisor.toml")]
        host.supervisor = self._spawn("supervisor", argv, host.folder / "supervisor.log")

    def write_unit(self, host: Host, fault: str) -> None:
        """Write a host's scheduler unit. fault: what its scheduler is told to do wrong, "" for nothing."""
        (host.folder / "units" / "scheduler.toml").write_text(_UNIT.format(python=sys.executable, fault=fault))

    def _spawn(self, program: str, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", f"xce_supervisor.cli.{program}", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )

    # ------------------------------------------------------------------ the end

    def own_pids(self) -> set[int]:
        """Return the pids of controllers, supervisors, workers and etcd members."""
        mine = {each.pid for host in self.hosts for each in (host.controller, host.supervisor) if each is not None}
        mine |= {worker.pid for worker in self.workers}
        return mine | (set(self.etcd.pids()) if self.etcd is not None else set())

    async def stop(self) -> None:
        """End everything in order, politely: supervisors with their schedulers, workers with their jobs, controllers, store."""
        await self._end([host.supervisor for host in self.hosts], signal.SIGINT, 6.0)
        await self._end(self.workers, signal.SIGTERM, 4.0)
        await self._end([host.controller for host in self.hosts], signal.SIGTERM, 4.0)
        if self.etcd is not None:
            await asyncio.to_thread(self.etcd.stop)

    async def _end(
        self, processes: list[subprocess.Popen[bytes]] | list[subprocess.Popen[bytes] | None], number: int, wait_s: float
    ) -> None:
        living = [process for process in processes if process is not None and process.poll() is None]
        for process in living:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
        give_up = asyncio.get_running_loop().time() + wait_s
        while any(process.poll() is None for process in living) and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(0.02)

    def leftovers(self) -> list[psutil.Process]:
        """Return living descendants of this process that are none of the cluster's own; zombies are reaped on the way."""
        own = self.own_pids()
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    if process.ppid() == os.getpid() and process.pid not in own:
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(process.pid, os.WNOHANG)
                elif process.pid not in own:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """SIGKILL whatever is left of the cluster, and reap it. Blocks for a moment."""
        for _ in range(5):
            living = psutil.Process().children(recursive=True)
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(living, timeout=1.0)
            if not living:
                return

    def close(self, *, keep: bool) -> None:
        """Remove what is left: processes, control groups and, unless `keep`, the folder."""
        self.kill_all()
        _remove_group(self.group)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_stage(folder: Path, engine: str, controllers: int) -> Stage:
    """Return a stage in an empty folder. Raises ConfigError when this process cannot keep its descendants."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise ConfigError("the kernel refuses to make this process a child subreaper (prctl): the demo could not clean up")
    hosts = [Host(f"c{n + 1}", f"127.0.0.1:{port}", folder / f"c{n + 1}") for n, port in enumerate(_free_ports(controllers))]
    return Stage(folder, engine, hosts, store=f"sqlite://{folder}/store.db", group=_make_group())


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _python_path() -> str:
    """Return a PYTHONPATH under which the cluster's processes import this very package."""
    here = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH", "")
    return f"{here}{os.pathsep}{before}" if before else here


def _make_group() -> Path | None:
    """Make a control group of the demo's own, below which all supervisors keep their trees; None where none can be made."""
    try:
        group = own_group() / f"xce-demo-{os.getpid()}"
        group.mkdir()
    except (CgroupUnusable, OSError):
        return None
    return group


def _remove_group(group: Path | None) -> None:
    """Remove the demo's group and what killed supervisors left below it; by now nobody lives there."""
    if group is not None:
        for path, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
