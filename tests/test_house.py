"""The house rules of the tests themselves: no leftovers, no silent skip, one test command, a name for each change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A repository with our settings and our conftest, and no test yet."""
    (tmp_path / "tests" / "shell").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    return tmp_path


def run_tests(house: Path, *args: str, **env: str) -> tuple[int, str]:
    """Run the tests of a house; return exit code and output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "XCE_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *args],
        cwd=house,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


LEAVERS = {
    "a descriptor": "import os\ndef test_it():\n    os.open('/dev/null', os.O_RDONLY)\n",
    "a child": "import subprocess\ndef test_it():\n    leavers.append(subprocess.Popen(['sleep', '30']))\nleavers = []\n",
}


@pytest.mark.parametrize("what", LEAVERS)
def test_a_test_of_a_shell_that_leaves_something_fails(house: Path, what: str) -> None:
    """And says what it left, by number and target."""
    file = house / "tests" / "shell" / "test_leaver.py"
    file.write_text(LEAVERS[what], encoding="utf-8")
    if what == "a child":
        with open(file, "a", encoding="utf-8") as opened:
            opened.write("import pytest\n@pytest.fixture(scope='module', autouse=True)\ndef _end():\n    yield\n")
            opened.write("    [one.kill() or one.wait() for one in leavers]\n")
    code, out = run_tests(house)
    assert code == 1 and "the test left behind:" in out
    assert ("descriptor" if what == "a descriptor" else "sleep 30") in out


def test_a_skip_that_this_machine_need_not_make_fails_a_strict_run(house: Path) -> None:
    """What is missing may be skipped by name; a skip for any other reason may not, and neither may one that is not true."""
    (house / "tests" / "test_skips.py").write_text(
        "import pytest\n"
        "@pytest.mark.needs('root', 'cgroup2', 'etcd', 'nspawn', 'strace', 'userns')\ndef test_needs_all(): pass\n"
        "def test_works(): pass\n",
        encoding="utf-8",
    )
    code, out = run_tests(house, XCE_CI_STRICT="1")
    assert code == 0, out
    (house / "tests" / "test_other.py").write_text("import pytest\ndef test_it(): pytest.skip('not today')\n", encoding="utf-8")
    assert run_tests(house)[0] == 0
    for workers in ((), ("-n", "1")):
        code, out = run_tests(house, *workers, XCE_CI_STRICT="1")
        assert code == 1 and "skipped although this machine can run them" in out and "not today" in out, out
    (house / "tests" / "test_other.py").write_text(
        "import pytest\npytest.skip('gone', allow_module_level=True)\n", encoding="utf-8"
    )
    code, out = run_tests(house, XCE_CI_STRICT="1")
    assert code == 1 and "gone" in out, out


def test_an_unknown_need_is_a_failure(house: Path) -> None:
    """A misspelt need would skip for ever."""
    (house / "tests" / "test_typo.py").write_text(
        "import pytest\n@pytest.mark.needs('rooot')\ndef test_it(): pass\n", encoding="utf-8"
    )
    code, out = run_tests(house)
    assert code == 1 and "no such offer 'rooot'" in out


def test_the_readme_has_the_two_commands_and_ci_runs_them() -> None:
    """One line each, from a bare clone; .ci/run takes the test command from the README itself."""
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/xce-supervisor demo",
        "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest",
    ]
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_changelog_fragment_has_a_type() -> None:
    """SLUG.TYPE.md, and something in it."""
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    assert fragments
    for path in fragments:
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed|security)\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip()
