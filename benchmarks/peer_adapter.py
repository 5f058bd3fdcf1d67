"""How the harness of process supervisors runs ours: the real program beside a real reference controller, which stays primary.

The harness gives `Adapter` and `CHILD` to this module. Every child is a unit of its own, bound to the role, restarted at once and
without limit, with one second between SIGTERM and SIGKILL. The controller runs beside it and is no part of the footprint.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

_UNIT = """[unit]
name = "c{i}"
binding = "role"
command = ["{child}", "{spec}"]
[output]
kind = "null"
[stop]
exit_push_s = 0
grace_s = 1
on_supervisor_stop = "stop"
[restart]
delay_s = 0
delay_s_max = 0
"""
_CONFIG = """[supervisor]
state_dir = "{d}/state"
run_dir = "{d}/run"
log_level = "error"
[controller]
id = "c1"
address = "{address}"
[tls]
ca = "{d}/pki/ca.pem"
cert = "{d}/pki/supervisor-c1.pem"
key = "{d}/pki/supervisor-c1.key"
[units]
directories = ["{d}/units"]
cgroup_root = "{cgroup}"
"""


class Xce(Adapter):  # type: ignore[name-defined]  # noqa: F821 - given by the harness
    """Ours, each child's tree in a cgroup of its own."""

    name, kind = "xce-supervisor", "ours"
    cgroup = "auto"

    def available(self) -> bool:
        return True

    def version(self) -> str:
        done = subprocess.run([*_program("supervisor"), "--version"], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def prepare(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        os.makedirs(f"{self.d}/units")
        for i in range(self.n):
            with open(f"{self.d}/units/c{i}.toml", "w", encoding="utf-8") as file:
                file.write(_UNIT.format(i=i, child=CHILD, spec=self.spec(i)))  # type: ignore[name-defined]  # noqa: F821
        subprocess.run(
            [*_program("testbed"), "pki", f"{self.d}/pki", "controller/c1", "supervisor/c1", "operator/admin"],
            check=True,
            capture_output=True,
        )
        with open(f"{self.d}/supervisor.toml", "w", encoding="utf-8") as file:
            file.write(_CONFIG.format(d=self.d, address=address, cgroup=self.cgroup))
        argv = [
            "controller",
            "--id",
            "c1",
            "--listen",
            address,
            "--store",
            f"sqlite://{self.d}/store.db",
            "--pki",
            f"{self.d}/pki",
        ]
        self.controller = subprocess.Popen(
            [*_program("testbed"), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._await_primary(address)

    def _await_primary(self, address: str) -> None:
        give_up = time.monotonic() + 15
        while time.monotonic() < give_up:
            asked = subprocess.run(
                [*_program("testbed"), "ctrlstatus", "--controllers", address, "--pki", f"{self.d}/pki", "--json"],
                capture_output=True,
                text=True,
                check=False,
            )
            if asked.returncode == 0 and json.loads(asked.stdout)[0]["role"] == "primary":
                return
            time.sleep(0.1)
        raise RuntimeError("the reference controller did not become primary")

    def launch(self) -> None:
        self.popen([*_program("supervisor"), "run", "--config", f"{self.d}/supervisor.toml"])

    def stop_child(self, i: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(f"{self.d}/run/control.sock")
            client.sendall(json.dumps({"verb": "restart", "args": {"unit": f"c{i}"}}).encode() + b"\n")
            client.recv(4096)

    def cleanup(self) -> None:
        controller = getattr(self, "controller", None)
        if controller is not None:
            controller.send_signal(signal.SIGKILL)
            controller.wait()
            self.controller = None


class XceGroups(Xce):
    """Ours where no cgroup can be written: process groups and the child subreaper."""

    name, cgroup = "xce-supervisor-groups", "off"


def _program(name: str) -> list[str]:
    return [os.environ.get("XCE_BENCH_PYTHON", sys.executable), "-m", f"xce_supervisor.cli.{name}"]


ADAPTERS = [Xce, XceGroups]
