"""A connection that follows the primary: tries candidates in turn, obeys redirects, joins again, and tells who must resync."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from xce_supervisor.errors import ConfigError, DeadlinePassed, PeerError, Redirected, RequestRefused
from xce_supervisor.link.connection import Answer, Connection
from xce_supervisor.link.limits import DEFAULT_LIMITS, Limits
from xce_supervisor.link.peer import split_address
from xce_supervisor.link.session import enter, watch
from xce_supervisor.link.tls import TlsSource
from xce_supervisor.wire.words import ErrorCode, Join, Joined, Message

log = structlog.get_logger("link")

_BACKOFF_S = 0.05
_BACKOFF_S_MAX = 1.0
_BRIEF_S = 1.0
_ENTER_S = 2.0  # connection and join of one candidate
_REDIRECTS_MAX = 3  # in a row without a pause: two standbys that name each other must not make a busy loop
_TOLD_MAX = 64
_TRY_AGAIN_S = 0.1  # after UNAVAILABLE, within a request's deadline

Asked = Message | Callable[[Joined], Message]


class FailoverConnection:
    """A session with whichever controller is primary.

    Args:
        candidates: addresses, "host:port", at least one; a redirect may lead to others.
        join: makes the join; its argument is the id of the session before, to resume, "" at first.
        on_push: called on the loop for every push of the current session.
        on_joined: called in a task after each join, for the resync; cancelled when that session ends. A PeerError from it ends
            the session, and the next one gets another call.

    Raises:
        ConfigError: no candidate, or one that is no address.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        tls: TlsSource | None,
        join: Callable[[str], Join],
        on_push: Callable[[Message], None],
        on_joined: Callable[[Joined], Awaitable[None]],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if not candidates:
            raise ConfigError("no controller address is given; give at least one host:port")
        for address in candidates:
            try:
                split_address(address)
            except PeerError as error:
                raise ConfigError(f"controller address: {error}") from error
        self._candidates = tuple(candidates)
        self._tls = tls
        self._join = join
        self._on_push = on_push
        self._on_joined = on_joined
        self._limits = limits
        self._turn = 0
        self._named = ""  # the address that the last redirect named
        self._redirects = 0
        self._resume = ""
        self._why = "not tried yet"
        self._told: set[str] = set()  # failures that were logged since the last session: each once
        self._current: tuple[Connection, Joined] | None = None
        self._ready = asyncio.Event()

    @property
    def joined(self) -> Joined | None:
        """The current session, None while there is none."""
        return self._current[1] if self._current is not None else None

    @property
    def why(self) -> str:
        """Why there is no session, for people: the last failure or end."""
        return self._why

    async def run(self) -> NoReturn:
        """Keep a session until cancelled. Ends otherwise only by a bug: what on_joined raises beside PeerError."""
        loop = asyncio.get_running_loop()
        brief = 0  # sessions in a row that were over at once: a primary that takes joins and then fails is not hammered
        while True:
            if brief > 1:
                await asyncio.sleep(random.uniform(0, min(_BACKOFF_S_MAX, _BACKOFF_S * 2**brief)))
            connection, joined = await self._enter_one()
            since = loop.time()
            self._current, self._resume, self._redirects = (connection, joined), joined.session_id, 0
            self._ready.set()
            self._told.clear()
            log.info("session.joined", remote=connection.remote, controller=joined.controller_id, term=joined.term)
            try:
                await self._hold(connection, joined)
            finally:
                self._ready.clear()
                self._current = None
                connection.close("the session is over")
            brief = min(brief + 1, 16) if loop.time() - since < _BRIEF_S else 0

    async def request(self, message: Asked, deadline_s: float, idempotent: bool = True) -> Answer:
        """Send a request to the primary; wait for a session, and try again over a fail-over, until the deadline.

        Args:
            message: the request, or a function that makes it for the session that it goes to.
            deadline_s: seconds for all of it.
            idempotent: may it be sent again when it is not known whether it was done? If not, only what was surely not done is
                sent again (redirected, not joined).

        Raises:
            RequestRefused: a definite no.
            DeadlinePassed: no session or no reply in time. Whether it was done is not known.
            PeerError: only if not idempotent: the connection ended meanwhile. Whether it was done is not known.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        while True:
            connection, joined = await self._session(ends_at, deadline_s)
            asked = message if isinstance(message, Message) else message(joined)
            try:
                return await connection.request(asked, max(0.0, ends_at - loop.time()))
            except DeadlinePassed:
                raise
            except Redirected as error:
                self._leave(connection, str(error), error.address)
            except RequestRefused as error:
                if error.code == ErrorCode.NOT_JOINED:
                    self._leave(connection, error.text, "")
                elif error.code == ErrorCode.UNAVAILABLE and idempotent and loop.time() + _TRY_AGAIN_S < ends_at:
                    await asyncio.sleep(_TRY_AGAIN_S)
                else:
                    raise
            except PeerError as error:
                if not idempotent:
                    raise
                self._leave(connection, str(error), "")

    def push(self, message: Message) -> None:
        """Send without asking for a reply. Raises PeerError: no session, or as Connection.push."""
        if self._current is None:
            raise PeerError(f"no session with a primary: {self._why}")
        self._current[0].push(message)

    # ---------------------------------------------------------------- one session

    async def _hold(self, connection: Connection, joined: Joined) -> None:
        """Heartbeat and resync until the session is over."""
        resync = asyncio.ensure_future(self._on_joined(joined))
        watching = asyncio.ensure_future(watch(connection, joined))
        try:
            await asyncio.wait([resync, watching], return_when=asyncio.FIRST_COMPLETED)
            if resync.done():
                try:
                    resync.result()
                except PeerError as error:
                    connection.close(f"resync failed: {error}")
            lost = await watching
            self._why = lost.text
            log.warning("session.lost", remote=connection.remote, kind=lost.kind.value, reason=lost.text)
        finally:
            resync.cancel()
            watching.cancel()
            await asyncio.gather(resync, watching, return_exceptions=True)

    def _leave(self, connection: Connection, why: str, named: str) -> None:
        """Give a session up; `run` notices by its connection's end."""
        if self._current is not None and self._current[0] is connection:
            self._current = None
            self._ready.clear()
            self._named, self._why = named, why
            connection.abort(why)

    async def _session(self, ends_at: float, deadline_s: float) -> tuple[Connection, Joined]:
        while self._current is None:
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._ready.wait()
            except TimeoutError:
                raise DeadlinePassed(f"no session with a primary within {deadline_s:g} s: {self._why}") from None
        return self._current

    # ---------------------------------------------------------------- finding the primary

    async def _enter_one(self) -> tuple[Connection, Joined]:
        """Try candidates until one takes the join."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PeerError),
            wait=self._pause,
            sleep=asyncio.sleep,
            before_sleep=self._failed,
        )
        return await retrying(self._try_next)

    async def _try_next(self) -> tuple[Connection, Joined]:
        address, self._named = self._named, ""
        if not address:
            address = self._candidates[self._turn % len(self._candidates)]
            self._turn += 1
        try:
            return await enter(
                address, self._tls, self._join(self._resume), on_push=self._on_push, deadline_s=_ENTER_S, limits=self._limits
            )
        except Redirected as error:
            self._named = error.address
            self._redirects += 1
            raise PeerError(f"{address}: {error}") from error
        except RequestRefused as error:
            raise PeerError(f"{address} refused the join: {error.text}") from error

    def _pause(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: none after a redirect, unless they go in circles; else backoff with jitter."""
        if self._named and self._redirects % (_REDIRECTS_MAX + 1):
            return 0.0
        self._redirects = 0
        return float(wait_random_exponential(multiplier=_BACKOFF_S, max=_BACKOFF_S_MAX)(state))

    def _failed(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._why = str(error)
        if self._why not in self._told and len(self._told) < _TOLD_MAX:
            self._told.add(self._why)
            log.info("join.failed", attempt=state.attempt_number, reason=self._why)
