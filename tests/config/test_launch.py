"""What exactly is started for a unit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xce_supervisor.config import launch, load
from xce_supervisor.config.command import find_program
from xce_supervisor.core.words import Binding

BINDING = Binding("c1", "i-1", 7)

SETTINGS = """
[controller]
id = "c1"
address = "127.0.0.1:7400"
[supervisor]
state_dir = "state"
[tls]
insecure = true
[units]
directories = ["units"]
"""

UNIT = """
[unit]
name = "one"
binding = "role"
command = ["/opt/one", "{controller_address}", "--id={controller_id}/{instance_id}", "{term}", "{{term}}", "{tls_cert}"]
umask = "027"
[limits]
nofile = "10:20"
core = "unlimited"
cpu = 5
[environment]
set = { TOKEN = "{spawn_token}" }
pass = ["PATH", "ABSENT"]
[output]
kind = "file"
path = "{controller_id}.out"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """supervisor.toml with one unit."""
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "one.toml").write_text(UNIT, encoding="utf-8")
    (tmp_path / "supervisor.toml").write_text(SETTINGS, encoding="utf-8")
    return tmp_path / "supervisor.toml"


def test_placeholders_are_filled_in_once(file: Path) -> None:
    """A value that looks like a placeholder is not filled in again."""
    config = load(file)
    started = launch(config, config.units[0], BINDING, "{term}", {"PATH": "/bin", "HOME": "/root"})
    assert started.argv == ("/opt/one", "127.0.0.1:7400", "--id=c1/i-1", "7", "{term}", "")
    assert started.environment == {"PATH": "/bin", "TOKEN": "{term}"}
    assert started.output_file == file.parent / "state" / "c1.out"
    assert started.umask == 0o027
    assert started.limits == {"nofile": (10, 20), "core": (-1, -1), "cpu": (5, 5)}


def test_a_bare_program_is_found_beside_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation runs what came with it, also when its folder is not in PATH."""
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder in (beside, elsewhere):
        folder.mkdir()
        (folder / "prog").write_text("#!/bin/sh\n", encoding="utf-8")
        (folder / "prog").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert find_program("prog", str(elsewhere)) == str(beside / "prog")
    (beside / "prog").chmod(0o644)
    assert find_program("prog", str(elsewhere)) == str(elsewhere / "prog")
    assert find_program("no-such-program", str(elsewhere)) is None
    assert find_program("/no/such/program") == "/no/such/program"
