"""docs/rules.md S11: before a wedged child is killed, what the kernel knows of it is kept in one bounded bundle."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.freezer import frozen, need_freezer
from tests.process.stage import in_lane, until
from xce_supervisor.core.words import Identity
from xce_supervisor.process import evidence
from xce_supervisor.process.identity import read_identity, read_stat

CHILD = """
import os, socket, sys, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
client.sendall(b"x" * 1234)     # received, not read
here, there = socket.socketpair()
threading.Thread(target=time.sleep, args=(50,), daemon=True).start()
file = open(sys.argv[1])
print(server.getsockname()[1], flush=True)
time.sleep(50)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[Identity, int]]:
    """A process with two threads, a file, and 1234 bytes waiting in a socket; with its port."""
    (tmp_path / "opened").write_text("x", encoding="ascii")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "opened")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    identity = read_identity(process.pid)
    assert identity is not None
    yield identity, port
    process.kill()
    process.communicate()


def kept(folder: Path, identity: Identity, **more: Any) -> dict[str, Any]:
    """Collect in a lane and return what was kept."""
    path = in_lane(partial(evidence.collect, folder, "scheduler", identity, **more))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_bundle_says_what_the_kernel_knows(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11: status, wchan, stack, descriptors, socket queues, the log's end and what the caller adds."""
    identity, port = child
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(20_000)), encoding="ascii")
    found = kept(tmp_path / "evidence", identity, log=log, extra={"reason": "stall", "controller": {"unacted": 7}})
    assert found["extra"] == {"reason": "stall", "controller": {"unacted": 7}}
    assert found["log"]["tail"].endswith("line 19999\n") and len(found["log"]["tail"]) <= 32 * 1024
    (about,) = found["processes"]
    assert about["pid"] == identity.pid and about["state"] == "S" and f"Pid:\t{identity.pid}" in about["status"]
    assert str(tmp_path / "opened") in about["descriptors"].values()
    assert len(about["threads"]) == 2 and all(thread["wchan"] for thread in about["threads"])
    assert about["stack"] and (os.geteuid() != 0 or "[<0>]" in about["stack"])
    waiting = [each for each in about["sockets"] if each.get("receive_queue_bytes") == "1234"]
    assert [(each["local"], each["state"]) for each in waiting] == [(f"127.0.0.1:{port}", "ESTABLISHED")]
    assert any(each.get("state") == "LISTEN" for each in about["sockets"])
    assert sum(each["kind"] == "unix" for each in about["sockets"]) == 2


def test_a_stopped_child_is_described(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11: state T, the most common wedge of an operator's making."""
    identity, _ = child
    os.kill(identity.pid, signal.SIGSTOP)
    until(lambda: (stat := read_stat(identity.pid)) is not None and stat.state == "T", "stopped")
    (about,) = kept(tmp_path / "evidence", identity)["processes"]
    assert about["state"] == "T" and "State:\tT" in about["status"] and about["descriptors"]


def test_a_child_in_uninterruptible_sleep_is_described(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11: state D; nothing is read that such a process could make wait."""
    need_freezer()
    identity, _ = child
    with frozen(identity.pid):
        until(lambda: (stat := read_stat(identity.pid)) is not None and stat.state == "D", "frozen")
        (about,) = kept(tmp_path / "evidence", identity)["processes"]
    assert about["state"] == "D" and "State:\tD" in about["status"] and about["descriptors"]


def test_what_is_gone_or_somebody_else_is_not_described(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11, S15: a pid that belongs to another process by now tells nothing about ours."""
    identity, _ = child
    other = Identity(identity.pid, identity.start_ticks + 1, identity.boot_id)
    found = kept(tmp_path / "evidence", other, members=[identity, other])
    assert found["processes"][0] == {"pid": identity.pid, "gone": True}
    assert "status" in found["processes"][1] and len(found["processes"]) == 2


def test_the_bundle_is_bounded(tmp_path: Path, child: tuple[Identity, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/rules.md S11: many processes, a huge extra, a huge log without newlines: never above the limit."""
    identity, _ = child
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.truncate(50_000_000)
    many = [Identity(identity.pid, identity.start_ticks, f"boot {number}") for number in range(100)]
    found = kept(tmp_path / "evidence", identity, members=many, log=log, extra={"text": "x" * 1_000_000})
    assert found["processes_left_out"] == 101 - 16 and len(found["extra"]["cut"]) == 64 * 1024
    assert sum(path.stat().st_size for path in (tmp_path / "evidence").iterdir()) <= evidence.BUNDLE_BYTES_MAX
    monkeypatch.setattr(evidence, "BUNDLE_BYTES_MAX", 30_000)
    small = kept(tmp_path / "evidence", identity, members=[identity])
    assert small["processes"] == [] or len(json.dumps(small)) < 30_000


def test_only_the_newest_bundles_are_kept(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11: a child that wedges every minute does not fill the disk; foreign files are left alone."""
    identity, _ = child
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "operators-notes.txt").write_text("mine", encoding="ascii")
    for number in range(7):
        in_lane(partial(evidence.collect, folder, f"unit/{number}", identity, keep=3))
    assert sorted(path.name for path in folder.iterdir()) == [
        "000005-unit_4.json",
        "000006-unit_5.json",
        "000007-unit_6.json",
        "operators-notes.txt",
    ]


def test_a_disk_that_takes_no_more_costs_the_bundle_and_leaves_no_half_of_it(tmp_path: Path, child: tuple[Identity, int]) -> None:
    """docs/rules.md S11: OSError for the caller, who goes on with the kill; nothing half-written is left."""
    identity, _ = child
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # fails in the middle of the file, as a full disk does
    try:
        with pytest.raises(OSError, match="File too large"):
            in_lane(partial(evidence.collect, tmp_path / "evidence", "u", identity))
        assert list((tmp_path / "evidence").iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    """docs/rules.md S11: 32-bit words of the address are in host byte order."""
    assert evidence.address("0100007F:0050") == "127.0.0.1:80"
    assert evidence.address("B80D0120000000000000000001000000:01BB") == "[2001:0db8:0000:0000:0000:0000:0000:0001]:443"
    assert socket.inet_ntop(socket.AF_INET6, bytes.fromhex("20010db8" + "0" * 23 + "1")) == "2001:db8::1"
