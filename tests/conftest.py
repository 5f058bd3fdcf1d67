"""What every test gets: what the machine offers, no leftovers after a test, and no silent skip in CI.

A test that needs something says so with `@pytest.mark.needs("root", "cgroup2")`; it is skipped where that is missing, with a
reason that says how to get it. With XCE_CI_STRICT=1 a run fails when a test was skipped although its needs are offered here,
or for a reason of any other kind.

After each test under tests/shell, tests/process and tests/rules no child process and no file descriptor may be left.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

_WATCHED = {"shell", "process", "rules"}
_SETTLE_S = 3.0  # pidfds, transports and threads of a closed loop are gone by then, or they leak
_NEED = re.compile(r"needs (\w+): ")


def _cgroup2() -> str:
    """Return a cgroup v2 folder in which this process may make groups, or ""."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind != "cgroup2" or "rw" not in options.split(","):
            continue
        own = re.search(r"^0::(/.*)$", Path("/proc/self/cgroup").read_text(encoding="utf-8"), re.MULTILINE)
        folder = Path(mount + (own[1] if own else "/"))
        probe = folder / f"xce-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError:
            continue
        return str(folder)
    return ""


def _userns() -> str:
    """Return "yes" where a user namespace can be made, else ""."""
    tool = shutil.which("unshare")
    if tool is None:
        return ""
    done = subprocess.run([tool, "-U", "true"], capture_output=True, check=False, timeout=10)
    return "yes" if done.returncode == 0 else ""


def _etcd() -> str:
    """Return the path of the etcd server where Python can speak to it too, else ""."""
    found = shutil.which("etcd")
    return found if found is not None and importlib.util.find_spec("grpc") is not None else ""


_HOW = {
    "root": "run as root",
    "cgroup2": "run where a cgroup v2 folder can be written (as root, or under a delegated systemd unit)",
    "etcd": "install etcd-server and the extra `etcd`",
    "nspawn": "install systemd-container and run as root",
    "strace": "install strace",
    "userns": "allow unprivileged user namespaces, or run as root; unshare is in util-linux",
}


def offers() -> dict[str, str]:
    """Return what this machine offers: name to where it is, "" for what is missing."""
    return {
        "root": "yes" if os.geteuid() == 0 else "",
        "cgroup2": _cgroup2(),
        "etcd": _etcd(),
        "nspawn": (shutil.which("systemd-nspawn") or "") if os.geteuid() == 0 else "",
        "strace": shutil.which("strace") or "",
        "userns": _userns(),
    }


_OFFERS = pytest.StashKey[dict[str, str]]()
_SKIPPED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OFFERS] = offers()
    uvloop.new_event_loop().close()  # libuv keeps a pipe of its own for good from the first loop on: no test's leak
    config.stash[_SKIPPED] = []
    config.pluginmanager.register(_SkipWatch(config), "xce-skip-watch")


def pytest_report_header(config: pytest.Config) -> str:
    said = ", ".join(f"{name} {where or 'no'}" for name, where in config.stash[_OFFERS].items())
    return f"machine: {os.cpu_count()} cores, {said}; {'strict about skips' if _strict() else 'skips allowed'}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if name not in _HOW:
                pytest.fail(f"mark needs: no such offer {name!r}; known are {', '.join(_HOW)}")
            if not item.config.stash[_OFFERS][name]:
                pytest.skip(f"needs {name}: {_HOW[name]}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own that is closed before anybody looks for leaks; no plugin keeps one open."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def _strict() -> bool:
    return os.environ.get("XCE_CI_STRICT", "") not in ("", "0")


class _SkipWatch:
    """Fails a strict run in which a test was skipped that this machine can run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._saw(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._saw(report.nodeid, report.longrepr)

    def _saw(self, nodeid: str, longrepr: object) -> None:
        text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
        need = _NEED.search(text)
        if need is None or self._config.stash[_OFFERS].get(need[1], ""):
            self._config.stash[_SKIPPED].append(f"{nodeid}: {text}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if _strict() and self._config.stash[_SKIPPED] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if _strict() and self._config.stash[_SKIPPED]:
            terminalreporter.section("skipped although this machine can run them", red=True)
            for line in self._config.stash[_SKIPPED]:
                terminalreporter.line(line)


@pytest.fixture(scope="session")
def machine_offers(request: pytest.FixtureRequest) -> dict[str, str]:
    """What the machine offers; e.g. the cgroup v2 folder in which groups can be made."""
    found: dict[str, str] = request.config.stash[_OFFERS]
    return found


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> dict[int, str]:
    """Return our descendants: pid to state and command line."""
    found: dict[int, str] = {}
    open_pids = [os.getpid()]
    while open_pids:
        for pid in _children_of(open_pids.pop()):
            try:
                child = psutil.Process(pid)
                found[pid] = f"{child.status()} {' '.join(child.cmdline())[:120]}"
            except psutil.NoSuchProcess:
                continue
            open_pids.append(pid)
    return found


def _children_of(pid: int) -> list[int]:
    """Ask the kernel, which knows; psutil would read every process of the machine."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
        except OSError:
            continue  # that thread ended meanwhile
    return found


def _left_over(fds: dict[int, str], children: dict[int, str]) -> list[str]:
    lines = [f"child {pid}: {what}" for pid, what in _children().items() if pid not in children]
    for fd, what in _descriptors().items():
        grpc_own = "grpc" in sys.modules and what in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")  # kept for good by grpc
        if fds.get(fd) != what and not grpc_own:
            lines.append(f"descriptor {fd}: {what}")
    return lines


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of a shell that leaves a child process or a file descriptor."""
    folders = request.path.relative_to(request.config.rootpath).parts
    if not _WATCHED.intersection(folders) or request.node.get_closest_marker("leaks"):
        yield
        return
    fds, children = _descriptors(), _children()
    yield
    give_up = time.monotonic() + _SETTLE_S
    while left := _left_over(fds, children):
        if time.monotonic() > give_up:
            pytest.fail("the test left behind:\n  " + "\n  ".join(left))
        gc.collect()
        time.sleep(0.02)
