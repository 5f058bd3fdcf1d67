"""Fencing by kill: who holds the write lock of a sqlite file, and how a process stopped inside a transaction is removed.

A process that is stopped (SIGSTOP, freezer) between BEGIN and COMMIT keeps the file's write lock, and no lease can run out for
it: nobody else may write that it has. On one machine the remedy is to kill it, which the kernel makes certain. It is done only

* after the leadership lease has run out (the caller sees to that), and the same process has held the lock all the time since,
* to a process that has declared itself a candidate of this very store (a card in the folder `FILE.candidates`, made before its
  first transaction and named by pid, start ticks and boot id), has this very file open, and holds the lock at the last look,
* through a pidfd, so that a pid that was used again is never hit (docs/rules.md S15).

A stranger with the lock (somebody's shell) is named in the log and left alone. The lock is seen in /proc/locks; the -shm file is
never opened here: closing it again would drop this process's own locks on it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from xce_supervisor.core.words import Identity
from xce_supervisor.store.clocks import read_boot_id

# sqlite's WAL_WRITE_LOCK is byte 120 of the -shm file (UNIX_SHM_BASE).
WRITE_LOCK_BYTE = "120"
STOPPED_STATES = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the write lock. stopped: by a signal or a tracer at this look. candidate: it declared itself, and is killable."""

    identity: Identity
    stopped: bool
    candidate: bool


class Fence:
    """Looks after one database file. Blocking, but only reads /proc and a small folder."""

    def __init__(self, path: Path) -> None:
        self._shm = Path(f"{path}-shm")
        self._cards = Path(f"{path}.candidates")
        self._boot_id = read_boot_id()
        self._own = self._cards / _card_name(Identity(os.getpid(), _start_ticks(os.getpid()), self._boot_id))

    def declare(self) -> None:
        """Make this process's card, before its first transaction; remove the cards of processes that are gone.

        Raises:
            OSError: the folder cannot be written.
        """
        self._cards.mkdir(mode=0o750, exist_ok=True)
        self._own.touch()  # all is in the name: no reader ever sees half a card
        for card in self._cards.iterdir():
            identity = _named(card.name)
            if identity is not None and (identity.boot_id != self._boot_id or not _alive(identity)):
                card.unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove this process's card. Idempotent; a card left behind does no harm, it names a process that is gone."""
        try:
            self._own.unlink(missing_ok=True)
        except OSError:  # the folder went away: so did the card
            return

    def holder(self) -> Holder | None:
        """Return the process that holds the write lock now, None where there is none or it cannot be told."""
        try:
            inode = os.stat(self._shm).st_ino
            pid = _lock_holder(Path("/proc/locks").read_text(encoding="ascii"), inode)
            if pid is None or pid <= 0:
                return None
            identity = Identity(pid, _start_ticks(pid), self._boot_id)
            candidate = pid != os.getpid() and self._declared(identity) and self._has_open(pid)
            return Holder(identity, _state(pid) in STOPPED_STATES, candidate)
        except OSError:  # it ended while we looked
            return None

    def kill(self, holder: Holder) -> bool:
        """SIGKILL the holder if it still is the same process, a candidate, and holds the lock. True when it was sent."""
        assert holder.candidate, "only a declared candidate is ever killed"
        try:
            pidfd = os.pidfd_open(holder.identity.pid)
        except OSError:  # gone, and its lock with it
            return False
        try:
            # With the pidfd open the pid cannot change hands: what is verified now is what will be hit.
            again = self.holder()
            if again is None or again.identity != holder.identity or not again.candidate:
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:  # ended meanwhile, or not ours to kill
            return False
        finally:
            os.close(pidfd)
        return True

    def _declared(self, identity: Identity) -> bool:
        return (self._cards / _card_name(identity)).is_file()

    def _has_open(self, pid: int) -> bool:
        wanted = os.stat(self._shm)
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                seen = entry.stat()
            except OSError:  # a socket that closed, a file that is gone
                continue
            if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
        return False


def _card_name(identity: Identity) -> str:
    return f"{identity.pid}.{identity.start_ticks}.{identity.boot_id}"


def _named(name: str) -> Identity | None:
    """The identity in a card's name, None where it is no card: somebody else's file, left alone."""
    pid, _, rest = name.partition(".")
    ticks, _, boot_id = rest.partition(".")
    if not boot_id or not all(part.isascii() and part.isdigit() for part in (pid, ticks)):
        return None
    return Identity(int(pid), int(ticks), boot_id)


def _lock_holder(table: str, inode: int) -> int | None:
    """Find the pid that holds byte 120 of `inode` for writing in the text of /proc/locks.

    The device is not compared: on overlay file systems the kernel shows another one than stat does. `_has_open` makes up for it.
    """
    for line in table.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[1] != "POSIX" or fields[3] != "WRITE":  # waiters carry a "->" and one field more
            continue
        if fields[5].rsplit(":", 1)[-1] == str(inode) and int(fields[6]) <= int(WRITE_LOCK_BYTE) <= _end(fields[7]):
            return int(fields[4])
    return None


def _end(field: str) -> int:
    return 1 << 62 if field == "EOF" else int(field)


def _stat_fields(pid: int) -> list[str]:
    # The command name may hold spaces and brackets: what follows its last bracket is counted.
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])


def _state(pid: int) -> str:
    return _stat_fields(pid)[0]


def _alive(identity: Identity) -> bool:
    try:
        return _start_ticks(identity.pid) == identity.start_ticks and _state(identity.pid) not in "ZX"
    except OSError:
        return False
