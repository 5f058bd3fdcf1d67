"""First come, first served: which job goes where, and which waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xce_supervisor.testbed.placement import Placement, free_slots, place
from xce_supervisor.wire.words import JobView, WorkerView


def job(name: str, slots: int = 1, state: str = "pending", worker: str = "", attempt: int = 0, constraint: str = "") -> JobView:
    """One job as pushed."""
    return JobView(
        job_id=name, command=("true",), slots=slots, state=state, worker=worker, attempt=attempt, constraint=constraint
    )


def worker(name: str, slots: int, alive: bool = True) -> WorkerView:
    """One worker as pushed."""
    return WorkerView(name=name, slots=slots, alive=alive)


def test_jobs_go_in_order_to_the_worker_with_most_room() -> None:
    """Work spreads; equal room is decided by name."""
    placed = place([job("a"), job("b"), job("c")], [worker("w2", 2), worker("w1", 2)], 10)
    assert placed == [Placement("a", 1, "w1"), Placement("b", 1, "w2"), Placement("c", 1, "w1")]


def test_running_and_dispatched_jobs_take_their_slots() -> None:
    """What is dispatched counts before it runs, else two cycles would fill one slot twice."""
    jobs = [job("a", 2, "running", "w1", 1), job("b", 1, "dispatched", "w1", 1), job("c", 2)]
    assert place(jobs, [worker("w1", 4)], 10) == []
    assert free_slots(jobs, [worker("w1", 4)]) == {"w1": 1}


def test_a_dead_worker_gets_nothing() -> None:
    """Only living workers count."""
    assert place([job("a")], [worker("w1", 4, alive=False)], 10) == []


def test_a_constraint_is_a_prefix_of_the_workers_name() -> None:
    """A job with a constraint waits for its workers, though others have room."""
    jobs = [job("a", constraint="gpu-"), job("b")]
    assert place(jobs, [worker("cpu-1", 1), worker("gpu-1", 1)], 10) == [Placement("a", 1, "gpu-1"), Placement("b", 1, "cpu-1")]
    assert place(jobs, [worker("cpu-1", 1)], 10) == [Placement("b", 1, "cpu-1")]


def test_a_job_that_fits_nowhere_does_not_block_the_queue() -> None:
    """No living worker is big enough for it even when empty."""
    assert place([job("wide", 8), job("b")], [worker("w1", 4)], 10) == [Placement("b", 1, "w1")]


def test_a_wide_job_reserves_a_worker_until_it_fits() -> None:
    """Later narrow jobs go elsewhere and do not starve it."""
    workers = [worker("w1", 4), worker("w2", 1)]
    jobs = [job("old", 2, "running", "w1", 1), job("wide", 4), job("b"), job("c")]
    assert place(jobs, workers, 10) == [Placement("b", 1, "w2")]
    assert place([job("wide", 4), job("c")], workers, 10)[0] == Placement("wide", 1, "w1")


def test_a_second_attempt_has_the_next_number() -> None:
    """A job that became pending again after its host was lost."""
    assert place([job("a", attempt=3)], [worker("w1", 1)], 10) == [Placement("a", 4, "w1")]


def test_a_cycle_is_bounded() -> None:
    """No more than the limit, and nothing at limit 0."""
    jobs = [job(f"j{number}") for number in range(10)]
    assert len(place(jobs, [worker("w1", 100)], 3)) == 3
    assert place(jobs, [worker("w1", 100)], 0) == []


some_jobs = st.lists(
    st.builds(
        job,
        st.uuids().map(str),
        st.integers(1, 6),
        st.sampled_from(["pending", "pending", "running", "dispatched"]),
        st.sampled_from(["a1", "a2", "b1"]),
        st.integers(0, 3),
        st.sampled_from(["", "a", "b", "c"]),
    ),
    max_size=30,
)
some_workers = st.lists(
    st.builds(worker, st.sampled_from(["a1", "a2", "b1"]), st.integers(0, 8), st.booleans()), unique_by=lambda w: w.name
)


@given(some_jobs, some_workers, st.integers(0, 40))
def test_no_placement_ever_overfills_a_worker_or_breaks_the_order(
    jobs: list[JobView], workers: list[WorkerView], limit: int
) -> None:
    """Slots, constraints and the bound hold for any queue; of two jobs alike the earlier one goes first."""
    before = free_slots(jobs, workers)
    placed = place(jobs, workers, limit)
    by_id = {one.job_id: one for one in jobs}
    assert len(placed) <= limit
    assert len({one.job_id for one in placed}) == len(placed)
    used: dict[str, int] = {}
    for one in placed:
        used[one.worker] = used.get(one.worker, 0) + by_id[one.job_id].slots
        assert by_id[one.job_id].state == "pending" and one.worker.startswith(by_id[one.job_id].constraint)
    assert all(slots <= before[name] for name, slots in used.items())
    if len(placed) < limit:
        went = {one.job_id for one in placed}
        waiting = [one for one in jobs if one.state == "pending" and one.job_id not in went]
        order = [one.job_id for one in jobs]
        for left in waiting:
            later = [by_id[one.job_id] for one in placed if order.index(one.job_id) > order.index(left.job_id)]
            alike = [one for one in later if one.slots >= left.slots and one.constraint == left.constraint]
            assert not alike, f"{alike[0].job_id} went before {left.job_id}"
