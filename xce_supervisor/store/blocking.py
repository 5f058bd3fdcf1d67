"""One thread for an engine's blocking work, with a bounded queue in front of it.

Not a pool of the standard library: those are joined when the interpreter ends, and a thread that is stuck in a dead disk would
keep the whole process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from xce_supervisor.store.engine import Unavailable

T = TypeVar("T")
QUEUED_MAX = 256


class BlockingThread:
    """Runs one job after the other, off the loop."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = deque()
        self._some = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], T], *, deadline_s: float, urgent: bool = False) -> T:
        """Run `job` in the thread and return what it returns, or raise what it raises.

        urgent: goes before everything that waits (renewals of a lease). A job that was not begun by the deadline is never
        begun; one that was begun runs on, and its outcome is unknown to the caller.

        Raises:
            Unavailable: not done within `deadline_s` seconds, or too much is queued already.
        """
        if len(self._jobs) >= QUEUED_MAX and not urgent:
            raise Unavailable("the store is busy: too many requests wait for it")
        future: asyncio.Future[T] = self._loop.create_future()
        with self._some:
            (self._jobs.appendleft if urgent else self._jobs.append)((job, future))
            self._some.notify()
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise Unavailable(f"the store did not answer within {deadline_s:.1f} s") from None

    def stop(self) -> None:
        """End the thread after the jobs that are queued. Does not wait."""
        with self._some:
            self._jobs.append(None)
            self._some.notify()

    async def joined(self, deadline_s: float) -> bool:
        """Wait until the thread has ended; False if it has not within `deadline_s` seconds (it is stuck, and is left)."""
        ends_at = self._loop.time() + deadline_s
        while self._thread.is_alive() and self._loop.time() < ends_at:
            await asyncio.sleep(0.005)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._some:
                while not self._jobs:
                    self._some.wait()
                entry = self._jobs.popleft()
            if entry is None:
                return
            job, future = entry
            if future.cancelled():
                continue
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - nothing is swallowed: the caller awaits it
                self._tell(future, None, error)
            else:
                self._tell(future, result, None)

    def _tell(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(_settle, future, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
