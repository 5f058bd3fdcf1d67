"""The control socket: answers at once, whatever its clients do (docs/rules.md S22)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from xce_supervisor.supervisor.asking import NotAllowed, NotResponding, NotRunning, Refused, ask
from xce_supervisor.supervisor.control import REQUEST_BYTES_MAX, Caller, ControlServer

BIG = "x" * 4_000_000


def handler(verb: str, args: dict[str, Any], caller: Caller) -> Any:
    """Echo, refuse, or answer with more than a socket buffer holds."""
    if verb == "echo":
        return {"args": args, "pid": caller.pid, "uid": caller.uid}
    if verb == "big":
        return BIG
    raise Refused(f"no verb {verb}", "unknown verb")


@contextlib.asynccontextmanager
async def served(path: Path, **more: Any) -> AsyncIterator[ControlServer]:
    """A listening server."""
    server = ControlServer(path, handler, **more)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story on the loop that the supervisor uses, with a bound."""
    uvloop.run(asyncio.wait_for(story(), 30))


async def asked(path: Path, verb: str = "echo", **args: Any) -> Any:
    """Ask from another thread, as a verb does from another process."""
    return await asyncio.to_thread(ask, path, verb, args, deadline_s=2.0)


def connected(path: Path) -> socket.socket:
    """A client that says nothing yet."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(str(path))
    return client


def test_a_question_is_answered_and_a_refusal_has_its_code(tmp_path: Path) -> None:
    """The caller is who the kernel says; the socket is its owner's alone."""
    path = tmp_path / "run" / "control.sock"

    async def story() -> None:
        async with served(path):
            assert path.stat().st_mode & 0o777 == 0o600
            assert await asked(path, a=1) == {"args": {"a": 1}, "pid": os.getpid(), "uid": os.geteuid()}
            with pytest.raises(Refused, match="no verb nonsense") as caught:
                await asked(path, "nonsense")
            assert caught.value.code == "unknown verb"
            assert await asked(path, "big") == BIG
        assert not path.exists()

    run(story)


def test_a_path_of_any_length_can_be_used(tmp_path: Path) -> None:
    """A socket address holds 107 bytes; a folder's name may be longer."""
    path = tmp_path / ("f" * 120) / "control.sock"

    async def story() -> None:
        async with served(path) as server:
            assert await asked(path)
            path.unlink()
            with pytest.raises(NotRunning):
                await asked(path)
            assert await server.ensure() and await asked(path)
        assert list(path.parent.iterdir()) == []

    run(story)


@pytest.mark.parametrize("stale", ["socket", "file"])
def test_a_stale_socket_is_replaced(tmp_path: Path, stale: str) -> None:
    """What a killed supervisor left does not stop the next one."""
    path = tmp_path / "control.sock"
    if stale == "socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    else:
        path.write_text("stale", encoding="utf-8")

    async def story() -> None:
        async with served(path):
            assert await asked(path)

    run(story)


@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed"])
def test_a_socket_that_was_taken_away_is_made_anew(tmp_path: Path, how: str) -> None:
    """`ensure` rides on what the driver does anyway; until then the verbs say that nobody listens."""
    path = tmp_path / "run" / "control.sock"

    async def story() -> None:
        async with served(path) as server:
            assert await server.ensure() == ""
            path.unlink()
            if how == "replaced":
                path.write_text("", encoding="utf-8")
            if how == "folder removed":
                path.parent.rmdir()
            with pytest.raises(NotRunning):
                await asked(path)
            assert ("was replaced" if how == "replaced" else "was removed") in await server.ensure()
            assert await asked(path) and await server.ensure() == ""
            assert server.counters["control.recreated"] == 1

    run(story)


def test_a_socket_that_cannot_be_made_anew_is_told(tmp_path: Path) -> None:
    """A clear reason, and another try next time."""
    path = tmp_path / "run" / "control.sock"

    async def story() -> None:
        async with served(path) as server:
            path.unlink()
            path.parent.rmdir()
            path.parent.write_text("in the way", encoding="utf-8")
            assert "and cannot be made anew" in await server.ensure()
            path.parent.unlink()
            assert "was removed" in await server.ensure()
            assert await asked(path)

    run(story)


def test_idle_clients_make_room_for_one_that_asks(tmp_path: Path) -> None:
    """docs/rules.md S22: three hundred clients that say nothing delay nobody."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path) as server:
            idle = [await asyncio.to_thread(connected, path) for _ in range(300)]
            began = time.monotonic()
            for _ in range(5):
                assert await asked(path)
            assert time.monotonic() - began < 1.0
            assert server.counters["control.evicted"] >= 300 - 32
            assert len(server._clients) <= 32
            for client in idle:
                client.close()

    run(story)


def test_a_client_that_asks_byte_by_byte_is_answered_and_delays_nobody(tmp_path: Path) -> None:
    """Slow is no fault, within the bound."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path):
            slow = await asyncio.to_thread(connected, path)
            for byte in b'{"verb":"echo"}':
                await asyncio.to_thread(slow.send, bytes([byte]))
                assert await asked(path)
            await asyncio.to_thread(slow.send, b"\n")
            assert b'"ok":true' in await asyncio.to_thread(slow.recv, 65536)
            slow.close()

    run(story)


