"""`forebay init`: looks at data, writes a config that builds, and says what to run next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.digest import url_problem
from forebay.config.load import parse_config, parse_toml
from forebay.config.tree import Config
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.init.choose import Choice, Chooser, Wish, written
from forebay.init.describe import facts, problems
from forebay.init.draft import Draft
from forebay.init.found import Found
from forebay.init.model import Model, read_model
from forebay.init.naming import config_name
from forebay.init.recognise import recognise
from forebay.init.settings import draft, mixture, next_commands, why_not_trained
from forebay.init.subjects import subject_of
from forebay.init.toml import document_of, text_of
from forebay.init.trial import tried
from forebay.rows.list_rows import check_pieces
from forebay.steps.recipe import contradictions, recipe_of, section_problems
from forebay.terminal import wrapped
from forebay.visible import from_here

_TABLES, _MOST_LISTED = ("table", "jsonl", "folder", "tar"), 200_000
"""Kinds whose rows may be of pieces of recordings, and how many of them are listed to see it."""
_TRIALS = 4
"""Settings that a trial adds at most, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `forebay init` is asked. out: the config to write; None: named after the data, in this folder."""

    data: tuple[str, ...]
    model: str | None = None
    out: Path | None = None
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was found and written. configs: the files, the one to train with first. commands: what to run next."""

    configs: tuple[str, ...]
    name: str
    found: tuple[dict[str, Any], ...]
    decided: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    why: str | None = None
    notes: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """Returns what a person reads."""
        lines = [line for each in self.found for line in wrapped(f"{each['kind']}: ", each["facts"])]
        lines += [line for note in self.notes for line in wrapped("  ", note)]
        lines += [f"wrote {', '.join(self.configs)}", "next:", *(f"  {command}" for command in self.commands)]
        return lines if self.why is None else [*lines, f"({self.why})"]

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `forebay init --json`."""
        return {
            "configs": list(self.configs),
            "name": self.name,
            "found": list(self.found),
            "decided": list(self.decided),
            "notes": list(self.notes),
            "next": list(self.commands),
        }


def init(options: Options, chooser: Chooser) -> Report:
    """Writes the config of some data and returns what was found.

    Raises ConfigError for data of no known form, a question that nobody answers, a model's folder that does not fit,
    and a file that is there already, without `force`.
    """
    if options.out is not None:
        _refuse_existing(options.out, force=options.force)
    model = None if options.model is None else read_model(_folder(options.model))
    chooser.wish = _wish(model)
    found = recognise(options.data, chooser)
    name = config_name([Path(os.path.abspath(url_or_path(text))) for text in options.data])
    out = options.out or Path.cwd() / f"{name}.toml"
    drafts = _drafts(found, name=name, out=out, model=model, weights=None)
    texts = {each.out: _checked(each, chooser) for each in drafts}
    # Asked when all else is well: nobody answers a question for nothing.
    if (weights := _weights(model, found, chooser)) is not None:
        drafts = _drafts(found, name=name, out=out, model=model, weights=weights)
        texts = {each.out: _checked(each, chooser) for each in drafts}
    _refuse_unused(chooser)
    for path in texts:
        _refuse_existing(path, force=options.force)
    for path, text in texts.items():
        _write(path, text, force=options.force)
    return _report(drafts, chooser)


def _folder(text: str) -> Path:
    place = url_or_path(text)
    if is_url(place):
        raise ConfigError(f"--model {url_problem(place)}")
    return Path(os.path.abspath(place))


def _wish(model: Model | None) -> Wish | None:
    """Returns what a model that sees says of how rows of images are read."""
    if model is None or not model.sees:
        return None
    task = model.task
    if model.has_tokenizer:
        return Wish() if task is None else Wish(value=task.name, why=task.why)
    lacks = f"{from_here(model.folder)} holds no tokenizer; put tokenizer.json there and run init again"
    never = {"chat": lacks, "plain": lacks}
    # Images alone can be stored for a model of pairs; conversations without their words are nothing.
    value = None if task is None else "none" if task.name == "plain" else task.name
    return Wish(value=value, why="" if task is None else task.why, never=never)


def _weights(model: Model | None, found: Sequence[Found], chooser: Chooser) -> str | None:
    """Returns `train.init` where it has to be said: for a model whose folder holds no weights."""
    is_trained = model is not None and any(subject_of(each).trains(each, model) for each in found)
    if "weights" in chooser.given or (model is not None and is_trained and not model.has_weights):
        if model is None:
            raise ConfigError("--weights is of a model: give --model DIR too")
        choices = [
            Choice("random ones, from the seed", "random", "random"),
            Choice("pretrained ones, which you put there before training", "pretrained", "pretrained"),
        ]
        question = f"which weights does training begin with ({from_here(model.folder)} holds no model.safetensors)"
        return chooser.one(question, choices, option="weights")
    return None


def _drafts(found: Sequence[Found], *, name: str, out: Path, model: Model | None, weights: str | None) -> list[Draft]:
    """Returns the config to train with, and behind it, where the data is of several kinds, one of each kind."""
    if len(found) == 1:
        return [draft(found[0], name=name, out=out, model=model, weights=weights)]
    if any(subject_of(each).is_alone for each in found):
        kinds = ", ".join(f"{subject_of(each).name} ({each.kind})" for each in found)
        raise ConfigError(
            f"the data is {kinds}, and a cache of images is of one kind; run forebay init on each, "
            "or write all conversations as JSON lines of one form"
        )
    parts = []
    for number, each in enumerate(found, 1):
        part = f"{name}-{each.kind if sum(e.kind == each.kind for e in found) == 1 else f'{each.kind}{number}'}"
        place = out.with_name(f"{out.stem}{part.removeprefix(name)}{out.suffix}")
        parts.append(draft(each, name=part, out=place, model=model, weights=weights))
    first = next((each for each in found if not subject_of(each).mixed), found[0])
    whole = draft(first, name=name, out=out, model=model, weights=weights)
    whole.head = ["Several sources, each with a config and a cache of its own; this one mixes them.", whole.head[-1]]
    if any(subject_of(each).mixed for each in found):
        plan = next(section for section in whole.sections if section.name == "plan")
        if any(setting == "batch_seconds" for setting, *_ in plan.lines):
            plan.add("batch_tokens", 4096, "padded tokens a batch of texts")
    whole.sections += mixture(whole, parts)
    return [whole, *parts]


def _refuse_unused(chooser: Chooser) -> None:
    unused = [written(option, value) for option, value in chooser.given.items() if option not in chooser.used]
    if unused:
        raise ConfigError(f"{unused[0]} answers no question about this data; leave it out")


def _checked(made: Draft, chooser: Chooser) -> str:
    """Returns the text of a config after it was read as `forebay preprocess` reads it, and its steps were opened.

    Raises ConfigError for what would not build.
    """
    made.head += [f"{said}." for said in (*chooser.said, *made.said)]
    for _ in range(_TRIALS):
        if tried(made, recipe_of(_config(made, text_of(made.sections, head=made.head)))):
            break
    text = text_of(made.sections, head=made.head)
    config = _config(made, text)
    recipe_of(config)
    if made.found.sounds is not None and made.found.kind in _TABLES and made.found.count <= _MOST_LISTED:
        check_pieces(config)
    return text


def _config(made: Draft, text: str) -> Config:
    document = parse_toml(text)
    if document != document_of(made.sections):
        raise ConfigError(f"{made.out}: the settings do not survive being written; this is a fault of forebay init")
    config = parse_config(document, path=made.out, check=section_problems)
    if found := contradictions(config):
        raise ConfigError("\n".join([f"{made.out} would be no forebay config:", *(f"  {line}" for line in found)]))
    return config


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{from_here(path)} is there already; give --out FILE, or --force to replace it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: {path.parent} is no folder; make it first")


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as err:
        raise ConfigError(f"cannot write {path}: {err.strerror}; give --out FILE in another folder") from err


def _report(drafts: Sequence[Draft], chooser: Chooser) -> Report:
    whole, parts = drafts[0], list(drafts[1:])
    shown = from_here(whole.out)
    return Report(
        configs=tuple(from_here(each.out) for each in drafts),
        name=whole.name,
        found=tuple(_found_json(each) for each in parts or [whole]),
        decided=(*chooser.said, *(said for each in drafts for said in each.said)),
        commands=tuple(next_commands(whole, parts, shown=shown)),
        why=why_not_trained(whole),
        notes=tuple(note for each in parts or [whole] for note in problems(each.found)),
    )


def _found_json(made: Draft) -> dict[str, Any]:
    found = made.found
    return {
        "kind": found.kind,
        "modality": found.modality,
        "manifests": [os.fspath(path) for path in found.manifests],
        "columns": dict(found.columns),
        "count": found.count,
        "is_exact": found.is_exact,
        "hours": round(found.hours, 4),
        "languages": dict(found.languages),
        "facts": facts(found),
    }
