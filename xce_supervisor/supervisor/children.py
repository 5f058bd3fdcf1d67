"""Begins the core's effects on children, and brings back what came of them: the only place that touches their processes.

Each unit has at most one child here, known by its generation. Blocking work (spawn, evidence, looking at files) goes through
the lanes and ends in exactly one event; signals and reading /proc or a cgroup's state are immediate and done on the loop, so that
no full or hung lane can delay a stop (docs/rules.md S6).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from xce_supervisor.config.launch import Launch, launch
from xce_supervisor.config.settings import Config
from xce_supervisor.config.unit import Unit
from xce_supervisor.core import child_words as words
from xce_supervisor.core.words import Binding, Identity
from xce_supervisor.process import evidence, mark, spawn
from xce_supervisor.process.exits import Exited, Exits
from xce_supervisor.process.failure import Signature
from xce_supervisor.process.identity import read_stat, send_signal
from xce_supervisor.process.lanes import Closed, Kind, Lanes, Outcome, Submitted
from xce_supervisor.process.notify import Notice, NotifySocket
from xce_supervisor.process.tree import Forest, start

log = structlog.get_logger()

_SIGNALS = {"TERM": signal.SIGTERM, "CONT": signal.SIGCONT}
# How often a program that could not be executed is looked at again (S13); only while it cannot.
_LOOK_S = 1.0
_EVIDENCE_KEPT = 20

Feed = Callable[[str, words.ChildEvent], None]


class Tokens:
    """Spawn tokens from the kernel's randomness, drawn by the hundred: one system call takes as long as a tenth of a spawn."""

    def __init__(self) -> None:
        self._pool = b""

    def draw(self) -> str:
        """Return 32 hexadecimal digits that were never returned before."""
        if not self._pool:
            self._pool = secrets.token_bytes(16 * 100)
        token, self._pool = self._pool[:16], self._pool[16:]
        return token.hex()


class Stale(Exception):
    """The binding was no longer held when the lane came to spawn: nothing was spawned (S2)."""


@dataclass(slots=True)
class Living:
    """One child on record. identity: None until the spawn has returned."""

    generation: int
    binding: Binding
    token: str
    identity: Identity | None
    started_wall_s: float
    status: str = ""


