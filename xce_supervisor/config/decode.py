"""TOML text to frozen values: every unknown key, missing key and bad value of a file is told at once, none by traceback."""

from __future__ import annotations

import functools
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from xce_supervisor.config.problem import Problem, suggest

S = TypeVar("S", bound=Struct)

# A configuration is a page or two; this bounds what a wrong path (a log, a device) can make us read.
FILE_BYTES_MAX = 1_048_576


def read(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the file's TOML document and what is wrong with it ({} then)."""
    try:
        with open(file, "rb") as opened:
            raw = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        return {}, [Problem(file, "", f"cannot be read: {error.strerror}; create it, or name another file with --config")]
    if len(raw) > FILE_BYTES_MAX:
        return {}, [Problem(file, "", f"is larger than {FILE_BYTES_MAX} bytes; this cannot be a configuration")]
    try:
        return tomllib.loads(raw.decode("utf-8")), []
    except UnicodeDecodeError as error:
        return {}, [Problem(file, "", f"is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}")]
    except tomllib.TOMLDecodeError as error:
        return {}, [Problem(file, "", f"is not TOML: {error}")]
    except RecursionError:
        return {}, [Problem(file, "", "is nested too deeply")]


@functools.cache
def _fields(kind: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return a section's fields. Working them out takes a millisecond, and a hundred unit files ask for the same dozen."""
    return msgspec.structs.fields(kind)


def decode(document: Mapping[str, Any], kind: type[S], file: Path, section: str = "") -> tuple[S | None, list[Problem]]:
    """Return `document` as a `kind`, and what is wrong with it (None then). section: where in the file it stands."""
    problems: list[Problem] = []
    value = _struct(document, kind, section, _Where(file, problems, kind))
    return (None, problems) if problems else (value, problems)


class _Where:
    """Where we are, and what was wrong on the way."""

    def __init__(self, file: Path, problems: list[Problem], root: type[Struct]) -> None:
        self._file = file
        self._problems = problems
        self._sections = {
            inner.encode_name: section.encode_name
            for section in _fields(root)
            if is_struct(section.type)
            for inner in _fields(plain(section.type))
        }

    def wrong(self, key: str, reason: str) -> None:
        self._problems.append(Problem(self._file, key, reason))

    def home_of(self, key: str) -> str:
        """Return the section that knows `key`, "" if none does."""
        return self._sections.get(key, "")


def _struct(document: Mapping[str, Any], kind: type[S], path: str, where: _Where) -> S | None:
    fields = {field.encode_name: field for field in _fields(kind)}
    found: dict[str, Any] = {}
    wrong = False
    for key, value in document.items():
        dotted = f"{path}.{key}" if path else key
        if key not in fields:
            wrong = True
            home = where.home_of(key)
            hint = f"; it belongs into [{home}]" if home and home != path else suggest(key, fields)
            where.wrong(dotted, f"unknown {'section or key' if not path else 'key'}{hint}")
            continue
        field = fields[key]
        if is_struct(field.type):
            inner = None
            if isinstance(value, Mapping):
                inner = _struct(value, plain(field.type), dotted, where)
            else:
                where.wrong(dotted, f"must be a section: write [{dotted}]")
            wrong = wrong or inner is None
            found[field.name] = inner
        else:
            try:
                found[field.name] = msgspec.convert(value, field.type, dec_hook=_path)
            except msgspec.ValidationError as error:
                wrong = True
                where.wrong(dotted, _said(value, error, field.type))
    for name, field in fields.items():
        if field.required and name not in document:
            wrong = True
            dotted = f"{path}.{name}" if path else f"[{name}]"
            where.wrong(dotted, f"is missing. {description_of(field.type)}".rstrip(" ."))
    return None if wrong else kind(**found)


def _said(value: object, error: msgspec.ValidationError, kind: Any) -> str:
    what, _, at = str(error).partition(" - at `$")
    inner = f" (in {at.rstrip('`').lstrip('.')})" if at and at != "`" else ""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{shown} cannot be used: {what[:1].lower()}{what[1:].replace('`', '')}{inner}. {description_of(kind)}".rstrip(" .")


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("expected a path")
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


def plain(kind: Any) -> Any:
    """Return a field's type without its annotations."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def is_struct(kind: Any) -> bool:
    """Is the field a section?"""
    inner = plain(kind)
    return isinstance(inner, type) and issubclass(inner, Struct)


def description_of(kind: Any) -> str:
    """Return what a field says of itself, "" if nothing."""
    for part in getattr(kind, "__metadata__", ()):
        if isinstance(part, msgspec.Meta) and part.description:
            return part.description
    return ""
