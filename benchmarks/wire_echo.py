#!/usr/bin/env python3
"""The floor of benchmarks/wire.py: a raw echo over TLS with nothing but asyncio, uvloop and ssl.

    wire_echo.py server CERT KEY CA SIZE                serves; prints its port; answers each frame with one of SIZE bytes
    wire_echo.py client CERT KEY CA PORT SIZE SECONDS   prints the sorted round-trip times in microseconds, as JSON

Both run in processes of their own, as the programs that they are compared with do: what else a process has imported and
allocated changes what the 256 KiB of every read cost.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
import sys
import time
from typing import Any

import uvloop

WARM_S = 0.3


class Framer(asyncio.Protocol):
    """Cuts what comes into frames by their lengths."""

    def __init__(self) -> None:
        self.held = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def frames(self, data: bytes) -> int:
        """Return how many frames are whole now."""
        self.held += data
        start, count = 0, 0
        while len(self.held) - start >= 8:
            (length,) = struct.unpack_from("<Q", self.held, start)
            if len(self.held) - start - 8 < length:
                break
            start += 8 + length
            count += 1
        del self.held[:start]
        return count


class Echo(Framer):
    """The serving side."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.answer * self.frames(data))


class Asker(Framer):
    """The asking side: one frame at a time, by callbacks alone, which is the least Python a round trip can cost."""

    def __init__(self, ask: bytes, seconds: float) -> None:
        super().__init__()
        self.ask = ask
        self.took: list[int] = []
        self.ends_at = time.perf_counter() + WARM_S + seconds
        self.warm_at = time.perf_counter() + WARM_S
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.send()

    def send(self) -> None:
        self.began = time.perf_counter_ns()
        self.transport.write(self.ask)

    def data_received(self, data: bytes) -> None:
        if not self.frames(data):
            return
        took, now = time.perf_counter_ns() - self.began, time.perf_counter()
        if now >= self.warm_at:
            self.took.append(took)
        if now < self.ends_at:
            self.send()
        elif not self.done.done():
            self.done.set_result(None)


def frame(size: int) -> bytes:
    """A frame of so many bytes in all."""
    return struct.pack("<Q", size - 8) + b"x" * (size - 8)


def context(side: int, cert: str, key: str, authority: str) -> ssl.SSLContext:
    """TLS 1.3 with certificates on both sides."""
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.load_cert_chain(cert, key)
    made.load_verify_locations(authority)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


async def serve(cert: str, key: str, authority: str, size: str) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    answer = frame(int(size))
    tls = context(ssl.PROTOCOL_TLS_SERVER, cert, key, authority)
    server = await loop.create_server(lambda: Echo(answer), "127.0.0.1", 0, ssl=tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


async def ask(cert: str, key: str, authority: str, port: str, size: str, seconds: str) -> None:
    """Ask for so long; print what each round trip took."""
    tls = context(ssl.PROTOCOL_TLS_CLIENT, cert, key, authority)
    transport, asker = await asyncio.get_running_loop().create_connection(
        lambda: Asker(frame(int(size)), float(seconds)), "127.0.0.1", int(port), ssl=tls, server_hostname="127.0.0.1"
    )
    await asker.done
    transport.close()
    print(json.dumps(sorted(round(took / 1000, 1) for took in asker.took)))


if __name__ == "__main__":
    act = serve(*sys.argv[2:]) if sys.argv[1] == "server" else ask(*sys.argv[2:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act)
