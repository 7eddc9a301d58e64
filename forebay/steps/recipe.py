"""From a config to its recipe: the steps above the cut, and the document that the recipe key is made of.

Everything that changes values is in the document, by content; `[layout]`, `[plan]`, `[loader]`, `[mixture]`, `[train]`
and `[run]` are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from forebay.config.data import SOURCE_KINDS, SourceColumns, SourceConfig, TextConfig, VisionConfig
from forebay.config.digest import processor_digest, tokenizer_digest
from forebay.config.load import read_config
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.steps.contradictions import contradictions
from forebay.steps.image.choice import images_by
from forebay.steps.image.processor.step import Processed
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.sections import (
    beside_of,
    columns_read,
    features_of,
    refuse,
    section_problems,
    settings_problems,
)
from forebay.steps.step import AudioStep, Step
from forebay.steps.table import images_text, made, text_step
from forebay.steps.text.chat.packed import Chat
from forebay.steps.text.line import TextLine
from forebay.steps.text.normal.step import Where
from forebay.steps.text.of_images import ImagesText
from forebay.steps.text.transcript import Transcript
from forebay.store.key import recipe_key

LISTING_VERSION = 2
"""Bumped when the same sources and filters give other rows."""


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """source: the settings of `[source]` that decide which rows are samples."""

    source: dict[str, Any] = field(compare=False, repr=False)

    @cached_property
    def document(self) -> dict[str, Any]:
        """What the recipe key is the digest of: sections named as in the config file, contents instead of paths."""
        return {"source": self.source, **self.sections()}

    @cached_property
    def key(self) -> str:
        """The digest of the document."""
        return recipe_key(self.document)

    def sections(self) -> dict[str, Any]:
        """Returns what the document has beside the source."""
        raise NotImplementedError

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        return {}

    def without_code(self) -> Self:
        """Returns the recipe without the functions of the user; for those who only look, and run no code."""
        return self

    def check(self) -> None:
        """Returns if a build may trust the steps. Raises ConfigError for code of the user that cannot be trusted."""


@dataclass(frozen=True, kw_only=True)
class Recipe(_Recipe):
    """The steps of a config over audio. `tokens` is None without text; without audio nothing is decoded.

    beside: of values by the frames of the features, `pitch` and `energy`.
    """

    decode: Decode
    features: AudioStep
    waveform: Waveform | None
    tokens: Transcript | None
    beside: tuple[AudioStep, ...] = ()

    @property
    def has_audio(self) -> bool:
        """Whether samples have audio."""
        return self.features.has_audio

    @property
    def media_steps(self) -> tuple[Step, ...]:
        """The steps that make the media group, in their order; none without audio."""
        if not self.has_audio:
            return ()
        return (self.decode, *self.stored)

    @property
    def stored(self) -> tuple[AudioStep, ...]:
        """The steps whose values a sample has of its audio, in their order."""
        return (self.features, *(() if self.waveform is None else (self.waveform,)), *self.beside)

    @property
    def text_steps(self) -> tuple[Transcript, ...]:
        """The steps that make the text group."""
        return () if self.tokens is None else (self.tokens,)

    @property
    def made_with(self) -> dict[str, str]:
        """The packages of an installed step."""
        return self.features.made_with

    def without_code(self) -> Self:
        """Returns the recipe without the functions of the user in the text line; see `TextLine.without_code`."""
        if self.tokens is None:
            return self
        return replace(self, tokens=replace(self.tokens, line=self.tokens.text_line().without_code()))

    def check(self) -> None:
        """Returns if a build may trust the steps; see `AudioStep.check_code` and `TextLine.check`."""
        self.features.check_code()
        self._require_new_names()
        if self.tokens is not None:
            self.tokens.text_line().check()

    def _require_new_names(self) -> None:
        """Raises ConfigError where features that declare their fields name one that samples have anyway."""
        if not isinstance(self.features, Declared):
            return
        steps = [step for step in self.stored if step is not self.features]
        taken = {spec.name for step in steps for spec in step.fields()}.union(self.source.get("keep_columns", ()))
        taken |= {spec.name for spec in self.tokens.fields()} if self.tokens is not None else set()
        if found := sorted(taken.intersection(spec.name for spec in self.features.fields())):
            raise ConfigError(
                f"audio.features: {self.features.batch_form().made_by} makes a field {found[0]!r}, and samples have "
                "one of that name already; rename the field, or the column of source.keep_columns"
            )
        made = {form.name for form in self.features.batch_form().fields}
        if self.tokens is not None and (found := sorted(made.intersection(self.tokens.batch_names))):
            raise ConfigError(
                f"audio.features: {self.features.batch_form().made_by} makes a field {found[0]!r}, and a batch has the "
                f'{found[0]} of text.prompt = "{self.tokens.prompt}" by that name; rename the field, or take another '
                "prompt"
            )

    def sections(self) -> dict[str, Any]:
        """Returns `audio`, None without, and `text`, None without."""
        audio = {
            **self.features.compared(),
            "features": self.features.name,
            "sample_rate_hz": self.decode.sample_rate_hz,
            "clip_s": self.decode.clip_s,
            "keep_waveform": self.waveform is not None,
            **{step.name: asdict(step) for step in self.beside},
            "version": [step.identity()["version"] for step in self.media_steps],
        }
        text = None if self.tokens is None else self.tokens.document()
        return {"audio": audio if self.has_audio else None, "text": text}


@dataclass(frozen=True, kw_only=True)
class VisionRecipe(_Recipe):
    """The steps of a config with `[vision]` whose images are stored as patches of the Qwen2-VL family."""

    patches: Patches
    chat: Chat

    @property
    def media_steps(self) -> tuple[Patches]:
        """The steps that make the media group, in their order."""
        return (self.patches,)

    @property
    def text_steps(self) -> tuple[Chat]:
        """The steps that make the text group."""
        return (self.chat,)

    def sections(self) -> dict[str, Any]:
        """Returns `vision` and `text`."""
        return {"vision": asdict(self.patches), "text": asdict(self.chat)}


@dataclass(frozen=True, kw_only=True)
class ImagesRecipe(_Recipe):
    """The steps of a config with `[vision]` whose images are stored as their processor gives them."""

    images: Processed
    text: ImagesText

    @property
    def media_steps(self) -> tuple[Processed]:
        """The steps that make the media group, in their order."""
        return (self.images,)

    @property
    def text_steps(self) -> tuple[ImagesText]:
        """The steps that make the text group."""
        return (self.text,)

    @property
    def made_with(self) -> dict[str, str]:
        """transformers, and its version."""
        return {"transformers": version("transformers")}

    def sections(self) -> dict[str, Any]:
        """Returns `vision` and `text`."""
        return {
            "vision": {"images": "processor", **self.images.compared()},
            "text": {"prompt": self.text.name, **self.text.compared()},
        }


AnyRecipe = Recipe | VisionRecipe | ImagesRecipe


def load_config(path: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a TOML file with `section.field=value` overrides applied; its paths are absolute.

    As `forebay.config.load.read_config`, with the settings of the steps checked too.
    Raises ConfigError, which lists every unknown field (with the nearest name), wrong type and impossible value.
    """
    config = read_config(path, overrides=overrides, check=section_problems)
    refuse(config, contradictions(config))
    return config


