"""A handler's first step runs at once; what it keeps of its task still works when it has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.shell.link.conftest import Run
from xce_supervisor.link.eager import begin

Work = Callable[[], Coroutine[Any, Any, None]]


async def outside(work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None] | None]:
    """Begin it as a connection does: from a callback of the loop, where no task is current. Raises what the first step raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[asyncio.Task[None] | None] = loop.create_future()

    def callback() -> None:
        try:
            done.set_result(begin(loop, work))
        except RuntimeError as error:
            done.set_exception(error)

    loop.call_soon(callback)
    return [await done]


def test_what_need_not_wait_is_done_without_a_task(run: Run) -> None:
    """It has ended when `begin` returns; what it raises is raised there."""
    said: list[str] = []

    async def work() -> None:
        said.append("done")

    async def broken() -> None:
        raise RuntimeError("a bug")

    async def scene() -> None:
        assert await outside(work()) == [None] and said == ["done"]
        with pytest.raises(RuntimeError, match="a bug"):
            await outside(broken())

    run(scene())


def test_what_waits_goes_on_as_a_task(run: Run) -> None:
    """Futures, their exceptions, bare turns of the loop, and results all reach it."""
    said: list[object] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        good, bad = loop.create_future(), loop.create_future()

        async def work() -> None:
            said.append(await good)
            try:
                await bad
            except ValueError as error:
                said.append(str(error))
            await asyncio.sleep(0)
            said.append(await asyncio.wait_for(asyncio.sleep(0.01, "slept"), 1))

        (task,) = await outside(work())
        assert task is not None and said == []
        good.set_result(1)
        bad.set_exception(ValueError("bad"))
        await task
        assert said == [1, "bad", "slept"]

    run(scene())


def test_a_time_out_entered_in_the_first_step_ends_the_wait(run: Run) -> None:
    """asyncio.timeout keeps the current task, to cancel it later: that must be the one that goes on."""
    said: list[str] = []

    async def scene() -> None:
        never = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                async with asyncio.timeout(0.02):
                    await never
            except TimeoutError:
                said.append("timed out")
            async with asyncio.timeout(5):
                await asyncio.sleep(0)
            said.append("went on")

        (task,) = await outside(work())
        assert task is not None
        await task
        assert said == ["timed out", "went on"] and task.cancelling() == 0

    run(scene())


def test_a_task_group_entered_in_the_first_step_works(run: Run) -> None:
    """Also when a member fails, which cancels the group's own task."""
    said: list[str] = []

    async def scene() -> None:
        async def fails() -> None:
            await asyncio.sleep(0.01)
            raise ValueError("a member failed")

        async def work() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(5))
                    group.create_task(fails())
                    await asyncio.sleep(5)
            except* ValueError:
                said.append("told")
            said.append("went on")

        (task,) = await outside(work())
        assert task is not None
        await task
        assert said == ["told", "went on"]

    run(scene())


def test_a_cancellation_reaches_it_and_may_be_refused(run: Run) -> None:
    """Whether it obeys or cleans up first is its own affair, as in any task."""
    said: list[str] = []

    async def scene() -> None:
        async def obeys() -> None:
            try:
                await asyncio.sleep(5)
            finally:
                said.append("cleaned up")

        async def first_finishes() -> None:
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                said.append("finished")

        for work in (obeys, first_finishes):
            (task,) = await outside(work())
            assert task is not None
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == (work is obeys)
        assert said == ["cleaned up", "finished"]

    run(scene())


def test_inside_a_task_it_begins_all_the_same(run: Run) -> None:
    """Then, on Python 3.11, it is a task from the start."""
    said: list[str] = []

    async def work() -> None:
        said.append("done")

    async def scene() -> None:
        task = begin(asyncio.get_running_loop(), work())
        if task is not None:
            await task
        assert said == ["done"]
        assert asyncio.current_task() is not None

    run(scene())
