"""One run on the demo recordings with everything that the loop can be told: epochs, rates, rest, passes, a resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import forebay
from forebay.config import Config
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import TrainReport, run
from forebay.train.models.model_folder import load_model

ROOT = Path(__file__).parents[3]


def demo_config(folder: Path) -> Config:
    """Returns the demo with 6 clips an epoch, read without a cache."""
    overrides = [
        f"train.output_dir={folder}",
        "loader.cache=off",
        "source.max_samples=6",
        "source.max_duration_s=6.0",
        "plan.batch_seconds=6",
    ]
    config = forebay.load_config(ROOT / "configs" / "demo_speech.toml", overrides=overrides)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train,
            max_steps=None,
            epochs=2,
            grad_acc=2,
            warmup_steps=0,
            warmup_ratio=0.1,
            schedule="linear",
            freeze=("encoder.layers.0",),
            embed_lr_mult=0.5,
            gradient_checkpointing=True,
            log_every=1,
            checkpoint_every=2,
        ),
    )


def trained(config: Config, *, resume: bool = False, stop_at: int | None = None) -> tuple[TrainReport, list[StepLog]]:
    lines: list[StepLog] = []

    def log(line: StepLog) -> None:
        lines.append(line)
        if line.step == stop_at:
            raise KeyboardInterrupt("stopped")

    AcceleratorState._reset_state(reset_partial_state=True)
    report = run(config, resume=resume, log=log)
    assert report is not None
    return report, lines


# 10 s or more: two runs of 2 epochs, with features made on the fly.
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_of_epochs_on_the_demo_stops_and_goes_on(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "whole")
    report, whole = trained(config)
    steps = [line.step for line in whole]
    assert steps == list(range(1, report.steps + 1))
    assert report.steps % 2 == 0
    warmup = math.ceil(report.steps * 0.1)
    rates = [line.learning_rate / config.train.learning_rate for line in whole]
    assert rates[warmup - 1] == rates[warmup] == 1.0
    assert rates[-1] == pytest.approx(1 / (report.steps - warmup))
    assert report.loss_last < report.loss_first
    stored = load_file(Path(str(report.checkpoint)) / "model.safetensors")
    made = load_model(Path(str(config.train.model)), seed=config.loader.seed, init="random").state_dict()
    resting = [name for name in stored if torch.equal(stored[name], made[name])]
    assert [name for name in resting if ".layers." in name] == [name for name in stored if "encoder.layers.0." in name]
    config = demo_config(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        trained(config, stop_at=4)
    again, lines = trained(config, resume=True)
    assert [line.step for line in lines][-1] == report.steps == again.steps
    assert [line.loss for line in lines] == [line.loss for line in whole[-len(lines) :]]
