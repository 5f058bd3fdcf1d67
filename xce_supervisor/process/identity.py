"""Which process is meant: pid, start ticks and boot id, and the pidfd that holds on to it.

A pid alone is recycled; a pid with the clock tick of its start, in one boot, is not. So every signal goes through a pidfd
whose process was verified after opening (docs/rules.md S15). No wall clock is read here (docs/rules.md S21): start ticks
count from boot, and a clock step cannot make two readings of one process differ.
"""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass

from xce_supervisor.core.words import Identity

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

# Fields of /proc/PID/stat counted from the one after the name (proc(5) numbers that one 3).
_STATE, _PPID, _PGRP, _SESSION, _START = 0, 1, 2, 3, 19


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says of one process.

    state: one letter of proc(5): R S D T t Z X I. start_ticks: clock ticks since boot.
    """

    pid: int
    name: str
    state: str
    ppid: int
    pgrp: int
    session: int
    start_ticks: int

    @property
    def dead(self) -> bool:
        """Is it a zombie, or on its way out?"""
        return self.state in "ZX"


@functools.cache
def boot_id() -> str:
    """Return the kernel's id of this boot. Raises OSError where /proc is not mounted."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def parse_stat(text: bytes) -> Stat:
    """Return the fields of one /proc/PID/stat. The name may hold blanks and brackets, so it ends at the LAST one.

    Raises ValueError when the text is not such a line.
    """
    head, bracket, tail = text.rpartition(b")")
    pid, opening, name = head.partition(b"(")
    fields = tail.split()
    if not bracket or not opening or len(fields) <= _START:
        raise ValueError(f"not a line of /proc/PID/stat: {text[:60]!r}")
    return Stat(
        pid=int(pid),
        name=name.decode("utf-8", "replace"),
        state=fields[_STATE].decode("ascii"),
        ppid=int(fields[_PPID]),
        pgrp=int(fields[_PGRP]),
        session=int(fields[_SESSION]),
        start_ticks=int(fields[_START]),
    )


def read_proc(path: str) -> bytes | None:
    """Return a small file of /proc, or None when its process is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        chunks = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    except (ProcessLookupError, PermissionError):
        return None
    finally:
        os.close(fd)


def read_stat(pid: int) -> Stat | None:
    """Return what /proc says of `pid`, None when there is no such process."""
    text = read_proc(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def identity_of(stat: Stat) -> Identity:
    """Return the identity of the process that `stat` was read from."""
    return Identity(stat.pid, stat.start_ticks, boot_id())


def read_identity(pid: int) -> Identity | None:
    """Return the identity of the process that has `pid` now; None when there is none. A zombie still has one."""
    stat = read_stat(pid)
    return None if stat is None else identity_of(stat)


def open_pidfd(identity: Identity) -> int:
    """Return a pidfd, closed on exec, of exactly the process that `identity` names.

    It is opened first and checked after: once open, the pid cannot be handed to another process unnoticed. The caller
    closes it; a reader is taken out of the event loop before that (docs/rules.md S15).

    Raises ProcessLookupError when that process is gone, when its pid belongs to another one by now, or when the identity is of
    another boot.
    """
    if identity.boot_id != boot_id():
        raise ProcessLookupError(f"process {identity.pid} belongs to another boot ({identity.boot_id})")
    if identity.pid <= 0:
        raise ProcessLookupError(f"{identity.pid} is no process id")
    fd = os.pidfd_open(identity.pid)
    stat = read_stat(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks:
        os.close(fd)
        raise ProcessLookupError(f"process id {identity.pid} belongs to another process now; the one that is meant is gone")
    return fd


def send_signal(identity: Identity, number: int) -> bool:
    """Send a signal to exactly that process. Returns False when it is gone. Raises PermissionError when refused.

    A zombie counts as there: the signal goes nowhere, which is right.
    """
    try:
        fd = open_pidfd(identity)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def is_alive(identity: Identity) -> bool:
    """Is that process there and not a zombie?"""
    if identity.boot_id != boot_id():
        return False
    stat = read_stat(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks and not stat.dead
