"""Writes docs/configuration.md from the settings themselves: `python -m xce_supervisor.config.reference > docs/configuration.md`.

A test holds the file to what this prints, so that no key is without its page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from xce_supervisor.config.command import PLACEHOLDERS
from xce_supervisor.config.decode import description_of, is_struct, plain
from xce_supervisor.config.settings import SupervisorFile
from xce_supervisor.config.unit import Unit

_HEAD = """# Configuration

Written by `python -m xce_supervisor.config.reference`; do not edit. Every key has its unit in its name (`_s`
seconds, `_ms` milliseconds, `_bytes`). An unknown key, a value out of its bounds or a contradiction is refused with file, key and
reason, and nothing of the file is used (docs/rules.md S25). `xce-supervisor check` says what a configuration would do.
"""

_SETTINGS = """
## supervisor.toml

One file a controller, e.g. /etc/xce-supervisor/c1.toml. The smallest one:

```toml
[controller]
id = "c1"
address = "127.0.0.1:7400"

[tls]
ca = "/etc/xce-supervisor/pki/ca.pem"
cert = "/etc/xce-supervisor/pki/supervisor-c1.pem"
key = "/etc/xce-supervisor/pki/supervisor-c1.key"

[tls.children.scheduler]
cert = "/etc/xce-supervisor/pki/scheduler-c1.pem"
key = "/etc/xce-supervisor/pki/scheduler-c1.key"
```
"""

_UNITS = """
## Unit files

One file a unit, NAME.toml, in the folders of `[units] directories`. A file in a later folder replaces one of the same name
whole. Any program can be a unit; XCE's own scheduler is run by a scheduler.toml of yours with another `command`.
"""


def page() -> str:
    """Return docs/configuration.md."""
    lines = [_HEAD, _SETTINGS, *_sections(SupervisorFile), _UNITS, *_sections(Unit)]
    lines += ["\n### Placeholders\n", "| placeholder | stands for |", "|---|---|"]
    lines += [f"| `{{{name}}}` | {text} |" for name, text in PLACEHOLDERS.items()]
    return "\n".join(lines) + "\n"


def _sections(kind: type[Struct]) -> Iterator[str]:
    for section in msgspec.structs.fields(kind):
        inner = plain(section.type)
        if is_struct(section.type):
            yield f"\n### [{section.encode_name}]\n"
            yield f"{(inner.__doc__ or '').strip()}\n"
            yield "| key | values | default | meaning |"
            yield "|---|---|---|---|"
            for field in msgspec.structs.fields(inner):
                cells = (f"`{field.encode_name}`", _values(field.type), _default(field), description_of(field.type))
                yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        else:
            yield f"\n### [{section.encode_name}]\n"
            yield f"{description_of(section.type)}\n"


def _values(kind: Any) -> str:
    inner = plain(kind)
    bounds = next((part for part in getattr(kind, "__metadata__", ()) if isinstance(part, Meta)), Meta())
    if get_origin(inner) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(inner))
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", Path: "path"}
    text = names.get(inner) or _compound(inner)
    if bounds.ge is not None and bounds.le is not None:
        text += f", {_number(bounds.ge)} to {_number(bounds.le)}"
    elif bounds.ge is not None:
        text += f", at least {_number(bounds.ge)}"
    return text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else format(value, "g")


def _compound(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "list of paths" if get_args(kind)[0] is Path else "list of texts"
    if get_origin(kind) is dict:
        return "table"
    return "path"  # Path | None


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value == {} or value == "":
        return "none"
    if isinstance(value, tuple):
        return "`" + json.dumps([str(one) for one in value]) + "`"
    if isinstance(value, bool | int | float):
        return f"`{str(value).lower() if isinstance(value, bool) else format(value, 'g') if value < 1e6 else value}`"
    return f"`{json.dumps(str(value))}`"


if __name__ == "__main__":
    print(page(), end="")
