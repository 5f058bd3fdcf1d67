"""Options that the verbs of `xce-testbed` share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from xce_supervisor.errors import ConfigError

if TYPE_CHECKING:
    from xce_supervisor.link.tls import TlsFiles, TlsSource

F = TypeVar("F", bound=Callable[..., Any])

_PKI_HELP = "Folder made by `xce-testbed pki`; the certificate is found in it by role and name."


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def put_on(verb: F) -> F:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return put_on


def tls_options(verb: F) -> F:
    """A process's own certificate: by folder, or file by file. Empty texts count as not given: placeholders may be so."""
    return _all(
        click.option("--pki", envvar="XCE_TESTBED_PKI", type=click.Path(path_type=Path), metavar="DIR", help=_PKI_HELP),
        click.option("--tls-ca", default="", metavar="FILE", help="Instead of --pki: whom to trust."),
        click.option("--tls-cert", default="", metavar="FILE", help="Instead of --pki: our certificate."),
        click.option("--tls-key", default="", metavar="FILE", help="Instead of --pki: its key."),
    )(verb)


def cluster_options(verb: F) -> F:
    """Where the cluster is, and as whom to ask."""
    return _all(
        click.option(
            "--controllers",
            required=True,
            envvar="XCE_TESTBED_CONTROLLERS",
            metavar="HOST:PORT,...",
            help="All controllers, or some. Also from XCE_TESTBED_CONTROLLERS.",
        ),
        click.option("--pki", envvar="XCE_TESTBED_PKI", type=click.Path(path_type=Path), metavar="DIR", help=_PKI_HELP),
        click.option(
            "--as", "operator", default="admin", show_default=True, metavar="NAME", help="Operator whose certificate it is."
        ),
    )(verb)


def json_option(verb: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(verb)


def split_list(text: str) -> tuple[str, ...]:
    """Return the addresses of a list with commas. Raises ConfigError for none."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError("--controllers: names no address; write HOST:PORT,HOST:PORT")
    return found


def named_files(pki: Path | None, stem: str, ca: str, cert: str, key: str) -> TlsFiles | None:
    """Return the TLS files that the options name, None for none. Raises ConfigError for a mixture or a part."""
    from xce_supervisor.link.tls import TlsFiles

    given = [bool(text) for text in (ca, cert, key)]
    if any(given):
        if pki is not None:
            raise ConfigError("--pki and --tls-ca, --tls-cert, --tls-key exclude each other")
        if not all(given):
            raise ConfigError("--tls-ca, --tls-cert and --tls-key go together: give all three, or none to speak in the clear")
        return TlsFiles(Path(ca), Path(cert), Path(key))
    if pki is None:
        return None
    return TlsFiles(pki / "ca.pem", pki / f"{stem}.pem", pki / f"{stem}.key")


def operator_tls(pki: Path | None, operator: str) -> TlsSource | None:
    """Return an operator's certificate from the folder, None where there is no folder. Raises ConfigError."""
    from xce_supervisor.link.tls import TlsSource

    files = named_files(pki, f"operator-{operator}", "", "", "")
    return TlsSource(files) if files is not None else None
