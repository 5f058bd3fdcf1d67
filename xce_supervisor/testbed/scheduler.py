"""The reference scheduler: pinned to one controller and one term; acts on pushes, acknowledges, ends rather than serve others.

It is given exactly one address (docs/rules.md S3). A name is resolved once, and the first address it gave is the only one that
is ever spoken to, also while the controller is not up yet. After the join there is no reconnect: a lost connection, a role check
that says not primary or another term, and the exit push each end the process with a code of their own (S4): docs/scheduler.md.

A *cycle* takes the view as it is, dispatches at most `max_dispatch_per_cycle` jobs, and acknowledges the newest push that it had
seen at its begin once every one of those dispatches was answered. What is left over is acted on by the next cycle, at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import structlog
import uvloop

from xce_supervisor.errors import ConfigError, PeerError, Redirected, RequestRefused
from xce_supervisor.link.pinned import LostKind, PinnedConnection
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.testbed.scheduler_acts import Acts
from xce_supervisor.testbed.scheduler_faults import Faults
from xce_supervisor.testbed.scheduler_notify import notify
from xce_supervisor.wire.words import ErrorCode, HostRole, Join, Message, Push, SchedulerExit

log = structlog.get_logger()

CONNECT_RETRY_S = 0.1
JOIN_DEADLINE_S = 2.0
GRANDCHILD_LIFE_S = 60


class ExitCode(IntEnum):
    """Why the scheduler ended. docs/scheduler.md has the same table."""

    ASKED = 0
    CONNECTION_LOST = 10
    NOT_PRIMARY = 11
    OTHER_TERM = 12
    WRONG_CONTROLLER = 13
    WRONG_TERM = 14
    SESSION_ALIVE = 15
    NOT_CONNECTED = 16
    SIGNALLED = 17
    BUG = 70
    CONFIG = 78


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """One scheduler.

    address: "host:port" of the one controller. controller_id and term: what the scheduler was started for. spawn_token: "" takes
    that of the environment, XCE_SPAWN_TOKEN. tls: None only in a cluster without TLS. connect_deadline_s: from start to join.
    """

    address: str
    controller_id: str
    term: int
    spawn_token: str = ""
    name: str = "scheduler"
    tls: TlsFiles | None = None
    connect_deadline_s: float = 5.0
    faults: Faults = field(default_factory=Faults)


class Ending:
    """The first reason to end stands. `seen` is set then."""

    def __init__(self) -> None:
        self._first: tuple[ExitCode, str] | None = None
        self.seen = asyncio.Event()

    def because(self, code: ExitCode, why: str) -> None:
        """Ask for the end, with the exit code and a reason for people."""
        if self._first is None:
            self._first = (code, why)
            self.seen.set()

    @property
    def first(self) -> tuple[ExitCode, str]:
        """What to end with. A bug to ask before `seen` is set."""
        assert self._first is not None
        return self._first


def serve(config: SchedulerConfig) -> int:
    """Run one scheduler to its end and return its exit code. Raises ConfigError for what an operator got wrong."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_scheduler(config))


async def run_scheduler(config: SchedulerConfig) -> int:
    """Run one scheduler to its end and return its exit code. Call it in the main thread: it takes SIGTERM and SIGINT.

    Raises:
        ConfigError: the address or the TLS files cannot be used.
    """
    host, port = parse_address(config.address)
    tls = TlsSource(config.tls) if config.tls else None
    ending = Ending()
    _take_signals(config.faults, ending)
    if config.faults.grandchild:
        _leave_grandchild()
    work = asyncio.create_task(_work(config, host, port, tls, ending))
    work.add_done_callback(lambda task: ending.seen.set())
    await ending.seen.wait()
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        pass  # by us, one line above
    except ConfigError:
        raise
    except Exception as error:  # the outermost frame: a bug ends the process, told and with its own code
        log.exception("scheduler.failed")
        ending.because(ExitCode.BUG, f"bug: {error!r}")
    code, why = ending.first
    log.info("scheduler.ended", exit_code=int(code), reason=why, controller=config.controller_id, term=config.term)
    notify(STOPPING="1", STATUS=f"ended: {why}")
    return code


async def _work(config: SchedulerConfig, host: str, port: int, tls: TlsSource | None, ending: Ending) -> None:
    """Join and serve until cancelled, or until an ending is noted."""
    if config.faults.never_join:
        notify(STATUS="told never to join")
        await asyncio.Event().wait()
    acts = Acts(config.faults)
    connection = await _joined(config, host, port, tls, _receiver(config, acts, ending), ending)
    if connection is None:
        return
    joined = connection.joined
    notify(READY="1", STATUS=f"joined {joined.controller_id} term {joined.term}")
    log.info("scheduler.joined", controller=joined.controller_id, term=joined.term, session=joined.session_id)
    tasks = (
        asyncio.create_task(_check(connection, ending, config.faults)),
        asyncio.create_task(_act(acts, connection, ending, config.faults)),
    )
    try:
        await asyncio.gather(*tasks)  # a bug in either is raised at once
        await asyncio.Event().wait()  # until cancelled, now that an ending is noted; or for ever, if told so
    finally:
        for task in tasks:
            task.cancel()
        connection.close("the scheduler ends")
        await asyncio.wait(tasks)


async def _check(connection: PinnedConnection, ending: Ending, faults: Faults) -> None:
    lost = await connection.watch()
    if faults.no_self_check:
        log.warning("check.ignored", reason=lost.text)
    else:
        ending.because(_LOST_CODES[lost.kind], lost.text)


