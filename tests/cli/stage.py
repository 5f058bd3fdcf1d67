"""A supervisor that says what a test wants, and its verbs run as an operator runs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from xce_supervisor.supervisor.control import Caller, ControlServer, Refused
from xce_supervisor.supervisor.view import (
    BindingView,
    Event,
    Gate,
    Jobs,
    LastExit,
    Paused,
    RoleView,
    SupervisorView,
    UnitView,
    View,
)

SETTINGS = """
[supervisor]
state_dir = "state"
run_dir = "run"
[controller]
id = "c1"
address = "127.0.0.1:1"
[tls]
insecure = true
"""


def configured(folder: Path, text: str = SETTINGS) -> Path:
    """Write a configuration and return its path."""
    file = folder / "c1.toml"
    file.write_text(text, encoding="utf-8")
    return file


def unit(**changes: Any) -> UnitView:
    """A scheduler as it should be, but for `changes`."""
    right: dict[str, Any] = {
        "name": "scheduler",
        "wanted": True,
        "wanted_reason": "c1 is primary in term 7",
        "is_": "running",
        "ready": "joined",
        "since_s": 65.0,
        "pid": 4711,
        "binding": BindingView(controller_id="c1", instance_id="i-1", term=7),
        "generation": 4,
        "gates": (Gate(name="role", closed=False, detail="primary"),),
        "events": (Event(wall=1.0, kind="child.spawned", fields={"pid": 4711}),),
    }
    return UnitView(**{**right, **changes})


def view(*units: UnitView, **changes: Any) -> View:
    """A picture in which everything is as wanted, but for `changes`."""
    right: dict[str, Any] = {
        "supervisor": SupervisorView(
            pid=4242,
            version="0.1.0",
            host="alpha",
            controller_id="c1",
            controller_address="127.0.0.1:1",
            since_s=7200.0,
            tree="groups",
            config_file="c1.toml",
        ),
        "role": RoleView(is_="primary", since_s=66.0, term=7, last_answer_age_ms=40, quorum_age_ms=90, long_poll=True),
        "units": units or (unit(),),
        "jobs": Jobs(pending=3, running=2, finished=17),
        "wall": time.time(),
    }
    return View(**{**right, **changes})


CRASHING = unit(
    is_="waiting",
    is_reason="crashed",
    ready="-",
    pid=None,
    restarts=3,
    next_attempt_s=1.5,
    last_exit=LastExit(signal="SIGKILL", reason="wedged", ago_s=3.0),
    degraded=("crashed 3 times in a row",),
    gates=(Gate(name="role", closed=False), Gate(name="backoff", closed=True, detail="1.5 s left")),
)
PAUSED = unit(name="metrics", paused=Paused(by="älice", since=1.0, why="works \x1b[31m on it"))


@contextlib.contextmanager
def supervising(folder: Path, said: Callable[[], View], asked: list[tuple[str, dict[str, Any]]] | None = None) -> Iterator[None]:
    """Serve `said()` as the status, in a thread of its own; other verbs are noted in `asked`."""

    def handle(verb: str, args: dict[str, Any], caller: Caller) -> Any:
        if verb == "status":
            return said()
        if args.get("unit") != "scheduler":
            raise Refused(f"unknown unit {args.get('unit')}; known are scheduler", "unknown unit")
        if asked is not None:
            asked.append((verb, args))
        return {"unit": args["unit"]}

    loop = uvloop.new_event_loop()
    server = ControlServer(folder / "run" / "control.sock", handle)
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def verb(
    *args: str | Path, program: str = "supervisor", env: dict[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a verb and return what became of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XCE_")}
    return subprocess.run(
        [sys.executable, "-m", f"xce_supervisor.cli.{program}", *map(str, args)],
        capture_output="stdout" not in more,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=30,
        check=False,
        env={**environment, **(env or {})},
        **more,
    )
