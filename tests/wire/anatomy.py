"""Where each field lies in its struct, from the schema; and what each word of a frame is, read by hand."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from xce_supervisor.wire.codec import REPLY
from xce_supervisor.wire.tables import SCHEMA
from xce_supervisor.wire.words import Opcode

_SIZES: Final = {"uint16": 2, "uint32": 4, "int32": 4, "uint64": 8}
_FORMS: Final = {"uint16": "<H", "uint32": "<I", "int32": "<i", "uint64": "<Q"}
_TYPES: Final = {
    "bool": "Bool",
    "text": "Text",
    "anyPointer": "any struct",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "int32": "Int32",
}
_REPLIES: Final = {1: "Done", 2: "Refusal", 3: "Redirect"}


def layouts() -> str:
    """A table for every struct, in the order of the schema."""
    return "\n".join(line for node in SCHEMA.schema.node.nestedNodes for line in _layout(node.name))


def _layout(title: str) -> Iterator[str]:
    node = getattr(SCHEMA, title).schema.node.struct
    yield f"#### {title}: {node.dataWordCount} data words, {node.pointerCount} pointers"
    yield ""
    if not len(node.fields):
        yield "No fields."
        yield ""
        return
    yield "| field | type | place |"
    yield "|---|---|---|"
    for field in node.fields:
        yield f"| {field.name} | {_type(field.slot.type)} | {_place(str(field.slot.type.which()), field.slot.offset)} |"
    yield ""


def _type(found: Any) -> str:
    kind = str(found.which())
    if kind == "list":
        return f"list of {_type(found.list.elementType)}"
    if kind == "struct":
        return _struct_name(found.struct.typeId)
    return _TYPES.get(kind, "UInt64")


def _struct_name(type_id: int) -> str:
    return next(str(node.name) for node in SCHEMA.schema.node.nestedNodes if node.id == type_id)


def _place(kind: str, offset: int) -> str:
    if kind == "bool":
        return f"byte {offset // 8}, bit {offset % 8}"
    if kind in _SIZES:
        first = offset * _SIZES[kind]
        return f"bytes {first} to {first + _SIZES[kind] - 1}"
    return f"pointer {offset}"


# ---------------------------------------------------------------- the words of a frame


def notes(frame: bytes) -> dict[int, str]:
    """Return what each word of a frame of one segment is, by its byte offset."""
    message = frame[8:]
    found = {0: f"length: {len(message)} bytes follow", 8: f"1 segment, of {len(message) // 8 - 1} words"}
    walk = _Walk(frame, found)
    walk.pointer(16, "root", "Request")
    return found


class _Walk:
    def __init__(self, frame: bytes, found: dict[int, str]) -> None:
        self._frame = frame
        self._notes = found

    def _words(self, at: int) -> tuple[int, int]:
        low, high = struct.unpack_from("<II", self._frame, at)
        return int(low), int(high)

    def pointer(self, at: int, name: str, title: str) -> None:
        """Note the pointer word at byte `at`, and what it leads to. title: the struct's name, "Text", or "list of ..."."""
        low, high = self._words(at)
        if (low, high) == (0, 0):
            self._notes[at] = f"{name}: nothing"
            return
        offset = (low - (1 << 32) if low >> 31 else low) >> 2
        to = at + 8 + 8 * offset
        if low & 3 == 0:
            self._notes[at] = f"{name}: struct {title} at {to}, {high & 0xFFFF} data words, {high >> 16} pointers"
            self.struct(to, title, high & 0xFFFF)
        elif title == "Text":
            self._notes[at] = f"{name}: text at {to}, {(high >> 3) - 1} bytes and a zero"
        else:
            self._list(at, name, title.removeprefix("list of "), to, high)

    def _list(self, at: int, name: str, item: str, to: int, high: int) -> None:
        count = high >> 3
        if high & 7 == 6:
            self._notes[at] = f"{name}: list at {to}, {count} pointers"
            for index in range(count):
                self.pointer(to + 8 * index, f"{name}[{index}]", item)
            return
        tag_low, tag_high = self._words(to)
        step = 8 * ((tag_high & 0xFFFF) + (tag_high >> 16))
        self._notes[at] = f"{name}: list at {to}, structs in {count} words behind a tag"
        self._notes[to] = f"tag: {tag_low >> 2} x {item}, {tag_high & 0xFFFF} data words, {tag_high >> 16} pointers"
        for index in range(tag_low >> 2):
            self.struct(to + 8 + step * index, item, tag_high & 0xFFFF)

    def struct(self, at: int, title: str, data_words: int) -> None:
        """Note the words of a struct whose data section begins at byte `at`."""
        said: dict[int, list[str]] = {}
        pointers: list[tuple[int, str, str]] = []
        for field in getattr(SCHEMA, title).schema.node.struct.fields:
            kind, offset = str(field.slot.type.which()), field.slot.offset
            if kind == "bool":
                value = self._frame[at + offset // 8] >> offset % 8 & 1
                said.setdefault(at + offset // 64 * 8, []).append(f"{field.name} {value}")
            elif kind in _SIZES:
                first = at + offset * _SIZES[kind]
                (value,) = struct.unpack_from(_FORMS[kind], self._frame, first)
                said.setdefault(first // 8 * 8, []).append(f"{field.name} {value}")
            else:
                target = self._body() if kind == "anyPointer" else _type(field.slot.type)
                pointers.append((at + 8 * data_words + 8 * offset, str(field.name), target))
        self._notes.update({word: ", ".join(texts) for word, texts in said.items()})
        for place, name, target in sorted(pointers):
            self.pointer(place, name, target)

    def _body(self) -> str:
        """The struct that the envelope's opcode or answer names."""
        opcode, answer = struct.unpack_from("<HH", self._frame, 24)
        if opcode == REPLY:
            return _REPLIES.get(answer) or _OWN_REPLIES[Opcode(answer)]
        return "".join(part.capitalize() for part in Opcode(opcode).name.split("_"))


_OWN_REPLIES: Final = {
    Opcode.JOIN: "Joined",
    Opcode.HEARTBEAT: "HeartbeatReply",
    Opcode.CTRL_STATUS: "CtrlStatusReply",
    Opcode.JOB_QUERY: "JobList",
}
