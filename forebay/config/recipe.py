"""From a config to its recipe: the steps above the cut, and the document that the recipe key is made of.

Everything that changes values is in the document, by content; `[layout]`, `[plan]`, `[train]` and `[run]` are not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from forebay.config.data import AudioConfig, SourceConfig, VisionConfig
from forebay.config.digest import processor_digest, tokenizer_digest
from forebay.config.steps import (
    Chat,
    Decode,
    FeatureStep,
    FloatDtype,
    LogMel,
    MediaStep,
    NoAudio,
    Patches,
    Prompt,
    Qwen3Asr,
    Tokens,
    W2vBert,
    Waveform,
)
from forebay.config.tree import Config

LISTING_VERSION = 2
"""Bumped when the same sources and filters give other rows."""

WHISPER_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The steps of a config. `tokens` is None for a recipe without text; under `NoAudio` nothing is decoded."""

    decode: Decode
    features: FeatureStep
    waveform: Waveform | None
    tokens: Tokens | None

    @property
    def has_audio(self) -> bool:
        """Whether samples have audio."""
        return not isinstance(self.features, NoAudio)

    @property
    def media_steps(self) -> tuple[MediaStep, ...]:
        """The steps that make the media group, in their order; none without audio."""
        if not self.has_audio:
            return ()
        return (self.decode, self.features) if self.waveform is None else (self.decode, self.features, self.waveform)

    @property
    def text_steps(self) -> tuple[Tokens, ...]:
        """The steps that make the text group."""
        return () if self.tokens is None else (self.tokens,)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRecipe:
    """The steps of a config with `[vision]`."""

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


AnyRecipe = Recipe | VisionRecipe


def recipe_of(config: Config) -> AnyRecipe:
    """Returns the steps of a config; reads the tokenizer's and the processor's files.

    Raises ConfigError where such a folder is not there.
    """
    return _speech_recipe(config) if config.vision is None else _vision_recipe(config, config.vision)


def _vision_recipe(config: Config, vision: VisionConfig) -> VisionRecipe:
    if config.text is None:  # `Config` fills it in; for mypy
        raise ValueError("a config with [vision] has [text]")
    return VisionRecipe(
        patches=Patches(
            processor=processor_digest(Path(vision.processor)),
            backend=vision.backend,
            max_pixels=config.source.max_pixels,
            max_sample_bytes=config.source.max_sample_bytes,
            alpha=vision.alpha,
        ),
        chat=Chat(tokenizer=tokenizer_digest(Path(config.text.tokenizer)), learn_through=config.text.learn_through),
    )


def _speech_recipe(config: Config) -> Recipe:
    features = _features(config.audio)
    return Recipe(
        decode=Decode(
            sample_rate_hz=config.audio.sample_rate_hz,
            clip_s=_clip_s(config.source, features),
            max_sample_bytes=config.source.max_sample_bytes,
        ),
        features=features,
        waveform=Waveform() if config.audio.keep_waveform else None,
        tokens=_tokens(config),
    )


def recipe_document(config: Config, recipe: AnyRecipe) -> dict[str, Any]:
    """Returns what the recipe key is the digest of: sections named as in the config file, contents instead of paths."""
    if isinstance(recipe, VisionRecipe):
        return {
            "source": {**_source_document(config.source, _VISION_FIELDS, _VISION_COLUMNS), "version": LISTING_VERSION},
            "vision": asdict(recipe.patches),
            "text": asdict(recipe.chat),
        }
    source = _source_document(config.source, _SPEECH_FIELDS, _SPEECH_COLUMNS)
    audio = {
        **asdict(recipe.features),
        "features": config.audio.features,
        "sample_rate_hz": recipe.decode.sample_rate_hz,
        "clip_s": recipe.decode.clip_s,
        "keep_waveform": recipe.waveform is not None,
        "version": [step.version for step in recipe.media_steps],
    }
    return {
        "source": {**source, "version": LISTING_VERSION},
        "audio": audio if recipe.has_audio else None,
        "text": None if recipe.tokens is None else asdict(recipe.tokens),
    }


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
_SPEECH_COLUMNS = ("audio_column", "text_column", "language_column")
_VISION_FIELDS = ("rows", "max_samples", "exclude", "max_sample_bytes", "max_pixels")
_VISION_COLUMNS = ("image_column", "question_column", "answer_column", "messages_column")


def _source_document(source: SourceConfig, fields: tuple[str, ...], columns: tuple[str, ...]) -> dict[str, Any]:
    """The settings of `[source]` that decide which rows are samples, in their one form."""
    columns += ("id_column",) if source.columns.id is not None else ()
    names = ("kind", "split", *fields, *(columns if source.kind == "hf" else ()))
    named = {f"{name}_column": column for name, column in asdict(source.columns).items()}
    settings = {**asdict(source), **named, **_plain_filters(source)}
    return {name: settings[name] for name in names}


def _plain_filters(source: SourceConfig) -> dict[str, Any]:
    """One form for filters that let the same rows through: 30 and 30.0, languages and ids in any order and case of the former."""
    limit, tolerance = source.max_duration_s, source.duration_tolerance
    languages = source.languages
    return {
        "min_duration_s": float(source.min_duration_s),
        "max_duration_s": None if limit is None else float(limit),
        "duration_tolerance": None if tolerance is None else float(tolerance),
        "languages": None if languages is None else sorted({language.lower() for language in languages}),
        "exclude": sorted(set(source.exclude)),
    }


def _features(audio: AudioConfig) -> FeatureStep:
    if audio.features == "none":
        return NoAudio()
    if audio.features == "waveform":
        return Waveform(dtype="float32" if audio.dtype == "float32" else "int16")
    dtype = cast(FloatDtype | None, audio.dtype)
    if audio.features == "log_mel":
        return LogMel(n_mels=audio.n_mels or 80, dtype=dtype or "float16")
    if audio.features == "qwen3_asr":
        return Qwen3Asr(dtype=dtype or "float16")
    return W2vBert(dtype=dtype or "float32")


def _clip_s(source: SourceConfig, features: FeatureStep) -> float | None:
    limits = [source.max_duration_s] if source.overlong == "clip" else []
    if isinstance(features, LogMel):
        limits.append(WHISPER_LIMIT_S)
    return min((float(limit) for limit in limits if limit is not None), default=None)


def _tokens(config: Config) -> Tokens | None:
    if config.text is None:
        return None
    return Tokens(
        tokenizer=tokenizer_digest(Path(config.text.tokenizer)),
        prompt=cast(Prompt, config.text.prompt),  # "chat" is refused without [vision]
        language_tag_mode=config.text.language_tag_mode,
        normalize=config.text.normalize,
        max_label_tokens=config.text.max_label_tokens,
    )
