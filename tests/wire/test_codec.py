"""Words to bytes and back: every message, its limits, and what a newer or older peer sends (docs/protocol.md)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.values import any_value, body_classes, camel, filled, frame_of, limit_of, with_defaults
from xce_supervisor.wire import words
from xce_supervisor.wire.codec import BadMessage, Decoder, decode, encode
from xce_supervisor.wire.tables import SCHEMA
from xce_supervisor.wire.words import (
    ErrorCode,
    Frame,
    HostRole,
    JobPush,
    JobQuery,
    JobSubmit,
    JobView,
    Join,
    Opcode,
    Ping,
    PushAck,
    Refusal,
    SchedulerExit,
)

any_body = st.one_of([any_value(cls) for cls in body_classes()])


def raw(opcode: int, number: int = 7, answer: int = 0) -> bytes:
    """A message with no body, as another program may send it: one segment, root struct of 2 data words and 1 pointer."""
    words_ = struct.pack("<HHIQQ", opcode, answer, 0, number, 0)
    return struct.pack("<II", 0, 1 + len(words_) // 8) + struct.pack("<IHH", 0, 2, 1) + words_


@pytest.mark.parametrize("cls", body_classes(), ids=lambda cls: cls.__name__)
def test_every_message_with_every_field_set_comes_back_the_same(cls: type[msgspec.Struct]) -> None:
    """No field is forgotten, swapped or cut on the way."""
    frame = frame_of(filled(cls))
    assert Decoder().feed(encode(frame)) == [frame]


@given(body=any_body, number=st.integers(1, 2**64 - 1))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_message_comes_back_the_same(body: Any, number: int) -> None:
    """Also at the edges of every number and with any character; an empty field comes back as its default."""
    frame = frame_of(body, number)
    assert Decoder().feed(encode(frame)) == [frame_of(with_defaults(body), number)]


def test_schema_and_words_name_the_same_fields() -> None:
    """A field in the schema that no message has would be sent by peers and dropped in silence here."""
    structs = {cls.__name__: cls for cls in vars(words).values() if isinstance(cls, type) and issubclass(cls, msgspec.Struct)}
    for node in SCHEMA.schema.node.nestedNodes:
        if node.name == "Request":
            continue
        declared = set(getattr(SCHEMA, node.name).schema.fields)
        fields = msgspec.structs.fields(structs[node.name])
        expected = {camel(info.name) for info in fields}
        expected |= {camel(f"has_{info.name}") for info in fields if "None" in str(info.type) and "int" in str(info.type)}
        assert declared == expected, node.name


def test_every_opcode_has_one_request_and_numbers_set_aside_stay_free() -> None:
    """0 is nothing, 1 marks replies, 90 to 119 wait for leases, demand, facts and orphans."""
    used = {int(opcode) for opcode in Opcode}
    assert not used & {0, 1} and not used & set(range(90, 120))


def test_a_message_is_one_segment_however_long_it_is() -> None:
    """Readers without a library are spared far pointers."""
    jobs = tuple(JobView(job_id=f"job-{number}", command=("true",)) for number in range(3000))
    for _ in range(2):
        data = encode(Frame(id=0, body=JobPush(seq=1, term=1, jobs=jobs)))
        assert data[8:12] == b"\0\0\0\0" and len(data) > 100_000
        assert Decoder().feed(data)[0] == Frame(id=0, body=JobPush(seq=1, term=1, jobs=jobs))


def test_a_message_of_several_segments_is_read() -> None:
    """Other peers' libraries may write them."""
    message = SCHEMA.Request.new_message(4)
    message.opcode, message.id = int(Opcode.JOIN), 5
    body = message.body.as_struct(SCHEMA.Join.schema)
    body.hostRole, body.name, body.controllerId = 4, "w" * 200, "c" * 200
    data = message.to_bytes()
    assert data[0] > 0
    assert decode(data) == Frame(id=5, body=Join(host_role=HostRole.WORKER, name="w" * 200, controller_id="c" * 200))


