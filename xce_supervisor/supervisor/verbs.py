"""What the control socket is asked, and what each verb does (docs/rules.md S22 to S24)."""

from __future__ import annotations

import pwd
import time
from typing import Any, Protocol

from xce_supervisor.core import supervision as sup
from xce_supervisor.core.child_words import Pause, PauseChanged, RestartAsked
from xce_supervisor.supervisor.asking import Refused
from xce_supervisor.supervisor.control import Caller
from xce_supervisor.supervisor.driver import Driver
from xce_supervisor.supervisor.records import Records
from xce_supervisor.supervisor.view import View

_WHY_MAX = 300


class Asked(Protocol):
    """What the verbs need of the program."""

    @property
    def driver(self) -> Driver: ...

    @property
    def records(self) -> Records: ...

    def status(self) -> View: ...

    def reload(self) -> str: ...


class Verbs:
    """Answers from memory, at once."""

    def __init__(self, program: Asked) -> None:
        self._program = program

    def handle(self, verb: str, args: dict[str, Any], caller: Caller) -> Any:
        """Return the result of a verb. Raises Refused with a word for programs and a text for people."""
        match verb:
            case "status":
                return self._program.status()
            case "why":
                unit = self._unit(args)
                return self._program.status().unit(unit)
            case "events":
                return {unit: list(events) for unit, events in self._program.records.recent.items()}
            case "pause":
                pause = Pause(_by(args, caller), _text(args.get("why", "")), time.time())
                return self._each(args, PauseChanged(pause))
            case "resume":
                return self._each(args, PauseChanged(None))
            case "restart":
                return self._each(args, RestartAsked(_by(args, caller)))
            case "reload":
                problem = self._program.reload()
                if problem:
                    raise Refused(problem, "config")
                return {}
            case _:
                raise Refused(f"unknown verb {verb[:40]!r}", "unknown verb")

    def _each(self, args: dict[str, Any], event: PauseChanged | RestartAsked) -> dict[str, Any]:
        unit = self._unit(args)
        self._program.driver.feed(sup.ChildHappened(unit, event))
        return {"unit": unit}

    def _unit(self, args: dict[str, Any]) -> str:
        unit = args.get("unit")
        known = sorted(self._program.driver.state.children)
        if not isinstance(unit, str) or unit not in known:
            raise Refused(f"unknown unit {str(unit)[:60]!r}; known are {', '.join(known) or 'none'}", "unknown unit")
        return unit


def _by(args: dict[str, Any], caller: Caller) -> str:
    """Return who asks, for people: the kernel's word, and before it the name that a client gave (who stands behind sudo)."""
    name, told = _name(caller), args.get("by")
    if not isinstance(told, str) or not told or told == name:
        return name
    return f"{told[:64]} (as {name})"


def _name(caller: Caller) -> str:
    """Return who asks, as the kernel tells it; the number where it has no name here."""
    try:
        return pwd.getpwuid(caller.uid).pw_name
    except KeyError:
        return f"uid {caller.uid}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _WHY_MAX:
        raise Refused(f"why is a text of at most {_WHY_MAX} characters", "usage")
    return value
