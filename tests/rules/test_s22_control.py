"""docs/rules.md S22: `status` answers in two seconds, always, whatever others do to the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

from tests.cli.stage import verb
from tests.fakes.controller import FakeController
from tests.shell.supervisor import Supervisor


async def test_hostile_clients_delay_neither_status_nor_the_watch(tmp_path: Path) -> None:
    """docs/rules.md S22: three hundred clients are idle, slow, deaf or talk garbage, and a demotion is still seen at once."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", stop="exit_push_s = 0\ngrace_s = 0.5\nwedge_grace_s = 0.1\n"))
        with contextlib.ExitStack() as clients:
            try:
                supervisor.start()
                await supervisor.running()
                for number in range(300):
                    client = clients.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
                    client.setblocking(False)
                    with contextlib.suppress(OSError):
                        client.connect(str(supervisor.run_dir / "control.sock"))
                        client.send((b"", b'{"verb":', b'{"verb":"status"}\n' * 200, b"\xff" * 9000 + b"\n")[number % 4])
                began = time.monotonic()
                done = await asyncio.to_thread(verb, "status", "-c", supervisor.config)
                assert done.returncode == 0, done
                assert time.monotonic() - began < 2.0 + 1.0, "two seconds, and one to start Python on a busy machine"
                began = time.monotonic()
                await controller.say(role="standby")
                await supervisor.until(lambda: not supervisor.alive("scheduler"), 3.0)
                assert await supervisor.end() == 0
            finally:
                await supervisor.close()


async def test_a_socket_that_somebody_removed_is_back_within_seconds(tmp_path: Path) -> None:
    """docs/rules.md S22: until then the verb says what is missing, by its path."""
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        path = supervisor.run_dir / "control.sock"
        try:
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            path.unlink()
            done = await asyncio.to_thread(verb, "restart", "x", "-c", supervisor.config)
            assert done.returncode in (3, 5) and (str(path) in done.stderr or "unknown unit" in done.stderr)
            await supervisor.until(supervisor.status, 5.0)
            await supervisor.until(lambda: "control.recreated" in supervisor.events())
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()
