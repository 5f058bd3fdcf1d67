"""The state file: what the next supervisor needs to adopt the children of this one (docs/rules.md S17).

It is replaced whole or not at all (temporary file, fsync, rename, fsync of the folder), carries a checksum and a version, and
names the machine and the controller that it is about. A file that is torn, of another machine or controller, or newer than
this program is never trusted: it is set aside under another name, and the supervisor begins with nothing (docs/rules.md S15).

Everything here blocks on the disk: the driver calls it from a lane, one call at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import zlib
from pathlib import Path

import msgspec
from msgspec import Struct

FORMAT = "xce-supervisor state"
VERSION = 1

# A record takes some 500 bytes; this is for 200 units many times over.
BYTES_MAX = 4_194_304
# How many refused files are kept beside it, for somebody to look at.
BAD_MAX = 5


class ChildRecord(Struct, frozen=True, kw_only=True):
    """One child that lives. Identity: pid, start_ticks, boot_id. Binding: controller_id, instance_id, term ("" and 0: always).

    cgroup: folder of its group, "" where trees are held otherwise. ready: it was joined or ready when this was written.
    """

    unit: str
    generation: int
    pid: int
    start_ticks: int
    boot_id: str
    token: str
    controller_id: str = ""
    instance_id: str = ""
    term: int = 0
    cgroup: str = ""
    ready: bool = False
    started_wall_s: float = 0.0


class PauseRecord(Struct, frozen=True, kw_only=True):
    """An operator's pause of one unit (docs/rules.md S24). since_wall_s: Unix time, for people."""

    unit: str
    by: str
    why: str
    since_wall_s: float


class State(Struct, frozen=True, kw_only=True):
    """What is kept. generations: the highest generation of each unit, so that a number never comes again."""

    children: tuple[ChildRecord, ...] = ()
    pauses: tuple[PauseRecord, ...] = ()
    generations: dict[str, int] = msgspec.field(default_factory=dict)


class Host(Struct, frozen=True, kw_only=True):
    """Which machine this is. machine_id: of the installation, "" where it has none. boot_id: of this boot."""

    name: str
    machine_id: str
    boot_id: str


class Loaded(Struct, frozen=True, kw_only=True):
    """What was found. refused: why a file was set aside, "" if none was. moved_to: where it is now, None if it could not be.

    forgotten: units whose record was of an earlier boot, so that nothing of them can be alive.
    """

    state: State
    refused: str = ""
    moved_to: Path | None = None
    forgotten: tuple[str, ...] = ()


class Saved(Struct, frozen=True, kw_only=True):
    """What became of a save. problem: "" when the file is as wanted. news: tell it now (it began to fail, or works again)."""

    problem: str = ""
    news: bool = False


class _Envelope(Struct, frozen=True, kw_only=True):
    format: str
    version: int
    crc32: str
    machine_id: str
    host: str
    controller_id: str
    saved_wall_s: float
    body: msgspec.Raw


class _Version(Struct, frozen=True):
    format: str = ""
    version: int = 0


def this_host() -> Host:
    """Return the identity of the machine that we are on."""
    machine_id = ""
    with contextlib.suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Host(name=socket.gethostname(), machine_id=machine_id, boot_id=boot_id)


class StateFile:
    """The state file of one supervisor. Not for two threads at a time."""

    def __init__(self, path: Path, host: Host, controller_id: str) -> None:
        self._path = path
        self._host = host
        self._controller_id = controller_id
        self._written = b""
        self._problem = ""

    def load(self) -> Loaded:
        """Return what a former supervisor left; an empty state, with the reason, where nothing can be trusted."""
        try:
            raw = _read_plain(self._path)
        except FileNotFoundError:
            return Loaded(state=State())
        except OSError as error:
            return self._refuse(f"{self._path} cannot be read: {error.strerror}")
        reason, state = self._trusted(raw)
        if state is None:
            return self._refuse(f"{self._path} {reason}")
        alive = tuple(child for child in state.children if child.boot_id == self._host.boot_id)
        gone = tuple(child.unit for child in state.children if child.boot_id != self._host.boot_id)
        return Loaded(state=msgspec.structs.replace(state, children=alive), forgotten=gone)

    def save(self, state: State, wall_s: float) -> Saved:
        """Replace the file by `state`. A failure leaves the old file as it was. wall_s: Unix time, for people.

        Writes nothing when nothing changed since the last save that worked.
        """
        body = msgspec.json.encode(state)
        if body == self._written and not self._problem:
            return Saved()
        envelope = _Envelope(
            format=FORMAT,
            version=VERSION,
            crc32=_crc(body),
            machine_id=self._host.machine_id,
            host=self._host.name,
            controller_id=self._controller_id,
            saved_wall_s=wall_s,
            body=msgspec.Raw(body),
        )
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(envelope) + b"\n", durable=True)
        except OSError as error:
            began = not self._problem
            self._problem = f"{self._path} cannot be written: {error.strerror}; the one before is kept"
            return Saved(problem=self._problem, news=began)
        recovered = bool(self._problem)
        self._written, self._problem = body, ""
        return Saved(news=recovered)

    def _trusted(self, raw: bytes) -> tuple[str, State | None]:
        """Return the state, or why it cannot be trusted."""
        try:
            version = msgspec.json.decode(raw, type=_Version)
            if version.format != FORMAT:
                return "is no state file", None
            if version.version != VERSION:
                return f"has version {version.version}, and this program knows {VERSION}", None
            envelope = msgspec.json.decode(raw, type=_Envelope)
            if envelope.crc32 != _crc(bytes(envelope.body)):
                return "is damaged: its checksum is wrong", None
            state = msgspec.json.decode(envelope.body, type=State)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "is damaged: it does not hold what a state file holds", None
        if self._foreign(envelope):
            return f"is of another machine ({envelope.host}), not of {self._host.name}", None
        if envelope.controller_id != self._controller_id:
            return f"is about controller {envelope.controller_id}, not {self._controller_id}", None
        return "", state

    def _foreign(self, envelope: _Envelope) -> bool:
        if envelope.machine_id and self._host.machine_id:
            return envelope.machine_id != self._host.machine_id
        return envelope.host != self._host.name

    def _refuse(self, reason: str) -> Loaded:
        return Loaded(state=State(), refused=reason, moved_to=_set_aside(self._path))


def replace_file(path: Path, content: bytes, *, durable: bool, mode: int = 0o600) -> None:
    """Replace the file at `path` by `content`, or leave it as it was. durable: still there after a power loss.

    Raises:
        OSError: it could not be written; nothing is left beside it.
    """
    temporary = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_plain(path: Path) -> bytes:
    """Return a regular file's content. Never waits on a pipe or a device that stands in its place."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if seen.st_size > BYTES_MAX:
            raise OSError(errno.EFBIG, f"larger than {BYTES_MAX} bytes")
        parts: list[bytes] = []
        while part := os.read(fd, 1_048_576):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _crc(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"


def _set_aside(path: Path) -> Path | None:
    """Rename a refused file to the first free of .bad-1 to .bad-5, else over the oldest. None if even that fails."""
    names = [path.with_name(f"{path.name}.bad-{number}") for number in range(1, BAD_MAX + 1)]
    try:
        free = [name for name in names if not os.path.lexists(name)]
        chosen = free[0] if free else min(names, key=lambda name: os.lstat(name).st_mtime_ns)
        os.rename(path, chosen)
    except OSError:
        return None
    return chosen
