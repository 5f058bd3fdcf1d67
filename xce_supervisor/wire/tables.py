"""How each message of `wire.words` lies in its Cap'n Proto struct: one table a class, made once from both descriptions.

A words class `JobView` is the schema's struct `JobView`; its field `exit_code` is the field `exitCode`. What is zero, empty,
false or null on the wire was not given, and becomes the field's default. Fields are looked up here, once: pycapnp's access
by a cached field costs a fifth of its access by name. Readers and builders of Cap'n Proto do not leave this package:
printing one that holds hostile bytes can abort the process.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin

import capnp
import msgspec
from msgspec import structs

from xce_supervisor.wire import words

capnp.remove_import_hook()  # it would look for .capnp files behind every import of the program

SCHEMA_FILE: Final = Path(__file__).parent / "schema" / "xce.capnp"
SCHEMA: Final = capnp.load(str(SCHEMA_FILE))

# A frame no longer than this cannot hold a text over its limit: the lowest limit of a text in words.py.
SMALL_BYTES: Final = 255


class BadField(Exception):
    """A field holds what it may not hold; the text names message, field and limit.

    It never leaves wire/, because its traceback holds readers.
    """


class _Kind(msgspec.Struct, frozen=True):
    """A field's type and limits, taken apart. most: characters or items, 0: no limit. cut: shorten, do not refuse."""

    base: Any
    optional: bool
    most: int
    cut: bool
    item: _Kind | None


def _kind(hint: Any) -> _Kind:
    """Take apart a type hint as words.py writes them."""
    most, cut = 0, False
    while hasattr(hint, "__metadata__"):
        for meta in hint.__metadata__:
            most = meta.max_length or most
            cut = cut or bool(meta.extra and meta.extra.get("cut"))
        hint = hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
        kind = _kind(inner)
        return _Kind(kind.base, True, kind.most, kind.cut, kind.item)
    if get_origin(hint) is tuple:
        return _Kind(tuple, False, most, cut, _kind(get_args(hint)[0]))
    return _Kind(hint, False, most, cut, None)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class Table:
    """How one class of words.py is written to and read from its struct.

    Raises (on making one): AssertionError if words.py and the schema do not agree: a bug of ours, seen at import.
    """

    def __init__(self, cls: type[msgspec.Struct]) -> None:
        self.cls: Callable[..., Any] = cls
        self.title = cls.__name__
        self.schema = getattr(SCHEMA, self.title).schema
        in_schema = self.schema.fields
        self._flat: list[tuple[str, Any]] = []  # numbers, truth values and texts
        self._texts: list[tuple[str, Any, int, bool]] = []
        self._defaults: list[tuple[str, Any]] = []
        self._readers: list[tuple[str, Callable[[Any, bool], Any]]] = []
        self._writers: list[tuple[str, Callable[[Any, Any], None]]] = []
        scalars: list[tuple[str, Any]] = []
        for info in structs.fields(cls):
            wire_name = _camel(info.name)
            assert wire_name in in_schema, f"{SCHEMA_FILE.name}: struct {self.title} has no field {wire_name}"
            field, kind = in_schema[wire_name], _kind(info.type)
            where = f"{self.title}.{info.name}"
            if kind.base in (int, bool) and not kind.optional:
                scalars.append((info.name, field))
            elif kind.base is str:
                assert kind.most, f"{where} has no limit"
                self._texts.append((info.name, field, kind.most, kind.cut))
            else:
                reader, writer = _special(where, field, kind, in_schema.get(_camel(f"has_{info.name}")))
                self._readers.append((info.name, reader))
                self._writers.append((info.name, writer))
                continue
            self._flat.append((info.name, field))
            if info.default is not msgspec.NODEFAULT and info.default:
                self._defaults.append((info.name, info.default))
        self._names = tuple(name for name, _ in self._flat)
        self._fields = tuple(field for _, field in self._flat)
        self._limits = tuple((name, most) for name, _, most, _ in self._texts)
        self._scalars = tuple(scalars)

    def write(self, builder: Any, value: Any) -> None:
        """Fill an empty builder. Zero, empty and false are what it holds already."""
        put = builder._set_by_field
        for name, field in self._scalars:
            if found := getattr(value, name):
                put(field, found)
        for name, field, most, cut in self._texts:
            if found := getattr(value, name):
                if len(found) > most:
                    if not cut:
                        raise BadField(f"{self.title}.{name} has {len(found)} characters; the limit is {most}")
                    found = found[: most - 1] + "…"
                put(field, found)
        for name, write in self._writers:
            write(builder, getattr(value, name))

    def read(self, reader: Any, small: bool) -> Any:
        """Return the words value. small: the frame is too short for any text to be over its limit."""
        values = dict(zip(self._names, map(reader._get_by_field, self._fields), strict=True))
        if not small:
            for name, most in self._limits:
                if len(values[name]) > most:
                    raise BadField(f"{self.title}.{name} has {len(values[name])} characters; the limit is {most}")
        for name, default in self._defaults:
            values[name] = values[name] or default
        for name, read in self._readers:
            values[name] = read(reader, small)
        return self.cls(**values)


