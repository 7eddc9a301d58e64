"""The demands of a model's folder on a config, read from its JSON files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.init.found_model import TRAINED, read_model
from forebay.train.models.families import FAMILIES
from tests.init.layouts import QWEN3_ASR, QWEN3_VL, WHISPER


def folder(path: Path, *, tokenizer: bool = False, **documents: Any) -> Path:
    """A model's folder with some JSON files, by their names without `.json`."""
    path.mkdir()
    for name, document in documents.items():
        (path / f"{name}.json").write_text(document if isinstance(document, str) else json.dumps(document))
    if tokenizer:
        shutil.copy(WHISPER / "tokenizer.json", path)
    return path


def test_the_models_that_train_are_those_of_the_loop() -> None:
    assert set(TRAINED) == set(FAMILIES)


def test_a_whisper() -> None:
    model = read_model(WHISPER)
    assert (model.audio, model.prompt) == ({"features": "log_mel", "n_mels": 80}, "whisper")
    assert (model.max_label_tokens, model.has_weights, model.trains) == (448, False, True)
    assert {"<|en|>", "<|hi|>"} <= model.tags


def test_a_qwen3_asr() -> None:
    model = read_model(QWEN3_ASR)
    assert (model.audio, model.prompt, model.text_prompt) == ({"features": "qwen3_asr"}, "qwen3_asr", "plain")


def test_a_qwen3_vl() -> None:
    model = read_model(QWEN3_VL)
    assert model.images is not None
    assert (model.images.patch_size, model.prompt, model.max_positions) == (16, "chat", 8192)


@pytest.mark.parametrize(
    ("config", "extractor", "audio"),
    [
        ({"model_type": "wav2vec2-bert"}, {}, {"features": "w2v_bert"}),
        ({}, {"feature_extractor_type": "SeamlessM4TFeatureExtractor"}, {"features": "w2v_bert"}),
        ({"model_type": "hubert"}, {}, {"features": "waveform", "dtype": "float32"}),
        (
            {"model_type": "x"},
            {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 8000},
            {"features": "extractor", "extractor": Path("m"), "sample_rate_hz": 8000},
        ),
        (
            {},
            {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
            {"features": "log_mel", "n_mels": 128},
        ),
    ],
)
def test_models_of_an_own_loop(
    config: dict[str, Any], extractor: dict[str, Any], audio: dict[str, Any], tmp_path: Path
) -> None:
    model = read_model(folder(tmp_path / "m", config=config, preprocessor_config=extractor))
    found = {name: Path(value.name) if isinstance(value, Path) else value for name, value in model.audio.items()}
    assert (found, model.prompt, model.trains) == (audio, None, False)
    with_tokenizer = folder(tmp_path / "n", tokenizer=True, config=config, preprocessor_config=extractor)
    assert read_model(with_tokenizer).prompt == "plain"


def test_weights_are_seen(tmp_path: Path) -> None:
    shutil.copytree(WHISPER, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    assert read_model(tmp_path / "m").has_weights


def test_a_folder_that_is_not_there_names_the_command_that_says_its_commit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"whisper-tiny is not a folder; .*forebay fetch openai/whisper-tiny$"):
        read_model(tmp_path / "openai" / "whisper-tiny")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({}, "holds no model: no config.json, .* it holds nothing"),
        ({"other": {}}, r"holds no model: .* it holds 1 \.json"),
        ({"config": {"model_type": "whisper"}}, "holds no tokenizer"),
        ({"config": "{"}, "config.json is not JSON"),
        ({"config": {"model_type": "qwen3_vl"}}, "holds no tokenizer"),
    ],
)
def test_folders_that_are_no_model(documents: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(folder(tmp_path / "m", **documents))


def test_other_numbers_of_mel_bins_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "whisper", "num_mel_bins": 40}
    with pytest.raises(ConfigError, match="40 mel bins, and features log_mel have 80 or 128"):
        read_model(folder(tmp_path / "m", tokenizer=True, config=config))
