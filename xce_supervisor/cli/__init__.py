"""argv in, exit code out: the verbs of both programs. No decisions."""

from __future__ import annotations

import signal
import sys

# A HUP that comes before `run` can take it (a reload in the middle of a start) must not end it: the file is about to be read.
if sys.argv[1:2] == ["run"]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
