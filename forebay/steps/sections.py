"""What the sections of a config say: the steps that they name, and what is wrong with them, alone and together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from typing import Any

from forebay.config.data import SOURCE_KINDS, AudioConfig, SourceColumns, TextConfig, VisionConfig
from forebay.config.load import code_of
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.energy import Energy
from forebay.steps.audio.mel import Mel
from forebay.steps.audio.pitch import Pitch
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.step import AudioStep
from forebay.steps.table import AUDIO, IMAGE, TEXT, Table, audio_step, made, problems, text_step
from forebay.steps.text.normal.code import not_allowed
from forebay.steps.text.normal.table import code_in, problems_of
from forebay.steps.text.transcript import Transcript
from forebay.store.where import parse_where

_COLUMNS = {
    "speech": ("audio", "text", "language", "id", "duration", "features", "labels"),
    "vision": ("image", "question", "answer", "messages", "id"),
}
"""Columns that kinds of source read by name, in the key as `audio_column`; an id's where it is given."""
_TEXT_COLUMNS = ("text", "language", "id", "prompt")
"""Those of texts without audio; in the key where they are not the default, which files of lines had before columns."""


def columns_read(config: Config) -> tuple[str, ...]:
    """Returns the columns that a config's kind of source reads by name."""
    if not SOURCE_KINDS[config.source.kind].has_audio:
        return _TEXT_COLUMNS
    return _COLUMNS[config.modality] if SOURCE_KINDS[config.source.kind].has_columns else ()


