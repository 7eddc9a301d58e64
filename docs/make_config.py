"""Writes `docs/config.md` from the settings in `forebay/config` and `forebay/steps`, and from their docstrings.

    python docs/make_config.py      (`make config-docs`)

A field without a docstring ends it. `tests/test_documents.py` compares the page with what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forebay.config.plan import KINDS
from forebay.config.tree import Config
from forebay.steps.table import AUDIO, IMAGE, OF_IMAGES, TEXT, Table, step_class
from forebay.steps.text.normal.normal_step import NORMAL, normal_step

PAGE = Path(__file__).with_name("config.md")

INTRODUCTION = """\
# The config, field by field

<!-- Written by `make config-docs` from the docstrings in `forebay/config` and `forebay/steps`: change them there. -->

A config is one TOML file, or a dict of the same for `forebay.load_config`. Paths are relative to the file; those of a
dict are relative to the current folder. A setting of the command line wins over the file: `--set loader.seed=3`.

What changes a stored value is in the cache's key, by its content. `[layout]`, `[plan]`, `[filter]`, `[loader]`,
`[mixture]`, `[train]` and `[run]` are not in that key; a plan has a key of its own on top. An unknown field is refused,
with the nearest name.

`[plan]` has a `kind`, which says what other fields there are. Left out, the kind is `"bucket"`.
"""

STEPS: dict[str, tuple[Table, str]] = {"audio": (AUDIO, "features"), "text": (TEXT, "prompt"), "vision": (IMAGE, "")}
"""By section: the steps that it chooses from, and the field that names one."""

TYPES = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}

HEAD = ("| field | type | default | meaning |", "|---|---|---|---|")


def page() -> str:
    """Returns the text of `docs/config.md`."""
    return "\n".join([INTRODUCTION, *_section(Config, "")])


def _section(owner: Any, name: str) -> Iterator[str]:
    """Yields the lines of a section: what it is, its fields in a table, and the sections inside of it."""
    hints, documented = get_type_hints(owner), _docstrings(owner)
    inner: list[tuple[str, Any]] = []
    yield from HEAD
    for field in dataclasses.fields(owner):
        if (field.name, name in STEPS) == ("settings", True):
            continue
        dotted = f"{name}.{field.name}" if name else field.name
        sections = _dataclasses_in(hints[field.name])
        if sections:
            is_list = tuple in map(get_origin, (hints[field.name], *get_args(hints[field.name])))
            inner += [(f"[[{dotted}]]" if is_list else f"[{dotted}]", section) for section in sections]
        elif (owner, field.name) != (Config, "path") and (name, field.name) != ("plan", "kind"):
            yield _row(field, hints[field.name], documented[field.name])
    if name in STEPS:
        yield from _step_settings(*STEPS[name])
    if name == "text":
        yield from _step_settings(OF_IMAGES, "prompt", of=" beside images of a processor")
        yield from _normal_steps()
    for heading, section in inner:
        kind = next((f' with `kind = "{kind}"`' for kind, settings in KINDS.items() if settings is section), "")
        yield from ("", f"## `{heading}`{kind}", "", _joined(section.__doc__), "")
        yield from _section(section, heading.strip("[]"))


def _step_settings(table: Table, key: str, *, of: str = "") -> Iterator[str]:
    """Yields the settings of every step of a section, which stand in the section beside its own fields.

    of: what is said of all of them behind their names.
    """
    for name in table:
        step = step_class(table, name)
        hints, documented = get_type_hints(step), _docstrings(step)
        yield from ("", f'### `{key} = "{name}"`{of}' if key else f"### `{name}`", "", _joined(step.__doc__ or ""), "")
        settings = [field for field in dataclasses.fields(step) if field.init]
        rows = [
            _row(field, hints[field.name], documented[field.name])
            for field in settings
            if field.name not in {*step.given, "version"}
        ]
        yield from ([*HEAD, *rows] if rows else ["No settings."])


def _normal_steps() -> Iterator[str]:
    """Yields the names that `text.normalize` takes, and what each does."""
    yield from ("", "### Steps of `normalize`", "", "They run in the order in which they are named.", "")
    yield from ("| step | what it does |", "|---|---|")
    for entry in (*NORMAL, "file.py:function"):
        yield f'| `"{entry}"` | {_joined(normal_step(entry).__doc__ or "").replace("|", chr(92) + "|")} |'


def _row(field: dataclasses.Field[Any], hint: Any, meaning: str) -> str:
    cells = (f"`{field.name}`", _type(hint), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _docstrings(owner: Any) -> dict[str, str]:
    """Returns the docstring of every field, inherited ones too."""
    found: dict[str, str] = {}
    for cls in reversed(owner.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for statement, behind in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(behind, ast.Expr):
                found[statement.target.id] = _joined(ast.literal_eval(behind.value))  # type: ignore[union-attr]
    return found


def _joined(text: str) -> str:
    return " ".join(text.split())


def _dataclasses_in(hint: Any) -> list[Any]:
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for option in get_args(hint) for found in _dataclasses_in(option)]


def _type(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(option)}`" for option in options)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type(option) for option in options if option is not NoneType)
    if get_origin(hint) is tuple:
        return f"list of {_type(options[0])}"
    if get_origin(hint) is dict:
        return f"table of {_type(options[1])}"
    if get_origin(hint) is Mapping:
        return "table"
    return TYPES[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        example = field.metadata.get("example")
        return "required" + (f", for example `{example}`" if example else "")
    if field.default in (None, ()):
        return "none"
    return f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
