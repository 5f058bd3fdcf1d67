"""Faults that a reference scheduler can be told to have, for tests and the demo. docs/scheduler.md lists them.

They are given as one text, e.g. "deaf_term,slow_ack=500", by `--fault` or the environment variable XCE_SCHEDULER_FAULTS.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from xce_supervisor.errors import ConfigError

SLOW_ACK_MS_MAX = 3_600_000


@dataclass(frozen=True, slots=True)
class Faults:
    """Which faults are on.

    deaf_term: SIGTERM is ignored. ignore_exit: the exit push is ignored. no_self_check: what the role check finds, and a lost
    connection, are ignored. never_join: never connects. never_ack: acts and never acknowledges. slow_ack: milliseconds between
    acting and acknowledging. grandchild: leaves a process in a session of its own that outlives its parent by up to a minute.
    """

    deaf_term: bool = False
    ignore_exit: bool = False
    no_self_check: bool = False
    never_join: bool = False
    never_ack: bool = False
    slow_ack: int = 0
    grandchild: bool = False


def parse_faults(text: str) -> Faults:
    """Return the faults that `text` names, "" for none. Raises ConfigError naming the word and what is possible."""
    faults = Faults()
    names = {field.name for field in fields(Faults)}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = word.partition("=")
        if name not in names:
            raise ConfigError(f"unknown scheduler fault {name!r}: use one of {', '.join(sorted(names))}")
        if name == "slow_ack":
            if not value.isdigit() or not 1 <= int(value) <= SLOW_ACK_MS_MAX:
                raise ConfigError(f"scheduler fault {word!r}: slow_ack takes milliseconds from 1 to {SLOW_ACK_MS_MAX}")
            faults = replace(faults, slow_ack=int(value))
        elif given:
            raise ConfigError(f"scheduler fault {word!r}: {name} takes no value")
        else:
            faults = replace(faults, **{name: True})
    return faults
