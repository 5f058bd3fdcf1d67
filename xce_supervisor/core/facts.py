"""The kinds of facts: what the controllers of a cluster have agreed on, one frozen class a kind.

A fact is known by (KIND, key), and the store appends each such pair once. The keys are chosen so that this alone already keeps
what must not happen twice from being written twice: a job is submitted once, an attempt is dispatched once, begins once and
ends once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Outcome(StrEnum):
    """How an attempt ended."""

    DONE = "done"  # exit code 0
    FAILED = "failed"  # the command ended otherwise, or could not be started
    HOST_LOST = "host lost"  # its worker is gone


@dataclass(frozen=True, slots=True)
class Noop:
    """The first fact of each term's primary."""

    KIND: ClassVar[str] = "noop"
    term: int

    @property
    def key(self) -> str:
        return str(self.term)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job exists. See wire.words.JobSubmit for the fields."""

    KIND: ClassVar[str] = "job.submitted"
    job_id: str
    command: tuple[str, ...]
    slots: int = 1
    rerunnable: bool = False
    constraint: str = ""

    @property
    def key(self) -> str:
        return self.job_id


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Attempt `attempt` (from 1) of a job is given to a worker."""

    KIND: ClassVar[str] = "job.dispatched"
    job_id: str
    attempt: int
    worker: str

    @property
    def key(self) -> str:
        return f"{self.job_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Began:
    """The worker runs the attempt."""

    KIND: ClassVar[str] = "job.began"
    job_id: str
    attempt: int

    @property
    def key(self) -> str:
        return f"{self.job_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt is over. exit_code: of the command, None where there is none."""

    KIND: ClassVar[str] = "job.ended"
    job_id: str
    attempt: int
    outcome: Outcome
    exit_code: int | None = None
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.job_id}/{self.attempt}"


JobFact = Submitted | Dispatched | Began | Ended
AnyFact = Noop | JobFact
