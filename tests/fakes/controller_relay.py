"""A relay in front of a server, for trouble on the wire: half-open, black hole, reset, byte by byte, garbage, delay."""

from __future__ import annotations

import asyncio
from enum import Enum


class Mode(Enum):
    """What the relay does with bytes.

    PASS: forwards. HOLD: forwards nothing, closes nothing: a half-open connection or a silent host. BYTEWISE: one byte a write.
    GARBAGE: sends noise to the client in place of what the server sends. REFUSE: closes each new connection at once.
    """

    PASS = "pass"
    HOLD = "hold"
    BYTEWISE = "bytewise"
    GARBAGE = "garbage"
    REFUSE = "refuse"


class Relay:
    """Listens on a free port of 127.0.0.1 and forwards to `target` ("host:port"). Modes take effect at once, both ways."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._mode = Mode.PASS
        self._passing = asyncio.Event()
        self._passing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.connections = 0
        self.address = ""

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def set(self, mode: Mode) -> None:
        """Change what happens from now on."""
        self._mode = mode
        if mode is Mode.HOLD:
            self._passing.clear()
        else:
            self._passing.set()

    def reset(self) -> None:
        """End every connection by a reset."""
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        mine = {writer}
        self._writers.add(writer)
        try:
            if self._mode is Mode.REFUSE:
                return
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            mine.add(far_writer)
            self._writers.add(far_writer)
            ways = (self._pump(reader, far_writer, False), self._pump(far_reader, writer, True))
            pumps = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            return  # the far side is not there, or the test is over
        finally:
            for one in mine:
                one.transport.abort()
                self._writers.discard(one)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_client: bool) -> None:
        while chunk := await reader.read(64 * 1024):
            await self._passing.wait()
            if self._mode is Mode.GARBAGE and to_client:
                chunk = bytes(range(256))[: len(chunk)]
            if self._mode is Mode.BYTEWISE:
                for number in range(len(chunk)):
                    writer.write(chunk[number : number + 1])
                    await writer.drain()
                    await asyncio.sleep(0)
            else:
                writer.write(chunk)
                await writer.drain()
