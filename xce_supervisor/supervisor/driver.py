"""Drives the core: one queue of events, one timer, effects begun in order (docs/architecture.md, "Decide, then act").

Events may come from anywhere on the loop, also while an effect is begun; they wait their turn. The driver is also the one who
notices that it did not run: every poll of the controller feeds it, so a silence much longer than a poll means that this
process was stopped, suspended or starved, and the core hears of that before it hears of anything else (docs/rules.md S10).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from xce_supervisor.core import supervision
from xce_supervisor.core.child_words import Spawn
from xce_supervisor.core.role import next_deadline as next_role_deadline
from xce_supervisor.core.supervision import ChildHappened, Effect, Event, ForUnit, LoopGapSeen, Policy, State, TimePassed
from xce_supervisor.core.words import NS_PER_MS, Now
from xce_supervisor.process.alarm import Alarm
from xce_supervisor.supervisor import clock

# Late by less than this is everyday noise of a busy host.
_GAP_NS_MIN = 500 * NS_PER_MS
_UPKEEP_S = 0.001


class Driver:
    """Holds the state; `feed` is the only way to change it.

    perform: begins one effect. after: called once after a burst of events, e.g. to save what changed.
    quiet_ns: how long it may be normal that nobody feeds us (poll wait plus request deadline).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: State,
        policy: Policy,
        perform: Callable[[Effect], None],
        after: Callable[[], None],
        quiet_ns: int,
    ) -> None:
        self.state = state
        self.policy = policy
        self._perform = perform
        self._after = after
        self._quiet_ns = quiet_ns
        self._queue: deque[Event] = deque()
        self._busy = False
        self._settling = False
        self._touched: set[str] = set(state.children)
        self._deadlines: dict[str, int] = {}
        self._closed = False
        self._loop = loop
        self._fed_at: Now = clock.now()
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

    def close(self) -> None:
        """Stop the timer."""
        self._closed = True
        self._alarm.close()

    def _notice_gap(self) -> None:
        now = clock.now()
        silence_ns = now.since(self._fed_at)
        self._fed_at = now
        if silence_ns > self._quiet_ns + _GAP_NS_MIN:
            self.gap_ns_max = max(self.gap_ns_max, silence_ns)
            self._queue.appendleft(LoopGapSeen(silence_ns))

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
