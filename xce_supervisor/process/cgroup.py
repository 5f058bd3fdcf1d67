"""Trees held by cgroup v2: the kernel keeps the members, kills them at once and tells when the last one is gone.

Layout, below the group that we were started in (or one that is configured):

    xce-NAME.RANDOM/supervisor      we ourselves, and for an instant whatever we have just spawned
    xce-NAME.RANDOM/unit-UNIT       one group per unit, used again by its next child

A child is spawned first and moved right after: the spawn takes 0.3 ms, a lone move up to 8. What it forks before the move is
born in `supervisor`, so that group is swept until it is clean (docs/decisions/0002-spawn.md). The lanes do this; reading a
group's state is cheap and done in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import select
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

from xce_supervisor.core.words import Identity
from xce_supervisor.process.births import Births
from xce_supervisor.process.identity import identity_of, is_alive, read_proc, read_stat, send_signal
from xce_supervisor.process.mark import marked, oldest_first
from xce_supervisor.process.nursery import Newborn, Nursery, pids_in, pids_of

_LEAF = "supervisor"
_UNIT = "unit-"
_ADOPT_S = 2.0  # survivors that fork faster than we can move are left to `kill` after so long
_OURS = re.compile(r"/xce-[^/]+\.[0-9a-f]{8}/supervisor$")


class CgroupUnusable(Exception):
    """There is no cgroup v2 that we can write, or its kernel is too old; the text says what and why."""


def own_group() -> Path:
    """Return the cgroup v2 folder in which this process runs, also on a host that has v1 beside it.

    Raises CgroupUnusable when there is none, or it lies outside of what is mounted.
    """
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        raise CgroupUnusable("this kernel offers no cgroup v2")
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[:1] != ["cgroup2"]:
            continue
        root, mount = (_unescaped(field) for field in fields.split()[3:5])
        if root == "/":
            return Path(mount + own)
        if own == root or own.startswith(root + "/"):
            return Path(mount + own[len(root) :])
    raise CgroupUnusable(f"our cgroup {own} is in no mounted cgroup2 file system")


def _unescaped(field: str) -> str:
    """Undo the octal escapes of /proc/self/mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


