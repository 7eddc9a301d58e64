"""Conversations with clips in training: forebay's own loop and its resume, TRL's trainer, two ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl import SFTConfig

from forebay import load_config
from forebay.config import Config
from forebay.train.loop.run import run
from forebay.train.models.model_folder import load_model
from forebay.train.select import make_loader
from tests.sound_talks import Talks, built, packed_talks
from tests.train.integrations.test_trl import SftTrainer

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]
PLANS = {"pack": 'kind = "pack"\nseq_len = 250\nmax_frames = 64', "bucket": 'kind = "bucket"\nbatch_size = 2'}
TRAIN = '\n[train]\nmodel = "qwen2_audio"\ninit = "random"\nmax_steps = {}\nlearning_rate = 1e-2\nlog_every = 1\n'


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    return Talks.made(tmp_path_factory.mktemp("talks"), "qwen2_audio")


def config_of(talks: Talks, plan: str, steps: int, out: Path, *overrides: str) -> Config:
    settings = f'train.output_dir="{out}"', *overrides
    config = talks.config(*settings, plan=PLANS[plan] + TRAIN.format(steps))
    built(config)
    return config


def last_loss(config: Config, *, resume: bool = False, stop_at: int | None = None) -> float | None:
    """Returns the last loss of a run, which may be stopped behind a step."""

    def stop(line: Any) -> None:
        if line.step == stop_at:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        report = run(config, resume=resume, log=stop)
        assert report is not None
        return report.loss_last
    return None


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.few("bucket")
def test_a_trainer_of_trl_has_the_losses_of_a_plain_loop(plan: str, talks: Talks, tmp_path: Path) -> None:
    config = config_of(talks, plan, 2, tmp_path)
    model = load_model(talks.model, seed=0, init="random")
    with torch.no_grad():
        wanted = [model(**batch).loss.item() for batch in make_loader(config)]
    arguments = SFTConfig(
        output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, num_train_epochs=1, bf16=False,
        learning_rate=0.0, logging_steps=1, gradient_checkpointing=False, save_strategy="no",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(talks.model)
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    trainer = SftTrainer(model=model, args=arguments, processing_class=tokenizer, train_dataset=loader)
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_have_the_batches_of_one_and_go_on_where_they_stopped(
    plan: str, talks: Talks, tmp_path: Path
) -> None:
    config = config_of(talks, plan, 2, tmp_path)
    whole = [_rows(batch) for batch in make_loader(config, dp_rank=0, dp_world_size=1)]
    ranks = [make_loader(config, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    shares = [[_rows(batch) for batch in loader] for loader in ranks]
    assert [rows for step in zip(*shares, strict=True) for rows in step][: len(whole)] == whole
    first = make_loader(config, dp_rank=0, dp_world_size=1)
    begun = iter(first)
    next(begun)
    other = make_loader(config, dp_rank=0, dp_world_size=1)
    other.load_state_dict(first.state_dict())
    assert [_rows(batch) for batch in other] == whole[1:]


def _rows(batch: Any) -> list[list[int]]:
    found: list[list[int]] = batch["input_ids"].tolist()
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.few("pack")
def test_a_run_that_stopped_goes_on_as_if_it_had_not(plan: str, talks: Talks, tmp_path: Path) -> None:
    whole = last_loss(config_of(talks, plan, 4, tmp_path / "whole"))
    config = config_of(talks, plan, 4, tmp_path / "parts", "train.checkpoint_every=2")
    assert last_loss(config, stop_at=3) is None
    assert last_loss(config, resume=True) == whole


def test_packs_of_clips_and_images_are_learnt_from(tmp_path: Path) -> None:
    packed_talks(tmp_path, "qwen2_5_omni")
    settings = {"model": "qwen2_5_omni", "init": "random", "max_steps": 2, "learning_rate": 0.0, "log_every": 1}
    overrides = [f"train.{name}={json.dumps(value)}" for name, value in {**settings, "output_dir": "out"}.items()]
    config = load_config(tmp_path / "config.toml", overrides=overrides)
    model = load_model(tmp_path / "qwen2_5_omni", seed=config.loader.seed, init="random")
    first, second = itertools.islice(make_loader(config), 2)
    assert {"input_features", "pixel_values"} <= first.keys()
    with torch.no_grad():
        wanted = model(**second).loss.item()
    assert last_loss(config) == pytest.approx(wanted, rel=1e-5)
