"""The state file: whole or not at all, and never trusted when it is not ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from tests.shell.small_disk import run_on_small_disk
from xce_supervisor.supervisor.statefile import BAD_MAX, ChildRecord, Host, PauseRecord, State, StateFile, this_host

HERE = Host(name="alpha", machine_id="m-1", boot_id="b-1")
CHILD = ChildRecord(unit="scheduler", generation=3, pid=4711, start_ticks=99, boot_id="b-1", token="t", term=7)
STATE = State(
    children=(CHILD,),
    pauses=(PauseRecord(unit="metrics", by="alice", why="works", since_wall_s=1.5),),
    generations={"scheduler": 3},
)


def state_file(folder: Path, host: Host = HERE, controller_id: str = "c1") -> StateFile:
    """Return a state file in a folder that need not be there yet."""
    return StateFile(folder / "state" / "state.json", host, controller_id)


def saved(folder: Path) -> Path:
    """Save STATE and return the file's path."""
    assert state_file(folder).save(STATE, 12.5).problem == ""
    return folder / "state" / "state.json"


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """The next supervisor sees what the former one wrote; the file is ours alone."""
    path = saved(tmp_path)
    assert state_file(tmp_path).load().state == STATE
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["state.json"]


def test_no_file_is_an_empty_state_and_no_refusal(tmp_path: Path) -> None:
    """The first start is no fault."""
    loaded = state_file(tmp_path).load()
    assert loaded.state == State() and loaded.refused == ""


def test_children_of_an_earlier_boot_are_forgotten_and_pauses_are_not(tmp_path: Path) -> None:
    """After a reboot no pid means anything; an operator's pause still does (docs/rules.md S24)."""
    saved(tmp_path)
    loaded = state_file(tmp_path, Host(name="alpha", machine_id="m-1", boot_id="b-2")).load()
    assert loaded.state.children == ()
    assert loaded.forgotten == ("scheduler",)
    assert loaded.state.pauses == STATE.pauses and loaded.refused == ""


def _with_body_changed(raw: bytes) -> bytes:
    return raw.replace(b"4711", b"4712")


def _of_the_future(raw: bytes) -> bytes:
    document = json.loads(raw)
    document["version"] = 2
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: b"", "is damaged"),
        (lambda raw: raw[: len(raw) // 2], "is damaged"),
        (lambda raw: b"\x00" * len(raw), "is damaged"),
        (lambda raw: b"[" * 100_000, "is damaged"),
        (lambda raw: b'{"a": 1}', "is no state file"),
        (lambda raw: b"x" * 5_000_000, "cannot be read: larger than"),
        (_with_body_changed, "is damaged: its checksum is wrong"),
        (_of_the_future, "has version 2, and this program knows 1"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_set_aside(tmp_path: Path, damage: object, said: str) -> None:
    """docs/rules.md S15: a corrupt state file harms no stranger: nothing of it is used; it is kept to be looked at."""
    path = saved(tmp_path)
    raw = path.read_bytes()
    broken: bytes = damage(raw)  # type: ignore[operator]
    path.write_bytes(broken)
    loaded = state_file(tmp_path).load()
    assert loaded.state == State()
    assert said in loaded.refused and str(path) in loaded.refused
    assert loaded.moved_to == path.with_name("state.json.bad-1")
    assert loaded.moved_to.read_bytes() == broken and not path.exists()


@pytest.mark.parametrize(
    ("host", "controller_id", "said"),
    [
        (Host(name="alpha", machine_id="m-2", boot_id="b-1"), "c1", "is of another machine (alpha)"),
        (Host(name="beta", machine_id="", boot_id="b-1"), "c1", "is of another machine (alpha), not of beta"),
        (HERE, "c2", "is about controller c1, not c2"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, host: Host, controller_id: str, said: str) -> None:
    """docs/rules.md S15: a state file of another machine or controller names strangers' processes."""
    saved(tmp_path)
    loaded = state_file(tmp_path, host, controller_id).load()
    assert loaded.state == State() and said in loaded.refused


def test_a_renamed_machine_is_the_same_machine(tmp_path: Path) -> None:
    """A host name may change under a running cluster; the installation's id does not."""
    saved(tmp_path)
    assert state_file(tmp_path, Host(name="new-name", machine_id="m-1", boot_id="b-1")).load().state == STATE


def test_refused_files_do_not_pile_up(tmp_path: Path) -> None:
    """After five the oldest makes room."""
    for number in range(BAD_MAX + 3):
        path = saved(tmp_path)
        path.write_text(f"broken {number}", encoding="utf-8")
        os.utime(path, ns=(number, number))
        assert state_file(tmp_path).load().moved_to is not None
    kept = sorted(file.read_text(encoding="utf-8") for file in (tmp_path / "state").iterdir())
    assert kept == [f"broken {number}" for number in range(3, BAD_MAX + 3)]


def test_a_pipe_or_folder_in_its_place_does_not_stop_the_start(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever for somebody to write."""
    path = saved(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in state_file(tmp_path).load().refused
    path.mkdir()
    assert "not a regular file" in state_file(tmp_path).load().refused
    assert state_file(tmp_path).save(STATE, 1.0).problem == ""


def test_nothing_is_written_when_nothing_changed(tmp_path: Path) -> None:
    """A save of the same state touches no disk."""
    path = tmp_path / "state" / "state.json"
    file = state_file(tmp_path)
    file.save(STATE, 1.0)
    inode = path.stat().st_ino
    file.save(STATE, 2.0)
    assert path.stat().st_ino == inode
    file.save(msgspec.structs.replace(STATE, generations={}), 3.0)
    assert path.stat().st_ino != inode


def test_this_machine_has_an_identity() -> None:
    """The host of a real machine has a name and a boot id."""
    host = this_host()
    assert host.name and len(host.boot_id) == 36


@pytest.mark.needs("userns")
def test_a_full_disk_keeps_the_old_file_and_is_told_once(tmp_path: Path) -> None:
    """docs/rules.md S20: a full disk never corrupts the state file; it is told when it begins and when it is over."""
    printed = run_on_small_disk(
        tmp_path / "disk",
        """
        from xce_supervisor.supervisor.statefile import *
        host = Host(name="a", machine_id="m", boot_id="b")
        def state(n): return State(generations={"u" * 8000: n})
        file = StateFile(disk / "state.json", host, "c1")
        print(file.save(state(1), 0.0))
        fill()
        print(file.save(state(2), 0.0).news, file.save(state(3), 0.0).news, file.save(state(3), 0.0).problem)
        print(list(StateFile(disk / "state.json", host, "c1").load().state.generations.values()), sorted(os.listdir(disk)))
        free()
        print(file.save(state(3), 0.0), file.save(state(3), 0.0))
        print(list(StateFile(disk / "state.json", host, "c1").load().state.generations.values()))
        """,
    )
    lines = printed.splitlines()
    assert lines[0] == "Saved(problem='', news=False)"
    assert lines[1].startswith("True False ") and "No space left on device; the one before is kept" in lines[1]
    assert lines[2] == "[1] ['ballast', 'state.json']"
    assert lines[3] == "Saved(problem='', news=True) Saved(problem='', news=False)"
    assert lines[4] == "[3]"
