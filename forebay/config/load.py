"""TOML and overrides become a checked `Config`; all problems are reported at once, each by its dotted name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from forebay.config.plan import KINDS
from forebay.config.pretrained_folder import model_place, url_problem
from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import Config
from forebay.errors import ConfigError

_NO_FILE = "CONFIG"
"""The name, in messages, of a config that is no file: a user who has it in a file knows which one is meant."""
OF_NO_FILE = {"path", "given"}
"""Fields of `Config` that no file has."""
_MAX_PROBLEMS = 20
"""Problems of one file that a message lists."""
_TO_LOADER = (
    *("cache", "cache_dir", "verify", "seed", "dtype", "crop_s", "pixels", "varlen"),
    *("num_threads", "prefetch", "pin_memory", "max_open_shards"),
)
_TO_MIXTURE = ("column", "weights", "temperature", "batches", "exhausted")
_COLUMNS = ("audio", "text", "language", "image", "question", "answer", "messages")
RENAMED = {
    **{f"train.{name}": f"loader.{name}" for name in _TO_LOADER},
    **{f"train.mixture_{name}": f"mixture.{name}" for name in _TO_MIXTURE},
    **{f"{section}.pack_shapes": "plan.shapes" for section in ("train", "loader")},
    **{f"{section}.patch_classes": "plan.shapes" for section in ("train", "loader")},
    "train.mixture": "mixture.source",
    "train.asr_ratio": "mixture.asr_ratio",
    **{f"source.{name}_column": f"source.columns.{name}" for name in _COLUMNS},
}
"""Today's name of every setting that had another one, for the message that refuses the old name."""

_INSTEAD = [("max_steps", "epochs"), ("warmup_steps", "warmup_ratio")]
"""Settings of `[train]`; each takes the place of the other if it is given as an override."""
_OWN_SUFFIXES = (".toml", ".cfg", ".conf", ".ini")
_MAX_BYTES = 16 * 1024 * 1024
_MAX_INTEGER = 2**63
"""TOML's integers are below this, Python's are not."""
Check = Callable[[str, Mapping[str, Any]], Sequence[str]]
"""What is wrong with the values of a section, by its name."""


def read_config(
    path: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = (), check: Check | None = None
) -> Config:
    """Returns the config of a TOML file with `section.field=value` overrides applied; its paths are absolute.

    The settings of steps are taken as they are, unless `check` says what is wrong with them: `forebay.load_config`
    does.

    path: a file, or a mapping of what one would hold: sections of fields, lists or tuples, paths as strings or Path.
    overrides: values are TOML (`loader.seed=3`, `source.languages=["en"]`); what is not TOML is taken as a string.
    Relative paths, in overrides too, are relative to the file's folder, those of a mapping to the current one.
    Raises ConfigError, which lists every unknown field (with the nearest name), wrong type and impossible value.
    """
    if isinstance(path, Mapping):
        document, path = _plain(path), Path.cwd() / _NO_FILE
    elif isinstance(path, (str, os.PathLike)):
        place = url_or_path(path)
        if is_url(place):
            raise ConfigError(
                f"a config is read from this machine, and {place} is a URL; copy it here and name the file",
                code="FB103",
            )
        path = Path(place).absolute()
        document = _read(path)
    else:
        raise ConfigError(f"a config is the path of a TOML file or a dict, not {type(path).__name__}")
    allowed = _allow_code(document)
    for override in overrides:
        _apply_override(document, override)
        if _allow_code(document) != allowed:
            raise ConfigError(
                f"override {override!r}: run.allow_code is what the config's own file says; if you trust the code that "
                "it names, write it under [run] there",
                code="FB110",
            )
    return dataclasses.replace(parse_config(document, path=path, check=check), given=tuple(overrides))


