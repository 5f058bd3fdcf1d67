"""Jobs are facts: none is lost by kill -9 of any controller at any moment, none that may run once is run twice."""

from __future__ import annotations

import asyncio
import random
import signal
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.shell.controllers import Controllers, Peer, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import DeadlinePassed, PeerError, RequestRefused
from xce_supervisor.testbed.client import jobs, submit, wait_for_jobs
from xce_supervisor.wire.words import (
    Done,
    ErrorCode,
    HostRole,
    JobAttempt,
    JobDispatch,
    JobPush,
    JobStart,
    JobStateQuery,
    JobStateReport,
    JobSubmit,
    JobView,
    QueuePush,
)


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.needs("etcd"))])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh store of each engine."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path, lease_ms=1000)
        return
    from xce_supervisor.testbed.etcd_cluster import EtcdCluster

    cluster = EtcdCluster(request.getfixturevalue("machine_offers")["etcd"], tmp_path)
    try:
        cluster.start()
        yield cluster.url("kill", ttl_s=1)
    finally:
        cluster.stop()


async def test_no_acknowledged_job_is_lost_by_kill_9_of_the_primary(tmp_path: Path, store_url: str) -> None:
    """Three controllers; the primary is killed at random moments of a stream of submissions, and started again each time."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    acknowledged: list[str] = []
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, store_url, 3, secure=False)
        await controllers.primary()
        killing = True

        async def submitter(number: int) -> None:
            count = 0
            while killing:
                job = JobSubmit(job_id=f"s{number}-{count}", command=("true", f"{count}"))
                await submit(controllers.cluster, job, deadline_s=20)
                acknowledged.append(job.job_id)
                count += 1

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(submitter(number))
            for _ in range(2):
                before = len(acknowledged)
                primary = await controllers.primary(within_s=15)
                while len(acknowledged) < before + 20:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(dice.random() * 0.2)
                controllers.kill(primary)
                controllers.restart(primary)
            killing = False
        await controllers.primary(within_s=15)
        known = [job.job_id for job in await jobs(controllers.cluster)]
    assert len(known) == len(set(known))
    assert set(acknowledged) <= set(known), f"seed {seed}: lost {set(acknowledged) - set(known)}"


async def test_a_submission_is_answered_again_the_same(tmp_path: Path) -> None:
    """Same id and content: the same job. Other content: CONFLICT. Malformed: says what."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        await controllers.primary()
        job = JobSubmit(job_id="j", command=("true",), slots=2, rerunnable=True, constraint="w")
        await submit(controllers.cluster, job)
        await submit(controllers.cluster, job)
        (found,) = await jobs(controllers.cluster)
        assert (found.job_id, found.slots, found.rerunnable, found.constraint, found.state) == ("j", 2, True, "w", "pending")
        for wrong, code in (
            (JobSubmit(job_id="j", command=("false",)), ErrorCode.CONFLICT),
            (JobSubmit(job_id="", command=("true",)), ErrorCode.MALFORMED),
            (JobSubmit(job_id="a/b", command=("true",)), ErrorCode.MALFORMED),
            (JobSubmit(job_id="k", command=()), ErrorCode.MALFORMED),
            (JobSubmit(job_id="k", command=("true",), slots=20_000), ErrorCode.MALFORMED),
            (JobSubmit(job_id="k", command=("\x01" * 30_000,)), ErrorCode.MALFORMED),
        ):
            with pytest.raises(RequestRefused) as refused:
                await submit(controllers.cluster, wrong)
            assert refused.value.code == code
        assert len(await jobs(controllers.cluster)) == 1


# ---------------------------------------------------------------- with a scheduler and workers played by the test


async def play(stack: AsyncExitStack, controllers: Controllers, *workers: str, slots: int = 4) -> tuple[Peer, list[Peer]]:
    """A scheduler and workers that do only what the test says."""
    (host,) = controllers.hosts
    status = await controllers.says(host, lambda s: s.role == "primary")
    scheduler = await stack.enter_async_context(await peer(controllers, host, "scheduler", "scheduler"))
    await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id=host.name, term=status.term, spawn_token="t")
    return scheduler, [await work(stack, controllers, name, slots=slots) for name in workers]


