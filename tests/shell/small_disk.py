"""Runs a piece of Python on a disk of a few pages that really gets full: a tmpfs in a mount namespace of its own.

Nothing of it outlives the process, however that ends.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

_HEAD = """
import os, subprocess, sys
from pathlib import Path
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", str(disk)], check=True)
ballast = disk / "ballast"

def fill():
    with open(ballast, "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass

def free():
    ballast.unlink()
"""


def run_on_small_disk(disk: Path, code: str, *, size: str = "256k", deadline_s: float = 30.0) -> str:
    """Run `code` with `disk` (an empty folder), `fill()` and `free()` defined; return what it printed.

    Raises CalledProcessError with its standard error when it fails.
    """
    disk.mkdir(exist_ok=True)
    script = _HEAD.format(size=size) + textwrap.dedent(code)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script, str(disk)],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