Reader = Callable[[Any, bool], Any]
Writer = Callable[[Any, Any], None]


def _special(where: str, field: Any, kind: _Kind, flag: Any) -> tuple[Reader, Writer]:
    """The reader and writer of a field that is more than a number or a text."""
    if kind.base is int:
        assert flag is not None, f"{where} may be missing, and the schema has no flag for it"
        return _optional_number(field, flag)
    if kind.base is tuple:
        assert kind.item is not None and kind.most, f"{where} has no limit"
        return _texts(where, field, kind) if kind.item.base is str else _structs(where, field, kind)
    if issubclass(kind.base, IntEnum):
        return _enum(where, field, kind.base)
    assert kind.optional, f"{where}: a struct inside a struct may always be missing"
    return _struct(field, kind)


def _optional_number(field: Any, flag: Any) -> tuple[Reader, Writer]:
    def read(reader: Any, small: bool) -> Any:
        get = reader._get_by_field
        return get(field) if get(flag) else None

    def write(builder: Any, value: Any) -> None:
        if value is not None:
            builder._set_by_field(flag, True)
            builder._set_by_field(field, value)

    return read, write


def _enum(where: str, field: Any, enum: type[IntEnum]) -> tuple[Reader, Writer]:
    def read(reader: Any, small: bool) -> Any:
        number = reader._get_by_field(field)
        try:
            return enum(number)
        except ValueError:
            if enum is words.ErrorCode:  # a newer peer's no is still a no
                return words.ErrorCode.OTHER
            raise BadField(f"{where} is {number}, which is not one of {[each.value for each in enum]}") from None

    def write(builder: Any, value: Any) -> None:
        builder._set_by_field(field, int(value))

    return read, write


def _counted(where: str, count: int, most: int) -> int:
    """Lists are counted before they are walked: a list of empty structs can claim half a billion items in eight bytes."""
    if count > most:
        raise BadField(f"{where} has {count} items; the limit is {most}")
    return count


def _texts(where: str, field: Any, kind: _Kind) -> tuple[Reader, Writer]:
    assert kind.item is not None
    most, longest = kind.most, kind.item.most

    def check(texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if len(text) > longest:
                raise BadField(f"a text of {where} has {len(text)} characters; the limit is {longest}")
        return texts

    def read(reader: Any, small: bool) -> Any:
        found = reader._get_by_field(field)
        texts = tuple(map(found._get, range(_counted(where, len(found), most))))
        return texts if small else check(texts)

    def write(builder: Any, value: Any) -> None:
        if value:
            into = builder._init_by_field(field, _counted(where, len(value), most))
            for index, text in enumerate(check(tuple(value))):
                into._set(index, text)

    return read, write


def _structs(where: str, field: Any, kind: _Kind) -> tuple[Reader, Writer]:
    assert kind.item is not None
    table, most = Table(kind.item.base), kind.most

    def read(reader: Any, small: bool) -> Any:
        found = reader._get_by_field(field)
        item = found._get
        return tuple([table.read(item(index), small) for index in range(_counted(where, len(found), most))])

    def write(builder: Any, value: Any) -> None:
        if value:
            into = builder._init_by_field(field, _counted(where, len(value), most))
            for index, each in enumerate(value):
                table.write(into._get(index), each)

    return read, write


def _struct(field: Any, kind: _Kind) -> tuple[Reader, Writer]:
    table = Table(kind.base)

    def read(reader: Any, small: bool) -> Any:
        return table.read(reader._get_by_field(field), small) if reader._has_by_field(field) else None

    def write(builder: Any, value: Any) -> None:
        if value is not None:
            table.write(builder._init_by_field(field), value)

    return read, write
