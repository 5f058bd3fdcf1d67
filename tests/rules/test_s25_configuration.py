"""docs/rules.md S25: configuration is checked whole before use; a reload at any moment harms nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.cli.stage import SETTINGS, configured, verb
from tests.fakes.controller import FakeController
from tests.shell.supervisor import Supervisor
from xce_supervisor.config import load
from xce_supervisor.errors import ConfigError


def test_nothing_is_used_of_a_configuration_of_which_something_is_wrong(tmp_path: Path) -> None:
    """docs/rules.md S25: unknown key, contradiction and bad unit, each with file, key and reason; nothing is made or started."""
    (tmp_path / "units").mkdir()
    unit = tmp_path / "units" / "one.toml"
    unit.write_text('[unit]\nname = "one"\nbinding = "always"\ncommand = ["/bin/true"]\n[stop]\ngrace_s = 40\n', encoding="utf-8")
    text = SETTINGS + '[role]\npoll_interval_ms = 2000\n[units]\ndirectories = ["units"]\n'
    file = configured(tmp_path, text)
    done = verb("run", "-c", file)
    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        f"xce-supervisor: {file}: role.poll_interval_ms: 2000 must be below role.request_deadline_ms (1000): "
        "else questions would pile up behind a slow answer",
        f"xce-supervisor: {unit}: stop: the kill ladder takes exit_push_s + grace_s + kill_limit_s = 46 s and must be below "
        f"[supervisor] stop_limit_s = 30 s of {file}",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c1.toml", "units"]


def test_an_unknown_key_is_an_error_everywhere(tmp_path: Path) -> None:
    """docs/rules.md S25: in every section of the file; what is misspelt would silently not hold."""
    for section in ("supervisor", "controller", "tls"):
        file = configured(tmp_path, SETTINGS.replace(f"[{section}]", f"[{section}]\nnonsense = 1"))
        with pytest.raises(ConfigError, match=rf"{section}\.nonsense: unknown key"):
            load(file)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.4])
async def test_a_hangup_soon_after_the_start_does_not_end_it(tmp_path: Path, after_s: float) -> None:
    """docs/rules.md S25: from the moment on at which the configuration was read. Before, a supervisor is only a program to be."""
    async with FakeController(role="standby") as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        try:
            supervisor.start()
            await supervisor.until(lambda: (supervisor.state_dir / "lock").exists())
            await asyncio.sleep(after_s)  # the moment of the fault
            supervisor.send(signal.SIGHUP)
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "standby")
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()


async def test_a_hangup_during_the_stop_does_not_stop_the_stop(tmp_path: Path) -> None:
    """docs/rules.md S25, S6: the ladder goes on; the supervisor ends with 0 and leaves nobody."""
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path, controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", "deaf", stop="exit_push_s = 0\ngrace_s = 1\n"))
        try:
            supervisor.start()
            await supervisor.running()
            await supervisor.until(lambda: supervisor.pids("scheduler"))
            supervisor.send(signal.SIGINT)
            for _ in range(20):
                supervisor.send(signal.SIGHUP)
                await asyncio.sleep(0.01)  # spread over the ladder
            assert await supervisor.ended() == 0
            assert supervisor.alive("scheduler") == []
        finally:
            await supervisor.close()
