"""TLS 1.3 contexts from three files, checked before they are used, and changed without a restart (docs/rules.md A1, A2)."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.link.peer import PeerName, peer_name

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name: an expired certificate must still be readable, so that
# its date can be shown.
_NO_CHECK_TIME = 0x200000
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. ca: whom to trust (one or more certificates: both, while an authority is being replaced). cert: our own,
    with what stands between it and the authority. key: its key, without a pass phrase."""

    ca: Path
    cert: Path
    key: Path


class TlsSource:
    """Hands out contexts for new connections; those that exist keep theirs.

    mutual: a server asks every client for a certificate, and refuses those without. False only where the peers are not XCE's.

    Raises:
        ConfigError: a file cannot be read, is no PEM, or certificate and key do not belong together.
    """

    def __init__(self, files: TlsFiles, *, mutual: bool = True) -> None:
        self._files = files
        self._mutual = mutual
        self._stamp = _stamp(files)
        self._client, self._server, self._certificate = _build(files, mutual)

    @property
    def name(self) -> PeerName | None:
        """Our own name, as our certificate tells it to peers; None if it has no XCE name."""
        return peer_name(self._certificate)

    def client(self) -> ssl.SSLContext:
        """The context for a connection that we open. The caller checks the server's name (link.peer.check_server)."""
        return self._client

    def server(self) -> ssl.SSLContext:
        """The context for a connection that we accept."""
        return self._server

    def expires_at(self) -> float:
        """Wall time, seconds since the epoch, at which our certificate ends."""
        return float(ssl.cert_time_to_seconds(self._certificate["notAfter"]))

    def reload(self) -> str | None:
        """Read the files again if they changed. Returns None, or a warning: then the old ones stay in use.

        Both contexts are made afresh and swapped together: a mismatched pair loaded into a context in use would break every new
        connection. A pair caught between two renames is a warning now and is taken by the next call.
        """
        try:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return None
            self._client, self._server, self._certificate = _build(self._files, self._mutual)
        except ConfigError as error:
            return f"TLS files not taken over, the old ones stay in use: {error}"
        self._stamp = stamp
        return None


def _stamp(files: TlsFiles) -> _Stamp:
    stamps: list[tuple[int, int, int]] = []
    for path in (files.ca, files.cert, files.key):
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: TLS needs this file") from error
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)


def _build(files: TlsFiles, mutual: bool) -> tuple[ssl.SSLContext, ssl.SSLContext, Mapping[str, Any]]:
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    client.check_hostname = False  # names are xce:// URIs; link.peer.check_server looks at them, and at hosts where there is none
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    if mutual:
        server.verify_mode = ssl.CERT_REQUIRED
    server.num_tickets = 0  # a resumed session would outlive the certificate that it was made with
    certificate = _own_certificate(files)
    try:
        peer_name(certificate)
    except PeerError as error:
        raise ConfigError(f"{files.cert}: {error}") from error
    return client, server, certificate


def _context(side: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{files.ca}: no readable PEM certificates ({_said(error)})") from error
    _load_pair(context, files)
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        # Without a password function OpenSSL would ask the terminal, and the program would hang.
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{files.cert} and {files.key} do not belong together: renew both") from error
        raise ConfigError(f"{files.cert} or {files.key}: no readable PEM certificate and key ({_said(error)})") from error
    except OSError as error:
        raise ConfigError(f"{files.cert} or {files.key}: {_said(error)}") from error


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _own_certificate(files: TlsFiles) -> Mapping[str, Any]:
    """Return our own certificate, taken apart by the library that peers use: from a handshake with ourselves, in memory.

    A certificate may be for servers only or for clients only, so both sides are tried.
    """
    failure = ""
    for ours, other in ((ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT), (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)):
        shown, judge = ssl.SSLContext(ours), ssl.SSLContext(other)
        for context in (shown, judge):
            if context.check_hostname:
                context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        _load_pair(shown, files)
        if other == ssl.PROTOCOL_TLS_SERVER:
            _load_pair(judge, files)
        judge.load_verify_locations(files.cert)
        judge.verify_mode = ssl.CERT_REQUIRED
        judge.verify_flags = ssl.VerifyFlags(judge.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
        try:
            return _shown_certificate(shown, judge, ours == ssl.PROTOCOL_TLS_SERVER)
        except ssl.SSLError as error:
            failure = _said(error)
    raise ConfigError(f"{files.cert}: no TLS peer could take this certificate ({failure})")


def _shown_certificate(shown: ssl.SSLContext, judge: ssl.SSLContext, shown_is_server: bool) -> Mapping[str, Any]:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = shown.wrap_bio(there, back, server_side=shown_is_server)
    two = judge.wrap_bio(back, there, server_side=not shown_is_server)
    for _ in range(4):  # TLS 1.3 needs two turns
        for side in (two, one):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = two.getpeercert()
    if not certificate:
        raise ssl.SSLError("the handshake with ourselves did not end")
    return certificate
