"""The controller's role with real processes: promotion, gates, redirects, the long poll, stepping down, losing the store."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.shell.controllers import CONTROLLER, Controllers, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import Redirected, RequestRefused
from xce_supervisor.testbed.client import gate, jobs, plug, step_down, submit
from xce_supervisor.wire.words import (
    CtrlStatus,
    CtrlStatusReply,
    ErrorCode,
    HostRole,
    JobQuery,
    JobSubmit,
    SchedulerExit,
    StepDown,
)


async def test_one_leads_and_the_others_name_it(tmp_path: Path) -> None:
    """One primary, its NOOP committed; standbys answer status, redirect everything else, and name the primary."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 3)
        primary = await controllers.primary()
        status = await controllers.status(primary)
        assert (status.term, status.commit_index, status.engine) == (1, 1, "sqlite")
        assert status.quorum_age_ms is not None and status.quorum_age_ms < 1000
        for standby in controllers.others(primary):
            seen = await controllers.says(standby, lambda s: s.primary_id == primary.name)
            assert (seen.role, seen.term, seen.primary_address) == ("standby", 1, primary.address)
            assert seen.quorum_age_ms is None
            async with await peer(controllers, standby, "operator", "admin") as operator:
                for message in (JobQuery(), JobSubmit(job_id="j", command=("true",))):
                    with pytest.raises(Redirected) as redirect:
                        await operator.ask(message)
                    assert (redirect.value.address, redirect.value.term) == (primary.address, 1)
            async with await peer(controllers, standby, "worker", "w1") as worker:
                with pytest.raises(Redirected):
                    await worker.join(HostRole.WORKER, "w1", slots=1)


async def test_a_long_poll_is_answered_within_milliseconds_of_a_change(tmp_path: Path) -> None:
    """A standby's status query waits, and is answered when it becomes primary; one that knows an old version does not wait."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 2)
        primary = await controllers.primary()
        (standby,) = controllers.others(primary)
        await controllers.says(standby, lambda s: s.primary_id == primary.name)
        async with (
            await peer(controllers, standby, "operator", "admin") as watcher,
            await peer(controllers, primary, "operator", "admin") as other,
        ):
            before = await watcher.ask(CtrlStatus())
            assert isinstance(before, CtrlStatusReply) and before.long_poll
            asked_at = time.monotonic()
            quiet = await watcher.ask(CtrlStatus(known_version=before.version, wait_ms=300))
            assert isinstance(quiet, CtrlStatusReply) and quiet.version == before.version
            assert 0.3 <= time.monotonic() - asked_at < 0.8
            stale = await watcher.ask(CtrlStatus(known_version=before.version - 1, wait_ms=5000), 1.0)
            assert isinstance(stale, CtrlStatusReply) and stale.version == before.version

            was = await other.ask(CtrlStatus())
            assert isinstance(was, CtrlStatusReply)
            demoted = asyncio.create_task(other.ask(CtrlStatus(known_version=was.version, wait_ms=5000), 6.0))
            await asyncio.sleep(0)
            async with await peer(controllers, primary, "operator", "second") as operator:
                stepped_at = time.monotonic()
                await operator.ask(StepDown(hold_ms=3000))
                reply = await demoted
                took_s = time.monotonic() - stepped_at
            assert isinstance(reply, CtrlStatusReply) and reply.role == "standby"
            # Generous for a loaded machine; benchmarks/ holds the figure itself.
            assert took_s < 0.5
        await controllers.says(standby, lambda s: s.role == "primary" and s.term == 2)


async def test_a_closed_gate_refuses_the_promotion_and_lets_another_lead(tmp_path: Path) -> None:
    """docs/rules.md S1: refused means standby, with the gate as the reason; after its patience it leaves the lead to others."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 1, gates=["apply-divergent"], refusal_patience_s=0.3)
        (one,) = controllers.hosts
        refused = await controllers.says(one, lambda s: s.gate != "")
        assert (refused.role, refused.gate, refused.gate_detail) == ("standby", "apply-divergent", "closed at the start")
        tls = controllers.cluster.tls
        await gate(one.address, tls, "apply-divergent", closed=False)
        promoted = await controllers.says(one, lambda s: s.role == "primary")
        assert promoted.gate == ""
        # Closing a gate later demotes nobody; it matters at the next promotion.
        await gate(one.address, tls, "config-serve-fenced", closed=True, detail="no config")
        assert (await controllers.status(one)).role == "primary"
        await step_down(controllers.cluster)
        again = await controllers.says(one, lambda s: s.gate != "")
        assert (again.role, again.gate, again.gate_detail) == ("standby", "config-serve-fenced", "no config")
        with pytest.raises(RequestRefused) as unknown:
            await gate(one.address, tls, "no-such-gate", closed=True)
        assert unknown.value.code == ErrorCode.NOT_FOUND and "recovery-truncated" in unknown.value.text


