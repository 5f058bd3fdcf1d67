"""TOML files to frozen values that were checked whole before anything uses them (docs/rules.md S25)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xce_supervisor.config.load import load, load_places, places, shipped_folder, shipped_units
from xce_supervisor.config.settings import Config, Places
from xce_supervisor.config.unit import Unit

if TYPE_CHECKING:
    from xce_supervisor.config.difference import Difference, UnitChange, diff
    from xce_supervisor.config.launch import Launch, launch
    from xce_supervisor.config.policies import role_policy, unit_policy

__all__ = [
    "Config",
    "Difference",
    "Launch",
    "Places",
    "Unit",
    "UnitChange",
    "diff",
    "launch",
    "load",
    "load_places",
    "places",
    "role_policy",
    "shipped_folder",
    "shipped_units",
    "unit_policy",
]

# Only a running supervisor needs these and the core that they bring: `status` must answer at once.
_LATER = {
    "Difference": "difference",
    "UnitChange": "difference",
    "diff": "difference",
    "Launch": "launch",
    "launch": "launch",
    "role_policy": "policies",
    "unit_policy": "policies",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found  # also where the module of that name was just set here by the import itself
    return found