async def work(stack: AsyncExitStack, controllers: Controllers, name: str, *, slots: int = 4, resume: str = "") -> Peer:
    """A worker that has joined and answered its first state query by nothing."""
    worker = await stack.enter_async_context(await peer(controllers, controllers.hosts[0], "worker", name))
    await worker.join(HostRole.WORKER, name, slots=slots, resume=resume)
    await worker.pushed(JobStateQuery)
    return worker


async def report(worker: Peer, name: str, *attempts: JobAttempt, full: bool = False) -> None:
    """A worker's word, answered by Done."""
    reply = await worker.ask(JobStateReport(session_id=worker.session_id, worker=name, attempts=tuple(attempts), full=full))
    assert isinstance(reply, Done)


def attempt(job_id: str, number: int, state: str, exit_code: int | None = None, reason: str = "") -> JobAttempt:
    return JobAttempt(job_id=job_id, attempt=number, state=state, exit_code=exit_code, reason=reason)


async def job_is(controllers: Controllers, job_id: str, state: str, within_s: float = 8.0) -> JobView:
    """Wait until the job is in that state."""
    async with asyncio.timeout(within_s):
        while True:
            (job,) = await jobs(controllers.cluster, [job_id])
            if job.state == state:
                return job
            await asyncio.sleep(0.02)


async def dispatch(scheduler: Peer, job_id: str, worker: str, number: int) -> None:
    await scheduler.ask(JobDispatch(session_id=scheduler.session_id, job_id=job_id, worker=worker, attempt=number))


async def test_a_job_goes_from_submission_to_its_end(tmp_path: Path) -> None:
    """Pushed to the scheduler, dispatched once, started at the worker, running, done; each step pushed to the scheduler."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        async with AsyncExitStack() as stack:
            scheduler, (w1, w2) = await play(stack, controllers, "w1", "w2")
            await scheduler.pushed(QueuePush, lambda p: [(w.name, w.slots, w.alive) for w in p.workers] == [
                ("w1", 4, True), ("w2", 4, True)
            ])  # fmt: skip
            await submit(controllers.cluster, JobSubmit(job_id="j", command=("echo", "hello"), slots=3))
            pushed = await scheduler.pushed(JobPush, lambda p: not p.full and p.jobs != ())
            assert (pushed.jobs[0].job_id, pushed.jobs[0].state, pushed.jobs[0].attempt) == ("j", "pending", 0)

            await dispatch(scheduler, "j", "w1", 1)
            started = await w1.pushed(JobStart)
            assert (started.job_id, started.attempt, started.command, started.term) == ("j", 1, ("echo", "hello"), 1)
            await dispatch(scheduler, "j", "w1", 1)  # the same again is so already
            for worker, number in (("w2", 1), ("w2", 2), ("w1", 2), ("w1", 0)):
                with pytest.raises(RequestRefused) as stale:
                    await dispatch(scheduler, "j", worker, number)
                assert stale.value.code == ErrorCode.CONFLICT
            with pytest.raises(RequestRefused) as unknown:
                await dispatch(scheduler, "no-such", "w1", 1)
            assert unknown.value.code == ErrorCode.NOT_FOUND

            await report(w2, "w2", attempt("j", 1, "done", 0))  # not its job: dropped
            await report(w1, "w1", attempt("j", 1, "running"))
            assert (await job_is(controllers, "j", "running")).worker == "w1"
            await report(w1, "w1", attempt("j", 1, "done", 0))
            await report(w1, "w1", attempt("j", 1, "failed", 1))  # ended already: dropped
            done = await job_is(controllers, "j", "done")
            assert (done.exit_code, done.attempt) == (0, 1)
            await scheduler.pushed(JobPush, lambda p: [job.state for job in p.jobs] == ["done"])
            assert [push for push in w1.pushes if isinstance(push, JobStart)] == [started]
            assert not [push for push in w2.pushes if isinstance(push, JobStart)]


async def test_a_worker_is_not_given_more_than_its_slots_nor_anything_when_it_is_not_there(tmp_path: Path) -> None:
    """The controller itself refuses what a confused scheduler asks for."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        async with AsyncExitStack() as stack:
            scheduler, _ = await play(stack, controllers, "w1", slots=2)
            for job_id in ("a", "b"):
                await submit(controllers.cluster, JobSubmit(job_id=job_id, command=("true",), slots=2))
            await dispatch(scheduler, "a", "w1", 1)
            for worker in ("w1", "nobody"):
                with pytest.raises(RequestRefused) as refused:
                    await dispatch(scheduler, "b", worker, 1)
                assert refused.value.code == ErrorCode.CONFLICT
            assert {job.job_id: job.state for job in await jobs(controllers.cluster)} == {"a": "dispatched", "b": "pending"}


