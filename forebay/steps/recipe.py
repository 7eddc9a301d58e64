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
from typing import Any, ClassVar, Protocol, Self

from forebay.config.data import SOURCE_KINDS, SourceColumns, SourceConfig, TextConfig, VisionConfig
from forebay.config.digest import processor_digest, tokenizer_digest
from forebay.config.load import read_config
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.steps.contradictions import contradictions
from forebay.steps.image.choice import images_by
from forebay.steps.sections import (
    beside_of,
    columns_read,
    features_of,
    refuse,
    section_problems,
    settings_problems,
)
from forebay.steps.step import AudioStep, ImageStep, Step, TextStep
from forebay.steps.table import audio_step, image_step, made, prompts_beside, text_step
from forebay.steps.text.label import NoText
from forebay.steps.text.line import TextLine
from forebay.steps.text.normal.normal_step import Where
from forebay.store.image.codec import Codec
from forebay.store.key import recipe_key
from forebay.store.layout import TEXT, Group

LISTING_VERSION = 3
"""Bumped when the same sources and filters give other rows."""


class GroupRecipe(Protocol):
    """The steps of one group of fields, of one section of a config. A new group has these; nothing asks which it is."""

    name: ClassVar[Group]
    section: ClassVar[str]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in their order: their identities are in the keys of the group's shards."""
        ...

    def document(self) -> dict[str, Any]:
        """Returns what the recipe key is made of: settings by name, contents instead of paths."""
        ...

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        ...

    def without_code(self) -> Self:
        """Returns the group without the functions of the user; for those who only look, and run no code."""
        ...

    def check(self, recipe: Recipe) -> None:
        """Returns if a build may trust the steps beside the recipe's others. Raises ConfigError."""
        ...


class _Group:
    """What most groups have."""

    @property
    def made_with(self) -> dict[str, str]:
        """None."""
        return {}

    def without_code(self) -> Self:
        """Returns the group as it is."""
        return self

    def check(self, recipe: Recipe) -> None:
        """Trusts the steps."""


