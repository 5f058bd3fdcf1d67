"""What is wrong with a configuration, said so that it can be mended: file, key, reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from xce_supervisor.errors import ConfigError


class Problem(Struct, frozen=True):
    """One thing that keeps a configuration from being used. key: dotted, "" for the whole file."""

    file: Path
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.reason}" if self.key else f"{self.file}: {self.reason}"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with one line a problem; return if there is none."""
    lines = [str(problem) for problem in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known word, or what is known, to be put behind a reason."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known are {', '.join(words)}" if words else ""
