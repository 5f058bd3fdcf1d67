"""Sessions and pushes with a real controller: who may join, what is counted, and whose absence is held against whom."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.shell.controllers import CONTROLLER, Controllers, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import RequestRefused
from xce_supervisor.testbed.client import plug, submit
from xce_supervisor.wire.words import (
    ConfigPush,
    CtrlStatus,
    CtrlStatusReply,
    ErrorCode,
    GateSet,
    Heartbeat,
    HostRole,
    JobDispatch,
    JobPush,
    JobQuery,
    JobSubmit,
    Push,
    PushAck,
    QueuePush,
    Resync,
)


async def test_a_join_for_another_controller_or_term_is_refused(tmp_path: Path) -> None:
    """docs/rules.md S3: controller id and term must be the controller's own; a scheduler that names none is refused too."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with await peer(controllers, one, "scheduler", "scheduler") as scheduler:
            for more, code in (
                ({"controller_id": "c2", "term": 1}, ErrorCode.WRONG_CONTROLLER),
                ({"controller_id": "", "term": 1}, ErrorCode.WRONG_CONTROLLER),
                ({"controller_id": "c1", "term": 2}, ErrorCode.WRONG_TERM),
                ({"controller_id": "c1", "term": 0}, ErrorCode.WRONG_TERM),
            ):
                with pytest.raises(RequestRefused) as refused:
                    await scheduler.join(HostRole.SCHEDULER, "scheduler", **more)
                assert refused.value.code == code
            assert (await controllers.status(one)).scheduler is None
            joined = await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1, spawn_token="mine")
            assert (joined.controller_id, joined.term) == ("c1", 1)
            session = (await controllers.status(one)).scheduler
            assert session is not None and session.joined and session.spawn_token == "mine"


async def test_a_second_scheduler_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    """Alive means heartbeats within the time-out; silent, it may be replaced; a closed connection ends it at once."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), heartbeat_ms=100, session_timeout_ms=500)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        join = {"controller_id": "c1", "term": 1}
        async with (
            await peer(controllers, one, "scheduler", "scheduler") as first,
            await peer(controllers, one, "scheduler", "scheduler") as second,
        ):
            await first.join(HostRole.SCHEDULER, "scheduler", spawn_token="first", **join)
            for name in ("scheduler", "other-name"):
                with pytest.raises(RequestRefused) as refused:
                    await second.join(HostRole.SCHEDULER, name, spawn_token="second", **join)
                assert refused.value.code == ErrorCode.SESSION_ALIVE
            first.stop_heartbeats()
            silent = await controllers.says(one, lambda s: s.scheduler is not None and not s.scheduler.joined)
            assert silent.scheduler is not None and silent.scheduler.spawn_token == "first"
            await first.ask(Heartbeat(session_id=first.session_id))
            await controllers.says(one, lambda s: s.scheduler is not None and s.scheduler.joined)
            await controllers.says(one, lambda s: s.scheduler is not None and not s.scheduler.joined)
            await second.join(HostRole.SCHEDULER, "scheduler", spawn_token="second", **join)
            await asyncio.wait([first.connection.closed], timeout=2)
            assert first.connection.closed.done()
            second.connection.close("it dies")
            await controllers.says(one, lambda s: s.scheduler is None, within_s=1.0)


async def test_pushes_are_numbered_and_their_acknowledgement_is_counted(tmp_path: Path) -> None:
    """Everything after the join, changes after that, numbers without a gap; the oldest push not acted on has its age."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), dispatch_max=7)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        await submit(controllers.cluster, JobSubmit(job_id="before", command=("true",)))
        async with await peer(controllers, one, "scheduler", "scheduler") as scheduler:
            await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            full = await scheduler.pushed(JobPush, lambda p: p.full)
            assert [job.job_id for job in full.jobs] == ["before"]
            assert (await scheduler.pushed(ConfigPush)).max_dispatch_per_cycle == 7
            assert (await scheduler.pushed(QueuePush)).workers == ()
            await submit(controllers.cluster, JobSubmit(job_id="after", command=("true",)))
            changed = await scheduler.pushed(JobPush, lambda p: not p.full)
            assert [job.job_id for job in changed.jobs] == ["after"]
            numbers = [push.seq for push in scheduler.pushes if isinstance(push, Push)]
            assert numbers == [1, 2, 3, 4] and {p.term for p in scheduler.pushes if isinstance(p, Push)} == {1}

            stale = await controllers.says(one, lambda s: s.scheduler is not None and (s.scheduler.oldest_unacked_ms or 0) > 200)
            assert stale.scheduler is not None
            assert (stale.scheduler.last_push_seq, stale.scheduler.last_acted_seq) == (4, 0)
            await scheduler.ask(PushAck(session_id=scheduler.session_id, seq=3))
            partly = (await controllers.status(one)).scheduler
            assert partly is not None and partly.last_acted_seq == 3 and partly.oldest_unacked_ms is not None
            await scheduler.ask(PushAck(session_id=scheduler.session_id, seq=4))
            acted = (await controllers.status(one)).scheduler
            assert acted is not None and (acted.last_acted_seq, acted.oldest_unacked_ms) == (4, None)
            with pytest.raises(RequestRefused) as never_sent:
                await scheduler.ask(PushAck(session_id=scheduler.session_id, seq=5))
            assert never_sent.value.code == ErrorCode.MALFORMED
            await scheduler.ask(Resync(session_id=scheduler.session_id))
            again = await scheduler.pushed(JobPush, lambda p: p.full and p.seq > 4)
            assert [job.job_id for job in again.jobs] == ["before", "after"]


