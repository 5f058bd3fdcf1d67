"""A client with nothing but the standard library: it knows the protocol from docs/protocol.md and its frames alone.

    python -I -S plain_client.py FRAMES.json HOST PORT [CA CERT KEY]     exit code 0, or a line that says what is wrong

It builds and reads Cap'n Proto by hand, with struct, from the places that docs/protocol.md gives; checks its own hand-made frames
against the published bytes; then speaks to the server: ping, an unknown opcode, join, heartbeat, status and long poll, a
job, a push and its acknowledgement, a frame in two segments, and a frame that is none.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import sys
from typing import Any

REPLY, DONE, REFUSAL, REDIRECT = 1, 1, 2, 3
PING, JOIN, HEARTBEAT, CTRL_STATUS, JOB_PUSH, PUSH_ACK, JOB_SUBMIT, JOB_QUERY = 2, 10, 11, 20, 30, 33, 60, 61
SCHEDULER = 3


# ---------------------------------------------------------------- writing


class Struct:
    """One struct to be written: its data section, and what its pointers lead to (text, list of texts, None)."""

    def __init__(self, data_words: int, pointers: int) -> None:
        self.data = bytearray(8 * data_words)
        self.pointers: list[Any] = [None] * pointers

    def number(self, form: str, at: int, value: int) -> Struct:
        """A number at byte `at` of the data section."""
        struct.pack_into("<" + form, self.data, at, value)
        return self

    def bit(self, at: int, bit: int) -> Struct:
        """A truth value that is true: bit `bit` of byte `at`."""
        self.data[at] |= 1 << bit
        return self

    def pointer(self, index: int, target: Any) -> Struct:
        """What pointer `index` leads to."""
        self.pointers[index] = target
        return self

    def write(self, body: bytearray) -> bytearray:
        """Write the struct at the end of `body` (a bytearray), then all that it points to."""
        start = len(body)
        body += self.data + bytes(8 * len(self.pointers))
        for index, target in enumerate(self.pointers):
            if target is not None:
                place(body, start + len(self.data) + 8 * index, target)
        return body


def place(body: bytearray, at: int, target: Any) -> None:
    """Append `target` to body and make the pointer word at byte `at` lead to it."""
    offset = (len(body) - at - 8) // 8  # in words, from the end of the pointer
    if isinstance(target, Struct):
        low, high = offset << 2, len(target.data) // 8 | len(target.pointers) << 16
    elif isinstance(target, str):
        data = target.encode() + b"\0"
        low, high = offset << 2 | 1, len(data) << 3 | 2  # a list of bytes, the zero at its end included
    else:
        low, high = offset << 2 | 1, len(target) << 3 | 6  # a list of pointers
    struct.pack_into("<II", body, at, low, high)
    if isinstance(target, Struct):
        target.write(body)
    elif isinstance(target, str):
        body += data + bytes(-len(data) % 8)
    else:
        start = len(body)
        body += bytes(8 * len(target))
        for index, item in enumerate(target):
            place(body, start + 8 * index, item)


def frame(opcode: int, number: int, body: Struct | None) -> bytes:
    """A whole frame around a body."""
    request = Struct(2, 1).number("H", 0, opcode).number("Q", 8, number).pointer(0, body)
    words = bytearray(8)
    place(words, 0, request)
    message = struct.pack("<II", 0, len(words) // 8) + words
    return struct.pack("<Q", len(message)) + message


def join(number: int) -> bytes:
    """A scheduler's join."""
    body = Struct(2, 4).number("H", 0, SCHEDULER).number("Q", 8, 7)
    return frame(JOIN, number, body.pointer(0, "sched-c1").pointer(1, "c1").pointer(2, "5f0c9a7e31d84b26"))


# ---------------------------------------------------------------- reading


