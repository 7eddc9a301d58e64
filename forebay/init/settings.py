"""From what was found, and a model's folder, to the sections of a config."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.config.data import OWN_COLUMNS, SOURCE_KINDS
from forebay.errors import ConfigError
from forebay.init import plan
from forebay.init.describe import facts, problems
from forebay.init.draft import Draft
from forebay.init.found import Found
from forebay.init.hearing import PROCESSORS
from forebay.init.learning import not_learnt
from forebay.init.model import Model
from forebay.init.seeing import vision
from forebay.init.toml import Section, value_of
from forebay.steps.text.normalize import whisper_code

_MOST_NAMES = 100


def draft(found: Found, *, name: str, out: Path, model: Model | None, weights: str | None) -> Draft:
    """Returns the config of what was found. weights: `train.init`; None: not asked for.

    Raises ConfigError where the data needs a model's folder and there is none, or the model takes other data.
    """
    made = Draft(name=name, out=out, found=found, model=model, weights=weights)
    _check_model(found, model)
    made.head = [
        f"{facts(found)}.",
        *problems(found),
        "Paths are relative to this file. docs/config.md explains every setting.",
    ]
    made.sections.append(Section("", [("name", name, "the first part of the cache folder's name")]))
    made.sections += _source(made)
    if found.modality == "vision":
        made.sections += vision(made)
    else:
        made.sections += _hearing(made)
    if made.trains:
        made.sections.append(_train(made))
    return made


def _check_model(found: Found, model: Model | None) -> None:
    if model is None:
        if found.modality == "vision":
            raise ConfigError(
                "images are stored as a model's processor makes them; give --model DIR: the folder of a model that "
                "sees, with preprocessor_config.json, and for conversations and texts tokenizer.json and, where it "
                "talks, a chat template"
            )
        if found.modality == "text":
            raise ConfigError(
                "texts are stored as tokens; give --model DIR: the folder of a model, or of a tokenizer alone "
                "(tokenizer.json)"
            )
        return
    kind = model.model_type or "a tokenizer"
    if found.modality == "vision" and not model.sees:
        raise ConfigError(
            f"--model {model.folder} is {kind} and sees no images: {' and '.join(PROCESSORS)} name no image processor; "
            "name the folder of a model that sees, or save its processor there with processor.save_pretrained(folder)"
        )
    if found.modality == "speech" and not model.audio and model.sees:
        raise ConfigError(
            f"--model {model.folder} is {kind} and hears no sound; name a Whisper or Qwen3-ASR folder, or any other "
            "with a feature extractor (docs/models.md)"
        )
    if found.modality == "text" and model.text_prompt is None:
        raise ConfigError(f"--model {model.folder} is {kind}; texts alone need a tokenizer of a speech or text model")


def _source(made: Draft) -> list[Section]:
    found = made.found
    source, columns = Section("source"), Section("source.columns")
    source.add("kind", found.kind)
    paths = [made.relative(path) for path in found.manifests]
    source.add("manifest", paths[0] if len(paths) == 1 else paths)
    for name, value in found.source.items():
        source.add(name, made.relative(value) if isinstance(value, Path) else value)
    if found.modality == "speech" and _is_heard_in_part(made):
        source.add("max_duration_s", plan.HEARD_S, "Whisper hears 30 s")
        source.add("overlong", "drop", "longer clips are left out, counted and listed")
    source.offers = _kept(found)
    for role, name in found.columns.items():
        columns.add(role, name)
    return [source, columns] if columns.lines else [source]


def _is_heard_in_part(made: Draft) -> bool:
    return _audio(made).get("features") == "log_mel"


def _kept(found: Found) -> list[tuple[str, list[str]]]:
    """Returns the setting that keeps columns which nothing takes, as many as a line has room for."""
    names = [name for name in found.others if name.isidentifier() and name.isascii() and name not in OWN_COLUMNS]
    while len(value_of(names)) > _MOST_NAMES:
        names.pop()
    return [("keep_columns", names)] if names and found.modality in SOURCE_KINDS[found.kind].keeps else []


def _audio(made: Draft) -> dict[str, Any]:
    if made.found.modality == "text":
        return {"features": "none"}
    if made.found.audio:
        return made.found.audio
    if made.model is not None and made.model.audio:
        return made.model.audio
    seconds = made.found.sounds.seconds if made.found.sounds is not None else []
    is_long = bool(seconds) and sum(each > plan.HEARD_S for each in seconds) > len(seconds) / 4
    return {"features": "waveform"} if is_long else {"features": "log_mel"}


def _hearing(made: Draft) -> list[Section]:
    audio, text = Section("audio"), _text(made)
    for name, value in _audio(made).items():
        audio.add(name, made.relative(value) if isinstance(value, Path) else value)
    if made.model is not None and made.model.audio and not made.found.audio and made.found.modality == "speech":
        audio.notes.append(f"{made.model.audio_why[:1].upper()}{made.model.audio_why[1:]}.")
    if made.model is None and made.found.modality == "speech" and not made.found.audio:
        audio.notes.append(
            "Features for Whisper; also: qwen3_asr, w2v_bert, waveform. With forebay init --model DIR they are the "
            "model's, and texts become tokens."
            if audio.lines[0][1] == "log_mel"
            else "Many recordings are longer than the 30 s that Whisper hears, so waveforms are stored as they are."
        )
    return [audio, *([] if text is None else [text]), _buckets(made)]


def _text(made: Draft) -> Section | None:
    model, found = made.model, made.found
    if model is None or not (found.has_text or found.modality == "text"):
        return None
    prompt = model.text_prompt if found.modality == "text" else model.prompt
    if prompt is None:
        return None
    section = Section("text")
    section.add("tokenizer", made.relative(model.folder))
    section.add("prompt", "given" if found.has_labels else prompt)
    if model.task is not None and model.task.name == "CTC" and found.modality == "speech" and not found.has_labels:
        section.add("end_token", value=False, comment=f"CTC: {model.task.why}")
    if prompt == "whisper" and not found.has_labels:
        unknown = _untagged(model, found)
        if unknown:
            note = f"the tokenizer has no tag for {', '.join(sorted(unknown)[:5])}: no language is written"
            section.add("language_tag_mode", "none", note)
            made.said.append(f'{note} (text.language_tag_mode = "none")')
        elif not found.languages and model.tags:
            note = (
                "The language of the texts is not known, and Whisper is told none: name it in a column language, or "
                'set text.language = "detect"'
            )
            section.notes.append(f"{note}.")
            made.said.append(note)
        if model.max_label_tokens is not None:
            section.add("max_label_tokens", model.max_label_tokens, "the model's decoder positions")
    return section


def _untagged(model: Model, found: Found) -> set[str]:
    """Returns the languages of the data that a Whisper's tokenizer has no tag for."""
    unknown = {language for language in found.languages if f"<|{_code(language)}|>" not in model.tags}
    return {language for language in unknown if f"<|{whisper_code(language)}|>" not in model.tags}


