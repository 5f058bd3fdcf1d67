"""Frames to bytes and back: an 8-byte little-endian length, then one unpacked Cap'n Proto message (docs/protocol.md).

Nothing here opens, waits or logs. The decoder is fed what arrived, in any pieces; it holds no more than one frame's worth of
received bytes, and refuses a length above its limit from the header alone. A frame that is whole but whose message cannot be
used (an unknown opcode, a text that is too long) comes out as `BadMessage`, because its request can still be answered; bytes
that are no frame of ours raise `MalformedFrame`, and the connection is over.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import capnp
import msgspec

from xce_supervisor.errors import PeerError
from xce_supervisor.wire import words
from xce_supervisor.wire.tables import SCHEMA, BadField, Table
from xce_supervisor.wire.words import Done, ErrorCode, Frame, Message, Opcode, Redirect, Refusal

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024  # docs/design: 64 MiB, configurable
REPLY: Final = 1
_DONE, _REFUSAL, _REDIRECT = 1, 2, 3  # what `answer` says of a reply that has no opcode of its own
_HEADER = struct.Struct("<Q")
_SEGMENTS = struct.Struct("<II")
_SEGMENTS_MAX = 512  # Cap'n Proto's own
_LEAST_BYTES = 16  # one segment table and one root pointer
_NESTING = 16  # ours needs 4
_WORDS_MAX = FRAME_BYTES_MAX // 8  # of a first segment; the kernel gives such memory only as it is written to
_TRAVERSAL_WORDS_MIN = 64 * 1024  # each read of a pointer counts, so a small message needs more than its size


class MalformedFrame(PeerError):
    """What arrived is no frame of this protocol. The connection cannot go on."""


class BadMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole frame whose message cannot be used. id: what to answer, 0 for a push. opcode: as sent, maybe unknown."""

    id: int
    opcode: int
    is_reply: bool
    code: ErrorCode
    text: str

    def refusal(self) -> Frame:
        """The reply to a request that came so."""
        return Frame(id=self.id, body=Refusal(code=self.code, text=self.text), is_reply=True)


Incoming = Frame | BadMessage


def _tables() -> tuple[dict[int, Table], dict[int, Table], dict[type, tuple[Table, int, int]]]:
    """Return the tables of requests by opcode, of replies by answer, and of both by class with their opcode and answer.

    A words class that can only be a reply is one whose opcode a class before it already has.
    """
    requests: dict[int, Table] = {}
    replies: dict[int, Table] = {}
    by_class: dict[type, tuple[Table, int, int]] = {}
    for cls in vars(words).values():
        if not (isinstance(cls, type) and issubclass(cls, Message) and hasattr(cls, "opcode")):
            continue
        table, opcode = Table(cls), int(cls.opcode)
        if opcode not in requests:
            requests[opcode] = table
            by_class[cls] = (table, opcode, 0)
        else:
            assert opcode not in replies, f"{cls.__name__}: opcode {opcode} has a request and a reply already"
            replies[opcode] = table
            by_class[cls] = (table, REPLY, opcode)
    for cls, answer in ((Done, _DONE), (Refusal, _REFUSAL), (Redirect, _REDIRECT)):
        replies[answer] = Table(cls)
        by_class[cls] = (replies[answer], REPLY, answer)
    assert set(requests) == {int(each) for each in Opcode}, "an opcode without a message"
    return requests, replies, by_class


_REQUESTS, _REPLIES, _BY_CLASS = _tables()
_ENVELOPE = SCHEMA.Request
_F_OPCODE, _F_ANSWER, _F_ID, _F_BODY = (_ENVELOPE.schema.fields[name] for name in ("opcode", "answer", "id", "body"))
# Length, segment table, root pointer, and the envelope's two data words, as encode writes them; then the body's pointer follows.
_OPENING = struct.Struct("<QIIIIHHIQ")
_ENVELOPE_OPEN = struct.Struct("<IIHH4xQ")
_ENVELOPE_BYTES = 24
_ENVELOPE_SIZES = 0x0001_0002  # one pointer, two data words
_USUAL_MIN, _USUAL_MAX = 40, 1 << 20  # longer ones are not copied for the sake of a microsecond
_READ = _ENVELOPE.read_multiple_bytes
# Everything that pycapnp was seen to raise on hostile bytes and on values that do not fit.
_CAPNP_ERRORS = (capnp.KjException, ValueError, RuntimeError, OverflowError, TypeError)


