#!/usr/bin/env python3
"""Measures how soon a role change becomes a running scheduler, and a dead primary another one's scheduler.

    python benchmarks/role_change.py [--rounds 30] [--failovers 5] [--engine sqlite|etcd] [--json]

exec, long poll   a controller says "primary" (and answers the long poll): milliseconds to the first act of the child's process
exec, polled      the same from a controller that serves no long poll, with the default poll interval of 250 ms
fail-over         kill -9 of the primary of a whole cluster to the session of the next primary's scheduler

The controller of the first two is a scripted one on the real server code, in this process; the child stamps the wall clock, which
all processes of a host share. The fail-overs are those of the demo's cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.controller import FakeController
from xce_supervisor.testbed.demo_sight import Sight
from xce_supervisor.testbed.demo_stage import open_stage

# The least that can stamp: a shell, and date from coreutils; together about 3 ms after the exec that is measured.
_CHILD = "date +%s%N > '{folder}/draft' && mv '{folder}/draft' '{folder}/stamp' && exec sleep 600"
_CONFIG = """[supervisor]
state_dir = "{folder}/state"
run_dir = "{folder}/run"
log_level = "error"
[controller]
id = "c1"
address = "{address}"
[tls]
insecure = true
[role]
hold_down_ms_min = 0
hold_down_ms_max = 0
[units]
directories = ["{folder}/units"]
"""
_UNIT = """[unit]
name = "scheduler"
binding = "role"
command = {command}
[output]
kind = "null"
[stop]
exit_push_s = 0
grace_s = 1
"""


async def promotions(rounds: int, *, long_poll: bool) -> list[float]:
    """Return, for each promotion, the milliseconds from the controller's word to the child's first act."""
    with tempfile.TemporaryDirectory(prefix="xce-role-") as name:
        folder = Path(name)
        (folder / "units").mkdir()
        command = json.dumps(["/bin/sh", "-c", _CHILD.format(folder=folder)])
        (folder / "units" / "scheduler.toml").write_text(_UNIT.format(command=command))
        async with FakeController(role="standby") as controller:
            await controller.say(long_poll=long_poll)
            (folder / "supervisor.toml").write_text(_CONFIG.format(folder=folder, address=controller.address))
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "xce_supervisor.cli.supervisor", "run", "--config", str(folder / "supervisor.toml")],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            )
            try:
                return await _toggle(controller, folder / "stamp", rounds)
            finally:
                supervisor.send_signal(signal.SIGINT)
                supervisor.wait()


async def _toggle(controller: FakeController, stamp: Path, rounds: int) -> list[float]:
    await controller.until(lambda: controller.asked, 20)
    took: list[float] = []
    for term in range(1, rounds + 1):
        await asyncio.sleep(0.3 + 0.25 * (term % 10) / 10)  # a promotion has no favourite moment within the poll interval
        said_ns = time.time_ns()
        await controller.say(role="primary", term=term)
        give_up = time.monotonic() + 10
        while not stamp.exists():
            assert time.monotonic() < give_up, "the child did not start"
            await asyncio.sleep(0.002)
        took.append((int(stamp.read_text()) - said_ns) / 1e6)
        stamp.unlink()
        await controller.say(role="standby")
    return took


async def failovers(rounds: int, engine: str) -> list[float]:
    """Return, for each kill -9 of the primary, the milliseconds to the session of another primary's scheduler."""
    with tempfile.TemporaryDirectory(prefix="xce-failover-") as name:
        stage = open_stage(Path(name) / "cluster", engine, 3)
        stage.folder.mkdir()
        took: list[float] = []
        try:
            await stage.start()
            sight = Sight(stage)
            sight.begin()
            for _ in range(rounds):
                assert await sight.until(sight.served, 30), "the cluster is not whole"
                await asyncio.sleep(1.5)
                host, token = sight.primary(), sight.served()
                assert host is not None and host.controller is not None, "a whole cluster has a primary"
                began = time.monotonic()
                host.controller.kill()
                assert await sight.until(lambda before=token: sight.served() not in ("", before), 30), "no fail-over"
                took.append((time.monotonic() - began) * 1000)
                host.controller.wait()
                stage.start_controller(host)
            await sight.end()
        finally:
            await stage.stop()
            stage.close(keep=False)
        return took


def spread(values: list[float]) -> dict[str, Any]:
    """Return median, worst and count."""
    return {"p50_ms": round(statistics.median(values), 1), "max_ms": round(max(values), 1), "n": len(values)}


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--failovers", type=int, default=5)
    parser.add_argument("--engine", default="sqlite", choices=["sqlite", "etcd"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    if args.rounds:
        figures["exec, long poll (goal: median under 50 ms)"] = spread(asyncio.run(promotions(args.rounds, long_poll=True)))
        figures["exec, polled (goal: 250 + 20 ms)"] = spread(asyncio.run(promotions(args.rounds, long_poll=False)))
    if args.failovers:
        goal = "under 3000 ms" if args.engine == "sqlite" else "granted TTL + 3000 ms = 5000 ms"
        figures[f"fail-over on {args.engine} (goal: {goal})"] = spread(asyncio.run(failovers(args.failovers, args.engine)))
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for what, figure in figures.items():
            print(f"{what:60s} median {figure['p50_ms']:8.1f} ms   worst {figure['max_ms']:8.1f} ms   n={figure['n']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
