"""The journal: append-only, checked, bounded, and never in anybody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shell.small_disk import run_on_small_disk
from xce_supervisor.core.words import Now
from xce_supervisor.supervisor.journal import Follower, Journal, parse, read

BOOT = "3f1e6b8c-0000-4000-8000-000000000000"
NOW = Now(1_000, 2_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal in a folder that is not there yet."""
    return tmp_path / "state" / "journal.jsonl"


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[..., Journal]]:
    """Start journals and end their threads."""
    begun: list[Journal] = []

    def start(bytes_max: int = 1_000_000, files_max: int = 3, **more: int) -> Journal:
        begun.append(Journal(path, BOOT, bytes_max=bytes_max, files_max=files_max, **more))
        return begun[-1]

    yield start
    for journal in begun:
        journal.close(5.0)


def wait_until(fact: Callable[[], bool], bound_s: float = 5.0) -> None:
    """Wait for a fact, with a bound."""
    give_up = time.monotonic() + bound_s
    while not fact():
        assert time.monotonic() < give_up, "the fact did not come true in time"
        time.sleep(0.005)


def kinds(path: Path) -> list[str]:
    """Return the kinds on disk, oldest first."""
    return [entry.kind for entry in read(path).entries]


def test_a_line_carries_all_its_stamps(path: Path, begin: Callable[..., Journal]) -> None:
    """seq, wall, both clocks, boot id and a checksum; the checksum covers every byte before it."""
    journal = begin()
    assert journal.append("child.exited", NOW, unit="scheduler", reason="signal 9", fields={"pid": 3}, wall=1.25)
    assert journal.close(5.0) == 0
    (entry,) = read(path).entries
    assert (entry.seq, entry.wall, entry.mono_ns, entry.boot_ns, entry.boot) == (1, 1.25, 1_000, 2_000, BOOT)
    assert (entry.kind, entry.unit, entry.reason, entry.fields) == ("child.exited", "scheduler", "signal 9", {"pid": 3})
    line = path.read_bytes().rstrip(b"\n")
    assert parse(line) == entry
    assert parse(line.replace(b"signal 9", b"signal 8")) is None


def test_numbers_go_on_over_a_restart(path: Path, begin: Callable[..., Journal]) -> None:
    """A gap in the numbers is a loss, so a new supervisor goes on where the former one stopped."""
    first = begin()
    first.append("a.done", NOW)
    first.append("b.done", NOW)
    first.close(5.0)
    second = begin()
    second.append("c.done", NOW)
    second.close(5.0)
    assert [(entry.seq, entry.kind) for entry in read(path).entries] == [(1, "a.done"), (2, "b.done"), (3, "c.done")]


def test_a_torn_last_line_costs_that_line_alone(path: Path, begin: Callable[..., Journal]) -> None:
    """After kill -9 in the middle of a write, the next line begins on a line of its own."""
    first = begin()
    first.append("a.done", NOW)
    first.append("b.done", NOW)
    first.close(5.0)
    os.truncate(path, path.stat().st_size - 20)
    assert kinds(path) == ["a.done"] and read(path).damaged == 0
    second = begin()
    second.append("c.done", NOW)
    second.close(5.0)
    found = read(path)
    assert [entry.kind for entry in found.entries] == ["a.done", "c.done"] and found.damaged == 1


def test_the_journal_is_rotated_by_size_and_bounded(path: Path, begin: Callable[..., Journal]) -> None:
    """Only so many files of only so many bytes, with the newest lines in them in order."""
    journal = begin(bytes_max=2_000, files_max=3)
    for number in range(100):
        journal.append("role.changed", NOW, fields={"n": number})
    journal.close(5.0)
    files = sorted(os.listdir(path.parent))
    assert files == ["journal.jsonl", "journal.jsonl.1", "journal.jsonl.2"]
    assert all((path.parent / file).stat().st_size <= 2_000 for file in files)
    numbers = [entry.seq for entry in read(path).entries]
    assert numbers == list(range(numbers[0], 101)) and len(numbers) >= 20


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "folder removed"])
def test_a_journal_that_was_taken_away_is_made_anew(path: Path, begin: Callable[..., Journal], how: str) -> None:
    """Whatever an operator or a rotation tool does, the next line is written where it belongs."""
    journal = begin()
    journal.append("a.done", NOW)
    wait_until(lambda: kinds(path) == ["a.done"])
    if how == "moved":
        path.rename(path.with_name("elsewhere"))
    else:
        path.unlink()
    if how == "replaced":
        path.touch()
    if how == "folder removed":
        path.parent.rmdir()
    journal.append("b.done", NOW)
    wait_until(lambda: kinds(path) == ["b.done"])
    assert journal.lost == 0


def test_an_overlong_line_is_cut_and_says_so(path: Path, begin: Callable[..., Journal]) -> None:
    """One event cannot fill the disk."""
    journal = begin()
    journal.append("a.done", NOW, reason="x" * 50_000, fields={"y": "z" * 50_000})
    journal.close(5.0)
    (entry,) = read(path).entries
    assert len(entry.reason) == 1_000 and "cut" in entry.fields


