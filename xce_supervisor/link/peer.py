"""Who a peer is: addresses, and the name that its certificate gives it (docs/rules.md A1)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xce_supervisor.errors import PeerError
from xce_supervisor.wire.words import HostRole

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SCHEME = "xce://"
_ROLES = {role.name.lower(): role for role in HostRole}


@dataclass(frozen=True, slots=True)
class PeerName:
    """What the URI SAN `xce://CLUSTER/ROLE/NAME` says, e.g. xce://demo/controller/c1."""

    cluster: str
    role: HostRole
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.cluster}/{self.role.name.lower()}/{self.name}"


def parse_name(uri: str) -> PeerName:
    """Return the name in `uri`. Raises PeerError if it is none."""
    parts = uri.removeprefix(_SCHEME).split("/") if uri.startswith(_SCHEME) else []
    if len(parts) != 3 or parts[1] not in _ROLES or not all(_PART.fullmatch(part) for part in parts):
        raise PeerError(
            f"the certificate names {uri[:300]!a}, which is not {_SCHEME}CLUSTER/ROLE/NAME with a role of {sorted(_ROLES)}"
        )
    return PeerName(parts[0], _ROLES[parts[1]], parts[2])


def peer_name(certificate: Mapping[str, Any] | None) -> PeerName | None:
    """Return the name in a certificate as `SSLSocket.getpeercert()` gives it; None if it has no XCE name.

    Raises:
        PeerError: the name is malformed, or there are several: nobody is two peers.
    """
    found = [
        value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI" and value.startswith(_SCHEME)
    ]
    if len(found) > 1:
        raise PeerError(f"the certificate has {len(found)} XCE names; it must have one")
    return parse_name(found[0]) if found else None


def check_server(certificate: Mapping[str, Any] | None, host: str) -> PeerName | None:
    """Return the name of a server that may be a controller.

    A certificate with an XCE name must name a controller: any other peer's certificate of the same authority would otherwise
    serve to pose as one. A certificate without (a plain server certificate) must be for `host`, exactly.

    Raises:
        PeerError: it is neither.
    """
    name = peer_name(certificate)
    if name is not None:
        if name.role is not HostRole.CONTROLLER:
            raise PeerError(f"certificate refused: it is {name}'s, not a controller's")
        return name
    alternatives = (certificate or {}).get("subjectAltName", ())
    if not any(_same_host(host, kind, value) for kind, value in alternatives):
        raise PeerError(
            f"certificate refused: it names neither a controller ({_SCHEME}CLUSTER/controller/NAME) nor the host {host}"
        )
    return None


def _same_host(host: str, kind: str, value: str) -> bool:
    if kind == "DNS":
        return value.lower() == host.lower()
    if kind != "IP Address":
        return False
    try:
        return ipaddress.ip_address(value) == ipaddress.ip_address(host)
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises PeerError if it is neither (addresses come from peers too)."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not host or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536 or len(port) > 5:
        raise PeerError(f"{address[:300]!a} is no address: write host:port, or [v6 address]:port")
    return host, int(port)