def _code(language: str) -> str:
    return re.split("[-_]", language.strip().lower())[0]


def _buckets(made: Draft) -> Section:
    found, section = made.found, Section("plan")
    section.add("k", plan.num_buckets(found), "buckets, with the edges that pad these durations least")
    if found.modality == "text":
        section.lines[0] = ("k", section.lines[0][1], "buckets of like length")
        section.add("batch_tokens", 4096, "padded tokens a batch")
    elif _is_heard_in_part(made) or found.audio:
        section.add("batch_size", plan.batch_size(found), "clips a batch; Whisper pads each to 30 s")
    else:
        section.add("batch_seconds", plan.batch_seconds(found), "padded seconds a batch")
    if plan.is_few(found):
        section.add("lockstep", 1, "a small set: no groups of batches of equal shape")
    return section


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
    notes = ["Each source is a cache of its own, by its hours; or give each a weight (docs/training.md)."]
    batches: list[tuple[str, Any, str]] = []
    if any(part.found.modality == "text" for part in parts):
        notes = ["Each source is a cache of its own (docs/training.md)."]
        batches = [("batches", "per_source", ""), ("asr_ratio", 0.8, "four of five batches have sound")]
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
    if not made.found.has_text and made.found.modality == "speech":
        return "forebay train needs texts, and none were found; your own loop takes the batches"
    return not_learnt(made.found, made.model)
