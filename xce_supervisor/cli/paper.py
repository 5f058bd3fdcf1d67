"""What verbs print on: a terminal with colours and tables, or plain aligned ASCII text for pipes and logs.

rich is imported only where a terminal is there to show it: `run` and pipes stay small.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from xce_supervisor.cli.words import clean

if TYPE_CHECKING:
    from rich.console import RenderableType

GOOD, BAD, DOUBT, QUIET, STRONG, PLAIN = "green", "bold red", "yellow", "bright_black", "bold", ""

Cell = tuple[str, str]  # text, style


class Table(Struct, frozen=True, kw_only=True):
    """heads: of the columns. rows: one cell a column; the last column may be long and is wrapped."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


Line = tuple[Cell, ...] | Table


class OutputFailed(Exception):
    """Standard output cannot be written (a full disk). A closed pipe is BrokenPipeError, and no failure."""


def put(lines: Sequence[Line]) -> None:
    """Print `lines` on standard output, as that can show them. Raises OutputFailed, BrokenPipeError."""
    with _writing():
        if sys.stdout.isatty():
            _on_terminal(lines)
        else:
            _plainly(lines)
        sys.stdout.flush()


def put_json(value: Any, *, indent: int = 2) -> None:
    """Print `value` as one JSON document: on several lines, or on one with indent -1. Raises OutputFailed, BrokenPipeError."""
    with _writing():
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=indent).decode("utf-8") + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # what is buffered cannot be written at exit either
        raise OutputFailed(f"standard output cannot be written: {error.strerror}") from error


def _plainly(lines: Sequence[Line]) -> None:
    for line in lines:
        if isinstance(line, Table):
            rows = [line.heads, *(tuple(clean(text) for text, _ in row) for row in line.rows)]
            widths = [max(len(row[column]) for row in rows) for column in range(len(line.heads))]
            for row in rows:
                print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        else:
            print("".join(clean(text) for text, _ in line).rstrip())


def _on_terminal(lines: Sequence[Line]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    for line in lines:
        console.print(drawn(line))


def drawn(line: Line) -> RenderableType:
    """Return a line as rich draws it."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not isinstance(line, Table):
        return Text.assemble(*((clean(text), style) for text, style in line))
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style=STRONG)
    for number, head in enumerate(line.heads):
        table.add_column(head, no_wrap=number < len(line.heads) - 1, overflow="fold")
    for row in line.rows:
        table.add_row(*(Text(clean(text), style) for text, style in row))
    return table
