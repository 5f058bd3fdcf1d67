"""The reference worker as a real process: each attempt once, told until answered, through fail-over, restart and kill -9."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.fakes.controller import FakeController
from tests.testbed.stage import Stage, until
from xce_supervisor.testbed.worker import ExitCode
from xce_supervisor.wire.words import ErrorCode, HostRole, JobAttempt, JobStart, JobStateQuery, Opcode


def start_of(job_id: str, *command: str, attempt: int = 1) -> JobStart:
    """What a controller pushes."""
    return JobStart(job_id=job_id, attempt=attempt, command=command, term=1)


def append_to(path: Path, *then: str) -> tuple[str, ...]:
    """A command that appends one line to a file, which counts how often it was run."""
    return ("sh", "-c", f'echo "$XCE_JOB_ID/$XCE_JOB_ATTEMPT $$" >> {path}; ' + "; ".join(then))


def lines_of(path: Path) -> list[str]:
    """The lines that commands appended."""
    return path.read_text().splitlines() if path.exists() else []


def told(fake: FakeController) -> dict[tuple[str, int], JobAttempt]:
    """The newest word on each attempt."""
    return {(one.job_id, one.attempt): one for report in fake.reports for one in report.attempts}


def state_of(fake: FakeController, job_id: str, attempt: int = 1) -> str:
    """The state last reported, "" if none was."""
    found = told(fake).get((job_id, attempt))
    return found.state if found is not None else ""


def controller(stage: Stage, name: str = "c1", role: str = "primary") -> FakeController:
    """A fake controller with a certificate of its own."""
    return FakeController(
        controller_id=name, role=role, tls=stage.tls("controller", name), heartbeat_ms=200, session_timeout_ms=1500
    )


async def joined(fake: FakeController) -> None:
    """Wait until a worker has joined and sent its first full report."""
    await fake.until(lambda: any(report.full for report in fake.reports) and fake.session_of(HostRole.WORKER))


def test_a_job_is_run_and_its_exit_code_told(tmp_path: Path) -> None:
    """running, then done or failed with the exit code; the output is in the worker's directory."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            stage.worker([fake.address], slots=3)
            await joined(fake)
            session = fake.session_of(HostRole.WORKER)
            assert session is not None and (session.join.name, session.join.slots) == ("w1", 3)
            fake.tell(HostRole.WORKER, start_of("good", "sh", "-c", "echo hello"))
            fake.tell(HostRole.WORKER, start_of("bad", "sh", "-c", "exit 7"))
            fake.tell(HostRole.WORKER, start_of("none", "no-such-program"))
            fake.tell(HostRole.WORKER, start_of("shot", "sh", "-c", "kill -9 $$"))
            await fake.until(lambda: all(state_of(fake, name) in ("done", "failed") for name in ("good", "bad", "none", "shot")))
            words = told(fake)
            assert words["good", 1] == JobAttempt(job_id="good", attempt=1, state="done", exit_code=0)
            assert words["bad", 1] == JobAttempt(job_id="bad", attempt=1, state="failed", exit_code=7)
            assert words["none", 1].exit_code is None and "no-such-program" in words["none", 1].reason
            assert (words["shot", 1].exit_code, words["shot", 1].reason) == (137, "killed by SIGKILL")
            assert (stage.worker_directory() / "output" / "good.1.out").read_text() == "hello\n"

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_the_same_attempt_is_never_started_twice(tmp_path: Path) -> None:
    """Told again while it runs, after its end, after the end was told, and by another controller: one line in the file."""

    async def scenario(stage: Stage) -> None:
        runs = tmp_path / "runs"
        async with controller(stage) as fake:
            stage.worker([fake.address])
            await joined(fake)
            for _ in range(3):
                fake.tell(HostRole.WORKER, start_of("a", *append_to(runs, "sleep 0.3")))
            await fake.until(lambda: state_of(fake, "a") == "done")
            before = len(fake.reports)
            fake.tell(HostRole.WORKER, start_of("a", *append_to(runs)))
            await fake.until(lambda: len(fake.reports) > before and fake.reports[-1].attempts[-1].state == "done")
            fake.tell(HostRole.WORKER, start_of("a", *append_to(runs), attempt=2))
            await fake.until(lambda: state_of(fake, "a", 2) == "done")
            assert [line.split()[0] for line in lines_of(runs)] == ["a/1", "a/2"]

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_report_is_repeated_until_it_is_answered(tmp_path: Path) -> None:
    """Refused for now, or not answered: the end is told again; answered, it is not."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            stage.worker([fake.address])
            await joined(fake)
            fake.trouble.refuse[Opcode.JOB_STATE_REPORT] = ErrorCode.LIMIT
            asked = len(fake.asked)
            fake.tell(HostRole.WORKER, start_of("a", "true"))
            await fake.until(lambda: sum(one.opcode is Opcode.JOB_STATE_REPORT for one in fake.asked[asked:]) >= 3)
            fake.trouble.clear()
            await fake.until(lambda: state_of(fake, "a") == "done")
            fake.reports.clear()
            fake.tell(HostRole.WORKER, JobStateQuery(term=1))
            await fake.until(lambda: fake.reports)
            assert fake.reports[0].full and fake.reports[0].attempts == ()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_stale_report_among_others_is_dropped_and_the_others_are_told(tmp_path: Path) -> None:
    """A controller that refuses one attempt for good must not keep the worker from telling the rest."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            worker = stage.worker([fake.address])
            await joined(fake)
            fake.trouble.refuse[Opcode.JOB_STATE_REPORT] = ErrorCode.CONFLICT
            fake.tell(HostRole.WORKER, start_of("stale", "true"))
            await worker.says("report.dropped")
            fake.trouble.clear()
            fake.tell(HostRole.WORKER, start_of("b", "true"))
            await fake.until(lambda: state_of(fake, "b") == "done")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_jobs_run_on_across_a_fail_over_and_are_reported_to_the_successor(tmp_path: Path) -> None:
    """The primary goes; the job goes on; the worker follows the redirect, joins and reports everything, unasked."""

    async def scenario(stage: Stage) -> None:
        runs = tmp_path / "runs"
        async with controller(stage, "c1") as first, controller(stage, "c2", "standby") as second:
            stage.worker([first.address, second.address])
            await joined(first)
            go_on = tmp_path / "go-on"
            first.tell(HostRole.WORKER, start_of("long", *append_to(runs, f"while ! test -e {go_on}; do sleep 0.05; done")))
            await until(lambda: lines_of(runs), 20)
            session = first.session_of(HostRole.WORKER)
            assert session is not None
            await second.say(role="primary", term=2)
            await first.say(role="standby", primary_address=second.address, primary_id="c2")
            await joined(second)
            follower = second.session_of(HostRole.WORKER)
            assert follower is not None and follower.join.resume == session.session_id
            assert [(one.job_id, one.state) for one in second.reports[0].attempts] == [("long", "running")]
            second.tell(HostRole.WORKER, start_of("long", *append_to(runs)))
            go_on.touch()
            await second.until(lambda: state_of(second, "long") == "done")
            assert len(lines_of(runs)) == 1

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_an_end_while_there_is_no_primary_is_told_to_the_next_one(tmp_path: Path) -> None:
    """Nobody answers for a while; nothing is lost of what happened meanwhile."""

    async def scenario(stage: Stage) -> None:
        tls = stage.tls("controller", "c1")
        first = controller(stage)
        await first.start()
        port = int(first.address.rpartition(":")[2])
        stage.worker([first.address])
        await joined(first)
        done = tmp_path / "done"
        first.tell(HostRole.WORKER, start_of("a", "sh", "-c", f"sleep 0.5; touch {done}"))
        await first.until(lambda: state_of(first, "a") == "running")
        await first.close()
        await until(done.exists, 20)
        second = FakeController(term=2, tls=tls)
        await second.start(port=port)
        await second.until(lambda: state_of(second, "a") == "done")
        await second.close()

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_killed_workers_jobs_die_and_are_reported_lost_and_never_run_again(tmp_path: Path) -> None:
    """kill -9 of the worker: its job and the job's child, in a session of its own, are gone when its successor serves."""

    async def scenario(stage: Stage) -> None:
        runs = tmp_path / "runs"
        async with controller(stage) as fake:
            worker = stage.worker([fake.address])
            await joined(fake)
            command = append_to(runs, f"setsid sleep 300 & echo child $! >> {runs}", "sleep 300")
            fake.tell(HostRole.WORKER, start_of("a", *command))
            await until(lambda: len(lines_of(runs)) == 2, 20)
            pids = [int(line.split()[1]) for line in lines_of(runs)]
            worker.signal(signal.SIGKILL)
            await worker.exit_code()
            await until(lambda: _dead(pids[0]), 20, "the job outlived its worker")
            fake.reports.clear()
            stage.worker([fake.address])
            await joined(fake)
            await fake.until(lambda: state_of(fake, "a") == "failed")
            assert told(fake)["a", 1].reason == "host lost"
            assert all(_dead(pid) for pid in pids)
            fake.tell(HostRole.WORKER, start_of("a", *append_to(runs)))
            fake.tell(HostRole.WORKER, start_of("b", *append_to(runs)))
            await fake.until(lambda: state_of(fake, "b") == "done")
            assert [line.split()[0] for line in lines_of(runs)] == ["a/1", "child", "b/1"]

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_an_end_that_was_logged_and_not_told_survives_a_kill(tmp_path: Path) -> None:
    """The job ended well, its worker died before it could say so: the next process says it."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            worker = stage.worker([fake.address])
            await joined(fake)
            fake.trouble.silent.add(Opcode.JOB_STATE_REPORT)
            fake.tell(HostRole.WORKER, start_of("a", "true"))
            await worker.says("job.ended")
            worker.signal(signal.SIGKILL)
            await worker.exit_code()
            fake.trouble.clear()
            stage.worker([fake.address])
            await fake.until(lambda: state_of(fake, "a") == "done")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_sigterm_ends_the_jobs_and_tells(tmp_path: Path) -> None:
    """A job that obeys, one that is deaf and one that is stopped: all end and are reported lost, the worker ends with 0."""

    async def scenario(stage: Stage) -> None:
        runs, woken = tmp_path / "runs", tmp_path / "woken"
        async with controller(stage) as fake:
            worker = stage.worker([fake.address], stop_grace_s=1.0)
            await joined(fake)
            fake.tell(HostRole.WORKER, start_of("tame", *append_to(runs, "sleep 300")))
            deaf = append_to(runs, "trap '' TERM", "n=0; while [ $((n += 1)) -lt 120 ]; do sleep 1; done")
            fake.tell(HostRole.WORKER, start_of("deaf", *deaf))
            fake.tell(HostRole.WORKER, start_of("stopped", *append_to(runs, f"trap 'touch {woken}; exit' TERM", "kill -STOP $$")))
            await until(lambda: len(lines_of(runs)) == 3, 20)
            worker.signal(signal.SIGTERM)
            assert await worker.exit_code() == ExitCode.ASKED
            assert woken.exists(), "SIGTERM stays pending on a stopped process unless SIGCONT follows"
            assert {name: told(fake)[name, 1].reason for name in ("tame", "deaf", "stopped")} == dict.fromkeys(
                ("tame", "deaf", "stopped"), "host lost"
            )
            assert all(_dead(int(line.split()[1])) for line in lines_of(runs))

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_sigterm_without_a_controller_ends_in_time(tmp_path: Path) -> None:
    """Nobody to tell: the worker ends all the same, within its own limits."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            worker = stage.worker([fake.address], stop_grace_s=0.2)
            await joined(fake)
            fake.tell(HostRole.WORKER, start_of("a", "sleep", "300"))
            await fake.until(lambda: state_of(fake, "a") == "running")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code(within_s=20.0) == ExitCode.ASKED

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_second_worker_on_the_directory_ends_with_75_and_harms_nothing(tmp_path: Path) -> None:
    """The first one's jobs go on."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            stage.worker([fake.address])
            await joined(fake)
            fake.tell(HostRole.WORKER, start_of("a", "sleep", "1"))
            await fake.until(lambda: state_of(fake, "a") == "running")
            assert await stage.worker([fake.address]).exit_code() == ExitCode.LOCK_LOST
            await fake.until(lambda: state_of(fake, "a") == "done")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def test_a_superseded_attempt_is_ended_before_its_successor_runs_alone(tmp_path: Path) -> None:
    """The controller gave attempt 1 up and gives attempt 2 to the same worker: 1 is killed and reported."""

    async def scenario(stage: Stage) -> None:
        async with controller(stage) as fake:
            stage.worker([fake.address])
            await joined(fake)
            fake.tell(HostRole.WORKER, start_of("a", "sleep", "300"))
            await fake.until(lambda: state_of(fake, "a") == "running")
            fake.tell(HostRole.WORKER, start_of("a", "true", attempt=2))
            await fake.until(lambda: state_of(fake, "a", 2) == "done" and state_of(fake, "a", 1) == "failed")

    with Stage(tmp_path) as stage:
        asyncio.run(scenario(stage))


def _dead(pid: int) -> bool:
    """Gone, or a zombie that whoever adopted it has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
