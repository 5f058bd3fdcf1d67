"""From files to one checked configuration, whole or not at all (docs/rules.md S25)."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

import msgspec

from xce_supervisor.config import relations
from xce_supervisor.config.decode import decode, read
from xce_supervisor.config.problem import Problem, refuse
from xce_supervisor.config.settings import Config, Controller, Places, Supervisor, SupervisorFile, Tls, TlsPair, UnitFolders
from xce_supervisor.config.unit import Unit

OPTIONAL_FOLDER = Path("/etc/xce-supervisor/units")
SHIPPED = Path("shipped")
UNITS_MAX = 200


def shipped_folder() -> Path:
    """Return the folder of the unit files that come with the program, in a checkout and in an installation alike."""
    # A wheel is unpacked on installation, so this is a real folder: /proc and the spawn need no copy.
    return Path(str(importlib.resources.files("xce_supervisor"))) / "units"


def shipped_units() -> list[Path]:
    """Return the unit files that come with the program, in order of name."""
    return sorted(shipped_folder().glob("*.toml"))


def load(path: str | os.PathLike[str]) -> Config:
    """Return the configuration that the file at `path` and its unit files give.

    Raises:
        ConfigError: one line for each thing that is wrong, in any of the files, with file, key and reason.
    """
    file = Path(path).absolute()
    document, problems = read(file)
    refuse(problems)
    value, problems = decode(document, SupervisorFile, file)
    refuse(problems)
    assert value is not None
    problems = list(relations.of_settings(value, file))
    folder = file.parent
    supervisor = _settled(value.supervisor, value.controller.id, folder)
    folders = msgspec.structs.replace(value.units, directories=_directories(value.units, file, problems))
    units, files = _units(folders, problems)
    config = Config(
        file=file,
        supervisor=supervisor,
        controller=value.controller,
        tls=_tls(value.tls, folder),
        role=value.role,
        folders=folders,
        units=tuple(units),
    )
    refuse([*problems, *relations.between(config, files)])
    return config


def load_places(path: str | os.PathLike[str]) -> Places:
    """Return where the supervisor of the file at `path` keeps what verbs need.

    Looks at [supervisor] and [controller] alone, so that `status` still answers when the rest was broken under a running
    supervisor.

    Raises:
        ConfigError: even these cannot be read.
    """
    file = Path(path).absolute()
    document, problems = read(file)
    refuse(problems)
    parts: dict[str, object] = {}
    for name, kind in (("controller", Controller), ("supervisor", Supervisor)):
        section = document.get(name, {})
        if not isinstance(section, dict):
            refuse([Problem(file, name, f"must be a section: write [{name}]")])
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        part, wrong = decode({key: given for key, given in section.items() if key in known}, kind, file, name)
        refuse(wrong)
        parts[name] = part
    controller, supervisor = parts["controller"], parts["supervisor"]
    assert isinstance(controller, Controller) and isinstance(supervisor, Supervisor)
    supervisor = _settled(supervisor, controller.id, file.parent)
    return Places(
        file=file,
        controller_id=controller.id,
        controller_address=controller.address,
        state_dir=supervisor.state_dir,
        run_dir=supervisor.run_dir,
    )


def places(config: Config) -> Places:
    """Return the places of a configuration that is loaded."""
    return Places(
        file=config.file,
        controller_id=config.controller.id,
        controller_address=config.controller.address,
        state_dir=config.supervisor.state_dir,
        run_dir=config.supervisor.run_dir,
    )


def _settled(supervisor: Supervisor, controller_id: str, folder: Path) -> Supervisor:
    def full(path: Path) -> Path:
        return Path(os.path.normpath(folder / str(path).replace("{controller_id}", controller_id)))

    return msgspec.structs.replace(supervisor, state_dir=full(supervisor.state_dir), run_dir=full(supervisor.run_dir))


def _tls(tls: Tls, folder: Path) -> Tls:
    def full(path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.normpath(folder / path))

    children = {
        unit: TlsPair(cert=Path(os.path.normpath(folder / pair.cert)), key=Path(os.path.normpath(folder / pair.key)))
        for unit, pair in tls.children.items()
    }
    return msgspec.structs.replace(tls, ca=full(tls.ca), cert=full(tls.cert), key=full(tls.key), children=children)


def _directories(folders: UnitFolders, file: Path, problems: list[Problem]) -> tuple[Path, ...]:
    found: list[Path] = []
    for named in folders.directories:
        if named == SHIPPED:
            found.append(shipped_folder())
            continue
        path = Path(os.path.normpath(file.parent / named))
        if path.is_dir():
            found.append(path)
        elif path != OPTIONAL_FOLDER:
            problems.append(Problem(file, "units.directories", f"{path} is not a folder"))
    return tuple(found)


def _units(folders: UnitFolders, problems: list[Problem]) -> tuple[list[Unit], dict[str, Path]]:
    """Return the units in order of name and the file of each; later folders override earlier ones by file name."""
    chosen: dict[str, Path] = {}
    for folder in folders.directories:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".toml") and not name.startswith("."))
        except OSError as error:
            problems.append(Problem(folder, "", f"cannot be read: {error.strerror}"))
            continue
        chosen.update({name: folder / name for name in names})
    if len(chosen) > UNITS_MAX:
        problems.append(Problem(folders.directories[-1], "", f"{len(chosen)} unit files are more than {UNITS_MAX}"))
        return [], {}
    units: list[Unit] = []
    files: dict[str, Path] = {}
    for _, file in sorted(chosen.items()):
        document, wrong = read(file)
        if not wrong:
            unit, wrong = decode(document, Unit, file)
            if unit is not None:
                wrong = list(relations.of_unit(unit, file))
                if not wrong:
                    units.append(unit)
                    files[unit.name] = file
        problems += wrong
    return units, files
