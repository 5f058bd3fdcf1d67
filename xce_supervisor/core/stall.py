"""Is a joined child acting on what the controller sent it? (docs/rules.md S9, S10)

Wedged means: the oldest push has not been acted on for `stall_timeout`, seen twice at least `stall_confirm` apart with no
progress between. A child that has no session for `join_timeout`, counted from its spawn or from the loss of its session, is
treated likewise; one that lost its session while it owed something goes on owing it. An idle child owes nothing and is never
wedged. Only the session that shows our own spawn token counts: a stranger's progress is not our child's.

The controller's own absence is credited: an age it measured while its loop stood still says nothing about the child.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xce_supervisor.core.role import Session
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Deadline, Gap, Now

# Pauses of the controller's loop shorter than this are everyday scheduling noise, not absence.
GAP_NS_MIN = 500 * NS_PER_MS
# A controller that claims longer pauses than this would switch the judgement off.
GAP_NS_MAX = 30 * NS_PER_S


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """In nanoseconds: S9's stall_timeout (10 s), stall_confirm (1 s) and join_timeout (10 s)."""

    stall_timeout_ns: int = 10 * NS_PER_S
    stall_confirm_ns: int = NS_PER_S
    join_timeout_ns: int = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Suspect:
    """A stall seen once. acted_seq: how far the child had come. at: when it was seen."""

    acted_seq: int
    at: Now


@dataclass(frozen=True, slots=True)
class Watch:
    """What we know of one child's progress. join_by: set while it has no session; None while it has one.

    stall_ns: age of the oldest push not acted on, at the last look. owed_since: when that push was sent, by our clocks; kept when
    the session is lost, because what is owed stays owed: a stopped child loses its session long before it is found out otherwise.
    """

    join_by: Deadline | None
    suspect: Suspect | None = None
    stall_ns: int = 0
    owed_since: Now | None = None

    @property
    def joined(self) -> bool:
        return self.join_by is None


@dataclass(frozen=True, slots=True)
class Wedged:
    """The verdict. kind: "not joined" or "stalled"; stall_ns: age of the oldest push not acted on."""

    kind: str
    stall_ns: int


def begin(now: Now, policy: StallPolicy) -> Watch:
    """Return the watch of a child spawned (or adopted) now."""
    return Watch(join_by=now.after(policy.join_timeout_ns))


def judge(
    watch: Watch, session: Session, token: str, loop_gap_ns: int, now: Now, policy: StallPolicy
) -> tuple[Watch, Wedged | None]:
    """Return the watch after one answer of the controller, and a verdict if it confirms a wedge.

    session: of the answer. token: our child's spawn token. loop_gap_ns: the controller's longest recent pause.
    """
    if not (session.joined and session.spawn_token == token):
        return _judge_absent(watch, now, policy)
    age_ns = session.oldest_unacked_ns or 0
    credit_ns = min(loop_gap_ns, GAP_NS_MAX) if loop_gap_ns >= GAP_NS_MIN else 0
    owed_since = None if session.oldest_unacked_ns is None else Now(now.mono_ns - age_ns, now.boot_ns - age_ns)
    joined = replace(watch, join_by=None, stall_ns=age_ns, owed_since=owed_since)
    if age_ns < policy.stall_timeout_ns + credit_ns:
        return replace(joined, suspect=None), None
    return _suspect(joined, session.last_acted_seq, now, policy)


def _judge_absent(watch: Watch, now: Now, policy: StallPolicy) -> tuple[Watch, Wedged | None]:
    """Judge a child that has no session: by the time it has been without, and by what it owed when it lost it."""
    if watch.join_by is None:
        watch = replace(watch, join_by=now.after(policy.join_timeout_ns))
    elif watch.join_by.waited_out(now):
        return watch, Wedged("not joined", watch.stall_ns)
    if watch.owed_since is None:
        return watch, None
    watch = replace(watch, stall_ns=now.waited(watch.owed_since))
    if watch.stall_ns < policy.stall_timeout_ns:
        return watch, None
    return _suspect(watch, watch.suspect.acted_seq if watch.suspect is not None else -1, now, policy)


def _suspect(watch: Watch, acted_seq: int, now: Now, policy: StallPolicy) -> tuple[Watch, Wedged | None]:
    """A stall was seen: the first time it is a suspicion; later, without progress between, it is a verdict."""
    suspect = watch.suspect
    if suspect is None or suspect.acted_seq != acted_seq:
        return replace(watch, suspect=Suspect(acted_seq, now)), None
    if now.waited(suspect.at) >= policy.stall_confirm_ns:
        return watch, Wedged("stalled", watch.stall_ns)
    return watch, None


def credited(watch: Watch, gap: Gap) -> Watch:
    """Return the watch after our own absence: deadlines move out, a suspicion starts anew (S10)."""
    join_by = watch.join_by.credited(gap) if watch.join_by is not None else None
    owed = watch.owed_since
    owed_since = None if owed is None else Now(owed.mono_ns + gap.mono_ns, owed.boot_ns + gap.boot_ns)
    return replace(watch, join_by=join_by, suspect=None, owed_since=owed_since)
