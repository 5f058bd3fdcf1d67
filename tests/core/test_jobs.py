"""The job table: admission, replay, and what must hold over any script of proposals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xce_supervisor.core.facts import Began, Dispatched, Ended, JobFact, Noop, Outcome, Submitted
from xce_supervisor.core.jobs import (
    Admitted,
    JobState,
    JobTable,
    Refusal,
    Refused,
    Report,
    admit_dispatch,
    admit_report,
    admit_submit,
    host_lost,
)

ONCE = Submitted("once", ("true",))
AGAIN = Submitted("again", ("true",), rerunnable=True)


def table(*facts: JobFact) -> JobTable:
    made = JobTable()
    for fact in facts:
        made.apply(fact)
    assert made.divergence == ""
    return made


def running(spec: Submitted, worker: str = "w1") -> JobTable:
    return table(spec, Dispatched(spec.job_id, 1, worker), Began(spec.job_id, 1))


def refusal(decided: Admitted | Refused) -> Refusal:
    assert isinstance(decided, Refused)
    return decided.why


def test_a_submission_is_admitted_once_and_its_content_is_for_good() -> None:
    """The same again is so already; other content under the same id is a conflict."""
    assert admit_submit(table(), ONCE) == Admitted((ONCE,))
    assert admit_submit(table(ONCE), ONCE) == Admitted(())
    assert refusal(admit_submit(table(ONCE), Submitted("once", ("false",)))) is Refusal.CONFLICT


@pytest.mark.parametrize(
    "spec",
    [
        Submitted("", ("true",)),
        Submitted("x" * 129, ("true",)),
        Submitted("a b", ("true",)),
        Submitted("a/1", ("true",)),  # keys of attempts are ID/NUMBER
        Submitted("j", ()),
        Submitted("j", ("",)),
        Submitted("j", ("a\0b",)),
        Submitted("j", ("x" * 40_000,)),
        Submitted("j", ("x",) * 2_000),
        Submitted("j", ("true",), slots=0),
        Submitted("j", ("true",), slots=-1),
        Submitted("j", ("true",), constraint="x" * 200),
    ],
)
def test_a_malformed_submission_is_refused(spec: Submitted) -> None:
    """Bounds of every field."""
    assert refusal(admit_submit(table(), spec)) is Refusal.MALFORMED


def test_an_attempt_is_dispatched_once() -> None:
    """Only the next attempt of a pending job; the very same again is so already; everything else is stale."""
    first = Dispatched("again", 1, "w1")
    assert admit_dispatch(table(AGAIN), first) == Admitted((first,))
    dispatched = table(AGAIN, first)
    assert admit_dispatch(dispatched, first) == Admitted(())
    for stale in (Dispatched("again", 1, "w2"), Dispatched("again", 2, "w1"), Dispatched("again", 0, "")):
        assert refusal(admit_dispatch(dispatched, stale)) is Refusal.CONFLICT
    for wrong in (Dispatched("again", 0, "w1"), Dispatched("again", 2, "w1"), Dispatched("again", -1, "w1")):
        assert refusal(admit_dispatch(table(AGAIN), wrong)) is Refusal.CONFLICT
    assert refusal(admit_dispatch(table(), first)) is Refusal.NOT_FOUND


def test_a_job_that_is_not_rerunnable_runs_once() -> None:
    """Its worker is lost: failed for good, host lost, and no second attempt."""
    lost = running(ONCE)
    for fact in host_lost(lost.held_by("w1")):
        lost.apply(fact)
    job = lost.get("once")
    assert job is not None and (job.state, job.reason, job.exit_code) == (JobState.FAILED, "host lost", None)
    assert refusal(admit_dispatch(lost, Dispatched("once", 2, "w2"))) is Refusal.CONFLICT


def test_a_rerunnable_job_goes_back_for_its_next_attempt() -> None:
    """Its worker is lost: pending, and the next attempt is the second; the first cannot be dispatched or reported again."""
    lost = running(AGAIN)
    for fact in host_lost(lost.held_by("w1")):
        lost.apply(fact)
    job = lost.get("again")
    assert job is not None and (job.state, job.attempt) == (JobState.PENDING, 1)
    assert lost.held_by("w1") == [] and lost.workers() == []
    assert refusal(admit_dispatch(lost, Dispatched("again", 1, "w1"))) is Refusal.CONFLICT
    assert admit_dispatch(lost, Dispatched("again", 2, "w1")) == Admitted((Dispatched("again", 2, "w1"),))
    assert refusal(admit_report(lost, "w1", Report("again", 1, "done", 0))) is Refusal.CONFLICT


def test_a_report_counts_only_for_the_current_attempt_of_that_worker() -> None:
    """Others, older, newer, ended and unknown ones are stale and change nothing."""
    job = running(AGAIN)
    assert admit_report(job, "w1", Report("again", 1, "running")) == Admitted(())
    assert admit_report(job, "w1", Report("again", 1, "done", 0)) == Admitted((Ended("again", 1, Outcome.DONE, 0),))
    for worker, report in (
        ("w2", Report("again", 1, "done", 0)),
        ("w1", Report("again", 0, "done", 0)),
        ("w1", Report("again", 2, "done", 0)),
    ):
        assert refusal(admit_report(job, worker, report)) is Refusal.CONFLICT
    assert refusal(admit_report(job, "w1", Report("none", 1, "done", 0))) is Refusal.NOT_FOUND
    assert refusal(admit_report(job, "w1", Report("again", 1, "asleep"))) is Refusal.MALFORMED
    job.apply(Ended("again", 1, Outcome.FAILED, 3, "exit 3"))
    assert admit_report(job, "w1", Report("again", 1, "failed", 3)) == Admitted(()), "known already"
    assert refusal(admit_report(job, "w1", Report("again", 1, "done", 0))) is Refusal.CONFLICT


def test_an_end_may_be_told_before_the_begin() -> None:
    """A short job is over before its running is reported; the late word that it runs is stale."""
    job = table(ONCE, Dispatched("once", 1, "w1"))
    assert admit_report(job, "w1", Report("once", 1, "running")) == Admitted((Began("once", 1),))
    ended = admit_report(job, "w1", Report("once", 1, "failed", 2, "exit 2"))
    assert ended == Admitted((Ended("once", 1, Outcome.FAILED, 2, "exit 2"),))
    job.apply(ended.facts[0])
    assert refusal(admit_report(job, "w1", Report("once", 1, "running"))) is Refusal.CONFLICT


def test_a_workers_own_word_that_it_lost_the_attempt_counts_as_host_lost() -> None:
    """A restarted worker reports what it lost: a rerunnable job may run again."""
    admitted = admit_report(running(AGAIN), "w1", Report("again", 1, "failed", None, "host lost"))
    assert admitted == Admitted((Ended("again", 1, Outcome.HOST_LOST, None, "host lost"),))


def test_a_fact_that_cannot_follow_is_told_and_not_applied() -> None:
    """docs/rules.md L5: admission is checked again at apply time; the table says that it and the log do not agree."""
    for wrong in (Dispatched("none", 1, "w"), Dispatched("once", 2, "w"), Began("once", 1), Ended("once", 1, Outcome.DONE)):
        diverged = table(ONCE)
        assert diverged.apply(wrong) is None
        assert wrong.KIND in diverged.divergence
        assert [job.state for job in diverged.all()] == [JobState.PENDING]
    assert table(ONCE).apply(Noop(4)) is None


def test_the_table_is_read_in_order_of_submission() -> None:
    """Pages, open jobs, counts, what a worker holds."""
    specs = [Submitted(f"j{n}", ("true",)) for n in range(5)]
    made = table(*specs, Dispatched("j1", 1, "w1"), Dispatched("j3", 1, "w1"), Began("j3", 1), Ended("j3", 1, Outcome.DONE, 0))
    assert [job.job_id for job in made.page(1, 3)] == ["j1", "j2", "j3"]
    assert [job.job_id for job in made.open()] == ["j0", "j1", "j2", "j4"]
    assert [job.job_id for job in made.held_by("w1")] == ["j1"]
    assert (made.count(JobState.PENDING), made.count(JobState.DISPATCHED, JobState.RUNNING)) == (3, 1)
    assert (made.count(JobState.DONE), made.count(*JobState), len(made)) == (1, 5, 5)


IDS, WORKERS = st.sampled_from(["a", "b", "c"]), st.sampled_from(["w1", "w2"])
PROPOSALS = st.one_of(
    st.tuples(st.just("submit"), IDS, st.booleans()),
    st.tuples(st.just("dispatch"), IDS, WORKERS, st.integers(0, 4)),
    st.tuples(st.just("report"), IDS, WORKERS, st.integers(0, 4), st.sampled_from(["running", "done", "failed"])),
    st.tuples(st.just("lost"), WORKERS),
)


def decide(made: JobTable, proposal: tuple[object, ...]) -> tuple[JobFact, ...]:
    match proposal:
        case ("submit", str(job_id), bool(rerunnable)):
            decided = admit_submit(made, Submitted(job_id, ("true",), rerunnable=rerunnable))
        case ("dispatch", str(job_id), str(worker), int(number)):
            decided = admit_dispatch(made, Dispatched(job_id, number, worker))
        case ("report", str(job_id), str(worker), int(number), str(state)):
            decided = admit_report(made, worker, Report(job_id, number, state, 0 if state == "done" else 1))
        case ("lost", str(worker)):
            return host_lost(made.held_by(worker))
        case _:
            raise AssertionError(proposal)
    return decided.facts if isinstance(decided, Admitted) else ()


@settings(max_examples=300, deadline=None)
@given(st.lists(PROPOSALS, max_size=60))
def test_over_any_script_what_was_admitted_replays_to_the_same_table(script: list[tuple[object, ...]]) -> None:
    """Admitted facts apply, have keys of their own, never dispatch or end an attempt twice, and replay to the same table."""
    made, log = JobTable(), list[JobFact]()
    for proposal in script:
        for fact in decide(made, proposal):
            made.apply(fact)
            log.append(fact)
        assert made.divergence == ""
        assert sum(made.count(state) for state in JobState) == len(made)
        held = {job.job_id for job in made.all() if job.state in (JobState.DISPATCHED, JobState.RUNNING)}
        assert {job.job_id for worker in made.workers() for job in made.held_by(worker)} == held
    assert len({(fact.KIND, fact.key) for fact in log}) == len(log), "the store would refuse the second"
    dispatches = [fact for fact in log if isinstance(fact, Dispatched)]
    for job in made.all():
        numbers = [fact.attempt for fact in dispatches if fact.job_id == job.job_id]
        assert numbers == list(range(1, len(numbers) + 1))
        assert job.spec.rerunnable or len(numbers) <= 1, "it may run once"
    again = table(*log)
    assert list(again.all()) == list(made.all()) and again.open() == made.open()
