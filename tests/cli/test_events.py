"""`events`: the journal, with and without a supervisor."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from tests.cli.stage import configured, verb
from xce_supervisor.cli.history import moment
from xce_supervisor.core.words import Now
from xce_supervisor.supervisor.journal import Journal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose journal has five lines: two of an hour ago, three of now."""
    journal = begun(tmp_path)
    for number in range(5):
        wall = time.time() - (3600 if number < 2 else 0)
        unit = "scheduler" if number % 2 else "metrics"
        journal.append("child.exited", Now(number, number), unit=unit, reason=f"n\x1b{number}", fields={"pid": number}, wall=wall)
    assert journal.close(5) == 0
    return configured(tmp_path)


def begun(folder: Path) -> Journal:
    """The journal of that configuration."""
    return Journal(folder / "state" / "journal.jsonl", "b", bytes_max=1_000_000, files_max=3)


def shown(*args: str | Path) -> list[int]:
    """Return the numbers of the events that the verb prints as JSON."""
    done = verb("events", "--json", *args)
    assert done.returncode == 0, done
    return [json.loads(line)["fields"]["pid"] for line in done.stdout.splitlines()]


def test_events_can_be_chosen_by_unit_time_and_number(file: Path) -> None:
    """Oldest first, always."""
    assert shown("-c", file) == [0, 1, 2, 3, 4]
    assert shown("-c", file, "--unit", "scheduler") == [1, 3]
    assert shown("-c", file, "--since", "10m") == [2, 3, 4]
    assert shown("-c", file, "-n", "2") == [3, 4]
    assert shown("-c", file, "-n", "0") == []
    assert shown("-c", file, "--since", "2h", "--unit", "metrics", "-n", "1") == [4]


def test_an_event_is_one_line_for_people(file: Path) -> None:
    """Stamp, kind, unit, reason, fields; nothing in it can move a cursor."""
    done = verb("events", "-c", file, "-n", "1")
    (line,) = done.stdout.splitlines()
    assert line.split()[2:] == ["child.exited", "metrics", "n\\x1b4", "pid=4"]


def test_damaged_lines_are_told_of_and_passed_over(file: Path, tmp_path: Path) -> None:
    """What was changed by hand is not shown as if it had happened."""
    path = tmp_path / "state" / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"pid":1', b'"pid":9'))
    done = verb("events", "--json", "-c", file)
    assert [json.loads(line)["fields"]["pid"] for line in done.stdout.splitlines()] == [0, 2, 3, 4]
    assert done.stderr == "xce-supervisor: 1 damaged lines were passed over\n"


def test_no_journal_is_three(tmp_path: Path) -> None:
    """A supervisor that never ran has no history."""
    done = verb("events", "-c", configured(tmp_path))
    assert done.returncode == 3 and "there is no journal at" in done.stderr


def test_following_prints_what_happens_next(file: Path, tmp_path: Path) -> None:
    """Each event once, as soon as it is there."""
    follower = subprocess.Popen(
        [sys.executable, "-m", "xce_supervisor.cli.supervisor", "events", "--json", "-f", "-n", "1", "-c", str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    try:
        assert json.loads(follower.stdout.readline())["fields"]["pid"] == 4
        journal = begun(tmp_path)
        journal.append("role.promoted", Now(1, 1), fields={"term": 8})
        assert json.loads(follower.stdout.readline())["fields"] == {"term": 8}
        journal.close(5)
    finally:
        follower.kill()
        follower.wait(10)
        follower.stdout.close()


def test_a_time_is_a_span_or_a_date() -> None:
    """And nothing else."""
    now = time.time()
    for text, ago_s in (("90", 90), ("10m", 600), ("2h", 7200), ("1.5 d", 129_600)):
        assert abs(moment(text) - (now - ago_s)) < 5
    assert moment("2026-11-30 03:00") == time.mktime((2026, 11, 30, 3, 0, 0, 0, 0, -1))
    for text in ("yesterday", "10 weeks", ""):
        with pytest.raises(click.UsageError):
            moment(text)
