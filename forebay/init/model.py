"""What a model's folder asks of a config: features, prompt, tokenizer, processor; read from its JSON files alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.digest import hub_advice, tokenizer_digest
from forebay.errors import ConfigError
from forebay.store.image.settings import ImageSettings, image_settings

TRAINED = ("qwen3_asr", "qwen3_vl", "whisper")
"""Model types that `forebay train` trains; a test compares them with its table."""
_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_WHISPER_FEATURES = (80, 128)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_TAG = re.compile(r"<\|[a-z]{2,3}\|>")
_MAX_JSON = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of a model's folder.

    audio: settings of `[audio]`, empty where the model hears nothing. prompt: of `[text]`; None: no tokenizer. images:
    the settings of its processor, None where it sees nothing. tags: the tokens `<|xx|>` of a Whisper's tokenizer.
    text_prompt: of texts alone. max_positions: tokens at most, None where it says nothing.
    """

    folder: Path
    model_type: str
    audio: dict[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    images: ImageSettings | None = None
    has_weights: bool = False
    max_label_tokens: int | None = None
    max_positions: int | None = None
    text_prompt: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def trains(self) -> bool:
        """Whether `forebay train` can train it."""
        return self.model_type in TRAINED


def read_model(folder: Path) -> Model:
    """Returns what a folder with a transformers model, or a tokenizer or processor alone, asks of a config.

    Raises ConfigError where it is no folder, holds nothing of a model, or lacks a file that the model needs.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--model {folder} is not a folder; name one with the model's config.json{hub_advice(folder, 'model')}"
        )
    config = _json(folder / "config.json")
    features = _extractor(folder)
    has_tokenizer = _has_tokenizer(folder)
    if not config and not features and not has_tokenizer:
        raise ConfigError(
            f"--model {folder} holds no model: no config.json, {_PROCESSORS[0]} or tokenizer.json; "
            f"it holds {_extensions(folder)}"
        )
    model_type = str(config.get("model_type", ""))
    if model_type in _VISION or "ImageProcessor" in str(features.get("image_processor_type", "")):
        return _seeing(folder, model_type, config)
    return _hearing(folder, model_type, config=config, features=features, has_tokenizer=has_tokenizer)


def _hearing(
    folder: Path, model_type: str, *, config: dict[str, Any], features: dict[str, Any], has_tokenizer: bool
) -> Model:
    name = str(features.get("feature_extractor_type", ""))
    if model_type in ("whisper", "qwen3_asr") and not has_tokenizer:
        tokenizer_digest(folder)  # raises, with what to do
    prompt = "plain" if has_tokenizer else None
    audio: dict[str, Any] = {}
    if model_type == "whisper" or name == "WhisperFeatureExtractor":
        audio = {"features": "log_mel", "n_mels": _n_mels(folder, config, features)}
        prompt = "whisper" if model_type == "whisper" else prompt
    elif model_type == "qwen3_asr" or name == "Qwen3ASRFeatureExtractor":
        audio, prompt = {"features": "qwen3_asr"}, "qwen3_asr"
    elif model_type == "wav2vec2-bert" or name == "SeamlessM4TFeatureExtractor":
        audio = {"features": "w2v_bert"}
    elif name == "Wav2Vec2FeatureExtractor" or model_type in ("wav2vec2", "hubert", "wavlm"):
        audio = {"features": "waveform", "dtype": "float32"}
        if isinstance(rate := features.get("sampling_rate", 16_000), int) and rate != 16_000:
            audio["sample_rate_hz"] = rate
    return Model(
        folder=folder,
        model_type=model_type,
        audio=audio,
        prompt=prompt,
        has_weights=_has_weights(folder),
        max_label_tokens=_positive(config.get("max_target_positions")) if model_type == "whisper" else None,
        tags=_tags(folder) if model_type == "whisper" else frozenset(),
        text_prompt="whisper" if model_type == "whisper" else "plain" if has_tokenizer else None,
    )


def _seeing(folder: Path, model_type: str, config: dict[str, Any]) -> Model:
    if not _has_tokenizer(folder):
        tokenizer_digest(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    return Model(
        folder=folder,
        model_type=model_type,
        prompt="chat",
        images=image_settings(folder),
        has_weights=_has_weights(folder),
        max_positions=_positive(text.get("max_position_embeddings")) if text else None,
    )


def _n_mels(folder: Path, config: dict[str, Any], features: dict[str, Any]) -> int:
    found = config.get("num_mel_bins", features.get("feature_size", 80))
    if found not in _WHISPER_FEATURES:
        raise ConfigError(f"--model {folder}: {found!r} mel bins, and features log_mel have 80 or 128; name a Whisper")
    return int(found)


def _extractor(folder: Path) -> dict[str, Any]:
    """Returns what a folder says of its feature extractor or image processor; nothing where it says nothing."""
    for name in _PROCESSORS:
        document = _json(folder / name)
        for part in ("feature_extractor", "image_processor"):
            if isinstance(document.get(part), dict):
                return dict(document[part])
        if "feature_extractor_type" in document or "image_processor_type" in document:
            return document
    return {}


def _has_tokenizer(folder: Path) -> bool:
    try:
        tokenizer_digest(folder)
    except ConfigError:
        return False
    return True


def _tags(folder: Path) -> frozenset[str]:
    """Returns the tags of languages, `<|en|>`, that the files of a tokenizer name."""
    found: set[str] = set()
    for name in _TOKENIZERS:
        path = folder / name
        if path.is_file() and path.stat().st_size <= _MAX_JSON:
            found.update(_TAG.findall(path.read_text("utf-8", "replace")))
    return frozenset(found)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _WEIGHTS)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ConfigError(f"{path} has more than {_MAX_JSON} bytes, and no model's settings have")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}; check its permissions") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path} is not JSON: {err}; save the model again") from err
    return document if isinstance(document, dict) else {}


def _extensions(folder: Path) -> str:
    counts = Counter(path.suffix or path.name for path in folder.iterdir())
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(8)) or "nothing"
