"""Model folders: what they say, random and stored weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import AudioConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.models import ctc
from forebay.train.models.model_folder import check_batch, check_config, check_constants, load_model, model_facts
from tests.train.models import foreign
from tests.train.tiny import config_of, qwen3_asr_batch, qwen3_asr_folder, whisper_batch, whisper_folder


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


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(0, 4))
def test_frames_become_ids(rows: list[list[int]], blank: int) -> None:
    width = max(map(len, rows))
    logits = torch.nn.functional.one_hot(torch.tensor([row + [3] * (width - len(row)) for row in rows]), 5).float()
    wanted = []
    for row in rows:
        kept = [token for place, token in enumerate(row) if place == 0 or row[place - 1] != token]
        wanted.append([token for token in kept if token != blank])
    assert ctc.greedy(logits, torch.tensor([len(row) for row in rows]), blank_id=blank) == wanted


@pytest.mark.parametrize("kind", ["ctc", "ctc of mel"])
def test_frames_of_a_clip_are_those_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    make, batch = foreign.KINDS[kind]
    facts = model_facts(make(tmp_path))
    model, inputs = load_model(tmp_path, seed=0, init="random").eval(), batch(0)
    main = type(model).main_input_name
    frames = ctc.num_frames(facts, model, inputs)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        clip = {main: inputs[main][row : row + 1, :length], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        assert model(**clip).logits.shape[1] == frames[row] == ctc.num_frames(facts, model, clip)
        assert ctc.num_frames(facts, model, {main: clip[main]}) == frames[row]
