"""What is said on the wire, as frozen Python values: one class a message, one number an opcode.

The rest of the program speaks in these; only `wire.codec` knows that Cap'n Proto carries them. Ages and waits are integers of
milliseconds, each measured by the process that states it on its own CLOCK_MONOTONIC, so that no two clocks are ever
compared. An optional field is None where the peer did not give it; docs/protocol.md says which rules are off without it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

# Limits, kept by the codec in both directions: characters of a text, items of a list. An argument's is Linux's own
# (MAX_ARG_STRLEN, 128 KiB), the others are far above what a sane cluster says.
Name = Annotated[str, Meta(max_length=255)]
Address = Annotated[str, Meta(max_length=300)]
Line = Annotated[str, Meta(max_length=500, extra={"cut": True})]  # for people: cut to fit, never refused
Argument = Annotated[str, Meta(max_length=131_072)]
Command = Annotated[tuple[Argument, ...], Meta(max_length=4_096)]


class Opcode(IntEnum):
    """One number a message. Numbers are never reused; 90 to 119 are set aside for leases, demand, facts and orphans.

    0 is no message, 1 marks a reply on the wire (wire.codec), 2 to 9 belong to the connection itself.
    """

    PING = 2
    JOIN = 10
    HEARTBEAT = 11
    CTRL_STATUS = 20
    JOB_PUSH = 30
    QUEUE_PUSH = 31
    CONFIG_PUSH = 32
    PUSH_ACK = 33
    RESYNC = 34
    JOB_DISPATCH = 40
    JOB_START = 41
    JOB_STATE_QUERY = 42
    JOB_STATE_REPORT = 43
    SCHEDULER_EXIT = 50
    JOB_SUBMIT = 60
    JOB_QUERY = 61
    STEP_DOWN = 70
    GATE_SET = 71
    PUSH_PLUG = 72


class HostRole(IntEnum):
    """Who a peer is. With mTLS the certificate's URI SAN `xce://CLUSTER/ROLE/NAME` must say the same (docs/rules.md A1)."""

    CONTROLLER = 1
    SUPERVISOR = 2
    SCHEDULER = 3
    WORKER = 4
    PROVISIONER = 5
    OPERATOR = 6


class ErrorCode(IntEnum):
    """Why a request was refused. A caller decides by the code, never by the text."""

    OTHER = 0  # a code that this version does not know: a newer peer said no
    MALFORMED = 1  # the frame was whole, the message was not
    UNSUPPORTED = 2  # an opcode this peer does not serve
    DENIED = 3  # the peer's role may not use this opcode
    WRONG_CONTROLLER = 4  # join: controller id is not ours (S3)
    WRONG_TERM = 5  # join or push ack: term is not ours (S3)
    SESSION_ALIVE = 6  # join: another scheduler session is alive (S3)
    NOT_JOINED = 7  # the opcode needs a joined session
    NOT_FOUND = 8
    CONFLICT = 9  # same key, other content
    UNAVAILABLE = 10  # no quorum, no primary, store lost, or too busy: try again
    LIMIT = 11  # a documented limit was hit


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that can be the body of a frame."""

    opcode: ClassVar[Opcode]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that says no. text: for people; the codec cuts it at 500 characters."""

    code: ErrorCode
    text: Line