class View:
    """One struct to be read: words of its segment, where its data begins, how long its sections are."""

    def __init__(self, words: bytes, at: int, data_words: int, pointers: int) -> None:
        self.words, self.at, self.data_words, self.pointers = words, at, data_words, pointers

    def number(self, form: str, at: int) -> int:
        """The number at byte `at`; 0 where the sender's struct is shorter."""
        if at + struct.calcsize(form) > 8 * self.data_words:
            return 0
        return int(struct.unpack_from("<" + form, self.words, 8 * self.at + at)[0])

    def bit(self, at: int, bit: int) -> bool:
        """The truth value at bit `bit` of byte `at`."""
        return bool(self.number("B", at) >> bit & 1)

    def target(self, index: int) -> Any:
        """What pointer `index` leads to: None, a View, a text, or a list of Views or texts."""
        if index >= self.pointers:
            return None
        return follow(self.words, self.at + self.data_words + index)


def follow(words: bytes, at: int) -> Any:
    """Follow the pointer word at word `at`."""
    low, high = struct.unpack_from("<II", words, 8 * at)
    if (low, high) == (0, 0):
        return None
    offset = (low - (1 << 32) if low >> 31 else low) >> 2
    start = at + 1 + offset
    if low & 3 == 0:
        return View(words, start, high & 0xFFFF, high >> 16)
    assert low & 3 == 1, "a far pointer: a server of this project writes none"
    kind, count = high & 7, high >> 3
    if kind == 2:
        return bytes(words[8 * start : 8 * start + count - 1]).decode()
    if kind == 6:
        return [follow(words, start + index) for index in range(count)]
    assert kind == 7, f"list of kind {kind}"
    tag_low, tag_high = struct.unpack_from("<II", words, 8 * start)
    step = (tag_high & 0xFFFF) + (tag_high >> 16)
    return [View(words, start + 1 + step * index, tag_high & 0xFFFF, tag_high >> 16) for index in range(tag_low >> 2)]


class Reply:
    """One frame, taken apart."""

    def __init__(self, message: bytes) -> None:
        segments, length = struct.unpack_from("<II", message)
        assert segments == 0 and 8 + 8 * length == len(message), "not one segment"
        root = follow(message[8:], 0)
        self.opcode, self.answer, self.id = root.number("H", 0), root.number("H", 2), root.number("Q", 8)
        self.body: Any = root.target(0)


