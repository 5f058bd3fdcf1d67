"""An operator's requests to the reference cluster, each with a deadline: used by the command line, the demo and tests.

Requests of the primary (`submit`, `jobs`, `step_down` without an address of its own) are sent to one controller after the other,
follow redirects, and are repeated across a fail-over until their deadline. All of them may be repeated: a submission is told from
another by its job id, which the client makes. Requests of one controller (`ctrlstatus`, `gate`,
`plug`) go to that one, once.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from xce_supervisor.errors import DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.connection import Connection, connect
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import (
    CtrlStatus,
    CtrlStatusReply,
    Done,
    ErrorCode,
    GateSet,
    JobList,
    JobQuery,
    JobSubmit,
    JobView,
    Message,
    PushPlug,
    StepDown,
)

CONNECT_DEADLINE_S = 1.5
REQUEST_DEADLINE_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.02, 0.5
PAGE = 1000


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the controllers are, and with which certificate (an operator's) they are asked."""

    controllers: tuple[str, ...]
    tls: TlsSource | None = None

    def __post_init__(self) -> None:
        assert self.controllers, "a cluster without controllers"


def new_job_id() -> str:
    """Return a job id that nobody else makes."""
    return f"job-{uuid.uuid4().hex[:20]}"


async def submit(cluster: Cluster, job: JobSubmit, *, deadline_s: float = 10.0) -> int:
    """Submit one job and return the commit index, once it is committed. Safe to repeat with the same job.

    Raises:
        RequestRefused: the job is malformed, or its id is taken by another (CONFLICT).
        DeadlinePassed: whether it is committed is not known; submit the same again to find out.
    """
    [index] = await submit_all(cluster, (job,), deadline_s=deadline_s)
    return index


async def submit_all(cluster: Cluster, jobs: Sequence[JobSubmit], *, deadline_s: float = 30.0) -> list[int]:
    """Submit jobs in order over one connection and return their commit indexes. Raises as `submit`, at the first that fails."""
    indexes: list[int] = []
    async with _Primary(cluster, deadline_s) as primary:
        for job in jobs:
            answer = await primary.request(job)
            if not isinstance(answer, Done):
                raise PeerError(f"a submission was answered by {type(answer).__name__}")
            indexes.append(answer.index)
    return indexes


async def jobs(cluster: Cluster, job_ids: Sequence[str] = (), *, deadline_s: float = 10.0) -> tuple[JobView, ...]:
    """Return the jobs named, or all, in order of submission. Raises RequestRefused, DeadlinePassed."""
    found: list[JobView] = []
    async with _Primary(cluster, deadline_s) as primary:
        while True:
            answer = await primary.request(JobQuery(job_ids=tuple(job_ids), offset=len(found), limit=PAGE))
            if not isinstance(answer, JobList):
                raise PeerError(f"a job query was answered by {type(answer).__name__}")
            found.extend(answer.jobs)
            if not answer.jobs or len(found) >= answer.total:
                return tuple(found)


async def wait_for_jobs(
    cluster: Cluster, job_ids: Sequence[str], *, deadline_s: float = 60.0, poll_s: float = 0.1
) -> tuple[JobView, ...]:
    """Return the jobs once every one of them is done or failed. Raises DeadlinePassed naming how many are not."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + deadline_s
    open_ids: tuple[str, ...] = tuple(job_ids)
    while True:
        left = give_up_at - loop.time()
        if left <= 0:
            raise DeadlinePassed(
                f"{len(open_ids)} of {len(job_ids)} jobs are not finished after {deadline_s:g} s: {open_ids[:5]}"
            )
        found = await jobs(cluster, job_ids, deadline_s=left)
        ended = {job.job_id for job in found if job.state in ("done", "failed")}
        open_ids = tuple(job_id for job_id in job_ids if job_id not in ended)
        if not open_ids:
            return found
        await asyncio.sleep(poll_s)


async def ctrlstatus(
    address: str, tls: TlsSource | None, *, known_version: int = 0, wait_ms: int = 0, deadline_s: float = 2.0
) -> CtrlStatusReply:
    """Ask one controller for its status. With wait_ms (milliseconds) a long poll; deadline_s is beyond that. Raises PeerError."""
    message = CtrlStatus(known_version=known_version, wait_ms=wait_ms)
    answer = await _ask_one(address, tls, message, deadline_s + wait_ms / 1000)
    if not isinstance(answer, CtrlStatusReply):
        raise PeerError(f"{address} answered a status query by {type(answer).__name__}")
    return answer


async def step_down(cluster: Cluster, *, address: str = "", hold_ms: int = 0, deadline_s: float = 5.0) -> None:
    """Make the primary (or the controller at `address`, if it leads) give up leadership for at least hold_ms milliseconds.

    Sent once: a repeated request could depose the successor. Raises PeerError.
    """
    if address:
        await _ask_one(address, cluster.tls, StepDown(hold_ms=hold_ms), deadline_s)
        return
    async with _Primary(cluster, deadline_s) as primary:
        await primary.request(StepDown(hold_ms=hold_ms), once=True)


async def gate(
    address: str, tls: TlsSource | None, name: str, *, closed: bool, detail: str = "", deadline_s: float = 3.0
) -> None:
    """Close or open one promotion gate of one controller. Raises PeerError."""
    await _ask_one(address, tls, GateSet(gate=name, closed=closed, detail=detail), deadline_s)


async def plug(address: str, tls: TlsSource | None, name: str, *, closed: bool, deadline_s: float = 3.0) -> None:
    """Close or open one of a controller's plugs (fault injection). Raises PeerError."""
    await _ask_one(address, tls, PushPlug(name=name, closed=closed), deadline_s)


