"""The bundle that is kept before a wedged child is killed (docs/rules.md S11): what the kernel knows of it, in one JSON file.

Everything is bounded: what is read of each file, how many processes, threads and descriptors, the whole bundle, and how many
bundles are kept. It runs in a lane. Nothing is read that a process in an uninterruptible sleep can make wait: no cmdline,
environ, maps or exe (they need its memory map), and no descriptor's target is opened. The log file, which may lie on the
very disk that hangs, comes last: the rest is on disk by then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xce_supervisor.core.words import Identity
from xce_supervisor.process.identity import is_alive, read_stat

_FILE_BYTES_MAX = 8192
_PROCESSES_MAX = 16
_THREADS_MAX = 32
_DESCRIPTORS_MAX = 256
_NET_BYTES_MAX = 4 * 1024 * 1024
_LOG_BYTES_MAX = 32 * 1024
_EXTRA_BYTES_MAX = 64 * 1024
BUNDLE_BYTES_MAX = 1024 * 1024
_NAME = re.compile(r"(\d{6})-.*\.json")
_TCP_STATES = (
    *("?", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT"),
    *("CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)


def collect(
    folder: Path,
    name: str,
    leader: Identity,
    members: Sequence[Identity] = (),
    *,
    log: Path | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 20,
) -> Path:
    """Write a bundle about a child and return its path, `folder`/NNNNNN-`name`.json. Blocks: a lane's work.

    leader, members: the child's processes; the first 16 are described. log: a file whose last 32 KiB are kept. extra: what the
    caller knows (reason, stamps, the controller's counters), kept whole up to 64 KiB. keep: the oldest bundles beyond this many
    are removed.

    Raises OSError when the folder cannot be written (a full disk): then there is no evidence, and the kill goes on without.
    """
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    safe = re.sub(r"[^A-Za-z0-9@._-]", "_", name)[:64]
    path = folder / f"{max(numbers, default=0) + 1:06d}-{safe}.json"
    everyone = list(dict.fromkeys([leader, *members]))
    bundle: dict[str, Any] = {
        "name": name,
        "leader": {"pid": leader.pid, "start_ticks": leader.start_ticks, "boot_id": leader.boot_id},
        "extra": _bounded(extra or {}),
        "processes": [describe(identity) for identity in everyone[:_PROCESSES_MAX]],
        "processes_left_out": max(0, len(everyone) - _PROCESSES_MAX),
        "load": _read("/proc/loadavg"),
        "pressure": {kind: _read(f"/proc/pressure/{kind}") for kind in ("cpu", "io", "memory")},
    }
    _write(path, bundle)
    if log is not None:
        bundle["log"] = {"path": str(log), "tail": _tail(log)}
        _write(path, bundle)
    _prune(folder, keep)
    return path


def describe(identity: Identity) -> dict[str, Any]:
    """Return what the kernel tells of one process; {"gone": True} when it is not there any more. Works for every state, D too."""
    base = f"/proc/{identity.pid}"
    about: dict[str, Any] = {"pid": identity.pid}
    if not is_alive(identity):
        return {**about, "gone": True}
    stat = read_stat(identity.pid)
    descriptors = _descriptors(base)
    about |= {
        "name": stat.name if stat else "",
        "state": stat.state if stat else "",
        "parent": stat.ppid if stat else 0,
        "status": _read(f"{base}/status"),
        "wchan": _read(f"{base}/wchan"),
        "syscall": _read(f"{base}/syscall"),
        "stack": _read(f"{base}/stack"),  # root only
        "schedstat": _read(f"{base}/schedstat"),
        "io": _read(f"{base}/io"),
        "limits": _read(f"{base}/limits"),
        "cgroup": _read(f"{base}/cgroup"),
        "threads": _threads(base),
        "descriptors": descriptors,
        "sockets": _sockets(base, descriptors),
    }
    # The pid may have been given out again while we read: then all of it is a stranger's.
    return about if is_alive(identity) else {"pid": identity.pid, "gone": True}


def _threads(base: str) -> list[dict[str, str]]:
    found = []
    for thread in _listed(f"{base}/task")[:_THREADS_MAX]:
        task = f"{base}/task/{thread}"
        line = _read(f"{task}/stat")
        state = line.rpartition(")")[2].split()[:1]
        found.append(
            {
                "tid": thread,
                "name": _read(f"{task}/comm").strip(),
                "state": state[0] if state else "",
                "wchan": _read(f"{task}/wchan"),
                "syscall": _read(f"{task}/syscall"),
                "stack": _read(f"{task}/stack"),
            }
        )
    return found


def _descriptors(base: str) -> dict[str, str]:
    found = {}
    for fd in sorted(_listed(f"{base}/fd"), key=int)[:_DESCRIPTORS_MAX]:
        try:
            found[fd] = os.readlink(f"{base}/fd/{fd}")  # the name of the target: nothing is opened
        except OSError:
            continue  # closed meanwhile
    return found


def _sockets(base: str, descriptors: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the queues of the process's sockets: bytes not yet acknowledged by the peer, bytes not yet read by it."""
    inodes = {match[1]: fd for fd, target in descriptors.items() if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}
    found: list[dict[str, str]] = []
    if not inodes:
        return found
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(f"{base}/net/{kind}", _NET_BYTES_MAX).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] in inodes:
                sent, _, received = fields[4].partition(":")
                number = int(fields[3], 16)
                found.append(
                    {
                        "fd": inodes[fields[9]],
                        "kind": kind,
                        "local": address(fields[1]),
                        "remote": address(fields[2]),
                        "state": _TCP_STATES[number] if number < len(_TCP_STATES) else fields[3],
                        "send_queue_bytes": str(int(sent, 16)),
                        "receive_queue_bytes": str(int(received, 16)),
                    }
                )
    for line in _read(f"{base}/net/unix", _NET_BYTES_MAX).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 6 and fields[6] in inodes:
            found.append({"fd": inodes[fields[6]], "kind": "unix", "path": " ".join(fields[7:])})
    return found


