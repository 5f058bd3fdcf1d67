"""Which supervisor a verb means, and what it, or else its last written status, says (docs/rules.md S22)."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from xce_supervisor.cli.entry import ExitCode
from xce_supervisor.config import Places, load_places
from xce_supervisor.errors import ConfigError
from xce_supervisor.supervisor.asking import NotAllowed, NotResponding, NotRunning, Refused, ask
from xce_supervisor.supervisor.view import View

FOLDER = Path("/etc/xce-supervisor")
VARIABLE = "XCE_SUPERVISOR_CONFIG"
# With the start of Python on a busy machine this stays below two seconds.
DEADLINE_S = 1.2


class Said(Struct, frozen=True, kw_only=True):
    """What is known of a supervisor. trouble: "" when it answered itself, else why not; view: None if nothing is known at all."""

    view: View | None
    code: ExitCode
    trouble: str = ""


def config_file(given: str | None) -> Path:
    """Return the configuration that a verb means: as given, else the only one in /etc/xce-supervisor.

    Raises:
        ConfigError: there is none, or a choice.
    """
    if given:
        return Path(given)
    found = sorted(FOLDER.glob("*.toml"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"{FOLDER}: there is no configuration; write {FOLDER}/NAME.toml, or say --config FILE or {VARIABLE}=FILE"
        )
    names = ", ".join(path.name for path in found)
    raise ConfigError(f"{FOLDER}: holds several configurations ({names}); say --config FILE or {VARIABLE}=FILE")


def places_of(given: str | None) -> Places:
    """Return where the supervisor that a verb means keeps things. Raises ConfigError."""
    return load_places(config_file(given))


def status(places: Places) -> Said:
    """Return the picture, from the live supervisor, else from what it last wrote down. Takes two seconds at most."""
    try:
        view = msgspec.convert(ask(places.socket, "status", deadline_s=DEADLINE_S), View)
        return Said(view=view, code=ExitCode.OK if view.as_wanted else ExitCode.DEGRADED)
    except NotRunning as error:
        return Said(view=_last(places), code=ExitCode.NOT_RUNNING, trouble=f"not running: {error}")
    except NotResponding as error:
        return Said(view=_last(places), code=ExitCode.CANNOT_TELL, trouble=f"not responding: {error}")
    except NotAllowed as error:
        return Said(view=_last(places), code=ExitCode.CANNOT_TELL, trouble=str(error))
    except Refused as error:
        return Said(view=_last(places), code=ExitCode.CANNOT_TELL, trouble=f"refused: {error.text}")
    except msgspec.ValidationError as error:
        return Said(view=_last(places), code=ExitCode.CANNOT_TELL, trouble=f"answered something else than a status ({error})")


def tell(places: Places, verb: str, args: dict[str, Any]) -> Any:
    """Ask for something to be done and return the answer.

    Raises:
        click.exceptions.Exit: with the documented code, after one line on standard error.
    """
    try:
        return ask(places.socket, verb, args, deadline_s=DEADLINE_S)
    except NotRunning as error:
        raise failed(ExitCode.NOT_RUNNING, f"not running: {error}; start it first") from error
    except NotResponding as error:
        raise failed(ExitCode.CANNOT_TELL, f"not responding: {error}; whether it was done is not known") from error
    except NotAllowed as error:
        raise failed(ExitCode.REFUSED, str(error)) from error
    except Refused as error:
        raise failed(ExitCode.REFUSED, error.text) from error


def failed(code: ExitCode, text: str) -> click.exceptions.Exit:
    """Say `text` on standard error and return the exception that ends the program with `code`."""
    click.echo(f"xce-supervisor: {text}", err=True)
    return click.exceptions.Exit(code)


def who() -> str:
    """Return who asks, for people: the login name, and behind sudo the name of whoever called it."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = f"user {os.geteuid()}"
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} (as {name})" if caller and caller != name else name


def _last(places: Places) -> View | None:
    try:
        return msgspec.json.decode(places.last_status.read_bytes(), type=View)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
