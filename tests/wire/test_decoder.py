"""Bytes in any pieces to frames: whole, split, too long, or no frame at all (docs/rules.md A3)."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from tests.wire.values import body_classes, filled, frame_of
from xce_supervisor.wire.codec import FRAME_BYTES_MAX, Decoder, MalformedFrame, encode
from xce_supervisor.wire.words import Frame, Ping, Resync

FRAMES = [frame_of(filled(cls), number) for number, cls in enumerate(body_classes(), start=1)]
STREAM = b"".join(encode(frame) for frame in FRAMES)


def header(length: int) -> bytes:
    """The length field of a frame."""
    return struct.pack("<Q", length)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 16, 100, 1000, len(STREAM)])
def test_frames_come_whole_whatever_the_pieces(size: int) -> None:
    """Byte by byte, split inside the header, several in a segment: the same frames, in order."""
    decoder = Decoder()
    got = [frame for start in range(0, len(STREAM), size) for frame in decoder.feed(STREAM[start : start + size])]
    assert got == FRAMES
    assert decoder.buffered == 0


def test_a_frame_and_a_half_leaves_the_half() -> None:
    """What is whole is handed on at once; the rest waits."""
    one, two = encode(FRAMES[0]), encode(FRAMES[1])
    decoder = Decoder()
    assert decoder.feed(one + two[:11]) == [FRAMES[0]]
    assert decoder.buffered == 11
    assert decoder.feed(two[11:] + one) == [FRAMES[1], FRAMES[0]]


@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 8, 100_000_000_000, 2**63, 2**64 - 1, 0xFFFFFFFFFFFFFFF8])
def test_a_claimed_length_over_the_limit_ends_it_at_once(length: int) -> None:
    """From the header alone: nothing is waited for, nothing is kept."""
    with pytest.raises(MalformedFrame, match="the limit is"):
        Decoder().feed(header(length))


def test_a_hundred_megabytes_over_a_smaller_limit_names_both() -> None:
    """The limit is configurable; the error says what was claimed and what is allowed."""
    with pytest.raises(MalformedFrame, match="100000000 bytes is announced; the limit is 1048576"):
        Decoder(limit=1 << 20).feed(header(100_000_000) + b"x" * 64)


def test_a_large_claim_under_the_limit_takes_no_memory_in_advance() -> None:
    """60 MB claimed, 1 kB sent: about 1 kB held."""
    decoder = Decoder()
    tracemalloc.start()
    try:
        decoder.feed(header(60_000_000) + b"\0" * 1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoder.buffered == 1032
    assert peak < 20_000


@pytest.mark.parametrize("length", [0, 8, 15, 17, 41, 1001])
def test_a_length_that_no_message_has_is_refused(length: int) -> None:
    """Zero, not a multiple of 8, or too short for a root: known before the body is there."""
    with pytest.raises(MalformedFrame, match="multiple of 8"):
        Decoder().feed(header(length))


def test_bytes_behind_the_message_are_refused() -> None:
    """A frame holds one message and nothing else: a decoder that skips the rest can be smuggled past."""
    message = encode(Frame(id=1, body=Ping()))[8:]
    with pytest.raises(MalformedFrame, match="its message claims 40"):
        Decoder().feed(header(len(message) + 8) + message + b"\0" * 8)


def test_a_message_cut_short_is_refused() -> None:
    """The segment table says more than there is."""
    message = encode(Frame(id=1, body=Resync(session_id="session")))[8:]
    for cut in range(16, len(message), 8):
        with pytest.raises(MalformedFrame):
            Decoder().feed(header(cut) + message[:cut])


@pytest.mark.parametrize("count", [1, 2, 511, 512, 4000, 2**32 - 1])
def test_a_wrong_segment_table_is_refused(count: int) -> None:
    """More segments than the frame holds, or more than Cap'n Proto allows."""
    body = struct.pack("<I", count) + b"\xff" * 20
    with pytest.raises(MalformedFrame, match=r"segment|claims"):
        Decoder().feed(header(len(body)) + body)


def test_text_of_another_protocol_is_named_as_garbage() -> None:
    """An HTTP request or a TLS hello reads as an absurd length."""
    for said in (b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex("16030100c8010000c40303aabbcc")):
        with pytest.raises(MalformedFrame, match="no XCE peer, or garbage"):
            Decoder().feed(said)


def test_a_long_frame_in_small_pieces_is_not_quadratic() -> None:
    """4 MB in pieces of 64 bytes: each piece is looked at once."""
    message = b"\0" * (4 << 20)
    data = header(len(message)) + message
    decoder = Decoder()
    fed = 0
    with pytest.raises(MalformedFrame):
        for start in range(0, len(data), 64):
            decoder.feed(data[start : start + 64])
            fed += 64
    assert fed >= len(data) - 64