def recipe_of(config: Config) -> AnyRecipe:
    """Returns the steps of a config; reads the tokenizer's and the processor's files.

    Raises ConfigError where such a folder is not there, or where a step does not take what its section says.
    """
    refuse(config, settings_problems(config) or contradictions(config))
    if config.vision is None:
        return _speech_recipe(config)
    if images_by(config) == "processor":
        return _images_recipe(config, config.vision)
    return _vision_recipe(config, config.vision)


def _vision_recipe(config: Config, vision: VisionConfig) -> VisionRecipe:
    if config.text is None:  # `Config` fills it in; for mypy
        raise ValueError("a config with [vision] has [text]")
    return VisionRecipe(
        patches=made(
            Patches,
            vision.settings,
            processor=processor_digest(Path(vision.processor)),
            max_pixels=config.source.max_pixels,
            max_sample_bytes=config.source.max_sample_bytes,
        ),
        chat=made(Chat, config.text.settings, tokenizer=tokenizer_digest(Path(config.text.tokenizer))),
        source={**_source_document(config, _VISION_FIELDS), "version": LISTING_VERSION},
    )


def _images_recipe(config: Config, vision: VisionConfig) -> ImagesRecipe:
    if config.text is None:  # `Config` fills it in; for mypy
        raise ValueError("a config with [vision] has [text]")
    cls, tokenizer = images_text(config.text.prompt), Path(config.text.tokenizer)
    processor = processor_digest(Path(vision.processor))
    given: dict[str, Any] = {
        "processor": processor,
        "processor_folder": vision.processor,
        "tokenizer_folder": str(tokenizer),
    }
    if "tokenizer" in cls.given:
        given["tokenizer"] = _images_tokenizer(config.text, vision)
    return ImagesRecipe(
        images=made(
            Processed,
            vision.settings,
            processor=processor,
            folder=vision.processor,
            max_pixels=config.source.max_pixels,
            max_sample_bytes=config.source.max_sample_bytes,
        ),
        text=made(cls, config.text.settings, **{name: given[name] for name in cls.given if name in given}),
        source={**_source_document(config, _VISION_FIELDS), "version": LISTING_VERSION},
    )


