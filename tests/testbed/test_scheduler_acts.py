"""What the scheduler does with pushes: dispatch, then acknowledge; look again where it was refused; its faults."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from tests.fakes.controller import FakeController
from tests.testbed.stage import SCHEDULER, Stage, until
from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed.scheduler import ExitCode
from xce_supervisor.testbed.scheduler_faults import Faults, parse_faults
from xce_supervisor.testbed.scheduler_view import QueueView
from xce_supervisor.wire.words import (
    ErrorCode,
    Heartbeat,
    HostRole,
    JobDispatch,
    JobPush,
    JobQuery,
    JobView,
    Opcode,
    PushAck,
    QueuePush,
    Resync,
    WorkerView,
)

GREETING = 3  # pushes that follow a join: configuration, workers, jobs
# Waits 0.5 s for an answer in place of 3 s.
IMPATIENT = "from xce_supervisor.testbed import scheduler_acts\nscheduler_acts.REQUEST_DEADLINE_S = 0.5\ntry:"
W1 = WorkerView(name="w1", slots=4, alive=True)


def job(name: str, state: str = "pending", attempt: int = 0, worker: str = "") -> JobView:
    """One job as pushed."""
    return JobView(job_id=name, command=("true",), state=state, attempt=attempt, worker=worker)


async def joined(stage: Stage, fake: FakeController, faults: str = "", code: str = SCHEDULER) -> None:
    """Start a scheduler and wait until it has acted on what follows its join."""
    stage.scheduler(fake.address, faults=faults, code=code)
    await fake.until(lambda: (session := fake.session_of(HostRole.SCHEDULER)) and session.last_push_seq == GREETING)
    if "never_ack" not in faults:
        await fake.until(lambda: acted(fake) == GREETING)


def acted(fake: FakeController) -> int:
    """The newest push that was acknowledged."""
    session = fake.session_of(HostRole.SCHEDULER)
    assert session is not None
    return session.last_acted_seq


def test_a_push_is_acknowledged_only_after_its_dispatches_were_answered(tmp_path: Path) -> None:
    """docs/rules.md S9: acted means dispatched; while the dispatch waits for its answer no acknowledgement comes."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            fake.push_workers(W1)
            fake.trouble.delay_s[Opcode.JOB_DISPATCH] = 0.3
            seq = fake.push_jobs(job("a"), job("b"))
            await fake.until(lambda: acted(fake) == seq)
            order = [message for message in fake.asked if isinstance(message, JobDispatch | PushAck)]
            last_ack = order[-1]
            assert isinstance(last_ack, PushAck) and last_ack.seq == seq
            assert {one.job_id for one in order if isinstance(one, JobDispatch)} == {"a", "b"}
            assert all(one.state == "dispatched" and one.worker == "w1" for one in fake.jobs.values())

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_an_idle_push_is_acknowledged_at_once(tmp_path: Path) -> None:
    """docs/rules.md S9: nothing to do is done when it was looked at, so an idle scheduler is never wedged."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            seq = fake.push_workers(W1)
            await fake.until(lambda: acted(fake) == seq)
            assert not [message for message in fake.asked if isinstance(message, JobDispatch)]

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_refused_dispatch_is_looked_up_and_not_repeated(tmp_path: Path) -> None:
    """A job that another term already dispatched is read again; the scheduler takes what it reads and lets it be."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            fake.push_workers(W1)
            fake.jobs["a"] = job("a", "running", 1, "w1")  # what is committed; the push below is behind
            seq = fake.push(lambda seq, term: JobPush(seq=seq, term=term, jobs=(job("a"), job("b"))))
            fake.jobs["b"] = job("b")
            await fake.until(lambda: acted(fake) >= seq)
            dispatched = [message.job_id for message in fake.asked if isinstance(message, JobDispatch)]
            assert sorted(dispatched) == ["a", "b"]
            assert [message.job_ids for message in fake.asked if isinstance(message, JobQuery)] == [("a",)]

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_refusal_that_cannot_be_explained_leaves_the_job_until_the_next_push(tmp_path: Path) -> None:
    """CONFLICT although the job is as we thought: it is not tried in a loop, and tried again when something changed."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1"), heartbeat_ms=100) as fake:
            await joined(stage, fake)
            fake.push_workers(W1)
            fake.trouble.refuse[Opcode.JOB_DISPATCH] = ErrorCode.CONFLICT
            seq = fake.push_jobs(job("a"))
            await fake.until(lambda: acted(fake) == seq)
            asked = len(fake.asked)
            await fake.until(lambda: sum(isinstance(message, Heartbeat) for message in fake.asked[asked:]) == 4)
            assert sum(isinstance(message, JobDispatch) for message in fake.asked) == 1
            fake.trouble.clear()
            fake.push_workers(W1)
            await fake.until(lambda: fake.jobs["a"].state == "dispatched")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_an_unavailable_controller_is_asked_again(tmp_path: Path) -> None:
    """Without a quorum the controller says UNAVAILABLE; the job stays and is dispatched later, without a new push."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            fake.push_workers(W1)
            fake.trouble.refuse[Opcode.JOB_DISPATCH] = ErrorCode.UNAVAILABLE
            fake.push_jobs(job("a"))
            await fake.until(lambda: sum(isinstance(message, JobDispatch) for message in fake.asked) >= 2)
            fake.trouble.clear()
            await fake.until(lambda: fake.jobs["a"].state == "dispatched")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_an_unanswered_dispatch_is_not_acknowledged_and_leads_to_a_resync(tmp_path: Path) -> None:
    """What became of it is unknown, so everything is asked for afresh, and only then acknowledged."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake, code=SCHEDULER.replace("try:", IMPATIENT, 1))
            before = fake.push_workers(W1)
            await fake.until(lambda: acted(fake) == before)
            fake.trouble.silent.add(Opcode.JOB_DISPATCH)
            seq = fake.push_jobs(job("a"))
            await fake.until(lambda: any(isinstance(message, JobDispatch) for message in fake.asked))
            fake.trouble.clear()
            await fake.until(lambda: sum(isinstance(message, Resync) for message in fake.asked) >= 1)
            await fake.until(lambda: acted(fake) > seq)
            assert fake.jobs["a"].state == "dispatched"

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_gap_in_the_pushes_leads_to_a_resync(tmp_path: Path) -> None:
    """A push with a number that is not the next one means that something was missed."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            fake.jobs["missed"] = job("missed")
            session = fake.session_of(HostRole.SCHEDULER)
            assert session is not None
            session.last_push_seq += 1
            fake.push_workers(W1)
            await fake.until(lambda: fake.jobs["missed"].state == "dispatched")
            assert any(isinstance(message, Resync) for message in fake.asked)

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_cycle_is_bounded_by_the_configuration_and_the_rest_follows(tmp_path: Path) -> None:
    """With two dispatches a cycle the third job goes out only after the first two were answered and acknowledged."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake)
            fake.push_config(2)
            before = fake.push_workers(WorkerView(name="w1", slots=100, alive=True))
            await fake.until(lambda: acted(fake) == before)
            fake.push_jobs(*(job(f"j{number}") for number in range(6)))
            await fake.until(lambda: all(one.state == "dispatched" for one in fake.jobs.values()))
            tail = [message for message in fake.asked if isinstance(message, JobDispatch | PushAck)]
            first_ack = next(i for i, m in enumerate(tail) if isinstance(m, PushAck) and m.seq > before)
            assert sum(isinstance(message, JobDispatch) for message in tail[:first_ack]) == 2

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_the_view_drops_pictures_that_are_older_than_what_it_knows() -> None:
    """A push that was made before our dispatch was committed must not undo it; a requeue after a lost host must."""
    view = QueueView()
    view.apply(QueuePush(seq=1, term=1, workers=(W1,)))
    view.apply(JobPush(seq=2, term=1, jobs=(job("a"),)))
    [placement] = view.placements()
    view.dispatched(placement)
    view.apply(JobPush(seq=3, term=1, jobs=(job("a"),)))
    view.apply(JobPush(seq=4, term=1, jobs=(job("a"),), full=True))
    assert view.placements() == []
    view.apply(JobPush(seq=5, term=1, jobs=(job("a", attempt=1),)))
    assert [(one.job_id, one.attempt) for one in view.placements()] == [("a", 2)]
    view.apply(JobPush(seq=6, term=1, jobs=(), full=True))
    assert view.placements() == [] and not view.gap
    view.apply(QueuePush(seq=8, term=1, workers=()))
    assert view.gap


# ---------------------------------------------------------------- faults


def test_faults_are_parsed_and_unknown_ones_are_refused_by_name() -> None:
    """A typo in a fault must not make a test pass."""
    assert parse_faults("") == Faults()
    assert parse_faults("deaf_term, slow_ack=250") == Faults(deaf_term=True, slow_ack=250)
    for text in ("deaf", "slow_ack", "slow_ack=0", "slow_ack=x", "never_ack=1"):
        with pytest.raises(ConfigError, match=r"scheduler fault"):
            parse_faults(text)


def test_a_deaf_scheduler_goes_on_after_sigterm_push_and_demotion(tmp_path: Path) -> None:
    """Only SIGKILL ends it: the case that the stop ladder is for (docs/rules.md S6)."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1"), heartbeat_ms=100) as fake:
            program = stage.scheduler(fake.address, faults="deaf_term,ignore_exit,no_self_check")
            await program.says("scheduler.joined")
            program.signal(signal.SIGTERM)
            await fake.demote()
            await program.says("exit.ignored")
            await program.says("check.ignored")
            assert program.process.poll() is None
            program.signal(signal.SIGKILL)
            assert await program.exit_code() == -signal.SIGKILL

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_scheduler_that_never_acknowledges_acts_all_the_same(tmp_path: Path) -> None:
    """Busy without progress, as the controller sees it: the age of the oldest push grows (docs/rules.md S9)."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            await joined(stage, fake, "never_ack")
            fake.push_workers(W1)
            fake.push_jobs(job("a"))
            await fake.until(lambda: fake.jobs["a"].state == "dispatched")
            assert acted(fake) == 0

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_scheduler_that_never_joins_waits_and_obeys_sigterm(tmp_path: Path) -> None:
    """docs/rules.md S9: a child that has not joined in time is treated like a wedged one."""

    async def scenario(stage: Stage) -> None:
        notices = stage.notices()
        program = stage.scheduler("127.0.0.1:1", faults="never_join", environment={"NOTIFY_SOCKET": str(notices.path)})
        await until(lambda: "STATUS=told never to join" in notices.lines(), 30)
        program.signal(signal.SIGTERM)
        assert await program.exit_code() == ExitCode.SIGNALLED
        assert "STOPPING=1" in notices.lines() and "READY=1" not in notices.lines()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_grandchild_is_left_in_a_session_of_its_own(tmp_path: Path) -> None:
    """docs/rules.md S5: what changed its session counts as part of the child's tree; here is one to find."""

    async def scenario(stage: Stage) -> None:
        async with FakeController(tls=stage.tls("controller", "c1")) as fake:
            program = stage.scheduler(fake.address, faults="grandchild", environment={"STAGE_MARK": str(tmp_path)})
            await program.says("scheduler.joined")
            left = [one for one in psutil.process_iter() if _carries(one, str(tmp_path)) and one.pid != program.pid]
            try:
                assert len(left) == 1
                assert psutil.Process(left[0].pid).cmdline()[0] == "sleep"
            finally:
                for one in left:
                    one.kill()
                    one.wait(5)

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("STAGE_MARK") == mark
    except psutil.Error:
        return False
