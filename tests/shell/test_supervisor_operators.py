"""What operators do to a supervisor, and what goes wrong around it (docs/rules.md S10, S13, S15, S16, S20, S22 to S25)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.controller import FakeController
from tests.shell.supervisor import Supervisor
from xce_supervisor.supervisor.asking import Refused
from xce_supervisor.wire.words import SchedulerSession

FAST = "exit_push_s = 0.2\ngrace_s = 0.6\nkill_limit_s = 2\nwedge_grace_s = 0.3\n"


def verb(supervisor: Supervisor, *argv: str, timeout_s: float = 10.0) -> subprocess.CompletedProcess[str]:
    """Run a verb of the program on the supervisor's configuration."""
    program = [sys.executable, "-m", "xce_supervisor", argv[0], "--config", str(supervisor.config), *argv[1:]]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout_s, check=False)


async def test_s22_status_of_a_stopped_supervisor_ends_within_two_seconds_and_says_so(tmp_path: Path) -> None:
    """docs/rules.md S22: SIGSTOP: not responding, exit code 4, the last picture with its age."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            await supervisor.running()
            await supervisor.until(lambda: (supervisor.run_dir / "status.json").exists())
            supervisor.send(signal.SIGSTOP)
            before = time.monotonic()
            done = verb(supervisor, "status")
            assert time.monotonic() - before < 2.0 + 1.0, "two seconds, and one to start Python on a busy machine"
            assert done.returncode == 4 and "not responding" in done.stdout + done.stderr
            assert "scheduler" in done.stdout and "Traceback" not in done.stderr
            supervisor.send(signal.SIGCONT)
            assert await supervisor.end(signal.SIGINT) == 0
            assert verb(supervisor, "status").returncode == 3
        finally:
            await supervisor.close()


async def test_s23_status_tells_wanted_and_is_and_the_last_events_of_each_unit(tmp_path: Path) -> None:
    """docs/rules.md S23: also `why` names every closed gate."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            unit = await supervisor.running()
            assert unit["wanted"] and unit["pid"] and unit["generation"] == 1
            assert [event["kind"] for event in supervisor.of("scheduler")["events"]] == ["child.spawned"]
            for _ in range(12):
                supervisor.ask("restart", unit="scheduler")
                await supervisor.running()
            assert len(supervisor.of("scheduler")["events"]) == 10
            await controller.say(role="standby", gate="apply divergent", gate_detail="index 7")
            await supervisor.until(lambda: supervisor.of("scheduler")["is"] == "stopped")
            done = verb(supervisor, "why", "scheduler")
            assert "apply divergent" in done.stdout and done.returncode in (0, 1)
            done = verb(supervisor, "status", "--json")
            assert json.loads(done.stdout)["role"]["gate"] == "apply divergent"
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_s24_a_pause_survives_the_supervisor_and_nothing_is_started_until_it_is_resumed(tmp_path: Path) -> None:
    """docs/rules.md S24: a child killed by hand while paused stays dead, also for the next supervisor; it is loud."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            unit = await supervisor.running()
            assert verb(supervisor, "pause", "scheduler", "--why", "upgrade").returncode == 0
            os.kill(unit["pid"], signal.SIGKILL)
            await supervisor.until(lambda: supervisor.of("scheduler")["is"] != "running")
            assert await supervisor.end() == 0
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "primary")
            shown = supervisor.of("scheduler")
            assert shown["paused"]["why"] == "upgrade" and shown["degraded"] and shown["is"] != "running"
            assert verb(supervisor, "status").returncode == 1
            assert len(supervisor.alive("scheduler")) == 0
            assert verb(supervisor, "resume", "scheduler").returncode == 0
            await supervisor.running()
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_s16_of_two_supervisors_started_together_one_runs_and_the_other_ends_with_75(tmp_path: Path) -> None:
    """docs/rules.md S16: the loser touches nothing of the winner."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        rival = [sys.executable, "-m", "xce_supervisor", "run", "--config", str(supervisor.config)]
        try:
            supervisor.start()
            unit = await supervisor.running()
            await supervisor.until(lambda: supervisor.pids("scheduler"))
            for _ in range(3):
                done = subprocess.run(rival, capture_output=True, text=True, timeout=20, check=False)
                assert done.returncode == 75 and "Traceback" not in done.stderr
                assert str(supervisor.pid) in done.stderr
            assert supervisor.of("scheduler")["pid"] == unit["pid"] and len(supervisor.pids("scheduler")) == 1
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_s25_a_reload_applies_what_changed_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """docs/rules.md S25: HUP with a broken unit keeps the old ones; a good one restarts only the unit that changed."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        for name in ("scheduler", "other"):
            supervisor.unit(name, supervisor.child(name))
        try:
            supervisor.start()
            first = {name: (await supervisor.running(name))["pid"] for name in ("scheduler", "other")}
            supervisor.unit("other", "[unit]\nname = 3\n")
            for _ in range(50):
                supervisor.send(signal.SIGHUP)
            await supervisor.until(lambda: "config.refused" in supervisor.events())
            assert {name: supervisor.of(name)["pid"] for name in first} == first
            supervisor.unit("other", supervisor.child("other", "changed"))
            supervisor.send(signal.SIGHUP)
            await supervisor.until(lambda: supervisor.of("other")["pid"] not in (None, first["other"]))
            assert supervisor.of("scheduler")["pid"] == first["scheduler"]
            supervisor.unit("third", supervisor.child("third"))
            (supervisor.units / "other.toml").unlink()
            supervisor.send(signal.SIGHUP)
            await supervisor.running("third")
            await supervisor.until(lambda: not supervisor.alive("other"))
            assert {unit["name"] for unit in supervisor.status()["units"]} == {"scheduler", "third"}
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


async def test_s10_a_supervisor_that_was_stopped_judges_nobody_and_says_so(tmp_path: Path) -> None:
    """docs/rules.md S10: 3 s of SIGSTOP are told, the role is verified, a child that has not joined is not killed for them."""
    more = '[readiness]\nkind = "session"\njoin_timeout_s = 4\n'
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", more=more, stop=FAST))
        try:
            supervisor.start()
            unit = await supervisor.running()
            supervisor.send(signal.SIGSTOP)
            await _wait(3.0)
            supervisor.send(signal.SIGCONT)
            await supervisor.until(lambda: "loop.gap_seen" in supervisor.events())
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "primary")
            assert supervisor.of("scheduler")["pid"] == unit["pid"]
            assert "child.wedged" not in supervisor.events()
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


def shows(unit: dict[str, Any], word: str) -> dict[str, Any] | None:
    """Return the unit if that is what it is."""
    return unit if unit["is"] == word else None


async def _wait(seconds: float) -> None:
    """Let time pass: it is the very thing under test."""
    import asyncio

    await asyncio.sleep(seconds)


async def test_s13_a_missing_program_is_named_and_started_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """docs/rules.md S13: cannot start, path and errno; the crash budget is untouched; no slow retry is waited for."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        program = tmp_path / "not-there"
        body = '[unit]\nname = "scheduler"\nbinding = "role"\ncommand = ["%s"]\n[output]\nkind = "null"\n'
        supervisor.unit("scheduler", body % program)
        try:
            supervisor.start()
            shown = await supervisor.until(lambda: shows(supervisor.of("scheduler"), "cannot start"))
            assert str(program) in shown["is_reason"] and "ENOENT" in shown["is_reason"] and shown["restarts"] == 0
            assert verb(supervisor, "status").returncode == 1
            draft = tmp_path / "draft"
            draft.write_text("#!/bin/sh\nexec sleep 600\n")
            draft.chmod(0o755)
            draft.rename(program)
            await supervisor.running()
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


