"""What exactly is started for a unit: its arguments, environment and output file with all placeholders filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from xce_supervisor.config.command import fill, fill_all, find_program
from xce_supervisor.config.settings import Config
from xce_supervisor.config.unit import Unit
from xce_supervisor.core.words import Binding


class Launch(Struct, frozen=True, kw_only=True):
    """What a spawn needs of a unit.

    argv: argv[0] is an absolute path where a program was found, else the name as it was written, for the spawn to complain about.
    environment: whole. output_file: where output goes if it goes to a file; for kind `journal`, where it goes when there is none.
    limits: (soft, hard) by name, -1 for unlimited.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    output_file: Path
    cwd: Path
    umask: int
    user: str
    group: str
    limits: dict[str, tuple[int, int]]


def launch(config: Config, unit: Unit, binding: Binding, spawn_token: str, inherited: Mapping[str, str]) -> Launch:
    """Return what is started for `unit`. inherited: the supervisor's own environment, of which `pass` names the variables."""
    ca, cert, key = config.tls_of(unit.name)
    values = {
        "controller_address": config.controller.address,
        "controller_id": config.controller.id,
        "instance_id": binding.instance_id,
        "term": str(binding.term),
        "spawn_token": spawn_token,
        "tls_ca": ca,
        "tls_cert": cert,
        "tls_key": key,
        "state_dir": str(config.supervisor.state_dir),
    }
    environment = {name: inherited[name] for name in unit.environment.pass_ if name in inherited}
    environment.update({name: fill(text, values) for name, text in unit.environment.set.items()})
    argv = fill_all(unit.unit.command, values)
    argv[0] = find_program(argv[0], environment.get("PATH")) or argv[0]
    named = fill(unit.output.path, values) or f"output/{unit.name}.log"
    return Launch(
        argv=tuple(argv),
        environment=environment,
        output_file=Path(os.path.normpath(config.supervisor.state_dir / named)),
        cwd=unit.unit.cwd,
        umask=int(unit.unit.umask, 8),
        user=unit.unit.user,
        group=unit.unit.group,
        limits=unit.limit_pairs,
    )
