"""The job table: what the facts say about jobs, and which new facts may be added. Pure, and the same on every controller.

    pending --Dispatched--> dispatched --Began--> running --Ended--> done | failed
       ^                        |                    |
       +---- Ended(host lost), rerunnable -----------+          (not rerunnable: failed, "host lost")

`admit_*` decides on a proposal against the table and returns facts to append, or says that it is so already, or refuses.
`JobTable.apply` is the only thing that changes a table; it is deterministic, so that a replay of the same facts gives the same
table. Admission is checked again there (docs/rules.md L5): a fact that the table cannot take is not applied and makes the
table divergent, which closes a promotion gate, because then this program and the log's writer do not agree.

An attempt is dispatched once, and its number says which; a job that is not rerunnable never has a second one. A report on an
attempt that is not the job's current one, or from another worker than it was given to, is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from xce_supervisor.core.facts import AnyFact, Began, Dispatched, Ended, JobFact, Noop, Outcome, Submitted

JOB_ID_CHARS_MAX = 128
COMMAND_WORDS_MAX = 1_000
COMMAND_CHARS_MAX = 32_000
SLOTS_MAX = 10_000
REASON_CHARS_MAX = 500
HOST_LOST_REASON = "host lost"
_JOB_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class JobState(StrEnum):
    """See the picture above."""

    PENDING = "pending"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


OPEN_STATES = frozenset({JobState.PENDING, JobState.DISPATCHED, JobState.RUNNING})
HELD_STATES = frozenset({JobState.DISPATCHED, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class Job:
    """One job. attempt: number of the newest attempt, 0 before the first. worker: of that attempt, "" before the first."""

    spec: Submitted
    state: JobState = JobState.PENDING
    attempt: int = 0
    worker: str = ""
    exit_code: int | None = None
    reason: str = ""

    @property
    def job_id(self) -> str:
        return self.spec.job_id


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says about one attempt. state: "running", "done" or "failed"."""

    job_id: str
    attempt: int
    state: str
    exit_code: int | None = None
    reason: str = ""


class Refusal(StrEnum):
    """Why a proposal is refused."""

    MALFORMED = "malformed"
    NOT_FOUND = "not found"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing is to be appended. text: for people."""

    why: Refusal
    text: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Append these facts, in order; none where it is so already."""

    facts: tuple[JobFact, ...]


