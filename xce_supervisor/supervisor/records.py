"""Where events go: the journal on disk, the log, and the last ten of each unit in memory (docs/rules.md S23)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from xce_supervisor.core.child_words import Record
from xce_supervisor.supervisor import clock
from xce_supervisor.supervisor.journal import Journal
from xce_supervisor.supervisor.view import EVENTS_SHOWN, Event, Plain

log = structlog.get_logger()

# What is loud in the log; everything else is information.
_WARNINGS = frozenset(
    {
        "child.wedged",
        "child.unkillable",
        "child.spawn_failed",
        "child.killed",
        "child.leftovers_killed",
        "child.paused",
        "child.session_lost",
        "loop.gap_seen",
        "role.doubted",
        "role.let_go",
        "state.refused",
        "state.problem",
        "tls.kept_old",
    }
)


class Records:
    """Takes every event once. wall: returns Unix time, for the stamps that people read."""

    def __init__(self, journal: Journal, wall: Callable[[], float]) -> None:
        self._journal = journal
        self._wall = wall
        self.recent: dict[str, deque[Event]] = {}
        self.count = 0

    def take(self, unit: str, record: Record) -> None:
        """Keep one event. unit: "" for the role and the supervisor itself."""
        self.count += 1
        wall = self._wall()
        fields: dict[str, Plain] = dict(record.fields)
        self._journal.append(record.kind, clock.now(), unit=unit, reason=record.reason, fields=fields, wall=wall)
        event = Event(wall=wall, kind=record.kind, reason=record.reason, fields=fields)
        self.recent.setdefault(unit, deque(maxlen=EVENTS_SHOWN)).append(event)
        keys = {**fields, **({"child": unit} if unit else {}), **({"reason": record.reason} if record.reason else {})}
        if record.kind in _WARNINGS:
            log.warning(record.kind, **keys)
        else:
            log.info(record.kind, **keys)
