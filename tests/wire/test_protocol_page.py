"""docs/protocol.md is true: its frames are current, it names every field and opcode, and a client can be written from it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests.shell.link.certificates import Authority
from tests.wire import plain_client
from tests.wire.values import body_classes
from tests.wire.vectors import DOCS, VECTORS, stale
from xce_supervisor.errors import Redirected
from xce_supervisor.link.connection import Connection, Handler
from xce_supervisor.link.limits import DEFAULT_LIMITS
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.codec import FRAME_BYTES_MAX, Decoder
from xce_supervisor.wire.tables import SCHEMA
from xce_supervisor.wire.words import (
    Body,
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobPush,
    JobQuery,
    JobSubmit,
    JobView,
    Join,
    Joined,
    Message,
    Opcode,
    PushAck,
)

PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
PROSE = PAGE[: PAGE.index("## Layouts")]


def test_the_published_frames_are_current() -> None:
    """python -m tests.wire.vectors --write makes them anew; a change here is a change of the protocol."""
    assert stale() == []


def test_every_published_frame_is_read_as_the_page_says() -> None:
    """And every message that can be a body is among them, except the two that are for tests only."""
    for each, (name, _, frame) in zip(json.loads((DOCS / "frames.json").read_text(encoding="utf-8")), VECTORS, strict=True):
        assert each["name"] == name
        assert Decoder().feed(bytes.fromhex(each["bytes"])) == [frame]
    shown = {type(frame.body).__name__ for _, _, frame in VECTORS}
    assert {cls.__name__ for cls in body_classes()} - shown == {"GateSet", "PushPlug"}


def test_the_page_names_every_opcode_field_code_and_role() -> None:
    """By its number and its name."""
    for opcode in Opcode:
        title = "".join(part.capitalize() for part in opcode.name.split("_"))
        assert re.search(rf"^\| {int(opcode)} \| {title}( →)? \|", PROSE, re.MULTILINE), opcode
    for code in ErrorCode:
        assert code is ErrorCode.OTHER or re.search(rf"^\| {int(code)} \| {code.name} \|", PROSE, re.MULTILINE), code
    for role in HostRole:
        assert f"{int(role)} {role.name.lower()}" in PROSE
    for node in SCHEMA.schema.node.nestedNodes:
        assert node.name in PROSE, node.name
        for field in getattr(SCHEMA, node.name).schema.fields:
            assert re.search(rf"\b{field}\b", PROSE), f"{node.name}.{field}"


def test_the_page_states_the_limits_that_the_program_keeps() -> None:
    """Numbers in prose grow old; these do not."""
    assert f"{FRAME_BYTES_MAX:,} bytes" in PROSE and DEFAULT_LIMITS.frame_bytes == FRAME_BYTES_MAX
    assert f"| requests in flight on a connection | {DEFAULT_LIMITS.in_flight} |" in PROSE
    assert f"| handshake | {DEFAULT_LIMITS.handshake_s:g} s |" in PROSE
    assert f"ended after {DEFAULT_LIMITS.idle_s:g} s" in PROSE
    assert f"| {DEFAULT_LIMITS.connections:,}; {DEFAULT_LIMITS.per_peer} |" in PROSE


class Controller:
    """Plays the controller that plain_client expects."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    def accept(self, connection: Connection) -> Handler:
        """Serve a connection."""

        async def handle(message: Message) -> Body:
            self.seen.append(message)
            match message:
                case Join():
                    return Joined(
                        session_id="s-1", controller_id="c1", instance_id="i", term=7, heartbeat_ms=1000, session_timeout_ms=3000
                    )
                case Heartbeat():
                    return HeartbeatReply(role="primary", term=7)
                case CtrlStatus():
                    await asyncio.sleep(message.wait_ms / 1000)
                    return CtrlStatusReply(controller_id="c1", instance_id="i", role="primary", term=7, version=1, long_poll=True)
                case JobSubmit():
                    job = JobView(job_id=message.job_id, command=message.command, slots=message.slots)
                    connection.push(JobPush(seq=1, term=7, jobs=(job,)))
                case JobQuery():
                    raise Redirected("c2.example:7300", "c2", 8)
            return Done(index=1)

        return handle


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_of_the_standard_library_alone_speaks_the_protocol(tmp_path: Path, secure: bool) -> None:
    """It is run without site-packages, and builds and reads every byte by hand, from the page's layouts."""
    authority = Authority(tmp_path)
    files = authority.issue("sched-c1", "xce://test/scheduler/sched-c1")
    controller = Controller()

    async def scene() -> None:
        tls = TlsSource(authority.issue("c1", "xce://test/controller/c1")) if secure else None
        server = Server(tls, DEFAULT_LIMITS, controller.accept)
        await server.start("127.0.0.1", 0)
        command = ["-I", "-S", plain_client.__file__, str(DOCS / "frames.json"), "127.0.0.1", str(server.port)]
        if secure:
            command += [str(files.ca), str(files.cert), str(files.key)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 20)
        await server.close()
        assert (process.returncode, out) == (0, b"spoke the protocol\n"), err.decode()

    asyncio.run(scene())
    joined = next(message for message in controller.seen if isinstance(message, Join))
    assert joined == Join(
        host_role=HostRole.SCHEDULER, name="sched-c1", controller_id="c1", term=7, spawn_token="5f0c9a7e31d84b26"
    )
    assert JobSubmit(job_id="job-1", command=("/bin/echo", "zwölf"), slots=2, rerunnable=True) in controller.seen
    assert PushAck(session_id="s-1", seq=1) in controller.seen
    assert CtrlStatus(known_version=1, wait_ms=50) in controller.seen
