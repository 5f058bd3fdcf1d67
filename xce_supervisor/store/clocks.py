"""The two steady clocks and the boot they belong to."""

from __future__ import annotations

import time
from pathlib import Path

from xce_supervisor.core.words import Now

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def read_now() -> Now:
    """Return both steady clocks, read one after the other."""
    return Now(mono_ns=time.monotonic_ns(), boot_ns=boot_ns())


def boot_ns() -> int:
    """Return CLOCK_BOOTTIME in nanoseconds: the same reading in every process of the machine, suspend included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def read_boot_id() -> str:
    """Return the id of this boot."""
    return BOOT_ID_FILE.read_text(encoding="ascii").strip()
