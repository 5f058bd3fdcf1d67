"""Keeps on disk what the next supervisor and `status` need, one write at a time, behind the driver's back.

Two files: the state file (who lives, what is paused), durable; and the last status, which `status` shows when we do not answer.
Both are written in a lane shortly after something changed; changes that come meanwhile are written together. What a crash takes
with it is found by the marks that children bear (docs/rules.md S17). A disk that is full or hangs costs freshness, never
supervision (docs/rules.md S20).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from xce_supervisor.core.child_words import Child, Record, Running
from xce_supervisor.core.supervision import State
from xce_supervisor.process.lanes import Closed, Lanes, Outcome, Submitted
from xce_supervisor.supervisor.children import Living
from xce_supervisor.supervisor.records import Records
from xce_supervisor.supervisor.statefile import ChildRecord, PauseRecord, Saved, StateFile, replace_file
from xce_supervisor.supervisor.statefile import State as Kept
from xce_supervisor.supervisor.view import View

_KEY = "keep"
# Long enough for a burst of a hundred exits to be one write.
_DELAY_S = 0.05
# The picture is for when we do not answer; making it costs more than writing it, so it is not made more often than this.
_PICTURE_S = 1.0
_RETRY_S = 5.0


class Keeper:
    """state, living: return what is to be kept, as of now. status: makes the picture that is written beside it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: Lanes,
        state_file: StateFile,
        last_status: Path,
        records: Records,
        what: Callable[[], Kept],
        status: Callable[[], View],
    ) -> None:
        self._loop = loop
        self._lanes = lanes
        self._state_file = state_file
        self._last_status = last_status
        self._records = records
        self._what = what
        self._status = status
        self._seen = -1
        self._timer: asyncio.TimerHandle | None = None
        self._picturing: asyncio.TimerHandle | None = None
        self.problem = ""

    def keep(self) -> None:
        """Write soon if any event was recorded since the last time. Costs nothing when none was."""
        if self._records.count != self._seen and self._timer is None and not self._lanes.in_flight(_KEY):
            self._timer = self._loop.call_later(_DELAY_S, self._submit)

    def save(self) -> None:
        """Write once more, when the lanes are closed. Blocks for one write, unless a lane hangs in one."""
        for timer in (self._timer, self._picturing):
            if timer is not None:
                timer.cancel()
        if not self._lanes.in_flight(_KEY):
            self._write(self._what(), self._status())

    def _submit(self) -> None:
        self._timer = None
        seen = self._records.count
        if self._lanes.submit(_KEY, partial(self._write, self._what(), None), self._written) is Submitted.ACCEPTED:
            self._seen = seen  # else the lanes are full: tried again after the next event
        if self._picturing is None:
            self._picturing = self._loop.call_later(_PICTURE_S, self._draw)

    def _draw(self) -> None:
        self._picturing = None
        if self._lanes.submit(f"{_KEY} picture", partial(self._write, None, self._status()), _drawn) is not Submitted.ACCEPTED:
            self._picturing = self._loop.call_later(_PICTURE_S, self._draw)

    def _write(self, state: Kept | None, picture: View | None) -> Saved:
        """Blocks: a lane's work."""
        saved = self._state_file.save(state, time.time()) if state is not None else Saved()
        if picture is not None:
            with contextlib.suppress(OSError):  # run_dir is full or gone: `status` then shows an older picture, with its age
                replace_file(self._last_status, msgspec.json.encode(picture), durable=False)
        return saved

    def _written(self, outcome: Outcome[Saved]) -> None:
        if isinstance(outcome.error, Closed):
            return  # the end is near, and `save` writes once more
        saved = outcome.unwrap()
        self.problem = saved.problem
        if saved.news:
            self._records.take("", Record("state.problem" if saved.problem else "state.saved_again", saved.problem))
        if saved.problem and self._timer is None:  # also in calm: a pause must not be lost because the disk was full for a moment
            self._timer = self._loop.call_later(_RETRY_S, self._submit)
        self.keep()


def _drawn(_outcome: Outcome[Saved]) -> None:
    """A picture that could not be written is replaced by the next one."""


def kept(state: State, living: Mapping[str, Living]) -> Kept:
    """Return what the state file holds for this state."""
    children = tuple(_record(unit, each, state.children.get(unit)) for unit, each in sorted(living.items()) if each.identity)
    pauses = tuple(
        PauseRecord(unit=unit, by=child.pause.by, why=child.pause.why, since_wall_s=child.pause.since_wall_s)
        for unit, child in sorted(state.children.items())
        if child.pause is not None
    )
    return Kept(children=children, pauses=pauses, generations={unit: child.generation for unit, child in state.children.items()})


def _record(unit: str, living: Living, child: Child | None) -> ChildRecord:
    assert living.identity is not None, "only spawned children are written down"
    return ChildRecord(
        unit=unit,
        generation=living.generation,
        pid=living.identity.pid,
        start_ticks=living.identity.start_ticks,
        boot_id=living.identity.boot_id,
        token=living.token,
        controller_id=living.binding.controller_id,
        instance_id=living.binding.instance_id,
        term=living.binding.term,
        ready=child is not None and isinstance(child.life, Running) and child.life.ready_at is not None,
        started_wall_s=living.started_wall_s,
    )
