"""The notify socket: what children tell is understood, strangers and garbage are not, and nothing blocks the loop."""

from __future__ import annotations

import array
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.process.stage import BOUND_S, ROOT
from xce_supervisor.process.notify import DATAGRAM_BYTES_MAX, Notice, NotifySocket, parse, sd_notify

OWN = os.getpid()


def run(scene: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(scene(asyncio.get_running_loop()), 2 * BOUND_S)

    asyncio.run(body())


async def soon(fact: Callable[[], Any], what: str) -> None:
    give_up = time.monotonic() + BOUND_S
    while not fact():
        assert time.monotonic() < give_up, f"not in time: {what}"
        await asyncio.sleep(0.002)


class Sender:
    """A client that says what no library would."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.connect(b"\0" + address[1:].encode() if address[0] == "@" else address)

    def send(self, data: bytes) -> None:
        self.socket.send(data)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()


def test_every_known_key_is_understood() -> None:
    """READY, STOPPING, RELOADING, WATCHDOG, STATUS and X_XCE_* in any order; unknown ones beside them do no harm."""
    text = b"STATUS=joined\nREADY=1\nWATCHDOG=1\nMAINPID=17\nX_XCE_ACTED=9\nX_XCE_DEADLINE=1=2\nRELOADING=1\nSTOPPING=1\n"
    assert parse(text, 5) == Notice(5, True, True, True, True, "joined", {"X_XCE_ACTED": "9", "X_XCE_DEADLINE": "1=2"})
    assert parse(b"READY=0\nWATCHDOG=trigger", 5) is None
    assert parse(b"MAINPID=1", 5) is None and parse(b"", 5) is None


@given(st.binary(max_size=DATAGRAM_BYTES_MAX))
def test_no_datagram_makes_the_parser_fail(data: bytes) -> None:
    """Any bytes: a notice with bounded, printable texts, or None."""
    notice = parse(data, 1)
    if notice is not None:
        texts = [notice.status or "", *notice.extra.values(), *notice.extra]
        assert all(len(text) <= 1024 and (text.isprintable() or not text) for text in texts)


def test_texts_are_cut_and_cleaned() -> None:
    """A status of 8000 characters with escape codes is cut to 512 and has no control character left."""
    notice = parse(b"STATUS=\x1b[31m\xc7\x07" + b"s" * 8000, 1)
    assert notice is not None and notice.status is not None
    assert len(notice.status) == 512 and notice.status.isprintable()


def test_what_is_told_before_listening_is_not_lost(tmp_path: Path) -> None:
    """A child that is ready at once tells so before its tree is known: the socket keeps it until `listen`."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        told: list[Notice] = []
        own = NotifySocket(loop, tmp_path / "n")
        assert sd_notify(own.address, READY=1, STATUS="early", X_XCE_N=3)
        own.listen(lambda pid: pid == OWN, told.append)
        await soon(lambda: told, "told")
        assert told == [Notice(OWN, ready=True, status="early", extra={"X_XCE_N": "3"})]
        own.hold()
        assert sd_notify(own.address, WATCHDOG=1)
        await asyncio.sleep(0)
        assert len(told) == 1, "held back while the next child is spawned"
        own.listen(lambda pid: pid == OWN, told.append)
        await soon(lambda: len(told) == 2, "told after the hold")
        own.close()
        own.close()
        assert list(tmp_path.iterdir()) == [] and not sd_notify(own.address, READY=1)

    run(scene)


def test_a_stranger_is_not_believed(tmp_path: Path) -> None:
    """The kernel names the sender; one outside the child's tree is counted and changes nothing."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        told: list[Notice] = []
        asked: set[int] = set()

        def contains(pid: int) -> bool:
            asked.add(pid)
            return pid == OWN

        own = NotifySocket(loop, tmp_path / "n", mode=0o666)
        assert (tmp_path / "n").stat().st_mode & 0o777 == 0o666
        own.listen(contains, told.append)
        client = "import sys; from xce_supervisor.process.notify import sd_notify; print(sd_notify(READY=1)); sys.stdin.read()"
        env = {**os.environ, "NOTIFY_SOCKET": own.address, "PYTHONPATH": str(ROOT)}
        stranger = subprocess.Popen(
            [sys.executable, "-c", client], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        await soon(lambda: own.refused == 1, "refused")
        stranger.communicate(timeout=BOUND_S)
        assert asked == {stranger.pid} and told == []
        sd_notify(own.address, STOPPING=1)
        await soon(lambda: told, "ours is believed")
        own.close()

    run(scene)


def test_hostile_datagrams_are_counted_and_harm_nobody(tmp_path: Path) -> None:
    """Empty, binary, too long, with descriptors attached: refused, bounded, and no descriptor stays open."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        told: list[Notice] = []
        own = NotifySocket(loop, tmp_path / "n")
        own.listen(lambda pid: pid == OWN, told.append)
        before = len(os.listdir("/proc/self/fd"))
        with Sender(own.address) as sender, open(os.devnull, "rb") as null:
            for data in (b"", b"\0" * 100, b"\xff" * DATAGRAM_BYTES_MAX, b"READY=1\n" + b"x" * DATAGRAM_BYTES_MAX):
                sender.send(data)
            await soon(lambda: own.refused == 4, "four refused")
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * 50))]
            sender.socket.sendmsg([b"WATCHDOG=1"], rights)
            await soon(lambda: told, "the text of the fifth is taken")
        assert told == [Notice(OWN, watchdog=True)]
        assert len(os.listdir("/proc/self/fd")) == before
        own.close()

    run(scene)


