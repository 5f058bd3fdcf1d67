"""A TCP relay that can lose answers: what it was sent is carried out, and nobody hears of it."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Relay:
    """Relays to one port of loopback. mute: answers are dropped while it is True."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.mute = False
        self.dropped = 0
        self.port = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, droppable=False))
                group.create_task(self._pump(there, writer, droppable=True))
        except* OSError:
            pass  # one side went away: so does the other
        finally:
            back.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, droppable: bool) -> None:
        while data := await source.read(65_536):
            if droppable and self.mute:
                self.dropped += len(data)
                continue
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("end of file")
