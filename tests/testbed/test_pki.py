"""The local certificate authority: what it makes, what it keeps, and what it refuses."""

from __future__ import annotations

import datetime
import errno
import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed import pki
from xce_supervisor.testbed.pki import Subject, make_pki, parse_subject

C1 = Subject("controller", "c1")


def names_of(path: Path) -> list[str]:
    """Return the names in a certificate, as text."""
    cert = x509.load_pem_x509_certificate(path.read_bytes())
    alternatives = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in alternatives]


def test_a_certificate_names_role_host_and_cluster(tmp_path: Path) -> None:
    """The URI SAN is what peers are known by (docs/rules.md A1); hosts and localhost stand beside it."""
    made = make_pki(tmp_path, "lab", [C1], hosts=["c1.example", "10.1.2.3"])
    [one] = made.certificates
    assert one.cert == tmp_path / "controller-c1.pem" and one.key == tmp_path / "controller-c1.key"
    assert one.uri == "xce://lab/controller/c1"
    assert names_of(one.cert) == ["xce://lab/controller/c1", "localhost", "127.0.0.1", "::1", "c1.example", "10.1.2.3"]


def test_keys_are_private_and_certificates_are_not(tmp_path: Path) -> None:
    """Keys have mode 0600 whatever the umask says, certificates can be read by everybody."""
    before = os.umask(0)
    try:
        make_pki(tmp_path, "lab", [C1])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "controller-c1.key": 0o600, "controller-c1.pem": 0o644}


