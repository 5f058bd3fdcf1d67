"""Sessions and pushes with a real controller: who may join, what is counted, and whose absence is held against whom."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.shell.controllers import Controllers, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import RequestRefused
from xce_supervisor.testbed.client import plug, submit
from xce_supervisor.wire.words import (
    ConfigPush,
    CtrlStatus,
    CtrlStatusReply,
    ErrorCode,
    Heartbeat,
    HostRole,
    JobDispatch,
    JobPush,
    JobSubmit,
    Push,
    PushAck,
    QueuePush,
    Resync,
)


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
        controllers = Controllers(stage, sqlite_url(tmp_path, lease_ms=10_000), heartbeat_ms=200, session_timeout_ms=800)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with await peer(controllers, one, "scheduler", "scheduler") as scheduler:
            await scheduler.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            await scheduler.pushed(JobPush)
            scheduler.stop_heartbeats()
            one.program.signal(signal.SIGSTOP)
            await asyncio.sleep(1.4)  # the absence itself: it is what is tested
            one.program.signal(signal.SIGCONT)
            status = await controllers.status(one)
            assert status.scheduler is not None and status.scheduler.joined
            assert status.scheduler.oldest_unacked_ms is not None and status.scheduler.oldest_unacked_ms < 1000
            assert status.loop_gap_ms >= 1200
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