async def test_a_refused_controller_leaves_the_lead_to_a_healthy_one(tmp_path: Path) -> None:
    """Of two controllers one is gated for good: the other becomes primary whoever wins first."""
    with Stage(tmp_path) as stage:
        gated = Controllers(stage, sqlite_url(tmp_path, lease_ms=1000), 1, gates=["recovery-truncated"], refusal_patience_s=0.2)
        await gated.says(gated.hosts[0], lambda s: s.gate != "")
        healthy = Controllers(stage, sqlite_url(tmp_path, lease_ms=1000), 2)
        healthy.kill(healthy.hosts[0])  # its name is taken by the gated one; c2 is the healthy one
        await healthy.says(healthy.hosts[1], lambda s: s.role == "primary")
        assert (await gated.status(gated.hosts[0])).gate == "recovery-truncated"


async def test_the_scheduler_is_asked_to_go_at_demotion_unless_that_is_plugged(tmp_path: Path) -> None:
    """The exit push comes on the scheduler's own connection, before the next primary is there; a plug holds it back."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        for plugged in (False, True):
            status = await controllers.says(one, lambda s: s.role == "primary")
            async with await peer(controllers, one, "scheduler", "scheduler") as scheduler:
                await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=status.term)
                await plug(one.address, controllers.cluster.tls, "exit-push", closed=plugged)
                await step_down(controllers.cluster)
                if plugged:
                    await controllers.says(one, lambda s, term=status.term: s.term > term)  # type: ignore[misc]
                    assert not [push for push in scheduler.pushes if isinstance(push, SchedulerExit)]
                else:
                    pushed = await scheduler.pushed(SchedulerExit)
                    assert "resigned" in pushed.reason


async def test_a_primary_that_loses_its_store_steps_down(tmp_path: Path) -> None:
    """A stranger keeps the store's lock: the primary becomes standby within its lease, and primary again in a later term."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=1000))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        lock = sqlite3.connect(tmp_path / "store.db", isolation_level=None, timeout=5)
        try:
            lock.execute("BEGIN IMMEDIATE")
            lost_at = time.monotonic()
            await controllers.says(one, lambda s: s.role == "standby", within_s=5)
            assert time.monotonic() - lost_at < 3
            async with await peer(controllers, one, "operator", "admin") as operator:
                with pytest.raises(Redirected):
                    await operator.ask(JobSubmit(job_id="j", command=("true",)))
        finally:
            lock.close()
        assert (await controllers.says(one, lambda s: s.role == "primary")).term > 1