class CgroupForest:
    """The trees of one supervisor, each a cgroup. See `tree.Forest` for what the methods promise."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, births: Births, root: str | None = None) -> None:
        """Make the folders, move this process into its leaf, take over the folder of a dead predecessor of the same name.

        Raises CgroupUnusable; nothing is left behind then.
        """
        self.loop = loop
        own = own_group()
        # Started from within another supervisor's leaf (an upgrade in place): go beside it, not below it.
        self._home = Path(_OURS.sub("", str(own)))
        self._base = Path(root) if root else self._home
        if not (self._base / "cgroup.procs").exists():
            raise CgroupUnusable(f"{self._base} is no cgroup v2 folder")
        self._name = quote(name, safe="@-_")
        self._trees: dict[str, CgroupTree] = {}
        self.listening: dict[int, CgroupTree] = {}  # by the descriptor of cgroup.events
        self.nursery = Nursery(births)
        self.folder = self._make_folder()
        self.leaf = self.folder / _LEAF
        self.why = f"cgroup v2 at {self.folder}"
        self.poller = select.epoll()
        loop.add_reader(self.poller.fileno(), self._on_events)

    def _make_folder(self) -> Path:
        former = self._found()
        folder = former[0] if former else self._base / f"xce-{self._name}.{secrets.token_hex(4)}"
        leaf = folder / _LEAF
        try:
            leaf.mkdir(parents=True, exist_ok=True)
            if not (leaf / "cgroup.kill").exists():
                raise CgroupUnusable("this kernel has no cgroup.kill (it came with Linux 5.14)")
            _write(f"{leaf}/cgroup.procs", "0")
        except OSError as error:
            _remove(folder)
            raise CgroupUnusable(f"cgroup v2 at {self._base} cannot be used ({error.strerror})") from error
        except CgroupUnusable:
            _remove(folder)
            raise
        return folder

    def _found(self) -> list[Path]:
        """Folders of our name that a predecessor left; the one with the most life first."""
        with contextlib.suppress(OSError):
            found = [path for path in self._base.glob(f"xce-{self._name}.*") if re.search(r"\.[0-9a-f]{8}$", path.name)]
            return sorted(found, key=lambda path: (-len(pids_of(path)), path.name))
        return []

    def tree(self, unit: str) -> CgroupTree:
        if unit not in self._trees:
            self._trees[unit] = CgroupTree(self, unit, self.folder / f"{_UNIT}{quote(unit, safe='@-_')}")
        return self._trees[unit]

    def survivors(self, mark: str) -> dict[str, list[Identity]]:
        found = marked(mark)
        for folder in self._found():
            for group in folder.glob(f"{_UNIT}*"):
                known = found.setdefault(unquote(group.name[len(_UNIT) :]), [])
                known += [identity for identity, _ in _living(group) if identity not in known]
        return {unit: oldest_first(identities) for unit, identities in found.items() if identities}

    def close(self) -> None:
        self.loop.remove_reader(self.poller.fileno())
        for tree in self._trees.values():
            tree.drop()
        self.poller.close()
        with contextlib.suppress(OSError):  # then the leaf stays, for the next supervisor of this name
            _write(f"{self._home}/cgroup.procs", "0")
        for folder in {self.folder, *self._found()}:
            _remove(folder)

    def _on_events(self) -> None:
        """Some cgroup.events changed. Reading the file is what re-arms it."""
        for fd, _ in self.poller.poll(0):
            tree = self.listening.get(fd)
            if tree is not None:
                tree.look()


class CgroupTree:
    """One unit's cgroup. See `tree.Tree` for what the methods promise."""

    def __init__(self, forest: CgroupForest, unit: str, folder: Path) -> None:
        self.unit = unit
        self._events = -1  # cgroup.events, kept open
        self._forest = forest
        self._folder = folder
        self._callback: Callable[[], None] | None = None

    @property
    def path(self) -> str:
        return str(self._folder)

    def expecting(self) -> contextlib.AbstractContextManager[None]:
        return self._forest.nursery.expecting(self.unit)

    def adopt_leader(self, identity: Identity, token: str = "") -> None:
        with self.expecting():
            self._ready()
            self._move(identity.pid)
            self._settle(identity, token)

    def adopt_survivors(self, identities: list[Identity], token: str = "") -> None:
        self._ready()
        give_up = time.monotonic() + _ADOPT_S
        while time.monotonic() < give_up:
            inside = set(pids_of(self._folder))
            outside = [each for each in identities if each.pid not in inside and is_alive(each)]
            for identity in outside:
                self._move(identity.pid)
            if not outside:
                break
        if identities:
            self._settle(identities[0], token)

    def signal(self, number: int) -> int:
        return sum(send_signal(identity, number) for identity, _ in self.members())

    def kill(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # no child yet, or somebody removed the empty group
            _write(f"{self._folder}/cgroup.kill", "1")

    def members(self) -> list[tuple[Identity, str]]:
        return _living(self._folder)

    def contains(self, pid: int) -> bool:
        lines = (read_proc(f"/proc/{pid}/cgroup") or b"").decode("utf-8", "surrogateescape").splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "")
        return f"/{self._folder.parent.name}/{self._folder.name}/" in f"{own}/"  # or in a group that the child made inside

    def empty(self) -> bool:
        if self._events < 0:
            return not pids_of(self._folder)
        try:
            return b"populated 0" in os.pread(self._events, 256, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:  # somebody removed the group, which only an empty one allows
                raise
            return True

    def on_empty(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback
        if callback is not None and self.empty():
            self._forest.loop.call_soon(self.look)

    def look(self) -> None:
        """Tell the callback if the tree is empty by now."""
        if self.empty() and self._callback is not None:  # in this order: reading is what re-arms the poller
            callback, self._callback = self._callback, None
            callback()

    def remove(self) -> None:
        if self.empty():
            _remove(self._folder)
            if not self._folder.exists():
                fd, self._events = self._events, -1
                self._forest.loop.call_soon_threadsafe(self._close, fd)

    def drop(self) -> None:
        """Stop listening (in the loop); the group itself stays."""
        self._callback = None
        fd, self._events = self._events, -1
        self._close(fd)

    def _close(self, fd: int) -> None:
        if self._forest.listening.pop(fd, None) is not None:
            self._forest.poller.unregister(fd)
            os.close(fd)

    def _ready(self) -> None:
        """Make the group and listen to it; again if somebody removed it meanwhile. The loop may be reading the old descriptor."""
        if self._events >= 0 and self._folder.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        os.pread(fd, 256, 0)
        self._forest.listening[fd] = self
        self._forest.poller.register(fd, select.EPOLLPRI)
        former, self._events = self._events, fd
        self._forest.loop.call_soon_threadsafe(self._close, former)

    def _settle(self, leader: Identity, token: str) -> None:
        newborn = Newborn(self.unit, leader, token, partial(pids_of, self._folder), self._move)
        self._forest.nursery.settle(newborn, partial(pids_in, str(self._forest.leaf)))

    def _move(self, pid: int) -> bool:
        """Move one process. Returns False when it is gone."""
        try:
            _write(f"{self._folder}/cgroup.procs", str(pid))
        except ProcessLookupError:
            return False
        return True


def _write(path: str, text: str) -> None:
    """Write a control file of a cgroup."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _living(folder: Path) -> list[tuple[Identity, str]]:
    stats = [stat for pid in pids_of(folder) if (stat := read_stat(pid)) is not None and not stat.dead]
    return [(identity_of(stat), stat.state) for stat in stats]


def _remove(folder: Path) -> None:
    """Remove a group and those below it, deepest first, as far as they are empty."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # somebody lives in it: left for the next supervisor
            os.rmdir(path)
