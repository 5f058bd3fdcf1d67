"""The worker's parts: what it decides, what it remembers, how it starts a command, and what it finds of a former process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testbed.stage import until
from xce_supervisor.errors import ConfigError
from xce_supervisor.testbed.worker_disk import DirectoryTaken, WorkerDisk
from xce_supervisor.testbed.worker_jobs import DONE, FAILED, RUNNING, JobTable, Verdict
from xce_supervisor.testbed.worker_log import JobLog
from xce_supervisor.testbed.worker_spawn import TRUNCATED, CannotStart, job_environment, keep_descriptors, start
from xce_supervisor.testbed.worker_survivors import kill_marked
from xce_supervisor.wire.words import JobAttempt


def ended(job_id: str, attempt: int, exit_code: int | None = 0, reason: str = "") -> JobAttempt:
    """One ended attempt."""
    state = DONE if exit_code == 0 and not reason else FAILED
    return JobAttempt(job_id=job_id, attempt=attempt, state=state, exit_code=exit_code, reason=reason)


# ---------------------------------------------------------------- decisions


def test_an_attempt_is_begun_once_and_then_only_reported() -> None:
    """Running, ended and told: none of them is ever started again."""
    table = JobTable()
    assert table.judge("a", 1) is Verdict.START
    assert table.begin("a", 1) is None
    assert table.judge("a", 1) is Verdict.REPORT
    table.end(table.ending("a", 1, exit_code=0, reason=""))
    assert table.judge("a", 1) is Verdict.REPORT
    assert table.told(table.untold(10)) == [ended("a", 1)]
    assert table.judge("a", 1) is Verdict.REPORT and table.untold(10) == ()
    table.tell_again("a", 1)
    asked_again = table.untold(10)
    assert asked_again == (ended("a", 1),)
    table.tell_again("a", 1)
    assert table.told(asked_again) == [] and table.untold(10) == (ended("a", 1),)


def test_a_newer_attempt_names_the_older_one_that_still_runs() -> None:
    """The controller gave the older one up, so it is ended first; a start of an older one is stale."""
    table = JobTable()
    table.begin("a", 1)
    older = table.begin("a", 2)
    assert older is not None and older.attempt == 1
    assert table.judge("a", 1) is Verdict.STALE
    table.end(table.ending("a", 1, exit_code=137, reason="killed"))
    assert [one.attempt for one in table.running()] == [2]
    assert {(one.attempt, one.state) for one in table.untold(10)} == {(1, FAILED), (2, RUNNING)}


def test_a_change_after_the_report_was_built_stays_to_be_told() -> None:
    """An end that comes while "running" is on its way is not taken for told."""
    table = JobTable()
    table.begin("a", 1)
    sent = table.untold(10)
    table.end(table.ending("a", 1, exit_code=3, reason=""))
    assert table.told(sent) == []
    assert table.untold(10) == (ended("a", 1, 3),)


def test_a_full_report_holds_what_runs_and_what_is_untold() -> None:
    """What was told and ended is the controller's already."""
    table = JobTable()
    for name in ("a", "b", "c"):
        table.begin(name, 1)
    table.end(table.ending("a", 1, exit_code=0, reason=""))
    table.told(table.untold(10))
    table.end(table.ending("b", 1, exit_code=0, reason=""))
    assert {(one.job_id, one.state) for one in table.everything()} == {("b", DONE), ("c", RUNNING)}


def test_more_attempts_than_the_bound_are_not_begun() -> None:
    """A mad peer cannot fill the machine."""
    table = JobTable(running_max=2)
    table.begin("a", 1)
    table.begin("b", 1)
    assert table.judge("c", 1) is Verdict.FULL


def test_only_ended_and_told_attempts_are_forgotten() -> None:
    """Memory is bounded, and what must still be told is kept whatever the bound says."""
    table = JobTable(remembered_max=2)
    for number in range(6):
        table.begin(f"j{number}", 1)
        if number != 1:
            table.end(table.ending(f"j{number}", 1, exit_code=0, reason=""))
    table.told([one for one in table.untold(10) if one.job_id not in ("j0",)])
    assert table.judge("j0", 1) is Verdict.REPORT and table.judge("j1", 1) is Verdict.REPORT
    assert table.judge("j2", 1) is Verdict.START


# ---------------------------------------------------------------- the log


def test_the_log_tells_the_next_process_what_was_begun_and_how_it_ended(tmp_path: Path) -> None:
    """Begun without an end is lost; ends are kept with whether they were told."""
    log, remembered = JobLog.open(tmp_path)
    assert remembered.ended == () and remembered.lost == ()
    for name in ("a", "b", "c"):
        log.begun(name, 1)
    log.ended(ended("a", 1, 0))
    log.ended(ended("b", 1, 9, "killed by SIGKILL"))
    log.told([ended("a", 1, 0)])
    log.close()
    log, remembered = JobLog.open(tmp_path)
    log.close()
    assert remembered.ended == ((ended("a", 1, 0), True), (ended("b", 1, 9, "killed by SIGKILL"), False))
    assert remembered.lost == (("c", 1),) and remembered.damaged == 0


