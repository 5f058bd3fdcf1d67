"""The event journal: append-only lines that outlive the supervisor, for `events` and for proofs after an incident.

A line is one JSON object: seq (rises by one, also over restarts), wall (Unix time, for people), mono_ns, boot_ns and boot (boot
id), kind, unit, reason, fields, and last the crc32 of all bytes before it. Lines are written by a thread of its own behind a
bounded queue: a full, hung or vanished disk never stops the caller (docs/rules.md S20). What could not be kept is counted, and
the count is told by a `journal.lost` line as soon as one can be written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, field

from xce_supervisor.core.words import Now
from xce_supervisor.supervisor.view import Plain

# Some 300 bytes a line: a queue of 3 MB rides over a disk that hangs for minutes even while roles flap.
QUEUE_MAX = 10_000
LINE_BYTES_MAX = 16_384
# While the disk refuses, one try a second; there is no wake-up otherwise.
RETRY_S = 1.0
# A write that takes longer than this is told as a hung disk.
HUNG_S = 5.0

_TAIL = re.compile(rb',"crc":"([0-9a-f]{8})"}\Z')


class Entry(Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    seq: int
    wall: float
    mono_ns: int
    boot_ns: int
    boot: str
    kind: str
    unit: str = ""
    reason: str = ""
    fields: dict[str, Plain] = field(default_factory=dict)


class Read(Struct, frozen=True, kw_only=True):
    """What a reader found, oldest first. damaged: lines that were torn or changed, and were passed over."""

    entries: list[Entry]
    damaged: int = 0


class _Asked(Struct, frozen=True):
    wall: float
    now: Now
    kind: str
    unit: str
    reason: str
    fields: dict[str, Plain]


class Journal:
    """The writing end. `append` and the properties may be called from any thread; they never wait for the disk."""

    def __init__(
        self, path: Path, boot_id: str, *, bytes_max: int, files_max: int, queue_max: int = QUEUE_MAX, hung_s: float = HUNG_S
    ) -> None:
        """Start the thread. The file is opened by it, later: a hung disk does not stop the start.

        bytes_max: size at which the file is rotated. files_max: files kept, the one being written included.
        """
        self._file = _File(path, boot_id, bytes_max, files_max)
        self._queue: deque[_Asked] = deque()
        self._queue_max = queue_max
        self._hung_s = hung_s
        self._wake = threading.Condition()
        self._lost = 0
        self._lost_untold = 0
        self._closing = False
        self._problem = ""
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(
        self,
        kind: str,
        now: Now,
        *,
        unit: str = "",
        reason: str = "",
        fields: Mapping[str, Plain] | None = None,
        wall: float | None = None,
    ) -> bool:
        """Hand a line over. Returns False if it is lost because the queue is full. wall: Unix time, default: now."""
        asked = _Asked(time.time() if wall is None else wall, now, kind, unit, reason, dict(fields or {}))
        with self._wake:
            if len(self._queue) >= self._queue_max or self._closing:
                self._lost += 1
                self._lost_untold += 1
                return False
            self._queue.append(asked)
            self._wake.notify()
        return True

    @property
    def lost(self) -> int:
        """How many lines were lost since the start."""
        return self._lost

    @property
    def problem(self) -> str:
        """Why lines are not reaching the disk now, "" if they are. For `degraded`."""
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > self._hung_s:
            return f"{self._file.path} hangs; {len(self._queue)} lines wait"
        return self._problem

    def close(self, deadline_s: float) -> int:
        """Write what is queued and end the thread. Returns how many lines were lost for want of time or disk, 0 if none."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(deadline_s)
        with self._wake:
            left = len(self._queue)
            self._lost += left
            self._queue.clear()
        return left

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing and not (self._lost_untold and not self._problem):
                    self._wake.wait()
                batch = list(self._queue)
                lost = self._lost_untold
                if not batch and not lost:
                    break
            self._busy_since = time.monotonic()
            written, told, self._problem = self._file.write(batch, lost)
            self._busy_since = None
            with self._wake:
                for _ in range(min(written, len(self._queue))):
                    self._queue.popleft()
                self._lost_untold -= told
                if self._problem and self._closing:
                    break  # a disk that refuses is not waited for at the end; `close` counts what is left
                if self._problem:
                    self._wake.wait_for(lambda: self._closing, RETRY_S)
        self._file.close()


