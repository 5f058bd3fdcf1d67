"""docs/rules.md S16: one supervisor per controller, by a lock that no child inherits; the loser touches nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.controller import FakeController
from tests.process.stage import BOUND_S, ROOT, in_lane, shell, until, wait_code
from tests.shell.supervisor import Supervisor
from xce_supervisor.process.single import AlreadyRunning, acquire
from xce_supervisor.process.spawn import spawn

HOLDER = """
import sys, threading
from functools import partial
from pathlib import Path
from xce_supervisor.process.single import AlreadyRunning, acquire
sys.stdin.readline()
try:
    held = acquire(Path(sys.argv[1]))
except AlreadyRunning as error:
    print("lost", error.pid, flush=True)
    sys.exit(0)
child = ""
if len(sys.argv) > 2:
    from tests.process.stage import in_lane, shell
    from xce_supervisor.process.spawn import spawn
    child = in_lane(partial(spawn, shell("exec sleep 50"))).pid
print("won", child, flush=True)
sys.stdin.readline()
"""


def holder(path: Path, *more: str) -> subprocess.Popen[str]:
    """Start a process that takes the lock when it is told to, and ends when its input does."""
    command = [sys.executable, "-c", HOLDER, str(path), *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=BOUND_S)


@pytest.mark.parametrize("round_number", range(3))
def test_of_eight_that_start_in_the_same_instant_one_wins(tmp_path: Path, round_number: int) -> None:
    """docs/rules.md S16: exactly one holds the lock, and every loser names the winner's pid."""
    several = [holder(tmp_path / "lock") for _ in range(8)]
    try:
        for process in several:
            go(process)
        answers = {process.pid: told(process) for process in several}
        winners = [pid for pid, answer in answers.items() if answer[0] == "won"]
        assert len(winners) == 1, (round_number, answers)
        losers = [answer for pid, answer in answers.items() if pid != winners[0]]
        assert losers == [["lost", str(winners[0])]] * 7
    finally:
        for process in several:
            end(process)


def test_the_loser_touches_nothing(tmp_path: Path) -> None:
    """docs/rules.md S16: content, inode and times of the lock file are the winner's, and nothing else appears."""
    path = tmp_path / "lock"
    with acquire(path):
        before, names = path.stat(), os.listdir(tmp_path)
        for _ in range(3):
            with pytest.raises(AlreadyRunning) as caught:
                acquire(path)
            assert caught.value.pid == os.getpid() and str(path) in str(caught.value)
        after = path.stat()
        assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
        assert os.listdir(tmp_path) == names and path.read_text(encoding="ascii") == f"{os.getpid()}\n"
    with acquire(path) as again:
        assert again.path == path


def test_no_child_holds_the_lock_of_a_dead_supervisor(tmp_path: Path) -> None:
    """docs/rules.md S16: kill -9 the holder; the next one wins at once although the holder's child lives on."""
    process = holder(tmp_path / "lock", "with a child")
    go(process)
    won, child = told(process)
    try:
        assert won == "won"
        with pytest.raises(AlreadyRunning):
            acquire(tmp_path / "lock")
        process.kill()
        end(process)
        os.kill(int(child), 0)  # the child lives
        acquire(tmp_path / "lock").release()
    finally:
        os.kill(int(child), signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{child}"), "init has reaped the child")


def test_a_lock_file_that_was_removed_is_not_locked_twice(tmp_path: Path) -> None:
    """docs/rules.md S16: who removes the file gets a second lock, but never two on the same file; a link is refused."""
    path = tmp_path / "lock"
    first = acquire(path)
    path.unlink()
    second = acquire(path)
    with pytest.raises(AlreadyRunning):
        acquire(path)
    second.release()
    second.release()
    first.release()
    (tmp_path / "victim").write_text("kept", encoding="ascii")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        acquire(tmp_path / "link")
    assert (tmp_path / "victim").read_text(encoding="ascii") == "kept"


def test_a_file_that_is_replaced_while_it_is_being_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/rules.md S16: between opening and locking somebody removes the file and another one wins on its successor."""
    path = tmp_path / "lock"
    flock = fcntl.flock
    others: list[int] = []

    def late(fd: int, how: int) -> None:
        if not others:
            path.unlink()
            others.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
            flock(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(others[0], str(os.getpid()).encode("ascii"))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    try:
        with pytest.raises(AlreadyRunning):
            acquire(path)
    finally:
        os.close(others[0])


def test_a_dead_predecessors_pid_is_not_taken_for_the_winners(tmp_path: Path) -> None:
    """docs/rules.md S16: before the winner has written its pid the file holds an old one; the loser does not name that."""
    path = tmp_path / "lock"
    gone = in_lane(partial(spawn, shell("exit 0")))
    wait_code(gone)
    path.write_text(f"{gone.pid}\n", encoding="ascii")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(AlreadyRunning) as caught:
            acquire(path)
        assert caught.value.pid is None and "has not written" in str(caught.value)
    finally:
        os.close(fd)


async def test_s16_two_configurations_with_folders_of_their_own_do_not_make_two_supervisors_of_one_controller(
    tmp_path: Path,
) -> None:
    """docs/rules.md S16: the second one ends with 75, names the first one's pid, and has made nothing, its folders included."""
    async with FakeController(role="standby") as controller:
        first = Supervisor(tmp_path / "a", controller.address, {})
        second = Supervisor(tmp_path / "b", controller.address, {})
        for each in (first, second):
            each.unit("scheduler", each.child("scheduler"))
        try:
            first.start()
            await first.until(lambda: first.status()["role"]["is"] == "standby")
            for _ in range(12):
                second.start()
                assert await second.ended() == 75
            assert str(first.pid) in second.log.read_text()
            assert not second.state_dir.exists() and not second.run_dir.exists()
            assert await first.end() == 0
            second.start()
            await second.until(lambda: second.status()["role"]["is"] == "standby")
            assert await second.end() == 0
        finally:
            await first.close()
            await second.close()