class Wire:
    """Frames on a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pushes: list[Reply] = []

    def exactly(self, count: int) -> bytes:
        """Read so many bytes."""
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the server ended the connection"
            data += more
        return data

    def next(self) -> Reply:
        """Read the next frame."""
        (length,) = struct.unpack("<Q", self.exactly(8))
        return Reply(self.exactly(length))

    def ask(self, data: bytes, number: int, answer: int) -> Any:
        """Send a request; return its reply, which must be of this kind. Pushes that come between are kept."""
        self.sock.sendall(data)
        while True:
            got = self.next()
            if got.opcode != REPLY:
                assert got.id == 0, "a push has id 0"
                self.pushes.append(got)
                continue
            assert (got.id, got.answer) == (number, answer), f"reply {got.answer} to {got.id}; wanted {answer} to {number}"
            return got.body


# ---------------------------------------------------------------- the conversation


def check_frames(published: list[dict[str, Any]]) -> None:
    """Hand-made frames are the published ones, byte for byte; published replies say what the document says."""
    by_name = {each["name"]: each for each in published}
    assert join(2).hex() == by_name["join"]["bytes"], join(2).hex()
    status = Reply(bytes.fromhex(by_name["ctrlstatus-reply"]["bytes"])[8:])
    fields = by_name["ctrlstatus-reply"]["fields"]
    read_status(status.body, fields)


def read_status(body: Any, fields: dict[str, Any]) -> None:
    """Compare a status reply with what it should say."""
    texts = ("controllerId", "instanceId", "role", "primaryAddress", "primaryId", "gate", "gateDetail")
    for index, name in enumerate(texts):
        assert (body.target(index) or "") == fields.get(name, ""), name
    assert body.number("Q", 0) == fields["term"]
    session = body.target(7)
    if "scheduler" in fields:
        assert session.bit(0, 0) == fields["scheduler"]["joined"]
        assert session.target(1) == fields["scheduler"]["spawnToken"]
    else:
        assert session is None


def two_segments(number: int) -> bytes:
    """A ping whose root struct lies in a second segment, behind a far pointer: a server must take it."""
    far = struct.pack("<II", 0 << 3 | 2, 1)  # landing pad at word 0 of segment 1
    pad = struct.pack("<IHH", 0, 2, 1)  # the root pointer, in segment 1: the struct follows at once
    root = Struct(2, 1).number("H", 0, PING).number("Q", 8, number).write(bytearray())
    message = struct.pack("<IIII", 1, 1, (len(pad) + len(root)) // 8, 0) + far + pad + root
    return struct.pack("<Q", len(message)) + message


def converse(wire: Wire) -> None:
    """Speak to a server that plays a controller."""
    wire.ask(frame(PING, 1, Struct(0, 0)), 1, DONE)
    refused = wire.ask(frame(999, 2, None), 2, REFUSAL)
    assert refused.number("H", 0) == 2 and "999" in refused.target(0), "UNSUPPORTED was expected"
    joined = wire.ask(join(3), 3, JOIN)
    session = joined.target(0)
    assert joined.target(1) == "c1" and joined.number("Q", 0) == 7 and session
    beat = wire.ask(frame(HEARTBEAT, 4, Struct(0, 1).pointer(0, session)), 4, HEARTBEAT)
    assert beat.target(0) == "primary" and beat.number("Q", 0) == 7
    status = wire.ask(frame(CTRL_STATUS, 5, Struct(2, 0)), 5, CTRL_STATUS)
    assert status.target(0) == "c1" and status.target(2) == "primary" and status.number("Q", 0) == 7
    asked = frame(CTRL_STATUS, 6, Struct(2, 0).number("Q", 0, 1).number("I", 8, 50))
    wire.ask(asked, 6, CTRL_STATUS)
    submit = Struct(1, 3).number("I", 0, 2).bit(4, 0).pointer(0, "job-1").pointer(1, ["/bin/echo", "zwölf"])
    wire.ask(frame(JOB_SUBMIT, 7, submit), 7, DONE)
    wire.ask(two_segments(8), 8, DONE)
    redirect = wire.ask(frame(JOB_QUERY, 9, Struct(2, 1)), 9, REDIRECT)
    assert redirect.target(0) == "c2.example:7300" and redirect.number("Q", 0) == 8
    push = wire.pushes[0] if wire.pushes else wire.next()
    assert push.opcode == JOB_PUSH and push.body.number("Q", 0) == 1
    (job,) = push.body.target(0)
    assert job.target(0) == "job-1" and job.target(1) == ["/bin/echo", "zwölf"] and job.number("I", 0) == 2
    ack = Struct(1, 1).number("Q", 0, push.body.number("Q", 0)).pointer(0, session)
    wire.ask(frame(PUSH_ACK, 10, ack), 10, DONE)
    wire.sock.sendall(struct.pack("<Q", 12) + b"no message!!")
    assert wire.sock.recv(1) == b"", "the server should have hung up"


def main(frames: str, host: str, port: str, *tls: str) -> None:
    with open(frames, encoding="utf-8") as file:
        check_frames(json.load(file))
    sock = socket.create_connection((host, int(port)), timeout=5)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.load_verify_locations(tls[0])
        context.load_cert_chain(tls[1], tls[2])
        sock = context.wrap_socket(sock)
        shown: Any = sock.getpeercert()
        names = [value for kind, value in shown["subjectAltName"] if kind == "URI"]
        assert names == ["xce://test/controller/c1"], names
    with sock:
        converse(Wire(sock))
    print("spoke the protocol")


if __name__ == "__main__":
    main(*sys.argv[1:])
