"""How times, sizes and other people's texts are written for a person."""

from __future__ import annotations

import time


def span(seconds: float) -> str:
    """Return a length of time in its two largest units: "0.25 s", "12 s", "3 min 05 s", "2 h 10 min", "5 d 3 h"."""
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def stamp(wall: float) -> str:
    """Return a wall time, to the millisecond, in local time: "2026-11-30 03:00:12.345"."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall)) + f".{int(wall % 1 * 1000):03d}"
    except (OverflowError, ValueError, OSError):
        return f"{wall:.3f}"


def clean(text: str) -> str:
    """Return `text` without what could move a terminal's cursor or change its colours: peers and programs wrote it."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
