"""TOML file and overrides to a checked `Config`; all problems are reported at once, each by its dotted name.

TOML of a stranger: an answer at once, whatever it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from forebay.config.tree import Config
from forebay.errors import ConfigError

_NO_FILE = "CONFIG"
"""The name, in messages, of a config that is no file: a user who has it in a file knows which one is meant."""


_MAX_PROBLEMS = 20
"""Of one file that a message lists."""


_MAX_INTEGER = 2**63
"""What TOML's integers are below, and Python's are not."""


Check = Callable[[str, Mapping[str, Any]], Sequence[str]]
"""What is wrong with the values of a section, by its name."""


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = (), check: Check | None = None
) -> Config:
    """Returns the config of a TOML file with `section.field=value` overrides applied; its paths are absolute.

    The settings of steps are taken as they are, unless `check` says what is wrong with them: `forebay.load_config`
    does.

    path: a file, or a mapping of what one would hold: sections of fields, lists or tuples, paths as strings or Path.
    overrides: values are TOML (`train.seed=3`, `source.languages=["en"]`); what is not TOML is taken as a string.
    Relative paths, in overrides too, are relative to the file's folder, those of a mapping to the current one.
    Raises ConfigError, which lists every unknown field (with the nearest name), wrong type and impossible value.
    """
    if isinstance(path, Mapping):
        document, path = _plain(path), Path.cwd() / _NO_FILE
    elif isinstance(path, (str, os.PathLike)):
        path = Path(path).absolute()
        document = _read(path)
    else:
        raise ConfigError(f"a config is the path of a TOML file or a dict, not {type(path).__name__}")
    for override in overrides:
        _apply_override(document, override)
    return parse_config(document, path=path, check=check)


def _plain(value: Any) -> Any:
    """Returns a copy of a mapping as TOML would give it; what TOML has not is left for `parse_config` to name."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_bytes().decode("utf-8"))
    except OSError as err:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
        advice = f"did you mean {near[0]}?" if near else "name a TOML file"
        raise ConfigError(f"cannot read config {path}: {err.strerror}; {advice}") from err
    except ValueError as err:
        raise ConfigError(f"{path} is not TOML: {err}") from err


def parse_config(document: Mapping[str, Any], *, path: Path, check: Check | None = None) -> Config:
    """Returns the config of a parsed document; `path` names it in messages and anchors its relative paths.

    check: of the settings of steps, see `load_config`.
    """
    from pydantic import TypeAdapter, ValidationError  # not at import: opening a cache must not load pydantic

    if "path" in document:
        raise ConfigError(f"{path}: unknown field path")
    _refuse_foreign(document, "", path)
    sections = {name: values for name, values in document.items() if check and isinstance(values, Mapping)}
    found = [line for name, values in sections.items() if check for line in check(name, values)]
    cause = None
    try:
        # As JSON: for a dataclass in strict mode pydantic wants an instance in Python, and a list is no tuple there.
        whole = {**{name: _with_settings(name, values) for name, values in document.items()}, "path": str(path)}
        config = TypeAdapter(Config).validate_json(json.dumps(whole), strict=True)
    except ValidationError as err:
        found = [*map(_describe, err.errors()), *found]
        cause = err
    if found:
        lines = [f"  {line}" for line in found[:_MAX_PROBLEMS]]
        more = [f"  and {len(found) - _MAX_PROBLEMS} more"] if len(found) > _MAX_PROBLEMS else []
        raise ConfigError("\n".join([f"{path} is not a forebay config:", *lines, *more])) from cause
    resolved: Config = _absolute(config, path.parent)
    return resolved


def _with_settings(section: str, values: Any) -> Any:
    """Returns the values of a section of a step with all that the section itself does not know as `settings`."""
    known = set(_field_names([section])) if isinstance(values, Mapping) else set()
    if "settings" not in known:
        return values
    own = {name: value for name, value in values.items() if name in known - {"settings"}}
    return {**own, "settings": {name: value for name, value in values.items() if name not in own}}


