"""How long the event loop stands still while children are started, and how soon their ends are noticed.

    python benchmarks/spawn.py [--spawns N] [--hangs N] [--real-time] [--json]

Two processes are measured one after the other, a small one and one that holds 1 GB. In each, by turns so that noise falls on
all alike:

    lanes   our own way: slow lane, look at the program, os.posix_spawn, move to the unit's tree, pidfd in the loop
    inline  os.posix_spawn called in the event loop itself, pidfd in the loop
    none    the loop alone for as long: what the machine does to it without any spawn

`gap` is the longest time between two turns of a loop that does nothing but turn. `hang` is the gap while the exec of a program
hangs 300 ms: somebody holds a write lease on its file (fcntl F_SETLEASE) and gives it back after 300 ms, as a stalled network
mount would. Figures (docs/decisions/0002-spawn.md): gap p99 at most 5 ms, hang at most 10 ms, on a calm machine;
where others work too, `none` shows what they cost, and --real-time (as root) keeps them out.

`known` is the time from asking for a child to knowing who it is, tree included, while the loop sleeps, as it does in real life.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from xce_supervisor.core.words import Identity
from xce_supervisor.process.births import Births
from xce_supervisor.process.exits import Exited, Exits
from xce_supervisor.process.identity import open_pidfd, read_identity
from xce_supervisor.process.lanes import Lanes, Outcome
from xce_supervisor.process.mark import marks
from xce_supervisor.process.spawn import SpawnSpec
from xce_supervisor.process.tree import open_forest, start

SIZES_MB = {"small": 0, "1 GB": 1024}
GAP_P99_MS = 5.0
HANG_MS = 10.0
_HANG_S = 0.3
_PATH = {"PATH": "/usr/bin:/bin"}

# Holds a write lease on a file until somebody opens it, and for 300 ms more.
_LEASE = """
import fcntl, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
for line in sys.stdin:
    fd = os.open(sys.argv[1], os.O_RDONLY)
    for _ in range(2000):
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            break
        except OSError:
            time.sleep(0.002)
    os.write(1, b"h")
    if signal.sigtimedwait({signal.SIGIO}, 10) is None:
        break
    time.sleep(float(sys.argv[2]))
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(fd)
"""


class Gap:
    """A loop that does nothing but turn, and the longest time between two of its turns, in nanoseconds."""

    def __init__(self) -> None:
        self.worst_ns = 0
        self._last_ns = time.monotonic_ns()
        self._task = asyncio.ensure_future(self._run())

    async def of(self, work: Callable[[], Awaitable[object]]) -> float:
        """Return the gap in milliseconds while `work` goes on."""
        await asyncio.sleep(0)
        self.worst_ns, self._last_ns = 0, time.monotonic_ns()
        await work()
        await asyncio.sleep(0)
        return self.worst_ns / 1e6

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            self.worst_ns = max(self.worst_ns, now_ns - self._last_ns)
            self._last_ns = now_ns
            await asyncio.sleep(0)


class Bench:
    """One measured process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self.loop = loop
        self.exits = Exits(loop, Births())
        self.exits.reap_orphans()
        self.lanes = Lanes(loop)
        self.forest = open_forest(loop, f"bench-{secrets.token_hex(4)}", self.exits.births)
        self.folder = folder
        self.numbers: dict[str, list[float]] = {}
        self.loop_sleeps = False

    def note(self, name: str, value: float) -> None:
        self.numbers.setdefault(name, []).append(value)

    async def by_lanes(self, program: str, *args: str) -> Identity:
        """Start a child our way; return when the loop knows it."""
        future: asyncio.Future[Outcome[Identity]] = self.loop.create_future()
        spec = SpawnSpec((program, *args), {**_PATH, **marks("bench", "u", secrets.token_hex(8))})
        job = partial(start, spec, self.forest.tree("u"), self.exits.births, print)
        began = time.monotonic_ns()
        self.lanes.submit("spawn:u", job, future.set_result)
        identity = (await future).unwrap()
        if self.loop_sleeps:
            self.note("lanes: known ms", (time.monotonic_ns() - began) / 1e6)
        return identity

    async def inline(self, program: str, *args: str) -> Identity:
        """Start a child in the loop."""
        began = time.monotonic_ns()
        pid = os.posix_spawn(program, [program, *args], _PATH, setsigmask=[])
        if self.loop_sleeps:
            self.note("inline: known ms", (time.monotonic_ns() - began) / 1e6)
        identity = read_identity(pid)
        assert identity is not None, "nobody else reaps"
        return identity

    async def end(self, way: str, identity: Identity, kill: bool) -> None:
        """Wait for the child's end; with `kill`, note how long it took to be noticed."""
        future: asyncio.Future[Exited] = self.loop.create_future()
        self.exits.watch(identity, future.set_result)
        if kill:
            await asyncio.sleep(0.005)  # let it settle, and the loop go to sleep
            began = time.monotonic_ns()
            os.kill(identity.pid, signal.SIGKILL)
            await future
            self.note(f"{way}: exit noticed us", (time.monotonic_ns() - began) / 1e3)
        await future

    async def gaps(self, count: int) -> None:
        """The gap per spawn, by turns."""
        gap = Gap()
        ways = {"lanes": self.by_lanes, "inline": self.inline}

        async def one(name: str) -> None:
            identity = await ways[name]("/bin/true")
            await self.end(name, identity, kill=False)

        for _ in range(count):
            for name in random.sample(["lanes", "inline", "none"], 3):
                took = await gap.of(partial(asyncio.sleep, 0.004) if name == "none" else partial(one, name))
                self.note(f"{name}: gap ms", took)
        gap.close()

    async def hangs(self, count: int) -> None:
        """The gap while an exec hangs, by turns."""
        program = self.folder / "leased"
        shutil.copy("/bin/true", program)
        command = [sys.executable, "-c", _LEASE, str(program), str(_HANG_S)]
        holder = await asyncio.to_thread(partial(LeaseHolder, command))
        gap = Gap()

        async def one(way: Callable[..., Awaitable[Identity]], name: str) -> None:
            began = time.monotonic()
            identity = await way(str(program))
            assert time.monotonic() - began > _HANG_S * 0.9, "the exec did not hang: nothing was measured"
            await self.end(name, identity, kill=False)

        try:
            for _ in range(count):
                for name, way in (("lanes", self.by_lanes), ("inline", self.inline)):
                    holder.arm()
                    self.note(f"{name}: hang ms", await gap.of(partial(one, way, name)))
                self.note("none: hang ms", await gap.of(partial(asyncio.sleep, _HANG_S)))
        finally:
            gap.close()
            await holder.close()

    async def exit_times(self, count: int) -> None:
        """From SIGKILL to the callback, and to a bare poll(2) on a pidfd for comparison."""
        self.loop_sleeps = True
        for _ in range(count):
            await self.end("lanes", await self.by_lanes("/bin/sleep", "60"), kill=True)
            await self.end("inline", await self.inline("/bin/sleep", "60"), kill=True)
            pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], _PATH, setsigmask=[])
            identity = read_identity(pid)
            assert identity is not None, "nobody else reaps"
            fd = open_pidfd(identity)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            time.sleep(0.005)
            began = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
            poll.poll()
            self.note("floor: exit noticed us", (time.monotonic_ns() - began) / 1e3)
            os.waitid(os.P_PIDFD, fd, os.WEXITED)
            os.close(fd)
        self.loop_sleeps = False

    async def close(self) -> None:
        await self.lanes.close(5.0)
        self.forest.close()
        self.exits.close()


