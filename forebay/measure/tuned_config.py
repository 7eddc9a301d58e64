"""`forebay doctor --apply`: the user's TOML with other settings, as an edit of its text, so that comments stay."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.measure.doctor_report import Advice
from forebay.steps.recipe import load_config
from forebay.store.files import temporary_name

_HEADER = re.compile(r"""\s*\[\s*(?P<name>[^\[\]#]+?)\s*\]\s*(?:#.*)?$""")
_KEY = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[A-Za-z0-9_-]+)(?P=quote)\s*=""")
_MARK = "# forebay doctor"


def check_target(config: Config, target: Path) -> None:
    """Raises ConfigError where the new file cannot be: it never takes the place of another one."""
    if os.path.lexists(target):
        raise ConfigError(f"--apply {target}: it is there already, and nothing is overwritten; name a new file")
    if target.absolute().parent.resolve() != Path(config.path).absolute().parent.resolve():
        raise ConfigError(
            f"--apply {target}: paths in {config.path} are relative to its folder, so the new file has to lie there "
            f"too; for example: --apply {Path(config.path).parent / target.name}"
        )


def settings_of(all_advice: Sequence[Advice], *, with_rebuild: bool) -> dict[str, Any]:
    """Returns the settings to write, by dotted name; None takes one out.

    Those that need a new build come with `with_rebuild` alone. Of two values of one setting the first counts.
    """
    found: dict[str, Any] = {}
    for each in all_advice:
        if each.needs == "nothing" or with_rebuild:
            found |= {name: value for name, value in each.settings.items() if name not in found}
    return found


def apply(config: Config, target: Path, settings: Mapping[str, Any]) -> None:
    """Makes `target` the config's file with other settings; each changed line has its old value beside it.

    Raises ConfigError where the file is there, ForebayError where the text cannot be edited to say just that.
    """
    check_target(config, target)
    text = Path(config.path).read_text(encoding="utf-8")
    aside = temporary_name(target).with_suffix(".toml")
    try:
        aside.write_text(edited(text, settings), encoding="utf-8")
        _require_tuning(config, aside, settings)
        os.link(aside, target)
    except FileExistsError as err:
        raise ConfigError(
            f"--apply {target}: it is there already, and nothing is overwritten; name a new file"
        ) from err
    finally:
        aside.unlink(missing_ok=True)


def _require_tuning(config: Config, file: Path, settings: Mapping[str, Any]) -> None:
    """Raises ForebayError unless a file says what the config's own file says, but for the settings."""
    try:
        made = _flat(load_config(str(file)))
    except ConfigError as err:
        raise ForebayError(f"{_by_hand(config, settings)}: {err}") from err
    wanted = {**_flat(load_config(config.path)), **{name: repr(value) for name, value in settings.items()}}
    taken_out = [name for name, value in settings.items() if value is None]
    wrong = sorted(name for name, value in wanted.items() if made.get(name) != value and name not in taken_out)
    if wrong:
        raise ForebayError(f"{_by_hand(config, settings)}: {', '.join(wrong)} would not be what is wanted")


def _by_hand(config: Config, settings: Mapping[str, Any]) -> str:
    lines = ", ".join(f"{name} = {toml(value)}" for name, value in settings.items() if value is not None)
    return f"{config.path} cannot be edited here; set {lines} by hand"


def _flat(config: Config) -> dict[str, str]:
    return {
        f"{section}.{key}": repr(value)
        for section, values in dataclasses.asdict(dataclasses.replace(config, path="")).items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def edited(text: str, settings: Mapping[str, Any]) -> str:
    """Returns a TOML text with settings, by dotted name, set or (None) taken out; all other lines stay as they are."""
    lines = text.removesuffix("\n").split("\n")  # a text in TOML may hold what else ends lines elsewhere
    for name, value in settings.items():
        section, _, key = name.partition(".")
        lines = _with_setting(lines, section, key, value)
    return "\n".join(lines) + "\n"


def _with_setting(lines: list[str], section: str, key: str, value: Any) -> list[str]:
    heads = ((number, _HEADER.match(line)) for number, line in enumerate(lines))
    start = next((number for number, head in heads if head and head["name"].strip("\"'") == section), None)
    own = None if value is None else f"{key} = {toml(value)}"
    if start is None:
        return lines if own is None else [*lines, "", f"[{section}]", f"{own}  {_MARK}"]
    end = next((n for n in range(start + 1, len(lines)) if lines[n].lstrip().startswith("[")), len(lines))
    for place in range(start + 1, end):
        found = _KEY.match(lines[place])
        if found is None or found["key"] != key:
            continue
        last = _last_line(lines, place)
        was, comment = _split("\n".join(lines[place : last + 1]))
        old = [f"{_MARK}: was {' '.join(was.split())}"]
        new = [] if own is None else [f"{own}{f'  {comment}' if comment else ''}"]
        return [*lines[:place], *old, *new, *lines[last + 1 :]]
    return lines if own is None else [*lines[: start + 1], f"{own}  {_MARK}", *lines[start + 1 :]]


def _last_line(lines: Sequence[str], first: int) -> int:
    """Returns the last line of a value that may be an array over several."""
    for last in range(first, len(lines)):
        if _parses("\n".join(lines[first : last + 1])):
            return last
    return first


def _split(text: str) -> tuple[str, str]:
    """Returns a setting and the comment behind it."""
    for place, character in enumerate(text):
        if character == "#" and _parses(text[:place]):
            return text[:place].rstrip(), text[place:].strip()
    return text.rstrip(), ""


def _parses(text: str) -> bool:
    try:
        return bool(tomllib.loads(text))
    except ValueError:
        return False


def toml(value: Any) -> str:
    """Returns a value of a setting as TOML writes it."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
