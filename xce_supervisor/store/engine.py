"""What a controller needs of a consensus store: leadership with a durable term, facts fenced by it, freshness by quorum.

Two engines implement it, `sqlite` (one machine) and `etcd` (several), and one conformance suite runs on both. A controller
holds one engine; the engine campaigns by itself and tells its listener what became of it. Rules that both keep:

* The term is a durable counter that rises with every election, also when the same process wins again. Leadership is never
  resumed from an old key or row: identity is the candidate's fresh nonce.
* A fact is appended only while the appender leads in the term it names, decided in the same transaction that writes it.
* `confirm` proves leadership by a quorum read that was started after the call; the age is counted from before it was sent.
* An engine that cannot renew in time deposes itself by its own clock before anybody else can be elected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

FACTS_PER_APPEND_MAX = 100
FACT_BYTES_MAX = 65_536
# etcd refuses requests of more than 1.5 MiB; both engines keep the same bound, so that what works on one works on the other.
APPEND_BYTES_MAX = 1_000_000
APPEND_DEADLINE_S = 2.0
READ_DEADLINE_S = 2.0
CONFIRM_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who campaigns. address: "host:port" that a redirect names. instance_id: new at every process start."""

    controller_id: str
    instance_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader as the store knows it."""

    controller_id: str
    instance_id: str
    address: str
    term: int


@dataclass(frozen=True, slots=True)
class Fact:
    """A record to append. key: unique within kind; the same (kind, key) is appended once. body: JSON bytes, at most 64 KiB."""

    kind: str
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StoredFact:
    """A committed fact. index: rises by at least one per fact, never repeats. term: of the leader that wrote it."""

    index: int
    term: int
    kind: str
    key: str
    body: bytes


class Loss(StrEnum):
    """Why a leader leads no more."""

    RAN_OUT = "lease ran out"  # its own clock reached the end of the lease before a renewal was confirmed
    STORE_LOST = "store lost"  # the store is gone, or is not the store it was
    SUPERSEDED = "superseded"  # the store names another leader, or a later term
    RESIGNED = "resigned"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Elected:
    """This candidate leads from now on, in `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This candidate no longer leads in `term`. detail: for people."""

    term: int
    reason: Loss
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The store names another leader, or none."""

    leader: Leader | None


StoreEvent = Elected | Deposed | LeaderSeen


class Fenced(Exception):
    """The appender does not lead in the term it named: nothing was written, and nothing will be."""


class Unavailable(Exception):
    """The store did not answer in time. The outcome of a write is unknown until it is read back."""


class Conflict(Exception):
    """(kind, key) exists with another body. Same body is no conflict: the append is idempotent."""


class Behind(Exception):
    """The log holds facts that the appender had not seen (`after`). Nothing was written: read on, decide again."""


class Engine(Protocol):
    """One candidate's connection to the store. All methods run on the event loop's thread and never block it."""

    name: str  # "sqlite" | "etcd"

    async def start(self, candidate: Candidate, listener: Callable[[StoreEvent], None]) -> None:
        """Open the store and campaign until `close`. The listener is called on the loop, in order.

        Raises:
            ConfigError: the address cannot be used at all (permissions, not a database, bad TLS files).
        """

    def leads(self, term: int) -> bool:
        """Does this candidate lead in `term`, by its own clocks, at this instant? No round trip; never late, also after a
        pause of the whole process: a listener may not have been told yet of what this already says."""

    async def append(self, term: int, facts: Sequence[Fact], after: int | None = None) -> int:
        """Append facts in order, all or none, if this candidate leads in `term`. Returns the index of the last one.

        At most 100 facts and 1,000,000 bytes of bodies. Appending a (kind, key) again with the same body is a no-op that
        returns its index. after: the newest index that the appender has seen; given, new facts are written only if the log
        ends there, so that a decision never rests on a log that lags (docs/rules.md L4).

        Raises:
            Fenced, Conflict, Behind, Unavailable (deadline 2 s; outcome unknown).
        """

    async def read(self, after: int = 0, limit: int = 1000) -> list[StoredFact]:
        """Return committed facts with index > after, in order. A linearizable read. Raises Unavailable (deadline 2 s)."""

    async def confirm(self, term: int) -> int:
        """Prove by a quorum round started now that this candidate still leads in `term`.

        Returns the CLOCK_MONOTONIC reading in nanoseconds taken before the request was sent. Raises Fenced, Unavailable
        (deadline 1 s).
        """

    async def resign(self, term: int, hold_ms: int = 0) -> None:
        """Give up leadership of `term` at once and do not campaign for hold_ms. The listener gets Deposed(..., RESIGNED).
        Does nothing where `term` is not led."""

    async def close(self) -> None:
        """Stop campaigning, give up leadership if held (no event), close. Idempotent."""


def check_facts(facts: Sequence[Fact]) -> None:
    """Assert the documented bounds of one append; a breach is a bug of the caller."""
    assert 1 <= len(facts) <= FACTS_PER_APPEND_MAX, f"an append holds 1 to {FACTS_PER_APPEND_MAX} facts, not {len(facts)}"
    assert all(len(fact.body) <= FACT_BYTES_MAX for fact in facts), f"a fact's body holds at most {FACT_BYTES_MAX} bytes"
    assert sum(len(fact.body) for fact in facts) <= APPEND_BYTES_MAX, f"an append holds at most {APPEND_BYTES_MAX} bytes"
    assert len({(fact.kind, fact.key) for fact in facts}) == len(facts), "the same fact twice in one append"


def tell_bug(task: asyncio.Task[None]) -> None:
    """Done callback of a task that ends by being cancelled alone. Any other end is a bug, told to the loop's exception handler
    under the key "bug": what hangs on the task (a campaign, say) stands still for good, so the process should end."""
    if task.cancelled():
        return
    error = task.exception() or AssertionError("it returned")
    task.get_loop().call_exception_handler({"message": f"{task.get_name()} ended", "exception": error, "bug": error})
