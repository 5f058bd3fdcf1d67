"""Resource limits and users of a child: checked here, set by prlimit(1) and setpriv(1) just before the program.

The tools end with an exit code when they are refused, which would look like a crash of the child. So what they would be refused
for is looked up first (docs/rules.md S13).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import grp
import os
import pwd
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xce_supervisor.process import program
from xce_supervisor.process.failure import SpawnError

_TOOL_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_CAP_SYS_RESOURCE = 24
_UNLIMITED = -1
# By machine, as uname(2) names it: the raw system call, which changes the calling thread alone.
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206}

# Names as prlimit(1) spells its options.
LIMITS: Mapping[str, int] = {
    "as": resource.RLIMIT_AS,
    "core": resource.RLIMIT_CORE,
    "cpu": resource.RLIMIT_CPU,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "msgqueue": resource.RLIMIT_MSGQUEUE,
    "nice": resource.RLIMIT_NICE,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "rss": resource.RLIMIT_RSS,
    "rtprio": resource.RLIMIT_RTPRIO,
    "rttime": resource.RLIMIT_RTTIME,
    "sigpending": resource.RLIMIT_SIGPENDING,
    "stack": resource.RLIMIT_STACK,
}


class Account(Protocol):
    """The part of a SpawnSpec that says who the child is."""

    @property
    def user(self) -> str | None: ...
    @property
    def group(self) -> str | None: ...


def limit_chain(limits: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the start of a command line that sets the limits; empty where they are what we have ourselves.

    Raises SpawnError(step "limits") for an unknown name, soft above hard, or a hard limit that we may not raise.
    """
    options = []
    for name, (soft, hard) in limits.items():
        if name not in LIMITS:
            known = ", ".join(sorted(LIMITS))
            raise SpawnError("limits", "", errno.EINVAL, detail=f"no limit is called {name!r}; known: {known}")
        if _above(soft, hard):
            raise SpawnError("limits", "", errno.EINVAL, detail=f"{name}: soft {soft} is above hard {hard}")
        own = resource.getrlimit(LIMITS[name])
        if (soft, hard) == own:
            continue
        if _above(hard, own[1]) and not _may_raise():
            detail = f"{name}: hard {hard} is above the supervisor's own {own[1]}; raise that one first"
            raise SpawnError("limits", "", errno.EPERM, detail=detail)
        if name == "nofile" and _above(hard, _files_max()):
            raise SpawnError("limits", "", errno.EPERM, detail=f"nofile: hard {hard} is above fs.nr_open ({_files_max()})")
        options.append(f"--{name}={_word(soft)}:{_word(hard)}")
    return [_tool("prlimit"), *options] if options else []


@dataclass(frozen=True, slots=True)
class Ids:
    """Who a child will be."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def ids_of(account: Account) -> Ids | None:
    """Return who the child will be; None where it stays who we are.

    Raises SpawnError(step "user") for unknown names, or where we may not change (only root may).
    """
    if account.user is None and account.group is None:
        return None
    user = _user(account.user) if account.user is not None else None
    gid = _group(account.group) if account.group is not None else (user.pw_gid if user else os.getegid())
    uid = user.pw_uid if user else os.geteuid()
    if uid == os.geteuid() and gid == os.getegid():
        return None
    if os.geteuid() != 0:
        detail = f"only root may start a child as {account.user or ''}:{account.group or ''}"
        raise SpawnError("user", "", errno.EPERM, detail=detail)
    return Ids(uid, gid, tuple(os.getgrouplist(user.pw_name, gid)) if user else ())


def user_chain(account: Account, path: str) -> list[str]:
    """Return the part of a command line that changes user and group; empty where the child stays who we are.

    path: the program; looked at with that user's permissions, because a refusal by setpriv would look like a crash. Blocks.

    Raises SpawnError: as `ids_of`, and what `program.examine` says of the program for that user.
    """
    ids = ids_of(account)
    if ids is None:
        return []
    try:
        with acting_for(ids):
            program.examine(path)
    except SpawnError as error:
        detail = f"{error.detail}, for user {account.user or ids.uid} and group {account.group or ids.gid}"
        raise SpawnError(error.step, error.path, error.errno, detail=detail) from error
    groups = f"--groups={','.join(str(each) for each in ids.groups)}" if ids.groups else "--clear-groups"
    return [_tool("setpriv"), f"--reuid={ids.uid}", f"--regid={ids.gid}", groups, "--"]


@contextlib.contextmanager
def acting_for(ids: Ids) -> Iterator[None]:
    """Give this thread, and no other, the file permissions of somebody else for the length of the block.

    The kernel keeps credentials per thread; the C library would change all threads, so its setgroups is not used. Where the
    number of that system call is not known nothing is changed, and the child's own exec has the last word.
    """
    number = _SYS_SETGROUPS.get(os.uname().machine)
    if number is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    own_groups = os.getgroups()
    own_uid, own_gid = os.geteuid(), os.getegid()
    try:
        _set_groups(libc, number, ids.groups)
        libc.setfsgid(ctypes.c_uint(ids.gid))
        libc.setfsuid(ctypes.c_uint(ids.uid))
        yield
    finally:
        libc.setfsuid(ctypes.c_uint(own_uid))
        libc.setfsgid(ctypes.c_uint(own_gid))
        _set_groups(libc, number, own_groups)
        assert libc.setfsuid(ctypes.c_uint(0xFFFFFFFF)) == own_uid, "this thread has its own permissions back"


def _set_groups(libc: ctypes.CDLL, number: int, groups: Sequence[int]) -> None:
    wanted = (ctypes.c_uint * len(groups))(*groups)
    if libc.syscall(ctypes.c_long(number), ctypes.c_size_t(len(groups)), wanted) != 0:
        raise OSError(ctypes.get_errno(), "cannot change this thread's groups (setgroups)")


def _user(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError as error:
        raise SpawnError("user", "", errno.ENOENT, detail=f"no user {name!r}; make it or change the unit's user") from error


def _group(name: str) -> int:
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise SpawnError("user", "", errno.ENOENT, detail=f"no group {name!r}; make it or change the unit's group") from error


def _tool(name: str) -> str:
    found = shutil.which(name, path=_TOOL_PATH)
    if found is None:
        detail = "needed for this unit's limits or user; install util-linux"
        raise SpawnError("tool", f"/usr/bin/{name}", errno.ENOENT, detail=detail)
    return found


def _above(left: int, right: int) -> bool:
    """Is `left` the greater limit? Unlimited is the greatest."""
    return right != _UNLIMITED and (left == _UNLIMITED or left > right)


def _word(value: int) -> str:
    return "unlimited" if value == _UNLIMITED else str(value)


def _may_raise() -> bool:
    """May we raise hard limits (CAP_SYS_RESOURCE)?"""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False


def _files_max() -> int:
    with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
        return int(file.read())