def section_problems(section: str, values: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the settings of the step that a section of a config file names, by dotted names.

    Of `[filter]`: what is wrong with its condition.
    """
    if section == "filter":
        return _where_problems(values.get("where"))
    if section not in _SECTIONS:
        return []
    config, table, key, default = _SECTIONS[section]
    own = {f.name for f in fields(config) if f.name != "settings"}
    name = values.get(key, default)
    rest = {str(setting): value for setting, value in values.items() if setting not in own}
    # What is no name at all, the config itself refuses.
    found = problems(table, name, rest, section=section, key=key, own=own) if isinstance(name, str) else []
    return found or (problems_of(rest) if section == "text" else [])


def _where_problems(where: object) -> list[str]:
    """Returns what is wrong with the condition of `[filter]`."""
    if isinstance(where, str):
        try:
            parse_where(where, setting="filter.where")
        except ConfigError as err:
            return [str(err)]
    return []


_SECTIONS: dict[str, tuple[type, Table, str, str]] = {
    "audio": (AudioConfig, AUDIO, "features", AudioConfig().features),
    "text": (TextConfig, TEXT, "prompt", TextConfig(tokenizer="").prompt),
    "vision": (VisionConfig, IMAGE, "", Patches.name),
}
"""By section: its type, the table of its steps, the field that names one, and the name where that field is left out."""


def contradictions(config: Config) -> list[str]:
    """Returns what is wrong with `[source]`, or else what sections say that their steps cannot do together."""
    if found := _source_problems(config):
        return found
    if config.vision is not None:
        return _vision_contradictions(config, config.vision)
    step, text = audio_step(config.audio.features), config.text
    if text is not None and text_step(text.prompt).of_images:
        return [f'text.prompt = "{text.prompt}" is only for a config with [vision]']
    if found := _kept_and_detected(config):
        return found
    if text is not None and not config.run.allow_code and (code := code_in(text.settings)):
        return [not_allowed(entry) for entry in code]
    if SOURCE_KINDS[config.source.kind].has_audio != step.has_audio:
        return [
            f'source.kind is "{config.source.kind}" and audio.features is "{step.name}"; text alone needs '
            'kind = "text" and features = "none"'
        ]
    if found := _column_problems(config):
        return found
    if not step.has_audio:
        return _text_alone_contradictions(config)
    return [*_given_contradictions(config, step), *_audio_contradictions(config, step)]


def _kept_and_detected(config: Config) -> list[str]:
    """Returns which columns a config keeps that are written beside detected languages."""
    mode = "manifest" if config.text is None else config.text.settings.get("language", "manifest")
    taken = {"language_detected", "language_confidence", "language_manifest"}.intersection(config.source.keep_columns)
    if mode == "manifest" or not taken:
        return []
    return [
        f'source.keep_columns has {", ".join(sorted(taken))}, and text.language = "{mode}" writes columns of these '
        "names; leave them out, or rename them in the source"
    ]


def _source_problems(config: Config) -> list[str]:
    source, modality = config.source, config.modality
    kinds = [name for name, kind in SOURCE_KINDS.items() if getattr(kind, modality)]
    if source.kind not in kinds:
        near = difflib.get_close_matches(source.kind, kinds, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return [f'source.kind is "{source.kind}", for {modality} wanted one of {", ".join(kinds)}{hint}']
    # What is not in the key must not be read either: a column that is in no key has its default name.
    known, found = columns_read(config), _table_problems(config)
    return found + [
        f'source.columns.{name} is "{column}", and source.kind = "{source.kind}" for {modality} reads '
        f"{'only the columns ' + ', '.join(known) if known else 'no columns by name'}; leave it out"
        for name, column in asdict(source.columns).items()
        if name not in known and column != getattr(SourceColumns(), name)
    ]


def _table_problems(config: Config) -> list[str]:
    """Returns which settings of tables a config has whose kind of source takes none."""
    source, found = config.source, []
    if source.audio_dir is not None and source.kind != "table":
        found.append(f'source.audio_dir is for source.kind = "table", and it is "{source.kind}"; leave it out')
    elif source.audio_dir is not None and config.vision is not None:
        found.append("source.audio_dir is for recordings; paths of images are relative to the table: leave it out")
    for name in ("texts", "languages_from_folders"):
        if getattr(source, name) and source.kind != "folder":
            found.append(f'source.{name} is for source.kind = "folder", and it is "{source.kind}"; leave it out')
    if source.kind == "folder":
        if source.keep_columns and source.texts is None:
            found.append(
                "source.keep_columns are columns of source.texts, and there is none; name the table, or leave "
                "keep_columns out"
            )
        given = [name for name in ("features", "labels") if getattr(source.columns, name) is not None]
        found += [f'source.columns.{name} is not for source.kind = "folder"; leave it out' for name in given]
    if source.keep_columns and config.modality not in SOURCE_KINDS[source.kind].keeps:
        kinds = [f'"{name}"' for name, kind in SOURCE_KINDS.items() if config.modality in kind.keeps]
        wanted = f"wanted {' or '.join(kinds)}" if kinds else f"for {config.modality} no kind keeps columns yet"
        found.append(f'source.keep_columns are not read from source.kind = "{source.kind}", {wanted}; leave them out')
    return found


def _column_problems(config: Config) -> list[str]:
    """Returns which columns the text is made of that the source does not keep."""
    text = config.text
    prompt = None if text is None else text_step(text.prompt)
    if text is None or prompt is None or not issubclass(prompt, Transcript):
        return []
    return [
        f'text.{setting} is "{column}", and source.keep_columns does not name it; add it there'
        for setting, column in prompt.columns_read(text.settings).items()
        if column not in config.source.keep_columns
    ]


def _audio_contradictions(config: Config, step: type[AudioStep]) -> list[str]:
    audio, found = config.audio, []
    rate_hz = step.wanted_rate_hz(audio.settings)
    if rate_hz not in (None, audio.sample_rate_hz):
        of_a_preset = f' with preset = "{audio.settings["preset"]}"' if step.sample_rate_hz is None else ""
        return [
            f'audio: features = "{step.name}"{of_a_preset} is defined at {rate_hz} Hz; '
            f"sample_rate_hz is {audio.sample_rate_hz}"
        ]
    try:
        names = {spec.name for made_step in (features_of(config), *beside_of(config)) for spec in made_step.fields()}
    except ValueError as err:
        return [f"audio: {err}"]
    if kept := sorted(names.intersection(config.source.keep_columns)):
        found.append(f"source.keep_columns: {kept[0]!r} is the name of a field of the audio; rename the column")
    stores_waveform = "waveform" in names
    if stores_waveform and audio.keep_waveform:
        found.append(f'audio: keep_waveform is only for features other than "{step.name}"')
    if not found and config.loader.crop_s is not None:
        try:
            crop_samples(
                config.loader.crop_s,
                features=step.name,
                sample_rate_hz=audio.sample_rate_hz,
                has_waveform=audio.keep_waveform or stores_waveform,
            )
        except ConfigError as err:
            found.append(str(err))
    return found


def features_of(config: Config) -> AudioStep:
    """Returns the step of the features of a config. Raises ValueError where its rate and settings do not fit."""
    step = audio_step(config.audio.features)
    given = {"rate_hz": config.audio.sample_rate_hz} if "rate_hz" in step.given else {}
    return made(step, config.audio.settings, **given)


def beside_of(config: Config) -> tuple[AudioStep, ...]:
    """Returns the steps of `audio.pitch` and `audio.energy`. Raises ValueError where the features have no such."""
    audio, features = config.audio, features_of(config)
    wanted = [name for name, is_on in (("energy", audio.energy), ("pitch", audio.pitch is not None)) if is_on]
    if not wanted:
        return ()
    if not isinstance(features, Mel):
        raise ValueError(
            f'{" and ".join(wanted)} are by the frames of features = "mel", and features is "{features.name}"; '
            "leave them out"
        )
    framing = asdict(features.framing)
    steps: list[AudioStep] = [Energy(**framing)] if audio.energy else []
    if audio.pitch is not None:
        steps.append(Pitch(rate_hz=audio.sample_rate_hz, **framing, **asdict(audio.pitch)))
    return tuple(steps)


def _given_contradictions(config: Config, step: type[AudioStep]) -> list[str]:
    """Returns where `[source.columns]` and the steps differ about what is read, features or sound, labels or text."""
    columns, found = config.source.columns, []
    prompt = None if config.text is None else text_step(config.text.prompt)
    pairs = (
        ("features", "audio.features", step.name, not step.reads_sound),
        ("labels", "text.prompt", getattr(prompt, "name", None), getattr(prompt, "reads_labels", False)),
    )
    for name, setting, value, is_read in pairs:
        column = getattr(columns, name)
        if is_read == (column is None):
            found.append(
                f"source.columns.{name} is {column!r} and {setting} is {value!r}; {name} that the source holds need "
                f'source.kind = "hf", source.columns.{name} = "{name if column is None else column}" and {setting} = '
                '"given"'
            )
    if not step.reads_sound and config.audio.keep_waveform:
        found.append(f'audio: keep_waveform is for sound, and features = "{step.name}" reads none; leave it out')
    if not step.reads_sound and config.source.overlong == "clip":
        found.append(f'source.overlong is "clip", and features = "{step.name}" are taken whole; set "keep" or "drop"')
    return found


def _text_alone_contradictions(config: Config) -> list[str]:
    name, text, source, found = config.audio.features, config.text, config.source, []
    for setting in ("sample_rate_hz", "keep_waveform", "energy", "pitch"):
        if (value := getattr(config.audio, setting)) != getattr(AudioConfig(), setting):
            found.append(f'audio: {setting} is {value!r} and features = "{name}" has no audio; leave it out')
    alone = [prompt for prompt in TEXT if getattr(text_step(prompt), "stands_alone", False)]
    if text is None or text.prompt not in alone:
        given = "no [text] section" if text is None else f'text.prompt is "{text.prompt}"'
        found.append(
            f'{given} and audio.features is "{name}"; text alone is tokenised: give text.tokenizer and prompt = '
            + " or ".join(f'"{prompt}"' for prompt in alone)
        )
    if source.duration_tolerance is not None:
        found.append(f'source.duration_tolerance is for audio, and audio.features is "{name}"; leave it out')
    if source.min_duration_s or source.max_duration_s is not None:
        found.append(
            f'source.min_duration_s and max_duration_s are for audio, and audio.features is "{name}"; leave them out '
            "(text.max_label_tokens limits texts)"
        )
    if config.loader.crop_s is not None:
        found.append(_no_crop(config.loader.crop_s, name))
    return found


def _vision_contradictions(config: Config, vision: VisionConfig) -> list[str]:
    found = []
    if config.text is not None and not text_step(config.text.prompt).of_images:
        wanted = " or ".join(f'"{name}"' for name in TEXT if text_step(name).of_images)
        found.append(f'text.prompt is "{config.text.prompt}", with [vision] wanted {wanted}')
    if vision.codec == "source" and (backend := vision.settings.get("backend", "pil")) != "pil":
        found.append(f'vision: codec = "source" decodes at load with backend "pil"; backend is "{backend}"')
    return found


def crop_samples(crop_s: float, *, features: str, sample_rate_hz: int, has_waveform: bool) -> int:
    """Returns the audio samples of a crop of `crop_s` seconds, read as a decimal: 0.1 s at 16 kHz is 1600.

    features: as in `audio.features`. has_waveform: whether samples hold the field `waveform`. Raises ConfigError for
    features that a crop cannot be cut from, a missing waveform, a part of a sample, or too short a crop.
    """
    step = audio_step(features)
    if step.grid_samples is None:
        raise ConfigError(_no_crop(crop_s, features))
    if not has_waveform:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, and batches of crops hold the waveform, which is not kept; "
            "set audio.keep_waveform = true and run: forebay preprocess CONFIG"
        )
    samples = Fraction(repr(float(crop_s))) * sample_rate_hz if math.isfinite(crop_s) else Fraction(0)
    if samples.denominator != 1 or samples < step.min_samples:
        raise ConfigError(
            f"loader.crop_s is {crop_s}, {float(samples)} samples at {sample_rate_hz} Hz; "
            f"wanted a whole number of samples, {step.min_samples} or more"
        )
    return int(samples)


def _no_crop(crop_s: float, features: str) -> str:
    possible = " or ".join(f'"{name}"' for name in AUDIO if audio_step(name).grid_samples is not None)
    return (
        f'loader.crop_s is {crop_s} and audio.features is "{features}", whose frames depend on the whole clip; '
        f"crops need {possible}"
    )


def settings_problems(config: Config) -> list[str]:
    """Returns what is wrong with the settings of a config that was made in code; of a file `load_config` said it."""
    found: list[str] = []
    for section in _SECTIONS:
        if (values := getattr(config, section)) is not None:
            found += section_problems(section, {**_own(values), **values.settings})
    return found


def _own(section: Any) -> dict[str, Any]:
    return {f.name: getattr(section, f.name) for f in fields(section) if f.name != "settings"}


def refuse(config: Config, found: Sequence[str]) -> None:
    """Raises ConfigError for problems that were found; returns if there is none."""
    if found:
        lines = [f"{config.path} is not a forebay config:", *(f"  {line}" for line in found)]
        raise ConfigError("\n".join(lines), code=code_of(found))
