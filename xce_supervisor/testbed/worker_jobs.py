"""What a worker knows of its jobs, and what follows from it. Pure: no I/O, clock or await.

An attempt is (job id, number). It is started at most once by this worker, for ever: the table remembers the newest attempt of
each job that it ever began, and `worker_log` makes that outlive the process. An attempt goes

    begun -> running -> done | failed        (begun: the log is being written or the process made; reported as running)

and is *told* when the controller has answered the report of its end with Done. Until then the end is reported again and
again; after that it is remembered, so that a late or repeated JobStart is answered by a report and not by a second run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from xce_supervisor.core.jobs import HOST_LOST_REASON
from xce_supervisor.wire.words import JobAttempt

RUNNING, DONE, FAILED = "running", "done", "failed"
# An end that comes of the worker's own end, not of the command. The controller may run a rerunnable job again.
HOST_LOST = HOST_LOST_REASON


class Verdict(Enum):
    """What to do about a JobStart."""

    START = "start"
    REPORT = "report"  # known: never again, tell what became of it
    STALE = "stale"  # a newer attempt of the job is known here: the sender is behind
    FULL = "full"  # more attempts at once than any controller of sound mind gives us: refused by a report of its end


@dataclass(slots=True)
class JobTable:
    """All attempts that this worker knows.

    running_max: attempts at once, a bound against a mad peer (slots are the scheduler's business). remembered_max: ended and
    told attempts that are kept against a late JobStart; the oldest are forgotten first.
    """

    running_max: int = 1000
    remembered_max: int = 20_000
    _running: dict[tuple[str, int], JobAttempt] = field(default_factory=dict)
    _newest: dict[str, JobAttempt] = field(default_factory=dict)
    _untold: dict[tuple[str, int], JobAttempt] = field(default_factory=dict)

    def judge(self, job_id: str, attempt: int) -> Verdict:
        """Return what to do about a JobStart of (job_id, attempt). Changes nothing."""
        known = self._newest.get(job_id)
        if known is not None and attempt < known.attempt:
            return Verdict.STALE
        if known is not None and attempt == known.attempt:
            return Verdict.REPORT
        return Verdict.FULL if len(self._running) >= self.running_max else Verdict.START

    def begin(self, job_id: str, attempt: int) -> JobAttempt | None:
        """Note that the attempt is ours from now on. Returns an older attempt of the job that still runs, to be ended first."""
        before = self._newest.get(job_id)
        assert before is None or before.attempt < attempt, f"{job_id} attempt {attempt} was begun before"
        begun = JobAttempt(job_id=job_id, attempt=attempt, state=RUNNING)
        self._running[(job_id, attempt)] = self._newest[job_id] = self._untold[(job_id, attempt)] = begun
        return before if before is not None and before.state == RUNNING else None

    def superseded(self, job_id: str, attempt: int) -> bool:
        """Was a newer attempt of the job begun since this one?"""
        return self._newest[job_id].attempt > attempt

    def ending(self, job_id: str, attempt: int, *, exit_code: int | None, reason: str) -> JobAttempt:
        """Return what the end of a running attempt is to be called: done only with exit code 0 and no reason. Changes nothing."""
        state = DONE if exit_code == 0 and not reason else FAILED
        return JobAttempt(job_id=job_id, attempt=attempt, state=state, exit_code=exit_code, reason=reason)

    def end(self, ended: JobAttempt) -> None:
        """Note the end of a running attempt; from now on it is reported."""
        key = (ended.job_id, ended.attempt)
        assert key in self._running, f"{ended.job_id} attempt {ended.attempt} ended and does not run"
        del self._running[key]
        if self._newest[ended.job_id].attempt == ended.attempt:
            self._newest[ended.job_id] = ended
        self._untold[key] = ended

    def restore(self, ended: JobAttempt, *, told: bool) -> None:
        """Take over an ended attempt of a former process, in the order of the log."""
        assert ended.state != RUNNING, "a former process's attempt cannot run"
        known = self._newest.get(ended.job_id)
        if known is None or known.attempt < ended.attempt:
            self._newest.pop(ended.job_id, None)
            self._newest[ended.job_id] = ended
        if not told:
            self._untold[(ended.job_id, ended.attempt)] = ended

    def told(self, reported: Iterable[JobAttempt]) -> list[JobAttempt]:
        """The controller answered Done to a report of these. Returns those whose end is now told; forgets what exceeds the bound.

        An attempt that changed since the report was built, or was asked for again, stays to be told.
        """
        ends: list[JobAttempt] = []
        for attempt in reported:
            key = (attempt.job_id, attempt.attempt)
            if self._untold.get(key) is attempt:  # the very one, not one that says the same
                del self._untold[key]
                if attempt.state != RUNNING:
                    ends.append(attempt)
        self._forget()
        return ends

    def untold(self, limit: int) -> tuple[JobAttempt, ...]:
        """Changes that no controller has answered yet, oldest first, at most `limit`."""
        return tuple(self._untold.values())[:limit]

    def tell_again(self, job_id: str, attempt: int) -> None:
        """Report (job_id, attempt) once more, though told: the controller asked by a JobStart."""
        known = self._newest.get(job_id)
        if known is not None and known.attempt == attempt:
            self._untold[(job_id, attempt)] = msgspec.structs.replace(known)

    def running(self) -> tuple[JobAttempt, ...]:
        """Attempts that are begun and not ended."""
        return tuple(self._running.values())

    def everything(self) -> tuple[JobAttempt, ...]:
        """A full report: what runs, and what ended and was not told."""
        return (*self._running.values(), *(known for known in self._untold.values() if known.state != RUNNING))

    def ended(self) -> list[tuple[JobAttempt, bool]]:
        """Every remembered end and whether it was told, oldest first: what a compacted log must hold."""
        ends = [known for known in self._newest.values() if known.state != RUNNING]
        lone = [known for key, known in self._untold.items() if known.state != RUNNING and self._newest.get(key[0]) != known]
        return [(known, (known.job_id, known.attempt) not in self._untold) for known in (*lone, *ends)]

    def _forget(self) -> None:
        excess = len(self._newest) - self.remembered_max
        if excess <= 0:
            return
        spent = [known for known in self._newest.values() if known.state != RUNNING]
        for known in spent[:excess]:
            if (known.job_id, known.attempt) not in self._untold:
                del self._newest[known.job_id]
