"""docs/rules.md S13: a failed spawn is no crash; it names path and errno, and says whether to wait or to try again."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.stage import PATH, Stage, in_lane, play, shell, wait_code
from xce_supervisor.process.lanes import Outcome, Submitted
from xce_supervisor.process.spawn import Append, SpawnError, SpawnSpec, signature, spawn


def refused(spec: SpawnSpec) -> SpawnError:
    """Return why the program could not be started."""
    with pytest.raises(SpawnError) as caught:
        in_lane(partial(spawn, spec))
    error = caught.value
    assert errno.errorcode[error.errno] in error.text and error.path in error.text
    return error


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def foreign_elf(path: Path) -> Path:
    """Make an ELF file of a machine that nobody has (number 0xbeef)."""
    with open("/proc/self/exe", "rb") as file:
        head = bytearray(file.read(4096))
    struct.pack_into("<H", head, 18, 0xBEEF)
    path.write_bytes(head)
    path.chmod(0o755)
    return path


def elf_with_loader(path: Path, loader: str) -> Path:
    """Make the smallest ELF file of this machine whose loader is `loader`."""
    with open("/proc/self/exe", "rb") as file:
        head = bytearray(file.read(64))
    struct.pack_into("<Q", head, 32, 64)  # program headers follow the header
    struct.pack_into("<HH", head, 54, 56, 1)
    name = loader.encode() + b"\0"
    entry = struct.pack("<IIQQQQQQ", 3, 4, 64 + 56, 0, 0, len(name), len(name), 1)
    path.write_bytes(bytes(head) + entry + name)
    path.chmod(0o755)
    return path


def test_a_permanent_failure_names_the_very_file_and_errno(tmp_path: Path) -> None:
    """docs/rules.md S13: missing, not executable, wrong format, missing interpreter or directory."""
    missing = tmp_path / "missing"
    plain = script(tmp_path / "plain", "#!/bin/sh\n", 0o644)
    text = script(tmp_path / "text", "echo hello\n")
    empty = script(tmp_path / "empty", "")
    foreign = foreign_elf(tmp_path / "foreign")
    lost = script(tmp_path / "lost", f"#!{missing} -x\n")
    twice = script(tmp_path / "twice", f"#!{lost}\n")
    bad_shebang = script(tmp_path / "bad", f"#!{plain}\n")
    nothing = script(tmp_path / "nothing", "#! \n")
    circle = script(tmp_path / "circle", f"#!{tmp_path / 'circle'}\n")
    loaded = elf_with_loader(tmp_path / "loaded", str(missing))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o755)
    cases: list[tuple[Path, str, Path, int]] = [
        (missing, "program", missing, errno.ENOENT),
        (tmp_path / "plain" / "below", "program", tmp_path / "plain" / "below", errno.ENOTDIR),
        (tmp_path, "program", tmp_path, errno.EISDIR),
        (fifo, "program", fifo, errno.EACCES),
        (plain, "program", plain, errno.EACCES),
        (text, "program", text, errno.ENOEXEC),
        (empty, "program", empty, errno.ENOEXEC),
        (foreign, "program", foreign, errno.ENOEXEC),
        (nothing, "program", nothing, errno.ENOEXEC),
        (lost, "interpreter", missing, errno.ENOENT),
        (twice, "interpreter", missing, errno.ENOENT),
        (bad_shebang, "interpreter", plain, errno.EACCES),
        (loaded, "interpreter", missing, errno.ENOENT),
        (circle, "interpreter", circle, errno.ELOOP),
    ]
    for program, step, path, number in cases:
        error = refused(SpawnSpec((str(program),), PATH))
        found = (error.step, error.path, error.errno, error.permanent)
        assert found == (step, str(path), number, True), f"{program.name}: {error.text}"
    assert str(lost) in refused(SpawnSpec((str(lost),), PATH)).text, "the script is named beside its interpreter"


def test_a_missing_directory_is_told_from_a_missing_program(tmp_path: Path) -> None:
    """docs/rules.md S13: the message names the directory, not the program (errno alone cannot tell)."""
    error = refused(shell("exit 0", cwd=str(tmp_path / "gone")))
    assert (error.step, error.path, error.errno, error.permanent) == ("cwd", str(tmp_path / "gone"), errno.ENOENT, True)
    file = script(tmp_path / "file", "")
    assert refused(shell("exit 0", cwd=str(file))).errno == errno.ENOTDIR
    both = SpawnSpec((str(tmp_path / "gone" / "program"),), PATH, cwd=str(tmp_path / "gone"))
    assert refused(both).step == "cwd"


def test_what_no_tool_could_set_is_refused_before_the_exec(tmp_path: Path) -> None:
    """docs/rules.md S13: a refusal by prlimit or setpriv would look like a crash, so it is found out first."""
    assert refused(shell("exit 0", limits={"nofiles": (1, 1)})).step == "limits"
    assert refused(shell("exit 0", limits={"nofile": (2, 1)})).step == "limits"
    assert refused(shell("exit 0", limits={"nofile": (1, 2**40)})).errno == errno.EPERM
    assert refused(shell("exit 0", user="no-such-user-here")).step == "user"
    assert refused(shell("exit 0", group="no-such-group-here")).step == "user"
    text = script(tmp_path / "text", "exit 5\n")
    chained = SpawnSpec((str(text),), PATH, limits={"core": (0, 0), "nofile": (64, 64)})
    error = refused(chained)
    assert (error.step, error.path, error.errno) == ("program", str(text), errno.ENOEXEC), "the tools would run it with sh"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="xce-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.needs("root")
def test_what_the_units_user_may_not_run_is_refused_before_the_exec(open_folder: Path) -> None:
    """docs/rules.md S13: setpriv could only say 126; the program, or the folder on its way, is looked at as that user would."""
    secret = script(open_folder / "secret", "#!/bin/sh\nexit 3\n", 0o700)
    shared = script(open_folder / "shared", "#!/bin/sh\nexit 4\n", 0o750)
    os.chown(shared, 0, 1)
    hidden = open_folder / "hidden"
    hidden.mkdir(0o700)
    inner = script(hidden / "inner", "#!/bin/sh\nexit 5\n")
    scripted = script(open_folder / "scripted", f"#!{inner}\n")
    for program, step, path in ((secret, "program", secret), (inner, "program", inner), (scripted, "interpreter", inner)):
        error = refused(SpawnSpec((str(program),), PATH, user="nobody"))
        assert (error.step, error.path, error.errno, error.permanent) == (step, str(path), errno.EACCES, True)
        assert "user nobody" in error.text
    assert refused(SpawnSpec((str(shared),), PATH, user="nobody")).errno == errno.EACCES

    def both_ways() -> tuple[int, int, str]:
        ends = [wait_code(spawn(SpawnSpec((str(shared),), PATH, user="nobody", group="daemon")))]
        with pytest.raises(SpawnError):
            spawn(SpawnSpec((str(secret),), PATH, user="nobody"))
        ends.append(wait_code(spawn(SpawnSpec((str(secret),), PATH))))
        return ends[0], ends[1], secret.read_text(encoding="utf-8")

    assert in_lane(both_ways) == (4, 3, "#!/bin/sh\nexit 3\n"), "the lane has its own permissions back"


def test_arguments_that_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    """docs/rules.md S13: NUL bytes, an empty command line, one that is too long, doubled descriptors: errors, no exceptions."""
    assert refused(SpawnSpec((), PATH)).step == "argv"
    assert refused(SpawnSpec(("/bin/sh", "a\0b"), PATH)).step == "argv"
    assert refused(SpawnSpec(("/bin/s\0h",), PATH)).errno == errno.EINVAL
    assert refused(SpawnSpec(("/bin/sh", "x" * 5_000_000), PATH)).errno == errno.E2BIG
    assert refused(SpawnSpec(("/bin/sh",), PATH, cwd="relative")).step == "cwd"
    assert refused(SpawnSpec(("/bin/sh",), PATH, fds=((5, 9), (6, 9)))).step == "argv"
    assert refused(SpawnSpec(("no-such-program-anywhere",), PATH)).errno == errno.ENOENT


def test_a_change_of_the_file_is_noticed_by_its_signature(tmp_path: Path) -> None:
    """docs/rules.md S13: a permanent failure waits for the file to change: made, written, made executable, replaced, removed."""
    path = tmp_path / "program"
    seen = [signature(str(path))]
    assert refused(SpawnSpec((str(path),), PATH)).signature == seen[0]

    def noticed(what: str) -> None:
        now = signature(str(path))
        assert now != seen[-1], what
        assert now == signature(str(path)), "it stays the same while nothing changes"
        seen.append(now)

    script(path, "text\n", 0o644)
    noticed("made")
    path.chmod(0o755)
    noticed("made executable")
    path.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    noticed("written")
    script(tmp_path / "new", "#!/bin/sh\nexit 0\n").replace(path)
    noticed("replaced")
    assert wait_code(in_lane(partial(spawn, SpawnSpec((str(path),), PATH)))) == 0
    path.unlink()
    noticed("removed")


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A program that somebody holds open for writing, as an upgrade in place does."""
    path = tmp_path / "busy"
    shutil.copy("/bin/true", path)
    with open(path, "ab") as file:
        yield path, file


