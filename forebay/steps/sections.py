"""What the sections of a config say: the steps that they name, and what is wrong with each section by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from forebay.config.data import COLUMNS_READ, SOURCE_KINDS, AudioConfig, TextConfig, VisionConfig
from forebay.config.load import code_of
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.audio.mel import Mel
from forebay.steps.audio.own.own_step import Own, own_problems
from forebay.steps.audio.pitch import Energy, Pitch
from forebay.steps.image.processor.processor_step import Processed
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.step import AudioStep
from forebay.steps.table import (
    AUDIO,
    IMAGE,
    OF_IMAGES,
    TEXT,
    Table,
    audio_step,
    is_own,
    made,
    problems,
    step_class,
)
from forebay.steps.text.normal.normal_step import problems_of
from forebay.store.where import parse_where

_TEXT_COLUMNS = ("text", "language", "id", "prompt")
"""Those of texts without audio; in the key where they are not the default, which files of lines had before columns."""


def columns_read(config: Config) -> tuple[str, ...]:
    """Returns the columns that a config's kind of source reads by name; in the key as `audio_column`."""
    kind = SOURCE_KINDS[config.source.kind]
    if not kind.has_audio:
        return _TEXT_COLUMNS
    # The folders of images are no table.
    has_columns = kind.has_columns and not (kind.images and config.vision is not None)
    return COLUMNS_READ[config.reads] if has_columns else ()


def section_problems(section: str, values: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the settings of the step that a section of a config file names, by dotted names.

    Of `[filter]`: what is wrong with its condition.
    """
    if section == "filter":
        return _where_problems(values.get("where"))
    if section not in _SECTIONS:
        return []
    config, key, default = _SECTIONS[section]
    own = {f.name for f in fields(config) if f.name != "settings"}
    rest = {str(setting): value for setting, value in values.items() if setting not in own}
    if section == "audio" and isinstance(name := values.get(key, default), str) and is_own(name):
        return own_problems(name, rest)
    tables = _may_be(section, values.get(key, default))
    # Which of two steps of a name is meant, the whole config says: `contradictions`.
    tried = [problems(table, name, rest, section=section, key=key, own=own) for table, name in tables]
    found = min(tried, key=bool, default=[])
    if section == "audio" and found and values.get(key, default) not in AUDIO:
        found = [f'{line}, or a class of your own: "file.py:Class", or an installed step' for line in found]
    if section != "text":
        return found
    return [*_missing_tokenizer(values, tables), *found] or problems_of(rest)


def _missing_tokenizer(values: Mapping[str, Any], tables: Sequence[tuple[Table, str]]) -> list[str]:
    """Returns that `[text]` names no tokenizer, where each step that it may mean needs one."""
    if values.get("tokenizer", "") != "":
        return []
    steps = [step_class(table, name) for table, name in tables if name in table]
    return [] if any("tokenizer" not in step.given for step in steps) else ["text.tokenizer: missing"]


def _may_be(section: str, name: object) -> list[tuple[Table, str]]:
    """Returns the steps that a section may mean, as a table and a name; of what is no name at all, none."""
    if section == "vision":
        return [(IMAGE, step) for step in _IMAGES]
    if not isinstance(name, str):  # the config itself refuses it
        return []
    tables = {"audio": [AUDIO], "text": [TEXT, OF_IMAGES]}[section]
    return [(table, name) for table in tables if name in table] or [(tables[0], name)]


def _where_problems(where: object) -> list[str]:
    """Returns what is wrong with the condition of `[filter]`."""
    if isinstance(where, str):
        try:
            parse_where(where, setting="filter.where")
        except ConfigError as err:
            return [str(err)]
    return []


_IMAGES = (Patches.name, Processed.name)
"""The steps that `vision.images` may come to."""

_SECTIONS: dict[str, tuple[type, str, str]] = {
    "audio": (AudioConfig, "features", AudioConfig().features),
    "text": (TextConfig, "prompt", TextConfig(tokenizer="").prompt),
    "vision": (VisionConfig, "", ""),
}
"""By section: its type, the field that names its step, and the name where that field is left out."""


def features_of(config: Config) -> AudioStep:
    """Returns the step of the features of a config. Raises ValueError where its rate and settings do not fit."""
    step, audio = audio_step(config.audio.features), config.audio
    if issubclass(step, Own):
        folder, allow_code = Path(config.path).parent, config.run.allow_code
        rate_hz = audio.sample_rate_hz
        return step.of(audio.features, audio.settings, folder=folder, allow_code=allow_code, rate_hz=rate_hz)
    if issubclass(step, Extractor):
        return step.of(audio.settings, folder=Path(config.path).parent, rate_hz=audio.sample_rate_hz)
    given = {"rate_hz": config.audio.sample_rate_hz} if "rate_hz" in step.given else {}
    return made(step, config.audio.settings, **given)


def beside_of(config: Config) -> tuple[AudioStep, ...]:
    """Returns the steps of `audio.pitch` and `audio.energy`. Raises ValueError where the features have no such."""
    audio = config.audio
    wanted = [name for name, is_on in (("energy", audio.energy), ("pitch", audio.pitch is not None)) if is_on]
    if not wanted:
        return ()
    features = features_of(config)
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


def crop_samples(crop_s: float, *, features: str, sample_rate_hz: int, has_waveform: bool) -> int:
    """Returns the audio samples of a crop of `crop_s` seconds, read as a decimal: 0.1 s at 16 kHz is 1600.

    features: as in `audio.features`. has_waveform: whether samples hold the field `waveform`. Raises ConfigError for
    features that a crop cannot be cut from, a missing waveform, a part of a sample, or too short a crop.
    """
    step = audio_step(features) if features in AUDIO else Declared
    if step.grid_samples is None:
        raise ConfigError(no_crop(crop_s, features))
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


def no_crop(crop_s: float, features: str) -> str:
    """Returns what to say of crops of features that nothing can be cut from."""
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
    return {name: getattr(section, name) for name in names_of(type(section))}


def names_of(section: type) -> set[str]:
    """Returns the fields of a section itself, not those of its step."""
    return {f.name for f in fields(section) if f.name != "settings"}


def refuse(config: Config, found: Sequence[str]) -> None:
    """Raises ConfigError for problems that were found; returns if there is none."""
    if found:
        lines = [f"{config.path} is not a forebay config:", *(f"  {line}" for line in found)]
        raise ConfigError("\n".join(lines), code=code_of(found))
