"""What a model's folder asks of a config: features, prompt, tokenizer, processor; read from its JSON files alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.config.digest import hub_advice, tokenizer_digest
from forebay.errors import ConfigError
from forebay.init.hearing import MAX_JSON, PROCESSORS, audio_of, json_of, sees_images, sound_document
from forebay.init.tasks import Task, task_of_images, task_of_sound
from forebay.steps.image.choice import has_vision_tokens
from forebay.store.image.image_settings import ImageSettings, image_settings, is_native, processor_document

TRAINED = ("qwen2_5_vl", "qwen2_vl", "qwen3_asr", "qwen3_vl", "whisper")
"""Model types that `forebay train` trains; a test compares them with its table."""
_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_TAG = re.compile(r"<\|[a-z]{2,3}\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of a model's folder.

    audio: settings of `[audio]`, empty where the model hears nothing; a Path becomes relative to the config. audio_why:
    why these. prompt: of transcripts; None: no tokenizer. sees: the folder has an image processor. images: its settings
    where packs of patches are made of images. task: what config.json says the model is trained on. class_names: of its
    classes, nothing where they are LABEL_0 and so on. num_classes: how many; None where config.json does not say. tags:
    the tokens `<|xx|>` of a Whisper's tokenizer. text_prompt: of texts alone. max_positions: tokens at most, None where
    it says nothing.
    """

    folder: Path
    model_type: str
    audio: dict[str, Any] = field(default_factory=dict)
    audio_why: str = ""
    prompt: str | None = None
    sees: bool = False
    images: ImageSettings | None = None
    task: Task | None = None
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None
    has_tokenizer: bool = False
    has_weights: bool = False
    max_label_tokens: int | None = None
    max_positions: int | None = None
    text_prompt: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def trains(self) -> bool:
        """Whether `forebay train` knows the model type; of other models it takes the class that config.json names."""
        return self.model_type in TRAINED


def read_model(folder: Path) -> Model:
    """Returns what a folder with a transformers model, or a tokenizer or processor alone, asks of a config.

    Raises ConfigError where it is no folder, holds nothing of a model, or lacks a file that the model needs.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--model {folder} is not a folder; name one with the model's config.json{hub_advice(folder, 'model')}"
        )
    config = json_of(folder / "config.json")
    has_tokenizer, sees = _has_tokenizer(folder), sees_images(folder)
    if not config and not sees and not has_tokenizer and sound_document(folder) is None:
        raise ConfigError(
            f"--model {folder} holds no model: no config.json, {PROCESSORS[0]} or tokenizer.json; "
            f"it holds {_extensions(folder)}"
        )
    model_type = str(config.get("model_type", ""))
    if model_type in _VISION and not has_tokenizer:
        tokenizer_digest(folder)  # raises, with what to do
    if sees or model_type in _VISION:
        return _seeing(folder, model_type, config, has_tokenizer=has_tokenizer)
    return _hearing(folder, model_type, config=config, has_tokenizer=has_tokenizer)


def _hearing(folder: Path, model_type: str, *, config: dict[str, Any], has_tokenizer: bool) -> Model:
    if model_type in ("whisper", "qwen3_asr") and not has_tokenizer:
        tokenizer_digest(folder)  # raises, with what to do
    audio, why = audio_of(folder, model_type, config)
    features = audio.get("features")
    prompt = "plain" if has_tokenizer else None
    if has_tokenizer and features == "qwen3_asr" and model_type in ("", "qwen3_asr"):
        prompt = "qwen3_asr"
    elif model_type == "whisper":
        prompt = "whisper"
    task = task_of_sound(config) if config and features in ("extractor", "w2v_bert", "waveform") else None
    return Model(
        folder=folder,
        model_type=model_type,
        audio=audio,
        audio_why=why,
        prompt=prompt,
        task=task,
        has_tokenizer=has_tokenizer,
        has_weights=_has_weights(folder),
        max_label_tokens=_positive(config.get("max_target_positions")) if model_type == "whisper" else None,
        tags=_tags(folder) if model_type == "whisper" else frozenset(),
        text_prompt="whisper" if model_type == "whisper" else "plain" if has_tokenizer else None,
    )


def _seeing(folder: Path, model_type: str, config: dict[str, Any], *, has_tokenizer: bool) -> Model:
    """Returns what a folder with an image processor asks of a config; it may have a feature extractor beside that."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    hears = sound_document(folder) is not None
    audio, why = audio_of(folder, model_type, config) if hears else ({}, "")
    _, document = processor_document(folder)
    packs = has_tokenizer and is_native(document) and has_vision_tokens(folder)
    return Model(
        folder=folder,
        model_type=model_type,
        audio=audio,
        audio_why=why,
        sees=True,
        prompt="chat" if packs else "plain" if hears and has_tokenizer else None,
        task=_packs_task(config) if packs and model_type in _VISION else task_of_images(config) if config else None,
        images=image_settings(folder) if packs else None,
        has_tokenizer=has_tokenizer,
        has_weights=_has_weights(folder),
        class_names=_class_names(config),
        num_classes=len(config["id2label"]) if isinstance(config.get("id2label"), dict) else None,
        max_positions=_positive(text.get("max_position_embeddings")) if text else None,
        text_prompt="plain" if hears and has_tokenizer else None,
    )


def _packs_task(config: dict[str, Any]) -> Task:
    return Task(name="chat", why=f"its config.json has model_type {config['model_type']}", is_named=True)


def _class_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the classes of a model in the order of their numbers; nothing where it has names of no data."""
    found = config.get("id2label")
    if not isinstance(found, dict) or not all(isinstance(key, str) and key.isdecimal() for key in found):
        return ()
    names = tuple(str(found[key]) for key in sorted(found, key=int))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


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
        if path.is_file() and path.stat().st_size <= MAX_JSON:
            found.update(_TAG.findall(path.read_text("utf-8", "replace")))
    return frozenset(found)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _WEIGHTS)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _extensions(folder: Path) -> str:
    counts = Counter(path.suffix or path.name for path in folder.iterdir())
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(8)) or "nothing"
