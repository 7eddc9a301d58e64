"""The parts of commands: a command is a dataclass, its fields are options, and its docstring is its help.

What commands share: the config that they name, how a report is printed; and the exit codes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forebay.config.load import read_remote
from forebay.config.pretrained_folder import model_place
from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.face import uncollected
from forebay.visible import json_text

if TYPE_CHECKING:
    from forebay.store.lookup import Sealed

DONE, FAILED, BAD_CONFIG, NO_CACHE, INTERRUPTED = 0, 1, 2, 3, 130
CLOSED = 128 + 13
"""What a shell shows of a program that SIGPIPE ended."""
T = TypeVar("T")
C = TypeVar("C", bound="Command")


def option(
    said: str,
    metavar: str | None = None,
    *,
    flags: Sequence[str] | None = None,
    group: str = "",
    apart: Literal["", "one", "required"] = "",
    completes: bool = False,
    **how: Any,
) -> Any:
    """Returns a field of a command that is an option, by its own name if `flags` gives no others.

    said: its help. apart: of these options of a group one at most, or exactly one, is given. completes: a shell
    completes names of files. how: what argparse takes beside that which the field's type says.
    """
    about = {"flags": flags, "group": group, "apart": apart, "completes": completes}
    return dataclasses.field(
        default=how.get("default"), metadata={**about, "how": {**how, "help": said, "metavar": metavar}}
    )


def argument(metavar: str, said: str, *, completes: bool = False, **how: Any) -> Any:
    """Returns a field of a command that is given by its place; see `option`."""
    return option(said, metavar, flags=(), completes=completes, **how)


def _read(text: str, how: Callable[[str], str]) -> str:
    try:
        return how(text)
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def place(text: str) -> str:
    """Returns a URL of the command line, or the absolute path of a folder."""
    place = _read(text, url_or_path)
    return place if is_url(place) else os.path.abspath(place)


def on_disk(text: str) -> Path:
    """Returns a path of the command line, which is of this machine."""
    if is_url(place := _read(text, url_or_path)):
        raise argparse.ArgumentTypeError(f"{place} is a URL, and this is of this machine: name a local path")
    return Path(place)


def model_folder(text: str) -> Path:
    """Returns the folder of a model that the command line names by a path, or by an id of the Hub."""
    return Path(_read(text, lambda place: model_place(place, Path.cwd())))


@dataclass(kw_only=True)
class Command:
    """A command, and what it was asked for."""

    json: bool = option("print one JSON document on standard output")
    verbose: int = option("log more; twice for all", flags=("-v", "--verbose"), action="count", default=0)

    def run(self) -> int:
        """Carries the command out, and returns its exit code."""
        raise NotImplementedError

    @property
    def log_level(self) -> int:
        """The level of logging that was asked for."""
        return {0: logging.WARNING, 1: logging.INFO}.get(self.verbose, logging.DEBUG)

    @property
    def progress(self) -> bool:
        """Whether bars are shown."""
        return not getattr(self, "no_progress", False)

    def given(self, *names: str) -> list[str]:
        """Returns which of these options were given, as they are written."""
        values = {name: getattr(self, name) for name in names}
        return [
            f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False
        ]

    def into(self, cls: Callable[..., T], /, **more: Any) -> T:
        """Returns the options of a room, a dataclass: what was asked for by the names of its fields, and more."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)} | {"progress": self.progress}
        names = [each.name for each in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: own[name] for name in names if name in own} | more)

    def printed(self, report: Any) -> int:
        """Prints a report: its document, or its lines."""
        print(json_text(report.to_json()) if self.json else "\n".join(report.lines()))
        return DONE


COMMANDS: dict[str, type[Command]] = {}
"""The commands by their names, as far as their modules were imported."""


