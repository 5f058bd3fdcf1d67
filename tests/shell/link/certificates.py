"""Certificates for tests of the link: an authority in a folder, and any certificate that a test can think of."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from xce_supervisor.link.tls import TlsFiles, TlsSource

DAY = datetime.timedelta(days=1)


class Authority:
    """One certificate authority; its files are in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"test {name}")
        builder = _builder(self._name, self._name, self._key, days=30)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(self._identifier(), critical=False)
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self, stem: str, *uris: str, hosts: tuple[str, ...] = (), days: int = 30, pass_phrase: bytes | None = None
    ) -> TlsFiles:
        """Write STEM.pem and STEM.key with these names; days below 0: expired that long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(stem), self._name, key, days)
        # Two authorities of one name, old and new, are told apart by this.
        of_authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier())
        builder = builder.add_extension(of_authority, critical=False)
        alternatives = [*(x509.UniformResourceIdentifier(uri) for uri in uris), *(x509.DNSName(host) for host in hosts)]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        files = TlsFiles(self.path, self.folder / f"{stem}.pem", self.folder / f"{stem}.key")
        files.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        sealed = serialization.BestAvailableEncryption(pass_phrase) if pass_phrase else serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed))
        return files

    def _identifier(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())

    def source(self, role: str, name: str) -> TlsSource:
        """The contexts of a peer with an XCE name of cluster "test"."""
        return TlsSource(self.issue(f"{role}-{name}", f"xce://test/{role}/{name}"))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 60 * DAY)
        .not_valid_after(now + days * DAY)
    )
