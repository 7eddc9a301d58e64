"""Configs, sources and batches that a model does not take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.models.model_folder import check_batch, check_config, check_constants, model_facts
from tests.train.tiny import config_of, qwen3_asr_batch, qwen3_asr_folder, whisper_batch, whisper_folder


def test_config_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    facts = model_facts(whisper_folder(tmp_path / "model"))
    config = config_of(tmp_path, model=tmp_path / "model")
    check_config(facts, config)
    with pytest.raises(ConfigError, match=r"audio\.n_mels is 128, but the model .* takes 80 mel bins"):
        check_config(facts, config_of(tmp_path, model=tmp_path / "model", n_mels=128))
    with pytest.raises(ConfigError, match=r'audio\.features is "qwen3_asr", but .* takes "log_mel"'):
        check_config(facts, config_of(tmp_path, model=tmp_path / "model", model_type="qwen3_asr"))
    with pytest.raises(ConfigError, match=r"text\.prompt is None"):
        check_config(facts, dataclasses.replace(config, text=None))
    qwen = model_facts(qwen3_asr_folder(tmp_path / "qwen"))
    check_config(qwen, config_of(tmp_path, model=tmp_path / "qwen", model_type="qwen3_asr"))


def test_constants_of_another_model_are_refused(tmp_path: Path) -> None:
    facts = model_facts(qwen3_asr_folder(tmp_path))
    constants = {"features": "qwen3_asr", "prompt": "qwen3_asr", "n_mels": None, "audio_token_id": 30}
    check_constants(facts, constants)
    for name, value in (("features", "log_mel"), ("prompt", "plain"), ("n_mels", 80), ("audio_token_id", 31)):
        with pytest.raises(CacheMismatchError, match=rf"{name}: the model in .* wants .*, the cache has '?{value}"):
            check_constants(facts, {**constants, name: value})


def test_batch_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    facts = model_facts(whisper_folder(tmp_path))
    batch = whisper_batch(0)
    check_batch(facts, batch)
    with pytest.raises(CacheMismatchError, match="wants 80 mel bins, the cache has 128"):
        check_batch(facts, whisper_batch(0, n_mels=128))
    with pytest.raises(CacheMismatchError, match=r"no field decoder_input_ids .* a whisper model needs"):
        check_batch(facts, qwen3_asr_batch(0))
    with pytest.raises(CacheMismatchError, match=r"decoder_input_ids has 18 tokens, the model in .* takes 16"):
        check_batch(facts, whisper_batch(0, num_tokens=[17]))


def test_text_without_audio_fits_the_models_that_learn_from_it(tmp_path: Path) -> None:
    whisper, qwen = whisper_folder(tmp_path / "whisper"), qwen3_asr_folder(tmp_path / "qwen")
    vision = dataclasses.replace(model_facts(whisper), model_type="qwen3_vl", text_prompt=None)
    constants = {"features": "none", "prompt": "plain", "n_mels": None}
    batch = {name: torch.full((2, 5), 7) for name in ("input_ids", "labels")} | {"attention_mask": torch.ones(2, 5)}
    check_constants(model_facts(qwen), constants)
    check_batch(model_facts(qwen), batch)
    with pytest.raises(
        CacheMismatchError, match=r"the qwen3_vl model in .* takes no text without audio, and the cache has"
    ):
        check_constants(vision, constants)
    with pytest.raises(CacheMismatchError, match=r"batch has no field input_features .* a qwen3_vl model needs"):
        check_batch(vision, batch)
    with pytest.raises(CacheMismatchError, match=r"batch has no field decoder_input_ids .* a whisper model needs"):
        check_batch(model_facts(whisper), batch)
    batch["input_ids"][1, 2] = 30
    with pytest.raises(
        CacheMismatchError, match=r"batch has audio tokens \(id 30\) in input_ids and no field input_features"
    ):
        check_batch(model_facts(qwen), batch)
    batch["input_ids"][1, 2] = 40
    with pytest.raises(CacheMismatchError, match=r"input_ids holds token ids 7 to 40"):
        check_batch(model_facts(qwen), batch)


@pytest.mark.parametrize("name", ["decoder_input_ids", "labels"])
@pytest.mark.parametrize("wrong", [40, 41, 51865, -1, -101])
def test_token_id_without_an_embedding_is_refused(tmp_path: Path, name: str, wrong: int) -> None:
    facts = model_facts(whisper_folder(tmp_path))
    batch = whisper_batch(0)
    batch[name][0, 1] = wrong
    if name == "labels" and wrong == -1:
        wrong = batch[name][0, 1] = -101  # -1 to -99 are below every id and above the ignored label
    with pytest.raises(CacheMismatchError, match=rf"{name} holds token ids .*{wrong}.*has ids 0 to 39"):
        check_batch(facts, batch)
