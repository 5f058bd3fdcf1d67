"""A worker's job log: what it began and how it ended, on disk before the command runs.

    DIR/jobs.log     one record a line: CRC-32 of the rest in 8 hex digits, a space, a JSON object

    {"kind":"begun","job":J,"attempt":N}                                    synced before the command is started
    {"kind":"ended","job":J,"attempt":N,"exit_code":C,"reason":R}           synced before it is reported
    {"kind":"told","job":J,"attempt":N}                                     not synced: reporting twice does no harm

A begun attempt without an end belonged to a process that died: it is lost and is never started again. The log is compacted at
every open and whenever it has grown by `COMPACT_LINES`, into a new file that replaces the old one. A torn or damaged line is
skipped and counted. All calls may wait for the disk: the worker makes them in a thread.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed.worker_jobs import DONE, FAILED
from xce_supervisor.wire.words import JobAttempt

COMPACT_LINES = 50_000
LINE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the log of a former process says. ended: in order, each with whether it was told. lost: begun and never ended.

    damaged: lines that could not be read.
    """

    ended: tuple[tuple[JobAttempt, bool], ...]
    lost: tuple[tuple[str, int], ...]
    damaged: int


class JobLog:
    """The open log. One writer: the worker holds the lock of its directory."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self._lines = 0

    @classmethod
    def open(cls, directory: Path) -> tuple[JobLog, Remembered]:
        """Read the log in `directory` (made if missing) and open it for appending. Raises ConfigError."""
        path = directory / "jobs.log"
        try:
            content = path.read_bytes() if path.exists() else b""
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if content and not content.endswith(b"\n"):
                os.write(handle, b"\n")  # a torn last line must not swallow the next record
            _sync_folder(directory)
        except OSError as error:
            raise ConfigError(f"cannot use the job log {path}: {error.strerror or error}; give rights or make room") from error
        return cls(path, handle), _read(content)

    def begun(self, job_id: str, attempt: int) -> None:
        """Record, durably, that the attempt is about to be started. Raises OSError: then it must not be started."""
        self._append({"kind": "begun", "job": job_id, "attempt": attempt}, sync=True)

    def ended(self, end: JobAttempt) -> None:
        """Record, durably, how an attempt ended. Raises OSError."""
        self._append(_ended(end), sync=True)

    def told(self, ends: Iterable[JobAttempt]) -> None:
        """Record that the controller knows these ends. Raises OSError."""
        for end in ends:
            self._append({"kind": "told", "job": end.job_id, "attempt": end.attempt}, sync=False)

    @property
    def overgrown(self) -> bool:
        """Is it time to compact?"""
        return self._lines >= COMPACT_LINES

    def compact(self, ended: Iterable[tuple[JobAttempt, bool]], running: Iterable[JobAttempt]) -> None:
        """Replace the log by one that says just this. Raises OSError: then the old one stands."""
        lines: list[bytes] = []
        for end, told in ended:
            lines.append(_line(_ended(end)))
            if told:
                lines.append(_line({"kind": "told", "job": end.job_id, "attempt": end.attempt}))
        lines.extend(_line({"kind": "begun", "job": known.job_id, "attempt": known.attempt}) for known in running)
        aside = self._path.with_name(f".{self._path.name}.new")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, b"".join(lines))
            os.fsync(handle)
            os.replace(aside, self._path)
            _sync_folder(self._path.parent)
        except OSError:
            os.close(handle)
            aside.unlink(missing_ok=True)
            raise
        os.close(self._handle)
        self._handle, self._lines = handle, 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _append(self, record: dict[str, Any], *, sync: bool) -> None:
        before = os.fstat(self._handle).st_size
        try:
            _write_all(self._handle, _line(record))
            if sync:
                os.fsync(self._handle)
        except OSError:
            # A full disk may have taken half the line; without this the next record would be glued to it.
            os.ftruncate(self._handle, before)
            raise
        self._lines += 1


def _ended(end: JobAttempt) -> dict[str, Any]:
    return {"kind": "ended", "job": end.job_id, "attempt": end.attempt, "exit_code": end.exit_code, "reason": end.reason}


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(content: bytes) -> Remembered:
    open_attempts: dict[tuple[str, int], None] = {}
    ends: dict[tuple[str, int], JobAttempt] = {}
    told: set[tuple[str, int]] = set()
    damaged = 0
    for line in content.split(b"\n"):
        if not line:
            continue
        record = _parse(line)
        if record is None:
            damaged += 1
            continue
        key = (record["job"], record["attempt"])
        match record["kind"]:
            case "begun":
                open_attempts[key] = None
            case "ended":
                open_attempts.pop(key, None)
                state = DONE if record["exit_code"] == 0 and not record["reason"] else FAILED
                ends[key] = JobAttempt(
                    job_id=key[0], attempt=key[1], state=state, exit_code=record["exit_code"], reason=record["reason"]
                )
            case "told":
                told.add(key)
    return Remembered(tuple((end, key in told) for key, end in ends.items()), tuple(open_attempts), damaged)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of one line, checked field by field; None if the line is damaged or not ours."""
    checksum, _, text = line.partition(b" ")
    if len(line) > LINE_BYTES_MAX or checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("job"), str) or not isinstance(record.get("attempt"), int):
        return None
    if record.get("kind") == "ended":
        whole = isinstance(record.get("exit_code"), int | None) and isinstance(record.get("reason"), str)
        return record if whole else None
    return record if record.get("kind") in ("begun", "told") else None


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _sync_folder(directory: Path) -> None:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