def test_a_client_that_asks_nothing_is_let_go(tmp_path: Path) -> None:
    """After its time, also when it sent half a question."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path, idle_s=0.2):
            client = await asyncio.to_thread(connected, path)
            client.send(b'{"verb"')
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(client.recv, 100) == b""
            client.close()

    run(story)


def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    """It holds one answer at most, however much it asks."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path, answer_s=0.3) as server:
            client = await asyncio.to_thread(connected, path)
            client.sendall(b'{"verb":"big"}\n' * 500)
            began = time.monotonic()
            assert await asked(path)
            while server._clients:
                assert time.monotonic() - began < 5
                await asyncio.sleep(0.01)
            client.close()

    run(story)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe\n",
        b"[1]\n",
        b'{"verb": 3}\n',
        b'{"verb": "echo", "args": []}\n',
        b"[" * 60_000 + b"\n",
        b'{"verb": "\xff"}\n',
        b"x" * (REQUEST_BYTES_MAX * 3),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_is_answered_by_a_no(tmp_path: Path, garbage: bytes) -> None:
    """Or by the end of that connection; the next client is served."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path):
            client = await asyncio.to_thread(connected, path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await asyncio.to_thread(client.sendall, garbage)
                answer = await asyncio.to_thread(client.recv, 65536)
                assert b'"ok":false' in answer
            client.close()
            assert await asked(path)

    run(story)


def test_clients_that_vanish_leave_nothing(tmp_path: Path) -> None:
    """Two hundred that hang up in the middle of a question or of an answer; the fixture looks for descriptors."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path) as server:
            for number in range(200):
                client = await asyncio.to_thread(connected, path)
                client.send(b'{"verb":"big"}\n' if number % 2 else b'{"ver')
                client.close()
            assert await asked(path)
            await asyncio.sleep(0)
            assert len(server._clients) <= 32

    run(story)


def test_a_client_that_closes_its_side_after_asking_is_answered(tmp_path: Path) -> None:
    """As `echo ... | socat` does."""
    path = tmp_path / "control.sock"

    async def story() -> None:
        async with served(path):
            client = await asyncio.to_thread(connected, path)
            client.sendall(b'{"verb":"big"}\n')
            client.shutdown(socket.SHUT_WR)
            got = 0
            while part := await asyncio.to_thread(client.recv, 1_000_000):
                got += len(part)
            assert got > len(BIG)
            client.close()

    run(story)


# ---------------------------------------------------------------- the asking end


def test_nobody_listening_is_not_running(tmp_path: Path) -> None:
    """No file, or the file of a dead one."""
    with pytest.raises(NotRunning, match="no supervisor listens on"):
        ask(tmp_path / "none.sock", "status")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    with pytest.raises(NotRunning):
        ask(tmp_path / "dead.sock", "status")


@pytest.mark.parametrize("how", ["silent", "backlog full", "trickle", "hangs up", "nonsense"])
def test_a_supervisor_that_does_not_answer_is_told_within_the_deadline(tmp_path: Path, how: str) -> None:
    """docs/rules.md S22: one deadline for all steps together."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as held:
        listening.bind(str(path))
        listening.listen(0)
        stop = threading.Event()

        def answer() -> None:
            client, _ = listening.accept()
            with client:
                while not stop.wait(0.1) and how != "hangs up":
                    if how != "silent":
                        with contextlib.suppress(OSError):
                            client.send(b"{" if how == "trickle" else b"[1]\n")

        if how == "backlog full":
            for _ in range(2):
                held.enter_context(contextlib.closing(_pending(path)))
        else:
            thread = threading.Thread(target=answer)
            thread.start()
        began = time.monotonic()
        with pytest.raises(NotResponding):
            ask(path, "status", deadline_s=0.5)
        assert time.monotonic() - began < 1.0
        stop.set()
        if how != "backlog full":
            thread.join(5)


def _pending(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        client.connect(str(path))
    return client


@pytest.mark.needs("root")
def test_a_stranger_may_not_ask(tmp_path: Path) -> None:
    """The socket is 0600: another user is refused by the kernel, and told so."""
    path = tmp_path / "control.sock"
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and len(folder.parts) > 2:
            folder.chmod(0o755)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom xce_supervisor.supervisor.asking import NotAllowed, ask\n"
        "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        "try:\n    ask(Path(sys.argv[1]), 'echo')\nexcept NotAllowed as error:\n    print(error)\n"
    )

    async def story() -> None:
        async with served(path):
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=20, check=False
            )
            assert done.stdout == f"{path} may be used by its owner and root alone\n", done

    run(story)
    assert issubclass(NotAllowed, Exception)
