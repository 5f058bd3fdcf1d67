"""The reference cluster whole, with real processes on sqlite: every command's runs are counted by the lines that it appends."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.shell.controllers import Controllers, Host, sqlite_url
from tests.testbed.stage import Program, Stage, until
from xce_supervisor.errors import DeadlinePassed, PeerError, RequestRefused
from xce_supervisor.testbed import client
from xce_supervisor.testbed.client import Cluster
from xce_supervisor.wire.words import ErrorCode, JobSubmit, JobView


def counting(path: Path, job_id: str, then: str = ":", **more: object) -> JobSubmit:
    """A job that appends "ID ATTEMPT" to a file, then does something."""
    command = ("sh", "-c", f'echo "$XCE_JOB_ID $XCE_JOB_ATTEMPT" >> {path}; {then}')
    return JobSubmit(job_id=job_id, command=command, **more)  # type: ignore[arg-type]


def runs(path: Path) -> Counter[str]:
    """How often each job was run."""
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter(line.split()[0] for line in lines)


async def scheduler_for(stage: Stage, controllers: Controllers, host: Host) -> Program:
    """What a supervisor does: a scheduler for the primary's term."""
    term = (await controllers.status(host)).term
    program = stage.scheduler(host.address, controller_id=host.name, term=term, spawn_token=f"token-{term}")
    await controllers.says(host, lambda status: status.scheduler is not None and status.scheduler.joined, within_s=30)
    return program


def states(found: tuple[JobView, ...]) -> Counter[str]:
    """How many jobs are in which state."""
    return Counter(job.state for job in found)


async def test_twenty_jobs_are_done_and_each_was_run_once(tmp_path: Path) -> None:
    """Three controllers, two workers, one scheduler."""
    ran = tmp_path / "ran"
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 3)
        host = await controllers.primary(30)
        for name in ("w1", "w2"):
            stage.worker(controllers.addresses, name=name, slots=3)
        await scheduler_for(stage, controllers, host)
        wanted = [counting(ran, f"job-{number}") for number in range(20)]
        await client.submit_all(controllers.cluster, wanted)
        found = await client.wait_for_jobs(controllers.cluster, [job.job_id for job in wanted], deadline_s=60)
        assert states(found) == {"done": 20} and all(job.exit_code == 0 and job.attempt == 1 for job in found)
        assert runs(ran) == {f"job-{number}": 1 for number in range(20)}
        assert {job.worker for job in found} == {"w1", "w2"}


async def test_a_killed_primary_costs_no_job_and_no_second_run(tmp_path: Path) -> None:
    """kill -9 in the middle of twenty jobs; the old scheduler ends with 10, the new primary gets one of its own."""
    ran = tmp_path / "ran"
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 3)
        first = await controllers.primary(30)
        term = (await controllers.status(first)).term
        for name in ("w1", "w2"):
            stage.worker(controllers.addresses, name=name, slots=2)
        scheduler = await scheduler_for(stage, controllers, first)
        wanted = [counting(ran, f"job-{number}", "sleep 0.2") for number in range(20)]
        await client.submit_all(controllers.cluster, wanted)
        await controllers.says(first, lambda status: status.jobs_finished >= 4, within_s=30)
        controllers.kill(first)
        assert await scheduler.exit_code() == 10
        second = await controllers.primary(30, above=term)
        await scheduler_for(stage, controllers, second)
        found = await client.wait_for_jobs(controllers.cluster, [job.job_id for job in wanted], deadline_s=60)
        assert states(found) == {"done": 20}
        assert runs(ran) == {f"job-{number}": 1 for number in range(20)}


async def test_a_killed_worker_fails_what_may_run_once_and_runs_the_rest_again(tmp_path: Path) -> None:
    """kill -9 of a worker with running jobs and its restart: "host lost", or another attempt where the job allows it."""
    ran, go_on = tmp_path / "ran", tmp_path / "go-on"
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 1)
        host = await controllers.primary(30)
        worker = stage.worker(controllers.addresses, slots=4)
        await scheduler_for(stage, controllers, host)
        wait = f"while ! test -e {go_on}; do sleep 0.05; done"
        wanted = [counting(ran, f"once-{n}", wait) for n in range(2)]
        wanted += [counting(ran, f"again-{n}", wait, rerunnable=True) for n in range(2)]
        await client.submit_all(controllers.cluster, wanted)
        await until(lambda: len(runs(ran)) == 4, 30, lambda: f"only {runs(ran)} ran")
        worker.process.kill()
        await worker.exit_code()
        go_on.touch()
        stage.worker(controllers.addresses, slots=4)
        found = await client.wait_for_jobs(controllers.cluster, [job.job_id for job in wanted], deadline_s=30)
        outcome = {job.job_id: (job.state, job.attempt, job.reason) for job in found}
        assert outcome == {
            "once-0": ("failed", 1, "host lost"),
            "once-1": ("failed", 1, "host lost"),
            "again-0": ("done", 2, ""),
            "again-1": ("done", 2, ""),
        }
        assert runs(ran) == {"once-0": 1, "once-1": 1, "again-0": 2, "again-1": 2}


