"""Model folders: what they say, random and stored weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import AudioConfig
from forebay.errors import ConfigError
from forebay.train.models.model_folder import check_batch, check_config, load_model, model_facts
from tests.train.tiny import config_of, qwen3_asr_folder, whisper_folder


def test_facts_of_both_models(tmp_path: Path) -> None:
    whisper = model_facts(whisper_folder(tmp_path / "whisper"))
    assert (whisper.model_type, whisper.vocab_size, whisper.max_label_tokens) == ("whisper", 40, 16)
    assert whisper.constants == {"features": "log_mel", "prompt": "whisper", "n_mels": 80}
    qwen = model_facts(qwen3_asr_folder(tmp_path / "qwen"))
    assert (qwen.model_type, qwen.vocab_size, qwen.max_label_tokens) == ("qwen3_asr", 40, None)
    features = {"features": "qwen3_asr", "prompt": "qwen3_asr"}
    assert qwen.constants == {**features, "n_mels": 128, "audio_token_id": 30}
    assert (whisper.labels_are_shifted, qwen.labels_are_shifted) == (True, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*config\.json \(No such file"),
        ("{", r"is not a transformers config\.json"),
        ("[]", r"is not a transformers config\.json"),
        ("{}", r"is not a transformers config\.json: KeyError\('model_type'\)"),
        ('{"model_type": "encodec"}', r"'encodec' and architectures None, and transformers has no model .* a loss"),
        (
            '{"model_type": ["whisper"]}',
            r"model_type \"\['whisper'\]\", which the installed .* does not have",
        ),
        ('{"model_type": "qwen3-asr"}', r"model_type 'qwen3-asr', which .* not have; the nearest is 'qwen3_asr'"),
        ('{"model_type": "bert", "auto_map": {}}', r"has auto_map, which names code of its own, and forebay runs none"),
        ('{"model_type": "whisper", "d_model": "wide"}', r"transformers refuses"),
    ],
)
def test_unusable_model_folder_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        model_facts(tmp_path)


def test_random_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    folder = qwen3_asr_folder(tmp_path)
    state = torch.get_rng_state()
    first = load_model(folder, seed=1, init="random")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    second, third = (load_model(folder, seed=seed, init="random") for seed in (1, 2))
    weights = [dict(model.named_parameters()) for model in (first, second, third)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(
        weights[0]["model.language_model.embed_tokens.weight"], weights[2]["model.language_model.embed_tokens.weight"]
    )
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    assert first.training


@pytest.mark.parametrize("make_folder", [whisper_folder, qwen3_asr_folder])
def test_stored_weights_come_back_in_float32_and_frozen_as_made(tmp_path: Path, make_folder: Any) -> None:
    made = load_model(make_folder(tmp_path / "config"), seed=3, init="random")
    made.bfloat16().save_pretrained(tmp_path / "stored")
    stored = load_model(tmp_path / "stored", seed=0)
    wanted = {name: (p.float(), p.requires_grad) for name, p in made.named_parameters()}
    got = {name: (p, p.requires_grad) for name, p in stored.named_parameters()}
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name][0], wanted[name][0]) for name in wanted)
    assert {name: frozen for name, (_, frozen) in got.items()} == {name: frozen for name, (_, frozen) in wanted.items()}
    assert {p.dtype for p in stored.parameters()} == {torch.float32}
    assert stored.training


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = load_model(whisper_folder(tmp_path / "config"), seed=0, init="random")
    model.save_pretrained(tmp_path / "wide")
    document = json.loads((tmp_path / "wide" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**document, "decoder_ffn_dim": 32}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot load the weights in .*wide"):
        load_model(tmp_path / "wide", seed=0)
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**document, "decoder_layers": 3}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the weights in .*wide lack model\.decoder\.layers\.2"):
        load_model(tmp_path / "wide", seed=0)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pickled weights only; save them as model\.safetensors"):
        load_model(folder, seed=0)


@pytest.mark.parametrize("misnamed", [None, "model.safetensor", "model-00001-of-00002.safetensors"])
def test_no_weights_are_an_error_that_lists_the_folder(tmp_path: Path, misnamed: str | None) -> None:
    """A folder of which a download left the weights out, or a slip of the pen, must not train from scratch unseen."""
    folder = whisper_folder(tmp_path)
    if misnamed is not None:
        (folder / misnamed).write_bytes(b"weights")
    listed = "'config.json'" + (f", '{misnamed}'" if misnamed else "")
    with pytest.raises(ConfigError, match=rf"has no weights, .*; it holds {listed}; .* set train.init = \"random\""):
        load_model(folder, seed=0)


def test_random_weights_that_leave_weights_unused_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = load_model(whisper_folder(tmp_path / "config"), seed=0, init="random")
    assert "not used" not in caplog.text
    made.save_pretrained(tmp_path / "stored")
    again = load_model(tmp_path / "stored", seed=1, init="random")
    assert f"the weights in {tmp_path / 'stored'} are not used (model.safetensors)" in caplog.text
    assert not torch.equal(again.model.decoder.embed_tokens.weight, made.model.decoder.embed_tokens.weight)


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    made = load_model(whisper_folder(tmp_path / "config"), seed=3, init="random")
    made.save_pretrained(tmp_path / "stored", max_shard_size="200KB")
    assert not (tmp_path / "stored" / "model.safetensors").exists()
    assert (tmp_path / "stored" / "model.safetensors.index.json").exists()
    stored = dict(load_model(tmp_path / "stored", seed=0).named_parameters())
    assert all(torch.equal(stored[name], value) for name, value in made.named_parameters())


def test_generation_config_of_the_folder_is_kept(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"max_length": 11, "eos_token_id": 2}', encoding="utf-8")
    assert load_model(folder, seed=0, init="random").generation_config.max_length == 11


def test_a_family_without_mel_bins_is_checked_without_them(tmp_path: Path) -> None:
    """Known mel bins are compared; a family that names none, say of waveforms, takes what its fields say."""
    facts = replace(
        model_facts(whisper_folder(tmp_path)),
        constants={"features": "waveform", "prompt": "whisper"},
        value_fields=("input_values",),
    )
    config = config_of(tmp_path, model=tmp_path)
    check_config(facts, replace(config, audio=AudioConfig(features="waveform")))
    with pytest.raises(ConfigError, match=r'audio.features is "log_mel", but .* takes "waveform"'):
        check_config(facts, config)
    ids = torch.ones((1, 2), dtype=torch.int64)
    batch = {"input_values": torch.zeros(1, 8), "decoder_input_ids": ids, "labels": ids}
    check_batch(facts, batch)
    check_batch(replace(facts, value_fields=("input_features",)), {**batch, "input_features": torch.zeros(1, 8)})


@pytest.mark.parametrize("adapter", ["{}", '{"base_model_name_or_path": "somewhere/else"}', "["])
def test_an_adapter_beside_whole_weights_is_refused(tmp_path: Path, adapter: str) -> None:
    folder = whisper_folder(tmp_path)
    load_model(folder, seed=0, init="random").save_pretrained(folder)
    (folder / "adapter_config.json").write_text(adapter)
    with pytest.raises(ConfigError, match=r"adapter_config.json lies beside whole weights") as caught:
        load_model(folder, seed=0, init="pretrained")
    assert caught.value.code == "FB108"