class LeaseHolder:
    """The process that holds the lease, with a byte to ask for it and a byte when it holds."""

    def __init__(self, command: list[str]) -> None:
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, theirs_in, 0), (os.POSIX_SPAWN_DUP2, theirs_out, 1)]
        self._pid = os.posix_spawn(command[0], command, {**os.environ}, file_actions=actions, setsigmask=[])
        os.close(theirs_in)
        os.close(theirs_out)

    def arm(self) -> None:
        os.write(self._in, b"x\n")
        assert os.read(self._out, 1) == b"h", "the lease was not given"

    async def close(self) -> None:
        """End it and wait until the reaper of orphans has collected it: it lives in our cgroup, which could not go before."""
        os.close(self._in)
        os.close(self._out)
        give_up = time.monotonic() + 15.0
        while os.path.exists(f"/proc/{self._pid}") and time.monotonic() < give_up:
            await asyncio.sleep(0.01)


async def measure(size_mb: int, spawns: int, hangs: int) -> dict[str, Any]:
    """Measure this process and return its numbers."""
    held = bytearray(size_mb << 20)
    for at in range(0, len(held), 4096):
        held[at] = 1
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asyncio.get_running_loop(), Path(folder))
        for _ in range(5):  # warm up: threads, their own contexts, the page cache
            await bench.end("lanes", await bench.by_lanes("/bin/true"), kill=False)
        bench.numbers.clear()
        await bench.gaps(spawns)
        await bench.exit_times(max(10, spawns // 4))
        await bench.hangs(hangs)
        await bench.close()
    with open("/proc/self/statm", encoding="ascii") as file:
        rss_mb = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {"rss_mb": rss_mb, "tree": bench.forest.why, "numbers": bench.numbers}


def quantile(values: list[float], part: float) -> float:
    """Return the value below which `part` of them lie."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def show(found: dict[str, dict[str, Any]]) -> bool:
    """Print a table for people; return whether both figures are met."""
    met = True
    for size, result in found.items():
        numbers = result["numbers"]
        print(f"\n{size} process, {result['rss_mb']} MB resident, {result['tree']}")
        print(f"  {'':24}{'n':>5}{'p50':>10}{'p99':>10}{'worst':>10}")
        for name in sorted(numbers):
            values = numbers[name]
            row = [quantile(values, 0.5), quantile(values, 0.99), max(values)]
            print(f"  {name:24}{len(values):>5}" + "".join(f"{value:>10.2f}" for value in row))
        gap, hang = quantile(numbers["lanes: gap ms"], 0.99), max(numbers["lanes: hang ms"])
        for what, value, figure in (("gap p99", gap, GAP_P99_MS), ("hang, worst", hang, HANG_MS)):
            met = met and value <= figure
            print(f"  {what}: {value:.2f} ms, figure {figure:.0f} ms: {'met' if value <= figure else 'MISSED'}")
    with open("/proc/loadavg", encoding="ascii") as file:
        print(f"\nload average {file.read().split()[0]}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    return met


def main() -> int:
    """Measure both sizes, each in a process of its own. Returns 0 when the figures are met, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spawns", type=int, default=200, help="spawns per way and size (200)")
    parser.add_argument("--hangs", type=int, default=10, help="hung execs per way and size (10)")
    parser.add_argument("--real-time", action="store_true", help="run before everybody else on this machine (root)")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--size-mb", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if options.size_mb is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(measure(options.size_mb, options.spawns, options.hangs))))
        return 0
    found = {}
    for size, size_mb in SIZES_MB.items():
        command = [sys.executable, __file__, "--spawns", str(options.spawns), "--hangs", str(options.hangs)]
        command += ["--real-time"] if options.real_time else []
        done = subprocess.run([*command, "--size-mb", str(size_mb)], stdout=subprocess.PIPE, check=True, timeout=600)
        found[size] = json.loads(done.stdout)
    if options.json:
        print(json.dumps(found))
        return 0
    return 0 if show(found) else 1


if __name__ == "__main__":
    sys.exit(main())