def test_a_busy_program_is_a_transient_failure(busy: tuple[Path, Any]) -> None:
    """docs/rules.md S13: ETXTBSY passes; the same spec works when the writer is done."""
    path, file = busy
    error = refused(SpawnSpec((str(path),), PATH))
    assert (error.step, error.errno, error.permanent, error.path) == ("exec", errno.ETXTBSY, False, str(path))
    file.close()
    assert wait_code(in_lane(partial(spawn, SpawnSpec((str(path),), PATH)))) == 0


async def out_of_processes(stage: Stage) -> dict[str, Any]:
    first = await stage.spawn(shell("exit 0"))  # every thread that there will be, is there by now
    await stage.ended(first)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)  # the limit does not hold for root
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    try:
        await stage.spawn(shell("exit 0"))
    except SpawnError as error:
        found = {"errno": error.errno, "permanent": error.permanent, "kind": type(error.__cause__).__name__}
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    again = await stage.ended(await stage.spawn(shell("exit 4")))
    return {**found, "again": again.code}


@pytest.mark.needs("root")
def test_a_full_process_table_is_a_transient_failure() -> None:
    """docs/rules.md S13: EAGAIN (which Python calls BlockingIOError) passes; the child starts when the limit is raised."""
    found = play(out_of_processes, forest="group")
    assert found == {"errno": errno.EAGAIN, "permanent": False, "kind": "BlockingIOError", "again": 4}


