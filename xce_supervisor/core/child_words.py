"""The states, events and effects of one child; `core.child` moves between them, `core.gates` explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from xce_supervisor.core.backoff import BackoffPolicy
from xce_supervisor.core.role import Session
from xce_supervisor.core.stall import StallPolicy, Watch
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Binding, Deadline, Gap, Identity, Now

# The binding of units that are bound to nothing: they are wanted as long as the supervisor runs.
ALWAYS = Binding("", "", 0)


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The numbers of one unit, in nanoseconds; defaults are those of docs/rules.md S6, S9, S12, S13."""

    name: str
    role_bound: bool = True
    session_readiness: bool = True
    notify_readiness: bool = False
    stop_on_leave: bool = False
    stall: StallPolicy = field(default_factory=StallPolicy)
    backoff: BackoffPolicy = field(default_factory=lambda: BackoffPolicy(NS_PER_S // 2, 30 * NS_PER_S, 0.2))
    healthy_ns: int = 60 * NS_PER_S
    exit_push_ns: int = NS_PER_S
    grace_ns: int = 5 * NS_PER_S
    wedge_grace_ns: int = NS_PER_S
    evidence_ns: int = 2 * NS_PER_S
    kill_limit_ns: int = 5 * NS_PER_S
    spawn_retry_ns: int = 100 * NS_PER_MS
    spawn_retry_ns_max: int = 2 * NS_PER_S
    spawn_retry_slow_ns: int = 30 * NS_PER_S
    stale_wait_ns: int = 50 * NS_PER_MS


class StopReason(StrEnum):
    """Why a child goes down. The first two are its own fault and lead to backoff."""

    CRASHED = "crashed"
    WEDGED = "wedged"
    DEMOTED = "demoted"
    ROLE_LOST = "role lost"
    REBOUND = "rebound"
    RESTART = "restart"
    LEAVING = "leaving"
    REMOVED = "removed"


class Rung(Enum):
    """Rungs of the stop ladder, from the top."""

    EVIDENCE = "evidence"
    EXIT_PUSH = "exit push"
    TERM = "term"
    KILL = "kill"


# ---------------------------------------------------------------- what is wanted


@dataclass(frozen=True, slots=True)
class Want:
    """A child is wanted for `binding`. startable: may a new one be started now (role fresh)? not_before: hold-down (S8)."""

    binding: Binding
    startable: bool = True
    not_before: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Unwanted:
    """No child is wanted. reason: how one that runs is to be stopped; text: why, for people."""

    reason: StopReason
    text: str


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator's pause (S24). since_wall_s: Unix time, for show only."""

    by: str
    why: str
    since_wall_s: float


# ---------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class Run:
    """One spawn. token: the spawn token, "" until the spawn returned."""

    generation: int
    binding: Binding
    token: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a spawn failed (S13). step: e.g. "open program", "change directory". errno: 0 where there is none."""

    permanent: bool
    step: str
    path: str
    errno: int
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a leader ended: a code, or a signal number; both None where it was not our own child. reason: why it went down."""

    code: int | None
    signal: int | None
    at: Now
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Resting:
    since: Now


@dataclass(frozen=True, slots=True)
class Waiting:
    """confirm_after: an answer asked for later than this must confirm the binding before the next start."""

    until: Deadline
    why: str
    since: Now
    confirm_after: Now | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    fault: Fault
    retry: Deadline
    since: Now


@dataclass(frozen=True, slots=True)
class Starting:
    run: Run
    asked_at: Now
    withdrawn: bool


@dataclass(frozen=True, slots=True)
class Running:
    """ready_at: first session or READY=1. probes: the last two of (when, process state letter, cpu nanoseconds)."""

    run: Run
    identity: Identity
    since: Now
    ready_at: Now | None
    watch: Watch
    adopted: bool = False
    probes: tuple[tuple[Now, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """exit: set once the leader has ended; the state lasts until the tree is empty."""

    run: Run
    identity: Identity
    rung: Rung
    rung_at: Now
    deadline: Deadline
    reason: StopReason
    text: str
    started_at: Now
    ready_at: Now | None
    adopted: bool
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class Unkillable:
    run: Run
    identity: Identity
    since: Now
    reason: StopReason
    text: str
    exit: Exit | None
    retry: Deadline
    started_at: Now
    ready_at: Now | None


Life = Resting | Waiting | Blocked | Starting | Running | Stopping | Unkillable


@dataclass(frozen=True, slots=True)
class Child:
    """A unit's child over all its lives. failures: crashes and wedges in a row. restarts: crashes and wedges, ever.

    restart_due: a restart was asked for that could not begin yet (a spawn in flight, a pause).
    """

    want: Want | Unwanted
    life: Life
    generation: int = 0
    failures: int = 0
    spawn_faults: int = 0
    restarts: int = 0
    last_exit: Exit | None = None
    pause: Pause | None = None
    restart_due: bool = False


def live_run(life: Life) -> Run | None:
    """Return the spawn that `life` is about, None when there is no process and none in flight."""
    match life:
        case Starting(run=run) | Running(run=run) | Stopping(run=run) | Unkillable(run=run):
            return run
        case _:
            return None


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WantChanged:
    want: Want | Unwanted


@dataclass(frozen=True, slots=True)
class RoleConfirmed:
    """An answer asked for at `asked_at` said that the wanted binding still holds."""

    asked_at: Now


@dataclass(frozen=True, slots=True)
class Spawned:
    generation: int
    identity: Identity
    token: str


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    generation: int
    fault: Fault
    draw: float


@dataclass(frozen=True, slots=True)
class SpawnCancelled:
    """Nothing was spawned: withdrawn while queued, or the binding had gone stale when the lane looked (S2)."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderExited:
    generation: int
    code: int | None
    signal: int | None
    tree_empty: bool
    draw: float


@dataclass(frozen=True, slots=True)
class TreeEmptied:
    generation: int
    draw: float


@dataclass(frozen=True, slots=True)
class SessionSeen:
    """An answer of the controller told of the scheduler's session while primary for `binding`."""

    binding: Binding
    session: Session
    loop_gap_ns: int


@dataclass(frozen=True, slots=True)
class Readied:
    """READY=1 over the notify socket."""

    generation: int


@dataclass(frozen=True, slots=True)
class Probed:
    """state: letter of /proc/PID/stat. cpu_ns: user and system time so far."""

    generation: int
    state: str
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class EvidenceKept:
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """A former supervisor's child was found alive (S17)."""

    generation: int
    identity: Identity
    binding: Binding
    token: str


@dataclass(frozen=True, slots=True)
class ProgramChanged:
    """The file that could not be executed is another one now (S13)."""


@dataclass(frozen=True, slots=True)
class RestartAsked:
    by: str


@dataclass(frozen=True, slots=True)
class PauseChanged:
    pause: Pause | None


@dataclass(frozen=True, slots=True)
class GapSeen:
    gap: Gap


@dataclass(frozen=True, slots=True)
class Ticked:
    pass


ChildEvent = (
    WantChanged | RoleConfirmed | Spawned | SpawnFailed | SpawnCancelled | LeaderExited | TreeEmptied | SessionSeen | Readied
    | Probed | EvidenceKept | Adopted | ProgramChanged | RestartAsked | PauseChanged | GapSeen | Ticked
)  # fmt: skip


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Spawn:
    """Ends in exactly one of Spawned, SpawnFailed, SpawnCancelled of the same generation."""

    generation: int
    binding: Binding
    attempt: int


@dataclass(frozen=True, slots=True)
class CancelSpawn:
    """Drop the spawn if it is still queued; if it already runs, it ends as it would have."""

    generation: int


@dataclass(frozen=True, slots=True)
class SignalLeader:
    """signal: "TERM" or "CONT", through the verified pidfd (S15)."""

    generation: int
    signal: str


@dataclass(frozen=True, slots=True)
class KillTree:
    """SIGKILL to every process of the tree."""

    generation: int


@dataclass(frozen=True, slots=True)
class CollectEvidence:
    """Ends in EvidenceKept; the ladder does not wait longer than its rung."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at the leader's process state; answered by Probed."""

    generation: int


@dataclass(frozen=True, slots=True)
class WatchProgram:
    """Tell by ProgramChanged when the file changes."""

    path: str


@dataclass(frozen=True, slots=True)
class ForgetTree:
    """The tree is gone: let go of its sockets and its place in the state file."""

    generation: int


@dataclass(frozen=True, slots=True)
class PollRole:
    """Ask the controller now, beside any poll under way."""


@dataclass(frozen=True, slots=True)
class Record:
    """Write to the journal and the log. kind: `noun.past_verb`. reason: for people. fields: keys and plain values."""

    kind: str
    reason: str
    fields: tuple[tuple[str, str | int | None], ...] = ()


ChildEffect = (
    Spawn | CancelSpawn | SignalLeader | KillTree | CollectEvidence | Probe | WatchProgram | ForgetTree | PollRole | Record
)
Step = tuple[Child, tuple[ChildEffect, ...]]
