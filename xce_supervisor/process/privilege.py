"""Resource limits and users of a child: checked here, set by prlimit(1) and setpriv(1) just before the program.

The tools end with an exit code when they are refused, which would look like a crash of the child. So what they would be refused
for is looked up first (docs/rules.md S13).
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import resource
import shutil
from collections.abc import Mapping
from typing import Protocol

from xce_supervisor.process.failure import SpawnError

_TOOL_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_CAP_SYS_RESOURCE = 24
_UNLIMITED = -1

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


def user_chain(account: Account, path: str) -> list[str]:
    """Return the part of a command line that changes user and group; empty where none is asked for, or we are it already.

    Raises SpawnError(step "user") for unknown names, or where we may not change (only root may). `path` is the program, named
    in the error when that user may not execute it.
    """
    if account.user is None and account.group is None:
        return []
    user = _user(account.user) if account.user is not None else None
    gid = _group(account.group) if account.group is not None else (user.pw_gid if user else os.getegid())
    uid = user.pw_uid if user else os.geteuid()
    if uid == os.geteuid() and gid == os.getegid():
        return []
    if os.geteuid() != 0:
        detail = f"only root may start a child as {account.user or ''}:{account.group or ''}"
        raise SpawnError("user", "", errno.EPERM, detail=detail)
    groups = "--init-groups" if user and user.pw_name else "--clear-groups"
    return [_tool("setpriv"), f"--reuid={uid}", f"--regid={gid}", groups, "--"]


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