async def out_of_files(stage: Stage) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        await stage.spawn(shell("exit 0"))
    except SpawnError as error:
        found = {"errno": error.errno, "permanent": error.permanent}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.close(held[0])
    return {**found, "again": (await stage.ended(await stage.spawn(shell("exit 4")))).code}


def test_running_out_of_descriptors_is_a_transient_failure() -> None:
    """docs/rules.md S13: EMFILE passes."""
    assert play(out_of_files, forest="group") == {"errno": errno.EMFILE, "permanent": False, "again": 4}


def test_a_failed_spawn_leaks_no_descriptor(tmp_path: Path) -> None:
    """docs/rules.md S13: whatever was opened for a child that did not come to be is closed."""
    before = sorted(os.listdir("/proc/self/fd"))
    out = Append(str(tmp_path / "log"))
    text = script(tmp_path / "text", "echo\n")
    for _ in range(3):
        refused(SpawnSpec((str(text),), PATH, stdout=out, stderr=out))
        refused(SpawnSpec(("/bin/sh",), PATH, stdout=out, fds=((9_999, 7),)))
    assert sorted(os.listdir("/proc/self/fd")) == before


async def keeps_nothing(stage: Stage) -> dict[str, Any]:
    told: list[Outcome[Any]] = []
    for number in range(50):
        answer = stage.lanes.submit("spawn:u", partial(spawn, SpawnSpec(("/no/such",), PATH), stage.exits.births), told.append)
        assert answer is Submitted.ACCEPTED, f"{number}: {answer}"
        assert stage.lanes.submit("spawn:u", partial(str), told.append) is Submitted.IN_FLIGHT
        await stage.until(lambda number=number: len(told) == number + 1, "told")  # type: ignore[misc]
    return {"depth": stage.lanes.depth, "errors": sum(isinstance(each.error, SpawnError) for each in told)}


def test_a_failed_spawn_keeps_neither_a_slot_nor_its_key() -> None:
    """docs/rules.md S13: fifty failures of one unit, one after the other: the lanes are as free as before."""
    assert play(keeps_nothing, forest="group") == {"depth": 0, "errors": 50}


class Leased:
    """A program file under a write lease: whoever opens it waits until we give the lease back. A stand-in for a hung disk."""

    def __init__(self, path: Path) -> None:
        shutil.copy("/bin/true", path)
        path.chmod(0o755)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # not for writing: that alone would be ETXTBSY
        # The kernel asks for the lease back with a signal, SIGIO unless told otherwise; here nobody listens.
        fcntl.fcntl(self._fd, fcntl.F_SETSIG, 0)
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def give_back(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(self._fd)


async def hung_program(stage: Stage, path: str) -> dict[str, Any]:
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    leased = Leased(Path(path))
    spec = SpawnSpec((path,), PATH)
    spawning = stage.loop.create_task(stage.spawn(spec))
    other = await stage.ended(await stage.spawn(shell("exit 6")))
    for _ in range(20):
        await asyncio.sleep(0.01)
    hung = not spawning.done()
    leased.give_back()  # from the loop: without its turns the program would hang for the kernel's 45 s
    exited = await stage.ended(await spawning)
    return {"hung": hung, "other": other.code, "code": exited.code}


def test_a_program_on_a_hung_disk_hangs_its_lane_and_nobody_else(tmp_path: Path) -> None:
    """docs/rules.md S13: the loop goes on, other lanes spawn, and the child starts when the file system answers again."""
    assert play(hung_program, str(tmp_path / "leased"), forest="group") == {"hung": True, "other": 6, "code": 0}


def test_a_program_that_may_be_run_but_not_read_is_started(tmp_path: Path) -> None:
    """docs/rules.md S13: reading first is a courtesy to ourselves; a file of mode 0711 is executed all the same."""
    path = tmp_path / "secret"
    shutil.copy("/bin/true", path)
    path.chmod(0o111)
    assert stat.S_IMODE(path.stat().st_mode) == 0o111
    assert wait_code(in_lane(partial(spawn, SpawnSpec((str(path),), PATH)))) == 0
