"""From what was found, and a model's folder, to the sections of a config."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from forebay.config.data import OWN_COLUMNS, SOURCE_KINDS
from forebay.init.describe import facts, problems
from forebay.init.draft import Draft
from forebay.init.found import Found
from forebay.init.model import Model
from forebay.init.subjects import subject_of
from forebay.init.toml import Section, value_of

_MOST_NAMES = 100


def draft(found: Found, *, name: str, out: Path, model: Model | None, weights: str | None) -> Draft:
    """Returns the config of what was found. weights: `train.init`; None: not asked for.

    Raises ConfigError where the data needs a model's folder and there is none, or the model takes other data.
    """
    subject = subject_of(found)
    trains = model is not None and subject.trains(found, model)
    made = Draft(name=name, out=out, found=found, model=model, weights=weights, trains=trains)
    subject.check(model)
    made.head = [
        f"{facts(found)}.",
        *problems(found),
        "Paths are relative to this file. docs/config.md explains every setting.",
    ]
    made.sections.append(Section("", [("name", name, "the first part of the cache folder's name")]))
    made.sections += [*_source(made), *subject.sections(made)]
    if made.trains:
        made.sections.append(_train(made))
    return made


def _source(made: Draft) -> list[Section]:
    found = made.found
    source, columns = Section("source"), Section("source.columns")
    source.add("kind", found.kind)
    paths = [made.relative(path) for path in found.manifests]
    source.add("manifest", paths[0] if len(paths) == 1 else paths)
    for name, value in found.source.items():
        source.add(name, made.relative(value) if isinstance(value, Path) else value)
    source.lines += subject_of(found).limits(made)
    source.offers = _kept(found)
    for role, name in found.columns.items():
        columns.add(role, name)
    return [source, columns] if columns.lines else [source]


def _kept(found: Found) -> list[tuple[str, list[str]]]:
    """Returns the setting that keeps columns which nothing takes, as many as a line has room for."""
    names = [name for name in found.others if name.isidentifier() and name.isascii() and name not in OWN_COLUMNS]
    while len(value_of(names)) > _MOST_NAMES:
        names.pop()
    return [("keep_columns", names)] if names and subject_of(found).name in SOURCE_KINDS[found.kind].keeps else []


def _train(made: Draft) -> Section:
    model = made.model
    assert model is not None
    section = Section("train")
    section.add("model", made.relative(model.folder))
    if made.weights == "random":
        is_empty = not model.has_weights
        why = "the folder holds none; put model.safetensors there for more" if is_empty else "not those of the folder"
        section.add("init", "random", f"random weights: {why}")
        section.add("learning_rate", 1e-3)
    else:
        section.add("learning_rate", 1e-5, "for fine-tuning; raise it for adapters or few layers")
    section.add("warmup_ratio", 0.05)
    section.add("epochs", 3, "or --steps N on the command line")
    return section


def mixture(made: Draft, parts: Sequence[Draft]) -> list[Section]:
    """Returns the sections that make a config read several others by weights."""
    batches = [*dict.fromkeys(line for part in parts for line in subject_of(part.found).mixed)]
    how = "" if batches else ", by its hours; or give each a weight"
    notes = [f"Each source is a cache of its own{how} (docs/training.md)."]
    entries = [Section("mixture.source", [("config", made.relative(part.out), "")], is_entry=True) for part in parts]
    return [Section("mixture", batches, notes=notes), *entries]


def next_commands(made: Draft, parts: Sequence[Draft], *, shown: str) -> list[str]:
    """Returns the commands to run next. shown: the config as a person would name it."""
    built = [os.path.join(os.path.dirname(shown), part.out.name) for part in parts] or [shown]
    lines = [f"forebay preprocess {shlex.quote(path)}" for path in built]
    lines += [f"forebay inspect {shlex.quote(path)}" for path in built[:1]]
    if made.trains:
        return [*lines, f"forebay train {shlex.quote(shown)} --steps 30"]
    config = f"forebay.load_config({shown!r})"
    loop = f"import forebay; print(next(iter(forebay.train.make_loader({config}))).keys())"
    plain = not set(loop) & set('"$`\\!')
    return [*lines, f'python -c "{loop}"' if plain else f"python -c {shlex.quote(loop)}"]


def why_not_trained(made: Draft) -> str | None:
    """Returns why there is no command to train, None where there is one."""
    if made.trains:
        return None
    if made.model is None:
        return "forebay train needs a model: forebay init ... --model DIR"
    subject = subject_of(made.found)
    if not made.found.has_text and subject.may_miss:
        return "forebay train needs texts, and none were found; your own loop takes the batches"
    return subject.not_learnt(made.found, made.model)