class Children:
    """All children of one supervisor.

    feed: takes a unit's name and its event, on the loop. held: returns the binding that the role holds now; read in lanes.
    told: returns the controller's last answer, for evidence (S11). wall: returns Unix time, for stamps.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        lanes: Lanes,
        exits: Exits,
        forest: Forest,
        supervisor_mark: str,
        feed: Feed,
        held: Callable[[], Binding | None],
        told: Callable[[], dict[str, Any]],
        wall: Callable[[], float],
    ) -> None:
        self.use(config)
        self.living: dict[str, Living] = {}
        self._loop = loop
        self._lanes = lanes
        self._exits = exits
        self._forest = forest
        self._mark = supervisor_mark
        self._feed = feed
        self._held = held
        self._told = told
        self._wall = wall
        self._random = random.Random(secrets.randbits(64))
        self._tokens = Tokens()
        self._notify: dict[str, NotifySocket] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self._signatures: dict[str, spawn.SpawnError] = {}

    def use(self, config: Config) -> None:
        """Take another configuration for what is begun from now on (reload)."""
        self.config = config
        self._units = {unit.name: unit for unit in config.units}

    def perform(self, unit: str, effect: words.ChildEffect) -> None:
        """Begin one effect. What the system refuses (no descriptor, a full disk) never ends the supervisor (S12)."""
        try:
            self._begin(unit, effect)
        except OSError as error:
            log.error("effect.failed", child=unit, effect=type(effect).__name__, reason=str(error))
            if isinstance(effect, words.Spawn):
                self.living.pop(unit, None)
                self._refused(unit, effect.generation, "shell", error)

    def _begin(self, unit: str, effect: words.ChildEffect) -> None:
        match effect:
            case words.Spawn():
                self._spawn(unit, effect)
            case words.CancelSpawn(generation=generation):
                if self._lanes.cancel(_spawn_key(unit)):
                    del self.living[unit]
                    self._feed(unit, words.SpawnCancelled(generation, "withdrawn before it began"))
            case words.SignalLeader(generation=generation, signal=name):
                living = self._of(unit, generation)
                if living is not None and living.identity is not None:
                    send_signal(living.identity, _SIGNALS[name])
            case words.KillTree(generation=generation):
                self._kill(unit, generation)
            case words.CollectEvidence():
                self._collect(unit, effect)
            case words.Probe(generation=generation):
                self._probe(unit, generation)
            case words.WatchProgram(path=path):
                self._look_later(unit, path)
            case words.ForgetTree(generation=generation):
                if self._of(unit, generation) is not None:
                    del self.living[unit]
            case _:
                raise AssertionError(f"not an effect on a child's processes: {effect}")

    def adopt(self, unit: str, living: Living, survivors: list[Identity]) -> None:
        """Take over a former supervisor's child. survivors: its whole tree as found, the leader first. Blocks briefly."""
        assert living.identity is not None, "a survivor has a leader"
        self.living[unit] = living
        self._forest.tree(unit).adopt_survivors(survivors, living.token)
        self._open_notify(unit)
        self._watch(unit, living)
        self._feed(unit, words.Adopted(living.generation, living.identity, living.binding, living.token))

    def close(self) -> None:
        """Let go of sockets and timers. Children go on."""
        for look in self._looks.values():
            look.cancel()
        for socket in self._notify.values():
            socket.close()

    # ------------------------------------------------------------------ starting

    def _spawn(self, unit: str, effect: words.Spawn) -> None:
        look = self._looks.pop(unit, None)
        if look is not None:
            look.cancel()
        declared = self._units.get(unit)
        assert declared is not None, f"the core starts {unit}, which the configuration does not have"
        self._open_notify(unit)
        token = self._tokens.draw()
        living = Living(effect.generation, effect.binding, token, None, self._wall())
        job = partial(self._spawn_in_lane, declared, living, self._marks(unit, living))
        submitted = self._lanes.submit(_spawn_key(unit), job, partial(self._spawned, unit, living))
        if submitted is Submitted.ACCEPTED:
            self.living[unit] = living
            if unit in self._notify:
                self._notify[unit].hold()
            return
        fault = words.Fault(False, "lane", "", 0, f"cannot start: the lanes are {submitted.value}")
        self._feed(unit, words.SpawnFailed(effect.generation, fault, self._random.random()))

    def _spawn_in_lane(self, unit: Unit, living: Living, marks: Mapping[str, str]) -> Identity:
        """Blocks: everything between the decision and the child's exec."""
        started = launch(self.config, unit, living.binding, living.token, os.environ)
        out = _output(unit, started)
        spec = spawn.SpawnSpec(
            argv=started.argv,
            env={**started.environment, **marks},
            cwd=str(started.cwd),
            umask=started.umask,
            limits=started.limits,
            user=started.user or None,
            group=started.group or None,
            stdout=out,
            stderr=out,
        )
        check = partial(self._check_binding, living)
        return start(spec, self._forest.tree(unit.name), self._exits.births, partial(_warn, unit.name), check)

    def _check_binding(self, living: Living) -> None:
        """In the lane, immediately before the process exists: looking at files before that may have taken minutes (S2)."""
        if living.binding not in (words.ALWAYS, self._held()):
            raise Stale

    def _spawned(self, unit: str, living: Living, outcome: Outcome[Identity]) -> None:
        generation = living.generation
        error = outcome.error
        if error is None:
            living.identity = outcome.unwrap()
            self._signatures.pop(unit, None)
            self._feed(unit, words.Spawned(generation, living.identity, living.token))
            self._watch(unit, living)
            self._listen(unit)
            return
        del self.living[unit]
        if isinstance(error, Stale | Closed):
            reason = "its binding had gone stale in the lane" if isinstance(error, Stale) else str(error)
            self._feed(unit, words.SpawnCancelled(generation, reason))
        elif isinstance(error, OSError):
            self._refused(unit, generation, "lane", error)
        elif isinstance(error, spawn.SpawnError):
            self._signatures[unit] = error
            fault = words.Fault(error.permanent, error.step, error.path, error.errno, error.text)
            self._feed(unit, words.SpawnFailed(generation, fault, self._random.random()))
        else:
            raise error

    def _refused(self, unit: str, generation: int, step: str, error: OSError) -> None:
        """The system refused something around a spawn; that passes by itself (S13)."""
        fault = words.Fault(False, step, str(error.filename or ""), error.errno or 0, f"cannot start: {error}")
        self._feed(unit, words.SpawnFailed(generation, fault, self._random.random()))

    def _marks(self, unit: str, living: Living) -> dict[str, str]:
        """What is added to a child's environment so that it is known again, by us and by the next supervisor (S17)."""
        marks = mark.marks(self._mark, unit, living.token)
        marks["XCE_GENERATION"] = str(living.generation)
        marks["XCE_BINDING"] = binding_text(living.binding)
        socket = self._notify.get(unit)
        if socket is not None:
            marks["NOTIFY_SOCKET"] = socket.address
        return marks

    # ------------------------------------------------------------------ watching

    def _watch(self, unit: str, living: Living) -> None:
        assert living.identity is not None, "only a spawned child is watched"
        if self.living.get(unit) is not living:
            return
        try:
            self._exits.watch(living.identity, partial(self._exited, unit, living.generation))
        except OSError as error:  # no descriptor left: its end waits for us as a zombie, so nothing is lost
            log.error("child.not_watched_yet", child=unit, reason=str(error))
            self._loop.call_later(_LOOK_S, self._watch, unit, living)

    def _exited(self, unit: str, generation: int, exited: Exited) -> None:
        tree = self._forest.tree(unit)
        empty = tree.empty()
        if not empty:
            tree.on_empty(partial(self._emptied, unit, generation))
        self._feed(unit, words.LeaderExited(generation, exited.code, exited.signal, empty, self._random.random()))

    def _emptied(self, unit: str, generation: int) -> None:
        self._feed(unit, words.TreeEmptied(generation, self._random.random()))

    def _kill(self, unit: str, generation: int) -> None:
        living = self._of(unit, generation)
        if living is None:
            return
        self._forest.tree(unit).kill()
        if living.identity is not None:  # the tree may not have taken it in yet
            send_signal(living.identity, signal.SIGKILL)

    def _probe(self, unit: str, generation: int) -> None:
        living = self._of(unit, generation)
        stat = read_stat(living.identity.pid) if living is not None and living.identity is not None else None
        if stat is not None:
            self._feed(unit, words.Probed(generation, stat.state, _cpu_ns(stat.pid)))

    def _collect(self, unit: str, effect: words.CollectEvidence) -> None:
        living = self._of(unit, effect.generation)
        if living is None or living.identity is None:
            return
        folder = self.config.supervisor.state_dir / "evidence"
        job = partial(self._collect_in_lane, unit, living.identity, folder, effect.why)
        done = partial(self._collected, unit, effect.generation)
        if self._lanes.submit(f"evidence:{unit}", job, done, Kind.STOP) is not Submitted.ACCEPTED:
            self._feed(unit, words.EvidenceKept(effect.generation, "none: the lanes are full"))

    def _collect_in_lane(self, unit: str, identity: Identity, folder: Path, why: str) -> str:
        declared = self._units.get(unit)
        log_file = launch(self.config, declared, words.ALWAYS, "", {}).output_file if declared is not None else None
        members = [member for member, _ in self._forest.tree(unit).members()]
        extra = {"why": why, "controller": self._told()}
        return str(evidence.collect(folder, unit, identity, members, log=log_file, extra=extra, keep=_EVIDENCE_KEPT))

    def _collected(self, unit: str, generation: int, outcome: Outcome[str]) -> None:
        text = outcome.value if outcome.error is None else f"none: {outcome.error}"
        self._feed(unit, words.EvidenceKept(generation, text or ""))

    # ------------------------------------------------------------------ a program that could not be executed

    def _look_later(self, unit: str, path: str) -> None:
        if path:
            self._looks[unit] = self._loop.call_later(_LOOK_S, self._look, unit, path)

    def _look(self, unit: str, path: str) -> None:
        self._looks.pop(unit, None)
        submitted = self._lanes.submit(f"look:{unit}", partial(spawn.signature, path), partial(self._looked, unit, path))
        if submitted is not Submitted.ACCEPTED:
            self._look_later(unit, path)

    def _looked(self, unit: str, path: str, outcome: Outcome[Signature]) -> None:
        failed = self._signatures.get(unit)
        if failed is None or failed.path != path or isinstance(outcome.error, Closed):
            return
        if outcome.unwrap() != failed.signature:
            self._feed(unit, words.ProgramChanged())
        else:
            self._look_later(unit, path)

    # ------------------------------------------------------------------ notify sockets

    def _open_notify(self, unit: str) -> None:
        """Give the unit a socket, used by all its children; a sender counts only as a member of the tree."""
        declared = self._units.get(unit)
        if declared is None or declared.readiness.kind == "none" or unit in self._notify:
            return
        path = self.config.supervisor.run_dir / "notify" / f"{unit}.sock"
        path.parent.mkdir(mode=0o755, exist_ok=True)
        socket = NotifySocket(self._loop, path, mode=0o666 if declared.unit.user else 0o600)
        self._notify[unit] = socket
        self._listen(unit)

    def _listen(self, unit: str) -> None:
        """Read what the child says from when its tree is known on; what it said before waits in the socket."""
        socket = self._notify.get(unit)
        if socket is not None:
            socket.listen(self._forest.tree(unit).contains, partial(self._noted, unit))

    def _noted(self, unit: str, notice: Notice) -> None:
        living = self.living.get(unit)
        if living is None or living.identity is None:
            return
        if notice.status is not None:
            living.status = notice.status
        if notice.ready and self._notify_ready(unit):
            self._feed(unit, words.Readied(living.generation))

    def _notify_ready(self, unit: str) -> bool:
        declared = self._units.get(unit)
        return declared is not None and declared.readiness.kind == "notify"

    def _of(self, unit: str, generation: int) -> Living | None:
        living = self.living.get(unit)
        return living if living is not None and living.generation == generation else None