async def test_a_worker_that_is_gone_loses_its_jobs(tmp_path: Path) -> None:
    """Rerunnable jobs go back to pending for their next attempt; others end as failed, host lost; late words change nothing."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), worker_lost_s=0.5)
        async with AsyncExitStack() as stack:
            scheduler, (w1, _) = await play(stack, controllers, "w1", "w2")
            await submit(controllers.cluster, JobSubmit(job_id="once", command=("true",)))
            await submit(controllers.cluster, JobSubmit(job_id="again", command=("true",), rerunnable=True))
            for job_id in ("once", "again"):
                await dispatch(scheduler, job_id, "w1", 1)
            await report(w1, "w1", attempt("once", 1, "running"), attempt("again", 1, "running"))
            w1.connection.close("the worker dies")
            await scheduler.pushed(QueuePush, lambda p: [w.name for w in p.workers] == ["w2"])
            lost = await job_is(controllers, "once", "failed")
            assert (lost.reason, lost.exit_code, lost.attempt) == ("host lost", None, 1)
            again = await job_is(controllers, "again", "pending")
            assert again.attempt == 1
            await dispatch(scheduler, "again", "w2", 2)
            with pytest.raises(RequestRefused):
                await dispatch(scheduler, "once", "w2", 2)
            back = await work(stack, controllers, "w1", resume="an older session")
            await report(back, "w1", attempt("once", 1, "done", 0), attempt("again", 1, "done", 0), full=True)
            assert (await job_is(controllers, "once", "failed")).reason == "host lost"
            assert (await job_is(controllers, "again", "dispatched")).worker == "w2"


async def test_a_worker_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    """A broken connection alone costs no job: what the same process never got is told again, what it ran goes on."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), worker_lost_s=30.0)
        async with AsyncExitStack() as stack:
            scheduler, (w1,) = await play(stack, controllers, "w1")
            for job_id in ("ran", "unseen"):
                await submit(controllers.cluster, JobSubmit(job_id=job_id, command=("true",)))
                await dispatch(scheduler, job_id, "w1", 1)
            await report(w1, "w1", attempt("ran", 1, "running"))
            before = w1.session_id
            w1.connection.close("a broken connection")
            back = await work(stack, controllers, "w1", resume=before)
            await report(back, "w1", attempt("ran", 1, "running"), full=True)
            assert (await back.pushed(JobStart)).job_id == "unseen"
            assert {job.job_id: job.state for job in await jobs(controllers.cluster)} == {
                "ran": "running",
                "unseen": "dispatched",
            }


async def test_a_worker_that_was_restarted_loses_what_it_does_not_know(tmp_path: Path) -> None:
    """A new process of the same name: what its full report does not hold may have run, and is not run again unasked."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), worker_lost_s=30.0)
        async with AsyncExitStack() as stack:
            scheduler, (w1,) = await play(stack, controllers, "w1")
            for job_id, rerunnable in (("dispatched", False), ("running", False), ("rerunnable", True), ("told", False)):
                await submit(controllers.cluster, JobSubmit(job_id=job_id, command=("true",), rerunnable=rerunnable))
                await dispatch(scheduler, job_id, "w1", 1)
            await report(w1, "w1", attempt("running", 1, "running"), attempt("told", 1, "running"))
            w1.connection.close("the worker dies")
            back = await work(stack, controllers, "w1")
            await report(back, "w1", attempt("told", 1, "failed", None, "host lost"), full=True)
            found = {job.job_id: (job.state, job.reason) for job in await jobs(controllers.cluster)}
            assert found == {
                "dispatched": ("failed", "host lost"),
                "running": ("failed", "host lost"),
                "rerunnable": ("pending", "host lost"),
                "told": ("failed", "host lost"),
            }
            assert not [push for push in back.pushes if isinstance(push, JobStart)]


async def test_a_silent_worker_on_an_open_connection_keeps_what_may_run_once(tmp_path: Path) -> None:
    """It may be stopped and its jobs alive: only rerunnable jobs are taken from it, and it gets no new work."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), worker_lost_s=1.5, heartbeat_ms=150, session_timeout_ms=1000)
        async with AsyncExitStack() as stack:
            scheduler, (w1,) = await play(stack, controllers, "w1")
            for job_id, rerunnable in (("once", False), ("again", True), ("new", False)):
                await submit(controllers.cluster, JobSubmit(job_id=job_id, command=("true",), rerunnable=rerunnable))
            for job_id in ("once", "again"):
                await dispatch(scheduler, job_id, "w1", 1)
            w1.stop_heartbeats()
            await scheduler.pushed(QueuePush, lambda p: [w.alive for w in p.workers] == [False])
            with pytest.raises(RequestRefused):
                await dispatch(scheduler, "new", "w1", 1)
            await job_is(controllers, "again", "pending")
            await report(w1, "w1", attempt("once", 1, "done", 0))
            assert (await job_is(controllers, "once", "done")).exit_code == 0
            await scheduler.pushed(QueuePush, lambda p: [w.alive for w in p.workers] == [True])


