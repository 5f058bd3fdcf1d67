"""A real process with one engine in it, for tests that kill and stop it: `member.py URL NAME [append] [stop-in-transaction]`.

Writes one JSON line an event: {"at": CLOCK_BOOTTIME ns, "event": "elected" | "deposed" | "acked" | "refused", "term": ..}.
append: appends a fact as fast as it is answered while it leads, and tells which were acknowledged.
stop-in-transaction: stops itself by SIGSTOP in the middle of its third write.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
import uuid

from xce_supervisor.store.engine import Behind, Candidate, Deposed, Elected, Fact, Fenced, StoreEvent, Unavailable
from xce_supervisor.store.open import open_engine
from xce_supervisor.store.sqlite_file import SqliteFile


def tell(event: str, term: int, **more: object) -> None:
    """One line, at once."""
    line = {"at": time.clock_gettime_ns(time.CLOCK_BOOTTIME), "event": event, "term": term, **more}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def stop_in_third_write() -> None:
    """Make the third insert stop this process with the transaction open."""
    numbers = itertools.count(1)
    insert = SqliteFile._insert

    def stopping(self: SqliteFile, *args: object) -> int:
        if next(numbers) == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return insert(self, *args)  # type: ignore[arg-type]

    SqliteFile._insert = stopping  # type: ignore[method-assign,assignment]


async def main(url: str, name: str, faults: set[str]) -> None:
    """Campaign until killed."""
    terms: asyncio.Queue[int] = asyncio.Queue()

    def listener(event: StoreEvent) -> None:
        if isinstance(event, Elected):
            tell("elected", event.term)
            terms.put_nowait(event.term)
        elif isinstance(event, Deposed):
            tell("deposed", event.term, reason=str(event.reason))

    engine = open_engine(url)
    await engine.start(Candidate(name, uuid.uuid4().hex, f"{name}:1"), listener)
    tell("started", 0)
    while True:
        term = await terms.get()
        for number in itertools.count():
            if "append" not in faults:
                break
            key = f"{name}/{term}/{number}"
            try:
                index = await engine.append(term, [Fact("test", key, b"{}")])
            except Unavailable:
                continue
            except (Fenced, Behind) as error:
                tell("refused", term, key=key, error=str(error))
                break
            tell("acked", term, key=key, index=index)


if __name__ == "__main__":
    if "stop-in-transaction" in sys.argv:
        stop_in_third_write()
    asyncio.run(main(sys.argv[1], sys.argv[2], set(sys.argv[3:])))
