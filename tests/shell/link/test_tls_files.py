"""TLS files: checked before they are used, changed without a restart (docs/rules.md A1, A2)."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shell.link.certificates import Authority
from tests.shell.link.conftest import Run
from tests.shell.link.peers import Pair, Script, connected, serving
from xce_supervisor.errors import ConfigError, PeerError
from xce_supervisor.link.server import Server
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.wire.words import Heartbeat, HostRole


def renew(into: TlsFiles, new: TlsFiles, *, cert: bool = True, key: bool = True) -> None:
    """Put new files in place of others, as an operator's tool does: aside, then renamed."""
    for wanted, target, source in ((cert, into.cert, new.cert), (key, into.key, new.key)):
        if wanted:
            aside = target.with_suffix(".new")
            shutil.copy(source, aside)
            aside.rename(target)


def test_our_own_name_and_the_end_of_our_certificate_are_known(authority: Authority) -> None:
    """Read from the certificate itself; also from an expired one, so that the date can be shown 14 days ahead and after."""
    source = TlsSource(authority.issue("controller-c9", "xce://test/controller/c9", days=13))
    assert source.name is not None and (source.name.role, source.name.name) == (HostRole.CONTROLLER, "c9")
    assert source.expires_at() - time.time() == pytest.approx(13 * 86400, abs=60)
    assert str(source.name) == "xce://test/controller/c9"
    expired = TlsSource(authority.issue("late", "xce://test/worker/late", days=-3))
    assert expired.expires_at() - time.time() == pytest.approx(-3 * 86400, abs=60)


def test_a_mismatched_pair_is_refused_at_the_start(authority: Authority) -> None:
    """Both files are named, and what to do."""
    one, two = authority.issue("one", "xce://test/worker/one"), authority.issue("two", "xce://test/worker/two")
    with pytest.raises(ConfigError, match=r"one\.pem and .*two\.key do not belong together: renew both"):
        TlsSource(TlsFiles(one.ca, one.cert, two.key))


def test_an_unusable_file_is_named(authority: Authority, folder: Path) -> None:
    """Missing, no PEM, or another kind of PEM."""
    files = authority.issue("fine", "xce://test/worker/fine")
    noise = folder / "noise.pem"
    noise.write_bytes(os.urandom(300))
    for broken in (TlsFiles(folder / "none.pem", files.cert, files.key), TlsFiles(files.ca, files.cert, folder / "none.pem")):
        with pytest.raises(ConfigError, match=r"none\.pem: No such file or directory: TLS needs this file"):
            TlsSource(broken)
    for broken in (
        TlsFiles(noise, files.cert, files.key),
        TlsFiles(files.ca, noise, files.key),
        TlsFiles(files.ca, files.cert, noise),
    ):
        with pytest.raises(ConfigError, match=r"noise\.pem.*no readable PEM"):
            TlsSource(broken)
    with pytest.raises(ConfigError, match=r"fine\.key: no readable PEM certificates"):
        TlsSource(TlsFiles(files.key, files.cert, files.key))


def test_two_names_in_one_certificate_are_refused(authority: Authority) -> None:
    """Nobody is two peers."""
    with pytest.raises(ConfigError, match="has 2 XCE names"):
        TlsSource(authority.issue("both", "xce://test/worker/a", "xce://test/scheduler/a"))


def test_a_key_with_a_pass_phrase_is_refused_and_asks_no_terminal(authority: Authority) -> None:
    """OpenSSL would ask, and the program would hang at its start."""
    files = authority.issue("sealed", "xce://test/worker/sealed", pass_phrase=b"secret")
    code = (
        "import sys; from pathlib import Path; from xce_supervisor.link.tls import *\n"
        "try: TlsSource(TlsFiles(*map(Path, sys.argv[1:])))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, files.ca, files.cert, files.key],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=True, start_new_session=True,
    )  # fmt: skip
    assert done.stdout.startswith("ConfigError") and "sealed.key: no readable PEM" in done.stdout


def test_new_files_are_taken_without_a_restart_and_old_connections_go_on(run: Run, pair: Pair, authority: Authority) -> None:
    """Only the certificate is there: a warning, and the old pair serves on; then the key too: new connections see the new."""
    files = authority.issue("live", "xce://test/controller/live")
    new = authority.issue("renewed", "xce://test/controller/renewed")

    async def scene() -> None:
        source = TlsSource(files)
        async with serving(source, Script()) as server, connected(server, pair.client) as before:
            assert source.reload() is None
            renew(files, new, key=False)
            warning = source.reload()
            assert warning is not None and "do not belong together" in warning and "the old ones stay in use" in warning
            async with connected(server, pair.client) as during:
                assert during.peer is not None and during.peer.name == "live"
            renew(files, new, cert=False)
            assert source.reload() is None and source.reload() is None
            assert source.name is not None and source.name.name == "renewed"
            async with connected(server, pair.client) as after:
                assert after.peer is not None and after.peer.name == "renewed"
            assert await before.request(Heartbeat(session_id=""), 1)

    run(scene())


def test_an_authority_is_replaced_without_a_gap(run: Run, pair: Pair, folder: Path) -> None:
    """Old, then both, then new: at each step whom the file trusts is taken, and nobody else."""
    old, new = Authority(folder / "old"), Authority(folder / "new")
    server_files = old.issue("controller-c1", "xce://test/controller/c1")
    trusted = folder / "trusted.pem"
    trusted.write_bytes(old.path.read_bytes())
    source = TlsSource(TlsFiles(trusted, server_files.cert, server_files.key))
    of_old, of_new = old.source("supervisor", "s1"), new.source("supervisor", "s1")
    of_new.client().load_verify_locations(old.path)

    async def takes(server: Server, client: TlsSource) -> bool:
        try:
            async with connected(server, client):
                return True
        except PeerError:
            return False

    async def scene() -> None:
        async with serving(source, Script()) as server:
            for bundle, expected in (
                ((old,), (True, False)),
                ((old, new), (True, True)),
                ((new,), (False, True)),
            ):
                trusted.write_bytes(b"".join(each.path.read_bytes() for each in bundle))
                assert source.reload() is None
                assert (await takes(server, of_old), await takes(server, of_new)) == expected

    run(scene())


def test_a_vanished_file_keeps_what_is_in_use(run: Run, pair: Pair, authority: Authority) -> None:
    """A warning that names the file, at every reload until it is back."""
    files = authority.issue("vanishing", "xce://test/controller/vanishing")
    source = TlsSource(files)
    files.cert.unlink()

    async def scene() -> None:
        warning = source.reload()
        assert warning is not None and "vanishing.pem: No such file or directory" in warning
        async with serving(source, Script()) as server, connected(server, pair.client) as connection:
            assert connection.peer is not None and connection.peer.name == "vanishing"

    run(scene())


def test_a_server_without_mutual_tls_takes_clients_without_a_certificate(run: Run, authority: Authority, pair: Pair) -> None:
    """Where the peers are not XCE's. The handler sees that such a client has no name."""
    source = TlsSource(authority.issue("open", "xce://test/controller/open"), mutual=False)
    script = Script()

    async def scene() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(authority.path)
        async with serving(source, script) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="x")
            async with connected(server, pair.client):
                assert [connection.peer for connection in script.connections] == [None, None]
            writer.transport.abort()

    run(scene())
