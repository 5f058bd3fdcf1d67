"""docs/rules.md S18: what a child starts with is what its unit says, and nothing of the supervisor's."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.stage import BOUND_S, PATH, Stage, in_lane, output_of, play, shell, wait_code
from xce_supervisor.process.spawn import Append, Given, Inherit, Journal, Null, SpawnSpec, seal_descriptors, spawn

# The C library keeps two signals for itself (32 and 33); posix_spawn leaves them ignored, and no program can use them.
LIBC_OWN = 1 << 31 | 1 << 32
NOHUP = shutil.which("nohup") or "nohup"
SIGNALS = ("/bin/grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")  # no shell: it would clear its mask


async def signals_seen(stage: Stage, path: str) -> str:
    out = Append(path)
    await stage.ended(await stage.spawn(SpawnSpec(SIGNALS, PATH, stdout=out)))
    # prlimit goes before the program and must hand the same on
    limited = SpawnSpec(SIGNALS, PATH, stdout=out, limits={"core": (0, 0), "nofile": (64, 64)})
    await stage.ended(await stage.spawn(limited))
    return Path(path).read_text(encoding="ascii")


@pytest.mark.parametrize(
    "before",
    [
        "for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(each, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    ],
    ids=["ignored", "blocked"],
)
def test_signals_are_default_and_unblocked_however_the_supervisor_was_started(before: str, tmp_path: Path) -> None:
    """docs/rules.md S18: under nohup, with ignored or blocked signals, the child finds all of them default and its mask empty."""
    prefix = [sys.executable, "-c", f"import os, signal, sys\n{before}\nos.execv(sys.argv[1], sys.argv[1:])", NOHUP]
    text = play(signals_seen, str(tmp_path / "out"), forest="group", prefix=prefix)
    masks = [(line.split()[0], int(line.split()[1], 16)) for line in text.splitlines()]
    assert [name for name, _ in masks] == ["SigBlk:", "SigIgn:"] * 2
    assert [mask & ~LIBC_OWN for _, mask in masks] == [0] * 4


async def descriptors_seen(stage: Stage, path: str, wanted: int) -> dict[str, Any]:
    os.set_inheritable(10, True)  # as a C library might, long after the start
    await stage.ended(await stage.spawn(shell("ls /proc/self/fd", stdout=Append(path))))
    plain = Path(path).read_text(encoding="ascii").split()
    read, write = os.pipe()
    # The declared numbers collide with ours on purpose: 3 is in use, and the sources are crossed.
    spec = shell(f"ls /proc/self/fd; echo three >&3; cat <&{wanted}", stdout=Append(path + "2"), fds=((write, 3), (7, wanted)))
    await stage.ended(await stage.spawn(spec))
    os.close(write)
    text = os.read(read, 100).decode()
    os.close(read)
    return {"plain": plain, "declared": Path(path + "2").read_text(encoding="ascii").split(), "pipe": text}


def test_only_declared_descriptors_reach_the_child(tmp_path: Path) -> None:
    """docs/rules.md S18: descriptors 7, 10 and 251 that the supervisor inherited are not passed on, declared ones are."""
    (tmp_path / "seven").write_text("from-seven\n", encoding="ascii")
    opener = (
        "import os, sys\n"
        f"fd = os.open({str(tmp_path / 'seven')!r}, os.O_RDONLY)\n"
        "for number in (7, 10, 251): os.dup2(fd, number)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    prefix = [sys.executable, "-c", opener]
    found = play(descriptors_seen, str(tmp_path / "out"), 4, forest="group", prefix=prefix)
    assert found["plain"] == ["0", "1", "2", "3"], "3 is the directory that ls reads"
    assert found["declared"] == ["0", "1", "2", "3", "4", "5", "from-seven"], "5 is the directory that ls reads"
    assert found["pipe"] == "three\n"


def test_declared_descriptors_may_change_places(tmp_path: Path) -> None:
    """docs/rules.md S18: ours 50 is the child's 51 and the other way round: neither overwrites the other on the way."""
    (tmp_path / "a").write_text("a\n", encoding="ascii")
    (tmp_path / "b").write_text("b\n", encoding="ascii")
    opened = [os.open(tmp_path / name, os.O_RDONLY | os.O_CLOEXEC) for name in "ab"]
    try:
        os.dup2(opened[0], 50, inheritable=False)
        os.dup2(opened[1], 51, inheritable=False)
        text = output_of(shell("cat /proc/self/fd/50 /proc/self/fd/51", fds=((50, 51), (51, 50))), tmp_path / "out")
    finally:
        for fd in (*opened, 50, 51):
            os.close(fd)
    assert text == "b\na\n"


def test_every_inherited_descriptor_is_sealed_at_start() -> None:
    """docs/rules.md S18: after `seal_descriptors` nothing above 2 is inheritable."""
    read, write = os.pipe()
    try:
        os.set_inheritable(write, True)
        seal_descriptors()
        assert not os.get_inheritable(write) and not os.get_inheritable(read)
    finally:
        os.close(read)
        os.close(write)