def test_a_flood_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """A child that notifies without end is read in portions; the loop keeps its turns and the sender waits."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        told: list[Notice] = []
        own = NotifySocket(loop, tmp_path / "n")
        own.listen(lambda _: True, told.append)
        program = (
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "s.connect(sys.argv[1])\n"
            "while True: s.send(b'WATCHDOG=1')\n"
        )
        flood = subprocess.Popen([sys.executable, "-c", program, own.address], stderr=subprocess.DEVNULL)
        await soon(lambda: len(told) >= 256, "the flood has begun")
        began, before, turns = time.monotonic(), len(told), 0
        while time.monotonic() < began + 0.5:
            await asyncio.sleep(0.001)
            turns += 1
        taken = len(told) - before
        flood.kill()
        flood.wait()
        own.close()
        assert turns > 20, "the loop had its turns"
        assert taken <= 4 * 256, "a portion each quarter second, and one at each end"

    run(scene)


def test_a_path_that_is_too_long_becomes_an_abstract_name(tmp_path: Path) -> None:
    """A state directory may lie deep; a socket's path may not. No file is left then."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        told: list[Notice] = []
        own = NotifySocket(loop, deep / "notify")
        assert own.address.startswith("@")
        own.listen(lambda pid: pid == OWN, told.append)
        assert sd_notify(own.address, READY=1)
        await soon(lambda: told, "told")
        own.close()
        assert list(deep.iterdir()) == []

    run(scene)


def test_a_stale_socket_is_replaced_and_a_missing_folder_named(tmp_path: Path) -> None:
    """What a crashed supervisor left is no obstacle; an error names the path."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        (tmp_path / "n").write_text("stale", encoding="ascii")
        NotifySocket(loop, tmp_path / "n").close()
        with pytest.raises(OSError, match="notify socket") as caught:
            NotifySocket(loop, tmp_path / "gone" / "n")
        assert caught.value.filename == str(tmp_path / "gone" / "n")

    run(scene)


def test_the_client_never_blocks_and_tells_whether_it_was_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No address, a wrong one, nobody there, a full queue: False. A newline in a value forges no second line."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not sd_notify(READY=1) and not sd_notify("relative", READY=1)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not sd_notify(READY=1)
    path = tmp_path / "full"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        answers = [sd_notify(str(path), STATUS="a\nREADY=1") for _ in range(2000)]
        assert answers[0] and not answers[-1]
        assert parse(server.recv(1000), 1) == Notice(1, status="a\ufffdREADY=1")


@pytest.mark.skipif(shutil.which("systemd-notify") is None, reason="needs systemd: systemd-notify is not installed")
def test_systemds_own_client_is_understood(tmp_path: Path) -> None:
    """The convention is systemd's: its tool speaks to our socket."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        told: list[Notice] = []
        own = NotifySocket(loop, tmp_path / "n")
        own.listen(lambda _: True, told.append)
        env = {**os.environ, "NOTIFY_SOCKET": own.address}
        process = subprocess.Popen(["systemd-notify", "--ready", "--status=hello"], env=env)
        await soon(lambda: told, "told")
        # It waits for its barrier: a descriptor that comes with a second datagram and has to be closed.
        began = time.monotonic()
        await soon(lambda: process.poll() is not None, "it ends")
        assert time.monotonic() - began < 4.0 and process.returncode == 0
        assert told[0].ready and told[0].status == "hello"
        own.close()

    run(scene)
