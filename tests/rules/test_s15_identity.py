"""docs/rules.md S15: a signal goes through a pidfd whose process was verified, so a wrong record harms no stranger."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import xce_supervisor.process
from tests.process.stage import until
from xce_supervisor.core.words import Identity
from xce_supervisor.process.identity import (
    boot_id,
    is_alive,
    open_pidfd,
    parse_stat,
    read_identity,
    read_stat,
    send_signal,
)

ROOM = Path(xce_supervisor.process.__file__).parent


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody may harm."""
    process = subprocess.Popen(["sleep", "50"])
    yield process
    process.kill()
    process.wait()


def test_a_record_of_another_process_harms_no_stranger(stranger: subprocess.Popen[bytes]) -> None:
    """docs/rules.md S15: same pid, other start ticks; same pid, another boot; nonsense: nothing is signalled."""
    real = read_identity(stranger.pid)
    assert real is not None and is_alive(real)
    wrong = [
        Identity(real.pid, real.start_ticks - 1, real.boot_id),
        Identity(real.pid, real.start_ticks + 1, real.boot_id),
        Identity(real.pid, 0, real.boot_id),
        Identity(real.pid, real.start_ticks, "00000000-0000-0000-0000-000000000000"),
        Identity(real.pid, real.start_ticks, ""),
        Identity(0, 0, real.boot_id),
        Identity(-1, 0, real.boot_id),
        Identity(-real.pid, real.start_ticks, real.boot_id),
        Identity(2**22 + 1, 1, real.boot_id),
    ]
    for identity in wrong:
        assert not is_alive(identity), identity
        assert not send_signal(identity, signal.SIGKILL), identity
        with pytest.raises(ProcessLookupError):
            open_pidfd(identity)
    assert stranger.poll() is None
    assert send_signal(real, signal.SIGKILL)
    assert stranger.wait(20) == -signal.SIGKILL
    assert not is_alive(real) and not send_signal(real, signal.SIGKILL)


def test_a_zombie_has_an_identity_and_is_not_alive(stranger: subprocess.Popen[bytes]) -> None:
    """docs/rules.md S15: until it is reaped its pid is its own; a signal to it goes nowhere and is no error."""
    real = read_identity(stranger.pid)
    assert real is not None
    stranger.kill()
    until(lambda: (stat := read_stat(real.pid)) is not None and stat.dead, "a zombie")
    assert read_identity(stranger.pid) == real and not is_alive(real)
    assert send_signal(real, signal.SIGTERM)


def test_a_pidfd_is_not_inherited(stranger: subprocess.Popen[bytes]) -> None:
    """docs/rules.md S15, S18: no child may hold on to another one."""
    real = read_identity(stranger.pid)
    assert real is not None
    fd = open_pidfd(real)
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_name_cannot_forge_the_fields_behind_it(tmp_path: Path) -> None:
    """docs/rules.md S15: a process may call itself anything; what counts stands behind the last bracket."""
    forged = b"7 (a) Z 1 1 1 0 (b) S 42 43 44 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 777 1 1\n"
    stat = parse_stat(forged)
    assert (stat.pid, stat.name, stat.state, stat.ppid, stat.pgrp, stat.session) == (7, "a) Z 1 1 1 0 (b", "S", 42, 43, 44)
    assert stat.start_ticks == 777
    program = tmp_path / ") Z 1 (x"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "50"])
    try:
        until(lambda: (found := read_stat(process.pid)) is not None and found.name == ") Z 1 (x", "its name is there")
        found = read_stat(process.pid)
        assert found is not None and found.ppid == os.getpid() and not found.dead
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("text", [b"", b"1", b"1 (x", b"1 x) S 1", b"x (x) S 1 1 1", b"1 (x) S 1 1 1", b"1 (x) " + b"y " * 30])
def test_a_line_that_is_none_is_refused(text: bytes) -> None:
    """docs/rules.md S15: garbage is a ValueError, never a wrong identity."""
    with pytest.raises(ValueError):  # int() has words of its own
        parse_stat(text)


def test_there_is_no_process_of_that_number() -> None:
    """docs/rules.md S15: reading what is not there says None."""
    assert read_stat(2**22 + 1) is None and read_identity(2**22 + 1) is None
    assert len(boot_id()) == 36


def test_no_wall_clock_decides_who_somebody_is() -> None:
    """docs/rules.md S15, S21: this room never reads the wall clock, and no start time that is derived from it."""
    wrong = []
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in {"create_time", "time_ns", "now", "utcnow", "CLOCK_REALTIME"}:
                wrong.append(f"{path.name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.Attribute) and node.attr == "time" and getattr(node.value, "id", "") == "time":
                wrong.append(f"{path.name}:{node.lineno} time.time")
    assert not wrong


def test_every_signal_of_this_room_goes_through_a_verified_pidfd() -> None:
    """docs/rules.md S15: no kill, killpg or pidfd_send_signal outside of the two places that open the pidfd themselves."""
    allowed = {("identity.py", "pidfd_send_signal"), ("group.py", "pidfd_send_signal")}
    found = set()
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in {"killpg", "pidfd_send_signal", "send_signal", "terminate"}:
                found.add((path.name, node.attr))
            if isinstance(node, ast.Attribute) and node.attr == "kill" and getattr(node.value, "id", "") == "os":
                found.add((path.name, "os.kill"))
    assert found == allowed