def test_the_environment_is_exactly_as_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docs/rules.md S18: nothing of systemd's protocol leaks, and nothing else either."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "SECRET"):
        monkeypatch.setenv(name, "leaked")
    env = {**PATH, "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "ODD": "a=b\udcff \n", "EMPTY": ""}
    spec = SpawnSpec(("/usr/bin/env", "-0"), env, stdout=Append(str(tmp_path / "out")))
    assert wait_code(in_lane(partial(spawn, spec))) == 0
    seen = (tmp_path / "out").read_bytes().split(b"\0")[:-1]
    assert sorted(seen) == sorted(os.fsencode(f"{name}={value}") for name, value in env.items())


def test_directory_umask_and_limits_are_the_units(tmp_path: Path) -> None:
    """docs/rules.md S18: the child's values hold whatever the supervisor's own are; those stay as they were."""
    before = os.umask(0o077)
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    cwd = os.getcwd()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))  # raised, as for a supervisor with many children
        limits = {"nofile": (100, 200), "core": (0, 0), "stack": (4 * 1024 * 1024, -1)}
        spec = shell("pwd; umask; ulimit -Sn; ulimit -Hn; ulimit -c; ulimit -s", cwd=str(tmp_path), umask=0o027, limits=limits)
        assert output_of(spec, tmp_path / "out").split() == [str(tmp_path), "0027", "100", "200", "0", "4096"]
        assert os.umask(0o077) == 0o077, "the supervisor's own umask is untouched"
        assert os.getcwd() == cwd, "and so is its directory"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own)
        os.umask(before)


async def deleted_directory(stage: Stage, path: str) -> dict[str, Any]:
    os.mkdir(path)
    os.chdir(path)
    os.rmdir(path)
    exited = await stage.ended(await stage.spawn(shell("pwd", stdout=Append(path + ".out"))))
    return {"code": exited.code, "out": Path(path + ".out").read_text(encoding="utf-8")}


def test_a_deleted_directory_of_the_supervisor_does_not_matter(tmp_path: Path) -> None:
    """docs/rules.md S18: the child gets its own directory although the supervisor's is gone."""
    assert play(deleted_directory, str(tmp_path / "gone"), forest="group") == {"code": 0, "out": "/\n"}


def test_a_lane_has_its_own_umask_back_after_a_spawn(tmp_path: Path) -> None:
    """docs/rules.md S18: what the lane writes next is the supervisor's, and its directory is nobody's any more."""

    def body() -> tuple[int, str]:
        wait_code(spawn(shell("exit 0", cwd=str(tmp_path), umask=0o077)))
        with open(tmp_path / "next", "x", encoding="ascii"):
            return stat.S_IMODE((tmp_path / "next").stat().st_mode), os.getcwd()

    own = os.umask(0o022)
    try:
        assert in_lane(body) == (0o644, "/")
    finally:
        os.umask(own)


