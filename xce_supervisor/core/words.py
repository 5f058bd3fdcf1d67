"""The nouns that every room shares: instants, roles, bindings, identities.

Times are integers of nanoseconds. `Now` carries both of the kernel's steady clocks, because they differ over a suspend:
CLOCK_MONOTONIC stands still, CLOCK_BOOTTIME goes on (docs/rules.md L23). A deadline that ends somebody's *authority* is
reached when the faster clock reaches it; a *wait* is over when the slower one does. The wall clock appears nowhere in
this package: it stamps records, it decides nothing (docs/rules.md S21).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Now:
    """One reading of both steady clocks, in nanoseconds.

    mono_ns: CLOCK_MONOTONIC (does not count suspend).
    boot_ns: CLOCK_BOOTTIME (counts suspend).
    """

    mono_ns: int
    boot_ns: int

    def after(self, delay_ns: int) -> Deadline:
        """Return the deadline `delay_ns` nanoseconds (>= 0) from here."""
        return Deadline(self.mono_ns + delay_ns, self.boot_ns + delay_ns)

    def since(self, earlier: Now) -> int:
        """Return the nanoseconds since `earlier` by the faster clock (for ages of authority)."""
        return max(self.mono_ns - earlier.mono_ns, self.boot_ns - earlier.boot_ns)

    def waited(self, earlier: Now) -> int:
        """Return the nanoseconds since `earlier` by the slower clock (for waits)."""
        return min(self.mono_ns - earlier.mono_ns, self.boot_ns - earlier.boot_ns)


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant to come, on both clocks, in nanoseconds."""

    mono_ns: int
    boot_ns: int

    def ended(self, now: Now) -> bool:
        """Has authority ended? True as soon as either clock has reached it (docs/rules.md L23)."""
        return now.mono_ns >= self.mono_ns or now.boot_ns >= self.boot_ns

    def waited_out(self, now: Now) -> bool:
        """Is a wait over? True when both clocks have reached it (docs/rules.md L23)."""
        return now.mono_ns >= self.mono_ns and now.boot_ns >= self.boot_ns

    def remaining_ns(self, now: Now) -> int:
        """Return the nanoseconds left by the faster clock; 0 when ended."""
        return max(0, min(self.mono_ns - now.mono_ns, self.boot_ns - now.boot_ns))

    def credited(self, gap: Gap) -> Deadline:
        """Return the deadline moved out by `gap`: a judge who was absent does not judge (docs/rules.md S10)."""
        return Deadline(self.mono_ns + gap.mono_ns, self.boot_ns + gap.boot_ns)


@dataclass(frozen=True, slots=True)
class Gap:
    """How long somebody did not run, by each clock, in nanoseconds: over a suspend only one of them goes on."""

    mono_ns: int
    boot_ns: int

    @property
    def longest_ns(self) -> int:
        """By the faster clock, for people."""
        return max(self.mono_ns, self.boot_ns)


class Role(StrEnum):
    """What a controller is, or what we know of it."""

    PRIMARY = "primary"
    STANDBY = "standby"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Binding:
    """What a role-bound child belongs to (docs/rules.md S2).

    controller_id: the configured name of the controller, e.g. "c1".
    instance_id: made anew at every start of the controller's process.
    term: the controller's term; only rises.
    """

    controller_id: str
    instance_id: str
    term: int


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that can be told from every other one (docs/rules.md S15).

    pid: process id. start_ticks: field 22 of /proc/PID/stat, clock ticks since boot.
    boot_id: /proc/sys/kernel/random/boot_id of the boot in which it was read.
    """

    pid: int
    start_ticks: int
    boot_id: str
