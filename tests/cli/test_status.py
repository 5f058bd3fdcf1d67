"""`status`, `why` and the verbs that change something: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.stage import CRASHING, PAUSED, SETTINGS, configured, supervising, unit, verb, view
from xce_supervisor.supervisor.view import RoleView, View


def test_all_as_wanted_is_zero(tmp_path: Path) -> None:
    """One look: the role, the unit, and the words."""
    file = configured(tmp_path)
    with supervising(tmp_path, view):
        done = verb("status", "-c", file)
    assert done.returncode == 0 and done.stderr == ""
    assert "c1 on alpha: all as wanted" in done.stdout
    assert "primary since 1 min 06 s, term 7" in done.stdout
    assert "3 pending, 2 running, 17 finished" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("scheduler")).split()
    assert row[:4] == ["scheduler", "yes", "running", "joined"] and "4711" in row


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (view(CRASHING), ["DEGRADED", "! scheduler: crashed 3 times in a row", "next attempt in 1.5 s", "last exit: SIGKILL"]),
        (view(unit(), PAUSED), ["DEGRADED", "! metrics: paused by älice: works"]),
        (view(unit(ready="not joined")), ["! scheduler: wanted, and running, not joined"]),
        (view(unit(wanted=False, wanted_reason="standby")), ["! scheduler: not wanted, and running"]),
        (
            view(role=RoleView(is_="unknown", reason="no answer within 1000 ms", unknown_remaining_s=2.1)),
            ["! role unknown: no answer within 1000 ms", "role-bound units are stopped in 2.1 s"],
        ),
        (view(degraded=("the journal hangs",)), ["! the journal hangs"]),
        (
            view(role=RoleView(is_="standby", gate="apply-divergent", gate_detail="index 9")),
            ["! promotion refused by gate apply-divergent: index 9"],
        ),
    ],
)
def test_what_is_not_as_wanted_is_one_and_says_why(tmp_path: Path, said: View, words: list[str]) -> None:
    """docs/rules.md S23: every reason is a line, and the exit code lets a probe see it."""
    file = configured(tmp_path)
    with supervising(tmp_path, lambda: said):
        done = verb("status", "-c", file)
    assert done.returncode == 1, done
    for text in words:
        assert text in done.stdout


def test_json_has_every_field_and_is_the_same_words(tmp_path: Path) -> None:
    """docs/rules.md S23: wanted, is, ready, since, pid, binding, restarts, last exit, next attempt, and the last events."""
    file = configured(tmp_path)
    with supervising(tmp_path, lambda: view(CRASHING)):
        done = verb("status", "--json", "-c", file)
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["responding"] is True
    (one,) = said["units"]
    assert one["is"] == "waiting" and one["last_exit"]["signal"] == "SIGKILL" and one["binding"]["term"] == 7
    assert {
        "wanted",
        "wanted_reason",
        "is",
        "ready",
        "since_s",
        "pid",
        "binding",
        "restarts",
        "last_exit",
        "next_attempt_s",
    } <= set(one)
    assert one["events"][0]["kind"] == "child.spawned" and said["role"]["is"] == "primary"
    assert said["supervisor"]["controller_address"] == "127.0.0.1:1"


def test_no_supervisor_is_three(tmp_path: Path) -> None:
    """With and without a last status."""
    file = configured(tmp_path)
    done = verb("status", "-c", file)
    assert done.returncode == 3 and "not running: no supervisor listens on" in done.stdout
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_bytes(msgspec.json.encode(view(wall=1.0)))
    done = verb("status", "-c", file)
    assert done.returncode == 3
    assert "What follows is the last status" in done.stdout and "was all as wanted" in done.stdout
    said = json.loads(verb("status", "--json", "-c", file).stdout)
    assert said["responding"] is False and "not running" in said["trouble"] and said["age_s"] > 1e9
    (tmp_path / "run" / "status.json").write_text("broken", encoding="utf-8")
    assert "No last status" in verb("status", "-c", file).stdout


def test_why_lists_each_gate_and_what_happened_last(tmp_path: Path) -> None:
    """docs/rules.md S23: closed ones stand out; an unknown unit is refused with a suggestion."""
    file = configured(tmp_path)
    with supervising(tmp_path, lambda: view(CRASHING)):
        done = verb("why", "scheduler", "-c", file)
        assert done.returncode == 1
        assert "  open    role\n" in done.stdout and "  CLOSED  backoff: 1.5 s left\n" in done.stdout
        assert "child.spawned" in done.stdout and "! crashed 3 times in a row" in done.stdout
        assert verb("why", "-c", file).stdout == done.stdout
        said = json.loads(verb("why", "scheduler", "--json", "-c", file).stdout)
        assert said["units"][0]["gates"][1] == {"name": "backoff", "closed": True, "detail": "1.5 s left"}
        done = verb("why", "schedular", "-c", file)
        assert done.returncode == 5 and "no unit is called schedular; did you mean scheduler?" in done.stderr


def test_changes_are_asked_for_and_told(tmp_path: Path) -> None:
    """docs/rules.md S24: a pause has a reason; a refusal is five; nobody there is three."""
    file = configured(tmp_path)
    asked: list[tuple[str, dict[str, Any]]] = []
    with supervising(tmp_path, view, asked):
        assert verb("pause", "scheduler", "--why", "upgrade", "-c", file).stdout.startswith("scheduler is paused")
        assert verb("resume", "scheduler", "-c", file).returncode == 0
        assert json.loads(verb("restart", "scheduler", "--json", "-c", file).stdout)["ok"] is True
        assert [name for name, _ in asked] == ["pause", "resume", "restart"]
        assert asked[0][1]["why"] == "upgrade"
        done = verb("restart", "nobody", "-c", file)
        assert (done.returncode, done.stderr) == (5, "xce-supervisor: unknown unit nobody; known are scheduler\n")
        assert verb("pause", "scheduler", "-c", file).returncode == 78
        assert verb("pause", "scheduler", "--why", " ", "-c", file).returncode == 78
        assert verb("pause", "scheduler", "--why", "x" * 301, "-c", file).returncode == 78
    done = verb("restart", "scheduler", "-c", file)
    assert done.returncode == 3 and "not running" in done.stderr


def test_a_pipe_gets_plain_ascii_and_a_terminal_gets_colours(tmp_path: Path) -> None:
    """No escape and no box character where no terminal is; nothing that a peer wrote can move a cursor anywhere."""
    file = configured(tmp_path)
    with supervising(tmp_path, lambda: view(unit(), PAUSED)):
        plain = verb("status", "-c", file).stdout
        assert "\x1b" not in plain and "\\x1b[31m" in plain
        assert all(letter.isascii() or letter == "ä" for letter in plain)
        latin = verb("status", "-c", file, env={"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
        assert latin.returncode == 1 and "paused by \\xe4lice" in latin.stdout
        shown = _on_terminal("status", "-c", str(file))
    assert "\x1b[" in shown and "─" in shown and "\x1b[31m on it" not in shown


def _on_terminal(*args: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LANG": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "xce_supervisor.cli.supervisor", *args],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        env=environment,
    )
    os.close(theirs)
    parts: list[bytes] = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:
        pass  # how Linux says that the other side of a terminal is closed
    os.close(ours)
    process.wait(10)
    return b"".join(parts).decode()


@pytest.mark.parametrize("args", [("status",), ("status", "--json"), ("why",)])
def test_a_closed_pipe_and_a_full_disk_are_no_traceback(tmp_path: Path, args: tuple[str, ...]) -> None:
    """`status | head -0` ends silently; a full disk is one line."""
    file = configured(tmp_path)
    with supervising(tmp_path, view):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as closed:
            done = verb(*args, "-c", file, stdout=closed, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, "")
        with open("/dev/full", "wb") as full:
            done = verb(*args, "-c", file, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 74
        assert done.stderr == "xce-supervisor: standard output cannot be written: No space left on device\n"


def test_a_broken_configuration_does_not_blind_status(tmp_path: Path) -> None:
    """docs/rules.md S22: what was broken under a running supervisor is not needed to ask it."""
    file = configured(tmp_path, SETTINGS + "[role]\npoll_interval_ms = -3\n")
    with supervising(tmp_path, view):
        assert verb("status", "-c", file).returncode == 0
        assert verb("check", "-c", file).returncode == 78


def test_a_status_stays_small_and_quick(tmp_path: Path) -> None:
    """What a verb does not need is not loaded: neither the core nor TLS nor asyncio, and rich only for a terminal."""
    file = configured(tmp_path)
    code = (
        "import sys\nsys.argv = ['xce-supervisor', 'status', '-c', sys.argv[1]]\n"
        "from xce_supervisor.cli.supervisor import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('rich', 'asyncio', 'uvloop', 'ssl', 'structlog', 'capnp', 'grpc', 'cryptography', 'psutil',"
        " 'xce_supervisor.core', 'xce_supervisor.link') if name in sys.modules])\n"
    )
    with supervising(tmp_path, view):
        done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done
