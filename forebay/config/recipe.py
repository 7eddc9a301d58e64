"""From a config to its recipe: the steps above the cut, and the document that the recipe key is made of.

Everything that changes values is in the document, by content; `[layout]`, `[plan]`, `[train]` and `[run]` are not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from forebay.config.digest import tokenizer_digest
from forebay.config.steps import (
    Decode,
    FeatureStep,
    FloatDtype,
    LogMel,
    MediaStep,
    NoAudio,
    Qwen3Asr,
    Tokens,
    W2vBert,
    Waveform,
)
from forebay.config.tree import AudioConfig, Config, SourceConfig

LISTING_VERSION = 1
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


def recipe_of(config: Config) -> Recipe:
    """Returns the steps of a config; reads the tokenizer's files.

    Raises ConfigError where the tokenizer's folder is not there.
    """
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


def recipe_document(config: Config, recipe: Recipe) -> dict[str, Any]:
    """Returns what the recipe key is the digest of: sections named as in the config file, contents instead of paths."""
    source = {**asdict(config.source), **_plain_filters(config.source)}
    del source["manifest"]
    if config.source.kind != "hf":
        for name in ("audio_column", "text_column", "language_column"):
            del source[name]
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


def _plain_filters(source: SourceConfig) -> dict[str, Any]:
    """One form for filters that let the same rows through: 30 and 30.0, languages and ids in any order and case of the former."""
    limit = source.max_duration_s
    languages = source.languages
    return {
        "min_duration_s": float(source.min_duration_s),
        "max_duration_s": None if limit is None else float(limit),
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
        prompt=config.text.prompt,
        language_tag_mode=config.text.language_tag_mode,
        normalize=config.text.normalize,
        max_label_tokens=config.text.max_label_tokens,
    )
