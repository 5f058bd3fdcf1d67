"""The few exceptions that cross a border between rooms. Used above core only.

Whose fault it is, is the class: ours is an AssertionError, the peer's is PeerError, the operator's is ConfigError.
"""

from __future__ import annotations


class ConfigError(Exception):
    """Something an operator wrote cannot be used. The text names the file, the key and the reason, and what to do next."""


class PeerError(Exception):
    """A peer broke the protocol, went away or stayed silent. Ends the connection, never the program."""


class RequestRefused(PeerError):
    """A peer answered no. code: wire.words.ErrorCode. The connection goes on."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Redirected(PeerError):
    """A standby named the primary. address: "host:port", "" while none is known. The connection goes on."""

    def __init__(self, address: str, controller_id: str = "", term: int = 0) -> None:
        super().__init__(f"not the primary; it is {address or 'not known'}")
        self.address = address
        self.controller_id = controller_id
        self.term = term


class DeadlinePassed(PeerError):
    """A request was not answered by its deadline."""
