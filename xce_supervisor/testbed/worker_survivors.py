"""Finding and killing what a former worker process of the same directory left running.

The kernel kills a job's leader with its worker (parent-death signal), but not the leader's children, and not a job that was
spawned at that very instant. All of them carry XCE_WORKER_MARK in their environment, a random number that is made once for the
worker's directory: whoever carries it is ours, and nobody else can (docs/rules.md S15). The pidfd is opened before the
environment is read, so that the process that is signalled is the one that was read, or a dead one.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import structlog

log = structlog.get_logger()

ROUND_WAIT_MS = 500


def kill_marked(mark: str, deadline_s: float = 5.0) -> int:
    """SIGKILL every process that carries `mark` until a whole look finds none. Returns how many were killed.

    Blocks: call it before the loop runs, or in a thread. After deadline_s seconds what is left is logged and given up (a process
    in state D dies when the kernel lets it).
    """
    give_up_at = time.monotonic() + deadline_s
    seen: set[int] = set()
    while True:
        found = _marked(f"XCE_WORKER_MARK={mark}".encode())
        try:
            if not found:
                return len(seen)
            if time.monotonic() >= give_up_at:
                log.error("survivors.unkillable", pids=sorted(found))
                return len(seen)
            seen |= set(found)
            for pidfd in found.values():
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # gone by itself
            _wait(list(found.values()))
        finally:
            for pidfd in found.values():
                os.close(pidfd)


def _marked(needle: bytes) -> dict[int, int]:
    """Return pid to pidfd of every living process, ourselves excepted, whose environment holds the line `needle`."""
    found: dict[int, int] = {}
    own = os.getpid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        pid = int(entry.name)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # gone, or a thread
        if needle in _environment(entry) and not _dead(pidfd):
            found[pid] = pidfd
        else:
            os.close(pidfd)
    return found


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # another user's: not ours, for our jobs run as we do


def _dead(pidfd: int) -> bool:
    """A zombie keeps its pid and is dead all the same."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _wait(pidfds: list[int]) -> None:
    """Wait until all are dead, at most ROUND_WAIT_MS; the next look tells."""
    give_up_at = time.monotonic() + ROUND_WAIT_MS / 1000
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(max(0, int((give_up_at - time.monotonic()) * 1000)))