@dataclass(frozen=True, kw_only=True)
class AudioGroup(_Group):
    """Recordings. waveform: None where it is not kept. beside: of values by the frames of the features."""

    name: ClassVar[Group] = "audio"
    section: ClassVar[str] = "audio"

    decode: Decode
    features: AudioStep
    waveform: Waveform | None = None
    beside: tuple[AudioStep, ...] = ()

    @property
    def stored(self) -> tuple[AudioStep, ...]:
        """The steps whose values are stored, in their order."""
        return (self.features, *(() if self.waveform is None else (self.waveform,)), *self.beside)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The decoding, then what is stored."""
        return (self.decode, *self.stored)

    @property
    def made_with(self) -> dict[str, str]:
        """The packages of an installed step."""
        return self.features.made_with

    def document(self) -> dict[str, Any]:
        """Returns the settings of the features, of the decoding, and of what stands beside."""
        return {
            **self.features.compared(),
            "features": self.features.name,
            "sample_rate_hz": self.decode.sample_rate_hz,
            "clip_s": self.decode.clip_s,
            "keep_waveform": self.waveform is not None,
            **{step.name: asdict(step) for step in self.beside},
            "version": [step.identity()["version"] for step in self.steps],
        }

    def check(self, recipe: Recipe) -> None:
        """Raises ConfigError for code that cannot be trusted, or that names a field which samples have anyway."""
        self.features.check_code()
        if not isinstance(self.features, Declared):
            return
        form, text = self.features.batch_form(), recipe.text.step
        taken = {spec.name for step in self.stored[1:] for spec in step.fields()}
        taken |= {*recipe.source.get("keep_columns", ()), *(spec.name for spec in text.fields())}
        if found := sorted(taken.intersection(spec.name for spec in self.features.fields())):
            raise ConfigError(
                f"audio.features: {form.made_by} makes a field {found[0]!r}, and samples have one of that name "
                "already; rename the field, or the column of source.keep_columns"
            )
        batch_names: frozenset[str] = getattr(text, "batch_names", frozenset())
        if found := sorted({field.name for field in form.fields}.intersection(batch_names)):
            raise ConfigError(
                f"audio.features: {form.made_by} makes a field {found[0]!r}, and a batch has the {found[0]} of "
                f'text.prompt = "{text.name}" by that name; rename the field, or take another prompt'
            )


@dataclass(frozen=True, kw_only=True)
class ImageGroup(_Group):
    """Images. folder: of the processor. codec: how they are stored, which is in no key."""

    name: ClassVar[Group] = "image"
    section: ClassVar[str] = "vision"

    step: ImageStep
    folder: str = field(compare=False)
    codec: Codec = "raw"

    @property
    def steps(self) -> tuple[Step, ...]:
        """The one that makes what is stored."""
        return (self.step,)

    @property
    def made_with(self) -> dict[str, str]:
        """transformers, where its processor makes the values."""
        return {"transformers": version("transformers")} if self.step.is_of_transformers else {}

    def document(self) -> dict[str, Any]:
        """Returns the settings of the step, and how images are stored."""
        return {"images": self.step.name, **self.step.compared()}


@dataclass(frozen=True, kw_only=True)
class TextGroup(_Group):
    """What stands in a row as text. folder: of the tokenizer. needs_text: a row without a text is left out.

    is_given: whether the config has `[text]`; without it nothing is made of texts.
    """

    name: ClassVar[Group] = TEXT
    section: ClassVar[str] = "text"

    step: TextStep
    folder: str = field(default="", compare=False)
    needs_text: bool = False
    is_given: bool = True

    @property
    def steps(self) -> tuple[Step, ...]:
        """The prompt."""
        return (self.step,)

    def document(self) -> dict[str, Any]:
        """Returns the settings of the prompt, and of what a text goes through before."""
        return {"prompt": self.step.name, **self.step.document()}

    def without_code(self) -> Self:
        """Returns the group without functions in the text line; see `TextLine.without_code`."""
        return replace(self, step=self.step.without_code())

    def check(self, recipe: Recipe) -> None:  # noqa: ARG002
        """See `TextLine.check`."""
        self.step.check()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The steps of a config: groups, text last, and what decides which rows of the source are samples.

    source: the settings of `[source]` that do.
    """

    groups: tuple[GroupRecipe, ...]
    source: dict[str, Any] = field(compare=False, repr=False)

    @cached_property
    def document(self) -> dict[str, Any]:
        """What the recipe key is the digest of: sections named as in the config file, contents instead of paths."""
        return {"source": self.source, **{group.section: group.document() for group in self.groups}}

    @cached_property
    def key(self) -> str:
        """The digest of the document."""
        return recipe_key(self.document)

    @cached_property
    def by_name(self) -> dict[Group, GroupRecipe]:
        """The groups by their names, in their order."""
        return {group.name: group for group in self.groups}

    @property
    def text(self) -> TextGroup:
        """The group in which a row is a sample."""
        found = self.by_name[TEXT]
        assert isinstance(found, TextGroup)
        return found

    @property
    def audio(self) -> AudioGroup | None:
        """The recordings, where samples have such."""
        found = self.by_name.get(AudioGroup.name)
        return found if isinstance(found, AudioGroup) else None

    @property
    def image(self) -> ImageGroup | None:
        """The images, where samples have such."""
        found = self.by_name.get(ImageGroup.name)
        return found if isinstance(found, ImageGroup) else None

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        return {name: found for group in self.groups for name, found in group.made_with.items()}

    def without_code(self) -> Self:
        """Returns the recipe without the functions of the user; for those who only look, and run no code."""
        return replace(self, groups=tuple(group.without_code() for group in self.groups))

    def check(self) -> None:
        """Returns if a build may trust the steps. Raises ConfigError for code of the user that cannot be trusted."""
        for group in self.groups:
            group.check(self)


