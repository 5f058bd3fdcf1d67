"""What `status --json` prints: the picture of one supervisor, its controller's role and its units (docs/rules.md S22, S23).

The driver makes a View from its core on request; the verbs draw it. Ages and remaining times are seconds (`_s`) or milliseconds
(`_ms`) at the moment the View was made; `wall` says when that was by the wall clock, which is for people alone (S21).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field

UnitIs = Literal["stopped", "starting", "running", "waiting", "cannot start", "stopping", "unkillable"]
Ready = Literal["joined", "ready", "not joined", "-"]

# Events kept for each unit and shown by `status --json` (docs/rules.md S23).
EVENTS_SHOWN = 10

Plain = str | int | float | bool | None


class Event(Struct, frozen=True, kw_only=True):
    """One thing that happened. wall: Unix time in seconds, for people. kind: `noun.past_verb`. reason: for people."""

    wall: float
    kind: str
    reason: str = ""
    fields: dict[str, Plain] = field(default_factory=dict)


class Gate(Struct, frozen=True, kw_only=True):
    """One condition of running. closed: it keeps the unit from being started now."""

    name: str
    closed: bool
    detail: str = ""


class LastExit(Struct, frozen=True, kw_only=True):
    """How the child before this one ended. code or signal (its name, e.g. "SIGKILL"); both None for one that was adopted."""

    code: int | None = None
    signal: str | None = None
    reason: str = ""
    ago_s: float = 0.0


class Paused(Struct, frozen=True, kw_only=True):
    """An operator's pause (docs/rules.md S24). since: Unix time in seconds."""

    by: str
    since: float
    why: str


class BindingView(Struct, frozen=True, kw_only=True):
    """What the child belongs to (docs/rules.md S2)."""

    controller_id: str
    instance_id: str
    term: int


class UnitView(Struct, frozen=True, kw_only=True):
    """One unit. restarts: after crashes and wedges, since the supervisor began. stall_ms: age of the oldest push not acted on."""

    name: str
    wanted: bool
    wanted_reason: str
    is_: UnitIs = field(name="is")
    is_reason: str = ""
    ready: Ready = "-"
    since_s: float = 0.0
    pid: int | None = None
    binding: BindingView | None = None
    generation: int = 0
    restarts: int = 0
    last_exit: LastExit | None = None
    next_attempt_s: float | None = None
    stall_ms: int | None = None
    paused: Paused | None = None
    degraded: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def as_wanted(self) -> bool:
        """Is it what it should be? A child on its way is not there yet."""
        if self.degraded or self.paused:
            return False
        if self.wanted:
            return self.is_ == "running" and self.ready != "not joined"
        return self.is_ == "stopped"


class RoleView(Struct, frozen=True, kw_only=True):
    """What is known of the controller. unknown_remaining_s: until role-bound children are stopped, None while role is known."""

    is_: Literal["primary", "standby", "unknown"] = field(name="is")
    since_s: float = 0.0
    term: int = 0
    instance_id: str = ""
    reason: str = ""
    gate: str = ""
    gate_detail: str = ""
    unknown_remaining_s: float | None = None
    quorum_age_ms: int | None = None
    primary_address: str = ""
    primary_id: str = ""
    last_answer_age_ms: int | None = None
    long_poll: bool = False


class SupervisorView(Struct, frozen=True, kw_only=True):
    """The supervisor itself. tree: how children's processes are held together, e.g. "cgroup /sys/fs/cgroup/...", "groups"."""

    pid: int
    version: str
    host: str
    controller_id: str
    controller_address: str
    since_s: float
    tree: str
    config_file: str


class Jobs(Struct, frozen=True, kw_only=True):
    """Job counts as the controller last told them."""

    pending: int = 0
    running: int = 0
    finished: int = 0


class View(Struct, frozen=True, kw_only=True):
    """The whole picture. wall: Unix time in seconds at which it was made. degraded: of the supervisor as a whole."""

    supervisor: SupervisorView
    role: RoleView
    units: tuple[UnitView, ...]
    degraded: tuple[str, ...] = ()
    jobs: Jobs = Jobs()
    counters: dict[str, int] = field(default_factory=dict)
    wall: float = 0.0

    def unit(self, name: str) -> UnitView | None:
        """Return the unit of that name, None if there is none."""
        return next((unit for unit in self.units if unit.name == name), None)

    @property
    def as_wanted(self) -> bool:
        """Does everything run that should, and nothing else? An unknown role, or a refused promotion, is not as wanted."""
        known = self.role.is_ != "unknown" and not self.role.gate
        return known and not self.degraded and all(unit.as_wanted for unit in self.units)

    def complaints(self) -> Iterator[str]:
        """Yield, for people, each reason for which this picture is degraded."""
        yield from self.degraded
        if self.role.is_ == "unknown":
            yield f"role unknown: {self.role.reason}" if self.role.reason else "role unknown"
        if self.role.gate:
            yield f"promotion refused by gate {self.role.gate}" + (f": {self.role.gate_detail}" if self.role.gate_detail else "")
        for unit in self.units:
            if unit.paused:
                yield f"{unit.name}: paused by {unit.paused.by}: {unit.paused.why}"
            for text in unit.degraded:
                yield f"{unit.name}: {text}"
            if not unit.as_wanted and not unit.paused and not unit.degraded:
                yield f"{unit.name}: {'wanted' if unit.wanted else 'not wanted'}, and {unit.is_}, {unit.ready}"
