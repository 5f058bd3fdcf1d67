"""The verbs of `xce-testbed`: what they are given, and what they say when nobody is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.stage import verb


def asked(*args: str | Path, **env: str) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    done = verb(*args, program="testbed", env=env)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_pki_makes_what_is_missing_and_keeps_what_serves(tmp_path: Path) -> None:
    """Asking twice changes nothing."""
    names = ("controller/c1", "operator/admin")
    code, out, _ = asked("pki", tmp_path / "pki", *names, "--json")
    made = json.loads(out)["certificates"]
    assert code == 0 and [one["uri"] for one in made] == ["xce://testbed/controller/c1", "xce://testbed/operator/admin"]
    assert all(one["made"] for one in made)
    code, out, _ = asked("pki", tmp_path / "pki", *names)
    assert code == 0 and out.count("kept") == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("pki", "x"), "name at least one ROLE/NAME"),
        (("pki", "x", "king/c1"), "'king/c1' is no ROLE/NAME"),
        (("jobs",), "Missing option '--controllers'"),
        (("jobs", "--controllers", " , "), "names no address"),
        (("jobs", "--controllers", "a:1", "--pki", "/no/such"), "/no/such/ca.pem"),
        (("submit", "--controllers", "a:1"), "Missing argument"),
        (("submit", "--controllers", "a:1", "--id", "x", "--count", "2", "true"), "--id names one job"),
        (("scheduler", "--controller", "nonsense", "--controller-id", "c1", "--term", "1"), "nonsense"),
        (
            ("scheduler", "--controller", "a:1", "--controller-id", "c1", "--term", "1", "--fault", "odd"),
            "unknown scheduler fault 'odd'",
        ),
        (("scheduler", "--controller", "a:1", "--controller-id", "c1", "--term", "1", "--tls-ca", "x"), "go together"),
        (("worker", "--name", "w", "--controllers", "a:1", "--dir", "/dev/null/x"), "/dev/null/x"),
        (("controller", "--id", "c1", "--listen", "nonsense", "--store", "sqlite:///tmp/x"), "nonsense"),
        (("controller", "--id", "c1", "--listen", "127.0.0.1:0", "--store", "paper://x"), "paper://x"),
        (("gate", "--controllers", "a:1", "--at", "a:1", "odd", "shut"), "'shut' is not one of"),
    ],
)
def test_what_cannot_be_used_is_78_and_named(args: tuple[str, ...], said: str) -> None:
    """For verbs and processes alike."""
    code, out, err = asked(*args)
    assert (code, out) == (78, "") and said in err, (code, out, err)


def test_controllers_that_do_not_answer_are_four(tmp_path: Path) -> None:
    """Each by its address and the reason."""
    code, out, _ = asked("ctrlstatus", XCE_TESTBED_CONTROLLERS="127.0.0.1:1,127.0.0.1:2")
    assert code == 4 and out.count("Connection refused") == 2
    code, out, _ = asked("ctrlstatus", "--json", "--controllers", "127.0.0.1:1")
    assert code == 4 and "refused" in json.loads(out)[0]["error"]
    code, _, err = asked("step-down", "--controllers", "127.0.0.1:1", "--at", "127.0.0.1:1")
    assert code == 4 and "Connection refused" in err