async def test_a_client_follows_redirects_and_submits_once_however_often_it_asks(tmp_path: Path) -> None:
    """The standby is asked first; the same job again is the same; the same id with other content is a conflict."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 2)
        host = await controllers.primary(30)
        [standby] = controllers.others(host)
        await controllers.says(standby, lambda status: status.primary_address == host.address)
        cluster = Cluster((standby.address,), stage.tls("operator", "admin"))
        job = JobSubmit(job_id="job-1", command=("true",))
        index = await client.submit(cluster, job)
        assert index > 0 and await client.submit(cluster, job) >= index
        with pytest.raises(RequestRefused) as refused:
            await client.submit(cluster, JobSubmit(job_id="job-1", command=("false",)))
        assert refused.value.code == ErrorCode.CONFLICT
        with pytest.raises(RequestRefused) as refused:
            await client.submit(cluster, JobSubmit(job_id="job 2", command=("true",)))
        assert refused.value.code == ErrorCode.MALFORMED
        assert [one.job_id for one in await client.jobs(cluster)] == ["job-1"]
        assert await client.jobs(cluster, ["job-1", "none"]) == await client.jobs(cluster)


async def test_a_submission_waits_over_a_fail_over(tmp_path: Path) -> None:
    """The primary is killed, and the submission is committed by its successor before the deadline."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 2)
        host = await controllers.primary(30)
        controllers.kill(host)
        await client.submit(controllers.cluster, JobSubmit(job_id="job-1", command=("true",)), deadline_s=30)
        assert len(await client.jobs(controllers.cluster)) == 1


async def test_every_page_of_many_jobs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jobs` asks page by page, in order of submission."""
    monkeypatch.setattr(client, "PAGE", 7)
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 1)
        await controllers.primary(30)
        wanted = [JobSubmit(job_id=f"job-{number}", command=("true",)) for number in range(16)]
        await client.submit_all(controllers.cluster, wanted)
        assert [job.job_id for job in await client.jobs(controllers.cluster)] == [job.job_id for job in wanted]


async def test_leadership_is_given_up_by_request_and_a_gate_keeps_it_from_coming_back(tmp_path: Path) -> None:
    """step-down asks whoever leads; a closed gate refuses the promotion and shows in ctrlstatus."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 2)
        first = await controllers.primary(30)
        term = (await controllers.status(first)).term
        await client.step_down(controllers.cluster, hold_ms=2000)
        second = await controllers.primary(30, above=term)
        assert second is not first
        tls = stage.tls("operator", "admin")
        await client.gate(first.address, tls, "recovery-truncated", closed=True, detail="by the test")
        with pytest.raises(RequestRefused, match="no-such-gate"):
            await client.gate(first.address, tls, "no-such-gate", closed=True)
        with pytest.raises(RequestRefused, match="no-such-plug"):
            await client.plug(first.address, tls, "no-such-plug", closed=True)
        await client.step_down(controllers.cluster, address=second.address, hold_ms=5000)
        refused = await controllers.says(first, lambda status: bool(status.gate), within_s=30)
        assert (refused.gate, refused.gate_detail, refused.role) == ("recovery-truncated", "by the test", "standby")
        await client.gate(first.address, tls, "recovery-truncated", closed=False)
        assert await controllers.primary(30, above=term + 1)


async def test_a_cluster_that_is_not_there_is_told_by_the_deadline(tmp_path: Path) -> None:
    """The message says what was tried last; a status query names its controller."""
    with Stage(tmp_path) as stage:
        tls = stage.tls("operator", "admin")
        cluster = Cluster(("127.0.0.1:1",), tls)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlinePassed, match=r"within 0\.7 s; last: 127\.0\.0\.1:1: .*Connection refused"):
            await client.submit(cluster, JobSubmit(job_id="a", command=("true",)), deadline_s=0.7)
        assert asyncio.get_running_loop().time() - began < 10
        with pytest.raises(PeerError, match=r"127\.0\.0\.1:1"):
            await client.ctrlstatus("127.0.0.1:1", tls, deadline_s=0.5)
