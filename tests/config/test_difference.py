"""What a reload applies: only what changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from xce_supervisor.config import Config, diff, load

SETTINGS = """
[controller]
id = "c1"
address = "127.0.0.1:7400"
[supervisor]
state_dir = "state"
[tls]
insecure = true
[units]
directories = ["units"]
"""

UNIT = '[unit]\nname = "{}"\nbinding = "always"\ncommand = ["/bin/true"]\n'


class Files:
    """A configuration whose files can be changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "units").mkdir()
        self.put()

    def put(self, settings: str = SETTINGS, **units: str) -> None:
        """Write supervisor.toml and units; the unit `one` is there unless it is given."""
        (self._folder / "supervisor.toml").write_text(settings, encoding="utf-8")
        for file in (self._folder / "units").iterdir():
            file.unlink()
        for name, rest in {"one": "", **units}.items():
            (self._folder / "units" / f"{name}.toml").write_text(UNIT.format(name) + rest, encoding="utf-8")

    def load(self) -> Config:
        """Read them."""
        return load(self._folder / "supervisor.toml")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """One unit, `one`."""
    return Files(tmp_path)


def test_nothing_changed_means_nothing_to_do(files: Files) -> None:
    """Fifty SIGHUPs in a row restart nobody."""
    assert diff(files.load(), files.load()).empty


def test_units_come_and_go_by_name(files: Files) -> None:
    """Units that stay are not touched."""
    old = files.load()
    files.put(two="")
    change = diff(old, files.load())
    assert [unit.name for unit in change.added] == ["two"] and not change.removed and not change.changed
    back = diff(files.load(), old)
    assert back.removed == ("two",) and not back.added


@pytest.mark.parametrize(
    ("rest", "keys", "restart"),
    [
        ("[stop]\ngrace_s = 4\n", ("stop.grace_s",), False),
        ("[stall]\ntimeout_s = 20\n[restart]\ndelay_s_max = 9\n", ("restart.delay_s_max", "stall.timeout_s"), False),
        ("[readiness]\njoin_timeout_s = 20\n", ("readiness.join_timeout_s",), False),
        ("[readiness]\nkind = 'notify'\n", ("readiness.kind",), True),
        ("[environment]\nset = {A = '1'}\n", ("environment.set",), True),
        ("[limits]\ncore = 0\n", ("limits",), True),
        ("[output]\nkind = 'null'\n", ("output.kind",), True),
    ],
)
def test_a_unit_is_restarted_only_for_what_its_process_holds(
    files: Files, rest: str, keys: tuple[str, ...], restart: bool
) -> None:
    """Graces and limits of judgement hold for a running child at once; its command and environment cannot."""
    old = files.load()
    files.put(one=rest)
    (change,) = diff(old, files.load()).changed
    assert (change.name, change.keys, change.restart) == ("one", keys, restart)


def test_settings_are_told_apart_from_those_that_need_another_process(files: Files) -> None:
    """The role's limits are applied; another controller or folder is not, and is said."""
    old = files.load()
    changed = SETTINGS.replace(":7400", ":7401").replace('"state"', '"other"') + "[role]\nunknown_limit_ms = 4000\n"
    files.put(changed)
    change = diff(old, files.load())
    assert change.settings == ("role.unknown_limit_ms",)
    assert change.refused == ("supervisor.state_dir", "controller.address")
    assert not change.empty
