#!/usr/bin/env python3
"""The wire's two figures, as ratios inside one run: python benchmarks/wire.py [--json] [--quick]

codec    A ctrlstatus reply (22 fields, one nested struct of 7) to bytes and back, against the same message through pycapnp's
         plain access: by keywords and attributes (the plain way), and by attributes alone. Goal: at least 3 times as fast.
rtt      ctrlstatus, and a heartbeat, asked and answered over TLS 1.3 with client certificates, in two processes, against a
         raw echo of frames of the same sizes on the same loop and TLS, in two processes of its own (wire_echo.py). Goal:
         ctrlstatus at most 1.5 times the echo's median.

Both sides of a ratio are measured in turn, round by round, so that a machine that slows down slows both; the ratio is that of
the best rounds (codec), or the median of the rounds' ratios of medians (rtt). Exit code 0 if both goals are met, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog
import uvloop

from xce_supervisor.link.connection import Connection, Handler, connect
from xce_supervisor.link.limits import DEFAULT_LIMITS
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.testbed.pki import Subject, make_pki
from xce_supervisor.wire.codec import decode, encode
from xce_supervisor.wire.tables import SCHEMA
from xce_supervisor.wire.words import (
    Body,
    CtrlStatus,
    CtrlStatusReply,
    Frame,
    Heartbeat,
    HeartbeatReply,
    Message,
    SchedulerSession,
)

HERE = Path(__file__).resolve().parent
CODEC_GOAL, RTT_GOAL = 3.0, 1.5
WARM_S = 0.3
SESSION = SchedulerSession(
    joined=True,
    name="sched-c1",
    since_ms=61_000,
    spawn_token="5f0c9a7e31d84b26",
    last_push_seq=12,
    last_acted_seq=11,
    oldest_unacked_ms=35,
)
STATUS = CtrlStatusReply(
    controller_id="c1",
    instance_id="4e1f0b7c9a52d386",
    role="primary",
    term=7,
    primary_address="c1.example:7300",
    primary_id="c1",
    quorum_age_ms=120,
    commit_index=991,
    scheduler=SESSION,
    jobs_pending=3,
    jobs_running=4,
    jobs_finished=5,
    workers=2,
    version=42,
    long_poll=True,
    uptime_ms=360_000,
    loop_gap_ms=2,
    engine="sqlite",
)
REPLY = Frame(id=7, body=STATUS, is_reply=True)
ASK = CtrlStatus(known_version=41)
ENVELOPE = {"opcode": 1, "answer": 20, "id": 7}


# ---------------------------------------------------------------- the plain way


def plain_fields() -> dict[str, Any]:
    """The message's values by the schema's names."""
    reply: dict[str, Any] = {
        "controllerId": STATUS.controller_id, "instanceId": STATUS.instance_id, "role": STATUS.role, "term": STATUS.term,
        "primaryAddress": STATUS.primary_address, "primaryId": STATUS.primary_id, "gate": "", "gateDetail": "",
        "hasQuorumAgeMs": True, "quorumAgeMs": STATUS.quorum_age_ms, "commitIndex": STATUS.commit_index,
        "jobsPending": 3, "jobsRunning": 4, "jobsFinished": 5, "workers": 2, "version": 42, "longPoll": True,
        "uptimeMs": 360_000, "loopGapMs": 2, "engine": "sqlite",
    }  # fmt: skip
    session = {
        "joined": True, "name": SESSION.name, "sinceMs": 61_000, "spawnToken": SESSION.spawn_token, "lastPushSeq": 12,
        "lastActedSeq": 11, "hasOldestUnackedMs": True, "oldestUnackedMs": 35,
    }  # fmt: skip
    return {**reply, "scheduler": session}


FIELDS = plain_fields()


def encode_by_keywords() -> bytes:
    """new_message with keywords, and the body from a dictionary: what keywords do."""
    message = SCHEMA.Request.new_message(**ENVELOPE)
    message.body.as_struct(SCHEMA.CtrlStatusReply.schema).from_dict(FIELDS)
    data: bytes = message.to_bytes()
    return struct.pack("<Q", len(data)) + data


def encode_by_attributes() -> bytes:
    """Each field by assignment."""
    message = SCHEMA.Request.new_message()
    message.opcode = 1
    message.answer = 20
    message.id = 7
    r = message.body.as_struct(SCHEMA.CtrlStatusReply.schema)
    r.controllerId = STATUS.controller_id
    r.instanceId = STATUS.instance_id
    r.role = STATUS.role
    r.term = STATUS.term
    r.primaryAddress = STATUS.primary_address
    r.primaryId = STATUS.primary_id
    r.gate = STATUS.gate
    r.gateDetail = STATUS.gate_detail
    r.hasQuorumAgeMs = True
    r.quorumAgeMs = STATUS.quorum_age_ms
    r.commitIndex = STATUS.commit_index
    s = r.init("scheduler")
    s.joined = SESSION.joined
    s.name = SESSION.name
    s.sinceMs = SESSION.since_ms
    s.spawnToken = SESSION.spawn_token
    s.lastPushSeq = SESSION.last_push_seq
    s.lastActedSeq = SESSION.last_acted_seq
    s.hasOldestUnackedMs = True
    s.oldestUnackedMs = SESSION.oldest_unacked_ms
    r.jobsPending = STATUS.jobs_pending
    r.jobsRunning = STATUS.jobs_running
    r.jobsFinished = STATUS.jobs_finished
    r.workers = STATUS.workers
    r.version = STATUS.version
    r.longPoll = STATUS.long_poll
    r.uptimeMs = STATUS.uptime_ms
    r.loopGapMs = STATUS.loop_gap_ms
    r.engine = STATUS.engine
    data: bytes = message.to_bytes()
    return struct.pack("<Q", len(data)) + data


def decode_by_attributes(data: bytes) -> Frame:
    """Each field by attribute, with the same limits as the codec."""
    with SCHEMA.Request.from_bytes(data, traversal_limit_in_words=1 << 16, nesting_limit=16) as m:
        r = m.body.as_struct(SCHEMA.CtrlStatusReply.schema)
        s = r.scheduler
        session = SchedulerSession(
            joined=s.joined,
            name=s.name,
            since_ms=s.sinceMs,
            spawn_token=s.spawnToken,
            last_push_seq=s.lastPushSeq,
            last_acted_seq=s.lastActedSeq,
            oldest_unacked_ms=s.oldestUnackedMs if s.hasOldestUnackedMs else None,
        )
        status = CtrlStatusReply(
            controller_id=r.controllerId,
            instance_id=r.instanceId,
            role=r.role,
            term=r.term,
            primary_address=r.primaryAddress,
            primary_id=r.primaryId,
            gate=r.gate,
            gate_detail=r.gateDetail,
            quorum_age_ms=r.quorumAgeMs if r.hasQuorumAgeMs else None,
            commit_index=r.commitIndex,
            scheduler=session,
            leases=tuple(r.leases),
            jobs_pending=r.jobsPending,
            jobs_running=r.jobsRunning,
            jobs_finished=r.jobsFinished,
            workers=r.workers,
            version=r.version,
            long_poll=r.longPoll,
            uptime_ms=r.uptimeMs,
            loop_gap_ms=r.loopGapMs,
            engine=r.engine,
        )
        return Frame(id=m.id, body=status, is_reply=m.opcode == 1)


def codec(rounds: int) -> dict[str, Any]:
    """Microseconds of each way, the best of the rounds, and the ratios."""
    message = encode(REPLY)[8:]
    assert decode(message) == decode_by_attributes(message) == REPLY
    assert decode(encode_by_keywords()[8:]) == decode(encode_by_attributes()[8:]) == REPLY
    ways: dict[str, Callable[[], object]] = {
        "keywords_encode": encode_by_keywords,
        "attributes_encode": encode_by_attributes,
        "attributes_decode": lambda: decode_by_attributes(message),
        "ours_encode": lambda: encode(REPLY),
        "ours_decode": lambda: decode(message),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter_ns()
            for _ in range(200):
                way()
            best[name] = min(best[name], (time.perf_counter_ns() - began) / 200_000)
    ours = best["ours_encode"] + best["ours_decode"]
    return {
        "bytes": len(message) + 8,
        "us": {name: round(value, 2) for name, value in best.items()},
        "times_keywords_and_attributes": round((best["keywords_encode"] + best["attributes_decode"]) / ours, 2),
        "times_attributes": round((best["attributes_encode"] + best["attributes_decode"]) / ours, 2),
        "goal": CODEC_GOAL,
    }


# ---------------------------------------------------------------- round trips
# This file is its own server and client, in processes of their own: wire.py --serve CERT KEY CA, wire.py --ask ...


def quiet_loop(scene: Coroutine[Any, Any, None]) -> None:
    """Run it on uvloop, as the programs do, without debug lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene)