class JobTable:
    """All jobs by id, in order of submission. Changed by `apply` alone."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._open: dict[str, None] = {}
        self._held_by: dict[str, dict[str, None]] = {}
        self._counts = dict.fromkeys(JobState, 0)
        self.divergence = ""

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> Job | None:
        """Return a job, None where it is unknown."""
        return self._jobs.get(job_id)

    def all(self) -> Iterator[Job]:
        """All jobs in order of submission."""
        return iter(self._jobs.values())

    def page(self, offset: int, limit: int) -> list[Job]:
        """Return up to `limit` jobs from the `offset`th on, in order of submission."""
        return list(self._jobs.values())[offset : offset + limit]

    def open(self) -> list[Job]:
        """Return pending, dispatched and running jobs, in order of submission."""
        return [self._jobs[job_id] for job_id in self._open]

    def held_by(self, worker: str) -> list[Job]:
        """Return the jobs whose current attempt is dispatched to, or runs on, a worker."""
        return [self._jobs[job_id] for job_id in self._held_by.get(worker, ())]

    def workers(self) -> list[str]:
        """Return the names of workers that hold attempts."""
        return [worker for worker, held in self._held_by.items() if held]

    def count(self, *states: JobState) -> int:
        """Return how many jobs are in any of the states."""
        return sum(self._counts[state] for state in states)

    def apply(self, fact: AnyFact) -> Job | None:
        """Apply one committed fact; return the job that it changed, None where it changed none."""
        if isinstance(fact, Noop):
            return None
        job = self._jobs.get(fact.job_id)
        after = _after(job, fact)
        if after is None:
            self.divergence = self.divergence or f"{fact.KIND} {fact.key} cannot follow {_told(job)}"
            return None
        self._put(job, after)
        return after

    def _put(self, before: Job | None, after: Job) -> None:
        job_id = after.job_id
        if before is not None:
            self._counts[before.state] -= 1
            if before.state in HELD_STATES:
                del self._held_by[before.worker][job_id]
                if not self._held_by[before.worker]:
                    del self._held_by[before.worker]
        self._jobs[job_id] = after
        self._counts[after.state] += 1
        if after.state in HELD_STATES:
            self._held_by.setdefault(after.worker, {})[job_id] = None
        if after.state in OPEN_STATES:
            self._open[job_id] = None
        else:
            self._open.pop(job_id, None)


def _after(job: Job | None, fact: JobFact) -> Job | None:
    """The job after the fact; None where the fact cannot follow."""
    match fact:
        case Submitted():
            return Job(fact) if job is None else None
        case Dispatched():
            if job is None or job.state is not JobState.PENDING or fact.attempt != job.attempt + 1:
                return None
            return replace(job, state=JobState.DISPATCHED, attempt=fact.attempt, worker=fact.worker, exit_code=None, reason="")
        case Began():
            if job is None or job.state is not JobState.DISPATCHED or fact.attempt != job.attempt:
                return None
            return replace(job, state=JobState.RUNNING)
        case Ended():
            if job is None or job.state not in HELD_STATES or fact.attempt != job.attempt:
                return None
            return replace(job, state=_ended_state(job, fact.outcome), exit_code=fact.exit_code, reason=fact.reason)


def _ended_state(job: Job, outcome: Outcome) -> JobState:
    if outcome is Outcome.HOST_LOST and job.spec.rerunnable:
        return JobState.PENDING
    return JobState.DONE if outcome is Outcome.DONE else JobState.FAILED


def _told(job: Job | None) -> str:
    return "nothing: the job is unknown" if job is None else f"state {job.state}, attempt {job.attempt}"


# ---------------------------------------------------------------- admission


def admit_submit(table: JobTable, spec: Submitted) -> Admitted | Refused:
    """A job id and its content belong together for good: the same again is so already, other content is a conflict."""
    wrong = _malformed(spec)
    if wrong:
        return Refused(Refusal.MALFORMED, wrong)
    known = table.get(spec.job_id)
    if known is None:
        return Admitted((spec,))
    if known.spec != spec:
        return Refused(Refusal.CONFLICT, f"job {spec.job_id} exists with other content; submit under a new job id")
    return Admitted(())


def _malformed(spec: Submitted) -> str:
    if not 1 <= len(spec.job_id) <= JOB_ID_CHARS_MAX or not _JOB_ID_CHARS.issuperset(spec.job_id):
        return f"job id: give 1 to {JOB_ID_CHARS_MAX} letters, digits, dots, dashes and underscores"
    if not 1 <= len(spec.command) <= COMMAND_WORDS_MAX or not spec.command[0]:
        return f"job {spec.job_id}: command: give 1 to {COMMAND_WORDS_MAX} words, the first not empty"
    if sum(len(word) for word in spec.command) > COMMAND_CHARS_MAX or any("\0" in word for word in spec.command):
        return f"job {spec.job_id}: command: more than {COMMAND_CHARS_MAX} characters, or a NUL among them"
    if not 1 <= spec.slots <= SLOTS_MAX:
        return f"job {spec.job_id}: slots: give 1 to {SLOTS_MAX}"
    if len(spec.constraint) > JOB_ID_CHARS_MAX:
        return f"job {spec.job_id}: constraint: give at most {JOB_ID_CHARS_MAX} characters"
    return ""


def admit_dispatch(table: JobTable, fact: Dispatched) -> Admitted | Refused:
    """The next attempt of a pending job is dispatched; asking again for the very same is so already; all else is stale."""
    job = table.get(fact.job_id)
    if job is None:
        return Refused(Refusal.NOT_FOUND, f"job {fact.job_id} is unknown")
    if job.state is not JobState.PENDING and job.attempt == fact.attempt and job.worker == fact.worker:
        return Admitted(())
    if _after(job, fact) is None:
        return Refused(Refusal.CONFLICT, f"job {fact.job_id}: attempt {fact.attempt} cannot follow {_told(job)}")
    return Admitted((fact,))


def admit_report(table: JobTable, worker: str, report: Report) -> Admitted | Refused:
    """A worker's word on one attempt. A stale one is refused and must be dropped, not sent again."""
    job = table.get(report.job_id)
    if job is None:
        return Refused(Refusal.NOT_FOUND, f"job {report.job_id} is unknown")
    if job.attempt != report.attempt or job.worker != worker or job.state not in HELD_STATES:
        if job.attempt == report.attempt and job.worker == worker and job.state == report.state:
            return Admitted(())
        return Refused(Refusal.CONFLICT, f"job {report.job_id}: a report on attempt {report.attempt} in {_told(job)}")
    if report.state == "running":
        return Admitted(() if job.state is JobState.RUNNING else (Began(report.job_id, report.attempt),))
    if report.state not in ("done", "failed"):
        return Refused(Refusal.MALFORMED, f"job {report.job_id}: no attempt is in state {report.state!r}")
    outcome = Outcome.DONE if report.state == "done" else Outcome.FAILED
    if report.state == "failed" and report.reason == HOST_LOST_REASON:
        # The worker's own word for an end that was not the command's: it was restarted, or told to end (docs/protocol.md).
        outcome = Outcome.HOST_LOST
    return Admitted((Ended(report.job_id, report.attempt, outcome, report.exit_code, report.reason[:REASON_CHARS_MAX]),))


def host_lost(jobs: Iterable[Job]) -> tuple[Ended, ...]:
    """The facts that end the attempts of a worker that is gone."""
    return tuple(
        Ended(job.job_id, job.attempt, Outcome.HOST_LOST, None, HOST_LOST_REASON) for job in jobs if job.state in HELD_STATES
    )
