"""Looks at a program file before it is executed: reads it, follows its interpreter, names what would fail.

Two reasons. `os.posix_spawn` holds the interpreter's lock until the exec is done, so a file on a hung file system would stop
the whole supervisor; reading it first makes this thread wait instead, without the lock. And the kernel's errno alone tells
neither the script from its interpreter nor the program from its directory (docs/rules.md S13 wants the path named).
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import struct
from collections.abc import Mapping

from xce_supervisor.process.failure import SpawnError

_HEAD = 4096  # one page: the kernel reads the first 256 bytes itself, then the program headers
_SHEBANG = 256  # BINPRM_BUF_SIZE
_DEPTH = 5  # the kernel gives up at the same depth
_PT_INTERP = 3
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BINFMT = "/proc/sys/fs/binfmt_misc"


def find(name: str, env: Mapping[str, str]) -> str:
    """Return the path to execute for argv[0]: as it is when it has a slash, else the first executable in the unit's own PATH.

    Raises SpawnError(step "program") when PATH has none.
    """
    if "/" in name:
        return name
    for folder in env.get("PATH", _DEFAULT_PATH).split(":"):
        path = os.path.join(folder or ".", name)
        if os.path.isfile(path) and os.access(path, os.X_OK, effective_ids=True):
            return path
    raise SpawnError("program", name, errno.ENOENT, detail=f"no executable of that name in PATH={env.get('PATH', _DEFAULT_PATH)}")


def examine(path: str) -> SpawnError | None:
    """Read the head of a program and of everything that the kernel would read to execute it. Blocks as long as a disk does.

    Returns None when all is well, or a doubt: a file whose format this kernel is not known to execute. Only the exec itself can
    tell, because somebody may have registered the format (binfmt_misc), perhaps out of our sight.

    Raises SpawnError for what is certain: missing, a directory, not executable, a missing interpreter, too many of them.
    """
    return _examine(path, "program", path, 0)


def _examine(path: str, step: str, asked: str, depth: int) -> SpawnError | None:
    whose = "" if step == "program" else f", the interpreter of {asked}"
    if depth > _DEPTH:
        raise SpawnError(step, path, errno.ELOOP, detail=f"more than {_DEPTH} interpreters, one inside the other{whose}")
    try:
        seen = os.stat(path)
        if stat.S_ISDIR(seen.st_mode):
            raise SpawnError(step, path, errno.EISDIR, detail=f"a directory{whose}")
        if not stat.S_ISREG(seen.st_mode):
            raise SpawnError(step, path, errno.EACCES, detail=f"not a regular file{whose}")
        if not os.access(path, os.X_OK, effective_ids=True):
            raise SpawnError(step, path, errno.EACCES, detail=f"not executable{whose}")
        head = _read_head(path)
    except OSError as error:
        raise SpawnError(step, path, error.errno or 0, detail=f"{os.strerror(error.errno or 0)}{whose}") from error
    except ValueError as error:
        raise SpawnError(step, "", errno.EINVAL, detail=f"{error} in {path!r}") from error
    if head is None:
        return None
    if head.startswith(b"#!"):
        interpreter = _shebang(head)
        if interpreter is None:
            return SpawnError(step, path, errno.ENOEXEC, detail=f"its first line names no interpreter{whose}")
        return _examine(interpreter, "interpreter", path, depth + 1)
    if head.startswith(b"\x7fELF"):
        return _examine_elf(path, head, step, depth)
    text = "is empty" if not head else "is neither a program of this machine nor a script that begins with #!"
    return SpawnError(step, path, errno.ENOEXEC, detail=f"{text}{whose}")


def _read_head(path: str) -> bytes | None:
    """Return the first page; None when we may execute but not read it. This is where a hung file system makes the lane wait."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except PermissionError:
        return None
    try:
        return os.pread(fd, _HEAD, 0)
    finally:
        os.close(fd)


def _shebang(head: bytes) -> str | None:
    """Return the path of a #! line as the kernel reads it; None when it would refuse the line."""
    line, newline, _ = head[2:_SHEBANG].partition(b"\n")
    words = line.split()
    if not words or (not newline and len(head) >= _SHEBANG and len(words) == 1):
        return None  # nothing there, or cut off in the middle of the path
    return os.fsdecode(words[0].split(b"\0")[0]) or None


def _examine_elf(path: str, head: bytes, step: str, depth: int) -> SpawnError | None:
    """Follow the loader that an ELF file asks for; doubt a file of another machine."""
    own_machine, own_loader = _own()
    if len(head) < 64 or head[5] != 1:
        return SpawnError(step, path, errno.ENOEXEC, detail="a broken or foreign ELF file")
    machine = _machine(head)
    if machine != own_machine:
        detail = f"an ELF file of another machine (number {machine[1]}; ours is {own_machine[1]})"
        return SpawnError(step, path, errno.ENOEXEC, detail=detail)
    loader = _loader(head) if head[4] == 2 else ""
    # Our own loader is mapped into this very process: it is there, and warm.
    return _examine(loader, "interpreter", path, depth + 1) if loader and loader != own_loader else None


@functools.cache
def _own() -> tuple[tuple[int, int], str]:
    """Return (class, machine number) and loader of the ELF file that runs us."""
    head = _read_head("/proc/self/exe") or b""
    return (_machine(head), _loader(head)) if len(head) >= 64 else ((0, 0), "")


def _machine(head: bytes) -> tuple[int, int]:
    return head[4], int(struct.unpack_from("<H", head, 18)[0])


def _loader(head: bytes) -> str:
    """Return the loader that a 64-bit ELF file asks for; "" when it asks for none, or not in its first page."""
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    for number in range(min(count, 64)):
        at = offset + number * size
        if at + 56 > len(head):
            break
        kind, _flags, start = struct.unpack_from("<IIQ", head, at)
        (length,) = struct.unpack_from("<Q", head, at + 32)
        if kind == _PT_INTERP and start + length <= len(head):
            return os.fsdecode(head[start : start + length].rstrip(b"\0"))
    return ""


def foreign_formats() -> bool:
    """Has somebody registered formats with this kernel (binfmt_misc), as far as can be seen from here?"""
    try:
        return any(name not in ("register", "status") for name in os.listdir(_BINFMT))
    except OSError:
        return False
