"""The controller's own clock for judging others: it stands still while the controller itself stood still (docs/rules.md S10).

Ages of sessions and of pushes are measured on it, so that a controller that was stopped, suspended or starved does not hold its
own absence against its peers.
"""

from __future__ import annotations

import time
from collections import deque

# The loop reads the clock at least this often; a longer step than the limit is the loop's own absence.
TICK_S = 0.1
GAP_S_MIN = 0.3
REMEMBERED_S = 10.0
_REMEMBERED_MAX = 100


class AwakeClock:
    """Seconds of CLOCK_MONOTONIC, less the time in which nobody read it for longer than `GAP_S_MIN`."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._absent_s = 0.0
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_MAX)

    def now_s(self) -> float:
        """Return the reading, in seconds."""
        now = time.monotonic()
        step = now - self._last
        self._last = now
        if step > GAP_S_MIN:
            self._absent_s += step - TICK_S
            self._gaps.append((now, step))
        return now - self._absent_s

    def age_ms(self, since_s: float) -> int:
        """Return the age in milliseconds of what happened at reading `since_s`."""
        return max(0, int((self.now_s() - since_s) * 1000))

    def uptime_ms(self) -> int:
        """Return the milliseconds since the start, absences included."""
        return int((time.monotonic() - self._started) * 1000)

    def gap_ms(self) -> int:
        """Return the longest absence of the last ten seconds, in milliseconds, 0 when there was none."""
        self.now_s()
        return int(max((gap for at, gap in self._gaps if self._last - at <= REMEMBERED_S), default=0.0) * 1000)
