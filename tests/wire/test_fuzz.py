"""Garbage in, a clear error out, never a crash and never much memory (docs/rules.md A3)."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.fuzz import SEEDS, framed, one
from xce_supervisor.wire.codec import BadMessage, Decoder, MalformedFrame, decode
from xce_supervisor.wire.words import ErrorCode, Opcode

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = {"malformed", "waits", "bad message", "frame"}


@given(data=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_end_in_one_of_four_ways(data: bytes) -> None:
    """Frames, a message to refuse, an error, or waiting for more; hypothesis shrinks what does not."""
    assert one(data) in OUTCOMES
    assert one(framed(data[: len(data) // 8 * 8])) in OUTCOMES


@given(message=st.sampled_from(SEEDS), at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 400))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_changed_byte_never_does_harm(message: bytes, at: int, byte: int, cut: int) -> None:
    """Wherever it is, and whatever is cut off behind."""
    changed = bytearray(message)
    changed[at % len(changed)] = byte
    assert one(framed(bytes(changed))) in OUTCOMES
    assert one(framed(bytes(changed[: len(changed) - cut % len(changed) // 8 * 8]))) in OUTCOMES


@pytest.mark.parametrize("seed", [1, 2])
def test_tens_of_thousands_of_broken_frames_do_not_kill_the_process(seed: int) -> None:
    """In a process of its own: the C++ library aborts the process on some uses of hostile readers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.wire.fuzz", str(seed), "12000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads(done.stdout)
    assert set(counted) <= OUTCOMES and counted["bad message"] > 500 and counted["malformed"] > 500 and counted["frame"] > 500


def listed_nothing(count: int) -> bytes:
    """A JobPush whose jobs are `count` structs of no words: eight bytes, whatever the count."""
    root = struct.pack("<IHH", 0, 2, 1) + struct.pack("<HHIQ", Opcode.JOB_PUSH, 0, 0, 0)
    body = struct.pack("<IHH", 0, 3, 1) + struct.pack("<QQQ", 1, 1, 0)
    claimed = struct.pack("<II", 1, (0 << 3) | 7) + struct.pack("<IHH", count << 2, 0, 0)
    words_ = root + body + claimed
    return struct.pack("<II", 0, len(words_) // 8) + words_


@pytest.mark.parametrize("count", [70_000, 100_001, 2**29 - 1])
def test_a_list_of_half_a_billion_empty_structs_is_counted_not_walked(count: int) -> None:
    """The count is compared before the first item is read, here or in the library."""
    began = time.monotonic()
    bad = decode(listed_nothing(count))
    assert isinstance(bad, BadMessage) and bad.code is ErrorCode.MALFORMED
    assert time.monotonic() - began < 1


def test_a_thousand_pointers_to_one_long_text_are_stopped() -> None:
    """Reads are counted by what they return: a small frame cannot unfold into gigabytes."""
    text = b"x" * 100_000 + b"\0" * 8
    text = text[: len(text) // 8 * 8]
    count = 100_000
    root = struct.pack("<IHH", 0, 2, 1) + struct.pack("<HHIQ", Opcode.JOB_QUERY, 0, 0, 1)
    body = struct.pack("<IHH", 0, 2, 1) + struct.pack("<QQ", 0, 0)
    claimed = struct.pack("<II", 1, (count << 3) | 6)
    pointers = b"".join(struct.pack("<II", ((count - 1 - index) << 2) | 1, ((100_001) << 3) | 2) for index in range(count))
    words_ = root + body + claimed + pointers + text
    bad = decode(struct.pack("<II", 0, len(words_) // 8) + words_)
    assert isinstance(bad, BadMessage) and "traversal limit" in bad.text, bad


def test_an_error_tells_nothing_of_the_library_behind() -> None:
    """No C++ source file, no stack addresses: texts go to peers and operators."""
    seen = set()
    for message in SEEDS:
        for word in range(8, len(message), 8):
            changed = message[:word] + b"\xfd\xff\xff\x7f\xff\xff\xff\x7f" + message[word + 8 :]
            try:
                got = Decoder().feed(framed(changed))
            except MalformedFrame as error:
                seen.add(str(error))
            else:
                seen.update(bad.text for bad in got if isinstance(bad, BadMessage))
    assert len(seen) > 3
    for text in seen:
        assert "c++" not in text and "stack" not in text and "\n" not in text, text
