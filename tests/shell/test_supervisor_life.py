"""The real supervisor beside a scripted controller: roles, crashes, stops, adoption (docs/rules.md S1 to S17)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.fakes.controller import FakeController
from tests.shell.supervisor import Supervisor

FAST = "exit_push_s = 0.2\ngrace_s = 0.6\nkill_limit_s = 2\nwedge_grace_s = 0.3\n"


async def test_s1_a_child_runs_while_its_controller_is_primary_and_not_before(tmp_path: Path) -> None:
    """docs/rules.md S1, S6: standby: nothing; promoted: one child; demoted: none."""
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", stop=FAST))
        try:
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            assert supervisor.pids("scheduler") == []
            await controller.say(role="primary", term=2)
            unit = await supervisor.running()
            assert unit["binding"] == {"controller_id": "c1", "instance_id": "instance-1", "term": 2}
            await controller.say(role="standby")
            await supervisor.until(lambda: not supervisor.alive("scheduler") and supervisor.of("scheduler")["is"] == "stopped")
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()


async def test_s12_a_killed_child_comes_back_at_once_and_its_exit_is_told(tmp_path: Path) -> None:
    """docs/rules.md S12, S23: the first retry is at once; last exit and restarts are shown."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            pid = (await supervisor.running())["pid"]
            await supervisor.until(lambda: supervisor.pids("scheduler"))
            os.kill(pid, signal.SIGKILL)
            await supervisor.until(lambda: len(supervisor.alive("scheduler")) == 1 and supervisor.alive("scheduler") != [pid])
            unit = await supervisor.running()
            assert unit["last_exit"]["signal"] == "SIGKILL" and unit["restarts"] == 1
            assert await supervisor.end(signal.SIGINT) == 0
            assert supervisor.alive("scheduler") == []
        finally:
            await supervisor.close()


@pytest.mark.parametrize("cgroup", ["auto", "off"])
async def test_s6_a_deaf_child_and_its_daemonised_grandchild_are_gone_after_the_grace(tmp_path: Path, cgroup: str) -> None:
    """docs/rules.md S5, S6: SIGKILL reaches the whole tree, also who changed session; with cgroups and without."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {}, cgroup=cgroup)
        supervisor.unit("scheduler", supervisor.child("scheduler", "deaf", "grandchild", stop=FAST))
        try:
            supervisor.start()
            await supervisor.running()
            grand = tmp_path / "scheduler.pids.grand"
            await supervisor.until(lambda: grand.exists() and grand.read_text() and supervisor.pids("scheduler"))
            await controller.say(role="standby")
            await supervisor.until(lambda: supervisor.of("scheduler")["is"] == "stopped")
            assert not supervisor.alive("scheduler")
            await supervisor.until(lambda: not psutil.pid_exists(int(grand.read_text())), 1.0)  # S19: no zombie for longer
            await supervisor.until(lambda: "child.killed" in supervisor.events())
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()


async def test_s17_a_child_survives_its_supervisor_and_is_adopted_by_the_next(tmp_path: Path) -> None:
    """docs/rules.md S17: kill -9 of the supervisor: no restart; a later demotion still stops the adopted child."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", stop=FAST))
        try:
            supervisor.start()
            pid = (await supervisor.running())["pid"]
            await supervisor.until(lambda: supervisor.pids("scheduler") and (supervisor.state_dir / "state.json").exists())
            await supervisor.until(lambda: str(pid) in (supervisor.state_dir / "state.json").read_text())
            await supervisor.end(signal.SIGKILL)
            assert supervisor.alive("scheduler") == [pid]
            supervisor.start()
            unit = await supervisor.running()
            assert unit["pid"] == pid and unit["is_reason"] == "adopted"
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "primary")
            assert supervisor.pids("scheduler") == [pid]
            await controller.say(role="standby")
            await supervisor.until(lambda: not supervisor.alive("scheduler"))
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()


async def test_s17_a_child_spawned_but_not_yet_recorded_is_found_by_its_marks(tmp_path: Path) -> None:
    """docs/rules.md S17: the state file is gone; binding and token are read from the process itself."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            pid = (await supervisor.running())["pid"]
            await supervisor.until(lambda: supervisor.pids("scheduler"))
            await supervisor.end(signal.SIGKILL)
            (supervisor.state_dir / "state.json").unlink(missing_ok=True)
            supervisor.start()
            assert (await supervisor.running())["pid"] == pid
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "primary")
            assert supervisor.alive("scheduler") == [pid]
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_s7_a_silent_controller_is_noticed_and_its_child_stopped_at_the_limit(tmp_path: Path) -> None:
    """docs/rules.md S7: the connection stays open and nothing comes: unknown, countdown, stop."""
    from xce_supervisor.wire.words import Opcode

    role = "poll_interval_ms = 50\nrequest_deadline_ms = 200\nunknown_limit_ms = 600\n"
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {}, role=role)
        supervisor.unit("scheduler", supervisor.child("scheduler", stop=FAST))
        try:
            supervisor.start()
            await supervisor.running()
            controller.trouble.silent.add(Opcode.CTRL_STATUS)
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "unknown")
            await supervisor.until(lambda: not supervisor.alive("scheduler"))
            controller.trouble.clear()
            await supervisor.running()
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_a_unit_bound_to_nothing_runs_beside_a_silent_controller_and_ends_with_the_supervisor(tmp_path: Path) -> None:
    """Binding `always`: no controller is needed to start it, and it is restarted at once when it dies."""
    supervisor = Supervisor(tmp_path, "127.0.0.1:1", {})
    supervisor.unit("exporter", supervisor.child("exporter", binding="always", stop='on_supervisor_stop = "stop"\n' + FAST))
    try:
        supervisor.start()
        pid = (await supervisor.running("exporter"))["pid"]
        os.kill(pid, signal.SIGKILL)
        await supervisor.until(lambda: supervisor.of("exporter")["pid"] not in (None, pid))
        await supervisor.until(lambda: len(supervisor.alive("exporter")) == 1)
        assert await supervisor.end() == 0
        assert supervisor.alive("exporter") == []
    finally:
        await supervisor.close()
