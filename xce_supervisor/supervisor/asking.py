"""The asking end of the control socket: one question, one answer, one deadline (docs/rules.md S22).

Without asyncio, whose import alone would take a good part of the time that a verb has.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

SOCKET_NAME_BYTES_MAX = 107


class Refused(Exception):
    """The supervisor says no. code: a word for programs, e.g. "unknown unit"."""

    def __init__(self, text: str, code: str = "refused") -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class NotRunning(Exception):
    """Nobody listens on the socket."""


class NotResponding(Exception):
    """Somebody listens and did not answer in time."""


class NotAllowed(Exception):
    """The socket may not be used by us."""


def ask(path: Path, verb: str, args: dict[str, Any] | None = None, *, deadline_s: float = 1.5) -> Any:
    """Ask the supervisor behind the socket at `path` and return its result as plain JSON values.

    Raises:
        NotRunning, NotResponding (after deadline_s, all steps together), NotAllowed.
        Refused: it answered no.
    """
    ends_at = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        _connect(connection, path, ends_at)
        answer = _exchange(connection, msgspec.json.encode({"verb": verb, "args": args or {}}) + b"\n", ends_at)
    try:
        reply = msgspec.json.decode(answer)
        if reply["ok"]:
            return reply["result"]
        raise Refused(str(reply["error"]), str(reply.get("code", "refused")))
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise NotResponding(f"{path} answered something that is no answer") from error


@contextlib.contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """Give a name for the socket at `path` that fits into a socket address (107 bytes) however long the path is.

    Raises OSError if its folder cannot be opened.
    """
    if len(os.fsencode(path)) <= SOCKET_NAME_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _connect(connection: socket.socket, path: Path, ends_at: float) -> None:
    """Connect within the time left. A full backlog (the supervisor is stopped) counts as not responding."""
    connection.settimeout(max(0.01, ends_at - time.monotonic()))
    try:
        with socket_name(path) as name:
            connection.connect(name)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise NotRunning(f"no supervisor listens on {path}") from error
    except PermissionError as error:
        raise NotAllowed(f"{path} may be used by its owner and root alone") from error
    except (TimeoutError, BlockingIOError) as error:
        raise NotResponding(f"{path} takes no connection") from error
    except OSError as error:
        raise NotRunning(f"{path} cannot be used: {error.strerror or error}") from error


def _exchange(connection: socket.socket, request: bytes, ends_at: float) -> bytes:
    answer: list[bytes] = []
    try:
        connection.sendall(request)
        while True:
            left = ends_at - time.monotonic()
            if left <= 0:
                raise NotResponding("no answer in time")
            connection.settimeout(left)
            part = connection.recv(1_048_576)
            if not part:
                raise NotResponding("the connection was closed without an answer")
            answer.append(part)
            if part.endswith(b"\n"):
                return b"".join(answer)
    except TimeoutError as error:
        raise NotResponding("no answer in time") from error
    except OSError as error:
        raise NotResponding(f"the connection broke: {error.strerror or error}") from error