class _File:
    """The file on disk, as the writing thread sees it."""

    def __init__(self, path: Path, boot_id: str, bytes_max: int, files_max: int) -> None:
        self.path = path
        self._boot_id = boot_id
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._fd = -1
        self._size = 0
        self._seq = -1  # of the last line; -1: not looked up yet

    def write(self, batch: list[_Asked], lost: int) -> tuple[int, int, str]:
        """Append the lines, and one more that tells of `lost` ones.

        Returns how many of the batch are on disk, how many lost ones were told of, and the problem, "" if there was none.
        """
        written = told = 0
        try:
            self._open()
            for asked in batch:
                self._put(asked)
                written += 1
            if lost:
                now = Now(time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
                reason = f"{lost} lines could not be kept: the disk was full, hung or gone"
                self._put(_Asked(time.time(), now, "journal.lost", "", reason, {"lines": lost}))
                told = lost
            os.fdatasync(self._fd)
        except OSError as error:
            self.close()
            return written, told, f"{self.path} cannot be written: {error.strerror}"
        return written, told, ""

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a late ENOSPC; the lines that matter were synced before
                os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the file, anew if it was removed or moved away under us."""
        if self._fd >= 0:
            ours = os.fstat(self._fd)
            try:
                named = os.stat(self.path)
                if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                    return
            except FileNotFoundError:
                pass
            self.close()
        if self._seq < 0:
            self._seq = _last_seq(self.path, self._files_max)
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY, 0o640
        )
        self._size = os.fstat(self._fd).st_size
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")  # a pipe's reader could stop us for ever
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._size += os.write(self._fd, b"\n")  # a former supervisor died in the middle of a line

    def _put(self, asked: _Asked) -> None:
        line = _line(asked, self._seq + 1, self._boot_id)
        if self._size and self._size + len(line) > self._bytes_max:
            self._rotate()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half line stays, if the disk lets us
            raise
        self._size += len(line)
        self._seq += 1

    def _rotate(self) -> None:
        os.fdatasync(self._fd)
        self.close()
        for number in range(self._files_max - 1, 0, -1):
            older = self.path if number == 1 else _numbered(self.path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.rename(older, _numbered(self.path, number))
        self._open()


def read(path: Path, files_max: int = 100, *, since_seq: int = -1) -> Read:
    """Return the lines of the journal at `path` and of its rotated files, oldest first, from seq `since_seq` + 1 on.

    Torn and changed lines are passed over and counted. Never waits, and needs no running supervisor.

    Raises:
        OSError: a file is there and cannot be read.
    """
    entries: list[Entry] = []
    damaged = 0
    for file in reversed([path, *(_numbered(path, number) for number in range(1, files_max))]):
        for entry in _entries(file):
            if entry is None:
                damaged += 1
            elif entry.seq > since_seq:
                entries.append(entry)
    return Read(entries=entries, damaged=damaged)


def _entries(file: Path) -> Iterator[Entry | None]:
    """Yield each line of one file, None for a damaged one. A line that is still being written is no damage."""
    try:
        with _opened(file) as opened:
            for line in opened:
                if line.endswith(b"\n"):
                    if line != b"\n":
                        yield parse(line[:-1])
                else:
                    entry = parse(line)
                    if entry is not None:
                        yield entry
    except FileNotFoundError:
        return


def parse(line: bytes) -> Entry | None:
    """Return one line without its newline; None if it is torn or was changed."""
    tail = _TAIL.search(line)
    if tail is None or int(tail[1], 16) != zlib.crc32(line[: tail.start()]):
        return None
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _line(asked: _Asked, seq: int, boot_id: str) -> bytes:
    entry = Entry(
        seq=seq,
        wall=round(asked.wall, 6),
        mono_ns=asked.now.mono_ns,
        boot_ns=asked.now.boot_ns,
        boot=boot_id,
        kind=asked.kind,
        unit=asked.unit,
        reason=asked.reason,
        fields=asked.fields,
    )
    body = msgspec.json.encode(entry)
    if len(body) > LINE_BYTES_MAX:
        short = msgspec.structs.replace(entry, reason=entry.reason[:1000], fields={"cut": f"line of {len(body)} bytes"})
        body = msgspec.json.encode(short)
    head = body[:-1]
    return head + b',"crc":"%08x"}\n' % zlib.crc32(head)


def _opened(file: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe in its place would make us wait for ever."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return open(fd, "rb")


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _last_seq(path: Path, files_max: int) -> int:
    """Return the seq of the newest whole line on disk, 0 if there is none (numbers begin with 1)."""
    for file in (path, *(_numbered(path, number) for number in range(1, files_max))):
        try:
            with _opened(file) as opened:
                opened.seek(0, os.SEEK_END)
                opened.seek(max(0, opened.tell() - 4 * LINE_BYTES_MAX))
                found = [entry.seq for line in opened.read().split(b"\n") if (entry := parse(line)) is not None]
        except OSError:
            continue
        if found:
            return max(found)
    return 0


class Follower:
    """Reads on where it stopped, through rotation and removal; for `events --follow`."""

    def __init__(self, path: Path, since_seq: int) -> None:
        """since_seq: lines up to this one are known already."""
        self._path = path
        self._seq = since_seq
        self._inode: tuple[int, int] | None = None
        self._offset = 0

    def news(self) -> list[Entry]:
        """Return what was written since the last call, oldest first. Costs one `stat` when there is nothing."""
        try:
            seen = os.stat(self._path)
        except OSError:
            return []
        inode = (seen.st_dev, seen.st_ino)
        if inode == self._inode and seen.st_size == self._offset:
            return []
        if inode != self._inode or seen.st_size < self._offset:
            found = read(self._path, since_seq=self._seq).entries  # rotated: what is left of the old file comes first
            self._inode, self._offset = inode, 0
        else:
            found = []
        with _opened(self._path) as opened:
            opened.seek(self._offset)
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                entry = parse(line[:-1])
                if entry is not None:
                    found.append(entry)
        fresh = {entry.seq: entry for entry in found if entry.seq > self._seq}
        self._seq = max([self._seq, *fresh])
        return [fresh[seq] for seq in sorted(fresh)]
