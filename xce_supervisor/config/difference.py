"""What changed between two configurations, so that a reload applies only that (docs/rules.md S25)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from xce_supervisor.config.settings import Config
from xce_supervisor.config.unit import Unit

# Another child is needed for these; every other key of a unit holds for a running child from now on.
NEEDS_RESTART = ("unit.", "limits", "environment.", "output.", "readiness.kind")
# These are the supervisor's own identity and places: they hold from its next start.
NEEDS_NEW_SUPERVISOR = ("supervisor.state_dir", "supervisor.run_dir", "controller.", "folders.cgroup_root")


class UnitChange(Struct, frozen=True, kw_only=True):
    """keys: what changed, dotted. restart: a running child must be replaced for it."""

    name: str
    keys: tuple[str, ...]
    restart: bool


class Difference(Struct, frozen=True, kw_only=True):
    """settings: keys of supervisor.toml that can be applied now. refused: those that need another supervisor process."""

    added: tuple[Unit, ...]
    removed: tuple[str, ...]
    changed: tuple[UnitChange, ...]
    settings: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Is there nothing to apply?"""
        return not (self.added or self.removed or self.changed or self.settings or self.refused)


def diff(old: Config, new: Config) -> Difference:
    """Return what must be done to get from `old` to `new`. Units come in order of name."""
    before = {unit.name: unit for unit in old.units}
    after = {unit.name: unit for unit in new.units}
    changed: list[UnitChange] = []
    for name in sorted(before.keys() & after.keys()):
        keys = _keys(before[name], after[name])
        if keys:
            changed.append(UnitChange(name=name, keys=keys, restart=any(key.startswith(NEEDS_RESTART) for key in keys)))
    keys = tuple(
        key
        for section in ("supervisor", "controller", "tls", "role", "folders")
        for key in _keys(getattr(old, section), getattr(new, section), f"{section}.")
    )
    return Difference(
        added=tuple(after[name] for name in sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(changed),
        settings=tuple(key for key in keys if not key.startswith(NEEDS_NEW_SUPERVISOR)),
        refused=tuple(key for key in keys if key.startswith(NEEDS_NEW_SUPERVISOR)),
    )


def _keys(old: Any, new: Any, prefix: str = "") -> tuple[str, ...]:
    found: list[str] = []
    for field in msgspec.structs.fields(old):
        a, b = getattr(old, field.name), getattr(new, field.name)
        if a == b:
            continue
        key = prefix + field.encode_name
        found += _keys(a, b, f"{key}.") if isinstance(a, Struct) else [key]
    return tuple(found)