async def test_a_primary_that_does_not_step_down_says_how_old_its_quorum_is(tmp_path: Path) -> None:
    """docs/rules.md S7: in this mode it stays primary without the store; the confirmation ages, and nothing is committed."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=1000), 1, steps_down=False)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        lock = sqlite3.connect(tmp_path / "store.db", isolation_level=None, timeout=5)
        try:
            lock.execute("BEGIN IMMEDIATE")
            await one.program.says("leader.deposed")
            status = await controllers.says(one, lambda s: (s.quorum_age_ms or 0) > 1200)
            assert (status.role, status.term) == ("primary", 1)
            async with await peer(controllers, one, "operator", "admin") as operator:
                with pytest.raises(RequestRefused) as refused:
                    await operator.ask(JobSubmit(job_id="j", command=("true",)))
                assert refused.value.code == ErrorCode.UNAVAILABLE
        finally:
            lock.close()
        later = await controllers.says(one, lambda s: s.term > 1 and s.role == "primary")
        assert later.jobs_pending == 0


async def test_a_stopped_primary_is_a_standby_from_its_first_answer_on(tmp_path: Path) -> None:
    """SIGSTOP, another leads, SIGCONT: not one answer says primary of the old term, and what is asked of it is redirected."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=1000), 2)
        old = await controllers.primary()
        (new,) = controllers.others(old)
        async with await peer(controllers, old, "operator", "admin") as operator:
            assert isinstance(await operator.ask(CtrlStatus()), CtrlStatusReply)
            old.program.signal(signal.SIGSTOP)
            await controllers.says(new, lambda s: s.role == "primary")
            # These lie in its socket when it goes on: they are the first that it handles.
            waiting = [asyncio.create_task(operator.ask(CtrlStatus())) for _ in range(3)]
            submitted = asyncio.create_task(operator.ask(JobSubmit(job_id="j", command=("true",))))
            await asyncio.sleep(0)
            old.program.signal(signal.SIGCONT)
            for reply in await asyncio.gather(*waiting):
                assert isinstance(reply, CtrlStatusReply) and reply.role == "standby"
            with pytest.raises(Redirected):
                await submitted
        assert (await jobs(controllers.cluster)) == ()
        status = await controllers.says(old, lambda s: s.primary_id == new.name)
        assert status.loop_gap_ms > 500


async def test_an_orderly_end_hands_over_at_once(tmp_path: Path) -> None:
    """SIGTERM: exit code 0, and the next primary is there long before a lease would have run out."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=10_000), 2)
        old = await controllers.primary()
        await submit(controllers.cluster, JobSubmit(job_id="j", command=("true",)))
        old.program.signal(signal.SIGTERM)
        new = await controllers.primary(among=controllers.others(old), within_s=5.0)
        assert await old.program.exit_code() == 0
        assert [job.job_id for job in await jobs(controllers.cluster)] == ["j"]
        assert new is not old


async def test_a_bug_in_the_store_ends_the_process(tmp_path: Path) -> None:
    """A candidate whose campaign broke could never lead again: it ends with its code, and the service manager starts anew."""
    break_it = "from xce_supervisor.store.sqlite_file import SqliteFile\nSqliteFile.renew = lambda *_: 1 / 0\n"
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 0)
        given = {"controller_id": "c1", "listen": "127.0.0.1:0", "store": controllers.store}
        program = stage.start("c1", break_it + CONTROLLER, given, {})
        assert await program.exit_code() == 70
        assert "ZeroDivisionError" in program.output()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"listen": "127.0.0.1"}, "listen '127.0.0.1'"),
        ({"store": "sqlite:///nowhere/at/all/store.db"}, "/nowhere/at/all does not exist"),
        ({"gates": ["no-such"]}, "gate 'no-such'"),
        ({"session_timeout_ms": 100}, "session_timeout_ms=100"),
    ],
)
async def test_a_configuration_that_cannot_be_used_ends_with_its_code_and_reason(
    tmp_path: Path, config: dict[str, object], told: str
) -> None:
    """Exit code 78, the part and the reason in one line, no traceback."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 0)
        given = {"controller_id": "c1", "listen": "127.0.0.1:0", "store": controllers.store, **config}
        program = stage.start("c1", CONTROLLER, given, {})
        assert await program.exit_code() == 78
        assert told in program.output() and "Traceback" not in program.output()
