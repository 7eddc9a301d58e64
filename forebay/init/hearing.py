"""Which features a model's folder asks for: a step of forebay's own, or its feature extractor whatever its class.

Read from the folder's documents, without transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_step
from forebay.visible import an

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MAX_JSON = 64 * 1024 * 1024
_WHISPER_FEATURES = (80, 128)
_RATE_HZ = 16_000
_OF_IMAGES = frozenset(("do_resize", "image_mean", "crop_size", "size"))
"""Settings that image processors of old folders have, which call themselves feature extractors."""


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
    match model_type:
        case "whisper":
            return {"features": "log_mel", "n_mels": _n_mels(folder, config, {})}, why
        case "qwen3_asr":
            return {"features": "qwen3_asr"}, why
        case "wav2vec2-bert":
            return {"features": "w2v_bert"}, why
        case "wav2vec2" | "hubert" | "wavlm":
            lacks = f"; if {an(model_type)} hears normalised recordings, save its extractor there and run init again"
            return {"features": "waveform", "dtype": "float32"}, f"{why}{lacks}"
    return {}, ""


def _n_mels(folder: Path, config: Mapping[str, Any], features: Mapping[str, Any]) -> int:
    found = config.get("num_mel_bins", features.get("feature_size", 80))
    if found not in _WHISPER_FEATURES:
        raise ConfigError(f"--model {folder}: {found!r} mel bins, and features log_mel have 80 or 128; name a Whisper")
    return int(found)


def sound_document(folder: Path) -> dict[str, Any] | None:
    """Returns what a folder says of its feature extractor; None where it has none."""
    plain, nested = (json_of(folder / name) for name in PROCESSORS)
    for part in ("feature_extractor", "audio_processor"):
        if isinstance(nested.get(part), dict):
            return dict(nested[part])
    if "sampling_rate" in plain:
        return plain
    is_sound = "feature_extractor_type" in plain and not _OF_IMAGES & plain.keys()
    return plain if is_sound else None


def sees_images(folder: Path) -> bool:
    """Returns whether a folder has an image processor."""
    plain, nested = (json_of(folder / name) for name in PROCESSORS)
    is_old = "feature_extractor_type" in plain and bool(_OF_IMAGES & plain.keys()) and "sampling_rate" not in plain
    return "image_processor_type" in plain or is_old or isinstance(nested.get("image_processor"), dict)


def json_of(path: Path) -> dict[str, Any]:
    """Returns the object in a file of a model; an empty one where there is no file, or no object in it."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ConfigError(f"{path} has more than {MAX_JSON} bytes, and no model's settings have")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}; check its permissions") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path} is not JSON: {err}; save the model again") from err
    return document if isinstance(document, dict) else {}
