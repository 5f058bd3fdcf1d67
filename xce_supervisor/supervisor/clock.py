"""Reads both steady clocks, and nothing else does (docs/rules.md L23, S21)."""

from __future__ import annotations

import time

from xce_supervisor.core.words import Now


def now() -> Now:
    """Return CLOCK_MONOTONIC and CLOCK_BOOTTIME in nanoseconds."""
    return Now(time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
