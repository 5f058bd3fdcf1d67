"""How each message of `wire.words` lies in its Cap'n Proto struct: one table a class, made once from both descriptions.

A words class `JobView` is the schema's struct `JobView`; its field `exit_code` is the field `exitCode`. What is zero, empty,
false or null on the wire was not given, and becomes the field's default. Readers and builders of Cap'n Proto do not leave
this package: printing one that holds hostile bytes can abort the process.

Two things make it fast, and each is measured by benchmarks/wire.py. Fields are looked up once, here, because pycapnp's access by
a cached field costs a fifth of its access by name. And each class's two functions are written out as source and compiled
once, as the standard library does for its own data classes: loops over a table cost as much as the reads themselves.
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


Lines = list[str]


class Table:
    """How one class of words.py is written to and read from its struct.

    read(reader): the words value. write(builder, value): fills an empty builder. Both raise BadField and what pycapnp raises.
    words: for how long a message the encoder makes room, in words of 8 bytes; grows with what was sent.

    Raises (on making one): AssertionError if words.py and the schema do not agree: a bug of ours, seen at import.
    """

    def __init__(self, cls: type[msgspec.Struct]) -> None:
        self.title = cls.__name__
        self.words = 256
        module = getattr(SCHEMA, self.title)
        self.schema: Any = module.schema
        self.new: Callable[[int], Any] = module.new_message
        self.readers: Callable[..., Any] = module.read_multiple_bytes
        self._names: dict[str, Any] = {"cls": cls, "too_long": _too_long}  # what the compiled functions see
        before: Lines = []
        arguments: Lines = []
        writing: Lines = []
        for index, info in enumerate(structs.fields(cls)):
            argument = self._field(index, info, before, writing)
            arguments.append(f"{info.name}={argument},")
        reader = ["def read(reader):", " get = reader._get_by_field", *before, " return cls(", *arguments, " )"]
        writer = ["def write(builder, value):", " put = builder._set_by_field", *writing, " return None"]
        exec(compile("\n".join([*reader, *writer]), f"<table of {self.title}>", "exec"), self._names)
        self.read: Callable[[Any], Any] = self._names["read"]
        self.write: Callable[[Any, Any], None] = self._names["write"]

    def _field(self, index: int, info: structs.FieldInfo, before: Lines, writing: Lines) -> str:
        """Add what one field needs to the source of both functions; return the expression that reads it."""
        names, where, kind = self._names, f"{self.title}.{info.name}", _kind(info.type)
        field, got = f"f{index}", f"get(f{index})"
        names[field] = self._in_schema(info.name)
        writing.append(f" x = value.{info.name}")
        default = ""
        if info.default is not msgspec.NODEFAULT and info.default and kind.base in (int, bool, str):
            names[f"d{index}"], default = info.default, f" or d{index}"
        if kind.base in (int, bool) and not kind.optional:
            writing.append(f" if x: put({field}, x)")
            return f"{got}{default}"
        if kind.base is int:
            names[f"h{index}"] = self._in_schema(f"has_{info.name}")
            writing.append(f" if x is not None: put(h{index}, True); put({field}, x)")
            return f"{got} if get(h{index}) else None"
        if kind.base is str:
            assert kind.most, f"{where} has no limit"
            before += [f" t{index} = {got}", f" if len(t{index}) > {kind.most}: too_long({where!r}, t{index}, {kind.most})"]
            too_long = f"x = x[:{kind.most - 1}] + '…'" if kind.cut else f"too_long({where!r}, x, {kind.most})"
            writing += [" if x:", f"  if len(x) > {kind.most}: {too_long}", f"  put({field}, x.encode())"]  # bytes set faster
            return f"t{index}{default}"
        if kind.base is tuple:
            assert kind.item is not None and kind.most, f"{where} has no limit"
            many = _texts if kind.item.base is str else _structs
            names[f"r{index}"], names[f"w{index}"] = many(where, kind)
            writing.append(f" if x: w{index}(builder, {field}, x)")
            return f"r{index}({got}) if reader._has_by_field({field}) else ()"
        if issubclass(kind.base, IntEnum):
            names[f"r{index}"] = _enum(where, kind.base)
            writing.append(f" put({field}, int(x))")
            return f"r{index}({got})"
        assert kind.optional, f"{where}: a struct inside a struct may always be missing"
        inner = Table(kind.base)
        names[f"r{index}"], names[f"w{index}"] = inner.read, inner.write
        writing.append(f" if x is not None: w{index}(builder._init_by_field({field}), x)")
        return f"r{index}({got}) if reader._has_by_field({field}) else None"

    def _in_schema(self, name: str) -> Any:
        wire_name = _camel(name)
        assert wire_name in self.schema.fields, f"{SCHEMA_FILE.name}: struct {self.title} has no field {wire_name}"
        return self.schema.fields[wire_name]


def _too_long(where: str, text: str, most: int) -> None:
    raise BadField(f"{where} has {len(text)} characters; the limit is {most}")


def _enum(where: str, enum: type[IntEnum]) -> Callable[[int], IntEnum]:
    known = {each.value: each for each in enum}
    # A newer peer's no is still a no; a role that is not known here is nobody.
    other = words.ErrorCode.OTHER if enum is words.ErrorCode else None

    def read(number: int) -> IntEnum:
        found = known.get(number, other)
        if found is None:
            raise BadField(f"{where} is {number}, which is not one of {list(known)}")
        return found

    return read


def _counted(where: str, count: int, most: int) -> int:
    """Lists are counted before they are walked: a list of empty structs can claim half a billion items in eight bytes."""
    if count > most:
        raise BadField(f"{where} has {count} items; the limit is {most}")
    return count


Many = tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any, Any, tuple[Any, ...]], None]]


def _texts(where: str, kind: _Kind) -> Many:
    assert kind.item is not None
    most, longest, item_where = kind.most, kind.item.most, f"a text of {where}"

    def read(found: Any) -> tuple[Any, ...]:
        texts = tuple(map(found._get, range(_counted(where, len(found), most))))
        for text in texts:
            if len(text) > longest:
                _too_long(item_where, text, longest)
        return texts

    def write(builder: Any, field: Any, texts: tuple[Any, ...]) -> None:
        into = builder._init_by_field(field, _counted(where, len(texts), most))
        for index, text in enumerate(texts):
            if len(text) > longest:
                _too_long(item_where, text, longest)
            into._set(index, text.encode())

    return read, write


def _structs(where: str, kind: _Kind) -> Many:
    assert kind.item is not None
    table, most = Table(kind.item.base), kind.most
    read_one, write_one = table.read, table.write

    def read(found: Any) -> tuple[Any, ...]:
        item = found._get
        return tuple([read_one(item(index)) for index in range(_counted(where, len(found), most))])

    def write(builder: Any, field: Any, values: tuple[Any, ...]) -> None:
        into = builder._init_by_field(field, _counted(where, len(values), most))
        for index, each in enumerate(values):
            write_one(into._get(index), each)

    return read, write
