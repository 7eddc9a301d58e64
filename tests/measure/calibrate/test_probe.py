"""The line of a probe on fake tensors: straight, and what real tensors take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config
from forebay.config.train import LoraConfig
from forebay.measure.fake_tensors import PARTS, FakeSteps, tracked_step
from forebay.measure.step_runner import StepRunner, for_trials
from forebay.train.models.model_folder import model_facts
from tests.train.tiny import config_of, whisper_batch, whisper_folder


def steps_of(kind: Any, folder: Path, *, accumulates: bool = False, **train: Any) -> tuple[Any, Config]:
    model = whisper_folder(folder / "model", d_model=128, encoder_ffn_dim=256, decoder_ffn_dim=256)
    config = for_trials(config_of(folder, model=model, **train))
    source: Any = {} if kind is FakeSteps else None
    return kind(config, model_facts(model), source, accumulates=accumulates), config


def batch_of(size: int) -> Any:
    return whisper_batch(1, num_samples=size, num_tokens=[9] * size)


def test_the_peak_is_a_line_in_the_batch_and_that_of_real_tensors(tmp_path: Path, fresh_accelerate: None) -> None:
    fake, _ = steps_of(FakeSteps, tmp_path)
    found = {size: tracked_step(fake, batch_of(size)) for size in (8, 32, 64)}
    expected = found[8].total + (found[32].total - found[8].total) / 24 * 56
    assert found[64].total == pytest.approx(expected, rel=0.02)
    assert set(found[8].parts) == set(PARTS)
    assert found[8].update_bytes == found[64].update_bytes > found[8].parts["weights"]
    real, _ = steps_of(StepRunner, tmp_path)
    measured = tracked_step(real, batch_of(32))
    assert measured.total == pytest.approx(found[32].total, rel=0.02)
    for part in ("weights", "optimizer"):
        assert measured.parts[part] == pytest.approx(found[32].parts[part], rel=0.01)


@pytest.mark.wide
def test_parts_are_weights_and_two_moments_and_gradients_where_a_step_accumulates(tmp_path: Path) -> None:
    fake, _ = steps_of(FakeSteps, tmp_path)
    weights = sum(p.numel() * 4 for p in fake.model.parameters())
    learning = sum(p.numel() * 4 for p in fake.model.parameters() if p.requires_grad)
    alone = tracked_step(fake, batch_of(16))
    twice = tracked_step(steps_of(FakeSteps, tmp_path, accumulates=True)[0], batch_of(16))
    assert alone.parts["weights"] == weights
    assert alone.parts["optimizer"] == pytest.approx(2 * learning, rel=0.01)
    assert twice.parts["gradients"] > alone.parts["gradients"]
    assert twice.parts["gradients"] == pytest.approx(learning, rel=0.05)


@pytest.mark.wide
def test_what_rests_has_no_gradient_and_no_moments(tmp_path: Path) -> None:
    whole = tracked_step(steps_of(FakeSteps, tmp_path)[0], batch_of(16))
    frozen = tracked_step(steps_of(FakeSteps, tmp_path, freeze=("encoder",))[0], batch_of(16))
    adapted = tracked_step(steps_of(FakeSteps, tmp_path, lora=LoraConfig(rank=2))[0], batch_of(16))
    assert frozen.parts["weights"] == whole.parts["weights"] < adapted.parts["weights"]
    assert adapted.parts["optimizer"] < frozen.parts["optimizer"] < whole.parts["optimizer"]
    assert frozen.parts["activations"] < whole.parts["activations"]


@pytest.mark.wide
def test_half_precision_and_checkpoints_take_less(tmp_path: Path) -> None:
    whole = tracked_step(steps_of(FakeSteps, tmp_path)[0], batch_of(16))
    half = tracked_step(steps_of(FakeSteps, tmp_path, mixed_precision="bf16")[0], batch_of(16))
    again = tracked_step(steps_of(FakeSteps, tmp_path, gradient_checkpointing=True)[0], batch_of(16))
    assert half.parts["activations"] < whole.parts["activations"]
    assert again.parts["activations"] < whole.parts["activations"]
