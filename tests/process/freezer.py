"""A process in uninterruptible sleep, on purpose: the freezer of cgroup v1, where a machine still has it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

FREEZER = Path("/sys/fs/cgroup/freezer")


def need_freezer() -> None:
    """Skip the test where no process can be frozen like that."""
    if not (FREEZER / "cgroup.procs").exists() or os.geteuid() != 0:
        pytest.skip("needs freezer: run as root on a host with the cgroup v1 freezer, the one way to make a D state at will")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[Path]:
    """Freeze one process; it shows as D and survives SIGKILL until the file that is yielded reads THAWED."""
    folder = FREEZER / f"xce-test-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")
        (folder / "freezer.state").write_text("FROZEN", encoding="ascii")
        yield folder / "freezer.state"
    finally:
        (folder / "freezer.state").write_text("THAWED", encoding="ascii")
        for left in (folder / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(ProcessLookupError):
                (FREEZER / "cgroup.procs").write_text(left, encoding="ascii")
        with contextlib.suppress(OSError):  # a zombie may still be in it; an empty freezer group harms nobody
            folder.rmdir()
