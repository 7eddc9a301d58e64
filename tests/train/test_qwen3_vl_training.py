"""Qwen3-VL in the reference loop: what its folder says, what it refuses, and that it learns packs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.collate.packed import PackCollator
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.models.model_folder import check_batch, check_config, check_constants, load_model, model_facts
from tests.train.tiny import ListLoader, config_of, num_labels, whisper_folder
from tests.train.tiny_vl import CONSTANTS, IMAGE, FakeVlSource, conversations, qwen3_vl_folder, vl_config

DEMO = Path(__file__).parents[2] / "demo" / "vision" / "model"


def packs(count: int, **collator: Any) -> list[Any]:
    collate = PackCollator(FakeVlSource(), **collator)
    return [collate(conversations(seed, 3)) for seed in range(count)]


def test_facts_of_the_tiny_and_of_the_demo_model(tmp_path: Path) -> None:
    facts = model_facts(qwen3_vl_folder(tmp_path))
    assert (facts.model_type, facts.vocab_size, facts.labels_are_shifted) == ("qwen3_vl", 64, False)
    assert facts.takes_packs
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_token_id": IMAGE}
    of_videos = {"tokens_per_second": None, "video_family": "qwen3", "video_token_id": 61}
    assert facts.constants == {"features": "patches", "prompt": "chat", **sizes, **of_videos}
    demo, document = model_facts(DEMO), json.loads((DEMO / "config.json").read_bytes())
    assert demo.constants["image_token_id"] == document["image_token_id"]


def test_weights_come_back_from_a_folder(tmp_path: Path) -> None:
    made = load_model(qwen3_vl_folder(tmp_path / "config"), seed=3, init="random")
    made.save_pretrained(tmp_path / "stored")
    stored = dict(load_model(tmp_path / "stored", seed=0).named_parameters())
    assert all(torch.equal(stored[name], parameter) for name, parameter in made.named_parameters())
    assert all(stored[name].requires_grad == p.requires_grad for name, p in made.named_parameters())


def test_configs_of_the_other_line_are_refused(tmp_path: Path) -> None:
    vision, speech = model_facts(qwen3_vl_folder(tmp_path / "vl")), model_facts(whisper_folder(tmp_path / "whisper"))
    check_config(vision, vl_config(tmp_path, model=tmp_path / "vl"))
    with pytest.raises(
        ConfigError, match=r"is a qwen3_vl model and takes packs .*tiny\.toml has no \[vision\] section"
    ):
        check_config(vision, config_of(tmp_path, model=tmp_path / "vl"))
    with pytest.raises(ConfigError, match=r"is a whisper model and takes audio, .*tiny\.toml has a \[vision\] section"):
        check_config(speech, vl_config(tmp_path, model=tmp_path / "whisper"))


def test_constants_of_another_model_are_refused(tmp_path: Path) -> None:
    facts = model_facts(qwen3_vl_folder(tmp_path))
    check_constants(facts, CONSTANTS)
    wrong = {
        "features": "log_mel",
        "prompt": "whisper",
        "patch_size": 14,
        "merge_size": 1,
        "temporal_patch_size": 1,
        "image_token_id": IMAGE + 1,
    }
    for name, value in wrong.items():
        with pytest.raises(CacheMismatchError, match=rf"{name}: the model in .* wants .*, the cache has '?{value}"):
            check_constants(facts, {**CONSTANTS, name: value})


@pytest.mark.parametrize("name", ["patches", "image_grid_thw", "position_ids", "input_ids", "labels"])
def test_batches_that_are_no_packs_are_refused(tmp_path: Path, name: str) -> None:
    facts = model_facts(qwen3_vl_folder(tmp_path))
    batch = packs(1, dtype=None)[0].fields
    check_batch(facts, batch)
    check_batch(facts, packs(1)[0])
    del batch[name]
    with pytest.raises(CacheMismatchError, match=rf"batch has no field {name} .* qwen3_vl model .* \[vision\] section"):
        check_batch(facts, batch)


def test_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    [batch] = packs(1)
    batch["input_ids"][0, 0] = 64
    with pytest.raises(
        CacheMismatchError, match=r"input_ids holds token ids .* to 64, the model in .* has ids 0 to 63"
    ):
        check_batch(model_facts(qwen3_vl_folder(tmp_path)), batch)


@pytest.mark.usefixtures("fresh_accelerate")
def test_training_on_packs_learns_them_from_uint8_and_from_floats_alike(tmp_path: Path) -> None:
    folder = qwen3_vl_folder(tmp_path / "model")
    config = vl_config(
        tmp_path, model=folder, max_steps=20, learning_rate=1e-2, warmup_steps=1, grad_acc=2, log_every=1
    )
    losses = []
    for dtype in (None, torch.float32):
        lines: list[StepLog] = []
        report = train(
            config,
            loader=ListLoader(packs(4, dtype=dtype)),
            source_kind="cache",
            constants=CONSTANTS,
            log=lines.append,
        )
        losses.append([line.loss for line in lines])
        assert report.loss_last < 0.8 * report.loss_first
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("fresh_accelerate")
def test_samples_of_packs_are_counted_in_a_step(tmp_path: Path) -> None:
    from forebay.train.loop.schedule import host_sum, micro_batch_groups

    groups = micro_batch_groups(ListLoader(packs(3)), size=3, count_targets=num_labels, sum_over_ranks=host_sum(1))
    assert next(groups).num_samples == 9
    groups.close()


@pytest.mark.usefixtures("fresh_accelerate")
def test_uint8_patches_without_their_table_stop_the_run(tmp_path: Path) -> None:
    config = vl_config(tmp_path, model=qwen3_vl_folder(tmp_path / "model"), max_steps=1)
    with pytest.raises(ConfigError, match="need the patch_table of their cache"):
        train(config, loader=ListLoader(packs(1, dtype=None)), source_kind="cache")