@pytest.mark.parametrize("content", ["", "garbage", "foreign", "other boot"])
async def test_s15_a_state_file_that_cannot_be_trusted_harms_nobody(tmp_path: Path, content: str) -> None:
    """docs/rules.md S15: corrupt, of another machine, or naming a stranger's pid: the stranger lives."""
    stranger = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            assert await supervisor.end() == 0
            path = supervisor.state_dir / "state.json"
            path.write_text(_state(path.read_text(), content, stranger.pid))
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            await controller.say(role="primary")
            await supervisor.running()
            assert stranger.poll() is None
            assert await supervisor.end(signal.SIGINT) == 0
            assert stranger.poll() is None
        finally:
            await supervisor.close()
            stranger.kill()
            stranger.wait()


def _state(before: str, content: str, pid: int) -> str:
    if content in ("", "garbage"):
        return content
    whole: dict[str, Any] = json.loads(before)
    record = {"unit": "scheduler", "generation": 1, "pid": pid, "start_ticks": 1, "boot_id": "another", "token": "t"}
    whole["body"]["children"] = [record]
    if content == "foreign":
        whole["machine_id"] = whole["host"] = "elsewhere"
    import zlib

    import msgspec

    whole["crc32"] = f"{zlib.crc32(msgspec.json.encode(whole['body'])):08x}"
    return json.dumps(whole)


