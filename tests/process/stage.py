"""Where the tests of the process room play.

`in_lane` runs blocking work in a thread, as a lane would. `play` runs a scene in a process of its own that is what a supervisor
is: child subreaper, SIGCHLD in the loop, lanes, a forest. A scene is an async function of a test file; its arguments and its
result travel as JSON. Whatever a scene leaves is killed by its own process, also when pytest dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from xce_supervisor.core.words import Identity
from xce_supervisor.process import mark
from xce_supervisor.process.births import Births
from xce_supervisor.process.exits import Exited, Exits
from xce_supervisor.process.lanes import Kind, Lanes, Outcome, Submitted
from xce_supervisor.process.spawn import Append, SpawnSpec, seal_descriptors, spawn
from xce_supervisor.process.tree import Forest, open_forest, start

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 15.0  # no fact of this room takes nearly so long, also on a loaded machine
_PR_SET_PDEATHSIG = 1
PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def in_lane(work: Callable[[], T]) -> T:
    """Run blocking work in a thread of its own and return, or raise, what it does."""
    kept: list[Outcome[T]] = []

    def body() -> None:
        try:
            kept.append(Outcome(value=work()))
        except Exception as error:  # noqa: BLE001  # raised again below
            kept.append(Outcome(error=error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(BOUND_S)
    assert kept, "the work in the lane hangs"
    return kept[0].unwrap()


def shell(script: str, **more: Any) -> SpawnSpec:
    """Return what starts a shell script with a plain environment."""
    return SpawnSpec(("/bin/sh", "-c", script), more.pop("env", PATH), **more)


def wait_code(identity: Identity) -> int:
    """Reap a child of this process and return its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(identity.pid, 0)[1])


def output_of(spec: SpawnSpec, path: Path) -> str:
    """Run a child to its end with its output in `path`; return that. Fails on any exit code but 0."""
    out = Append(str(path))
    identity = in_lane(lambda: spawn(replace(spec, stdout=out, stderr=out)))
    code = wait_code(identity)
    text = path.read_text(encoding="utf-8")
    assert code == 0, f"exit code {code}: {text}"
    return text


def until(fact: Callable[[], T | bool], what: str, bound_s: float = BOUND_S) -> T:
    """Wait for a fact, looking often, and return it. Fails with `what` after the bound."""
    give_up = time.monotonic() + bound_s
    while not (found := fact()):
        assert time.monotonic() < give_up, f"not within {bound_s} s: {what}"
        time.sleep(0.005)
    return found  # type: ignore[return-value]  # True only where T is bool


class Stage:
    """What a scene has: the loop and everything of this room on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forest: str, name: str) -> None:
        self.loop = loop
        self.orphans: list[Exited] = []
        self.warnings: list[str] = []
        self.exits = Exits(loop, Births(), self.orphans.append)
        self.exits.reap_orphans()
        self.lanes = Lanes(loop, threads=3, cap=512, reserved=1)
        self.forest: Forest = open_forest(loop, name, self.exits.births, None if forest == "cgroup" else "off")
        assert self.forest.why.startswith("cgroup v2" if forest == "cgroup" else "process groups"), self.forest.why
        self.ends: dict[int, asyncio.Future[Exited]] = {}
        self.units: set[str] = set()

    async def lane(self, key: str, work: Callable[[], T], kind: Kind = Kind.WORK) -> T:
        """Run work in the lanes and return what came of it."""
        future: asyncio.Future[Outcome[T]] = self.loop.create_future()
        assert self.lanes.submit(key, work, future.set_result, kind) is Submitted.ACCEPTED
        return (await asyncio.wait_for(future, BOUND_S)).unwrap()

    async def start(self, unit: str, spec: SpawnSpec, marked_by: str = "test") -> Identity:
        """Start a child in the unit's tree, with marks, and watch it."""
        env = {**spec.env, **mark.marks(marked_by, unit, secrets.token_hex(8))}
        whole = replace(spec, env=env)
        self.units.add(unit)
        job = partial(start, whole, self.forest.tree(unit), self.exits.births, self.warnings.append)
        identity = await self.lane(f"spawn:{unit}", job)
        self.watch(identity)
        return identity

    async def spawn(self, spec: SpawnSpec) -> Identity:
        """Start a child in no tree, and watch it."""
        identity = await self.lane(secrets.token_hex(4), partial(spawn, spec, self.exits.births, self.warnings.append))
        self.watch(identity)
        return identity

    def watch(self, identity: Identity) -> asyncio.Future[Exited]:
        """Watch a process; its end is kept for `ended`. A second end of the same process fails the scene."""
        future: asyncio.Future[Exited] = self.loop.create_future()
        self.ends[identity.pid] = future
        self.exits.watch(identity, future.set_result)
        return future

    async def ended(self, identity: Identity) -> Exited:
        """Wait for the end of a watched process."""
        return await asyncio.wait_for(asyncio.shield(self.ends[identity.pid]), BOUND_S)

    async def emptied(self, unit: str) -> None:
        """Wait until the unit's tree tells that it is empty."""
        event = asyncio.Event()
        self.forest.tree(unit).on_empty(event.set)
        await asyncio.wait_for(event.wait(), BOUND_S)

    async def until(self, fact: Callable[[], T | bool], what: str, bound_s: float = BOUND_S) -> T:
        """Wait for a fact while the loop goes on."""
        give_up = self.loop.time() + bound_s
        while not (found := fact()):
            assert self.loop.time() < give_up, f"not within {bound_s} s: {what}"
            await asyncio.sleep(0.005)
        return found  # type: ignore[return-value]  # True only where T is bool

    async def close(self) -> None:
        """Kill what is left and give everything back."""
        for unit in self.units:
            tree = self.forest.tree(unit)
            tree.kill()
            with contextlib.suppress(TimeoutError):
                await self.emptied(unit)
        for future in [future for future in self.ends.values() if not future.done()]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, 2.0)
        await self.lanes.close(1.0)
        self.forest.close()
        self.exits.close()


Scene = Callable[..., Awaitable[Any]]


def play(
    scene: Scene,
    *args: Any,
    forest: str = "cgroup",
    loop: str = "uvloop",
    name: str = "",
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    bound_s: float = 60.0,
    code: int = 0,
) -> Any:
    """Play a scene and return its result; fails with its words when it ends with another exit code than `code`.

    forest: "cgroup" or "group". prefix: a command that executes the rest (unshare, nohup, setpriv). name: of the forest.
    """
    about = json.dumps(
        {
            "file": inspect.getfile(scene),
            "scene": scene.__name__,
            "args": args,
            "forest": forest,
            "loop": loop,
            "name": name or f"test-{secrets.token_hex(4)}",
        }
    )
    command = [*prefix, sys.executable, "-m", "tests.process.stage", about]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=bound_s,
        check=False,
        pass_fds=fds,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines and code == 0 else None


async def _perform(about: Mapping[str, Any]) -> Any:
    spec = importlib.util.spec_from_file_location("scene_file", about["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scene_file"] = module
    spec.loader.exec_module(module)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    stage = Stage(loop, about["forest"], about["name"])
    try:
        return await getattr(module, about["scene"])(stage, *about["args"])
    finally:
        await stage.close()


def main() -> None:
    """Play the scene that the command line describes; its result goes to standard output."""
    import uvloop

    about = json.loads(sys.argv[1])
    seal_descriptors()
    if os.getpid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # pytest was killed: clean up and go
    factory = uvloop.new_event_loop if about["loop"] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        print(json.dumps(runner.run(_perform(about))))


if __name__ == "__main__":
    main()
