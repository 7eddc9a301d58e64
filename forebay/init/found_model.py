"""The demands of a model's folder on a config: features, prompt, tokenizer, processor, task; from its JSON files alone.

Features are a step of forebay's own where that makes what the folder's feature extractor gives, else the extractor
itself. What a model is trained on stands in the tables of transformers, which are asked for a class or a model type.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.config.pretrained_folder import hub_advice, is_whole, tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_step
from forebay.steps.image.image_section import has_vision_tokens
from forebay.store.image.image_settings import ImageSettings, image_settings, is_native, processor_document
from forebay.visible import an

TRAINED = ("qwen2_5_vl", "qwen2_vl", "qwen3_asr", "qwen3_vl", "whisper")
"""Model types that `forebay train` trains; a test compares them with its table."""
_PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_TAG = re.compile(r"<\|[a-z]{2,3}\|>")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MAX_JSON = 64 * 1024 * 1024
_RATE_HZ = 16_000
_IMAGE_SETTINGS = frozenset(("do_resize", "image_mean", "crop_size", "size"))
"""Settings that image processors of old folders have, which call themselves feature extractors."""

_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "label": ("IMAGE_CLASSIFICATION",),
    "plain": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "chat": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "none": ("PRETRAINING",),
}
"""By `text.prompt`: the tables of the classes that take such batches, the surest first."""
_OF_TYPES = ("plain", "chat")
"""Prompts that a model type decides where no class is named: bodies of other models have classes of many kinds."""
OF_SOUND: Mapping[str, tuple[str, ...]] = {"CTC": ("CTC",), "SPEECH_SEQ_2_SEQ": ("SPEECH_SEQ_2_SEQ",)}
"""Tables of models that write down what they hear."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a model. name: `text.prompt` of images, or one of OF_SOUND. why: how config.json says it."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts about a model's folder.

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
    if not is_whole(folder):
        raise ConfigError(
            f"--model {folder} is not a folder; name one with the model's config.json{hub_advice(folder, 'model')}"
        )
    config = json_of(folder / "config.json")
    try:
        has_tokenizer = bool(tokenizer_digest(folder))
    except ConfigError:
        has_tokenizer = False
    sees = sees_images(folder)
    if not config and not sees and not has_tokenizer and sound_document(folder) is None:
        counts = Counter(path.suffix or path.name for path in folder.iterdir()).most_common(8)
        holds = ", ".join(f"{count} {suffix}" for suffix, count in counts) or "nothing"
        raise ConfigError(
            f"--model {folder} holds no model: no config.json, {PROCESSORS[0]} or tokenizer.json; it holds {holds}"
        )
    model_type = str(config.get("model_type", ""))
    if model_type in (*_PACKED, "whisper", "qwen3_asr") and not has_tokenizer:
        tokenizer_digest(folder)  # raises, with what to do
    sees = sees or model_type in _PACKED
    hears = not sees or sound_document(folder) is not None
    audio, why = audio_of(folder, model_type, config) if hears else ({}, "")
    model = Model(
        folder=folder,
        model_type=model_type,
        audio=audio,
        audio_why=why,
        sees=sees,
        prompt="plain" if hears and has_tokenizer else None,
        text_prompt="plain" if hears and has_tokenizer else None,
        has_tokenizer=has_tokenizer,
        has_weights=any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")),
    )
    return _seeing(model, config) if sees else _hearing(model, config)


def _hearing(model: Model, config: dict[str, Any]) -> Model:
    features = model.audio.get("features")
    if config and features in ("extractor", "w2v_bert", "waveform"):
        model = replace(model, task=_task_of(config, OF_SOUND, of_types=OF_SOUND))
    if model.model_type == "whisper":
        longest = _positive(config.get("max_target_positions"))
        tags = _tags(model.folder)
        return replace(model, prompt="whisper", text_prompt="whisper", max_label_tokens=longest, tags=tags)
    is_asr = model.has_tokenizer and features == "qwen3_asr" and model.model_type in ("", "qwen3_asr")
    return replace(model, prompt="qwen3_asr") if is_asr else model


def _seeing(model: Model, config: dict[str, Any]) -> Model:
    """Returns a model with what its image processor asks of a config."""
    text, classes = (
        found if isinstance(found := config.get(name), dict) else {} for name in ("text_config", "id2label")
    )
    task = _task_of(config, _OF_IMAGES, of_types=_OF_TYPES) if config else None
    # Names in the order of their numbers; LABEL_0 and so on are names of no data.
    names = [str(classes[key]) for key in sorted(classes, key=int)] if all(map(str.isdecimal, classes)) else []
    is_named = any(name != f"LABEL_{number}" for number, name in enumerate(names))
    model = replace(
        model,
        task=task,
        class_names=tuple(names) if is_named else (),
        num_classes=len(classes) if isinstance(config.get("id2label"), dict) else None,
        max_positions=_positive((text or config).get("max_position_embeddings")),
    )
    _, document = processor_document(model.folder)
    if not (model.has_tokenizer and is_native(document) and has_vision_tokens(model.folder)):
        return model
    if model.model_type in _PACKED:
        task = Task("chat", f"its config.json has model_type {model.model_type}")
    return replace(model, prompt="chat", images=image_settings(model.folder), task=task)