async def serve(cert: str, key: str, authority: str) -> None:
    """A controller that has its answers ready; until standard input ends."""

    def accept(_: Connection) -> Handler:
        async def answer(message: Message) -> Body:
            return STATUS if isinstance(message, CtrlStatus) else HeartbeatReply(role="primary", term=7)

        return answer

    server = Server(TlsSource(TlsFiles(Path(authority), Path(cert), Path(key))), DEFAULT_LIMITS, accept)
    await server.start("127.0.0.1", 0)
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


async def ask(cert: str, key: str, authority: str, port: str, what: str, seconds: str) -> None:
    """Ask for so long, with a deadline each; print what each round trip took, in microseconds."""
    source = TlsSource(TlsFiles(Path(authority), Path(cert), Path(key)))
    connection = await connect(f"127.0.0.1:{port}", source, deadline_s=5, on_push=lambda _: None)
    message: Message = ASK if what == "ctrlstatus" else Heartbeat(session_id="9d3b5f0c9a7e31d8")
    took: list[float] = []
    warm_at = time.perf_counter() + WARM_S
    ends_at = warm_at + float(seconds)
    while (now := time.perf_counter()) < ends_at:
        await connection.request(message, 1.0)
        if now >= warm_at:
            took.append(round((time.perf_counter() - now) * 1e6, 1))
    connection.close("measured")
    await connection.closed
    print(json.dumps(sorted(took)))


