"""How long to wait before the next attempt (docs/rules.md S12).

Attempts count from 1. The first retry comes at once; from the second on the delay doubles up to a ceiling and is spread by
jitter, so that many hosts do not retry in step. The random part is passed in as a draw from [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

# 2**40 ns times any sane base is years: doubling stops long before the integer grows without bound.
_DOUBLINGS_MAX = 40


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """delay_ns: delay of the second retry. delay_ns_max: the ceiling. jitter: share of the delay, 0 to 1."""

    delay_ns: int
    delay_ns_max: int
    jitter: float


def delay_ns(attempt: int, policy: BackoffPolicy, draw: float) -> int:
    """Return the nanoseconds to wait before retry number `attempt` (>= 1), within delay_ns_max whatever the draw."""
    if attempt <= 1:
        return 0
    plain = policy.delay_ns << min(attempt - 2, _DOUBLINGS_MAX)
    capped = min(plain, policy.delay_ns_max)
    spread = capped * policy.jitter * (2.0 * draw - 1.0)
    return min(policy.delay_ns_max, max(0, capped + int(spread)))


def short_delay_ns(attempt: int, base_ns: int, ceiling_ns: int, draw: float) -> int:
    """Return a delay for faults that pass by themselves (S13): base, doubling to the ceiling, plus up to a half of jitter."""
    plain = min(ceiling_ns, base_ns << min(max(attempt - 1, 0), _DOUBLINGS_MAX))
    return plain + int(plain * 0.5 * draw)
