"""What must hold between fields: each relation is one function that tells what contradicts what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xce_supervisor.config.command import (
    RESERVED_PREFIX,
    RESERVED_VARIABLES,
    addresses,
    placeholders_of,
    single_address,
    wrong_placeholder,
)
from xce_supervisor.config.problem import Problem, suggest
from xce_supervisor.config.settings import Config, SupervisorFile
from xce_supervisor.config.unit import Unit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIMIT = re.compile(r"(\d+|unlimited)(?::(\d+|unlimited))?")


def of_settings(value: SupervisorFile, file: Path) -> Iterator[Problem]:
    """Yield what contradicts itself in supervisor.toml."""
    wrong_address = single_address(value.controller.address)
    if wrong_address:
        yield Problem(file, "controller.address", wrong_address)
    yield from _of_tls(value, file)
    role = value.role
    for low, high, why in (
        ("poll_interval_ms", "request_deadline_ms", "else questions would pile up behind a slow answer"),
        ("request_deadline_ms", "unknown_limit_ms", "else one lost answer would stop the scheduler"),
        ("poll_interval_ms", "quorum_age_limit_ms", "else an answer is old before the next one comes"),
    ):
        if getattr(role, low) >= getattr(role, high):
            yield Problem(file, f"role.{low}", f"{getattr(role, low)} must be below role.{high} ({getattr(role, high)}): {why}")
    if role.hold_down_ms_min > role.hold_down_ms_max:
        yield Problem(
            file, "role.hold_down_ms_min", f"{role.hold_down_ms_min} is above role.hold_down_ms_max ({role.hold_down_ms_max})"
        )
    if role.calm_s * 1000 <= role.hold_down_ms_max:
        yield Problem(
            file,
            "role.calm_s",
            f"{role.calm_s:g} s must be longer than role.hold_down_ms_max ({role.hold_down_ms_max} ms), "
            "else flaps are never remembered",
        )


def _of_tls(value: SupervisorFile, file: Path) -> Iterator[Problem]:
    given = {"ca": value.tls.ca, "cert": value.tls.cert, "key": value.tls.key}
    missing = [name for name, path in given.items() if path is None]
    if value.tls.insecure and (len(missing) < 3 or value.tls.children):
        yield Problem(file, "tls.insecure", "contradicts ca, cert, key or children beside it; remove it, or them")
    elif not value.tls.insecure and missing:
        yield Problem(
            file,
            f"tls.{missing[0]}",
            f"{', '.join(missing)} missing; give ca, cert and key (for a trial: `xce-testbed pki`), "
            "or insecure = true on one machine",
        )


def of_unit(unit: Unit, file: Path) -> Iterator[Problem]:
    """Yield what contradicts itself in one unit file."""
    if unit.name != file.stem:
        yield Problem(file, "unit.name", f"{unit.name!r} must be the file's name without .toml, {file.stem!r}")
    yield from _of_texts(unit, file)
    yield from _of_environment(unit, file)
    yield from _of_output(unit, file)
    yield from _of_readiness(unit, file)
    for name, limit in unit.limits.items():
        if isinstance(limit, bool) or (isinstance(limit, int) and limit < 0):
            yield Problem(file, f"limits.{name}", f'{limit!r} is not a limit; write a number, "SOFT:HARD" or "unlimited"')
        elif isinstance(limit, str):
            yield from _of_limit(name, limit, file)
    if not unit.unit.cwd.is_absolute():
        yield Problem(file, "unit.cwd", f"{str(unit.unit.cwd)!r} is not absolute")
    stop, restart, stall = unit.stop, unit.restart, unit.stall
    for key, low, high_key, high in (
        ("stop.wedge_grace_s", stop.wedge_grace_s, "stop.grace_s", stop.grace_s),
        ("restart.delay_s", restart.delay_s, "restart.delay_s_max", restart.delay_s_max),
        ("restart.spawn_retry_s", restart.spawn_retry_s, "restart.spawn_retry_s_max", restart.spawn_retry_s_max),
        ("restart.spawn_retry_s_max", restart.spawn_retry_s_max, "restart.spawn_retry_slow_s", restart.spawn_retry_slow_s),
    ):
        if low > high:
            yield Problem(file, key, f"{low:g} s is above {high_key} ({high:g} s)")
    if stall.confirm_s >= stall.timeout_s:
        yield Problem(file, "stall.confirm_s", f"{stall.confirm_s:g} s must be below stall.timeout_s ({stall.timeout_s:g} s)")


def _of_limit(name: str, limit: str, file: Path) -> Iterator[Problem]:
    match = _LIMIT.fullmatch(limit)
    if match is None:
        yield Problem(file, f"limits.{name}", f'{limit!r} is not a limit; write a number, "SOFT:HARD" or "unlimited"')
        return
    soft, hard = match[1], match[2] or match[1]
    if hard != "unlimited" and (soft == "unlimited" or int(soft) > int(hard)):
        yield Problem(file, f"limits.{name}", f"soft limit {soft} is above hard limit {hard}")


def _of_texts(unit: Unit, file: Path) -> Iterator[Problem]:
    texts = [(f"unit.command[{number}]", text) for number, text in enumerate(unit.unit.command)]
    texts += [(f"environment.set.{name}", text) for name, text in unit.environment.set.items()]
    texts.append(("output.path", unit.output.path))
    wrong = False
    for key, text in texts:
        reason = wrong_placeholder(text)
        if "\0" in text:
            reason = "holds a NUL byte, which no program can be given"
        if reason:
            wrong = True
            yield Problem(file, key, reason)
    program = unit.unit.command[0]
    if not program or ("/" in program and not program.startswith(("/", "{"))):
        yield Problem(file, "unit.command[0]", f"{program!r} must be a bare name or an absolute path")
    if wrong:
        return
    passed = addresses(unit.unit.command)
    passed += [text for name, text in unit.environment.set.items() for text in addresses(("", f"--{name}={text}"))]
    if len(passed) > 1:
        yield Problem(
            file,
            "unit.command",
            f"passes {len(passed)} controller addresses ({', '.join(passed)}); a child gets exactly one (docs/rules.md S3), "
            "best by {controller_address}",
        )


def _of_environment(unit: Unit, file: Path) -> Iterator[Problem]:
    for where, names in (("set", tuple(unit.environment.set)), ("pass", unit.environment.pass_)):
        for name in names:
            if not _VARIABLE.fullmatch(name):
                yield Problem(file, f"environment.{where}", f"{name!r} is no name of a variable")
            elif name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX):
                yield Problem(
                    file,
                    f"environment.{where}.{name}",
                    "is reserved: the service manager's variables and XCE_* are set by the supervisor itself (docs/rules.md S18)",
                )


def _of_output(unit: Unit, file: Path) -> Iterator[Problem]:
    if unit.output.kind == "file" and not unit.output.path:
        yield Problem(file, "output.path", 'is missing for kind = "file"')
    if unit.output.kind != "file" and unit.output.path:
        yield Problem(file, "output.path", f'is for kind = "file" only, and kind is "{unit.output.kind}"')


def _of_readiness(unit: Unit, file: Path) -> Iterator[Problem]:
    if unit.readiness.kind != "session":
        return
    if unit.unit.binding != "role":
        yield Problem(file, "readiness.kind", f'"session" needs binding = "role", and binding is "{unit.unit.binding}"')
    texts = [*unit.unit.command, *unit.environment.set.values()]
    if not any(wrong_placeholder(text) for text in texts) and not any("spawn_token" in placeholders_of(text) for text in texts):
        yield Problem(
            file,
            "unit.command",
            'readiness.kind = "session" needs {spawn_token} in the command or in environment.set: else no session could be told '
            "from a stranger's (docs/rules.md S3)",
        )


def between(config: Config, files: dict[str, Path]) -> Iterator[Problem]:
    """Yield what contradicts itself between supervisor.toml and unit files. files: of each unit, by name."""
    names = [unit.name for unit in config.units]
    for name in config.tls.children:
        if name not in names:
            yield Problem(config.file, f"tls.children.{name}", f"no unit is called {name}{suggest(name, names)}")
    limit_s = config.supervisor.stop_limit_s
    for unit in config.units:
        file = files[unit.name]
        ladder_s = unit.stop.exit_push_s + unit.stop.grace_s + unit.stop.kill_limit_s
        if ladder_s >= limit_s:
            yield Problem(
                file,
                "stop",
                f"the kill ladder takes exit_push_s + grace_s + kill_limit_s = {ladder_s:g} s and must be below [supervisor] "
                f"stop_limit_s = {limit_s:g} s of {config.file}",
            )
        if unit.stall.timeout_s * 1000 <= config.role.poll_interval_ms and unit.readiness.kind == "session":
            yield Problem(
                file,
                "stall.timeout_s",
                f"{unit.stall.timeout_s:g} s is not longer than [role] poll_interval_ms = {config.role.poll_interval_ms} "
                f"of {config.file}",
            )
        for text in addresses(unit.unit.command):
            if text not in ("{controller_address}", config.controller.address):
                yield Problem(
                    file,
                    "unit.command",
                    f"passes {text}, which is not [controller] address = {config.controller.address!r} of {config.file}; "
                    "write {controller_address}",
                )
