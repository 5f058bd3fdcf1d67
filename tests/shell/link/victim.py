"""A server in a process of its own, for tests that stop it, flood it or starve it. Prints its port."""

from __future__ import annotations

import asyncio
import logging
import resource

import structlog

from tests.shell.link.peers import Script
from xce_supervisor.link.limits import DEFAULT_LIMITS
from xce_supervisor.link.server import Server


def main(descriptors: int = 0, **script: int) -> None:
    """Serve until killed. descriptors: limit on open files, 0 as it is. script: fields of a Script."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    asyncio.run(_serve(Script(**script)))  # type: ignore[arg-type]


async def _serve(script: Script) -> None:
    server = Server(None, DEFAULT_LIMITS, script.accept)
    await server.start("127.0.0.1", 0)
    print(server.port, flush=True)
    while True:
        await asyncio.sleep(3600)
        script.seen.clear()