def test_a_compacted_log_says_the_same(tmp_path: Path) -> None:
    """Compaction loses nothing that is still asked for."""
    log, _ = JobLog.open(tmp_path)
    log.begun("a", 1)
    log.ended(ended("a", 1))
    log.compact([(ended("a", 1), True), (ended("b", 2, 1), False)], [JobAttempt(job_id="c", attempt=1, state=RUNNING)])
    log.begun("d", 1)
    log.close()
    log, remembered = JobLog.open(tmp_path)
    log.close()
    assert remembered.ended == ((ended("a", 1), True), (ended("b", 2, 1), False))
    assert remembered.lost == (("c", 1), ("d", 1))


@given(cut=st.integers(0, 400), noise=st.binary(max_size=40))
def test_a_torn_or_damaged_log_loses_no_whole_record(cut: int, noise: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut anywhere, followed by anything: every record before the cut is read, and what is appended later, too."""
    folder = tmp_path_factory.mktemp("log")
    log, _ = JobLog.open(folder)
    for number in range(4):
        log.begun(f"job-{number}", number + 1)
    log.close()
    path = folder / "jobs.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + noise)
    log, remembered = JobLog.open(folder)
    log.begun("after", 1)
    log.close()
    log, again = JobLog.open(folder)
    log.close()
    kept = [(f"job-{number}", number + 1) for number in range(whole[:cut].count(b"\n"))]
    assert list(remembered.lost)[: len(kept)] == kept
    assert again.lost[-1] == ("after", 1)


def test_a_full_disk_leaves_the_log_whole(tmp_path: Path) -> None:
    """A record that did not fit is taken back: the one after it can be read."""
    program = (
        "import resource, signal, sys\nfrom pathlib import Path\n"
        "from xce_supervisor.testbed.worker_log import JobLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log, _ = JobLog.open(Path(sys.argv[1]))\n"
        "log.begun('first', 1)\n"
        "size = (Path(sys.argv[1]) / 'jobs.log').stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))\n"
        "try:\n    log.begun('second', 1)\nexcept OSError as error:\n    print(error.strerror)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "log.begun('third', 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30)
    assert "File too large" in done.stdout
    log, remembered = JobLog.open(tmp_path)
    log.close()
    assert remembered.lost == (("first", 1), ("third", 1)) and remembered.damaged == 0


# ---------------------------------------------------------------- the directory


def test_one_directory_has_one_worker(tmp_path: Path) -> None:
    """The second one is told so and changes nothing."""
    disk = WorkerDisk(tmp_path / "w", 10)
    with pytest.raises(DirectoryTaken, match="another worker runs on"):
        WorkerDisk(tmp_path / "w", 10)
    disk.close()
    again = WorkerDisk(tmp_path / "w", 10)
    assert again.mark == disk.mark
    again.close()


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    """A file where the directory should be: the message names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker directory .*/file/w: .*Not a directory"):
        WorkerDisk(tmp_path / "file" / "w", 10)
    (tmp_path / "v" / "jobs.log").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"job log .*jobs\.log: Is a directory"):
        WorkerDisk(tmp_path / "v", 10)


def test_a_job_id_that_is_no_file_name_is_hashed(tmp_path: Path) -> None:
    """No job can write outside the output folder."""
    disk = WorkerDisk(tmp_path, 10)
    for name in ("../../etc/passwd", ".hidden", "a/b", "x" * 300, "\udcff"):
        assert disk.output_path(name, 1).parent == tmp_path / "output"
        assert disk.output_path(name, 1).name.startswith("id-")
    assert disk.output_path("job-1", 2).name == "job-1.2.out"
    disk.close()


# ---------------------------------------------------------------- starting


def run_job(command: list[str], folder: Path, *, limit: int = 1 << 20) -> tuple[int, bytes]:
    """Run one command as the worker does; return its exit code and its kept output."""

    async def scenario() -> int:
        code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        environment = job_environment("job-1", 3, "0" * 32, "w1")
        job = start(command, environment, folder / "out", limit, code.set_result)
        try:
            return await asyncio.wait_for(code, 60)
        finally:
            job.signal(signal.SIGKILL)

    return asyncio.run(scenario()), (folder / "out").read_bytes()


