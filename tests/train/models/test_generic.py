"""Models of no family: which class is taken, what its batches must have, and that it learns."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forebay.config import AudioConfig, Config, PackConfig, TextConfig, VisionConfig
from forebay.config.train import LoraConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.models.generic import tasks_of
from forebay.train.models.model_folder import check_batch, check_config, check_constants, load_model, model_facts
from forebay.train.models.objective import Objective
from tests.train.models import foreign
from tests.train.models.foreign import KINDS
from tests.train.tiny import ListLoader, config_of, whisper_folder
from tests.train.tiny_vl import qwen3_vl_folder, vl_config


def config_for(folder: Path, model: Path, **train: Any) -> Config:
    """Returns a config whose text is plain; its audio does not matter to ready batches."""
    config = config_of(folder, model=model, model_type="plain", **{"learning_rate": 1e-2, "log_every": 1, **train})
    return dataclasses.replace(config, audio=AudioConfig(features="waveform"))


def losses_of(config: Config, batches: list[dict[str, torch.Tensor]], **kwargs: Any) -> list[float]:
    lines: list[StepLog] = []
    train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, **kwargs)
    return [line.loss for line in lines]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_by_its_own_loss_and_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    make, batch = KINDS[kind]
    model = make(tmp_path / "model")
    batches = [batch(0), batch(1)]
    config = config_for(tmp_path, model, max_steps=8, checkpoint_every=4, max_grad_norm=0.0)
    losses = losses_of(config, batches)
    first = load_model(model, seed=0, init="random", facts=model_facts(model))
    own = first(**batches[0], **({"return_loss": True} if kind == "pairs" else {})).loss
    rows = 2 if kind == "ctc" else 1  # Wav2Vec2 gives the sum over samples
    assert losses[0] == pytest.approx(own.item() / rows, rel=1e-5)
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoint-00000004"
    assert losses_of(config, batches, resume=checkpoint) == losses[4:]
    loaded = getattr(transformers, model_facts(model).model_class).from_pretrained(checkpoint)
    assert type(loaded).__name__ == model_facts(model).model_class


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", ["ctc", "classes", "causal"])
def test_a_step_of_two_micro_batches_is_that_of_one_large_batch(kind: str, tmp_path: Path) -> None:
    make, batch = KINDS[kind]
    model = make(tmp_path / "model")
    halves = [batch(0), batch(1)]
    whole = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    settings = {"max_steps": 3, "max_grad_norm": 0.0}
    apart = losses_of(config_for(tmp_path / "a", model, grad_acc=2, **settings), halves)
    together = losses_of(config_for(tmp_path / "b", model, **settings), [whole])
    assert apart == pytest.approx(together, rel=2e-4)


@pytest.mark.usefixtures("fresh_accelerate")
def test_adapters_and_recomputed_activations_go_with_a_model_of_no_family(tmp_path: Path) -> None:
    model = foreign.vit(tmp_path / "model")
    lora = LoraConfig(rank=2, targets=("q_proj", "v_proj", "classifier"))
    config = config_for(tmp_path, model, max_steps=6, lora=lora, gradient_checkpointing=True, checkpoint_every=3)
    losses = losses_of(config, [foreign.classes(0)])
    assert losses[-1] < losses[0]
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoint-00000003"
    assert losses_of(config, [foreign.classes(0)], resume=checkpoint) == losses[3:]


@pytest.mark.parametrize(
    ("architectures", "wanted", "why"),
    [
        (["Wav2Vec2ForCTC"], "Wav2Vec2ForCTC", "config.json names it"),
        (["Wav2Vec2ForSequenceClassification"], "Wav2Vec2ForSequenceClassification", "config.json names it"),
        (
            ["Wav2Vec2Model"],
            "Wav2Vec2ForCTC",
            "Wav2Vec2Model, which returns no loss, and it is the ctc of wav2vec2",
        ),
        (["Wav2Vec2ForPreTraining"], "Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining, which returns no loss"),
        (["LlamaForCausalLM"], "Wav2Vec2ForCTC", "config.json names no class"),
        (["os.system"], "Wav2Vec2ForCTC", "config.json names no class"),
        (None, "Wav2Vec2ForCTC", "config.json names no class, and it is the ctc of wav2vec2"),
    ],
)
def test_the_class_is_that_of_config_json_or_of_the_task(
    architectures: list[str] | None, wanted: str, why: str, tmp_path: Path
) -> None:
    folder = foreign.wav2vec2(tmp_path)
    document = json.loads((folder / "config.json").read_bytes())
    document["architectures"] = architectures
    (folder / "config.json").write_text(json.dumps(document))
    facts = model_facts(folder)
    assert facts.model_class == wanted
    assert why in facts.why


def test_the_class_is_for_what_the_config_makes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = foreign.wav2vec2(tmp_path, None)
    config = config_for(tmp_path, folder)
    assert model_facts(folder, config).model_class == "Wav2Vec2ForCTC"
    assert set(tasks_of(config)) & {"CTC", "SPEECH_SEQ_2_SEQ"}
    texts = dataclasses.replace(config, audio=AudioConfig(features="none"))
    assert tasks_of(texts) == ("CAUSAL_LM",)
    with pytest.raises(ConfigError, match=r"no model of it that returns a loss \(causal_lm were looked at\)"):
        model_facts(folder, texts)


def test_another_head_of_a_family_is_of_no_family(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path, architectures=["WhisperForAudioClassification"])
    facts = model_facts(folder)
    assert (facts.model_class, facts.own_loss is None) == ("WhisperForAudioClassification", False)
    assert model_facts(whisper_folder(tmp_path, architectures=["WhisperModel"])).own_loss is None


def test_a_family_of_packs_learns_from_images_of_its_processor_as_a_model_of_no_family(tmp_path: Path) -> None:
    folder = qwen3_vl_folder(tmp_path / "model")
    config = vl_config(tmp_path, model=folder)
    apart = dataclasses.replace(config, vision=VisionConfig(processor=str(folder), images="processor"))
    assert model_facts(folder, config).takes_packs
    facts = model_facts(folder, apart)
    assert (facts.model_class, facts.takes_packs) == ("Qwen3VLForConditionalGeneration", False)
    assert facts.own_loss is not None


def test_the_log_says_which_class_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from forebay.train.loop.trainable import new_model

    folder = foreign.vit(tmp_path / "model", None)
    with caplog.at_level(logging.INFO, logger="forebay"):
        new_model(config_for(tmp_path, folder), model_facts(folder))
    assert "is a ViTForImageClassification (config.json names no class, and it is the image_classification of vit)" in (
        caplog.text
    )


def test_weights_without_the_head_name_the_command_that_makes_one(tmp_path: Path) -> None:
    folder = foreign.vit(tmp_path, "ViTModel")
    transformers.ViTModel(transformers.ViTConfig.from_pretrained(folder)).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"lack classifier\.bias \(and 1 more\).*ViTForImageClassification\.from_pre"):
        load_model(folder, seed=0, facts=model_facts(folder))


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "match", "changes"),
    [
        ("ctc", r"no field labels \(it has attention_mask, input_values\), .*2ForCTC needs", {"labels": None}),
        ("ctc", r"no field input_values", {"input_values": None}),
        ("ctc", r"labels hold id 0, which is the blank of Wav2Vec2ForCTC", {"labels": IDS}),
        ("ctc", r"labels holds token ids 12 to 12, the model in .* has ids 0 to 11", {"labels": IDS + 12}),
        ("ctc", r"labels are \[2\], and .* wants token ids", {"labels": IDS[:, 0]}),
        ("classes", r"labels holds classes 3 to 3, .* has classes 0 to 2; .*label", {"labels": IDS[:, 0] + 3}),
        ("classes", r"labels are \[2, 3\], token ids, and .* wants a class a sample", {"labels": IDS}),
        ("pairs", r"no field input_ids", {"input_ids": None}),
        ("pairs", r"no field pixel_values", {"pixel_values": None}),
        ("causal", r"input_ids holds token ids", {"input_ids": torch.full((2, 6), 12)}),
    ],
)
def test_batches_that_a_model_cannot_take_are_refused_with_both_values(
    kind: str, match: str, changes: dict[str, torch.Tensor | None], tmp_path: Path
) -> None:
    make, batch = KINDS[kind]
    changed = {name: value for name, value in {**batch(0), **changes}.items() if value is not None}
    with pytest.raises(CacheMismatchError, match=match):
        check_batch(model_facts(make(tmp_path)), changed)


def test_what_no_module_reads_is_refused_at_the_first_pass(tmp_path: Path) -> None:
    """ViT takes any keyword; pixel_mask would be passed over."""
    facts = model_facts(foreign.vit(tmp_path))
    model, objective = load_model(tmp_path, seed=0, init="random"), Objective(facts)
    batch = {**foreign.classes(0), "pixel_mask": torch.ones(4, 16, 16), "interpolate_pos_encoding": torch.tensor(0)}
    with pytest.raises(CacheMismatchError, match=r"does not read pixel_mask of the batch and would be trained without"):
        objective(model, batch)
    del batch["pixel_mask"]
    assert objective(model, batch).loss.isfinite()


def test_what_only_an_inner_module_names_is_taken_where_it_arrives(tmp_path: Path) -> None:
    facts = model_facts(foreign.llama(tmp_path))
    model = load_model(tmp_path, seed=0, init="random")
    model.model.layers[0].register_module("probe", _Reader())
    batch = {**foreign.texts(0), "weights_of_words": torch.ones(2)}
    with pytest.raises(CacheMismatchError, match=r"does not read weights_of_words"):
        Objective(facts)(model, batch)

    def handed_on(module: Any, _: Any, named: dict[str, Any]) -> None:
        module.model.layers[0].probe(weights_of_words=named["weights_of_words"])

    model.register_forward_pre_hook(handed_on, with_kwargs=True)
    assert Objective(facts)(model, batch).loss.isfinite()


class _Reader(torch.nn.Module):
    def forward(self, weights_of_words: torch.Tensor) -> None:
        pass


def test_what_the_model_itself_refuses_is_said_with_the_shapes(tmp_path: Path) -> None:
    facts = model_facts(foreign.vit(tmp_path))
    batch = {**foreign.classes(0), "pixel_values": torch.zeros(4, 3, 32, 32)}
    wanted = r"ViTForImageClassification .* \(pixel_values float32 \[4, 3, 32, 32\], labels int64 \[4\]\): ValueError"
    with pytest.raises(CacheMismatchError, match=wanted):
        Objective(facts)(load_model(tmp_path, seed=0, init="random"), batch)


def test_a_model_without_a_loss_or_without_its_gradient_is_refused(tmp_path: Path) -> None:
    facts = model_facts(foreign.vit(tmp_path))
    model, batch = load_model(tmp_path, seed=0, init="random"), foreign.classes(0)
    with pytest.raises(CacheMismatchError, match=r"one number as its loss is wanted, the model gave none"):
        Objective(facts)(model, {"pixel_values": batch["pixel_values"]})
    model.requires_grad_(requires_grad=False)
    with pytest.raises(CacheMismatchError, match=r"its loss has no gradient"):
        Objective(facts)(model, batch)


def test_a_batch_without_targets_has_no_loss_and_no_nan(tmp_path: Path) -> None:
    facts = model_facts(foreign.llama(tmp_path))
    batch = foreign.texts(0)
    batch["labels"][:] = -100
    model = load_model(tmp_path, seed=0, init="random")
    loss = Objective(facts)(model, batch).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_configs_and_caches_that_ctc_cannot_learn_from_are_refused(tmp_path: Path) -> None:
    facts = model_facts(foreign.wav2vec2(tmp_path / "model"))
    config = config_for(tmp_path, tmp_path / "model")
    check_config(facts, config)
    with pytest.raises(ConfigError, match=r"text\.prompt is 'whisper', but .* learns a text as it is spoken"):
        check_config(facts, dataclasses.replace(config, text=TextConfig(tokenizer="", prompt="whisper")))
    with pytest.raises(ConfigError, match=r'plan\.kind is "pack", and Wav2Vec2ForCTC .* takes no packs'):
        check_config(facts, dataclasses.replace(vl_config(tmp_path, model=tmp_path), plan=PackConfig(seq_len=64)))
    check_constants(facts, {"features": "waveform", "prompt": "plain", "pad_token_id": 0})
    check_constants(facts, {"features": "waveform", "prompt": "plain", "eos_token_id": 2, "end_token": 0})
    with pytest.raises(CacheMismatchError, match=r"the end token 2 behind each text.*set text\.end_token = false"):
        check_constants(facts, {"features": "waveform", "prompt": "plain", "eos_token_id": 2})
    with pytest.raises(CacheMismatchError, match=r"patches for packs of a Qwen-VL"):
        check_constants(facts, {"features": "patches", "patch_table": []})


def test_a_waveform_that_the_models_extractor_would_normalise_is_refused(tmp_path: Path) -> None:
    folder = foreign.wav2vec2(tmp_path / "model")
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(folder)
    config = config_for(tmp_path, folder)
    check_config(model_facts(folder), config)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r'is "waveform", but the feature extractor in .* normalises each clip'):
        check_config(model_facts(folder), config)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_clip_shorter_than_its_text_is_named_before_its_loss_is_infinite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = foreign.wav2vec2(tmp_path / "model")
    batch = foreign.sound(0, (400, 60))
    with pytest.raises(CacheMismatchError, match=r"a clip has 1 frames of Wav2Vec2ForCTC and its text wants \d"):
        losses_of(config_for(tmp_path, model, max_steps=1), [batch])
    lenient = foreign.wav2vec2(tmp_path / "lenient", ctc_zero_infinity=True)
    with caplog.at_level(logging.WARNING, logger="forebay"):
        assert losses_of(config_for(tmp_path / "b", lenient, max_steps=2), [batch])
    assert caplog.text.count("1 of 2 clips of a batch have fewer frames of Wav2Vec2ForCTC than their text wants") == 1
