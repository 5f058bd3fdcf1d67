"""What an operator gets wrong is one clear line and the documented exit code, never a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.stage import SETTINGS, configured, verb
from xce_supervisor import __version__
from xce_supervisor.cli.asking import VARIABLE
from xce_supervisor.cli.entry import ExitCode

OPERATING = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


@pytest.mark.parametrize("program", ["supervisor", "testbed"])
def test_both_programs_say_their_version_and_help(program: str) -> None:
    """The first thing that anybody tries."""
    assert verb("--version", program=program).stdout == f"xce-{program}, version {__version__}\n"
    done = verb("--help", program=program)
    assert done.returncode == 0 and "Commands:" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("statsu",), "No such command 'statsu'."),
        (("status", "--jsn"), "No such option"),
        (("run", "-c"), "requires an argument"),
        (("why", "a", "b"), "Got unexpected extra argument"),
        (("events", "-n", "x"), "is not a valid integer"),
        (("demo", "--controllers", "1"), "is not in the range"),
    ],
)
def test_wrong_arguments_are_78_and_one_line(args: tuple[str, ...], said: str) -> None:
    """With the command whose help to read."""
    done = verb(*args)
    assert done.returncode == 78 and said in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "--help" in done.stderr


@pytest.mark.parametrize("command", [("run",), ("status",), ("why",), ("events",), ("check",), ("restart", "x")])
def test_a_missing_configuration_is_78_for_every_verb(tmp_path: Path, command: tuple[str, ...]) -> None:
    """The file is named, and what to do."""
    file = tmp_path / "none.toml"
    done = verb(*command, "-c", file)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == (
        f"xce-supervisor: {file}: cannot be read: No such file or directory; create it, or name another file with --config\n"
    )
    assert verb(*command, env={VARIABLE: str(file)}).stderr == done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('id = "c1"', 'idd = "c1"'), "controller.idd: unknown key; did you mean id?"),
        (("127.0.0.1:1", "127.0.0.1"), "controller.address: '127.0.0.1' is not \"host:port\""),
        (("[tls]", "[tls"), "is not TOML"),
        (("insecure = true", 'ca = "a"\ncert = "b"\nkey = "c"'), "TLS needs this file"),
        (('"state"', '"/dev/null/state"'), "/dev/null/state cannot be made: Not a directory"),
    ],
)
def test_run_refuses_what_it_cannot_use(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    """docs/rules.md S25: before anything is started or made."""
    assert change[0] in SETTINGS
    done = verb("run", "-c", configured(tmp_path, SETTINGS.replace(*change)))
    assert done.returncode == 78, done
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists() or "cannot be made" in said or "TLS" in said


def test_a_mismatched_pair_is_refused_by_its_files(tmp_path: Path) -> None:
    """The certificate of one and the key of another."""
    assert verb("pki", tmp_path / "pki", "supervisor/c1", "supervisor/c2", program="testbed").returncode == 0
    pair = 'ca = "pki/ca.pem"\ncert = "pki/supervisor-c1.pem"\nkey = "pki/supervisor-c2.key"'
    file = configured(tmp_path, SETTINGS.replace("insecure = true", pair))
    for command in ("run", "check"):
        done = verb(command, "-c", file)
        assert done.returncode == (78 if command == "run" else 1)
        assert "supervisor-c1.pem and" in done.stdout + done.stderr
        assert "do not belong together" in done.stdout + done.stderr


def test_ctrl_c_is_silent(tmp_path: Path) -> None:
    """`events --follow` is ended by it every day."""
    file = configured(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "xce_supervisor.cli.supervisor", "events", "-f", "-c", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _until_handler_is_there(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, b"", b"")


def _until_handler_is_there(pid: int) -> None:
    """Wait until the process sleeps in its loop: it handles SIGINT by then."""
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        wchan = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
        caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
        if "nanosleep" in wchan and int(caught.split()[1], 16) & 1 << (signal.SIGINT - 1):
            return
        time.sleep(0.01)
    raise AssertionError("it never slept")


def test_every_exit_code_is_in_the_manual() -> None:
    """docs/operating.md lists each, once."""
    table = OPERATING.read_text(encoding="utf-8")
    for code in ExitCode:
        assert table.count(f"\n| {code.value} | ") == 1, code
