"""A fake world for the supervision core: spawns, trees and a controller that a test scripts, and a clock it moves.

It performs effects the way the shell does, but at once and in memory, and asserts the invariants after every step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import (
    CancelSpawn,
    Child,
    CollectEvidence,
    EvidenceKept,
    ForgetTree,
    KillTree,
    LeaderExited,
    PollRole,
    Probe,
    Probed,
    Record,
    SignalLeader,
    Spawn,
    SpawnCancelled,
    Spawned,
    TreeEmptied,
    UnitPolicy,
    WatchProgram,
)
from xce_supervisor.core.role import Answer, RolePolicy, Session
from xce_supervisor.core.words import NS_PER_MS, Binding, Identity, Now, Role

CONTROLLER = "c1"


@dataclass
class Process:
    """A fake child. deaf: ignores TERM. immortal: survives KILL (D state). leftovers: keeps the tree after the leader."""

    unit: str
    generation: int
    binding: Binding
    token: str
    identity: Identity
    deaf: bool = False
    immortal: bool = False
    leftovers: bool = False
    alive: bool = True
    tree_alive: bool = True
    signals: list[str] = field(default_factory=list)


class World:
    """One supervisor's core with one unit unless told otherwise. Time starts at 1000 s and moves by `advance`."""

    def __init__(
        self, *, units: dict[str, UnitPolicy] | None = None, role: RolePolicy | None = None, held: Binding | None = None
    ) -> None:
        self.policy = sup.Policy(role or RolePolicy(CONTROLLER), units or {"scheduler": UnitPolicy("scheduler")})
        self.now = Now(10**12, 10**12)
        self.state = sup.initial(self.now, self.policy, held)
        self.processes: list[Process] = []
        self.records: list[tuple[str, Record]] = []
        self.polls = 0
        self.left = False
        self.slow_spawn = False
        self.slow_evidence = False
        self.in_flight: list[tuple[str, Spawn]] = []
        self.evidence: list[tuple[str, CollectEvidence]] = []
        self.watched: list[str] = []
        self.next_deaf = False
        self.next_immortal = False
        self.next_leftovers = False
        self.probe_state = "S"
        self.probe_cpu_ns = 0
        self._queue: deque[sup.Event] = deque()
        self._busy = False

    # ---- events

    def feed(self, event: sup.Event) -> None:
        """Step, then perform; what an effect makes happen is queued behind the effects before it, as on the driver's loop."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        while self._queue:
            self.state, effects = sup.step(self.state, self._queue.popleft(), self.now, self.policy)
            for effect in effects:
                self._perform(effect)
            self.check()
        self._busy = False

    def happened(self, unit: str, event: object) -> None:
        self.feed(sup.ChildHappened(unit, event))  # type: ignore[arg-type]

    def answer(
        self, role: Role = Role.PRIMARY, term: int = 1, instance: str = "i1", session: Session | None = None, **more: object
    ) -> None:
        self.feed(sup.Answered(Answer(self.now, CONTROLLER, instance, role, term, session=session, **more)))  # type: ignore[arg-type]

    def joined(
        self, term: int = 1, pushed: int = 0, acted: int = 0, oldest_ms: int | None = None, token: str | None = None
    ) -> None:
        """The controller is primary and holds our newest child's session."""
        shown = self.processes[-1].token if token is None else token
        oldest = None if oldest_ms is None else oldest_ms * NS_PER_MS
        self.answer(term=term, session=Session(True, "scheduler", shown, pushed, acted, oldest))

    def joined_with_gap(self, oldest_ms: int, gap_ms: int) -> None:
        """As `joined`, with a push not acted on and the controller's own pause."""
        session = Session(True, "scheduler", self.processes[-1].token, 6, 5, oldest_ms * NS_PER_MS)
        self.answer(session=session, loop_gap_ns=gap_ms * NS_PER_MS)

    def advance(self, ms: float, *, tick: bool = True) -> None:
        """Move both clocks; wake at every deadline on the way, as the driver's one timer does."""
        end = self.now.mono_ns + int(ms * NS_PER_MS)
        while tick:
            deadline = sup.next_deadline(self.state, self.policy)
            if deadline is None or deadline.mono_ns > end:
                break
            self.now = Now(max(self.now.mono_ns, deadline.mono_ns), max(self.now.boot_ns, deadline.boot_ns))
            before = self.state
            self.feed(sup.TimePassed())
            assert self.state != before, "a deadline that changes nothing would spin"
        moved = end - self.now.mono_ns
        self.now = Now(end, self.now.boot_ns + moved)

    def die(self, code: int | None = None, signal: int | None = 9, draw: float = 0.5) -> None:
        process = self.processes[-1]
        assert process.alive, "only the living die"
        process.alive = False
        process.tree_alive = process.leftovers
        self.happened(process.unit, LeaderExited(process.generation, code, signal, not process.tree_alive, draw))

    def finish_spawns(self) -> None:
        flights, self.in_flight = self.in_flight, []
        for unit, spawn in flights:
            self._spawned(unit, spawn)

    # ---- effects

    def _perform(self, effect: sup.Effect) -> None:
        match effect:
            case PollRole():
                self.polls += 1
            case Record():
                self.records.append(("", effect))
            case sup.Leave():
                self.left = True
            case sup.ForUnit(unit, inner):
                self._perform_child(unit, inner)

    def _perform_child(self, unit: str, effect: object) -> None:
        match effect:
            case Spawn():
                assert not [p for p in self.processes if p.unit == unit and p.tree_alive], "S5: one tree a unit"
                assert not [f for f in self.in_flight if f[0] == unit], "one spawn in flight a unit"
                if self.slow_spawn:
                    self.in_flight.append((unit, effect))
                else:
                    self._spawned(unit, effect)
            case CancelSpawn(generation):
                for flight in list(self.in_flight):
                    if flight[0] == unit and flight[1].generation == generation:
                        self.in_flight.remove(flight)
                        self.happened(unit, SpawnCancelled(generation, "withdrawn"))
            case SignalLeader(generation, signal):
                process = self._of(unit, generation)
                process.signals.append(signal)
                if signal == "TERM" and process.alive and not process.deaf:
                    process.alive, process.tree_alive = False, process.leftovers
                    self.happened(unit, LeaderExited(generation, 0, None, not process.tree_alive, 0.5))
            case KillTree(generation):
                process = self._of(unit, generation)
                process.signals.append("KILL")
                if not process.immortal:
                    self.bury(process)
            case CollectEvidence(generation, _):
                self.evidence.append((unit, effect))
                if not self.slow_evidence:
                    self.happened(unit, EvidenceKept(generation, "/evidence"))
            case Probe(generation):
                self.happened(unit, Probed(generation, self.probe_state, self.probe_cpu_ns))
            case WatchProgram(path):
                self.watched.append(path)
            case PollRole():
                self.polls += 1
            case Record():
                self.records.append((unit, effect))
            case ForgetTree(generation):
                assert not self._of(unit, generation).tree_alive, "a living tree is not forgotten"
            case _:
                raise AssertionError(effect)

    def bury(self, process: Process) -> None:
        """The whole tree is gone."""
        was_alive, process.alive, process.tree_alive = process.alive, False, False
        if was_alive:
            self.happened(process.unit, LeaderExited(process.generation, None, 9, True, 0.5))
        else:
            self.happened(process.unit, TreeEmptied(process.generation, 0.5))

    def _spawned(self, unit: str, spawn: Spawn) -> None:
        token = f"t{len(self.processes)}"
        identity = Identity(100 + len(self.processes), 7, "boot")
        process = Process(
            unit, spawn.generation, spawn.binding, token, identity, self.next_deaf, self.next_immortal, self.next_leftovers
        )
        self.processes.append(process)
        self.happened(unit, Spawned(spawn.generation, identity, token))

    def _of(self, unit: str, generation: int) -> Process:
        return next(p for p in self.processes if p.unit == unit and p.generation == generation)

    # ---- facts

    @property
    def child(self) -> Child:
        return self.state.children["scheduler"]

    @property
    def alive(self) -> list[Process]:
        return [p for p in self.processes if p.tree_alive]

    def kinds(self) -> list[str]:
        return [record.kind for _, record in self.records]

    def check(self) -> None:
        for unit in self.policy.units:
            assert len([p for p in self.processes if p.unit == unit and p.tree_alive]) <= 1, "S5: at most one tree a unit"