class Redirect(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of a standby to a primary-only opcode. address: "host:port" of the primary, "" while none is known."""

    address: Address
    controller_id: Name = ""
    term: int = 0


# ---------------------------------------------------------------- sessions


class Ping(Message, frozen=True, kw_only=True):
    """Are you there, and do you take me? Any peer may ask, on any connection; answered by Done from the connection itself.

    A TLS 1.3 client whose certificate is refused sees its handshake succeed; the answer to a ping is the first proof.
    """

    opcode: ClassVar[Opcode] = Opcode.PING


class Join(Message, frozen=True, kw_only=True):
    """First request on a connection that wants a session.

    controller_id: the controller that the peer means to join; "" for followers of the primary (workers, operators).
    term: the term the peer was started for; 0 when it follows. spawn_token: shown by supervised children, else "".
    resume: session id before a reconnect, "" at first.
    """

    opcode: ClassVar[Opcode] = Opcode.JOIN
    host_role: HostRole
    name: Name
    controller_id: Name = ""
    term: int = 0
    spawn_token: Name = ""
    slots: int = 0
    resume: Name = ""


class Joined(Message, frozen=True, kw_only=True):
    """Reply to Join. A session is alive while heartbeats come within `session_timeout_ms`."""

    opcode: ClassVar[Opcode] = Opcode.JOIN
    session_id: Name
    controller_id: Name
    instance_id: Name
    term: int
    heartbeat_ms: int
    session_timeout_ms: int


class Heartbeat(Message, frozen=True, kw_only=True):
    """Keeps a session alive, and asks for the role in the same breath (S4)."""

    opcode: ClassVar[Opcode] = Opcode.HEARTBEAT
    session_id: Name


class HeartbeatReply(Message, frozen=True, kw_only=True):
    opcode: ClassVar[Opcode] = Opcode.HEARTBEAT
    role: Name  # "primary" | "standby"
    term: int


# ---------------------------------------------------------------- status


class CtrlStatus(Message, frozen=True, kw_only=True):
    """Query, answered in every role. wait_ms 0: at once. Else a long poll: at the next change of `version`, or after
    wait_ms at the latest; known_version is the last version seen (0: none)."""

    opcode: ClassVar[Opcode] = Opcode.CTRL_STATUS
    known_version: int = 0
    wait_ms: int = 0


class SchedulerSession(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's session as the controller sees it. A controller that tells of sessions and has none says joined=False;
    one that does not tell says nothing, and then nothing is judged by it (S9).

    joined: alive now. since_ms: age of the session. spawn_token: as shown in its join. last_push_seq: newest push sent
    (0: none). last_acted_seq: newest push acknowledged after acting. oldest_unacked_ms: age of the oldest push not yet
    acted on, None when there is none.
    """

    joined: bool
    name: Name = ""
    since_ms: int = 0
    spawn_token: Name = ""
    last_push_seq: int = 0
    last_acted_seq: int = 0
    oldest_unacked_ms: int | None = None


class LeaseHeld(msgspec.Struct, frozen=True, kw_only=True):
    provider: Name
    holder: Name
    epoch_term: int
    epoch_seq: int
    remaining_ms: int


class CtrlStatusReply(Message, frozen=True, kw_only=True):
    """What `ctrlstatus` carries. quorum_age_ms: age of the last confirmation by a quorum, counted from before it was asked.

    gate: name of the promotion gate that refuses, "" when none. long_poll: this controller serves wait_ms.
    version: rises with every change of role, term, gate, primary or scheduler session. uptime_ms and loop_gap_ms (the
    longest pause of its own loop in the last 10 s) let a judge credit the controller's own absence (S10).
    """

    opcode: ClassVar[Opcode] = Opcode.CTRL_STATUS
    controller_id: Name
    instance_id: Name
    role: Name  # "primary" | "standby"
    term: int
    primary_address: Address = ""
    primary_id: Name = ""
    gate: Name = ""
    gate_detail: Line = ""
    quorum_age_ms: int | None = None
    commit_index: int = 0
    scheduler: SchedulerSession | None = None
    leases: Annotated[tuple[LeaseHeld, ...], Meta(max_length=1_000)] = ()
    jobs_pending: int = 0
    jobs_running: int = 0
    jobs_finished: int = 0
    workers: int = 0
    version: int = 0
    long_poll: bool = False
    uptime_ms: int = 0
    loop_gap_ms: int = 0
    engine: Name = ""  # "sqlite" | "etcd"


# ---------------------------------------------------------------- pushes to a scheduler


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job as schedulers and clients see it.

    state: "pending" | "dispatched" | "running" | "done" | "failed". attempt: from 1 at the first dispatch.
    worker: where it runs or ran. exit_code: of the command, None until known. reason: e.g. "host lost".
    constraint: name prefix of workers that may run it, "" for any.
    """

    job_id: Name
    command: Command
    slots: int = 1
    rerunnable: bool = False
    constraint: Name = ""
    state: Name = "pending"
    attempt: int = 0
    worker: Name = ""
    exit_code: int | None = None
    reason: Line = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    slots: int
    alive: bool


class Push(Message, frozen=True, kw_only=True):
    """What pushes share: seq rises by one per session; term is the pushing controller's."""

    seq: int
    term: int


class JobPush(Push, frozen=True, kw_only=True):
    """Jobs that changed (all open jobs when `full`)."""

    opcode: ClassVar[Opcode] = Opcode.JOB_PUSH
    jobs: Annotated[tuple[JobView, ...], Meta(max_length=100_000)]
    full: bool = False


class QueuePush(Push, frozen=True, kw_only=True):
    """Workers as they are now (always the whole list)."""

    opcode: ClassVar[Opcode] = Opcode.QUEUE_PUSH
    workers: Annotated[tuple[WorkerView, ...], Meta(max_length=100_000)]


class ConfigPush(Push, frozen=True, kw_only=True):
    opcode: ClassVar[Opcode] = Opcode.CONFIG_PUSH
    max_dispatch_per_cycle: int


class PushAck(Message, frozen=True, kw_only=True):
    """The scheduler has *acted* on every push up to `seq` (S9); sent after the dispatches it led to were answered."""

    opcode: ClassVar[Opcode] = Opcode.PUSH_ACK
    session_id: Name
    seq: int


class Resync(Message, frozen=True, kw_only=True):
    """Asks for everything afresh, after a rejoin: answered by pushes with `full`."""

    opcode: ClassVar[Opcode] = Opcode.RESYNC
    session_id: Name


class SchedulerExit(Message, frozen=True, kw_only=True):
    """Push: end yourself gracefully (demotion)."""

    opcode: ClassVar[Opcode] = Opcode.SCHEDULER_EXIT
    reason: Line


# ---------------------------------------------------------------- jobs


class JobDispatch(Message, frozen=True, kw_only=True):
    """Scheduler to controller: run job on worker. Answered by Done once the fact is committed."""

    opcode: ClassVar[Opcode] = Opcode.JOB_DISPATCH
    session_id: Name
    job_id: Name
    worker: Name
    attempt: int  # the attempt this dispatch would be; stale ones are refused with CONFLICT


class JobStart(Message, frozen=True, kw_only=True):
    """Controller to worker, push: start this attempt, once. A worker that knows (job_id, attempt) reports, never restarts."""

    opcode: ClassVar[Opcode] = Opcode.JOB_START
    job_id: Name
    attempt: int
    command: Command
    term: int


class JobStateQuery(Message, frozen=True, kw_only=True):
    """Controller to worker, push: report every job you know (after a fail-over or a rejoin)."""

    opcode: ClassVar[Opcode] = Opcode.JOB_STATE_QUERY
    term: int


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as its worker knows it. state: "running" | "done" | "failed"."""

    job_id: Name
    attempt: int
    state: Name
    exit_code: int | None = None
    reason: Line = ""


class JobStateReport(Message, frozen=True, kw_only=True):
    """Worker to controller. full: this is all the worker knows. Kept and sent again until answered by Done."""

    opcode: ClassVar[Opcode] = Opcode.JOB_STATE_REPORT
    session_id: Name
    worker: Name
    attempts: Annotated[tuple[JobAttempt, ...], Meta(max_length=100_000)]
    full: bool = False


class JobSubmit(Message, frozen=True, kw_only=True):
    """job_id is made by the client and makes the request idempotent: same id and content, same answer; else CONFLICT."""

    opcode: ClassVar[Opcode] = Opcode.JOB_SUBMIT
    job_id: Name
    command: Command
    slots: int = 1
    rerunnable: bool = False
    constraint: Name = ""


class JobQuery(Message, frozen=True, kw_only=True):
    """job_ids empty: all. offset and limit page through them in order of submission."""

    opcode: ClassVar[Opcode] = Opcode.JOB_QUERY
    job_ids: Annotated[tuple[Name, ...], Meta(max_length=100_000)] = ()
    offset: int = 0
    limit: int = 1000


class JobList(Message, frozen=True, kw_only=True):
    opcode: ClassVar[Opcode] = Opcode.JOB_QUERY
    jobs: Annotated[tuple[JobView, ...], Meta(max_length=100_000)]
    total: int


# ---------------------------------------------------------------- operators of the reference cluster


class StepDown(Message, frozen=True, kw_only=True):
    """Give up leadership for at least hold_ms (a voluntary demotion)."""

    opcode: ClassVar[Opcode] = Opcode.STEP_DOWN
    hold_ms: int = 0


class GateSet(Message, frozen=True, kw_only=True):
    """Close (closed=True) or open a promotion gate by name; for tests."""

    opcode: ClassVar[Opcode] = Opcode.GATE_SET
    gate: Name
    closed: bool
    detail: Line = ""


class PushPlug(Message, frozen=True, kw_only=True):
    """Hold back the exit push at the next demotion, or answers to a peer; fault injection for tests. name: which plug."""

    opcode: ClassVar[Opcode] = Opcode.PUSH_PLUG
    name: Name
    closed: bool


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that says yes and no more. index: commit index that the request led to, 0 when none."""

    index: int = 0


Body = Message | Done | Refusal | Redirect


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. A request: `id` is its number, above 0, counted by its sender for each connection; a push: `id` is 0; a reply
    (`is_reply`): `id` is that of the request it answers."""

    id: int
    body: Body
    is_reply: bool = False