def _images_tokenizer(text: TextConfig, vision: VisionConfig) -> str:
    """Returns the digest of the tokenizer beside images. Raises ConfigError where its folder has none."""
    try:
        return tokenizer_digest(Path(text.tokenizer))
    except ConfigError as err:
        if text.tokenizer != vision.processor:
            raise
        # The processor's folder stands for a [text] that is left out.
        advice = 'or, where images stand without conversations, set [text] prompt = "label", "plain" or "none"'
        raise ConfigError(f"{err}; {advice}", code="FB105") from err


def _speech_recipe(config: Config) -> Recipe:
    features = features_of(config)
    return Recipe(
        decode=Decode(
            sample_rate_hz=config.audio.sample_rate_hz,
            clip_s=_clip_s(config.source, features),
            max_sample_bytes=config.source.max_sample_bytes,
        ),
        features=features,
        waveform=Waveform() if config.audio.keep_waveform else None,
        tokens=_tokens(config, config.text),
        source={**_source_document(config, _SPEECH_FIELDS), "version": LISTING_VERSION},
        beside=beside_of(config),
    )


_SPEECH_FIELDS = (
    "min_duration_s",
    "max_duration_s",
    "overlong",
    "duration_tolerance",
    "languages",
    "max_samples",
    "exclude",
    "max_sample_bytes",
)
_VISION_FIELDS = ("rows", "max_samples", "exclude", "max_sample_bytes", "max_pixels")


def _source_document(config: Config, fields: tuple[str, ...]) -> dict[str, Any]:
    """The settings of `[source]` that decide which rows are samples, in their one form."""
    source = config.source
    settings = {**asdict(source), **_plain_filters(source)}
    columns = {f"{name}_column": getattr(source.columns, name) for name in columns_read(config)}
    named = {name: column for name, column in columns.items() if column is not None}
    if not SOURCE_KINDS[source.kind].has_audio:
        default = {f"{name}_column": getattr(SourceColumns(), name) for name in columns_read(config)}
        named = {name: column for name, column in named.items() if column != default[name]}
    kept: dict[str, Any] = {"keep_columns": sorted(source.keep_columns)} if source.keep_columns else {}
    if source.languages_from_folders:
        kept["languages_from_folders"] = True
    if source.rows is not None:
        kept["rows"] = source.rows
    return {**{name: settings[name] for name in ("kind", "split", *fields)}, **named, **kept}


def _plain_filters(source: SourceConfig) -> dict[str, Any]:
    """One form for filters that let the same rows through: 30 and 30.0, ids in any order, languages in any case too."""
    limit, tolerance = source.max_duration_s, source.duration_tolerance
    languages = source.languages
    return {
        "min_duration_s": float(source.min_duration_s),
        "max_duration_s": None if limit is None else float(limit),
        "duration_tolerance": None if tolerance is None else float(tolerance),
        "languages": None if languages is None else sorted({language.lower() for language in languages}),
        "exclude": sorted(set(source.exclude)),
    }


def _clip_s(source: SourceConfig, features: AudioStep) -> float | None:
    limits = [source.max_duration_s if source.overlong == "clip" else None, features.max_s]
    return min((float(limit) for limit in limits if limit is not None), default=None)


def text_line(config: Config, text: TextConfig) -> TextLine:
    """Returns the text line of a config: reads the files that its steps name, not the tokenizer's."""
    where = Where(
        folder=Path(config.path).parent,
        tokenizer=Path(text.tokenizer),
        allow_code=config.run.allow_code,
        phones=text.settings.get("phones"),
    )
    return TextLine.of(text.settings, where)


def _tokens(config: Config, text: TextConfig | None) -> Transcript | None:
    if text is None:
        return None
    cls = text_step(text.prompt)
    if not issubclass(cls, Transcript):  # `contradictions` refuses it; for mypy
        raise TypeError(f"{cls} writes no transcripts")
    line = text_line(config, text)
    return made(cls, text.settings, tokenizer=_transcripts_tokenizer(config, text), line=line)


_OF_SYMBOLS = ("plain", "tts")
"""Prompts that a table of the texts' own symbols serves; the others need the tokenizer of a model."""


def _transcripts_tokenizer(config: Config, text: TextConfig) -> str:
    """Returns the digest of the tokenizer of transcripts. Raises ConfigError where its folder has none."""
    folder = Path(text.tokenizer)
    try:
        return tokenizer_digest(folder)
    except ConfigError as err:
        if text.prompt not in _OF_SYMBOLS or folder.exists():
            raise
        advice = f"or, without a model's tokenizer, write one of the texts' own symbols: forebay symbols {config.path}"
        raise ConfigError(f"{err}; {advice}", code="FB105") from err
