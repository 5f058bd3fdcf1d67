"""docs/rules.md S21: wall-clock steps change nothing but stamps."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.fakes.controller import FakeController
from tests.shell.supervisor import Supervisor

# Every reading of the wall clock is an hour back or a year ahead of the one before.
_JUMPING = """
import time
_real, _count = time.time, [0]
def _time():
    _count[0] += 1
    return _real() + (-3600.0 if _count[0] % 2 else 31536000.0)
time.time = _time
"""


async def test_s21_a_wall_clock_that_jumps_an_hour_back_and_a_year_ahead_changes_only_stamps(tmp_path: Path) -> None:
    """docs/rules.md S21: start, crash, backoff, deaf stop and adoption go as ever, in their usual times."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_JUMPING)
    python_path = os.pathsep.join([str(patch), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    stop = "exit_push_s = 0.1\ngrace_s = 0.5\nkill_limit_s = 2\nwedge_grace_s = 0.3\n"
    async with FakeController() as controller:
        supervisor = Supervisor(tmp_path / "s", controller.address, {})
        supervisor.unit("scheduler", supervisor.child("scheduler", "deaf", stop=stop))
        try:
            supervisor.start(env={"PYTHONPATH": python_path})
            pid = (await supervisor.running())["pid"]
            await supervisor.until(lambda: supervisor.pids("scheduler"))
            for _ in range(2):  # the second crash waits half a second, give or take its jitter
                os.kill(pid, signal.SIGKILL)
                before = pid
                await supervisor.until(lambda: supervisor.of("scheduler")["pid"] not in (None, before), 3.0)  # noqa: B023 - run at once
                pid = (await supervisor.running())["pid"]
            await supervisor.until(lambda: pid in supervisor.pids("scheduler"))
            await supervisor.end(signal.SIGKILL)
            supervisor.start(env={"PYTHONPATH": python_path})
            assert (await supervisor.running())["pid"] == pid
            await supervisor.until(lambda: supervisor.status()["role"]["is"] == "primary")
            await controller.say(role="standby")
            await supervisor.until(lambda: not supervisor.alive("scheduler"), 4.0)
            lines = [json.loads(line) for line in (supervisor.state_dir / "journal.jsonl").read_text().splitlines()]
            walls = [line["wall"] for line in lines]
            assert max(walls) - min(walls) > 30_000_000, "the clock did jump"
            steady = [line["mono_ns"] for line in lines]
            assert steady == sorted(steady)
            assert await supervisor.end() == 0
        finally:
            await supervisor.close()
