"""Where the console scripts begin: a Ctrl-C while modules are still being loaded ends the program without a traceback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def supervisor() -> None:
    """Entry of `xce-supervisor`."""
    with _quiet():
        from xce_supervisor.cli.supervisor import main
    main()


def testbed() -> None:
    """Entry of `xce-testbed`."""
    with _quiet():
        from xce_supervisor.cli.testbed import main
    main()


@contextmanager
def _quiet() -> Iterator[None]:
    """Let SIGINT end the process by the kernel's hand, unless whoever started us wants it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