def binding_text(binding: Binding) -> str:
    """Return a binding as one word for a child's environment; read back by `parse_binding`."""
    return f"{binding.term}:{binding.instance_id}:{binding.controller_id}"


def parse_binding(text: str) -> Binding | None:
    """Return the binding that `binding_text` wrote, None if `text` is none."""
    term, _, rest = text.partition(":")
    instance, _, controller = rest.partition(":")
    return Binding(controller, instance, int(term)) if term.isdecimal() else None


def _spawn_key(unit: str) -> str:
    return f"spawn:{unit}"


def _output(unit: Unit, started: Launch) -> spawn.Stdio:
    match unit.output.kind:
        case "journal":
            return spawn.Journal(unit.name, str(started.output_file))
        case "file":
            return spawn.Append(str(started.output_file))
        case "inherit":
            return spawn.Inherit()
        case "null":
            return spawn.Null()


def _cpu_ns(pid: int) -> int:
    """Return the processor time that a process has used, in nanoseconds; 0 when it is gone."""
    try:
        return time.clock_gettime_ns(((~pid) << 3) | 2)  # the kernel's id of the process clock, see clock_getcpuclockid(3)
    except OSError:
        return 0


def _warn(unit: str, text: str) -> None:
    log.warning("child.output_redirected", child=unit, reason=text)
