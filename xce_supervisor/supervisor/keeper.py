"""Keeps on disk what the next supervisor and `status` need, one write at a time, behind the driver's back.

Two files: the state file (who lives, what is paused), durable; and the last status, which `status` shows when we do not answer.
Both are written in a lane after something changed; changes that come meanwhile are written together afterwards. A disk that is
full or hangs costs freshness, never supervision (docs/rules.md S20).
"""

from __future__ import annotations

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


class Keeper:
    """status: makes the picture that is written beside the state."""

    def __init__(
        self, lanes: Lanes, state_file: StateFile, last_status: Path, records: Records, status: Callable[[], View]
    ) -> None:
        self._lanes = lanes
        self._state_file = state_file
        self._last_status = last_status
        self._records = records
        self._status = status
        self._seen = -1
        self._again = False
        self._state: State | None = None
        self.problem = ""

    def keep(self, state: State, living: Mapping[str, Living]) -> None:
        """Write soon if any event was recorded since the last time. Cheap when none was."""
        if self._records.count == self._seen:
            return
        self._seen = self._records.count
        if self._lanes.in_flight(_KEY):
            self._again = True
            return
        self._submit(state, living)

    def save(self, state: State, living: Mapping[str, Living]) -> None:
        """Write once more, when the lanes are closed. Blocks for one write, unless a lane hangs in one."""
        if not self._lanes.in_flight(_KEY):
            self._write(kept(state, living), self._status())

    def _submit(self, state: State, living: Mapping[str, Living]) -> None:
        job = partial(self._write, kept(state, living), self._status())
        done = partial(self._written, lambda: self.keep(state, living))
        if self._lanes.submit(_KEY, job, done) is not Submitted.ACCEPTED:
            self._seen = -1  # the lanes are full: tried again after the next event

    def _write(self, state: Kept, picture: View) -> Saved:
        """Blocks: a lane's work."""
        saved = self._state_file.save(state, time.time())
        try:
            replace_file(self._last_status, msgspec.json.encode(picture), durable=False)
        except OSError:
            return saved  # run_dir is usually a tmpfs of its own; `status` then shows an older picture, with its age
        return saved

    def _written(self, again: Callable[[], None], outcome: Outcome[Saved]) -> None:
        if isinstance(outcome.error, Closed):
            return  # the end is near, and `save` writes once more
        saved = outcome.unwrap()
        self.problem = saved.problem
        if saved.news:
            self._records.take("", Record("state.problem" if saved.problem else "state.saved_again", saved.problem))
        if self._again:
            self._again = False
            self._seen = -1


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
