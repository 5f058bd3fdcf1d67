"""docs/rules.md A2: certificates are taken over without a restart; a pair that does not match keeps the old one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
from pathlib import Path

from tests.shell.controllers import Controllers, sqlite_url
from tests.testbed.stage import CLUSTER, Stage, until
from xce_supervisor.testbed.pki import Subject, make_pki


def shown(address: str, stage: Stage) -> bytes:
    """The certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = stage.tls("operator", "admin").client()

    with socket.create_connection((host, int(port)), timeout=5) as plain, context.wrap_socket(plain) as secure:
        certificate = secure.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


async def test_a_controller_takes_over_new_certificates_and_refuses_half_a_pair(tmp_path: Path) -> None:
    """New pair and SIGHUP: new connections see it, the process is the same. Only the certificate changed: warned, kept."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        files = stage.files("controller", "c1")
        before = shown(one.address, stage)
        shutil.copytree(files.ca.parent, tmp_path / "second")
        for stale in (tmp_path / "second").glob("controller-c1.*"):
            stale.unlink()
        (made,) = make_pki(tmp_path / "second", CLUSTER, [Subject("controller", "c1")]).certificates

        os.replace(shutil.copy(made.cert, tmp_path / "aside"), files.cert)
        one.program.signal(signal.SIGHUP)
        await one.program.says("tls.not_reloaded")
        assert shown(one.address, stage) == before

        os.replace(shutil.copy(made.key, tmp_path / "aside"), files.key)
        one.program.signal(signal.SIGHUP)
        new = ssl.PEM_cert_to_DER_cert(
            made.cert.read_text().partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
        )
        await until(lambda: shown(one.address, stage) == new, 5.0, "the new certificate is not shown")
        assert (await controllers.status(one)).term == 1