async def test_s3_a_foreign_scheduler_session_is_named_and_makes_the_status_degraded(tmp_path: Path) -> None:
    """docs/rules.md S3: another scheduler sits on our controller; ours is not called joined for it."""
    more = '[readiness]\nkind = "session"\njoin_timeout_s = 30\n'
    async with FakeController() as controller:
        controller.foreign = SchedulerSession(joined=True, name="old scheduler", spawn_token="abcdef", since_ms=5)
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", more=more))
        try:
            supervisor.start()
            await supervisor.running()
            shown = await supervisor.until(lambda: (lambda u: u if u["degraded"] else None)(supervisor.of("scheduler")))
            assert any("old scheduler" in reason for reason in shown["degraded"]) and shown["ready"] == "not joined"
            assert "old scheduler" in verb(supervisor, "why", "scheduler").stdout
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()


@pytest.mark.needs("root")
async def test_s20_a_full_disk_stops_nothing_and_is_told(tmp_path: Path) -> None:
    """docs/rules.md S20: state and journal lie on a full file system; children are restarted, the old file is kept."""
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=True)
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path / "s", controller.address, {})
        supervisor.config.write_text(supervisor.config.read_text().replace(str(supervisor.state_dir), str(disk / "state")))
        supervisor.state_dir = disk / "state"
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            unit = await supervisor.running()
            await supervisor.until(lambda: (disk / "state" / "state.json").exists())
            with open(disk / "ballast", "wb") as ballast, pytest.raises(OSError):
                while True:
                    os.write(ballast.fileno(), b"x" * 4096)
            os.kill(unit["pid"], signal.SIGKILL)
            await supervisor.until(lambda: supervisor.of("scheduler")["pid"] not in (None, unit["pid"]))
            await supervisor.until(lambda: supervisor.status()["degraded"])
            json.loads((disk / "state" / "state.json").read_text())
            (disk / "ballast").unlink()
            await supervisor.until(lambda: not supervisor.status()["degraded"])
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()
            subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_a_verb_for_an_unknown_unit_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """The answer names what there is."""
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            with pytest.raises(Refused, match="scheduler"):
                supervisor.ask("pause", unit="shceduler", why="x")
            assert verb(supervisor, "pause", "nobody", "--why", "x").returncode == 5
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()


async def test_a_hup_at_any_moment_after_the_start_does_not_end_it(tmp_path: Path) -> None:
    """A reload in the middle of a start or of a stop is harmless: from the moment that Python runs our code on."""
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        try:
            supervisor.start()
            await supervisor.until(lambda: _ignores_hup(supervisor.pid))
            while not (supervisor.run_dir / "control.sock").exists():
                supervisor.send(signal.SIGHUP)
                await _wait(0.005)
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            supervisor.send(signal.SIGTERM)
            supervisor.send(signal.SIGHUP)
            assert await supervisor.ended() == 0
        finally:
            await supervisor.close()


def _ignores_hup(pid: int) -> bool:
    """Has the process taken its first step against SIGHUP: ignored or caught?"""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn", "SigCgt"))]
    return any(mask & 1 << (signal.SIGHUP - 1) for mask in masks)


@pytest.mark.parametrize("where", ["full", "unread", "closed"])
async def test_s20_standard_error_that_takes_nothing_costs_lines_and_no_supervision(tmp_path: Path, where: str) -> None:
    """docs/rules.md S20: a full disk behind the log, a pipe that nobody reads, a reader that is gone."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler"))
        reader, writer = os.pipe()
        if where == "full":
            os.close(writer)
            writer = os.open("/dev/full", os.O_WRONLY)
        elif where == "unread":
            os.set_blocking(writer, False)
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(writer, b"x" * 4096)
            os.set_blocking(writer, True)
        else:
            os.close(reader)
        try:
            supervisor.start(error_to=writer)
            unit = await supervisor.running()
            os.kill(unit["pid"], signal.SIGKILL)
            await supervisor.until(lambda: supervisor.of("scheduler")["pid"] not in (None, unit["pid"]))
            await supervisor.running()
            assert supervisor.status()["counters"]["log.lost"] > 0
            assert await supervisor.end(signal.SIGINT) == 0
        finally:
            await supervisor.close()
            os.close(writer)
            if where != "closed":
                os.close(reader)