def test_a_pipe_in_its_place_is_a_problem_and_no_wait(path: Path, begin: Callable[..., Journal]) -> None:
    """A pipe's reader could stop the writer for ever."""
    path.parent.mkdir()
    os.mkfifo(path)
    journal = begin()
    journal.append("a.done", NOW)
    wait_until(lambda: journal.problem != "")
    assert "not a regular file" in journal.problem
    path.unlink()
    wait_until(lambda: kinds(path) == ["a.done"] and journal.problem == "")


def test_a_follower_sees_each_line_once_through_rotation(path: Path, begin: Callable[..., Journal]) -> None:
    """`events --follow` neither loses nor repeats."""
    journal = begin(bytes_max=1_500, files_max=100)
    follower = Follower(path, -1)
    seen: list[int] = []
    for number in range(60):
        journal.append("role.changed", NOW, fields={"n": number})
        if number % 7 == 0:
            seen += [entry.seq for entry in follower.news()]
    journal.close(5.0)
    seen += [entry.seq for entry in follower.news()]
    assert seen == list(range(1, 61)) and follower.news() == []


def test_a_killed_writer_leaves_whole_lines(path: Path) -> None:
    """kill -9 at any moment: what can be read is a run of numbers without a hole, and no line is wrong."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom xce_supervisor.core.words import Now\n"
        "from xce_supervisor.supervisor.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), 'b', bytes_max=20_000, files_max=50)\n"
        "print('begun', flush=True)\n"
        "while True:\n    journal.append('role.changed', Now(1, 2), reason='x' * 100)\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        before = len(read(path).entries)
        wait_until(lambda least=before + 20: len(read(path).entries) > least)  # type: ignore[misc]
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
    found = read(path)
    numbers = [entry.seq for entry in found.entries]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert found.damaged <= 2


@pytest.mark.needs("userns")
def test_a_full_disk_delays_lines_and_loses_only_what_the_queue_cannot_hold(tmp_path: Path) -> None:
    """docs/rules.md S20: the caller goes on, lost lines are counted, and the count is told once the disk has room."""
    printed = run_on_small_disk(
        tmp_path / "disk",
        """
        import time
        from xce_supervisor.core.words import Now
        from xce_supervisor.supervisor.journal import *
        def until(fact):
            end = time.monotonic() + 10
            while not fact():
                assert time.monotonic() < end
                time.sleep(0.01)
        journal = Journal(disk / "j", "b", bytes_max=100_000, files_max=2, queue_max=50)
        journal.append("a.done", Now(1, 2))
        until(lambda: [e.kind for e in read(disk / "j").entries] == ["a.done"])
        fill()
        worst = 0.0
        for n in range(200):
            began = time.monotonic()
            journal.append("b.done", Now(1, 2), reason="y" * 200, fields={"n": n})
            worst = max(worst, time.monotonic() - began)
        until(lambda: "No space left" in journal.problem)
        lost = journal.lost
        free()
        until(lambda: any(e.kind == "journal.lost" for e in read(disk / "j").entries))
        found = read(disk / "j")
        kept = [e for e in found.entries if e.kind == "b.done"]
        told = [e.fields["lines"] for e in found.entries if e.kind == "journal.lost"]
        assert [e.seq for e in found.entries] == list(range(1, len(found.entries) + 1))
        assert journal.close(5) == 0
        print(len(kept) + lost, sum(told) == lost, found.damaged, journal.problem == "", worst < 0.1, len(kept) >= 50)
        """,
    )
    assert printed == "200 True 0 True True True\n"


@pytest.mark.needs("strace")
def test_a_hung_disk_stops_nobody(path: Path) -> None:
    """docs/rules.md S20: while the disk hangs, `append` returns at once, the queue stays bounded, and `problem` says it hangs."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom xce_supervisor.core.words import Now\n"
        "from xce_supervisor.supervisor.journal import Journal, read\n"
        "path = Path(sys.argv[1])\n"
        "journal = Journal(path, 'b', bytes_max=100_000, files_max=2, queue_max=10, hung_s=0.3)\n"
        "journal.append('a.done', Now(1, 2))\n"
        "end = time.monotonic() + 10\n"
        "while 'hangs' not in journal.problem:\n    assert time.monotonic() < end\n    time.sleep(0.01)\n"
        "began = time.monotonic()\n"
        "kept = sum(journal.append('b.done', Now(1, 2)) for _ in range(500))\n"
        "took = time.monotonic() - began\n"
        "print(kept, journal.lost, took < 0.25, journal.close(0.1) >= 9)\n"
    )
    done = subprocess.run(
        [
            "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=1500000",
            sys.executable, "-c", code, str(path),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "9 491 True True\n", (done.stdout, done.stderr)
