"""Real frames as test vectors, and where each field lies: the generated parts of docs/protocol.md and docs/frames.json.

python -m tests.wire.vectors            says whether they are current (exit code 1 if not)
python -m tests.wire.vectors --write    writes them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.wire.anatomy import layouts, notes
from tests.wire.values import camel, frame_of
from xce_supervisor.wire.codec import encode
from xce_supervisor.wire.words import (
    ConfigPush,
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    Frame,
    Heartbeat,
    HeartbeatReply,
    HostRole,
    JobAttempt,
    JobDispatch,
    JobList,
    JobPush,
    JobQuery,
    JobStart,
    JobStateQuery,
    JobStateReport,
    JobSubmit,
    JobView,
    Join,
    Joined,
    Ping,
    PushAck,
    QueuePush,
    Redirect,
    Refusal,
    Resync,
    SchedulerExit,
    SchedulerSession,
    StepDown,
    WorkerView,
)

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
TOKEN: Final = "5f0c9a7e31d84b26"
JOB: Final = JobView(
    job_id="job-1", command=("/bin/echo", "zwölf"), slots=2, rerunnable=True, state="running", attempt=1, worker="w1"
)

VECTORS: Final[list[tuple[str, str, Frame]]] = [
    ("ping", "any peer asks whether the other is there", frame_of(Ping(), 1)),
    ("done", "the answer to it, and to everything that is answered by yes and no more", frame_of(Done(), 1)),
    (
        "join",
        "a scheduler joins controller c1 in term 7 and shows the token of its spawn",
        frame_of(Join(host_role=HostRole.SCHEDULER, name="sched-c1", controller_id="c1", term=7, spawn_token=TOKEN), 2),
    ),
    (
        "joined",
        "the controller's answer",
        frame_of(
            Joined(session_id="9d3b", controller_id="c1", instance_id="4e1f", term=7, heartbeat_ms=1000, session_timeout_ms=3000),
            2,
        ),
    ),
    ("heartbeat", "keeps the session alive", frame_of(Heartbeat(session_id="9d3b"), 3)),
    ("heartbeat-reply", "and tells the role", frame_of(HeartbeatReply(role="primary", term=7), 3)),
    (
        "ctrlstatus",
        "a long poll: answer at the next change of version 41, or after 250 ms",
        frame_of(CtrlStatus(known_version=41, wait_ms=250), 4),
    ),
    (
        "ctrlstatus-reply",
        "a primary with a scheduler that owes an acknowledgement since 35 ms",
        frame_of(
            CtrlStatusReply(
                controller_id="c1",
                instance_id="4e1f",
                role="primary",
                term=7,
                primary_address="c1.example:7300",
                primary_id="c1",
                quorum_age_ms=120,
                commit_index=991,
                scheduler=SchedulerSession(
                    joined=True,
                    name="sched-c1",
                    since_ms=61000,
                    spawn_token=TOKEN,
                    last_push_seq=12,
                    last_acted_seq=11,
                    oldest_unacked_ms=35,
                ),
                jobs_pending=3,
                jobs_running=4,
                jobs_finished=5,
                workers=2,
                version=42,
                long_poll=True,
                uptime_ms=360000,
                loop_gap_ms=2,
                engine="sqlite",
            ),
            4,
        ),
    ),
    (
        "ctrlstatus-reply-least",
        "a standby that tells no more than its id, its role and its term",
        frame_of(CtrlStatusReply(controller_id="c2", instance_id="", role="standby", term=7), 5),
    ),
    ("redirect", "a standby names the primary", frame_of(Redirect(address="c1.example:7300", controller_id="c1", term=7), 6)),
    ("refusal", "opcode 999 is not known", frame_of(Refusal(code=ErrorCode.UNSUPPORTED, text="opcode 999 is not known here"), 7)),
    (
        "job-push",
        "every open job, to a scheduler that has just joined",
        frame_of(JobPush(seq=1, term=7, jobs=(JOB,), full=True), 0),
    ),
    ("queue-push", "the workers", frame_of(QueuePush(seq=2, term=7, workers=(WorkerView(name="w1", slots=4, alive=True),)), 0)),
    ("config-push", "the limits", frame_of(ConfigPush(seq=3, term=7, max_dispatch_per_cycle=100), 0)),
    ("push-ack", "everything up to push 3 has been acted on", frame_of(PushAck(session_id="9d3b", seq=3), 8)),
    ("resync", "send everything again", frame_of(Resync(session_id="9d3b"), 9)),
    ("scheduler-exit", "a demoted controller tells its scheduler to end", frame_of(SchedulerExit(reason="demoted"), 0)),
    ("job-dispatch", "run job-1 on w1", frame_of(JobDispatch(session_id="9d3b", job_id="job-1", worker="w1", attempt=1), 10)),
    ("job-start", "to the worker", frame_of(JobStart(job_id="job-1", attempt=1, command=JOB.command, term=7), 0)),
    ("job-state-query", "what do you run?", frame_of(JobStateQuery(term=7), 0)),
    (
        "job-state-report",
        "one attempt has ended",
        frame_of(
            JobStateReport(
                session_id="aa01",
                worker="w1",
                attempts=(JobAttempt(job_id="job-1", attempt=1, state="failed", exit_code=-9, reason="killed"),),
            ),
            11,
        ),
    ),
    (
        "job-submit",
        "a job of two arguments, one not ASCII",
        frame_of(JobSubmit(job_id="job-1", command=JOB.command, slots=2, rerunnable=True), 12),
    ),
    ("job-query", "these two", frame_of(JobQuery(job_ids=("job-1", "job-2")), 13)),
    ("job-list", "one of them is known", frame_of(JobList(jobs=(JOB,), total=1), 13)),
    ("step-down", "give up leadership for five seconds", frame_of(StepDown(hold_ms=5000), 14)),
]


def fields_of(value: Any) -> Any:
    """A message's fields by the schema's names; what is not given is left out."""
    if isinstance(value, msgspec.Struct):
        return {
            camel(info.name): fields_of(found)
            for info in msgspec.structs.fields(type(value))
            if (found := getattr(value, info.name)) not in (None, "", 0, ())
        }
    if isinstance(value, tuple):
        return [fields_of(each) for each in value]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def frames_json() -> str:
    """docs/frames.json: one object a frame."""
    found = [
        {
            "name": name,
            "what": what,
            "struct": type(frame.body).__name__,
            "reply": frame.is_reply,
            "id": frame.id,
            "fields": fields_of(frame.body),
            "bytes": encode(frame).hex(),
        }
        for name, what, frame in VECTORS
    ]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- dumps


def _dump(frame: Frame) -> Iterator[str]:
    data = encode(frame)
    said = notes(data)
    yield "```"
    for start in range(0, len(data), 8):
        word = data[start : start + 8]
        shown = "".join(chr(byte) if 32 < byte < 127 else "." for byte in word)
        yield f"{start:4}  {word.hex(' ')}  {shown}  {said.get(start, '')}".rstrip()
    yield "```"


def dumps() -> str:
    """Every frame, eight bytes a line."""
    lines: list[str] = []
    for name, what, frame in VECTORS:
        kind = "reply" if frame.is_reply else "request" if frame.id else "push"
        lines += [f"#### `{name}`: {what}", "", f"{kind.capitalize()}, {type(frame.body).__name__}."]
        fields = json.dumps(fields_of(frame.body), ensure_ascii=False)
        lines += ["", f"Fields: `{fields}`", "", *_dump(frame), ""]
    return "\n".join(lines)


def with_generated(text: str) -> str:
    """docs/protocol.md with its generated parts made anew."""
    for name, made in (("layouts", layouts()), ("frames", dumps())):
        begin, end = f"<!-- {name}: made by tests/wire/vectors.py -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"docs/protocol.md has no part {name}"
        text = f"{before}{begin}\n{made}\n{end}{after}"
    return text


def stale() -> list[str]:
    """Return the names of the files that are not current."""
    protocol = (DOCS / "protocol.md").read_text(encoding="utf-8")
    frames = DOCS / "frames.json"
    found = [] if protocol == with_generated(protocol) else ["docs/protocol.md"]
    if not frames.exists() or frames.read_text(encoding="utf-8") != frames_json():
        found.append("docs/frames.json")
    return found


def main() -> int:
    """Write, or say what is stale."""
    if "--write" in sys.argv[1:]:
        protocol = DOCS / "protocol.md"
        protocol.write_text(with_generated(protocol.read_text(encoding="utf-8")), encoding="utf-8")
        (DOCS / "frames.json").write_text(frames_json(), encoding="utf-8")
    for name in stale():
        print(f"{name} is stale: run python -m tests.wire.vectors --write")
    return bool(stale())


if __name__ == "__main__":
    sys.exit(main())