def test_a_job_knows_who_it_is_and_not_who_its_worker_reports_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XCE_JOB_ID and XCE_JOB_ATTEMPT are set; the worker's own sockets and tokens are not."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("XCE_SPAWN_TOKEN", "secret")
    code, output = run_job(["env"], tmp_path)
    lines = set(output.decode().splitlines())
    assert code == 0 and {"XCE_JOB_ID=job-1", "XCE_JOB_ATTEMPT=3", "XCE_WORKER=w1"} <= lines
    assert not [line for line in lines if line.startswith(("NOTIFY_SOCKET", "XCE_SPAWN_TOKEN"))]


def test_a_job_starts_clean(tmp_path: Path) -> None:
    """A session of its own, no ignored or blocked signal, three descriptors (docs/rules.md S18, for jobs)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leaked = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leaked, True)
    keep_descriptors()
    try:
        program = (
            "import os\n"
            "print(os.getsid(0) == os.getpid())\n"
            "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('SigBlk', 'SigIgn'))])\n"
            "print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))\n"
        )
        code, output = run_job([sys.executable, "-S", "-c", program], tmp_path)
    finally:
        os.close(leaked)
        signal.signal(signal.SIGHUP, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    lines = output.decode().splitlines()
    assert code == 0 and lines[0] == "True"
    blocked, ignored_there = (int(word.strip("[' ]"), 16) for word in lines[1].split(","))
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25) in the job, after the exec; 32 and 33 are the C library's own, which no
    # program that uses it can set.
    assert blocked == 0 and ignored_there & ~(3 << 31) == (1 << 12) | (1 << 24)
    assert lines[2] == "[0, 1, 2] 4"  # the fourth is the listing's own


@pytest.mark.parametrize(("command", "code"), [(["false"], 1), (["sh", "-c", "exit 42"], 42), (["sh", "-c", "kill -9 $$"], 137)])
def test_an_exit_code_is_the_commands_or_says_the_signal(tmp_path: Path, command: list[str], code: int) -> None:
    """128 plus the signal's number, as shells say it."""
    assert run_job(command, tmp_path)[0] == code


def test_a_program_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    """Not by exit code 127, which a job may mean by itself."""
    (tmp_path / "plain").write_text("not executable")
    for command in (["no-such-program"], [str(tmp_path / "none")], [str(tmp_path / "plain")], [str(tmp_path)], [], ["a\0b"]):
        with pytest.raises(CannotStart, match=r"cannot start|empty or holds"):
            run_job(command, tmp_path)


def test_output_is_bounded_and_marked_and_the_job_is_never_blocked(tmp_path: Path) -> None:
    """20 MB of noise, one line without an end: the job ends, 64 KiB are kept, and the cut is marked."""
    began = time.monotonic()
    code, output = run_job(["sh", "-c", "head -c 20000000 /dev/zero; echo done >&2"], tmp_path, limit=64 * 1024)
    assert code == 0 and time.monotonic() - began < 60
    assert len(output) == 64 * 1024 + len(TRUNCATED) and output.endswith(TRUNCATED)


def test_output_up_to_the_last_byte_is_kept(tmp_path: Path) -> None:
    """What was written right before the exit is not lost, though the exit is seen first."""
    _, output = run_job(["sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x; printf end"], tmp_path)
    assert len(output) == 200003 and output.endswith(b"xend")


def test_the_jobs_group_ends_with_its_leader_and_is_not_waited_for(tmp_path: Path) -> None:
    """A background process of the job's group holds the output pipe; the end is seen at once and the process is killed."""
    began = time.monotonic()
    code, output = run_job(["sh", "-c", "sleep 300 & echo $!"], tmp_path)
    assert code == 0 and time.monotonic() - began < 60
    left = int(output)
    asyncio.run(until(lambda: _gone(left), 20, "the background process lives"))


def _gone(pid: int) -> bool:
    """Dead, perhaps not reaped yet by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------- what a former process left


def test_survivors_are_found_by_their_mark_also_in_a_session_of_their_own(tmp_path: Path) -> None:
    """All that carry the mark die, however they are related to us; a process with another mark lives."""
    mark, other = "a" * 32, "b" * 32
    ours = subprocess.Popen(
        ["sh", "-c", "setsid sleep 300 & sleep 300"], env={**os.environ, "XCE_WORKER_MARK": mark}, start_new_session=True
    )
    stranger = subprocess.Popen(["sleep", "300"], env={**os.environ, "XCE_WORKER_MARK": other})
    try:
        asyncio.run(until(lambda: len(_carriers(mark)) >= 3, 20, "the processes did not start"))
        assert kill_marked(mark) >= 3
        assert ours.wait(5) == -signal.SIGKILL
        assert _carriers(mark) == [] and stranger.poll() is None
        assert kill_marked(mark) == 0
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait(5)


def _carriers(mark: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"XCE_WORKER_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