def address(text: str) -> str:
    """Return "127.0.0.1:80" for the 0100007F:0050 of /proc/net/tcp; words of an IPv6 address are swapped alike."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    if len(words) == 1:
        return f"{'.'.join(str(byte) for byte in words[0])}:{int(port, 16)}"
    whole = b"".join(words).hex()
    return f"[{':'.join(whole[at : at + 4] for at in range(0, 32, 4))}]:{int(port, 16)}"


def _bounded(extra: Mapping[str, Any]) -> Any:
    text = json.dumps(extra, default=str)
    return extra if len(text) <= _EXTRA_BYTES_MAX else {"cut": text[:_EXTRA_BYTES_MAX]}


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str, bytes_max: int = _FILE_BYTES_MAX) -> str:
    """Return the beginning of a file of /proc; why not, in <angle brackets>, when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = bytearray()
            while len(text) < bytes_max and (chunk := file.read(min(65536, bytes_max - len(text)))):
                text += chunk
            return text.decode("utf-8", "replace")
    except OSError as error:
        return f"<{error.strerror}>"


def _tail(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES_MAX))
            return (file.read(_LOG_BYTES_MAX) or b"").decode("utf-8", "replace")
    except OSError as error:
        return f"<{error.strerror}>"


def _write(path: Path, bundle: Mapping[str, Any]) -> None:
    """Write whole or not at all. What is too long loses its processes' ends first."""
    text = json.dumps(bundle, indent=1, default=str)
    processes = list(bundle["processes"])
    while len(text) > BUNDLE_BYTES_MAX and processes:
        processes.pop()
        left_out = bundle["processes_left_out"] + len(bundle["processes"]) - len(processes)
        text = json.dumps({**bundle, "processes": processes, "processes_left_out": left_out}, indent=1, default=str)
    draft = path.with_suffix(".tmp")
    try:
        with open(draft, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _prune(folder: Path, keep: int) -> None:
    bundles = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    for path in bundles[: max(0, len(bundles) - keep)]:
        path.unlink(missing_ok=True)
