"""The slow lanes: a bounded pool of threads for work that may block, with per-key dedup and room kept for stopping.

`submit` never blocks: it accepts, or says that this key is under way, or that the lanes are full. Work runs with no lock held,
and what came of it is told on the event loop, exactly once. Threads live as long as the pool, because a child's
parent-death signal belongs to the thread that started it and would fire when an idle thread was let go.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Submitted(StrEnum):
    """The answer to `submit`."""

    ACCEPTED = "accepted"
    IN_FLIGHT = "in_flight"
    FULL = "full"


class Kind(StrEnum):
    """WORK has the general threads and slots. STOP has some of its own and may use the general threads too (docs/rules.md S6)."""

    WORK = "work"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What came of a job: its value, or the exception that it raised."""

    value: T | None = None
    error: Exception | None = None

    def unwrap(self) -> T:
        """Return the value, or raise the job's exception."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # T itself may be None


class Closed(Exception):
    """The outcome of a job that was still queued when the lanes were closed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    key: str
    kind: Kind
    job: Callable[[], Any]
    done: Callable[[Outcome[Any]], None]


class Lanes:
    """A pool of daemon threads. Construct one for children and another for hooks; all methods belong to the loop's thread.

    threads: general threads. reserved: threads that run STOP work only. cap: WORK jobs queued and running at most.
    reserved_cap: STOP jobs queued and running at most, besides the WORK ones; as many as `cap` when None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int = 4,
        cap: int = 1024,
        reserved: int = 1,
        *,
        reserved_cap: int | None = None,
        name: str = "lane",
    ) -> None:
        if threads < 1 or cap < 1 or reserved < 0:
            raise ValueError(f"lanes need threads >= 1, cap >= 1 and reserved >= 0, got {threads}, {cap} and {reserved}")
        self._loop = loop
        self._caps = {Kind.WORK: cap, Kind.STOP: cap if reserved_cap is None else reserved_cap}
        self._held = {Kind.WORK: 0, Kind.STOP: 0}
        self._queues: dict[Kind, deque[_Task]] = {Kind.WORK: deque(), Kind.STOP: deque()}
        self._tasks: dict[str, _Task] = {}  # accepted and not yet done; the loop's thread alone touches it
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # general threads wait here
        self._stop_work = threading.Condition(self._lock)  # reserved threads wait here
        self._closed = False
        self._emptied: asyncio.Event | None = None
        self.threads = [threading.Thread(target=self._serve, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        self.threads += [
            threading.Thread(target=self._serve_stops, name=f"{name}-stop-{n}", daemon=True) for n in range(reserved)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, key: str, job: Callable[[], T], done: Callable[[Outcome[T]], None], kind: Kind = Kind.WORK) -> Submitted:
        """Hand in a job. Never blocks.

        key: one job of a key is under way at most. job: runs in a thread, no lock held. done: called on the loop exactly once
        with the outcome, unless `cancel` takes the job back; the key is free again when it is called.

        Returns IN_FLIGHT while the key is under way, FULL when the cap of this kind is reached or the lanes are closed.
        """
        if key in self._tasks:
            return Submitted.IN_FLIGHT
        if self._closed or self._held[kind] >= self._caps[kind]:
            return Submitted.FULL
        task = _Task(key, kind, job, done)
        self._tasks[key] = task
        self._held[kind] += 1
        with self._lock:
            self._queues[kind].append(task)
            self._work.notify()
            if kind is Kind.STOP:
                self._stop_work.notify()  # both: whoever is free first takes it, the other goes back to sleep
        return Submitted.ACCEPTED

    def cancel(self, key: str) -> bool:
        """Take a job back. Returns True if it was still queued: then it never runs and `done` is never called."""
        task = self._tasks.get(key)
        if task is None:
            return False
        with self._lock:
            try:
                self._queues[task.kind].remove(task)
            except ValueError:
                return False
        self._forget(task)
        return True

    def in_flight(self, key: str) -> bool:
        """Is a job of this key accepted and not yet done?"""
        return key in self._tasks

    @property
    def depth(self) -> int:
        """How many jobs are queued or running."""
        return len(self._tasks)

    async def close(self, deadline_s: float) -> list[str]:
        """Take no more work, tell queued jobs `Closed`, wait for running ones up to `deadline_s` seconds.

        Returns the keys of jobs that still run: their threads hang, and are daemons, so they keep no process from exiting.
        """
        self._closed = True
        with self._lock:
            dropped = [task for queue in self._queues.values() for task in queue]
            for queue in self._queues.values():
                queue.clear()
            self._work.notify_all()
            self._stop_work.notify_all()
        for task in dropped:
            self._finish(task, Outcome(error=Closed(f"{task.key} was queued when the lanes were closed")))
        if self._tasks:
            self._emptied = asyncio.Event()
            try:
                await asyncio.wait_for(self._emptied.wait(), deadline_s)
            except TimeoutError:
                pass
        return list(self._tasks)

    def _serve(self) -> None:
        """A general thread: stop work first, then other work."""
        stops, works = self._queues[Kind.STOP], self._queues[Kind.WORK]
        while True:
            with self._lock:
                while not stops and not works:
                    if self._closed:
                        return
                    self._work.wait()
                task = stops.popleft() if stops else works.popleft()
            self._run(task)

    def _serve_stops(self) -> None:
        stops = self._queues[Kind.STOP]
        while True:
            with self._lock:
                while not stops:
                    if self._closed:
                        return
                    self._stop_work.wait()
                task = stops.popleft()
            self._run(task)

    def _run(self, task: _Task) -> None:
        try:
            outcome = Outcome(value=task.job())
        except Exception as error:  # noqa: BLE001  # not swallowed: `done` is told, and knows what it had asked for
            outcome = Outcome(error=error)
        try:
            self._loop.call_soon_threadsafe(self._finish, task, outcome)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # only a loop that ended before a hung job may refuse

    def _finish(self, task: _Task, outcome: Outcome[Any]) -> None:
        self._forget(task)
        task.done(outcome)

    def _forget(self, task: _Task) -> None:
        del self._tasks[task.key]
        self._held[task.kind] -= 1
        if self._emptied is not None and not self._tasks:
            self._emptied.set()
