"""Calls to an etcd cluster: one channel an endpoint, a deadline on every call, the next endpoint where one does not answer.

A call that was answered by no endpoint, or whose answer was lost, ends as Unavailable: whether a transaction was carried out is
then unknown. Every transaction of this room is written so that sending it again is harmless (its conditions fail the second
time, and the branch for that reads what there is), so calls are simply repeated at the next endpoint within their deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from xce_supervisor.errors import ConfigError
from xce_supervisor.store import etcd_messages as m
from xce_supervisor.store.engine import Fenced, Unavailable

# The member answers at once that it has no leader, instead of letting the call hang.
_METADATA = (("hasleader", "true"),)
_OPTIONS = (
    # Without a cap a channel sits out up to two minutes after an outage before it looks again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),
    # An etcd member is named by its address; what a proxy variable says is not for it.
    ("grpc.enable_http_proxy", 0),
)
# What no other endpoint would answer differently. All else is tried at the next one: a member without quorum answers in several
# ways (UNAVAILABLE, DEADLINE_EXCEEDED, but UNKNOWN "context deadline exceeded" too).
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Files in PEM form. cert and key: given both or neither."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


class EtcdCalls:
    """The way to one cluster. endpoints: "host:port" each. attempt_s: how long one endpoint is waited for."""

    def __init__(self, endpoints: Sequence[str], tls: EtcdTls | None, attempt_s: float) -> None:
        credentials = _credentials(tls)
        self._attempt_s = attempt_s
        self._at = 0
        self._channels = [
            grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
            for endpoint in endpoints
        ]

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            await channel.close(None)

    async def range(self, request: Any, deadline_s: float) -> Any:
        """A linearizable read. Raises Unavailable."""
        return await self._call(m.RANGE, request, m.RangeResponse, deadline_s)

    async def txn(self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any], deadline_s: float) -> Any:
        """A transaction. Raises Unavailable (outcome unknown), Fenced (it names a lease that is gone: nothing was written)."""
        request = m.TxnRequest(compare=compare, success=success, failure=failure)
        return await self._call(m.TXN, request, m.TxnResponse, deadline_s)

    async def grant(self, ttl_s: int, deadline_s: float) -> Any:
        """A new lease; the reply says what was granted. Raises Unavailable."""
        return await self._call(m.LEASE_GRANT, m.LeaseGrantRequest(TTL=ttl_s), m.LeaseGrantResponse, deadline_s)

    async def revoke(self, lease_id: int, deadline_s: float) -> None:
        """End a lease, and delete its key. Does nothing where it is gone already. Raises Unavailable."""
        try:
            await self._call(m.LEASE_REVOKE, m.LeaseRevokeRequest(ID=lease_id), m.LeaseRevokeResponse, deadline_s)
        except Fenced:
            return

    async def keep_alive(self, lease_id: int, deadline_s: float) -> Any:
        """Renew a lease once; TTL 0 in the reply: it is gone. Raises Unavailable."""
        return await self._repeated(self._keep_alive_once, deadline_s, m.LeaseKeepAliveRequest(ID=lease_id))

    async def _call(self, method: str, request: Any, answer: Any, deadline_s: float) -> Any:
        async def once(channel: grpc.aio.Channel, timeout_s: float, request: Any) -> Any:
            call = channel.unary_unary(
                method, request_serializer=_to_bytes, response_deserializer=answer.FromString
            )  # fmt: skip
            return await call(request, timeout=timeout_s, metadata=_METADATA)

        return await self._repeated(once, deadline_s, request)

    @staticmethod
    async def _keep_alive_once(channel: grpc.aio.Channel, timeout_s: float, request: Any) -> Any:
        stream = channel.stream_stream(
            m.LEASE_KEEP_ALIVE, request_serializer=_to_bytes, response_deserializer=m.LeaseKeepAliveResponse.FromString
        )
        # One request, one reply: so each renewal has a deadline of its own, and a reply can belong to no other attempt.
        call = stream(iter((request,)), timeout=timeout_s, metadata=_METADATA)
        try:
            async for reply in call:
                return reply
        finally:
            call.cancel()
        raise Unavailable("etcd ended the stream of renewals without an answer")

    async def _repeated(self, once: Any, deadline_s: float, request: Any) -> Any:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        reason = "no endpoint was tried"
        while (left_s := ends_at - loop.time()) > 0:
            at = self._at
            try:
                return await once(self._channels[at], min(left_s, self._attempt_s), request)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise Fenced(reason) from error
                if error.code() in _FINAL:
                    raise Unavailable(reason) from error
            except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:  # the channel is being closed
                raise Unavailable(str(error)) from error
            # Another call may have gone on to the next endpoint already; two steps would skip one.
            if self._at == at:
                self._at = (at + 1) % len(self._channels)
            await asyncio.sleep(min(RETRY_S, max(0.0, ends_at - loop.time())))
        raise Unavailable(f"no etcd endpoint answered within {deadline_s:.1f} s; the last said {reason}")


def _to_bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _credentials(tls: EtcdTls | None) -> grpc.ChannelCredentials | None:
    if tls is None:
        return None
    parts: list[bytes | None] = []
    for key, path in (("ca", tls.ca), ("key", tls.key), ("cert", tls.cert)):
        try:
            parts.append(None if path is None else path.read_bytes())
        except OSError as error:
            raise ConfigError(f"etcd://: {key}={path}: {error.strerror}; give a PEM file that this user can read") from error
    root, private_key, chain = parts
    return grpc.ssl_channel_credentials(root, private_key, chain)
