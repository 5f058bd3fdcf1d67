"""What the demo proves at the end, from what is on disk: the supervisors' journals, the controllers' logs, the jobs' marks."""

from __future__ import annotations

import datetime
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec import Struct

from xce_supervisor.testbed.demo_stage import Host


class FaultSeen(Struct, frozen=True, kw_only=True):
    """One fault of the story. at_s: seconds since the cluster was whole. recovered_ms: until it was whole again; None: never."""

    kind: str
    at_s: float
    recovered_ms: float | None
    detail: str = ""


class JobsSeen(Struct, frozen=True, kw_only=True):
    """finished: ended as done. lost: submitted and answered, and not known or not finished at the end. run_twice: run again."""

    submitted: int
    finished: int
    lost: int
    run_twice: int


class Spread(Struct, frozen=True, kw_only=True):
    """Milliseconds; None where nothing was measured."""

    p50: float | None
    max: float | None


class Report(Struct, frozen=True, kw_only=True):
    """What `demo --json` prints."""

    ok: bool
    controllers: int
    engine: str
    seed: int
    rounds: int
    took_s: float
    faults: tuple[FaultSeen, ...]
    max_schedulers_alive_per_term: int
    schedulers_alive_at_end: int
    jobs: JobsSeen
    promote_to_scheduler_joined_ms: Spread
    wedge_detect_to_rejoined_ms: float | None
    orphan_processes_at_end: int
    violations: tuple[str, ...]
    folder: str = ""


def journal(host: Host) -> list[dict[str, Any]]:
    """Return a supervisor's events in order; a torn last line is passed over."""
    found: list[dict[str, Any]] = []
    for path in (host.journal.with_name("journal.jsonl.1"), host.journal):
        found += _lines(path)
    return found


def overlaps(hosts: list[Host]) -> tuple[int, list[str]]:
    """Return how many schedulers of one term were alive at most at one instant by the journals, and where it was more than one.

    All hosts of the demo share CLOCK_MONOTONIC, so spawns and ends of different journals can be compared.
    """
    edges: dict[int, list[tuple[int, int, str]]] = {}
    for host in hosts:
        alive: set[tuple[int, int]] = set()
        events = journal(host)
        for number, event in enumerate(events):
            if event["kind"] == "supervisor.started":  # what died while nobody watched was not adopted
                for gone in alive - _adopted(events[number + 1 :]):
                    alive.discard(gone)
                    edges.setdefault(gone[0], []).append((event["mono_ns"], -1, f"{host.name} generation {gone[1]}"))
                continue
            fields = event.get("fields", {})
            key = (int(fields.get("term") or 0), int(fields.get("generation") or 0))
            who = f"{host.name} generation {key[1]}"
            if event["kind"] == "child.spawned" and key not in alive:
                alive.add(key)
                edges.setdefault(key[0], []).append((event["mono_ns"], 1, who))
            elif event["kind"] == "child.exited" and key in alive:
                alive.discard(key)
                edges.setdefault(key[0], []).append((event["mono_ns"], -1, who))
    most, found = 0, []
    for term, changes in sorted(edges.items()):
        count = 0
        for _, change, who in sorted(changes):
            count += change
            most = max(most, count)
            if count > 1:
                found.append(f"{count} schedulers of term {term} were alive at once by the journals, the last one {who}")
    return most, found


def _adopted(events: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """Return the children that a supervisor adopted, as (term, generation); `events` begin after its start."""
    found: set[tuple[int, int]] = set()
    for event in events:
        if event["kind"] == "supervisor.started":
            break
        if event["kind"] == "child.adopted":
            found.add((int(event["fields"].get("term") or 0), int(event["fields"].get("generation") or 0)))
    return found


def promotions(hosts: list[Host]) -> list[float]:
    """Return, for each promotion, the milliseconds from the controller's own record of it to its scheduler's session."""
    found: list[float] = []
    for host in hosts:
        promoted = {
            int(line["term"]): _wall(line["at"])
            for line in _lines(host.folder / "controller.log")
            if line.get("event") == "role.promoted"
        }
        first: dict[int, float] = {}
        for event in journal(host):
            if event["kind"] == "child.joined":
                first.setdefault(int(event["fields"].get("term") or 0), float(event["wall"]))
        found += [(first[term] - at) * 1000 for term, at in promoted.items() if term in first]
    return found


def wedge_to_rejoined(hosts: list[Host]) -> list[float]:
    """Return, for each wedge, the milliseconds from its detection to the next session."""
    found: list[float] = []
    for host in hosts:
        detected: int | None = None
        for event in journal(host):
            if event["kind"] == "child.wedged":
                detected = int(event["mono_ns"])
            elif event["kind"] == "child.joined" and detected is not None:
                found.append((int(event["mono_ns"]) - detected) / 1e6)
                detected = None
    return found


def spread(values: list[float]) -> Spread:
    """Return median and maximum, rounded to a tenth of a millisecond."""
    if not values:
        return Spread(p50=None, max=None)
    return Spread(p50=round(statistics.median(values), 1), max=round(max(values), 1))


def runs(path: Path) -> Counter[str]:
    """Return how often each job ran, by the lines that the jobs themselves appended."""
    if not path.exists():
        return Counter()
    return Counter(line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _wall(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