def _apply_override(document: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not last or not all(sections):
        raise ConfigError(f"override {override!r} is not section.field=value")
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        parsed = {"value": text}
    # A text with line breaks can parse as several settings; it is one value.
    value = parsed["value"] if len(parsed) == 1 else text
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    document[last] = value


def _refuse_foreign(value: Any, name: str, path: Path, *, depth: int = 0) -> None:
    """Raises ConfigError for what TOML has and no setting is: dates, times, NaN and infinity, tables in tables in tables."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: {name:.60} lies more than {MAX_DEPTH} levels deep, where no setting is")
    if isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_foreign(part, f"{name}.{key}" if name else key, path, depth=depth + 1)
    elif isinstance(value, list):
        for part in value:
            _refuse_foreign(part, name, path, depth=depth + 1)
    elif isinstance(value, int) and abs(value) > _MAX_INTEGER:  # Python itself refuses to write out the longest ones
        raise ConfigError(f"{path}: {name} is an integer of {value.bit_length()} bits, which no setting can be")
    elif not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{path}: {name} is {value}, which no setting can be")


def _describe(problem: Any) -> str:
    is_unknown = (
        problem["type"] == "unexpected_keyword_argument"
    )  # then its last part is what the user wrote, never a tag
    names = [
        str(part) for part in problem["loc"] if not _is_union_tag(part) or (is_unknown and part == problem["loc"][-1])
    ]
    dotted = ".".join(names) or "config"
    if is_unknown:
        near = difflib.get_close_matches(names[-1], _field_names(names[:-1]), n=1)
        return f"{dotted}: unknown field" + (f"; did you mean {'.'.join([*names[:-1], near[0]])}?" if near else "")
    if problem["type"] in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return f"{dotted}: missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{dotted}: {message}"
    return f"{dotted}: {message}, got {problem['input']!r:.200}"


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "TextConfig", "PlanConfig", "VisionConfig"})


def _section_type(sections: list[str]) -> type | None:
    owner: type | None = Config
    for name in sections:
        if owner is not None and not name.isdecimal():  # a number is a place in a list
            owner = _dataclass_in(get_type_hints(owner).get(name))
    return owner


def _dataclass_in(hint: Any) -> type | None:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return next((found for option in getattr(hint, "__args__", ()) if (found := _dataclass_in(option))), None)


def _field_names(sections: list[str]) -> list[str]:
    owner = _section_type(sections)
    return [f.name for f in dataclasses.fields(owner) if f.name != "path"] if owner else []


def _absolute(node: Any, folder: Path) -> Any:
    """Returns a part of the tree with all its paths absolute."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.metadata.get("path"):
            changes[field.name] = _absolute_path(value, folder)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _absolute(value, folder)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            changes[field.name] = tuple(_absolute(part, folder) for part in value)
    return dataclasses.replace(node, **changes) if changes else node


def _absolute_path(value: Any, folder: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_absolute_path(part, folder) for part in value)
    return os.path.normpath(folder / value) if isinstance(value, str) else value


MAX_DEPTH = 16
"""Levels of tables and lists; settings lie three deep."""


_STRINGS = re.compile(r'''"""(?:[^\\]|\\.)*?"""|'{3}.*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|\#[^\n]*+''', re.DOTALL)


_LONG_KEY = re.compile(rf"(?:\.[ \t]*+[\w\-\"]++[ \t]*+){{{MAX_DEPTH},}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the document of a TOML text.

    Raises ValueError for what is no TOML, and where a key has more than `MAX_DEPTH` parts or values lie too deep to be
    read.
    """
    # tomllib takes time with the square of a key's parts: minutes for 100,000 of them.
    if (found := _LONG_KEY.search(_STRINGS.sub(_stand_in, text))) is not None:
        raise ValueError(f"a key has more than {MAX_DEPTH} parts, {found[0]:.40}... among them")
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError("its values lie in one another too deep to be read") from err


def _stand_in(found: re.Match[str]) -> str:
    # A quoted part of a key stays a part; dots inside of strings and comments separate nothing.
    return "" if found[0].startswith("#") else '"'