async def _act(acts: Acts, connection: PinnedConnection, ending: Ending, faults: Faults) -> None:
    try:
        await acts.run(connection)
    except Redirected as error:
        reason = (ExitCode.NOT_PRIMARY, str(error))
    except RequestRefused as error:
        reason = (_REFUSAL_CODES.get(ErrorCode(error.code), ExitCode.CONNECTION_LOST), error.text)
    except PeerError as error:
        reason = (ExitCode.CONNECTION_LOST, str(error))
    if not faults.no_self_check:
        ending.because(*reason)


def _receiver(config: SchedulerConfig, acts: Acts, ending: Ending) -> Callable[[Message], None]:
    """Return what the connection calls with each push."""

    def received(message: Message) -> None:
        match message:
            case SchedulerExit(reason=reason) if config.faults.ignore_exit:
                log.warning("exit.ignored", reason=reason)
            case SchedulerExit(reason=reason):
                ending.because(ExitCode.ASKED, f"asked to end: {reason}")
            case Push(term=term) if term != config.term:
                ending.because(ExitCode.OTHER_TERM, f"a push of term {term} came; ours is {config.term}")
            case Push():
                acts.pushed(message)
            case _:
                log.warning("push.ignored", opcode=int(message.opcode))

    return received


# ---------------------------------------------------------------- joining


async def _joined(
    config: SchedulerConfig,
    host: str,
    port: int,
    tls: TlsSource | None,
    on_push: Callable[[Message], None],
    ending: Ending,
) -> PinnedConnection | None:
    """Return the joined connection; None when an ending was noted instead.

    Tries the one resolved address until the deadline: the controller may just be starting, or not be promoted to the end.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + config.connect_deadline_s
    join = Join(
        host_role=HostRole.SCHEDULER,
        name=config.name,
        controller_id=config.controller_id,
        term=config.term,
        spawn_token=config.spawn_token or os.environ.get("XCE_SPAWN_TOKEN", ""),
    )
    address = ""
    while True:
        left = give_up_at - loop.time()
        try:
            address = address or await _resolve_once(host, port, left)
            return await PinnedConnection.open(address, tls, join, on_push=on_push, deadline_s=min(left, JOIN_DEADLINE_S))
        except Redirected as error:
            ending.because(ExitCode.NOT_PRIMARY, f"join: {error}")
            return None
        except RequestRefused as error:
            code = _JOIN_CODES.get(ErrorCode(error.code))
            if code is not None:
                ending.because(code, f"join refused: {error.text}")
                return None
            reason = f"join refused: {error.text}"
        except PeerError as error:
            reason = str(error)
        if give_up_at - loop.time() <= CONNECT_RETRY_S:
            ending.because(ExitCode.NOT_CONNECTED, f"no join within {config.connect_deadline_s:g} s: {reason}")
            return None
        notify(STATUS=f"connecting to {config.address}: {reason}")
        await asyncio.sleep(CONNECT_RETRY_S)


async def _resolve_once(host: str, port: int, deadline_s: float) -> str:
    """Return the one numeric address that this process will ever speak to. Raises PeerError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise PeerError(f"the name {host} was not resolved within {deadline_s:.1f} s") from None
    except OSError as error:
        raise PeerError(f"the name {host} does not resolve: {error.strerror or error}") from error
    numeric = found[0][4][0]
    if len(found) > 1:
        log.info("address.chosen", host=host, chosen=numeric, others=[str(entry[4][0]) for entry in found[1:]])
    return f"[{numeric}]:{port}" if ":" in str(numeric) else f"{numeric}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises ConfigError: more than one address, or none that can be used."""
    if "," in text or " " in text.strip():
        raise ConfigError(f"controller address {text!r}: a scheduler takes exactly one address (docs/rules.md S3); give one")
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"controller address {text!r} is no host:port, e.g. c1.example:7301")
    return host, int(port)


# ---------------------------------------------------------------- signals and faults


def _take_signals(faults: Faults, ending: Ending) -> None:
    loop = asyncio.get_running_loop()
    if faults.deaf_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, ending.because, ExitCode.SIGNALLED, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, ending.because, ExitCode.SIGNALLED, "SIGINT")


def _leave_grandchild() -> None:
    """Leave a process in a session of its own behind, as careless programs do; it ends by itself after a minute."""
    command = ["/bin/sh", "-c", f"sleep {GRANDCHILD_LIFE_S} & exit 0"]
    pid = os.posix_spawn(command[0], command, os.environ, setsid=True)
    os.waitpid(pid, 0)


_LOST_CODES = {
    LostKind.CONNECTION: ExitCode.CONNECTION_LOST,
    LostKind.NOT_PRIMARY: ExitCode.NOT_PRIMARY,
    LostKind.WRONG_TERM: ExitCode.OTHER_TERM,
}
_JOIN_CODES = {
    ErrorCode.WRONG_CONTROLLER: ExitCode.WRONG_CONTROLLER,
    ErrorCode.WRONG_TERM: ExitCode.WRONG_TERM,
    ErrorCode.SESSION_ALIVE: ExitCode.SESSION_ALIVE,
}
_REFUSAL_CODES = {
    ErrorCode.WRONG_TERM: ExitCode.OTHER_TERM,
    ErrorCode.WRONG_CONTROLLER: ExitCode.OTHER_TERM,
}