def test_a_strict_verifier_takes_the_chain(tmp_path: Path) -> None:
    """Python 3.13 verifies strictly by default: key usage, basic constraints and key identifiers must be right."""
    make_pki(tmp_path, "lab", [C1, Subject("worker", "w1")])
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    server.load_cert_chain(tmp_path / "controller-c1.pem", tmp_path / "controller-c1.key")
    server.load_verify_locations(tmp_path / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_STRICT
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    client.load_cert_chain(tmp_path / "worker-w1.pem", tmp_path / "worker-w1.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(back, there, server_hostname="localhost")
    far = server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = far.getpeercert()
    assert shown is not None
    assert ("URI", "xce://lab/worker/w1") in shown["subjectAltName"]


def test_asking_twice_changes_nothing(tmp_path: Path) -> None:
    """A second run with the same request leaves every byte as it was."""
    make_pki(tmp_path, "lab", [C1, Subject("worker", "w1")])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = make_pki(tmp_path, "lab", [C1, Subject("worker", "w1")])
    assert not again.ca_made and not any(one.made for one in again.certificates)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_more_peers_can_be_added_under_the_same_authority(tmp_path: Path) -> None:
    """The CA is kept, the earlier certificate too, and the new one is signed by it."""
    make_pki(tmp_path, "lab", [C1])
    authority = (tmp_path / "ca.pem").read_bytes()
    made = make_pki(tmp_path, "lab", [C1, Subject("operator", "ann")])
    assert [one.made for one in made.certificates] == [False, True]
    assert (tmp_path / "ca.pem").read_bytes() == authority


@pytest.mark.parametrize("lost", ["controller-c1.key", "controller-c1.pem"])
def test_a_half_written_pair_is_made_anew(tmp_path: Path, lost: str) -> None:
    """A crash between the two writes of a pair is repaired by the next run."""
    make_pki(tmp_path, "lab", [C1])
    (tmp_path / lost).unlink()
    [one] = make_pki(tmp_path, "lab", [C1]).certificates
    assert one.made
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(one.cert, one.key)


def test_a_pair_that_does_not_match_is_made_anew(tmp_path: Path) -> None:
    """A new key beside an old certificate is what a crash after the first write leaves."""
    make_pki(tmp_path, "lab", [C1, Subject("worker", "w1")])
    (tmp_path / "controller-c1.key").write_bytes((tmp_path / "worker-w1.key").read_bytes())
    [one] = make_pki(tmp_path, "lab", [C1]).certificates
    assert one.made
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(one.cert, one.key)


def test_a_certificate_that_lacks_a_host_or_ends_soon_is_made_anew(tmp_path: Path) -> None:
    """What was asked is what is served; what expires within 14 days is renewed (docs/rules.md A2)."""
    make_pki(tmp_path, "lab", [C1], days=365)
    [two] = make_pki(tmp_path, "lab", [C1], hosts=["new.example"]).certificates
    assert two.made and "new.example" in names_of(two.cert)
    short = Subject("worker", "short")
    [first] = make_pki(tmp_path, "lab", [short], days=1, backdate_s=10 * 86400).certificates
    [then] = make_pki(tmp_path, "lab", [short]).certificates
    assert first.made and then.made and then.expires_at > first.expires_at


def test_a_certificate_begins_before_now_for_clocks_that_lag(tmp_path: Path) -> None:
    """A peer whose clock is behind must not find a certificate "not yet valid"."""
    [one] = make_pki(tmp_path, "lab", [C1], backdate_s=7200).certificates
    cert = x509.load_pem_x509_certificate(one.cert.read_bytes())
    lead = datetime.datetime.now(datetime.UTC) - cert.not_valid_before_utc
    assert datetime.timedelta(seconds=7190) < lead < datetime.timedelta(seconds=7290)


def test_a_ca_is_never_overwritten(tmp_path: Path) -> None:
    """A CA without its key, with another's key, of another cluster, or damaged is refused and left as it is."""
    make_pki(tmp_path / "a", "lab", [])
    make_pki(tmp_path / "b", "lab", [])
    with pytest.raises(ConfigError, match=r"ca\.pem is the CA of cluster 'lab', not of 'other'"):
        make_pki(tmp_path / "a", "other", [C1])
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match="are no pair"):
        make_pki(tmp_path / "a", "lab", [C1])
    (tmp_path / "b" / "ca.key").unlink()
    before = (tmp_path / "b" / "ca.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"ca\.key is not"):
        make_pki(tmp_path / "b", "lab", [C1])
    assert (tmp_path / "b" / "ca.pem").read_bytes() == before
    (tmp_path / "b" / "ca.pem").write_text("not a certificate")
    (tmp_path / "b" / "ca.key").write_text("not a key")
    with pytest.raises(ConfigError, match=r"ca\.key holds no usable private key"):
        make_pki(tmp_path / "b", "lab", [C1])
    assert (tmp_path / "b" / "ca.pem").read_text() == "not a certificate"


def test_an_authority_that_was_half_made_is_finished_with_its_key(tmp_path: Path) -> None:
    """A crash after ca.key and before ca.pem leaves a key that nothing was signed with yet."""
    make_pki(tmp_path, "lab", [])
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.pem").unlink()
    assert make_pki(tmp_path, "lab", [C1]).ca_made
    assert (tmp_path / "ca.key").read_bytes() == key


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("c1", "is no ROLE/NAME"),
        ("boss/c1", "is no ROLE/NAME"),
        ("controller/", "the name must be"),
        ("controller/../etc", "the name must be"),
        ("controller/-x", "the name must be"),
        ("worker/" + "x" * 64, "the name must be"),
    ],
)
def test_a_bad_subject_is_refused_with_the_reason(text: str, complaint: str) -> None:
    """Names become file names and URI parts, so nothing else gets through."""
    with pytest.raises(ConfigError, match=complaint):
        parse_subject(text)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cluster": "a/b"}, "cluster name 'a/b'"),
        ({"hosts": ["c1:7301"]}, "give no port"),
        ({"days": 0}, "days 0"),
        ({"days": 4000}, "days 4000"),
        ({"backdate_s": -1}, "backdate_s -1"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_made(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    """The whole request is checked first."""
    request: dict[str, object] = {"cluster": "lab", "subjects": [C1], **changes}
    with pytest.raises(ConfigError, match=complaint):
        make_pki(tmp_path / "new", **request)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    """The message names the path and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the directory .*/file/pki: Not a directory"):
        make_pki(tmp_path / "file" / "pki", "lab", [C1])


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A file-size limit of 100 bytes makes every write fail as a full disk does; afterwards the same request works."""
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from xce_supervisor.errors import ConfigError\n"
        "from xce_supervisor.testbed.pki import make_pki, parse_subject\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n"
        "    make_pki(Path(sys.argv[1]), 'lab', [parse_subject('controller/c1')])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30)
    assert "cannot write" in done.stdout and "ca.key" in done.stdout and os.strerror(errno.EFBIG) in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert make_pki(tmp_path, "lab", [C1]).ca_made


def test_two_runs_at_once_agree_on_one_authority(tmp_path: Path) -> None:
    """Eight processes that start together end with one CA and a certificate each that it signed."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom xce_supervisor.testbed.pki import make_pki, parse_subject\n"
        "make_pki(Path(sys.argv[1]), 'lab', [parse_subject(sys.argv[2])])\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), f"worker/w{number}"], stderr=subprocess.PIPE)
        for number in range(8)
    ]
    for process in running:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr.decode()
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    for number in range(8):
        x509.load_pem_x509_certificate((tmp_path / f"worker-w{number}.pem").read_bytes()).verify_directly_issued_by(authority)


def test_a_run_that_hangs_does_not_hang_the_next_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the directory's lock has a limit, and the message says who to end."""
    monkeypatch.setattr(pki, "LOCK_WAIT_S", 0.2)
    with pki._locked(tmp_path), pytest.raises(ConfigError, match="in use by another run"):
        make_pki(tmp_path, "lab", [C1])