def _tags(folder: Path) -> frozenset[str]:
    """Returns the tags of languages, `<|en|>`, that the files of a tokenizer name."""
    found: set[str] = set()
    for name in _TOKENIZERS:
        path = folder / name
        if path.is_file() and path.stat().st_size <= _MAX_JSON:
            found.update(_TAG.findall(path.read_text("utf-8", "replace")))
    return frozenset(found)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def audio_of(folder: Path, model_type: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the settings of `[audio]` for a model, and why these; nothing of a folder that says nothing of sound.

    A step of forebay's own is taken where it makes the values of the folder's extractor, else the extractor itself.
    Raises ConfigError for an extractor that names code of its own, and for bins that no step has.
    """
    document = sound_document(folder)
    if document is None:
        return _of_type(folder, model_type, config)
    found = ExtractorFolder.read(folder)
    kind = found.kind or f"the extractor of {found.model_type}"
    native = native_step(found, dtype="float32")
    if native is not None:
        settings: dict[str, Any] = {"features": native.name}
        if native.name == "log_mel":
            settings["n_mels"] = _n_mels(folder, config, document)
        return settings, f"what its {kind} gives, by a step of forebay's own, which is faster"
    rate = document.get("sampling_rate")
    settings = {"features": "extractor", "extractor": folder}
    if isinstance(rate, int) and rate != _RATE_HZ:
        settings["sample_rate_hz"] = rate
    return settings, f"what its {kind} gives of each recording, as transformers calls it"


def _of_type(folder: Path, model_type: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the features of a model whose folder has no extractor, by its type."""
    why = f"features of {an(model_type)}; the folder holds no {PROCESSORS[0]}"
    if model_type == "whisper":
        return {"features": "log_mel", "n_mels": _n_mels(folder, config, {})}, why
    if model_type in ("wav2vec2", "hubert", "wavlm"):
        lacks = f"; if {an(model_type)} hears normalised recordings, save its extractor there and run init again"
        return {"features": "waveform", "dtype": "float32"}, f"{why}{lacks}"
    features = {"qwen3_asr": "qwen3_asr", "wav2vec2-bert": "w2v_bert"}.get(model_type)
    return ({}, "") if features is None else ({"features": features}, why)


def _n_mels(folder: Path, config: Mapping[str, Any], features: Mapping[str, Any]) -> int:
    found = config.get("num_mel_bins", features.get("feature_size", 80))
    if found not in (80, 128):
        raise ConfigError(f"--model {folder}: {found!r} mel bins, and features log_mel have 80 or 128; name a Whisper")
    return int(found)


def sound_document(folder: Path) -> dict[str, Any] | None:
    """Returns what a folder says of its feature extractor; None where it has none."""
    plain, nested = (json_of(folder / name) for name in PROCESSORS)
    for part in ("feature_extractor", "audio_processor"):
        if isinstance(nested.get(part), dict):
            return dict(nested[part])
    is_sound = "feature_extractor_type" in plain and not _IMAGE_SETTINGS & plain.keys()
    return plain if is_sound or "sampling_rate" in plain else None


def sees_images(folder: Path) -> bool:
    """Returns whether a folder has an image processor."""
    plain, nested = (json_of(folder / name) for name in PROCESSORS)
    is_old = "feature_extractor_type" in plain and bool(_IMAGE_SETTINGS & plain.keys()) and "sampling_rate" not in plain
    return "image_processor_type" in plain or is_old or isinstance(nested.get("image_processor"), dict)


def json_of(path: Path) -> dict[str, Any]:
    """Returns the object in a file of a model; an empty one where there is no file, or no object in it."""
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


def _task_of(
    config: Mapping[str, Any], tasks: Mapping[str, Sequence[str]], *, of_types: Collection[str]
) -> Task | None:
    """Returns what a model is trained on; None where its config.json leaves that open. Loads transformers.

    tasks: tables of classes by the name of a task. of_types: tasks that a model type decides where no class is named.
    """
    architectures, model_type = config.get("architectures"), str(config.get("model_type", ""))
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    for name, tables in tasks.items():
        classes = [each for table in tables for found in _classes_of(table).values() for each in found]
        if isinstance(named, str) and named and named in classes:
            return Task(name, f"its config.json names {named}")
    for name in of_types:
        for table in tasks[name]:
            if found := _classes_of(table).get(model_type):
                return Task(name, f"its config.json has model_type {model_type}, {found[0]}")
    return None


def is_talker(model_type: str) -> bool:
    """Whether transformers has a class of a model type that learns conversations over images or clips."""
    return any(model_type in _classes_of(table) for table in _OF_IMAGES["chat"])


def _classes_of(task: str) -> dict[str, tuple[str, ...]]:
    """Returns the classes of a table of transformers by model type."""
    from transformers.models.auto import modeling_auto  # not at import: a folder of a native step needs none of it

    names: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return {kind: (found,) if isinstance(found, str) else tuple(found) for kind, found in names.items()}