def test_spawns_side_by_side_keep_their_directories_and_umasks(tmp_path: Path) -> None:
    """docs/rules.md S18: directory and umask belong to the lane's thread, so twenty spawns at once do not mix them up."""
    found: dict[int, str] = {}

    def one(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        spec = shell("pwd; umask", cwd=str(folder), umask=number, stdout=Append(str(folder / "out")))
        wait_code(spawn(spec))
        found[number] = (folder / "out").read_text(encoding="utf-8")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert found == {number: f"{tmp_path / str(number)}\n{number:04o}\n" for number in range(20)}


@pytest.mark.needs("root")
def test_user_and_group_are_the_units(tmp_path: Path) -> None:
    """docs/rules.md S18: a unit's user and group are set with all their groups, and no capability is left."""
    script = "id -u; id -g; id -G; grep CapEff /proc/self/status"
    lines = output_of(shell(script, user="nobody", group="daemon"), tmp_path / "out").splitlines()
    assert lines[:2] == ["65534", "1"] and "1" in lines[2].split() and lines[3].split()[1].strip("0") == ""
    by_number = output_of(shell("id -u; id -g", user="65534"), tmp_path / "out2").split()
    assert by_number == ["65534", "65534"]


@pytest.mark.needs("root")
def test_without_its_own_context_a_lane_uses_a_shell_to_set_directory_and_umask(tmp_path: Path) -> None:
    """docs/rules.md S18: where unshare is forbidden (some containers) the child's values are the same, and so are the errors."""
    from xce_supervisor.process import spawn as room

    def body() -> str:
        room._thread.own_context = False  # what a refused unshare leaves
        spec = shell("pwd; umask; echo $0", cwd=str(tmp_path), umask=0o070, stdout=Append(str(tmp_path / "out")))
        wait_code(spawn(spec))
        with pytest.raises(room.SpawnError) as missing:
            spawn(shell("exit 0", cwd=str(tmp_path / "gone")))
        assert (missing.value.step, missing.value.path) == ("cwd", str(tmp_path / "gone"))
        return (tmp_path / "out").read_text(encoding="utf-8")

    assert in_lane(body).split() == [str(tmp_path), "0070", "/bin/sh"]


def test_a_child_leads_a_session_of_its_own(tmp_path: Path) -> None:
    """docs/rules.md S18: no terminal and no job control of whoever started the supervisor reach it."""
    script = "cut -d' ' -f1,5,6,7 /proc/self/stat; echo $$"
    for session, terminal in ((True, "0"), (False, None)):
        out = tmp_path / f"out{session}"
        text = output_of(replace(shell(script), session=session), out).split()
        leader = text[4]
        assert text[1] == leader, "its own process group"
        assert (text[2] == leader) is session
        assert terminal in (None, text[3])


def test_output_goes_where_the_unit_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """docs/rules.md S18, S20: nowhere, appended to a file, to the supervisor's own stream, or to a descriptor."""
    log = tmp_path / "log"
    log.write_text("old\n", encoding="ascii")
    script = "echo out; echo err >&2; cat"
    both = Append(str(log), 0o600)
    assert wait_code(in_lane(partial(spawn, shell(script, stdout=both, stderr=both)))) == 0
    assert log.read_text(encoding="ascii") == "old\nout\nerr\n"
    assert wait_code(in_lane(partial(spawn, shell(script, stdout=Null(), stderr=Null())))) == 0
    assert wait_code(in_lane(partial(spawn, shell(script, stdout=Inherit(), stderr=Inherit())))) == 0
    assert capfd.readouterr() == ("out\n", "err\n")
    fresh = tmp_path / "fresh"
    in_lane(partial(lambda spec: wait_code(spawn(spec)), shell(script, stdout=Append(str(fresh), 0o600))))
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o600
    read, write = os.pipe()
    assert wait_code(in_lane(partial(spawn, shell(script, stdout=Given(write))))) == 0
    os.close(write)
    assert os.read(read, 100) == b"out\n"
    os.close(read)


def test_output_that_cannot_be_opened_is_told_and_starts_all_the_same(tmp_path: Path) -> None:
    """docs/rules.md S18, S20: a missing folder, a pipe or a missing journal costs lines, never the child."""
    os.mkfifo(tmp_path / "pipe")
    warnings: list[str] = []
    for stdout, word in [
        (Append(str(tmp_path / "gone" / "log")), "log"),
        (Append(str(tmp_path / "pipe")), "would block"),
        (Append(str(tmp_path)), str(tmp_path)),
    ]:
        warnings.clear()
        assert wait_code(in_lane(partial(spawn, shell("echo out", stdout=stdout), None, warnings.append))) == 0
        assert len(warnings) == 1 and word in warnings[0]


class FakeJournal:
    """A socket where the journal's would be, which keeps what one stream brought."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen(1)
        self.text = b""
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        connection, _ = self.socket.accept()
        with connection:
            while chunk := connection.recv(4096):
                self.text += chunk

    def close(self) -> None:
        self.thread.join(BOUND_S)
        self.socket.close()


def test_output_reaches_the_journal_under_the_units_own_name(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/rules.md S18: one stream with the identifier in its header; where there is no journal, the file that stands in."""
    from xce_supervisor.process import stdio

    folder = tmp_path_factory.mktemp("j")
    monkeypatch.setattr(stdio, "_JOURNAL", str(folder / "stdout"))
    journal = FakeJournal(folder / "stdout")
    out = Journal("provisioner@a\nb", str(folder / "instead"))
    assert wait_code(in_lane(partial(spawn, shell("echo out; echo err >&2", stdout=out, stderr=out)))) == 0
    journal.close()
    assert journal.text == b"provisioner@a_b\n\n6\n1\n0\n0\n0\nout\nerr\n"
    warnings: list[str] = []
    assert wait_code(in_lane(partial(spawn, shell("echo out", stdout=out), None, warnings.append))) == 0
    assert (folder / "instead").read_text(encoding="ascii") == "out\n"
    assert len(warnings) == 1 and "no journal" in warnings[0] and str(folder / "instead") in warnings[0]


def test_nothing_is_spawned_from_the_main_thread() -> None:
    """docs/rules.md S18: a lane leaves the directory that all threads share; the main thread must not."""
    with pytest.raises(AssertionError, match="lane's thread"):
        spawn(shell("exit 0"))


async def standard_streams_closed(stage: Stage, path: str) -> dict[str, Any]:
    spec = shell("echo out; echo err >&2; readlink /proc/self/fd/0", stdout=Append(path), stderr=Inherit(), stdin=Inherit())
    exited = await stage.ended(await stage.spawn(spec))
    return {"code": exited.code, "out": Path(path).read_text(encoding="utf-8"), "warnings": len(stage.warnings)}


def test_a_supervisor_with_closed_streams_gives_its_children_whole_ones(tmp_path: Path) -> None:
    """docs/rules.md S18: with 0 and 2 closed, files that we open would get these numbers; the child finds 0, 1 and 2 right."""
    prefix = ["/bin/sh", "-c", 'exec "$@" <&- 2>&-', "sh"]
    found = play(standard_streams_closed, str(tmp_path / "out"), forest="group", prefix=prefix)
    assert found == {"code": 0, "out": "out\n/dev/null\n", "warnings": 0}
