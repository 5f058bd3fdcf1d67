"""How the daemon logs: one event a line on standard error, as JSON for the journal or as text for people."""

from __future__ import annotations

import logging
import os
import select
import sys
from typing import Literal, TextIO, cast

import structlog

# A pipe or a socket that says it can be written takes this much without blocking (PIPE_BUF).
_AT_ONCE = 4096


class _Lossy:
    """Standard error that neither raises nor blocks: a full disk, a closed pipe or a reader that hangs costs lines (S20)."""

    def __init__(self) -> None:
        self.lost = 0
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > _AT_ONCE:
            data = data[: _AT_ONCE - 4] + b"...\n"
        try:
            ready = self._poll.poll(0)
            if ready and ready[0][1] & select.POLLOUT:
                os.write(2, data)
                return len(text)
        except OSError:
            pass  # counted below, like a line that nobody takes
        self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


_stderr = _Lossy()


def lost() -> int:
    """Return how many lines nobody took."""
    return _stderr.lost


def set_up(level: str, form: Literal["json", "text"]) -> None:
    """Send structlog's events to standard error. level: the least one written, e.g. "info"."""
    renderer: structlog.typing.Processor
    if form == "json":
        renderer = structlog.processors.JSONRenderer(ensure_ascii=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _stderr)),
        cache_logger_on_first_use=True,
    )
