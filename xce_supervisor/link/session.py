"""A joined session: opened by `enter`, kept alive and judged by `watch` (docs/rules.md S3, S4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from xce_supervisor.errors import DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.limits import Limits
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import ErrorCode, Heartbeat, HeartbeatReply, Join, Joined, Message

CHECK_S = 1.0  # role check and heartbeat, at the slowest (S4), and the deadline of each (S7)
SESSION_TIMEOUT_S = 3.0  # where the controller does not say (S3)
_CHECK_S_MIN = 0.05  # a controller that asks for more heartbeats than this is not obeyed
_ABSENT_S = 0.5  # a later wake-up than this was not the controller's fault (S10)


class LostKind(Enum):
    """Why a session is over."""

    CONNECTION = "connection"  # closed, silent for too long, or the controller has ended the session
    NOT_PRIMARY = "not primary"
    WRONG_TERM = "wrong term"


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of a session. text: for people."""

    kind: LostKind
    text: str


async def enter(
    address: str, tls: TlsSource | None, join: Join, *, on_push: Callable[[Message], None], deadline_s: float, limits: Limits
) -> tuple[Connection, Joined]:
    """Connect to one address and join. The deadline, in seconds, is for both together.

    Raises:
        RequestRefused, Redirected: as the controller answered the join.
        RequestRefused: WRONG_CONTROLLER or WRONG_TERM also if the controller took a join that names another one (S3).
        PeerError: as `connect` and `Connection.request`.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + deadline_s
    connection = await connect(address, tls, deadline_s=deadline_s, on_push=on_push, limits=limits)
    try:
        named = connection.peer
        if join.controller_id and named is not None and named.name != join.controller_id:
            raise RequestRefused(ErrorCode.WRONG_CONTROLLER, f"{address} is {named}; wanted is controller {join.controller_id}")
        joined = await connection.request(join, max(0.0, ends_at - loop.time()))
        if not isinstance(joined, Joined):
            raise PeerError(f"{address}: the join was answered by {type(joined).__name__}")
        if join.controller_id and joined.controller_id != join.controller_id:
            raise RequestRefused(
                ErrorCode.WRONG_CONTROLLER, f"{address} is controller {joined.controller_id!a}; wanted is {join.controller_id!a}"
            )
        if join.term and joined.term != join.term:
            raise RequestRefused(ErrorCode.WRONG_TERM, f"{address} is in term {joined.term}; wanted is {join.term}")
    except BaseException:
        connection.close("the join failed")
        raise
    return connection, joined


async def watch(connection: Connection, joined: Joined) -> Lost:
    """Send heartbeats, which are role checks in the same breath, until the session is over; return why. Raises nothing.

    The controller's word on the heartbeat is followed, but at least one goes out a second. One unanswered heartbeat is no end;
    silence for the whole session time-out is, because the controller has then ended the session, too. Time in which this very
    process did not run is not counted as the controller's silence (docs/rules.md S10).
    """
    loop = asyncio.get_running_loop()
    every_s = min(CHECK_S, max(_CHECK_S_MIN, joined.heartbeat_ms / 1000)) if joined.heartbeat_ms else CHECK_S
    timeout_s = max(CHECK_S, joined.session_timeout_ms / 1000) if joined.session_timeout_ms else SESSION_TIMEOUT_S
    answered_at = loop.time()
    last = ""
    while True:
        slept_at = loop.time()
        await asyncio.wait([connection.closed], timeout=every_s)
        if connection.closed.done():
            return Lost(LostKind.CONNECTION, f"the connection to {connection.remote} ended: {connection.closed.result()}")
        asked_at = loop.time()
        answered_at += _absence(asked_at - slept_at, every_s)
        try:
            reply = await connection.request(Heartbeat(session_id=joined.session_id), CHECK_S)
        except DeadlinePassed as error:
            last = str(error)
            answered_at += _absence(loop.time() - asked_at, CHECK_S)
        except (RequestRefused, Redirected) as error:
            over = _refused(error, joined)
            if over is not None:
                return over
            last = str(error)
            if isinstance(error, RequestRefused) and error.code == ErrorCode.UNSUPPORTED:
                answered_at = loop.time()  # a controller without heartbeats is alive, and cannot be asked for more
        except PeerError as error:
            return Lost(LostKind.CONNECTION, str(error))
        else:
            if isinstance(reply, HeartbeatReply) and reply.role != "primary":
                return Lost(LostKind.NOT_PRIMARY, f"{connection.remote} says that its role is {reply.role[:20]!a}")
            if isinstance(reply, HeartbeatReply) and reply.term != joined.term:
                return Lost(LostKind.WRONG_TERM, f"{connection.remote} is in term {reply.term}; joined was term {joined.term}")
            answered_at = loop.time()
        silent_s = loop.time() - answered_at
        if silent_s >= timeout_s:
            return Lost(LostKind.CONNECTION, f"{connection.remote} has confirmed no heartbeat for {silent_s:.1f} s ({last})")


def _absence(passed_s: float, planned_s: float) -> float:
    """Return the seconds in which this process was away, if more than a busy loop explains."""
    late_s = passed_s - planned_s
    return late_s if late_s > _ABSENT_S else 0.0


def _refused(error: RequestRefused | Redirected, joined: Joined) -> Lost | None:
    """What a heartbeat's refusal means; None if it may pass (no quorum, too busy)."""
    if isinstance(error, Redirected):
        return Lost(LostKind.NOT_PRIMARY, str(error))
    if error.code == ErrorCode.NOT_JOINED:
        return Lost(LostKind.CONNECTION, f"the controller has ended the session: {error.text}")
    if error.code == ErrorCode.WRONG_TERM:
        return Lost(LostKind.WRONG_TERM, f"joined was term {joined.term}: {error.text}")
    return None
