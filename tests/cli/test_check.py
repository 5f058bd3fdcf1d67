"""`check`: what stands in the way, and what would be done."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.cli.stage import SETTINGS, configured, verb

UNIT = '[unit]\nname = "one"\nbinding = "role"\ncommand = ["{program}", "{{controller_address}}"]\n'


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a unit whose program is there."""
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "one.toml").write_text(UNIT.format(program="/bin/true"), encoding="utf-8")
    return tmp_path


def settings(port: int = 1) -> str:
    """A configuration of that folder."""
    return SETTINGS.replace("127.0.0.1:1", f"127.0.0.1:{port}") + '[units]\ndirectories = ["units"]\n'


def findings(file: Path) -> list[tuple[str, str, str]]:
    """Return level, key and text of each finding."""
    said = json.loads(verb("check", "--json", "-c", file).stdout)
    return [(one["level"], one["key"], one["text"]) for one in said["findings"]]


def test_a_world_in_order_is_zero_and_says_what_would_be_done(world: Path) -> None:
    """In words, with the command line as it is written; nothing is made or changed."""
    with socket.create_server(("127.0.0.1", 0)) as controller:
        file = configured(world, settings(controller.getsockname()[1]))
        done = verb("check", "-c", file)
    assert done.returncode == 0, done
    assert "the configuration is sound" in done.stdout
    assert "one would run while controller c1 at 127.0.0.1:" in done.stdout
    assert "exit push for 1 s, SIGTERM, after 5 s SIGKILL to its whole tree" in done.stdout
    assert sorted(os.listdir(world)) == ["c1.toml", "units"]


def test_what_is_missing_in_the_world_is_named(world: Path) -> None:
    """Errors first; each with the file that asks for it."""
    unit = UNIT.format(program="/no/such/program").replace("[unit]", '[unit]\ncwd = "/no/such/folder"\nuser = "nobody-such"')
    (world / "units" / "one.toml").write_text(unit, encoding="utf-8")
    file = configured(world, settings())
    assert verb("check", "-c", file).returncode == 1
    found = findings(file)
    keys = {key: text for level, key, text in found if level == "error"}
    assert "/no/such/program" in keys["unit.command[0]"] and "ENOENT" in keys["unit.command[0]"]
    assert "/no/such/folder is not a folder" in keys["unit.cwd"]
    assert "nobody-such" in keys["unit.user"]
    assert [level for level, _, _ in found] == sorted((level for level, _, _ in found), key=["error", "warning", "note"].index)
    assert any(key == "controller.address" and "nothing takes connections" in text for _, key, text in found)


def test_a_name_without_an_address_is_an_error(world: Path) -> None:
    """As wrong as a wrong port, and told before the night."""
    file = configured(world, settings().replace("127.0.0.1:", "no-such-host.invalid:"))
    assert ("error", "controller.address") in [(level, key) for level, key, _ in findings(file)]


def test_certificates_are_looked_at(world: Path) -> None:
    """Of whom they are, and whether the child has one of its own."""
    assert verb("pki", world / "pki", "supervisor/c1", "worker/w1", program="testbed").returncode == 0
    pair = 'ca = "pki/ca.pem"\ncert = "pki/worker-w1.pem"\nkey = "pki/worker-w1.key"'
    found = findings(configured(world, settings().replace("insecure = true", pair)))
    assert any(key == "tls" and "is a certificate for a worker, not for a supervisor" in text for _, key, text in found)
    pair = pair.replace("worker-w1", "supervisor-c1")
    found = findings(configured(world, SETTINGS.replace("insecure = true", pair)))
    assert any(key == "tls.children.scheduler" and text.startswith("missing:") for _, key, text in found)
    pair = pair.replace("pki/ca.pem", "pki/none.pem")
    found = findings(configured(world, settings().replace("insecure = true", pair)))
    assert any(level == "error" and key == "tls" and "none.pem" in text for level, key, text in found)
