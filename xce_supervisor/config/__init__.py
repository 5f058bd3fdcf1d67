"""TOML files to frozen values that were checked whole before anything uses them (docs/rules.md S25)."""

from xce_supervisor.config.difference import Difference, UnitChange, diff
from xce_supervisor.config.launch import Launch, launch
from xce_supervisor.config.load import load, load_places, places, shipped_folder, shipped_units
from xce_supervisor.config.policies import role_policy, unit_policy
from xce_supervisor.config.settings import Config, Places
from xce_supervisor.config.unit import Unit

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