async def test_the_controllers_own_absence_counts_against_nobody(tmp_path: Path) -> None:
    """docs/rules.md S10: stopped for longer than the session time-out, it goes on with the same live session and young ages."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=10_000), heartbeat_ms=200, session_timeout_ms=1000)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with await peer(controllers, one, "scheduler", "scheduler") as scheduler:
            await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            await scheduler.pushed(JobPush)
            scheduler.stop_heartbeats()
            one.program.signal(signal.SIGSTOP)
            await asyncio.sleep(2.0)  # the absence itself: it is what is tested
            one.program.signal(signal.SIGCONT)
            status = await controllers.status(one)
            assert status.scheduler is not None and status.scheduler.joined
            assert status.scheduler.oldest_unacked_ms is not None and status.scheduler.oldest_unacked_ms < 1500
            assert status.loop_gap_ms >= 1500
            # It is its own absence that is credited, not the peer's: silence after it counts.
            await controllers.says(one, lambda s: s.scheduler is not None and not s.scheduler.joined, within_s=3)


async def test_requests_need_their_own_session(tmp_path: Path) -> None:
    """What is asked with no session, another connection's, or another role's is refused as not joined."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with (
            await peer(controllers, one, "scheduler", "scheduler") as scheduler,
            await peer(controllers, one, "scheduler", "scheduler") as thief,
        ):
            joined = await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            for message in (
                PushAck(session_id=joined.session_id, seq=1),
                Heartbeat(session_id=joined.session_id),
                Resync(session_id="none"),
                JobDispatch(session_id="", job_id="j", worker="w", attempt=1),
            ):
                with pytest.raises(RequestRefused) as refused:
                    await thief.ask(message)
                assert refused.value.code == ErrorCode.NOT_JOINED


async def test_each_role_may_use_only_its_opcodes(tmp_path: Path) -> None:
    """docs/rules.md A1: by the certificate; a role that is not the certificate's cannot be joined; told once in the log."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with await peer(controllers, one, "supervisor", "c1") as supervisor:
            assert isinstance(await supervisor.ask(CtrlStatus()), CtrlStatusReply)
            for message in (
                JobSubmit(job_id="j", command=("true",)),
                JobQuery(),
                GateSet(gate="apply-divergent", closed=True),
            ):
                with pytest.raises(RequestRefused) as refused:
                    await supervisor.ask(message)
                assert refused.value.code == ErrorCode.DENIED
            with pytest.raises(RequestRefused) as refused:
                await supervisor.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            assert refused.value.code == ErrorCode.DENIED
        async with await peer(controllers, one, "worker", "w1") as worker:
            for role, name in ((HostRole.SCHEDULER, "w1"), (HostRole.WORKER, "w2")):
                with pytest.raises(RequestRefused) as refused:
                    await worker.join(role, name, controller_id="c1", term=1, slots=1)
                assert refused.value.code == ErrorCode.DENIED
        assert one.program.output().count("opcode.denied") == 2


async def test_without_certificates_it_says_so_loudly(tmp_path: Path) -> None:
    """docs/rules.md A1: a controller without TLS warns at its start."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), secure=False)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        assert "[warning" in one.program.output() and "tls.missing" in one.program.output()


async def test_a_certificate_of_another_name_is_refused_at_the_start(tmp_path: Path) -> None:
    """A controller that pretends to be another does not start: file, what it names, and what to do."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 0)
        files = stage.files("worker", "w1")
        given = {
            "controller_id": "c1",
            "listen": "127.0.0.1:0",
            "store": controllers.store,
            "tls": [str(files.ca), str(files.cert), str(files.key)],
        }
        program = stage.start("c1", CONTROLLER, given, {})
        assert await program.exit_code() == 78
        assert "worker/w1" in program.output() and str(files.cert) in program.output()


async def test_a_plugged_status_hangs_until_it_is_opened(tmp_path: Path) -> None:
    """Fault injection: queries lie there unanswered while plugged; an unknown plug is named with the known ones."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        tls = controllers.cluster.tls
        await plug(one.address, tls, "ctrlstatus", closed=True)
        async with await peer(controllers, one, "supervisor", "c1") as supervisor:
            waiting = asyncio.create_task(supervisor.ask(CtrlStatus()))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            await plug(one.address, tls, "ctrlstatus", closed=False)
            assert isinstance(await waiting, CtrlStatusReply)
        with pytest.raises(RequestRefused) as unknown:
            await plug(one.address, tls, "drain", closed=True)
        assert "exit-push" in unknown.value.text
