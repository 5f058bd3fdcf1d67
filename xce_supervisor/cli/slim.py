"""Keeps daemons small: what they must not load, and when."""

from __future__ import annotations

import sys


def load_structlog_alone() -> None:
    """Import structlog without rich. Call it before anything else imports structlog; does nothing afterwards.

    structlog loads rich at its own import if it can, for tracebacks that nobody here asks for: 0.1 s and 8 MiB in every daemon
    and in every scheduler that a cluster waits for. While rich is marked as missing, structlog does without; it can be loaded
    later.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # how the import system spells "not to be found"
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