def _plain(value: Any) -> Any:
    """Returns a copy of a mapping as TOML would give it; what TOML has not is left for `parse_config` to name."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir() or (path.is_file() and path.stat().st_size > _MAX_BYTES):
        raise ConfigError(_no_config(path), code="FB136")
    try:
        return parse_toml(path.read_bytes().decode("utf-8-sig"))
    except OSError as err:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
        advice = f"did you mean {near[0]}?" if near else "name a TOML file"
        raise ConfigError(f"cannot read config {path}: {err.strerror}; {advice}", code="FB103") from err
    except ValueError as err:
        if path.suffix not in _OWN_SUFFIXES:
            raise ConfigError(_no_config(path, f" ({err})"), code="FB136") from err
        raise ConfigError(f"{path} is not TOML: {err}", code="FB103") from err


def _no_config(path: Path, why: str = "") -> str:
    """Says what to do with data, or with a cache, that was given in the place of a config."""
    name = shlex.quote(os.path.relpath(path))
    if (path / "metadata.json").is_file():
        return f"{path} is a cache, and a config (a TOML file) is wanted; to look at it: forebay inspect {name}"
    return f"{path} is no config, which is a TOML file{why}; if it is data, write its config with: forebay init {name}"


def parse_config(document: Mapping[str, Any], *, path: Path, check: Check | None = None) -> Config:
    """Returns the config of a parsed document. path: names it, and anchors relative paths. check: see `read_config`."""
    from pydantic import ValidationError  # not at import: opening a cache must not load pydantic

    if own := OF_NO_FILE & document.keys():
        raise ConfigError(f"{path}: unknown field {min(own)}", code="FB101")
    _refuse_foreign(document, "", path)
    sections = {name: values for name, values in document.items() if check and isinstance(values, Mapping)}
    found = [line for name, values in sections.items() if check for line in check(name, values)]
    cause = None
    try:
        # As JSON: for a dataclass in strict mode pydantic wants an instance in Python, and a list is no tuple there.
        whole = {**{name: _with_settings(name, values) for name, values in document.items()}, "path": str(path)}
        config = _adapter(Config).validate_json(json.dumps(whole), strict=True)
    except ValidationError as err:
        found = [*map(_describe, err.errors()), *found]
        cause = err
    refuse(path, found, cause)
    resolved: Config = _absolute(config, path.parent, found)
    refuse(path, found)
    return resolved


@functools.cache
def _adapter(owner: type) -> Any:
    """Returns pydantic's checker of a section; making that of the whole config takes longer than reading a file."""
    from pydantic import TypeAdapter

    return TypeAdapter(owner)


_hints = functools.cache(get_type_hints)


def read_remote(overrides: Sequence[str] = ()) -> RemoteConfig:
    """Returns the `[remote]` of overrides alone, for a URL without a config; ConfigError for any other setting."""
    if not overrides:  # pydantic takes a sixth of a look at a cache
        return RemoteConfig()
    from pydantic import ValidationError

    document: dict[str, Any] = {}
    for override in overrides:
        _apply_override(document, override)
    if foreign := sorted(document.keys() - {"remote"}):
        raise ConfigError(f"--set {foreign[0]}: without a config only remote.NAME=VALUE says something", code="FB110")
    found: list[str] = []
    try:
        settings = _adapter(RemoteConfig).validate_json(json.dumps(document.get("remote", {})), strict=True)
    except ValidationError as err:
        found = [_describe({**each, "loc": ("remote", *each["loc"])}) for each in err.errors()]
        refuse("--set", found, err)
    resolved: RemoteConfig = _absolute(settings, Path.cwd(), found, section="remote.")
    refuse("--set", found)
    return resolved


def refuse(what: object, found: Sequence[str], cause: Exception | None = None) -> None:
    """Raises ConfigError, which lists the problems of a config; returns if there is none."""
    if not found:
        return
    lines = [f"  {line}" for line in found[:_MAX_PROBLEMS]]
    more = [f"  and {len(found) - _MAX_PROBLEMS} more"] if len(found) > _MAX_PROBLEMS else []
    listed = "\n".join([f"{what} is not a forebay config:", *lines, *more])
    raise ConfigError(listed, code=code_of(found)) from cause


def code_of(problems: Sequence[str]) -> str:
    """Returns the code of an error that lists problems: most often a name is wrong."""
    return "FB101" if any(": unknown field" in line or ": now " in line for line in problems) else "FB102"


def _with_settings(section: str, values: Any) -> Any:
    """Returns the values of a section of a step with all that the section itself does not know as `settings`."""
    owners = _dataclasses_in(_hints(Config).get(section)) if isinstance(values, Mapping) else []
    known = set(_names(owners[0])) if owners else set()
    if "settings" not in known:
        return values
    own = {name: value for name, value in values.items() if name in known - {"settings"}}
    return {**own, "settings": {name: value for name, value in values.items() if name not in own}}


def _allow_code(document: Mapping[str, Any]) -> object:
    """Returns what a document says of code; an override says nothing of it, whichever table it replaces."""
    run = document.get("run")
    return run.get("allow_code", False) if isinstance(run, Mapping) else False


