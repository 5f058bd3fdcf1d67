"""The demo: one command that builds a cluster, breaks it in five ways while jobs run, and says whether every promise held.

The story of a round: the primary is killed; a scheduler is stopped and wedges; a scheduler is killed; a primary is demoted whose
scheduler is deaf to the exit push and to SIGTERM; a supervisor is killed and its scheduler must go on. After each fault the
cluster must be whole again: one primary, and the session of a living scheduler. At the end every job must have run exactly once,
and nothing may be left.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.testbed import client, demo_report
from xce_supervisor.testbed.demo_report import FaultSeen, JobsSeen, Report
from xce_supervisor.testbed.demo_sight import Sight
from xce_supervisor.testbed.demo_stage import Host, Stage, open_stage
from xce_supervisor.wire.words import JobSubmit, JobView

# Bounds of the story, in seconds. A healthy machine needs a tenth of them; a fault that needs more is a violation.
_WHOLE_S = 30.0
_RECOVER_S = 20.0
_JOBS_S = 30.0
_JOB = 'echo "$XCE_JOB_ID $XCE_JOB_ATTEMPT" >> "{runs}"; sleep {sleep}'


@dataclass(frozen=True, slots=True)
class Options:
    """engine: "sqlite" or "etcd". jobs: submitted over the whole run. rounds: of all five faults. keep: a new folder."""

    engine: str = "sqlite"
    controllers: int = 3
    jobs: int = 60
    rounds: int = 1
    seed: int | None = None
    keep: Path | None = None

    def check(self) -> None:
        """Raises ConfigError naming the option, the reason and what to do."""
        if self.engine not in {"sqlite", "etcd"}:
            raise ConfigError(f"--engine {self.engine!r}: write sqlite or etcd")
        if not 2 <= self.controllers <= 9:
            raise ConfigError(f"--controllers {self.controllers}: give 2 to 9, so that there is somebody to fail over to")
        if not 1 <= self.jobs <= 5000 or not 1 <= self.rounds <= 100:
            raise ConfigError("--jobs takes 1 to 5000, --rounds 1 to 100")
        if self.keep is not None and self.keep.exists() and (not self.keep.is_dir() or any(self.keep.iterdir())):
            raise ConfigError(f"--keep {self.keep}: not an empty folder; name one that is new")


@dataclass(slots=True)
class Scene:
    """What can be watched while the demo runs. said: lines of the story so far, with the second at which each was said."""

    sight: Sight
    began_s: float
    said: list[tuple[float, str]] = field(default_factory=list)
    faults: list[FaultSeen] = field(default_factory=list)
    submitted: int = 0
    acting: str = "starting"
    tell: Callable[[Scene], None] = lambda scene: None

    def say(self, text: str) -> None:
        """Add a line to the story."""
        self.said.append((time.monotonic() - self.began_s, text))
        self.tell(self)


async def perform(options: Options, tell: Callable[[Scene], None]) -> Report:
    """Run the demo and return what was seen. tell: called after every change, to draw; must not block.

    Raises ConfigError; cancellation (Ctrl-C) ends everything that was started, first politely, then not.
    """
    options.check()
    folder = _folder(options)
    stage = open_stage(folder, options.engine, options.controllers)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    scene = Scene(Sight(stage), time.monotonic(), tell=tell)
    scene.sight.changed = lambda: tell(scene)
    try:
        await stage.start()
        play = _Play(options, stage, scene, random.Random(seed))
        scene.sight.begin()
        try:
            return await play.run(seed)
        finally:
            await scene.sight.end()
    finally:
        try:
            await asyncio.shield(stage.stop())
        finally:  # also when a second Ctrl-C cuts the polite end short
            stage.close(keep=options.keep is not None)


def _folder(options: Options) -> Path:
    try:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            return options.keep.resolve()
        return Path(tempfile.mkdtemp(prefix="xce-demo-"))
    except OSError as error:
        raise ConfigError(f"the demo's folder cannot be made: {error.strerror}: {error.filename}") from error


class _Play:
    """The story: faults one after the other, jobs all along."""

    def __init__(self, options: Options, stage: Stage, scene: Scene, rng: random.Random) -> None:
        self._options = options
        self._stage = stage
        self._scene = scene
        self._sight = scene.sight
        self._random = rng
        self._violations: list[str] = []
        self._job_ids: list[str] = []
        self._cluster = stage.cluster()
        self._zero_s = 0.0

    async def run(self, seed: int) -> Report:
        """Play all rounds; return the report, after everything was stopped."""
        began_s = time.monotonic()
        if not await self._sight.until(self._sight.served, _WHOLE_S):
            self._violations.append(f"the cluster was not whole {_WHOLE_S:g} s after its start")
        self._zero_s = time.monotonic()
        primary = self._sight.primary()
        if primary is not None:
            self._scene.say(f"the cluster is whole: {primary.name} is primary, its scheduler has joined")
        jobs = asyncio.ensure_future(self._submit())
        try:
            for _ in range(self._options.rounds):
                await self._round()
            await self._finish(jobs)
        finally:
            jobs.cancel()
            await asyncio.gather(jobs, return_exceptions=True)
        return await self._report(seed, began_s)

    async def _round(self) -> None:
        acts: list[tuple[str, Callable[[], Awaitable[tuple[float | None, str]]]]] = [
            ("kill primary", self._kill_primary),
            ("wedge scheduler", self._wedge_scheduler),
            ("kill scheduler", self._kill_scheduler),
            ("demote with deaf scheduler", self._demote_deaf),
            ("kill supervisor", self._kill_supervisor),
        ]
        for kind, act in acts:
            await asyncio.sleep(self._random.uniform(0.1, 0.6))  # a fault has no favourite moment
            if not await self._sight.until(self._sight.served, _RECOVER_S):
                self._violations.append(f"before {kind!r}: the cluster was not whole within {_RECOVER_S:g} s")
                continue
            self._scene.acting = kind
            at_s = time.monotonic() - self._zero_s
            recovered_ms, detail = await act()
            shown = "not recovered" if recovered_ms is None else f"whole again after {recovered_ms:.0f} ms"
            self._scene.say(f"{kind}: {shown}; {detail}")
            self._scene.faults.append(
                FaultSeen(kind=kind, at_s=round(at_s, 2), recovered_ms=_rounded(recovered_ms), detail=detail)
            )
            if recovered_ms is None:
                self._violations.append(f"{kind}: not whole within {_RECOVER_S:g} s; {detail}")
            self._scene.acting = "calm"

    # ------------------------------------------------------------------ faults

    async def _kill_primary(self) -> tuple[float | None, str]:
        host = self._primary()
        assert host.controller is not None
        self._scene.say(f"kill -9 of {host.name}, the primary")
        began_s = time.monotonic()
        host.controller.kill()
        recovered = await self._until_other(host, self._sight.token(host), began_s)
        host.controller.wait()
        self._stage.start_controller(host)
        return recovered, f"{host.name} was killed, {self._name()} serves"

    async def _wedge_scheduler(self) -> tuple[float | None, str]:
        host, pid, token = self._scheduler()
        self._scene.say(f"SIGSTOP of the scheduler (pid {pid}) beside {host.name}: alive, and not acting")
        began_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        recovered = await self._until_new(token, began_s)
        return recovered, f"the wedged scheduler of {host.name} was found out and replaced"

    async def _kill_scheduler(self) -> tuple[float | None, str]:
        host, pid, token = self._scheduler()
        self._scene.say(f"kill -9 of the scheduler (pid {pid}) beside {host.name}")
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return await self._until_new(token, began_s), f"the scheduler of {host.name} came back"

    async def _demote_deaf(self) -> tuple[float | None, str]:
        """Its unit is changed by a reload first, so that the scheduler of this host is deaf; then the primary steps down."""
        host, _, token = self._scheduler()
        assert host.supervisor is not None
        self._stage.write_unit(host, "deaf_term,ignore_exit,no_self_check")
        host.supervisor.send_signal(signal.SIGHUP)
        if await self._until_new(token, time.monotonic()) is None:
            return None, "the reload did not bring up the deaf scheduler"
        _, pid, token = self._scheduler()
        self._scene.say(f"{host.name} steps down; its scheduler (pid {pid}) is deaf to the exit push and to SIGTERM")
        began_s = time.monotonic()
        await client.step_down(self._cluster, address=host.address, hold_ms=3000)
        recovered = await self._until_other(host, token, began_s)
        gone = await self._sight.until(lambda: all(seen.pid != pid for seen in self._sight.schedulers), _RECOVER_S)
        self._stage.write_unit(host, "")
        host.supervisor.send_signal(signal.SIGHUP)
        if not gone:
            return None, f"the deaf scheduler (pid {pid}) of {host.name} is still alive"
        return recovered, f"the deaf scheduler of {host.name} was killed, {self._name()} serves"

    async def _kill_supervisor(self) -> tuple[float | None, str]:
        host, pid, token = self._scheduler()
        assert host.supervisor is not None
        self._scene.say(f"kill -9 of the supervisor beside {host.name}; its scheduler (pid {pid}) must go on")
        began_s = time.monotonic()
        host.supervisor.kill()
        host.supervisor.wait()
        self._stage.start_supervisor(host)
        adopted = await self._sight.until(lambda: self._adopted(host, pid), _RECOVER_S)
        recovered = (time.monotonic() - began_s) * 1000 if adopted else None
        if self._sight.served() != token or all(seen.pid != pid for seen in self._sight.schedulers):
            self._violations.append(f"kill supervisor: the scheduler (pid {pid}) of {host.name} did not go on")
        return recovered, f"the scheduler of {host.name} went on and was adopted by the next supervisor"

    def _adopted(self, host: Host, pid: int) -> bool:
        events = demo_report.journal(host)
        starts = [number for number, event in enumerate(events) if event["kind"] == "supervisor.started"]
        fields = [event["fields"] for event in events[starts[-1] :] if event["kind"] == "child.adopted"] if starts else []
        return any(each.get("pid") == pid for each in fields)

    # ------------------------------------------------------------------ what recovery means

    async def _until_new(self, token: str, began_s: float) -> float | None:
        """Wait for the session of another scheduler. Returns the milliseconds it took."""
        return _took_ms(await self._sight.until(lambda: self._sight.served() not in ("", token), _RECOVER_S), began_s)

    async def _until_other(self, host: Host, token: str, began_s: float) -> float | None:
        """Wait for another primary with its scheduler's session. Returns the milliseconds it took."""

        def other() -> bool:
            primary = self._sight.primary()
            return primary is not None and primary is not host and self._sight.token(primary) not in ("", token)

        return _took_ms(await self._sight.until(other, _RECOVER_S), began_s)

    def _primary(self) -> Host:
        primary = self._sight.primary()
        assert primary is not None, "the cluster is whole before every fault"
        return primary

    def _name(self) -> str:
        primary = self._sight.primary()
        return primary.name if primary is not None else "nobody"

    def _scheduler(self) -> tuple[Host, int, str]:
        """Return the primary's host, the pid of its scheduler and the spawn token of its session."""
        host = self._primary()
        status = self._sight.statuses[host.name]
        pids = [seen.pid for seen in self._sight.living() if seen.host == host.name and seen.term == status.term]
        assert len(pids) == 1, f"{host.name} serves term {status.term} with schedulers {pids}"
        return host, pids[0], self._sight.token(host)

    # ------------------------------------------------------------------ jobs

    async def _submit(self) -> None:
        """Submit all jobs, spread over the story; each is acknowledged before it counts."""
        pause_s = 20.0 * self._options.rounds / self._options.jobs
        for number in range(self._options.jobs):
            job_id = f"demo-{number:05d}"
            sleep = f"{self._random.uniform(0.02, 0.6):.3f}"
            command = ("/bin/sh", "-c", _JOB.format(runs=self._stage.runs, sleep=sleep))
            try:
                await client.submit(self._cluster, JobSubmit(job_id=job_id, command=command), deadline_s=_RECOVER_S)
            except PeerError as error:
                self._violations.append(f"job {job_id} was not taken: {error}")
                continue
            self._job_ids.append(job_id)
            self._scene.submitted = len(self._job_ids)
            self._scene.tell(self._scene)
            await asyncio.sleep(pause_s)

    async def _finish(self, submitting: asyncio.Task[None]) -> None:
        self._scene.acting = "finishing the jobs"
        self._scene.tell(self._scene)
        try:
            await asyncio.wait_for(submitting, _JOBS_S)
            await client.wait_for_jobs(self._cluster, self._job_ids, deadline_s=_JOBS_S)
        except (PeerError, TimeoutError) as error:
            self._violations.append(f"jobs did not end: {error}")

    # ------------------------------------------------------------------ the end

    async def _report(self, seed: int, began_s: float) -> Report:
        try:
            known = {job.job_id: job for job in await client.jobs(self._cluster, deadline_s=_RECOVER_S)}
        except PeerError as error:
            known = {}
            self._violations.append(f"jobs could not be listed: {error}")
        alive_at_end = len(self._sight.living())
        if alive_at_end != 1:
            self._violations.append(f"{alive_at_end} schedulers were alive at the end, not 1")
        self._scene.acting = "stopping"
        self._scene.tell(self._scene)
        await self._sight.end()
        await self._stage.stop()
        orphans = self._stage.leftovers()
        self._violations += [f"left behind: pid {orphan.pid} {_command(orphan)}" for orphan in orphans]
        return self._sum_up(seed, began_s, known, alive_at_end, len(orphans))

    def _sum_up(self, seed: int, began_s: float, known: dict[str, JobView], alive: int, orphans: int) -> Report:
        hosts = self._stage.hosts
        ran = demo_report.runs(self._stage.runs)
        finished = [job_id for job_id in self._job_ids if job_id in known and known[job_id].state == "done" and ran[job_id]]
        twice = [job_id for job_id, count in ran.items() if count > 1]
        lost = [job_id for job_id in self._job_ids if job_id not in finished]
        self._violations += [f"job {job_id} ran {ran[job_id]} times" for job_id in twice]
        self._violations += [f"job {job_id} was lost: {known.get(job_id, 'unknown')}" for job_id in lost]
        most, found = demo_report.overlaps(hosts)
        self._violations += found
        most = max(most, self._sight.per_term_max)
        if most > 1 and not found:
            self._violations.append(f"{most} schedulers of one term were seen alive at once")
        wedges = demo_report.wedge_to_rejoined(hosts)
        return Report(
            ok=not self._violations,
            controllers=len(hosts),
            engine=self._options.engine,
            seed=seed,
            rounds=self._options.rounds,
            took_s=round(time.monotonic() - began_s, 2),
            faults=tuple(self._scene.faults),
            max_schedulers_alive_per_term=most,
            schedulers_alive_at_end=alive,
            jobs=JobsSeen(submitted=len(self._job_ids), finished=len(finished), lost=len(lost), run_twice=len(twice)),
            promote_to_scheduler_joined_ms=demo_report.spread(demo_report.promotions(hosts)),
            wedge_detect_to_rejoined_ms=round(max(wedges), 1) if wedges else None,
            orphan_processes_at_end=orphans,
            violations=tuple(self._violations),
            folder=str(self._stage.folder) if self._options.keep is not None else "",
        )


def _took_ms(happened: bool, began_s: float) -> float | None:
    return (time.monotonic() - began_s) * 1000 if happened else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.Error:
        return "(gone by now)"