async def _ask_one(address: str, tls: TlsSource | None, message: Message, deadline_s: float) -> Message | Done:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + deadline_s
    connection = await connect(address, tls, deadline_s=min(deadline_s, CONNECT_DEADLINE_S), on_push=_no_push)
    try:
        return await connection.request(message, max(0.001, give_up_at - loop.time()))
    finally:
        connection.close("asked")


def _no_push(message: Message) -> None:
    """Operators have no session, so nothing is pushed to them; what comes all the same is dropped."""


@dataclass(slots=True)
class _Primary:
    """A connection to whoever is primary, until one deadline for everything asked through it."""

    cluster: Cluster
    deadline_s: float
    _connection: Connection | None = None
    _turn: int = 0
    _named: str = ""
    _give_up_at: float = 0.0
    _told: str = "nothing was tried"
    _jitter: random.Random = field(default_factory=random.Random)

    async def __aenter__(self) -> _Primary:
        self._give_up_at = asyncio.get_running_loop().time() + self.deadline_s
        return self

    async def __aexit__(self, *_: object) -> None:
        self._drop()

    async def request(self, message: Message, *, once: bool = False) -> Message | Done:
        """Return the primary's answer. once: do not send again when the outcome of a sending is unknown.

        Raises:
            RequestRefused: for good.
            DeadlinePassed: nobody took it in time; the text has the last reason.
            PeerError: `once`, and the outcome is unknown.
        """
        wait_s = RETRY_S_MIN
        while True:
            connection = await self._reach()
            if connection is not None:
                try:
                    return await connection.request(message, min(REQUEST_DEADLINE_S, self._left()))
                except Redirected as error:
                    self._told, self._named = str(error), error.address
                except RequestRefused as error:
                    if error.code != ErrorCode.UNAVAILABLE:
                        raise
                    self._told = error.text
                except PeerError as error:
                    if once:
                        raise
                    self._told = str(error)
                self._drop()
            # Also after a redirect: two standbys may each name the other while a primary is being elected.
            await asyncio.sleep(min(self._left(), wait_s * self._jitter.uniform(0.5, 1.0)))
            wait_s = min(RETRY_S_MAX, wait_s * 2)

    async def _reach(self) -> Connection | None:
        """Return the open connection, or one to whom a redirect named, or to the next controller in turn; None if that failed."""
        if self._connection is not None and not self._connection.closed.done():
            return self._connection
        address, self._named = self._named, ""
        if not address:
            address = self.cluster.controllers[self._turn % len(self.cluster.controllers)]
            self._turn += 1
        try:
            deadline_s = min(CONNECT_DEADLINE_S, self._left())
            self._connection = await connect(address, self.cluster.tls, deadline_s=deadline_s, on_push=_no_push)
        except DeadlinePassed:
            if self._give_up_at <= asyncio.get_running_loop().time():
                raise
            self._told = f"{address} did not answer"
        except PeerError as error:
            self._told = str(error)
        return self._connection

    def _left(self) -> float:
        left = self._give_up_at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlinePassed(f"no primary took the request within {self.deadline_s:g} s; last: {self._told}")
        return left

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close("done")
            self._connection = None
