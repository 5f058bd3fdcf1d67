"""Runs a coroutine's first step at once, and makes a task only of one that has to wait.

Most requests are answered without waiting for anything. A task for each would cost a turn of the loop and, over TLS, a tenth
of the whole round trip (benchmarks/wire.py). Python 3.12 can do this itself; for 3.11 it is done here, with the functions that
asyncio documents for other kinds of tasks. It also makes the requests of a connection begin in the order in which they came.
"""

from __future__ import annotations

import asyncio
import sys
import types
from asyncio import tasks
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


def begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Begin `work`. Returns None if it has ended already, else the task that goes on with it.

    Call it on the loop's thread. What `work` raises in its first step is raised here.
    """
    if sys.version_info >= (3, 12):
        task = asyncio.Task(work, loop=loop, eager_start=True)
        if not task.done():
            return task
        return task.result()
    if asyncio.current_task(loop) is not None:
        return loop.create_task(work)  # a task cannot begin inside another one
    stand_in = _StandIn()
    tasks._enter_task(loop, stand_in)  # type: ignore[arg-type]
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    finally:
        tasks._leave_task(loop, stand_in)  # type: ignore[arg-type]
    stand_in.task = loop.create_task(_go_on(work, awaited))
    return stand_in.task


class _StandIn:
    """The current task of a first step. What asyncio's timeouts and task groups keep of it reaches the true one, made later."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def cancel(self, msg: Any = None) -> bool:
        return self.task.cancel(msg) if self.task is not None else False

    def cancelling(self) -> int:
        return self.task.cancelling() if self.task is not None else 0

    def uncancel(self) -> int:
        return self.task.uncancel() if self.task is not None else 0


@types.coroutine
def _go_on(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of `work`, whose first step came to `awaited`: hands on what it waits for, and what becomes of that."""
    while True:
        hand_on: Callable[[], Any]
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001  (whatever it is, a cancellation above all, it is for `work`)
            hand_on = partial(work.throw, error)
        else:
            hand_on = partial(work.send, value)
        try:
            awaited = hand_on()
        except StopIteration:
            return