def _apply_override(document: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not last or not all(sections):
        raise ConfigError(f"override {override!r} is not section.field=value", code="FB110")
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        parsed = {"value": text}
    # A text with line breaks can parse as several settings; it is one value.
    value = parsed["value"] if len(parsed) == 1 else text
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section", code="FB110")
    document[last] = value
    if sections == ["train"]:
        for other in {name for pair in _INSTEAD if last in pair for name in pair} - {last}:
            document.pop(other, None)


def _refuse_foreign(value: Any, name: str, path: Path, *, depth: int = 0) -> None:
    """Raises ConfigError for what TOML has and no setting is: dates, times, NaN and infinity, values that lie deep."""
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
    """Returns one line for one of pydantic's problems: the setting by its dotted name, and what is wrong."""
    names, owner = _locate(problem["loc"])
    dotted = ".".join(names) or "config"
    match problem["type"]:
        case "unexpected_keyword_argument":
            return f"{dotted}: {_unknown(names, owner)}"
        case "missing" | "missing_argument" | "missing_keyword_only_argument":
            example = next((f.metadata.get("example") for f in dataclasses.fields(owner) if f.name == names[-1]), None)
            return f"{dotted}: missing" + (f"; for example {names[-1]} = {example}" if example else "")
        case "union_tag_invalid":
            found = problem["ctx"]
            return f"{dotted}.kind: Input should be one of {found['expected_tags']}, got {found['tag']!r:.200}"
        case "value_error":
            return f"{dotted}: {str(problem['msg']).removeprefix('Value error, ')}"
    return f"{dotted}: {problem['msg']}, got {problem['input']!r:.200}"


def _unknown(names: Sequence[str], owner: Any) -> str:
    """Returns what to say of a setting that is not there: today's name, the kinds of plan that have it, a near name."""
    *sections, name = names
    if today := RENAMED.get(".".join(names)):
        return f"now {today}"
    kinds = [f'"{kind}"' for kind, settings in KINDS.items() if name in _names(settings)]
    if owner in KINDS.values() and kinds:
        own = next(kind for kind, settings in KINDS.items() if settings is owner)
        return f'only for kind = {" or ".join(kinds)}, not "{own}"'
    near = difflib.get_close_matches(name, _names(owner), n=1)
    return "unknown field" + (f"; did you mean {'.'.join([*sections, near[0]])}?" if near else "")


def _names(owner: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(owner) if f.name not in OF_NO_FILE]


def _locate(place: Sequence[str | int]) -> tuple[list[str], Any]:
    """Returns the parts of a setting's name as the user wrote it, and the dataclass that has, or lacks, the last part.

    place: the name in pydantic's form, with the types of a union and the kind of a plan among the parts.
    """
    names: list[str] = []
    owner: Any = Config
    options: list[Any] = [Config]
    is_open = is_key = False
    for part in place:
        if len(options) > 1:
            options = [KINDS[str(part)]]
        elif isinstance(part, int) or is_key:
            names.append(str(part))
            is_key = False
        elif options:
            owner = options[0]
            names.append(part)
            hint = _hints(owner).get(part)
            options, is_open = _dataclasses_in(hint), "dict[" in str(hint)
            is_key = is_open and bool(options)
        elif is_open:
            names.append(part)
    return names, owner


def _dataclasses_in(hint: Any) -> list[Any]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [found for option in getattr(hint, "__args__", ()) for found in _dataclasses_in(option)]


def _absolute(node: Any, folder: Path, problems: list[str], *, section: str = "") -> Any:
    """Returns a part of the tree with all its paths absolute, or URLs; adds what no path can be to `problems`."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{section}{field.name}"
        if field.metadata.get("path") and (value or field.default != ""):
            takes_url = bool(field.metadata.get("url"))
            absolute = functools.partial(_absolute_path, folder=folder, takes_url=takes_url)
            if field.metadata.get("hub"):
                absolute = functools.partial(model_place, folder=folder)
            changes[field.name] = _each(value, name, absolute, problems)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _absolute(value, folder, problems, section=f"{name}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            changes[field.name] = tuple(
                _absolute(part, folder, problems, section=f"{name}.{i}.") for i, part in enumerate(value)
            )
    return dataclasses.replace(node, **changes) if changes else node


def _each(value: Any, name: str, absolute: Callable[[str], str], problems: list[str]) -> Any:
    """Returns a path or a list of paths made absolute; a problem is named by setting and place."""
    if isinstance(value, tuple):
        return tuple(_each(part, f"{name}.{i}", absolute, problems) for i, part in enumerate(value))
    if not isinstance(value, str):
        return value
    try:
        return absolute(value)
    except ConfigError as err:
        problems.append(f"{name}: {err}")
        return value


def _absolute_path(text: str, folder: Path, *, takes_url: bool) -> str:
    place = url_or_path(text)
    if not is_url(place):
        return os.path.normpath(folder / place)
    if not takes_url:
        raise ConfigError(url_problem(place))
    return place


MAX_DEPTH = 16
"""Levels of tables and lists; settings lie three deep."""
_STRINGS = re.compile(r'''"""(?:[^\\]|\\.)*?"""|'{3}.*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|\#[^\n]*+''', re.DOTALL)
_LONG_KEY = re.compile(rf"(?:\.[ \t]*+[\w\-\"]++[ \t]*+){{{MAX_DEPTH},}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the document of a TOML text.

    Raises ValueError for what is no TOML, a key of more than `MAX_DEPTH` parts, and values too deep to be read.
    """
    # tomllib takes time with the square of a key's parts: minutes for 100,000 of them.
    # A quoted part of a key stays a part; dots inside of strings and comments separate nothing.
    plain = _STRINGS.sub(lambda found: "" if found[0].startswith("#") else '"', text)
    if (found := _LONG_KEY.search(plain)) is not None:
        raise ValueError(f"a key has more than {MAX_DEPTH} parts, {found[0]:.40}... among them")
    try:
        return tomllib.loads(text)
    except RecursionError as err:
        raise ValueError("its values lie in one another too deep to be read") from err
