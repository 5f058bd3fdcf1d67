"""docs/rules.md S3, the controller's part: who may join, and that only one scheduler is there at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.shell.controllers import Controllers, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import RequestRefused
from xce_supervisor.wire.words import (
    ErrorCode,
    Heartbeat,
    HostRole,
    SchedulerSession,
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
            assert (await controllers.status(one)).scheduler == SchedulerSession(joined=False)
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
            await controllers.says(one, lambda s: s.scheduler == SchedulerSession(joined=False), within_s=1.0)
