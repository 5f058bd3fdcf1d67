"""Looks at the world that a configuration speaks of, before anything is run: `check` (docs/rules.md S25).

The configuration itself was checked when it was loaded. Here it is compared with files, names, certificates and the controller's
port. Nothing is changed, and nothing here is needed to run: a supervisor starts all the same, says what is missing, and goes on
when it is there (docs/rules.md S13).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from xce_supervisor.config import Config, Unit, launch
from xce_supervisor.core.words import Binding
from xce_supervisor.errors import ConfigError
from xce_supervisor.link.tls import TlsFiles, TlsSource
from xce_supervisor.process.failure import SpawnError
from xce_supervisor.process.privilege import limit_chain, user_chain
from xce_supervisor.process.program import examine, find

CONNECT_S = 1.0
EXPIRY_WARNING_S = 14 * 86_400.0
FREE_BYTES_MIN = 64 * 1024 * 1024


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that `check` found. error: this will not work; warning: it may not; note: how it will be."""

    level: Literal["error", "warning", "note"]
    file: Path
    key: str
    text: str


class Plan(Struct, frozen=True, kw_only=True):
    """What would be done for one unit, in words and as the command line (placeholders of a start are left in)."""

    unit: str
    when: str
    command: tuple[str, ...]
    ready: str
    stop: str
    again: str
    output: str


def check(config: Config, environment: dict[str, str]) -> list[Finding]:
    """Return what is wrong with the world for this configuration, worst first.

    environment: of the supervisor to be, normally os.environ. Waits a second for the port, and as long as a resolver takes.
    """
    found = [
        *_of_folders(config),
        *_of_tls(config),
        *_of_address(config),
        *(finding for unit in config.units for finding in _of_unit(config, unit, environment)),
    ]
    if not config.units:
        found.append(
            Finding(level="warning", file=config.file, key="units.directories", text="there is no unit file: nothing would run")
        )
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def plan(config: Config) -> list[Plan]:
    """Return what a supervisor would do with each unit, in order of name."""
    return [_plan(config, unit) for unit in config.units]


def _of_folders(config: Config) -> Iterator[Finding]:
    for key, path in (("supervisor.state_dir", config.supervisor.state_dir), ("supervisor.run_dir", config.supervisor.run_dir)):
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            yield Finding(level="error", file=config.file, key=key, text=f"{existing} is not a folder")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield Finding(level="error", file=config.file, key=key, text=f"{existing} cannot be written by user {os.geteuid()}")
        else:
            room = os.statvfs(existing)
            free = room.f_bavail * room.f_frsize
            if free < FREE_BYTES_MIN:
                text = f"{existing} has {free // 1024} KiB left; state is kept, and journal lines may be lost"
                yield Finding(level="warning", file=config.file, key=key, text=text)


def _of_tls(config: Config) -> Iterator[Finding]:
    tls = config.tls
    if tls.insecure:
        text = "TLS is off: whoever reaches the controller's port, or takes its place, can stop or start schedulers"
        yield Finding(level="warning", file=config.file, key="tls.insecure", text=text)
        return
    assert tls.ca is not None and tls.cert is not None and tls.key is not None
    yield from _of_pair(config, "tls", "supervisor", TlsFiles(tls.ca, tls.cert, tls.key))
    for name, pair in sorted(tls.children.items()):
        yield from _of_pair(config, f"tls.children.{name}", "", TlsFiles(tls.ca, pair.cert, pair.key))
    for unit in config.units:
        if unit.readiness.kind == "session" and unit.name not in tls.children:
            text = f"missing: {unit.name} would show our own certificate, and a controller with mTLS refuses that for a session"
            yield Finding(level="warning", file=config.file, key=f"tls.children.{unit.name}", text=text)


def _of_pair(config: Config, key: str, role: str, files: TlsFiles) -> Iterator[Finding]:
    try:
        source = TlsSource(files)
    except ConfigError as error:
        yield Finding(level="error", file=config.file, key=key, text=str(error))
        return
    left_s = source.expires_at() - time.time()
    if left_s <= 0:
        yield Finding(
            level="error", file=config.file, key=key, text=f"{files.cert} expired {-left_s / 86_400:.1f} days ago; renew it"
        )
    elif left_s < EXPIRY_WARNING_S:
        yield Finding(level="warning", file=config.file, key=key, text=f"{files.cert} expires in {left_s / 86_400:.1f} days")
    if source.name is None:
        yield Finding(
            level="warning",
            file=config.file,
            key=key,
            text=f"{files.cert} has no xce:// name: it says no role (docs/rules.md A1)",
        )
    elif role and source.name.role.name.lower() != role:
        text = f"{files.cert} is a certificate for a {source.name.role.name.lower()}, not for a {role}"
        yield Finding(level="error", file=config.file, key=key, text=text)


