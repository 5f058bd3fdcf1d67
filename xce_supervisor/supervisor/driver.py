"""Drives the core: one queue of events, one timer, effects begun in order (docs/architecture.md, "Decide, then act").

Events may come from anywhere on the loop, also while an effect is begun; they wait their turn. The driver is also the one who
notices that it did not run: whoever waits for the controller says by when it will feed the driver at the latest, and being
later than that means that this process was stopped, suspended or starved; the core hears of that before it hears of anything
else (docs/rules.md S10).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from xce_supervisor.core import supervision
from xce_supervisor.core.child_words import Spawn
from xce_supervisor.core.role import next_deadline as next_role_deadline
from xce_supervisor.core.supervision import (
    ChildHappened,
    Effect,
    Event,
    ForUnit,
    LoopGapSeen,
    Policy,
    State,
    TimePassed,
    UnitsReloaded,
)
from xce_supervisor.core.words import NS_PER_MS, NS_PER_S, Deadline, Gap
from xce_supervisor.process.alarm import Alarm
from xce_supervisor.supervisor import clock

# Late by less than this is everyday noise of a busy host.
_GAP_NS_MIN = 500 * NS_PER_MS
_UPKEEP_S = 0.001


class Driver:
    """Holds the state; `feed` is the only way to change it.

    perform: begins one effect. after: called once after a burst of events, e.g. to save what changed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: State,
        policy: Policy,
        perform: Callable[[Effect], None],
        after: Callable[[], None],
    ) -> None:
        self.state = state
        self.policy = policy
        self._perform = perform
        self._after = after
        self._queue: deque[Event] = deque()
        self._busy = False
        self._settling = False
        self._touched: set[str] = set(state.children)
        self._deadlines: dict[str, int] = {}
        self._closed = False
        self._loop = loop
        self._due: Deadline | None = None
        self.gap_ns_max = 0
        self._alarm = Alarm(loop, self._on_alarm)

    def feed(self, event: Event) -> None:
        """Take an event; step and act before returning, unless an event is being worked on already."""
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        spawning = False
        try:
            self._notice_gap()
            while self._queue:
                event = self._queue.popleft()
                if isinstance(event, UnitsReloaded):
                    self.policy = event.policy
                self.state, effects = supervision.step(self.state, event, clock.now(), self.policy)
                if isinstance(event, ChildHappened):
                    self._touched.add(event.unit)
                else:
                    self._touched.update(self.state.children)
                for effect in effects:
                    self._perform(effect)
                    spawning = spawning or (isinstance(effect, ForUnit) and isinstance(effect.effect, Spawn))
        finally:
            self._busy = False
        if not self._settling:
            self._settling = True
            # A lane that was just given a spawn gets the interpreter at once; our own upkeep can wait for a millisecond.
            self._loop.call_later(_UPKEEP_S if spawning else 0, self._settle)

    def expect(self, within_s: float) -> None:
        """Somebody will feed us, or say this again, within so many seconds at the latest, if only this process runs."""
        if self._gap() is not None:
            self.feed(TimePassed())  # being late with the promise before tells of the gap as well as an event would
        self._due = clock.now().after(int(within_s * NS_PER_S))

    def close(self) -> None:
        """Stop the timer."""
        self._closed = True
        self._alarm.close()

    def _gap(self) -> Gap | None:
        """Return by how much somebody was late who had promised to be heard of; None for not, or for everyday noise."""
        now, due = clock.now(), self._due
        if due is None:
            return None
        gap = Gap(max(0, now.mono_ns - due.mono_ns), max(0, now.boot_ns - due.boot_ns))
        return gap if gap.longest_ns > _GAP_NS_MIN else None

    def _notice_gap(self) -> None:
        gap = self._gap()
        if gap is not None:
            self._due = None  # told once; the next promise sets it anew
            self.gap_ns_max = max(self.gap_ns_max, gap.longest_ns)
            self._queue.appendleft(LoopGapSeen(gap))

    def _settle(self) -> None:
        """Once after a burst of events: arm the timer, let others catch up."""
        self._settling = False
        if self._closed:
            return
        self._alarm.set(self._soonest())
        self._after()

    def _soonest(self) -> int | None:
        """Return the core's next deadline, looking only at units that something happened to since the last time."""
        for unit in self._touched:
            deadline = supervision.child_deadline(self.state, unit, self.policy)
            if deadline is None:
                self._deadlines.pop(unit, None)
            else:
                self._deadlines[unit] = deadline.mono_ns
        for unit in self._deadlines.keys() - self.state.children.keys():
            del self._deadlines[unit]
        self._touched = set()
        role = next_role_deadline(self.state.role)
        return min([*self._deadlines.values(), *([] if role is None else [role.mono_ns])], default=None)

    def _on_alarm(self) -> None:
        self.feed(TimePassed())