def load_config(path: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a TOML file with `section.field=value` overrides applied; its paths are absolute.

    As `forebay.config.load.read_config`, with the settings of the steps checked too.
    Raises ConfigError, which lists every unknown field (with the nearest name), wrong type and impossible value.
    """
    config = read_config(path, overrides=overrides, check=section_problems)
    refuse(config, contradictions(config))
    return config


def recipe_of(config: Config) -> Recipe:
    """Returns the steps of a config; reads the tokenizer's and the processor's files.

    Raises ConfigError where such a folder is not there, or where a step does not take what its section says.
    """
    refuse(config, settings_problems(config) or contradictions(config))
    groups = (_audio_group(config), _image_group(config, config.vision), _text_group(config, config.text))
    return Recipe(groups=tuple(filter(None, groups)), source=_source_document(config))


def audio_step_of(config: Config) -> type[AudioStep] | None:
    """Returns the step of a config's recordings; None where the source has none, or its images are wanted alone."""
    step = audio_step(config.audio.features)
    return step if config.vision is None and step.has_audio else None


def image_step_of(config: Config) -> type[ImageStep] | None:
    """Returns the step of a config's images; None where the source has none. Reads documents of the processor alone."""
    return None if config.vision is None else image_step(images_by(config) or "patches")


def _audio_group(config: Config) -> AudioGroup | None:
    if audio_step_of(config) is None:
        return None
    features = features_of(config)
    return AudioGroup(
        decode=Decode(
            sample_rate_hz=config.audio.sample_rate_hz,
            clip_s=_clip_s(config.source, features),
            max_sample_bytes=config.source.max_sample_bytes,
        ),
        features=features,
        waveform=Waveform() if config.audio.keep_waveform else None,
        beside=beside_of(config),
    )


def _image_group(config: Config, vision: VisionConfig | None) -> ImageGroup | None:
    cls = image_step_of(config)
    if vision is None or cls is None:
        return None
    given: dict[str, Any] = {
        "processor": processor_digest(Path(vision.processor)),
        "folder": vision.processor,
        "max_pixels": config.source.max_pixels,
        "max_sample_bytes": config.source.max_sample_bytes,
    }
    step = made(cls, vision.settings, **{name: given[name] for name in cls.given})
    return ImageGroup(step=step, folder=vision.processor, codec=vision.codec)


def _text_group(config: Config, text: TextConfig | None) -> TextGroup:
    if text is None:
        return TextGroup(step=NoText(), is_given=False)
    needs_text = SOURCE_KINDS[config.source.kind].needs_text and config.vision is None
    cls = text_step(text.prompt, prompts_beside(images_by(config)))
    given: dict[str, Any] = {"tokenizer_folder": text.tokenizer}
    if config.vision is not None and "processor" in cls.given:
        given |= {
            "processor": processor_digest(Path(config.vision.processor)),
            "processor_folder": config.vision.processor,
        }
    if "tokenizer" in cls.given:
        given["tokenizer"] = _tokenizer(config, text)
    if "line" in cls.given:
        given["line"] = text_line(config, text)
    step = made(cls, text.settings, **{name: given[name] for name in cls.given if name in given})
    return TextGroup(step=step, folder=text.tokenizer, needs_text=needs_text)


_SOURCE_FIELDS = (
    "min_duration_s",
    "max_duration_s",
    "overlong",
    "duration_tolerance",
    "languages",
    "max_samples",
    "exclude",
    "max_sample_bytes",
    "max_pixels",
    "rows",
)


def _source_document(config: Config) -> dict[str, Any]:
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
    return {
        **{name: settings[name] for name in ("kind", "split", *_SOURCE_FIELDS)},
        **named,
        **kept,
        "version": LISTING_VERSION,
    }


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


_OF_SYMBOLS = ("plain", "tts")
"""Prompts of transcripts that a table of the texts' own symbols serves; the others need the tokenizer of a model."""


def _tokenizer(config: Config, text: TextConfig) -> str:
    """Returns the digest of the tokenizer. Raises ConfigError where its folder has none."""
    folder = Path(text.tokenizer)
    try:
        return tokenizer_digest(folder)
    except ConfigError as err:
        if config.vision is not None and text.tokenizer == config.vision.processor:
            # The processor's folder stands for a [text] that is left out.
            advice = 'where images stand without conversations, set [text] prompt = "label", "plain" or "none"'
        elif config.vision is None and text.prompt in _OF_SYMBOLS and not folder.exists():
            advice = f"without a model's tokenizer, write one of the texts' own symbols: forebay symbols {config.path}"
        else:
            raise
        raise ConfigError(f"{err}; or, {advice}", code="FB105") from err
