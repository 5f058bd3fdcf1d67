"""Where events go: the journal on disk, the log, and the last ten of each unit in memory (docs/rules.md S23)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from xce_supervisor.core.child_words import Record
from xce_supervisor.core.words import Now
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


# Writing waits this long, so that what an event leads to (a spawn) is begun before anybody writes about it.
_DELAY_S = 0.005


class Records:
    """Takes every event once. wall: returns Unix time, for the stamps that people read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, journal: Journal, wall: Callable[[], float]) -> None:
        self._loop = loop
        self._journal = journal
        self._wall = wall
        self._waiting: list[tuple[str, Record, Now, float]] = []
        self._recent: dict[str, deque[Event]] = {}
        self.count = 0

    def take(self, unit: str, record: Record) -> None:
        """Keep one event. unit: "" for the role and the supervisor itself. Its time is now; it is written within milliseconds."""
        self.count += 1
        if not self._waiting:
            self._loop.call_later(_DELAY_S, self.flush)
        self._waiting.append((unit, record, clock.now(), self._wall()))

    @property
    def recent(self) -> dict[str, deque[Event]]:
        """The last events of each unit, oldest first."""
        self.flush()
        return self._recent

    def flush(self) -> None:
        """Hand everything taken so far to the journal's thread and to the log."""
        waiting, self._waiting = self._waiting, []
        for unit, record, now, wall in waiting:
            self._write(unit, record, now, wall)

    def _write(self, unit: str, record: Record, now: Now, wall: float) -> None:
        fields: dict[str, Plain] = dict(record.fields)
        self._journal.append(record.kind, now, unit=unit, reason=record.reason, fields=fields, wall=wall)
        event = Event(wall=wall, kind=record.kind, reason=record.reason, fields=fields)
        self._recent.setdefault(unit, deque(maxlen=EVENTS_SHOWN)).append(event)
        keys = {**fields, **({"child": unit} if unit else {}), **({"reason": record.reason} if record.reason else {})}
        if record.kind in _WARNINGS:
            log.warning(record.kind, **keys)
        else:
            log.info(record.kind, **keys)
