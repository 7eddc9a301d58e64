"""Passes of the model: activations are really computed again, and a compiled model trains and is saved as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forebay.config import TrainConfig
from forebay.errors import ConfigError
from forebay.train.loop import trainable as compiled
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import TrainReport, train
from forebay.train.loop.trainable import set_passes
from forebay.train.models.model_folder import load_model
from tests.train.tiny import ListLoader, config_of, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


def trained(config: Any, batches: list[dict[str, torch.Tensor]], **kwargs: Any) -> tuple[TrainReport, list[float]]:
    lines: list[StepLog] = []
    report = train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, **kwargs)
    return report, [line.loss for line in lines]


@pytest.mark.parametrize("again", [True, False])
def test_a_layer_runs_twice_a_step_where_activations_are_computed_again(whisper: Path, *, again: bool) -> None:
    model = load_model(whisper, seed=0, init="random")
    set_passes(model, TrainConfig(gradient_checkpointing=again))
    calls: list[str] = []
    for part in ("encoder", "decoder"):
        layer = getattr(model.model, part).layers[1]
        layer.fc1.register_forward_hook(lambda *_, part=part: calls.append(part))
    model(**whisper_batch(0), use_cache=False).loss.backward()
    assert sorted(calls) == sorted(["encoder", "decoder"] * (2 if again else 1))
    assert model.config.use_cache is True  # what a checkpoint says of generation


def test_a_model_that_cannot_compute_again_is_refused(whisper: Path) -> None:
    model = load_model(whisper, seed=0, init="random")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"train.gradient_checkpointing: .* does not support .*; set it to false"):
        set_passes(model, TrainConfig(gradient_checkpointing=True))


# More than 5 s: dynamo traces one layer of an encoder and a decoder in 2 s, and traces them again for other widths. The
# backend runs the traced graph as it is; inductor would compile it for a minute.
@pytest.mark.parametrize(
    ("precision", "widths"), [("no", [9, 6, 7]), pytest.param("bf16", [9], marks=pytest.mark.wide)]
)
def test_a_compiled_model_has_the_losses_and_the_checkpoint_of_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, widths: list[int]
) -> None:
    """Three widths are two graphs: from the second on the width is a symbol."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    model = whisper_folder(tmp_path / "model", encoder_layers=1, decoder_layers=1)
    batches = [whisper_batch(seed, num_tokens=(2, width)) for seed, width in enumerate(widths)]
    config = config_of(tmp_path, model=model, max_steps=3, learning_rate=3e-3, log_every=1, mixed_precision=precision)
    report, losses = trained(config, batches)
    assert report.compilations == 0
    plain = load_file(Path(str(report.checkpoint)) / "model.safetensors")
    again = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=True))
    with_compile, close = trained(again, batches)
    assert close == pytest.approx(losses, rel=1e-5 if precision == "no" else 1e-2)
    assert with_compile.compilations == min(len(widths), 2)
    assert with_compile.lines()[-1] == ("1 graph compiled" if len(widths) == 1 else "2 graphs compiled")
    stored = load_file(Path(str(with_compile.checkpoint)) / "model.safetensors")
    assert stored.keys() == plain.keys()  # no name begins with _orig_mod
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=4))
    assert trained(longer, batches, resume=True)[0].steps == 4
