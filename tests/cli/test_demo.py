"""`demo`: ended in the middle, it leaves nothing. That it holds what it promises is run by .ci/run itself, from the wheel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.stage import verb


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_cleans_up_after_itself(tmp_path: Path, number: signal.Signals) -> None:
    """Every process, folder and control group is gone, also on Ctrl-C."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "xce_supervisor.cli.supervisor", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None and demo.stderr is not None
    try:
        assert "the cluster is whole" in demo.stdout.readline()
        begun = _of(tmp_path)
        assert len(begun) >= 8  # three controllers, three supervisors, two workers; and a scheduler
        demo.send_signal(number)
        demo.stdout.read()
        assert demo.wait(30) == 130 and demo.stderr.read() == ""
        give_up = time.monotonic() + 5
        while left := [process for process in begun if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < give_up, left
            time.sleep(0.02)
        assert os.listdir(tmp_path) == []
    finally:
        demo.kill()
        demo.wait(10)
        demo.stdout.close()
        demo.stderr.close()


def _of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have the demo's folder in their arguments."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    """What an operator keeps there is not mixed with a demo's files."""
    (tmp_path / "mine").write_text("x", encoding="utf-8")
    done = verb("demo", "--keep", tmp_path)
    assert done.returncode == 78 and f"--keep {tmp_path}" in done.stderr and os.listdir(tmp_path) == ["mine"]
