"""The local certificate authority of a reference cluster: one CA per directory, one certificate per peer.

A peer's role and name stand in the URI SAN `xce://CLUSTER/ROLE/NAME` of its certificate (docs/rules.md A1). Files:

    DIR/ca.pem          the CA's certificate; every peer needs it
    DIR/ca.key          the CA's key, mode 0600; only `xce-testbed pki` needs it
    DIR/ROLE-NAME.pem   a peer's certificate
    DIR/ROLE-NAME.key   its key, mode 0600

Asking twice changes nothing: a certificate that still serves what is asked is kept. One that does not (it expires soon, lacks
a host, was signed by another CA, or does not fit its key after a crash between two writes) is made anew. A CA is never
overwritten: peers out there trust it. Each file is written aside, synced and renamed, so that no reader sees half of one.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from xce_supervisor.errors import ConfigError
from xce_supervisor.wire.words import HostRole

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
DEFAULT_DAYS = 365
CA_DAYS = 3650
# Hosts of one cluster may disagree about the time of day: one whose clock lags must not find a new certificate "not yet valid".
BACKDATE_S = 3600
RENEW_BEFORE_S = 14 * 86400  # docs/rules.md A2: expiry is told 14 days ahead; asking again then gives a new one
LOCK_WAIT_S = 10.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is for. role: a HostRole's name in lower case, e.g. "controller". name: e.g. "c1"."""

    role: str
    name: str

    @property
    def stem(self) -> str:
        """File name without its ending."""
        return f"{self.role}-{self.name}"


@dataclass(frozen=True, slots=True)
class MadeCertificate:
    """One certificate after a run. made: written now (else it was there and served). expires_at: wall time, UTC."""

    subject: Subject
    cert: Path
    key: Path
    uri: str
    made: bool
    expires_at: datetime.datetime


@dataclass(frozen=True, slots=True)
class MadePki:
    """What a run of `make_pki` left in the directory."""

    ca: Path
    ca_made: bool
    certificates: tuple[MadeCertificate, ...]


@dataclass(frozen=True, slots=True)
class _Authority:
    key: ec.EllipticCurvePrivateKey
    cert: x509.Certificate


def parse_subject(text: str) -> Subject:
    """Return the subject that `text`, "ROLE/NAME", names. Raises ConfigError naming what is wrong with it."""
    role, slash, name = text.partition("/")
    roles = [member.name.lower() for member in HostRole]
    if not slash or role not in roles:
        raise ConfigError(f"{text!r} is no ROLE/NAME: use one of {', '.join(roles)}, a slash and a name, e.g. controller/c1")
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{text!r}: the name must be 1 to 63 letters, digits, '.', '_' or '-' and begin with a letter or digit")
    return Subject(role, name)


def make_pki(
    directory: Path,
    cluster: str,
    subjects: Sequence[Subject],
    *,
    hosts: Sequence[str] = (),
    days: int = DEFAULT_DAYS,
    backdate_s: int = BACKDATE_S,
) -> MadePki:
    """Make what is missing in `directory`: the CA of `cluster`, and a certificate and key for each of `subjects`.

    hosts: DNS names and IP addresses that the certificates answer for besides localhost. days: how long new certificates
    last (1 to 3650, never longer than the CA). backdate_s: how far before now they begin to be valid, for clocks that lag.

    Raises:
        ConfigError: a name or number is out of range, the directory cannot be written (permissions, full disk), or the CA in
            it is broken, another cluster's or expired. Nothing that was there is lost.
    """
    _check_request(cluster, hosts, days, backdate_s)
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise _disk_error("cannot make the directory", directory, error) from error
    with _locked(directory):
        authority, ca_made = _authority(directory, cluster, backdate_s)
        names = _subject_alternatives(hosts)
        certificates = tuple(
            _certificate(directory, cluster, subject, authority, names, days, backdate_s) for subject in dict.fromkeys(subjects)
        )
    return MadePki(directory / "ca.pem", ca_made, certificates)


# ---------------------------------------------------------------- the authority


def _authority(directory: Path, cluster: str, backdate_s: int) -> tuple[_Authority, bool]:
    key_path, cert_path = directory / "ca.key", directory / "ca.pem"
    if cert_path.exists():
        if not key_path.exists():
            raise ConfigError(f"{cert_path} is there and {key_path} is not: put the CA's key beside it, or use another directory")
        return _load_authority(key_path, cert_path, cluster), False
    if key_path.exists():  # a run that ended between its two writes: finish it with the same key
        key = _load_key(key_path)
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(key_path, _key_bytes(key), 0o600)
    cert = _sign_ca(key, cluster, backdate_s)
    _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return _Authority(key, cert), True


def _load_authority(key_path: Path, cert_path: Path, cluster: str) -> _Authority:
    key, cert = _load_key(key_path), _load_cert(cert_path)
    if _public_bytes(cert.public_key()) != _public_bytes(key.public_key()):
        raise ConfigError(f"{cert_path} and {key_path} are no pair: put the key of this CA beside it, or use another directory")
    owners = cert.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    owner = str(owners[0].value) if owners else ""
    if owner != cluster:
        raise ConfigError(f"{cert_path} is the CA of cluster {owner!r}, not of {cluster!r}: use another directory")
    if cert.not_valid_after_utc <= _utc_now():
        raise ConfigError(f"{cert_path} expired at {cert.not_valid_after_utc:%Y-%m-%d}: begin a new CA in another directory")
    return _Authority(key, cert)


