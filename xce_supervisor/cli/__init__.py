"""argv in, exit code out: the verbs of both programs. No decisions."""

from __future__ import annotations

import sys

# structlog loads rich at its own import if it can, for tracebacks that nobody here asks for: 0.1 s and 8 MiB in every daemon and
# in every scheduler that a cluster waits for. While rich is marked as missing, structlog does without; verbs load it afterwards.
if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how the import system spells "not to be found"
    import structlog  # noqa: F401

    del sys.modules["rich"]