@dataclass(kw_only=True)
class CacheCommand(Command):
    """A command about caches."""

    cache_root: str | None = option("instead of run.cache_root; a folder or URL", "DIR", type=place)

    def remote(self, overrides: Sequence[str]) -> RemoteConfig:
        """Returns what `--set remote.x=y` says, for a command that was given no config. The rest is a config's."""
        return read_remote([override for override in overrides if override.lstrip().startswith("remote.")])

    def named(self, text: str, *, overrides: Sequence[str] = (), max_samples: int | None = None) -> str | Config:
        """Returns the folder or URL of a cache that was named, or the config. Raises ConfigError if it is neither."""
        found = url_or_path(text)
        if is_url(found) or Path(found).is_dir():
            return found
        if not Path(found).exists():
            raise ConfigError(f"{found}: no such cache or config; name a folder, a URL or a TOML file")
        return self.load(text, overrides=overrides, max_samples=max_samples)

    def load(self, config: str, *, overrides: Sequence[str] = (), max_samples: int | None = None) -> Config:
        """Returns a config with what the options set in it. Raises ConfigError."""
        changed = list(overrides)
        if max_samples is not None:
            changed.append(f"source.max_samples={max_samples}")
        if self.cache_root is not None:
            changed.append(f"run.cache_root={json.dumps(self.cache_root)}")
        if (workers := getattr(self, "workers", None)) is not None:
            changed.append(f"run.num_workers={workers}")
        return load_config(config, overrides=changed)

    def sealed(self, config: Config) -> Sealed:
        """Returns the sealed cache of a config. Raises CacheNotFoundError where there is none."""
        from forebay.steps.recipe import recipe_of
        from forebay.store.lookup import find_cache, require

        return require(config, find_cache(config, recipe_of(config)))


def load_config(config: str, *, overrides: Sequence[str] = ()) -> Config:
    """Returns a config with the settings of its steps checked. Raises ConfigError."""
    with uncollected():
        from forebay.steps import recipe  # not at import: what looks at folders needs none of the steps

        return recipe.load_config(config, overrides=overrides)


@dataclass(kw_only=True)
class ConfigCommand(CacheCommand):
    """A command about a config, whose settings it may change."""

    config: str = argument("CONFIG", "a TOML file", completes=True)
    set: list[str] = option("as if it stood in the file", "SECTION.FIELD=VALUE")  # noqa: RUF009  a field
    max_samples: int | None = option("short for --set source.max_samples=N", "N")

    def loaded(self) -> Config:
        """Returns the config that was named, with what the options set in it. Raises ConfigError."""
        return self.load(self.config, overrides=self.set, max_samples=self.max_samples)


def command(name: str) -> Callable[[type[C]], type[C]]:
    """Returns what makes a class the command of a name in `COMMANDS`; `cache push` is an action of `cache`."""

    def made(cls: type[C]) -> type[C]:
        COMMANDS[name] = cls
        return cls

    return made


def add_command(commands: Any, name: str, *, has_options: bool) -> None:
    """Adds the parser of a command; `command` of what it parses is the class, for `command_of`.

    Its help says the docstring of the class, as in the middle of a sentence. has_options: else it parses nothing yet,
    since the options of all commands take a tenth of a small one.
    """
    cls = COMMANDS[name]
    summary = " ".join(str(cls.__doc__).split()).removesuffix(".")
    summary = summary if summary[1].isupper() else summary[0].lower() + summary[1:]
    parser: argparse.ArgumentParser = commands.add_parser(name.split()[-1], help=summary, description=summary)
    if not has_options:
        return
    if "__dataclass_fields__" not in vars(cls):
        dataclass(kw_only=True)(cls)
    parser.set_defaults(command=cls)

    @functools.cache
    def holder(group: str, apart: str) -> Any:
        if apart:
            return holder(group, "").add_mutually_exclusive_group(required=apart == "required")
        return parser.add_argument_group(group) if group else parser

    hints = get_type_hints(cls)
    for each in dataclasses.fields(cls):
        said = each.metadata
        how = {**_by_type(hints[each.name], said["how"], is_option=said["flags"] != ()), **said["how"]}
        if said["flags"] == ():
            names: Sequence[str] = (each.name,)
        else:
            names, how["dest"] = said["flags"] or (f"--{each.name.replace('_', '-')}",), each.name
        if how["metavar"] is None:  # which flags do not take
            del how["metavar"]
        added = holder(said["group"], said["apart"]).add_argument(*names, **how)
        if said["completes"]:  # shtab reads it, see `forebay completion`
            added.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


def command_of(parsed: argparse.Namespace) -> Command:
    """Returns the command that was parsed."""
    cls = parsed.command
    made: Command = cls(**{each.name: getattr(parsed, each.name) for each in dataclasses.fields(cls)})
    return made


def _by_type(hint: Any, how: dict[str, Any], *, is_option: bool) -> dict[str, Any]:
    """Returns what argparse takes for a field of a type, as far as `how` does not say it."""
    kind = hint
    if get_origin(hint) in (Union, UnionType):
        kind = next(each for each in get_args(hint) if each is not NoneType)
    if "action" in how:
        return {}
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        action = {} if "nargs" in how else {"action": "append"}
        return {**action, "default": []} if is_option and hint is kind else {}
    return {} if kind is str else {"type": on_disk if kind is Path else kind}
