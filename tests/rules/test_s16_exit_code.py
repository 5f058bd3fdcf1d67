"""docs/rules.md S16: of two supervisors for one controller the loser ends with 75 and touches nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.stage import configured, verb

LOSER = 75


def _start(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "xce_supervisor", "run", "-c", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until_answering(file: Path, running: list[subprocess.Popen[str]]) -> None:
    give_up = time.monotonic() + 20
    while verb("status", "-c", file).returncode == 3:
        assert time.monotonic() < give_up and any(one.poll() is None for one in running)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=20)
    return process.returncode, said


@pytest.mark.parametrize("round_number", range(3))
def test_two_started_in_one_instant_leave_one(tmp_path: Path, round_number: int) -> None:
    """docs/rules.md S16: exactly one runs; the other says who holds what, by pid and path."""
    file = configured(tmp_path)
    both = [_start(file), _start(file)]
    try:
        _until_answering(file, both)
        give_up = time.monotonic() + 20
        while all(one.poll() is None for one in both):
            assert time.monotonic() < give_up, "both run"
            time.sleep(0.02)
        (loser,) = [one for one in both if one.poll() is not None]
        (winner,) = [one for one in both if one is not loser]
        code, said = _ended(loser)
        assert code == LOSER and str(winner.pid) in said and "127.0.0.1:1" in said, said
        assert "Traceback" not in said
        winner.terminate()
        assert _ended(winner)[0] == 0
    finally:
        for one in both:
            one.kill()
            one.wait(10)
            assert one.stderr is not None
            one.stderr.close()


def test_the_loser_touches_no_file_of_the_winner(tmp_path: Path) -> None:
    """docs/rules.md S16: sockets, state and journal are those of the winner, before and after."""
    file = configured(tmp_path)
    winner = _start(file)
    try:
        _until_answering(file, [winner])
        before = _picture(tmp_path)
        code, _ = _ended(_start(file))
        assert code == LOSER
        after = _picture(tmp_path)
        assert {name: inode for name, inode in after.items() if name in before} == before
        assert verb("status", "-c", file).returncode == 1  # the role is unknown; the winner answers
    finally:
        winner.terminate()
        assert _ended(winner)[0] == 0


def _picture(folder: Path) -> dict[str, int]:
    """Inodes of what only a supervisor that runs makes or replaces, and the journal's number of starts."""
    names = ("run/control.sock", "state/journal.jsonl", "state/lock")
    found = {name: (folder / name).stat().st_ino for name in names if (folder / name).exists()}
    journal = folder / "state" / "journal.jsonl"
    found["starts"] = journal.read_text(encoding="utf-8").count('"supervisor.started"') if journal.exists() else 0
    return found