def _plain(error: Exception) -> str:
    """A library's error in one short line, without its source file and its stack addresses."""
    if isinstance(error, UnicodeError):
        return "a text is not UTF-8"
    text = error.description if isinstance(error, capnp.KjException) and error.wrapper is not None else str(error)
    line = (text or type(error).__name__).strip().splitlines()[0]
    return line.split(" failed: ")[-1][:200]


def encode(frame: Frame) -> bytes:
    """Return the frame's bytes, length included. The message is one segment, which spares simple readers far pointers.

    Raises:
        ValueError: the message does not fit the schema or a limit of words.py (names message and field): a bug of ours, or an
            operator's input that nobody checked before.
    """
    body: Any = frame.body
    table, opcode, answer = _BY_CLASS[type(body)]
    assert frame.is_reply == (opcode == REPLY), f"{table.title} is {'a' if opcode == REPLY else 'no'} reply"
    error: str
    try:
        message = table.new(table.words)
        table.write(message, body)
        packed: bytes = message.to_bytes()
        if packed[:4] != b"\0\0\0\0" and len(packed) <= FRAME_BYTES_MAX:  # more than one segment
            table.words = min(_WORDS_MAX, 1 << (len(packed) // 8).bit_length())
            return encode(frame)
        length = len(packed) + _ENVELOPE_BYTES
        return _OPENING.pack(length, 0, length // 8 - 1, 0, _ENVELOPE_SIZES, opcode, answer, 0, frame.id) + packed[8:]
    except BadField as bad:
        error = str(bad)
    except (*_CAPNP_ERRORS, struct.error) as bad:
        error = f"{table.title}: {_plain(bad)}"
    raise ValueError(f"cannot be sent: {error}")


def decode(message: bytes) -> Incoming | str:
    """Read one message (a frame without its length). Returns a text instead of raising: no traceback may hold a reader."""
    length = len(message)
    count, first = _SEGMENTS.unpack_from(message)
    if (count or 8 + 8 * first != length) and (wrong := _wrong_segments(message)):
        return wrong
    if count == 0 and _USUAL_MIN <= length <= _USUAL_MAX and (found := _decode_usual(message, length)) is not None:
        return found
    return _decode_any(message, length)


def _decode_usual(message: bytes, length: int) -> Incoming | None:
    """Read a message whose envelope lies as this project writes it; None if it does not, or if its body cannot be read so.

    The envelope is taken off by hand: what is left, from the body's pointer on, is a message whose root is the body.
    """
    root, sizes, opcode, answer, number = _ENVELOPE_OPEN.unpack_from(message, 8)
    if root or sizes != _ENVELOPE_SIZES:
        return None
    table = _REQUESTS.get(opcode) or (_REPLIES.get(answer) if opcode == REPLY else None)
    if table is None:
        return _bad(number, opcode, ErrorCode.UNSUPPORTED, _unknown(opcode, answer))
    try:
        rest = _SEGMENTS.pack(0, length // 8 - 4) + message[32:]
        for reader in table.readers(rest, traversal_limit_in_words=_traversal(length), nesting_limit=_NESTING):
            return Frame(id=number, body=table.read(reader), is_reply=opcode == REPLY)
    except BadField as error:
        return _bad(number, opcode, ErrorCode.MALFORMED, str(error))
    except _CAPNP_ERRORS:
        pass  # read whole, it says what is wrong, or is right after all (a pointer may lead back)
    return None


def _decode_any(message: bytes, length: int) -> Incoming | str:
    """Read a message however it is laid out."""
    opcode = number = 0
    known = False
    try:
        for reader in _READ(message, traversal_limit_in_words=_traversal(length), nesting_limit=_NESTING):
            get = reader._get_by_field
            opcode, answer, number = get(_F_OPCODE), get(_F_ANSWER), get(_F_ID)
            known = True
            table = _REQUESTS.get(opcode) or (_REPLIES.get(answer) if opcode == REPLY else None)
            if table is None:
                return _bad(number, opcode, ErrorCode.UNSUPPORTED, _unknown(opcode, answer))
            body = table.read(get(_F_BODY).as_struct(table.schema))
            return Frame(id=number, body=body, is_reply=opcode == REPLY)
        return "the message is shorter than its own segment table says"
    except BadField as error:
        return _bad(number, opcode, ErrorCode.MALFORMED, str(error))
    except _CAPNP_ERRORS as error:
        text = f"the message cannot be read: {_plain(error)}"
        return _bad(number, opcode, ErrorCode.MALFORMED, text) if known else text


def _traversal(length: int) -> int:
    """The limit on words read: 4 times the frame, in words of 8 bytes."""
    return max(_TRAVERSAL_WORDS_MIN, length // 2)


def _bad(number: int, opcode: int, code: ErrorCode, text: str) -> BadMessage:
    return BadMessage(id=number, opcode=opcode, is_reply=opcode == REPLY, code=code, text=text)


def _unknown(opcode: int, answer: int) -> str:
    return f"a reply of kind {answer} is not known here" if opcode == REPLY else f"opcode {opcode} is not known here"


def _wrong_segments(message: bytes) -> str:
    """Compare the segment table with the length: pycapnp passes over bytes behind the message. Returns "" if right."""
    length = len(message)
    count, first = _SEGMENTS.unpack_from(message)
    if count == 0:
        total = 8 + 8 * first
    elif count >= _SEGMENTS_MAX:
        return f"the message claims {count + 1} segments; the limit is {_SEGMENTS_MAX}"
    else:
        table = (4 * (count + 2) + 7) // 8 * 8
        if length < table:
            return "the message ends inside its segment table"
        total = table + 8 * sum(struct.unpack_from(f"<{count + 1}I", message, 4))
    if total != length:
        return f"the frame has {length} bytes, its message claims {total}"
    return ""


class Decoder:
    """Cuts a stream of bytes into frames. limit: the longest frame taken, in bytes without its length field."""

    def __init__(self, limit: int = FRAME_BYTES_MAX) -> None:
        self._limit = limit
        self._held = bytearray()

    @property
    def buffered(self) -> int:
        """How many received bytes wait for the rest of their frame: at most the limit and what one feed brought."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Incoming]:
        """Take what arrived; return what is whole, in order.

        Raises:
            MalformedFrame: these bytes are no frame. What came whole before them in the same call is lost with the
                connection. The decoder is of no use afterwards.
        """
        held = self._held
        if held:
            held += data
            source: bytes | bytearray = held
        else:
            source = data
        whole: list[Incoming] = []
        start, end = 0, len(source)
        while end - start >= 8:
            (length,) = _HEADER.unpack_from(source, start)
            self._check(length)
            if end - start - 8 < length:
                break
            message = bytes(source[start + 8 : start + 8 + length])
            found = decode(message)
            if isinstance(found, str):
                raise MalformedFrame(found)
            whole.append(found)
            start += 8 + length
        if source is held:
            del held[:start]
        elif start < end:
            held += source[start:]
        return whole

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise MalformedFrame(f"a frame of {length} bytes is announced; the limit is {self._limit}: no XCE peer, or garbage")
        if length < _LEAST_BYTES or length % 8:
            raise MalformedFrame(
                f"a frame of {length} bytes is announced; it must be a multiple of 8, and {_LEAST_BYTES} at least"
            )
