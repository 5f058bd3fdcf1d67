"""The one timer of a driver: an absolute deadline of CLOCK_MONOTONIC, to the microsecond.

An event loop's own timers count in whole milliseconds from a cached clock, so that they fire early or a millisecond late; a
timerfd in the loop does neither. It costs nothing while it is not due.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Alarm:
    """Calls `callback` on the loop at the deadline that was set last. All methods belong to the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "cannot make a timer (timerfd_create)")
        self._at_ns: int | None = None
        loop.add_reader(self._fd, self._on_due)

    def set(self, at_ns: int | None) -> None:
        """Ring at `at_ns` of CLOCK_MONOTONIC, in nanoseconds; at once if that is past; never when None."""
        if at_ns == self._at_ns:
            return
        self._at_ns = at_ns
        due = max(1, at_ns) if at_ns is not None else 0  # zero disarms
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(due // _NS, due % _NS))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "cannot set the timer (timerfd_settime)")

    def close(self) -> None:
        """Never ring again; give the descriptor back."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_due(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew since it fired
            return
        self._at_ns = None
        self._callback()
