"""`forebay init`: looks at data, writes a config that builds, and says what to run next."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.load import parse_config, parse_toml
from forebay.config.pretrained_folder import model_place
from forebay.config.remote import url_or_path
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.init.candidate import Candidate, Draft, document_of, facts, problems, python_line, text_of
from forebay.init.config_sections import add_sections, mix
from forebay.init.folder_files import config_name
from forebay.init.found_model import Model, read_model
from forebay.init.questions import Choice, Chooser, Wish, written
from forebay.init.recognise import recognise
from forebay.steps.audio.extractor.extractor_call import OutputError
from forebay.steps.image.processor.processor_call import UnstorableError
from forebay.steps.recipe import Recipe, contradictions, recipe_of, section_problems
from forebay.terminal import wrapped
from forebay.visible import from_here, printable

_TRIALS = 4
"""Settings that a trial adds at most, one after the other."""
_LEFT_OUT = "what is given there cannot be stored; if the model needs it, this cache is not for it"


@dataclass(frozen=True, kw_only=True, slots=True)
class InitOptions:
    """The request to `forebay init`. out: the config to write; None: named after the data, in this folder."""

    data: tuple[str, ...]
    model: str | None = None
    out: Path | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The findings and the files written, as `--json` has them. why: there is no command to train."""

    document: dict[str, Any]
    why: str | None

    @property
    def configs(self) -> list[str]:
        """The files that were written, the one to train with first."""
        return list(self.document["configs"])

    @property
    def decided(self) -> list[str]:
        """The answers to questions that nobody was asked."""
        return list(self.document["decided"])

    def lines(self) -> list[str]:
        """Returns what a person reads."""
        lines = [line for each in self.document["found"] for line in wrapped(f"{each['kind']}: ", each["facts"])]
        lines += [line for note in self.document["notes"] for line in wrapped("  ", note)]
        lines += [f"wrote {', '.join(self.configs)}", "next:", *(f"  {each}" for each in self.document["next"])]
        return lines if self.why is None else [*lines, f"({self.why})"]

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `forebay init --json`."""
        return self.document


def init(options: InitOptions, chooser: Chooser) -> Report:
    """Writes the config of some data and returns what was found.

    Raises ConfigError for data of no known form, a question that nobody answers, a model's folder that does not fit,
    and a file that is there already, without `force`.
    """
    if options.out is not None:
        _refuse_existing(options.out, force=options.force)
    model = None
    if options.model is not None:
        try:
            place = model_place(options.model, Path.cwd())
        except ConfigError as err:
            raise ConfigError(f"--model {err}") from err
        model = read_model(Path(place))
        chooser.wish = _wish(model) if model.sees else None
    found = recognise(options.data, chooser)
    name = config_name([Path(os.path.abspath(url_or_path(text))) for text in options.data])
    out = options.out or Path.cwd() / f"{name}.toml"
    drafts = _drafts(found, name=name, out=out, model=model, weights=None)
    texts = {each.out: _checked(each, chooser) for each in drafts}
    # Asked when all else is well: nobody answers a question for nothing.
    if (weights := _weights(model, found, chooser)) is not None:
        drafts = _drafts(found, name=name, out=out, model=model, weights=weights)
        texts = {each.out: _checked(each, chooser) for each in drafts}
    if unused := [written(*each) for each in chooser.given.items() if each[0] not in chooser.used]:
        raise ConfigError(f"{unused[0]} answers no question about this data; leave it out")
    for path in texts:
        _refuse_existing(path, force=options.force)
    for path, text in texts.items():
        try:
            with open(path, "w" if options.force else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as err:
            raise ConfigError(f"cannot write {path}: {err.strerror}; give --out FILE in another folder") from err
    return _report(drafts, chooser)


def _wish(model: Model) -> Wish:
    """Returns what a model that sees says of how rows of images are read."""
    value, why = (None, "") if model.task is None else (model.task.name, model.task.why)
    if model.has_tokenizer:
        return Wish(value=value, why=why)
    lacks = f"{from_here(model.folder)} holds no tokenizer; put tokenizer.json there and run init again"
    # Images alone can be stored for a model of pairs; conversations without their words are nothing.
    return Wish(value="none" if value == "plain" else value, why=why, never={"chat": lacks, "plain": lacks})


def _weights(model: Model | None, found: Sequence[Candidate], chooser: Chooser) -> str | None:
    """Returns `train.init` where it has to be said: for a model whose folder holds no weights."""
    if "weights" not in chooser.given and (
        model is None or model.has_weights or not any(each.meaning.trains(each, model) for each in found)
    ):
        return None
    if model is None:
        raise ConfigError("--weights is of a model: give --model DIR too")
    choices = [
        Choice("random ones, from the seed", "random", "random"),
        Choice("pretrained ones, which you put there before training", "pretrained", "pretrained"),
    ]
    question = f"which weights does training begin with ({from_here(model.folder)} holds no model.safetensors)"
    return chooser.one(question, choices, option="weights")


def _drafts(found: list[Candidate], *, name: str, out: Path, model: Model | None, weights: str | None) -> list[Draft]:
    """Returns the config to train with, and behind it, where the data is of several kinds, one of each kind.

    weights: `train.init`; None: not asked for.
    Raises ConfigError where data needs a model's folder and there is none, or the model takes other data.
    """
    made = functools.partial(_draft, model=model, weights=weights)
    if len(found) == 1:
        return [made(found[0], name=name, out=out)]
    if any(each.meaning.is_alone for each in found):
        kinds = ", ".join(f"{each.meaning.name} ({each.kind})" for each in found)
        raise ConfigError(
            f"the data is {kinds}, and a cache of images is of one kind; run forebay init on each, "
            "or write all conversations as JSON lines of one form"
        )
    parts = []
    for number, each in enumerate(found, 1):
        part = f"{name}-{each.kind if sum(e.kind == each.kind for e in found) == 1 else f'{each.kind}{number}'}"
        place = out.with_name(f"{out.stem}{part.removeprefix(name)}{out.suffix}")
        parts.append(made(each, name=part, out=place))
    whole = made(next((each for each in found if not each.meaning.mixed), found[0]), name=name, out=out)
    mix(whole, parts)
    return [whole, *parts]


def _draft(found: Candidate, *, name: str, out: Path, model: Model | None, weights: str | None) -> Draft:
    trains = model is not None and found.meaning.trains(found, model)
    made = Draft(name=name, out=out, found=found, model=model, weights=weights, trains=trains)
    found.meaning.check(model)
    paths = "Paths are relative to this file. docs/config.md explains every setting."
    made.head = [f"{facts(found)}.", *problems(found), paths]
    add_sections(made)
    return made


def _checked(made: Draft, chooser: Chooser) -> str:
    """Returns the text of a config after it was read as `forebay preprocess` reads it, and its steps were opened.

    Raises ConfigError for what would not build.
    """
    made.head += [f"{said}." for said in (*chooser.said, *made.said)]
    for _ in range(_TRIALS):
        if _tried(made, recipe_of(_config(made, text_of(made.sections, head=made.head)))):
            break
    text = text_of(made.sections, head=made.head)
    config = _config(made, text)
    recipe_of(config)
    made.found.meaning.check_rows(made.found, config)
    return text


def _tried(made: Draft, recipe: Recipe) -> bool:
    """Returns whether a config can be built as it is; False where a setting was added, and it is to be tried again.

    Comments say what was found. Raises ConfigError where nothing helps.
    """
    model = f"--model {printable('' if made.model is None else from_here(made.model.folder))}"
    try:
        return made.found.meaning.try_steps(made, recipe)
    except OutputError as err:
        if err.is_drawn:
            raise ConfigError(f"{model}: {err}", code=err.code) from err
        return _left_out(made, "audio", [err.name])
    except UnstorableError as err:
        return _left_out(made, "vision", err.names)
    except ConfigError as err:
        raise ConfigError(f"{model}: {err}", code=err.code) from err


def _left_out(made: Draft, name: str, names: Sequence[str]) -> bool:
    section = made.section(name)
    made.said.append(f"{name}.leave_out: {', '.join(names)} cannot be stored")
    before: list[str] = next((value for name, value, _ in section.lines if name == "leave_out"), [])
    section.lines = [line for line in section.lines if line[0] != "leave_out"]
    section.add("leave_out", sorted({*before, *names}), _LEFT_OUT)
    return False


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


def _report(drafts: Sequence[Draft], chooser: Chooser) -> Report:
    whole, parts = drafts[0], list(drafts[1:])
    found = [each.found for each in parts or [whole]]
    document = {
        "configs": [from_here(each.out) for each in drafts],
        "name": whole.name,
        "found": [
            {
                "kind": each.kind,
                "modality": each.meaning.name,
                "manifests": [os.fspath(path) for path in each.manifests],
                "columns": each.columns,
                "count": each.count,
                "is_exact": each.is_exact,
                "hours": round(each.hours, 4),
                "languages": dict(each.languages),
                "facts": facts(each),
            }
            for each in found
        ],
        "decided": [*chooser.said, *(said for each in drafts for said in each.said)],
        "notes": [note for each in found for note in problems(each)],
        "next": _next_commands(whole, parts, shown=from_here(whole.out)),
    }
    why = None
    if whole.model is None:
        why = "forebay train needs a model: forebay init ... --model DIR"
    elif not whole.trains:
        why = whole.found.meaning.not_learnt(whole.found, whole.model)
    return Report(document, why)


def _next_commands(made: Draft, parts: Sequence[Draft], *, shown: str) -> list[str]:
    """Returns the commands to run next. shown: the config as a person would name it."""
    built = [os.path.join(os.path.dirname(shown), part.out.name) for part in parts] or [shown]
    lines = [f"forebay preprocess {shlex.quote(path)}" for path in built]
    lines += [f"forebay inspect {shlex.quote(path)}" for path in built[:1]]
    if made.trains:
        return [*lines, f"forebay train {shlex.quote(shown)} --steps 30"]
    config = f"forebay.load_config({shown!r})"
    loop = f"import forebay; print(next(iter(forebay.train.make_loader({config}))).keys())"
    return [*lines, python_line(loop)]
