"""Telling whoever started us how we are, by sd_notify: one datagram to the socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import os
import socket

import structlog

log = structlog.get_logger()


def notify(**fields: str) -> bool:
    """Send KEY=VALUE lines, e.g. notify(READY="1", STATUS="joined"). Returns whether it was sent; never blocks, never raises.

    Without NOTIFY_SOCKET nobody asked and nothing is sent. A full or vanished socket is no reason to end.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    message = "\n".join(f"{key}={' '.join(value.split())}" for key, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel:
        try:
            channel.sendto(message.encode(), address)
        except OSError as error:
            log.warning("notice.dropped", socket=path, error=error.strerror)
            return False
    return True
