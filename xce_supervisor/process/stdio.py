"""Where a child's standard streams go: nowhere, a file opened for append, or the journal; never a pipe that could block it.

Output must not keep a child from running (docs/rules.md S20): what cannot be opened falls back to the next best place and says
so in a warning. Opening happens in the lane, so a hung log directory hangs that lane and nobody else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

_JOURNAL = "/run/systemd/journal/stdout"
_JOURNAL_WAIT_S = 2.0
_JOURNAL_BUFFER_BYTES = 8 * 1024 * 1024  # what systemd itself asks for, so that bursts do not wait for journald
_PRIORITY_INFO = 6
_FILE_MODE = 0o640

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Null:
    """Discard output; read end of file."""


@dataclass(frozen=True, slots=True)
class Append:
    """Append to a file, made with `mode` when it is missing. Rotation by rename is noticed by the next spawn only."""

    path: str
    mode: int = _FILE_MODE


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of systemd under `identifier`; where there is none, the file `instead`, else nothing."""

    identifier: str
    instead: str | None = None


@dataclass(frozen=True, slots=True)
class Inherit:
    """The supervisor's own stream of that number."""


@dataclass(frozen=True, slots=True)
class Given:
    """A descriptor of the caller's, who keeps it open until the spawn has returned and answers for what reads its other end."""

    fd: int


Stdio = Null | Append | Journal | Inherit | Given


def open_stream(stdio: Stdio, number: int, warn: Warn) -> int:
    """Return a new descriptor, closed on exec and above 2, for the child's stream `number` (0, 1 or 2). The caller closes it.

    Raises OSError (EMFILE, ENFILE) when not even /dev/null can be opened.
    """
    match stdio:
        case Null():
            return _open_null(number)
        case Given():
            return int(fcntl.fcntl(stdio.fd, fcntl.F_DUPFD_CLOEXEC, 3))
        case Inherit():
            try:
                return int(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3))
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                warn(f"stream {number} of the supervisor is closed; the child gets /dev/null instead")
                return _open_null(number)
        case Append():
            return _open_append(stdio.path, stdio.mode, number, warn)
        case Journal():
            return _open_journal(stdio, number, warn)


def _open_null(number: int) -> int:
    return _above_standard(os.open(os.devnull, (os.O_RDONLY if number == 0 else os.O_WRONLY) | os.O_CLOEXEC))


def _open_append(path: str, mode: int, number: int, warn: Warn) -> int:
    """A pipe or a socket file is refused: whoever reads it could block the child."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    try:
        if _exists_as(path, stat.S_ISFIFO):
            raise OSError(errno.EPIPE, "a named pipe would block the child; name a regular file")
        return _above_standard(os.open(path, flags, mode))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        warn(f"output file {path} cannot be opened ({error.strerror}); the child's output is discarded until its next start")
        return _open_null(number)


def _exists_as(path: str, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _open_journal(stdio: Journal, number: int, warn: Warn) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _JOURNAL_BUFFER_BYTES)
        connection.settimeout(_JOURNAL_WAIT_S)
        connection.connect(_JOURNAL)
        connection.shutdown(socket.SHUT_RD)
        identifier = "".join(c if c.isprintable() else "_" for c in stdio.identifier)
        # identifier, unit, priority, whether lines may begin with <N>, forwarding to syslog, kmsg and console
        connection.sendall(f"{identifier}\n\n{_PRIORITY_INFO}\n1\n0\n0\n0\n".encode())
        connection.settimeout(None)  # the flag belongs to the open file, so it would be the child's too
        return _above_standard(connection.detach())
    except OSError as error:
        if stdio.instead is None:
            warn(f"no journal at {_JOURNAL} ({error.strerror or error}); output of {stdio.identifier} is discarded")
            return _open_null(number)
        warn(f"no journal at {_JOURNAL} ({error.strerror or error}); output of {stdio.identifier} goes to {stdio.instead}")
        return _open_append(stdio.instead, _FILE_MODE, number, warn)
    finally:
        connection.close()


def _above_standard(fd: int) -> int:
    """Return the descriptor moved above 2: a supervisor started with closed standard streams gets low numbers."""
    if fd > 2:
        return fd
    try:
        return int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        os.close(fd)
