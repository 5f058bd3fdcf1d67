"""Throws broken frames at the decoder; run in a process of its own, because what it looks for is an abort of the process.

    python -m tests.wire.fuzz SEED ROUNDS     prints one line: how many of each outcome; exit code 0

Every outcome must be a frame, a BadMessage that can be refused, or MalformedFrame; the interpreter's own recursion, memory and
system errors, and signals, are failures.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
from collections import Counter
from typing import Final

from tests.wire.values import body_classes, filled, frame_of
from xce_supervisor.wire.codec import BadMessage, Decoder, MalformedFrame, encode
from xce_supervisor.wire.words import Opcode

MEMORY_BYTES: Final = 1 << 30  # of address space: a decoder that believes what a frame claims runs into it
SEEDS: Final = [encode(frame_of(filled(cls)))[8:] for cls in body_classes()]
ENVELOPE: Final = struct.Struct("<II IHH HHIQ")  # segments, root pointer, opcode, answer, id


def framed(message: bytes) -> bytes:
    """The message with its true length."""
    return struct.pack("<Q", len(message)) + message


def random_bytes(chance: random.Random) -> bytes:
    """No frame at all, or a frame full of nothing."""
    noise = chance.randbytes(chance.choice((8, 16, 40, 200, 1000)))
    return noise if chance.random() < 0.3 else framed(noise[: len(noise) // 8 * 8])


def mutated(chance: random.Random) -> bytes:
    """A true message with some bytes or words changed."""
    message = bytearray(chance.choice(SEEDS))
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if chance.random() < 0.5:
            message[chance.randrange(len(message))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        else:
            word = chance.randrange(len(message) // 8) * 8
            message[word : word + 8] = pointer(chance)
    return framed(bytes(message))


def pointer(chance: random.Random) -> bytes:
    """A word that looks like a pointer: struct, list, far or other; near, far off, backwards, or at itself."""
    kind = chance.randrange(4)
    offset = chance.choice((-1, 0, 1, -2, 3, 2**28, -(2**28), chance.randrange(-64, 64)))
    low = ((offset << 2) | kind) & 0xFFFFFFFF
    high = chance.choice((0, 0xFFFFFFFF, 0x7, 0xFFFFFFFF & (2**29 - 1) << 3, chance.getrandbits(32), (8 << 3) | 2, (8 << 3) | 6))
    return struct.pack("<II", low, high)


def truncated(chance: random.Random) -> bytes:
    """A true message cut at a word, with the length that it then has."""
    message = chance.choice(SEEDS)
    return framed(message[: chance.randrange(2, len(message) // 8 + 1) * 8])


def nested(chance: random.Random) -> bytes:
    """A root whose body is made of pointers to pointers to themselves: endless nesting in a few words."""
    depth = chance.randrange(1, 64)
    opcode = int(chance.choice(list(Opcode)))
    words_ = [struct.pack("<HHIQ", opcode, chance.choice((0, 20, 61)), 0, 9)]
    words_ += [pointer(chance) if chance.random() < 0.3 else struct.pack("<IHH", 0, 0, 1) for _ in range(depth)]
    body = struct.pack("<IHH", 0, 2, 1) + b"".join(words_)
    return framed(struct.pack("<II", 0, len(body) // 8) + body)


def segments(chance: random.Random) -> bytes:
    """A true message behind a segment table of other sizes."""
    message = chance.choice(SEEDS)[8:]
    count = chance.choice((1, 2, 3, 4, 8))
    left = len(message) // 8
    sizes = [chance.randrange(left + 1) for _ in range(count - 1)]
    sizes.append(max(0, left - sum(sizes)))
    table = struct.pack(f"<{count + 1}I", count - 1, *sizes)
    return framed(table + b"\0" * (-len(table) % 8) + message)


KINDS: Final = (random_bytes, mutated, mutated, mutated, truncated, nested, segments)


def one(data: bytes) -> str:
    """What the decoder makes of it."""
    try:
        got = Decoder(1 << 20).feed(data)
    except MalformedFrame as error:
        assert str(error) and len(str(error)) < 400 and "stack:" not in str(error), str(error)
        return "malformed"
    if not got:
        return "waits"
    return "bad message" if isinstance(got[0], BadMessage) else "frame"


def main(seed: int, rounds: int) -> None:
    """Throw `rounds` broken frames."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(rounds):
        data = chance.choice(KINDS)(chance)
        try:
            outcomes[one(data)] += 1
        except BaseException:
            print(f"seed {seed} round {number}: {data.hex()}", file=sys.stderr)
            raise
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