def _sign_ca(key: ec.EllipticCurvePrivateKey, cluster: str, backdate_s: int) -> x509.Certificate:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster),
            x509.NameAttribute(NameOID.COMMON_NAME, "xce reference cluster CA"),
        ]
    )
    begins = _utc_now() - datetime.timedelta(seconds=backdate_s)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(_utc_now() + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


# ---------------------------------------------------------------- certificates of peers


def _certificate(
    directory: Path,
    cluster: str,
    subject: Subject,
    authority: _Authority,
    names: list[x509.GeneralName],
    days: int,
    backdate_s: int,
) -> MadeCertificate:
    cert_path, key_path = directory / f"{subject.stem}.pem", directory / f"{subject.stem}.key"
    uri = f"xce://{cluster}/{subject.role}/{subject.name}"
    wanted = [x509.UniformResourceIdentifier(uri), *names]
    kept = _still_serves(cert_path, key_path, authority, wanted)
    if kept is not None:
        return MadeCertificate(subject, cert_path, key_path, uri, False, kept.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _sign_peer(key, subject, authority, wanted, days, backdate_s)
    # The key goes first: a reader between the two writes sees a pair that does not match, which it refuses (A2), and so does
    # the next run after a crash here.
    _write(key_path, _key_bytes(key), 0o600)
    _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return MadeCertificate(subject, cert_path, key_path, uri, True, cert.not_valid_after_utc)


def _still_serves(
    cert_path: Path, key_path: Path, authority: _Authority, wanted: list[x509.GeneralName]
) -> x509.Certificate | None:
    if not (cert_path.exists() and key_path.exists()):
        return None
    try:
        cert, key = _load_cert(cert_path), _load_key(key_path)
        cert.verify_directly_issued_by(authority.cert)
        present = set(cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ConfigError, InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return None
    paired = _public_bytes(cert.public_key()) == _public_bytes(key.public_key())
    lasting = cert.not_valid_after_utc > _utc_now() + _renewal_margin(cert)
    return cert if paired and lasting and set(wanted) <= present else None


def _renewal_margin(cert: x509.Certificate) -> datetime.timedelta:
    """How long before its end a certificate is made anew: 14 days, or a third of a short life."""
    life = cert.not_valid_after_utc - cert.not_valid_before_utc
    return min(datetime.timedelta(seconds=RENEW_BEFORE_S), life / 3)


def _sign_peer(
    key: ec.EllipticCurvePrivateKey,
    subject: Subject,
    authority: _Authority,
    wanted: list[x509.GeneralName],
    days: int,
    backdate_s: int,
) -> x509.Certificate:
    now = _utc_now()
    ends = min(now + datetime.timedelta(days=days), authority.cert.not_valid_after_utc)
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{subject.role} {subject.name}"[:64])]))
        .issuer_name(authority.cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=backdate_s))
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(wanted), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_id, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _subject_alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*LOCAL_HOSTS, *hosts]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


# ---------------------------------------------------------------- files


def _check_request(cluster: str, hosts: Sequence[str], days: int, backdate_s: int) -> None:
    if not NAME_PATTERN.fullmatch(cluster):
        raise ConfigError(
            f"cluster name {cluster!r}: it must be 1 to 63 letters, digits, '.', '_' or '-' and begin with a letter or digit"
        )
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not HOST_PATTERN.fullmatch(host):
                raise ConfigError(f"host {host!r} is neither a DNS name nor an IP address (give no port)") from None
    if not 1 <= days <= CA_DAYS:
        raise ConfigError(f"days {days}: it must be 1 to {CA_DAYS}")
    if not 0 <= backdate_s <= 30 * 86400:
        raise ConfigError(f"backdate_s {backdate_s}: it must be 0 to {30 * 86400} seconds")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One run per directory at a time: two at once could each make a CA and hand out certificates that the other refuses."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _disk_error("cannot open the directory", directory, error) from error
    try:
        give_up_at = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise ConfigError(f"{directory} is in use by another run since {LOCK_WAIT_S:.0f} s: end it first") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` by `content`, whole or not at all. Raises ConfigError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _disk_error("cannot write", path, error) from error


def _disk_error(what: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{what} {path}: {error.strerror or error}; make room or give rights there, then run this again")


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; run this as the user who made it") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no usable private key ({error}); restore it, or use another directory") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds a key of another kind than EC: it is not ours; use another directory")
    return key


def _load_cert(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; run this as the user who made it") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no usable certificate ({error}); restore it, or use another directory") from error


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _public_bytes(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _utc_now() -> datetime.datetime:
    # Certificates are about wall time; nothing else in the project is (docs/rules.md S21).
    return datetime.datetime.now(datetime.UTC)