async def test_after_a_fail_over_the_new_primary_asks_the_workers(tmp_path: Path) -> None:
    """The primary is killed with jobs dispatched and running: the next one knows them, and takes the end from the worker."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=2500))
        (host,) = controllers.hosts
        async with AsyncExitStack() as stack:
            scheduler, (w1,) = await play(stack, controllers, "w1")
            await submit(controllers.cluster, JobSubmit(job_id="j", command=("true",)))
            await dispatch(scheduler, "j", "w1", 1)
            await report(w1, "w1", attempt("j", 1, "running"))
            before = w1.session_id
            controllers.kill(host)
            with pytest.raises(PeerError):
                await w1.ask(JobStateReport(session_id=before, worker="w1", attempts=()))
            controllers.restart(host)
            await controllers.says(host, lambda s: s.role == "primary" and s.jobs_running == 1)
            back = await work(stack, controllers, "w1", resume=before)
            await report(back, "w1", attempt("j", 1, "done", 0), full=True)
            done = await job_is(controllers, "j", "done")
            assert (done.attempt, done.worker) == (1, "w1")


async def test_a_real_scheduler_and_a_real_worker_run_real_commands(tmp_path: Path) -> None:
    """Ten jobs and three that fail, through a fail-over of the only controller in the middle; each command ran once."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=2500))
        (host,) = controllers.hosts
        await controllers.says(host, lambda s: s.role == "primary")
        stage.worker(controllers.addresses, name="w1", slots=3)
        scheduler = stage.scheduler(host.address, term=1)
        ids = []
        for number in range(13):
            script = f"echo x >> {marks}/{number}; sleep 0.2; exit {1 if number >= 10 else 0}"
            ids.append(f"job-{uuid.uuid4().hex[:8]}")
            await submit(controllers.cluster, JobSubmit(job_id=ids[-1], command=("sh", "-c", script)))
        await controllers.says(host, lambda s: s.jobs_finished >= 2, within_s=15)
        controllers.kill(host)
        await scheduler.exit_code()
        controllers.restart(host)
        status = await controllers.says(host, lambda s: s.role == "primary")
        stage.scheduler(host.address, term=status.term, spawn_token="token-2")
        found = await wait_for_jobs(controllers.cluster, ids, deadline_s=30)
        assert [job.state for job in found] == ["done"] * 10 + ["failed"] * 3
        assert [(marks / f"{number}").read_text() for number in range(13)] == ["x\n"] * 13


async def test_a_killed_primary_with_unanswered_requests_leaves_each_job_whole_or_absent(tmp_path: Path) -> None:
    """Submissions in flight at the moment of the kill: afterwards each is there as it was sent, or not at all."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=2500), secure=False)
        (host,) = controllers.hosts
        await controllers.says(host, lambda s: s.role == "primary")
        async with await peer(controllers, host, "operator", "admin") as operator:
            wanted = [JobSubmit(job_id=f"j{n}", command=("echo", "x" * n)) for n in range(50)]
            asked = [asyncio.create_task(operator.ask(job)) for job in wanted]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            host.program.signal(signal.SIGKILL)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        answered = [job.job_id for job, outcome in zip(wanted, outcomes, strict=True) if isinstance(outcome, Done)]
        assert all(isinstance(outcome, Done | PeerError | DeadlinePassed) for outcome in outcomes)
        controllers.restart(host)
        await controllers.says(host, lambda s: s.role == "primary")
        found = {job.job_id: job.command for job in await jobs(controllers.cluster)}
        assert set(answered) <= set(found)
        assert all(found[job.job_id] == job.command for job in wanted if job.job_id in found)