def _of_address(config: Config) -> Iterator[Finding]:
    host, _, port = config.controller.address.rpartition(":")
    key = "controller.address"
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{host} has no address ({error.strerror}); check the name, or write the number"
        yield Finding(level="error", file=config.file, key=key, text=text)
        return
    numbers = sorted({str(found[4][0]) for found in resolved})
    if len(numbers) > 1:
        text = (
            f"{host} stands for {', '.join(numbers)}; one is taken at each connection: write the number of this host's controller"
        )
        yield Finding(level="warning", file=config.file, key=key, text=text)
    family, kind, protocol, _, target = resolved[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(target)
        except OSError as error:
            why = error.strerror or "no answer in time"
            text = f"nothing takes connections at {config.controller.address} now ({why}); is the controller up?"
            yield Finding(level="warning", file=config.file, key=key, text=text)


def _of_unit(config: Config, unit: Unit, environment: dict[str, str]) -> Iterator[Finding]:
    started = launch(config, unit, Binding(config.controller.id, "", 0), "", environment)
    file = next(
        path / f"{unit.name}.toml" for path in reversed(config.folders.directories) if (path / f"{unit.name}.toml").exists()
    )
    yield from _of_program(file, started.argv[0], started.environment)
    account = _Account(user=started.user or None, group=started.group or None)
    yield from _of_attempt(file, "limits", lambda: limit_chain(started.limits))
    yield from _of_attempt(file, "unit.user", lambda: user_chain(account, started.argv[0]))
    if not started.cwd.is_dir():
        yield Finding(level="error", file=file, key="unit.cwd", text=f"{started.cwd} is not a folder")
    if unit.output.kind == "file" and not started.output_file.parent.is_dir():
        text = f"{started.output_file.parent} is not a folder: output would be thrown away"
        yield Finding(level="warning", file=file, key="output.path", text=text)


def _of_attempt(file: Path, key: str, attempt: Callable[[], object]) -> Iterator[Finding]:
    try:
        attempt()
    except SpawnError as error:
        yield Finding(level="error", file=file, key=key, text=str(error))


def _of_program(file: Path, program: str, environment: dict[str, str]) -> Iterator[Finding]:
    try:
        doubt = examine(find(program, environment))
    except SpawnError as error:
        yield Finding(level="error", file=file, key="unit.command[0]", text=f"{error}; the unit waits until it is there")
        return
    if doubt is not None:
        yield Finding(level="warning", file=file, key="unit.command[0]", text=str(doubt))


class _Account(Struct, frozen=True, kw_only=True):
    user: str | None
    group: str | None


def _plan(config: Config, unit: Unit) -> Plan:
    stop, restart = unit.stop, unit.restart
    when = {
        "role": f"while controller {config.controller.id} at {config.controller.address} is primary, once per term",
        "always": "as long as the supervisor runs",
    }[unit.unit.binding]
    ready = {
        "session": "when the controller reports its session; wedged if that takes longer than "
        f"{unit.readiness.join_timeout_s:g} s, or if a push is not acted on for {unit.stall.timeout_s:g} s",
        "notify": "when it says READY=1",
        "none": "as soon as it runs",
    }[unit.readiness.kind]
    push = f"exit push for {stop.exit_push_s:g} s, " if unit.unit.binding == "role" and stop.exit_push_s else ""
    return Plan(
        unit=unit.name,
        when=when,
        command=unit.unit.command,
        ready=ready,
        stop=f"{push}SIGTERM, after {stop.grace_s:g} s SIGKILL to its whole tree; "
        f"when the supervisor stops: {stop.on_supervisor_stop}",
        again=f"at once, then after {restart.delay_s:g} s doubling to {restart.delay_s_max:g} s; "
        f"forgotten after {restart.healthy_s:g} s of running",
        output=f"{unit.output.kind} {unit.output.path}".strip(),
    )
