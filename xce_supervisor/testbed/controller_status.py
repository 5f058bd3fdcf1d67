"""ctrlstatus: answered in every role, at once or at the next change (long poll)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from xce_supervisor.wire.words import CtrlStatus, CtrlStatusReply

WAIT_MS_MAX = 30_000


class Status:
    """prepare: what a reply waits for (a fresh confirmation of the quorum). build: makes the reply for a version."""

    def __init__(self, prepare: Callable[[], Awaitable[object]], build: Callable[[int], CtrlStatusReply]) -> None:
        self._prepare, self._build = prepare, build
        self.version = 1
        self._waiting: set[asyncio.Future[None]] = set()

    def changed(self) -> None:
        """Role, term, gate, primary or the scheduler's session changed: answer everybody who waits."""
        self.version += 1
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def answer(self, message: CtrlStatus) -> CtrlStatusReply:
        """See wire.words.CtrlStatus. A version that is not the present one was missed: then there is nothing to wait for."""
        if message.wait_ms > 0 and message.known_version == self.version:
            await self._change(min(message.wait_ms, WAIT_MS_MAX) / 1000)
        await self._prepare()
        return self._build(self.version)

    async def _change(self, wait_s: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(wait_s):
                await waiting
        except TimeoutError:
            return
        finally:
            self._waiting.discard(waiting)