def measured(
    program: list[str], server_files: TlsFiles, client_files: TlsFiles, serving: list[str], asking: list[str]
) -> list[float]:
    """Microseconds of each round trip between a fresh server process and a fresh client process."""

    def files(found: TlsFiles) -> list[str]:
        return [str(found.cert), str(found.key), str(found.ca)]

    command = [sys.executable, *program]
    begin = [*command, serving[0], *files(server_files), *serving[1:]]
    with subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = subprocess.run(
                [*command, asking[0], *files(client_files), port, *asking[1:]],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            found: list[float] = json.loads(done.stdout)
            return found
        finally:
            server.kill()


def round_trips(rounds: int, seconds: float) -> dict[str, Any]:
    """Medians, and the median over the rounds of each round's ratio of medians."""
    ours, floor = [str(HERE / "wire.py")], [str(HERE / "wire_echo.py")]
    sizes = str(len(encode(REPLY))), str(len(encode(Frame(id=1, body=ASK))))
    took: dict[str, list[list[float]]] = {"raw_echo": [], "ctrlstatus": [], "heartbeat": []}
    with tempfile.TemporaryDirectory() as folder:
        made = make_pki(Path(folder), "bench", [Subject("controller", "c1"), Subject("supervisor", "s1")])
        one, two = (TlsFiles(made.ca, each.cert, each.key) for each in made.certificates)
        for _ in range(rounds):
            took["raw_echo"].append(measured(floor, one, two, ["server", sizes[0]], ["client", sizes[1], str(seconds)]))
            for what in ("ctrlstatus", "heartbeat"):
                took[what].append(measured(ours, one, two, ["--serve"], ["--ask", what, str(seconds)]))
    found: dict[str, Any] = {f"{what}_us": _spread([each for part in parts for each in part]) for what, parts in took.items()}
    for what in ("ctrlstatus", "heartbeat"):
        ratios = [
            statistics.median(asked) / statistics.median(raw) for asked, raw in zip(took[what], took["raw_echo"], strict=True)
        ]
        found[f"{what}_ratio_p50"] = round(statistics.median(ratios), 2)
    return {**found, "goal": RTT_GOAL}


def _spread(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    return {"p50": round(statistics.median(ordered), 1), "p99": ordered[len(ordered) * 99 // 100]}


def main() -> int:
    """Measure, print, judge."""
    if sys.argv[1:2] in (["--serve"], ["--ask"]):
        quiet_loop((serve if sys.argv[1] == "--serve" else ask)(*sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a few seconds; noisier")
    asked = parser.parse_args()
    found = {"codec": codec(30 if asked.quick else 150), "rtt": round_trips(3 if asked.quick else 7, 0.7 if asked.quick else 1.5)}
    c, r = found["codec"], found["rtt"]
    kept = c["times_keywords_and_attributes"] >= CODEC_GOAL and r["ctrlstatus_ratio_p50"] <= RTT_GOAL
    if asked.json:
        print(json.dumps({**found, "goals_met": kept}))
        return 0 if kept else 1
    print(f"codec, a status reply of {c['bytes']} bytes, us: " + ", ".join(f"{name} {value}" for name, value in c["us"].items()))
    print(
        f"  {c['times_keywords_and_attributes']} times pycapnp by keywords and attributes,"
        f" {c['times_attributes']} times by attributes (goal: {CODEC_GOAL:g})"
    )
    print("round trip over TLS 1.3, us: " + ", ".join(f"{what[:-3]} {r[what]}" for what in r if what.endswith("_us")))
    print(
        f"  ctrlstatus {r['ctrlstatus_ratio_p50']}, heartbeat {r['heartbeat_ratio_p50']} times the raw echo's median"
        f" (goal: at most {RTT_GOAL:g})"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
