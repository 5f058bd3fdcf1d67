"""Why a program could not be started: the error of this room that the supervisor's core turns into a decision.

A failed spawn is not a crash (docs/rules.md S13): a permanent one waits until the file changes, a transient one is tried again
shortly. Which of them it is, is decided here, where the errno is born, and nowhere by its text.
"""

from __future__ import annotations

import errno
import os

# What goes away by itself: load, limits, a file that is being replaced, a network file system that is out of reach.
TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ETXTBSY,
        errno.EINTR,
        errno.EBUSY,
        errno.ENOBUFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOTCONN,
        errno.EREMOTEIO,
    }
)

Signature = tuple[int, ...]


class SpawnError(Exception):
    """A program could not be started.

    step: what was being done: "argv", "cwd", "program", "interpreter", "user", "limits", "tool", "output", "exec".
    path: the file or directory that is at fault, "" where none is. errno: the kernel's number.
    permanent: True when only a change of that file (or of the unit) helps; see `signature`.
    signature: what `path` looked like, to be compared later with `signature(path)`. text: all of it, for people.
    """

    def __init__(self, step: str, path: str, number: int, *, detail: str = "", permanent: bool | None = None) -> None:
        self.step = step
        self.path = path
        self.errno = number
        self.permanent = number not in TRANSIENT if permanent is None else permanent
        self.signature = signature(path) if path else ()
        self.detail = detail or os.strerror(number)
        name = errno.errorcode.get(number, str(number))
        self.text = f"cannot start: {name}{' ' + path if path else ''} ({step}: {self.detail})"
        super().__init__(self.text)


def signature(path: str) -> Signature:
    """Return what a file looks like now, for noticing a change. Blocks (a lane's work); never raises OSError.

    Two values are equal as long as nobody has replaced, written, moved, created or re-permitted the file. A path that cannot be
    looked at has the signature (errno,).
    """
    try:
        seen = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    except ValueError:  # a NUL byte inside: never a file
        return (errno.EINVAL,)
    return (seen.st_dev, seen.st_ino, seen.st_mode, seen.st_uid, seen.st_gid, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
