"""`events`: the journal, read without its supervisor, and followed while it is written."""

from __future__ import annotations

import datetime
import re
import time

import click

from xce_supervisor.cli import draw, paper
from xce_supervisor.cli.asking import failed
from xce_supervisor.cli.entry import ExitCode
from xce_supervisor.config import Places
from xce_supervisor.supervisor import journal

LINES = 100
FOLLOW_S = 0.2

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def show(places: Places, *, unit: str | None, since: str | None, lines: int | None, follow: bool, as_json: bool) -> int:
    """Print events and return the exit code. since: a span back from now, or a local time."""
    begin = moment(since) if since else None
    try:
        found = journal.read(places.journal)
    except OSError as error:
        raise failed(ExitCode.REFUSED, f"{error.filename or places.journal} cannot be read: {error.strerror}") from error
    if not found.entries and not places.journal.exists() and not follow:
        raise failed(ExitCode.NOT_RUNNING, f"there is no journal at {places.journal}; has this supervisor ever run?")
    if found.damaged:
        click.echo(f"xce-supervisor: {found.damaged} damaged lines were passed over", err=True)
    follower = journal.Follower(places.journal, found.entries[-1].seq if found.entries else -1)
    wanted = _wanted(found.entries, unit, begin)
    limit = lines if lines is not None else (None if since else LINES)
    _put(wanted if limit is None else wanted[len(wanted) - limit :] if limit < len(wanted) else wanted, as_json)
    while follow:
        time.sleep(FOLLOW_S)
        _put(_wanted(follower.news(), unit, begin), as_json)
    return ExitCode.OK


def moment(text: str) -> float:
    """Return the Unix time that `text` means: "90", "10m", "2h", "3d" back from now, or a local date and time.

    Raises:
        click.UsageError: it means nothing.
    """
    match = _SPAN.fullmatch(text.strip())
    if match:
        return time.time() - float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        raise click.UsageError(f'--since {text!r} is neither a span like "10m" nor a time like "2026-11-30 03:00"') from error


def _wanted(entries: list[journal.Entry], unit: str | None, begin: float | None) -> list[journal.Entry]:
    return [one for one in entries if unit in (None, one.unit) and (begin is None or one.wall >= begin)]


def _put(entries: list[journal.Entry], as_json: bool) -> None:
    if as_json:
        for entry in entries:
            paper.put_json(entry, indent=-1)
    else:
        paper.put([draw.event_line(entry) for entry in entries])
