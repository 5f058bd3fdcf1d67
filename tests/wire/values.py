"""Values of every message, for tests: one filled by hand-made rules, and any by hypothesis."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from xce_supervisor.wire import words
from xce_supervisor.wire.tables import SCHEMA
from xce_supervisor.wire.words import Done, ErrorCode, Frame, HostRole, Message, Opcode, Redirect, Refusal

_BITS = {"uint16": 16, "uint32": 32, "uint64": 64}


def body_classes() -> list[type[msgspec.Struct]]:
    """Every class that can be the body of a frame, in the order of words.py."""
    found = [cls for cls in vars(words).values() if isinstance(cls, type) and issubclass(cls, Message) and hasattr(cls, "opcode")]
    return [*found, Done, Refusal, Redirect]


def reply_classes() -> set[type[msgspec.Struct]]:
    """Those that are replies: the second class of an opcode, and the three that have none."""
    seen: set[Opcode] = set()
    replies: set[type[msgspec.Struct]] = {Done, Refusal, Redirect}
    for cls in body_classes():
        if not issubclass(cls, Message):
            continue
        if cls.opcode in seen:
            replies.add(cls)
        seen.add(cls.opcode)
    return replies


def frame_of(body: Any, number: int = 7) -> Frame:
    """The frame that carries `body`."""
    return Frame(id=number, body=body, is_reply=type(body) in reply_classes())


def camel(name: str) -> str:
    """The schema's name of a field."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def bits_of(title: str, name: str) -> int:
    """How wide the schema makes a number: 16, 32, 64, or -32 where it is signed."""
    kind = getattr(SCHEMA, title).schema.fields[camel(name)].proto.slot.type.which()
    return -32 if kind == "int32" else _BITS[str(kind)]


def filled(cls: type[msgspec.Struct]) -> Any:
    """A value with every field set to something that is not its default, the same at every call."""
    return cls(**{info.name: _fill(info.type, cls.__name__, info.name, order) for order, info in _fields(cls)})


def _fields(cls: type[msgspec.Struct]) -> Iterator[tuple[int, msgspec.structs.FieldInfo]]:
    return enumerate(msgspec.structs.fields(cls), start=1)


def _bare(hint: Any) -> Any:
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
        return _bare(hint)
    return hint


def _fill(hint: Any, title: str, name: str, order: int) -> Any:
    hint = _bare(hint)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(_fill(item, title, f"{name}-{index}", order + index) for index in range(2))
    if hint is bool:
        return True
    if hint is int:
        return -order if bits_of(title, name) < 0 else 2 ** (bits_of(title, name) - 1) + order
    if hint is str:
        return f"{name} {order} é"
    if issubclass(hint, IntEnum):
        return hint(2)
    return filled(hint)


def limit_of(hint: Any) -> int:
    """The limit that words.py sets on a text or list."""
    most = 0
    while hasattr(hint, "__metadata__"):
        for meta in hint.__metadata__:
            most = meta.max_length or most
        hint = hint.__origin__
    return most


def any_value(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value of a message that words.py and the schema allow, lists kept short."""
    return st.builds(cls, **{info.name: _any(info.type, cls.__name__, info.name) for _, info in _fields(cls)})


def _any(hint: Any, title: str, name: str) -> st.SearchStrategy[Any]:
    most, bare = limit_of(hint), _bare(hint)
    plain = hint
    while hasattr(plain, "__metadata__"):
        plain = plain.__origin__
    optional = get_origin(plain) in (Union, types.UnionType)
    if get_origin(bare) is tuple:
        return st.lists(_any(get_args(bare)[0], title, name), max_size=4).map(tuple)
    if bare is bool:
        found: st.SearchStrategy[Any] = st.booleans()
    elif bare is int:
        bits = bits_of(title, name)
        found = st.integers(-(2**31), 2**31 - 1) if bits < 0 else st.integers(0, 2**bits - 1)
    elif bare is str:
        found = st.text(st.characters(codec="utf-8"), max_size=min(most, 40))
    elif issubclass(bare, IntEnum):
        found = st.sampled_from([each for each in bare if each is not ErrorCode.OTHER])
    else:
        found = any_value(bare)
    return st.none() | found if optional else found


def with_defaults(value: Any) -> Any:
    """What a peer reads of `value`: an empty field comes out as its default."""
    changes: dict[str, Any] = {}
    for _, info in _fields(type(value)):
        found = getattr(value, info.name)
        if info.default is not msgspec.NODEFAULT and info.default and not isinstance(info.default, tuple) and found in (0, ""):
            changes[info.name] = info.default
        elif isinstance(found, msgspec.Struct):
            changes[info.name] = with_defaults(found)
        elif isinstance(found, tuple) and found and isinstance(found[0], msgspec.Struct):
            changes[info.name] = tuple(with_defaults(each) for each in found)
    return msgspec.structs.replace(value, **changes) if changes else value


assert HostRole(2) is HostRole.SUPERVISOR  # what `filled` uses for an enum
