"""Holds the house together: floors, purity, sizes, places, and what a program refuses to run without (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "xce_supervisor"
PURE_IMPORTS = {"__future__", "typing", "dataclasses", "enum", "collections.abc", "math"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
LINES_MAX = 450
FUNCTION_LINES_MAX = 60
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "managers"}


def _files() -> list[Path]:
    generated = ("_pb2.py", "_pb2_grpc.py")
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.name.endswith(generated))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _floors() -> list[set[str]]:
    """The floors as pyproject.toml gives them, top first."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        (contract,) = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    assert contract["exhaustive"] is True
    return [{room.strip(" ()") for room in layer.split("|")} for layer in contract["layers"]]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in a file, also inside functions and under TYPE_CHECKING: that is where circles hide."""
    module = _module(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            if base == "xce_supervisor":
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            else:
                yield node.lineno, base


def test_imports_run_down_only() -> None:
    """No room imports a room above it or beside it."""
    floor_of = {room: height for height, floor in enumerate(_floors()) for room in floor}
    wrong: list[str] = []
    for path in _files():
        own = _room(_module(path))
        for line, name in _imports(path):
            other = _room(name) if name.startswith("xce_supervisor.") else ""
            if not own or other in ("", own, "__version__"):
                continue
            if floor_of[other] <= floor_of[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is not below")
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_only_what_is_pure() -> None:
    """The core sees no clock, no disk, no network and no chance: an allow-list, because a deny-list misses one."""
    wrong: list[str] = []
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        for line, name in _imports(path):
            if name not in PURE_IMPORTS and not name.startswith("xce_supervisor.core"):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
            if isinstance(node, ast.Global | ast.AsyncFunctionDef | ast.Await):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} holds {type(node).__name__}")
    assert not wrong, "\n".join(wrong)


def test_every_file_is_placed() -> None:
    """Each module lives in a room of the floor plan, each folder is a package, and each file says what it is."""
    rooms = set().union(*_floors())
    wrong: list[str] = []
    for path in _files():
        module = _module(path)
        if _room(module) not in rooms | {""}:
            wrong.append(f"{path.relative_to(ROOT)} is in no room of pyproject.toml's floors")
        if not (path.parent / "__init__.py").exists():
            wrong.append(f"{path.parent.relative_to(ROOT)} has no __init__.py, so no wheel would carry it")
        if VAGUE_NAMES & set(module.split(".")):
            wrong.append(f"{path.relative_to(ROOT)} has a name that says nothing")
        text = path.read_text(encoding="utf-8")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            wrong.append(f"{path.relative_to(ROOT)} does not say in its first line what it is")
    assert not wrong, "\n".join(wrong)


def test_no_room_is_crowded() -> None:
    """A file fits in the head, and so does a function (without its docstring)."""
    wrong: list[str] = []
    for path in _files():
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > LINES_MAX:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines; find the part with a name of its own")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                doc = ast.get_docstring(node) is not None
                start = (first.end_lineno or first.lineno) if doc else node.lineno
                if (node.end_lineno or start) - start > FUNCTION_LINES_MAX:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} is long")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("program", ["xce_supervisor", "xce_supervisor.cli.supervisor", "xce_supervisor.cli.testbed"])
def test_a_program_refuses_to_run_without_its_assertions(program: str) -> None:
    """`python -O` removes the invariants that are checked after every step: refused with the configuration code."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", program, "--version"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 78, done
    assert "without -O" in done.stderr
    assert "Traceback" not in done.stderr