HEAD = struct.pack("<HHIQ", Opcode.PUSH_ACK, 0, 0, 5)  # the envelope's two data words: opcode, answer, id
ACK = struct.pack("<Q", 77)  # the data section of a PushAck: seq


@pytest.mark.parametrize(
    "segment",
    [
        # a newer peer's envelope: one more data word, one more pointer
        struct.pack("<IHH", 0, 3, 2) + HEAD + bytes(8) + struct.pack("<IHH", 1 << 2, 1, 1) + bytes(8) + ACK + bytes(8),
        # a word of nothing before the envelope
        struct.pack("<IHH", 1 << 2, 2, 1) + bytes(8) + HEAD + struct.pack("<IHH", 0, 1, 1) + ACK + bytes(8),
        # the body lies before the envelope that points to it
        struct.pack("<IHH", 2 << 2, 2, 1) + ACK + bytes(8) + HEAD + struct.pack("<iHH", -5 << 2, 1, 1),
        # the envelope as we write it, the body's text before its struct
        struct.pack("<IHH", 0, 2, 1) + HEAD + struct.pack("<IHH", 1 << 2, 1, 1) + b"abc\0" + bytes(4) + ACK
        + struct.pack("<iI", (-3 << 2) | 1, (4 << 3) | 2),
    ],
    ids=["longer", "later", "backwards", "text first"],
)  # fmt: skip
def test_a_message_is_read_however_it_is_laid_out(segment: bytes) -> None:
    """Other encoders put structs where they like; the envelope of a newer peer may be longer than ours."""
    message = struct.pack("<II", 0, len(segment) // 8) + segment
    with SCHEMA.Request.from_bytes(message) as seen:
        assert seen.body.as_struct(SCHEMA.PushAck.schema).seq == 77
    frame = decode(message)
    assert isinstance(frame, Frame) and isinstance(frame.body, PushAck) and (frame.id, frame.body.seq) == (5, 77), frame
    assert frame.body.session_id in ("", "abc")


def test_what_a_peer_leaves_out_takes_its_default() -> None:
    """Zero and empty mean "not given", so that an older peer, which does not know a field, is read rightly."""
    assert decode(raw(Opcode.JOB_QUERY)) == Frame(id=7, body=JobQuery())
    submit = decode(raw(Opcode.JOB_SUBMIT))
    assert submit == Frame(id=7, body=JobSubmit(job_id="", command=(), slots=1))


def test_an_unknown_opcode_can_be_refused_by_its_id() -> None:
    """A newer peer's request gets an answer, and the connection goes on."""
    bad = decode(raw(999))
    assert isinstance(bad, BadMessage)
    assert (bad.id, bad.code, bad.opcode, bad.is_reply) == (7, ErrorCode.UNSUPPORTED, 999, False)
    assert "999" in bad.text
    refused = bad.refusal()
    assert refused.id == 7 and refused.is_reply and isinstance(refused.body, Refusal)


def test_an_unknown_kind_of_reply_is_told_as_such() -> None:
    """It cannot be answered; the reader of the reply must learn of it."""
    bad = decode(raw(1, answer=998))
    assert isinstance(bad, BadMessage) and bad.is_reply and bad.id == 7 and "998" in bad.text


def test_an_unknown_error_code_is_still_a_no() -> None:
    """A newer peer may refuse for reasons that this version has no name for."""
    message = SCHEMA.Request.new_message(opcode=1, answer=2, id=3)
    message.body.as_struct(SCHEMA.Refusal.schema).code = 4711
    assert decode(message.to_bytes()) == Frame(id=3, body=Refusal(code=ErrorCode.OTHER, text=""), is_reply=True)


def test_an_unknown_host_role_is_refused() -> None:
    """Whom nobody knows cannot be given rights."""
    message = SCHEMA.Request.new_message(opcode=int(Opcode.JOIN), id=3)
    message.body.as_struct(SCHEMA.Join.schema).hostRole = 77
    bad = decode(message.to_bytes())
    assert isinstance(bad, BadMessage) and bad.code is ErrorCode.MALFORMED and "Join.host_role is 77" in bad.text


@pytest.mark.parametrize("cls", body_classes(), ids=lambda cls: cls.__name__)
def test_each_text_and_list_has_a_limit_that_both_sides_keep(cls: type[msgspec.Struct]) -> None:
    """One over the limit is not sent, and not taken from a peer that sends it; texts for people are cut instead."""
    for info in msgspec.structs.fields(cls):
        most = limit_of(info.type)
        if not most or most > 200_000:
            continue
        value = filled(cls)
        found = getattr(value, info.name)
        if isinstance(found, str):
            self_over = msgspec.structs.replace(value, **{info.name: "x" * (most + 1)})
            wire_over: Any = "x" * (most + 1)
        else:
            self_over = msgspec.structs.replace(value, **{info.name: (found * (most + 1))[: most + 1]})
            wire_over = ["x"] * (most + 1) if isinstance(found[0], str) else most + 1
        if most == 500:
            back = Decoder().feed(encode(frame_of(self_over)))[0]
            assert isinstance(back, Frame) and len(getattr(back.body, info.name)) == 500
        else:
            with pytest.raises(ValueError, match=rf"{cls.__name__}\.{info.name} has {most + 1} .*limit is {most}"):
                encode(frame_of(self_over))
        bad = decode(_forged(cls, info.name, wire_over))
        assert isinstance(bad, BadMessage) and bad.code is ErrorCode.MALFORMED, info.name
        assert f"{cls.__name__}.{info.name} has {most + 1}" in bad.text


def _forged(cls: type[msgspec.Struct], name: str, value: Any) -> bytes:
    """Bytes of a message with one field over its limit, made by pycapnp alone."""
    frame = frame_of(filled(cls))
    ours = decode(encode(frame)[8:])
    assert ours == frame
    message = SCHEMA.Request.new_message(num_first_segment_words=1 << 20)
    with SCHEMA.Request.from_bytes(encode(frame)[8:]) as good:
        message.opcode, message.answer, message.id = good.opcode, good.answer, good.id
    body = message.body.as_struct(getattr(SCHEMA, cls.__name__).schema)
    for enum in ("hostRole", "code"):
        if enum in body.schema.fields:
            setattr(body, enum, 2)
    if isinstance(value, int):
        body.init(camel(name), value)
    else:
        setattr(body, camel(name), value)
    data: bytes = message.to_bytes()
    return data


def test_a_text_inside_a_list_has_a_limit_too() -> None:
    """An argument longer than Linux takes is refused before it is sent."""
    with pytest.raises(ValueError, match=r"a text of JobSubmit\.command has 131073 characters"):
        encode(Frame(id=1, body=JobSubmit(job_id="j", command=("x" * 131_073,))))


def test_a_value_that_does_not_fit_says_which_message() -> None:
    """A number too large, a negative one, a lone surrogate: a plain ValueError, nothing half-sent."""
    for wrong in (2**64, -1, "seven", 1.5):
        with pytest.raises(ValueError, match="cannot be sent: Join"):
            encode(Frame(id=1, body=Join(host_role=HostRole.WORKER, name="w", term=wrong)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be sent: SchedulerExit"):
        encode(Frame(id=0, body=SchedulerExit(reason="\udcff")))


def test_the_smallest_frame_is_a_ping() -> None:
    """Its bytes are in docs/protocol.md, and change only with the protocol."""
    data = encode(Frame(id=1, body=Ping()))
    assert (
        data.hex()
        == "2800000000000000"
        + "0000000004000000"
        + "0000000002000100"
        + "0200000000000000"
        + "0100000000000000"
        + ("fcffffff00000000")
    )
