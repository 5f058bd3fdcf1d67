"""A unit's command line: its placeholders, the one address it may pass, and which file is run.

Only `{name}` of the table below is filled in; a literal brace is doubled. There is no shell.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PLACEHOLDERS = {
    "controller_address": '"host:port" of our controller, the only address that a child may be given (docs/rules.md S3)',
    "controller_id": "name of our controller",
    "instance_id": 'of the controller\'s process that is primary; "" for units with binding `always`',
    "term": "of our controller; 0 for units with binding `always`",
    "spawn_token": "random, one per spawn; the child shows it in its join",
    "tls_ca": "as in [tls]; empty with insecure = true",
    "tls_cert": "as in [tls.children.UNIT], else as in [tls]; empty with insecure = true",
    "tls_key": "as in [tls.children.UNIT], else as in [tls]; empty with insecure = true",
    "state_dir": "as in [supervisor]",
}

# What the service manager gave to the supervisor is not for its children (docs/rules.md S18).
RESERVED_VARIABLES = {
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
    "JOURNAL_STREAM", "MAINPID", "MANAGERPID", "SYSTEMD_EXEC_PID", "FDSTORE",
}  # fmt: skip
RESERVED_PREFIX = "XCE_"

_ADDRESS = re.compile(r"(?<![\w./:@-])(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):([0-9]{1,5})(?![\w:/])")
_NAMES_A_CONTROLLER = re.compile(
    r"controller|ctrl|peer|member|candidate|endpoint|primary|standby|address|\baddr\b|join", re.IGNORECASE
)


def wrong_placeholder(text: str) -> str:
    """Return why `text` cannot be filled in, "" if it can."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        return f"{text!r}: {error}; write {{{{ and }}}} for literal braces"
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in PLACEHOLDERS or spec or conversion:
            known = ", ".join(sorted(PLACEHOLDERS))
            return f"unknown placeholder {{{name}}} in {text!r}; known are {known}; write {{{{ and }}}} for literal braces"
    return ""


def placeholders_of(text: str) -> set[str]:
    """Return the names of the placeholders in `text`, which `wrong_placeholder` has found right."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with each placeholder replaced. values: every name of PLACEHOLDERS. One pass: values are not filled again."""
    return "".join(literal + (values[name] if name else "") for literal, name, _, _ in string.Formatter().parse(text))


def fill_all(texts: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return each of `texts` filled in, in order."""
    return [fill(text, values) for text in texts]


def addresses(command: Iterable[str]) -> list[str]:
    """Return what in a command line passes a controller's address, in order: literals, and the placeholder each time it stands.

    A literal counts where nothing says that it is something else: as an argument of its own, or behind an option whose name
    speaks of controllers, peers or addresses. `--listen :9000`, URLs and paths do not count.
    """
    found: list[str] = []
    option = ""
    for argument in list(command)[1:]:
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and not equals:
            option = argument
            continue
        said = name if equals and argument.startswith("-") else option
        text = value if equals else argument
        option = ""
        found += ["{controller_address}"] * text.count("{controller_address}")
        if not said or _NAMES_A_CONTROLLER.search(said):
            found += [match[0] for match in _ADDRESS.finditer(text)]
    return found


def single_address(address: str) -> str:
    """Return why `address` is not exactly one "host:port", "" if it is."""
    if any(mark in address for mark in ",; \t\n|"):
        return f"{address!r} names more than one address; a supervisor watches exactly one controller"
    if "://" in address or "/" in address:
        return f'{address!r} is a URL; write "host:port"'
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return f'{address!r} is not "host:port"; e.g. "127.0.0.1:7400" or "[::1]:7400"'
    if not 1 <= int(match[2]) <= 65535:
        return f"port {match[2]} is not between 1 and 65535"
    return ""


def find_program(name: str, path: str | None = None) -> str | None:
    """Return the file that `name` stands for, None if there is none now.

    An absolute name is itself, there or not: the spawn says precisely what is wrong with it. A bare one is looked for beside our
    own program (so that an installation runs what came with it) and then in `path` (default: PATH).
    """
    if os.path.isabs(name):
        return name
    beside = Path(sys.executable).parent / name
    if os.access(beside, os.X_OK) and beside.is_file():
        return str(beside)
    return shutil.which(name, path=path)
