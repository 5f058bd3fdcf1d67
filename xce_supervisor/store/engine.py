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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class Elected:
    """This candidate leads from now on, in `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This candidate no longer leads in `term`. reason: e.g. "lease ran out", "store lost", "resigned", "superseded"."""

    term: int
    reason: str


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


class Engine(Protocol):
    """One candidate's connection to the store. All methods run on the event loop's thread and never block it."""

    name: str  # "sqlite" | "etcd"

    async def start(self, candidate: Candidate, listener: Callable[[StoreEvent], None]) -> None:
        """Open the store and campaign until `close`. The listener is called on the loop, in order.

        Raises:
            ConfigError: the address cannot be used at all (permissions, not a database, bad TLS files).
        """

    async def append(self, term: int, facts: Sequence[Fact]) -> int:
        """Append facts in order, all or none, if this candidate leads in `term`. Returns the index of the last one.

        At most 100 facts. Appending a (kind, key) again with the same body is a no-op that returns its index.

        Raises:
            Fenced, Conflict, Unavailable (deadline 2 s; outcome unknown).
        """

    async def read(self, after: int = 0, limit: int = 1000) -> list[StoredFact]:
        """Return committed facts with index > after, in order. A linearizable read. Raises Unavailable."""

    async def confirm(self, term: int) -> int:
        """Prove by a quorum round started now that this candidate still leads in `term`.

        Returns the CLOCK_MONOTONIC reading in nanoseconds taken before the request was sent. Raises Fenced, Unavailable.
        """

    async def resign(self, term: int, hold_ms: int = 0) -> None:
        """Give up leadership of `term` at once and do not campaign for hold_ms. The listener gets Deposed(..., "resigned")."""

    async def close(self) -> None:
        """Stop campaigning, give up leadership if held, close. Idempotent."""
