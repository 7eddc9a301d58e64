"""The training loop against a plain torch loop: accumulation, ends of epochs, clipping, resume, and what stops it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from forebay.config import TrainConfig
from forebay.errors import CacheMismatchError, ConfigError, ForebayError, MissingExtraError, PlanError, ResumeError
from forebay.train.loop import run as module
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import run, train
from forebay.train.loop.schedule import Schedule
from forebay.train.loop.trainable import adamw
from forebay.train.models.model_folder import load_model
from forebay.train.models.objective import summed_loss
from forebay.train.prefetch import THREAD_NAME
from tests.train.tiny import (
    ListLoader,
    config_of,
    qwen3_asr_batch,
    qwen3_asr_folder,
    real_loader,
    real_loader_model,
    whisper_batch,
    whisper_folder,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    return whisper_folder(tmp_path / "model")


def losses_of(config: Any, batches: list[dict[str, torch.Tensor]], **kwargs: Any) -> list[float]:
    """Returns the loss of every step; the config logs each."""
    lines: list[StepLog] = []
    train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, **kwargs)
    return [line.loss for line in lines]


def plain_losses(config: Any, groups: list[list[dict[str, torch.Tensor]]]) -> list[float]:
    """The oracle: one large loss a group, plain torch, no accelerate."""
    settings = config.train
    model = load_model(Path(settings.model), seed=config.loader.seed, init=settings.init)
    optimizer = adamw(model, settings)
    schedule = Schedule.of(settings, num_steps=settings.max_steps)
    losses = []
    for step, group in enumerate(groups, start=1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = settings.learning_rate * schedule.factor(step)
        terms, count = [], 0
        for batch in group:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            terms.append(summed_loss(model(**inputs).logits, batch["labels"], labels_are_shifted=True))
            count += int((batch["labels"] != -100).sum())
        loss = torch.stack(terms).sum() / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_odd_last_micro_batch_of_an_epoch_is_a_step(tmp_path: Path, whisper: Path) -> None:
    batches = [whisper_batch(seed, num_tokens=tokens) for seed, tokens in enumerate([(2, 9), (1,), (5, 5, 6)])]
    config = config_of(tmp_path, model=whisper, max_steps=4, grad_acc=2, learning_rate=3e-3, log_every=1)
    losses = losses_of(config, batches)
    expected = plain_losses(config, [batches[:2], batches[2:], batches[:2], batches[2:]])
    assert losses == pytest.approx(expected, rel=1e-5)


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path: Path, whisper: Path) -> None:
    large = whisper_batch(3, num_tokens=(2, 9, 1, 7))
    parts = [{name: tensor[rows] for name, tensor in large.items()} for rows in (slice(0, 1), slice(1, 4))]
    config = config_of(tmp_path, model=whisper, max_steps=3, learning_rate=3e-3, log_every=1)
    accumulating = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_acc=2))
    assert losses_of(accumulating, parts) == pytest.approx(losses_of(config, [large]), rel=1e-5)


def test_gradients_are_clipped(tmp_path: Path, whisper: Path) -> None:
    batches = [whisper_batch(seed) for seed in range(3)]
    config = config_of(tmp_path, model=whisper, max_steps=6, learning_rate=3e-3, log_every=1, max_grad_norm=0.05)
    unclipped = dataclasses.replace(config, train=dataclasses.replace(config.train, max_grad_norm=0.0))
    clipped_losses, unclipped_losses = losses_of(config, batches), losses_of(unclipped, batches)
    assert clipped_losses == pytest.approx(plain_losses(config, [[batch] for batch in batches * 2]), rel=1e-5)
    assert clipped_losses != pytest.approx(unclipped_losses, rel=1e-5)


@pytest.mark.parametrize("model_type", ["whisper", "qwen3_asr"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.few
def test_loss_falls_on_a_repeated_batch(tmp_path: Path, model_type: str, precision: str) -> None:
    make_folder, make_batch = (
        (whisper_folder, whisper_batch) if model_type == "whisper" else (qwen3_asr_folder, qwen3_asr_batch)
    )
    config = config_of(
        tmp_path,
        model=make_folder(tmp_path / "model"),
        model_type=model_type,
        max_steps=12,
        learning_rate=5e-3,
        warmup_steps=2,
        mixed_precision=precision,
    )
    report = train(config, loader=ListLoader([make_batch(0)]), source_kind="uncached")
    assert report.loss_first == pytest.approx(math.log(40), rel=0.1)
    assert report.loss_last < 0.6 * report.loss_first
    assert (report.steps, report.source, report.padding) == (12, "uncached", 0.25)
    assert report.samples_per_s > 0
    assert 0 <= report.data_wait_share < 1
    assert report.checkpoint == str(find_checkpoint(run_folder(config)))


def test_bf16_is_in_effect(tmp_path: Path, whisper: Path) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1, log_every=1)
    (exact,) = losses_of(config, [whisper_batch(0)])
    AcceleratorState._reset_state(reset_partial_state=True)
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, mixed_precision="bf16"))
    (rounded,) = losses_of(half, [whisper_batch(0)])
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.few("bf16")
def test_checkpoints_on_the_way_change_nothing(tmp_path: Path, whisper: Path, precision: str) -> None:
    batches = [whisper_batch(seed) for seed in range(2)]
    config = config_of(tmp_path, model=whisper, max_steps=4, learning_rate=3e-3, log_every=1, mixed_precision=precision)
    often = dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoint_every=1))
    assert losses_of(often, batches) == losses_of(config, batches)


@pytest.mark.parametrize("model_type", ["whisper", "qwen3_asr"])
def test_loss_of_the_first_step_is_that_of_transformers(tmp_path: Path, model_type: str) -> None:
    whisper = model_type == "whisper"
    folder = (whisper_folder if whisper else qwen3_asr_folder)(tmp_path / "model")
    batch = (whisper_batch if whisper else qwen3_asr_batch)(7)
    config = config_of(tmp_path, model=folder, model_type=model_type, max_steps=1, seed=5)
    report = train(config, loader=ListLoader([batch]), source_kind="cache")
    assert report.loss_first == pytest.approx(load_model(folder, seed=5, init="random")(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
@pytest.mark.few("2")
def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, stop_after: int) -> None:
    """Bit for bit, with dropout, in the middle (1, 3, 5) and at the end (2) of an epoch of two steps."""
    folder = whisper_folder(tmp_path / "model", dropout=0.2)
    batches = [whisper_batch(seed) for seed in range(3)]
    config = config_of(
        tmp_path,
        model=folder,
        max_steps=6,
        grad_acc=2,
        learning_rate=3e-3,
        warmup_steps=2,
        log_every=1,
        checkpoint_every=1,
    )
    whole = losses_of(config, batches)
    lines: list[StepLog] = []

    def stop(line: StepLog) -> None:
        lines.append(line)
        if line.step == stop_after + 1:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(config, loader=ListLoader(batches), source_kind="cache", log=stop)
    assert [line.loss for line in lines] == whole[: stop_after + 1]
    torch.manual_seed(123)
    assert losses_of(config, batches, resume=True) == whole[stop_after:]


@pytest.mark.parametrize("stop_after", [2, 4, 5])
@pytest.mark.few("4")
def test_resumed_run_with_forebays_loader_has_the_same_losses(tmp_path: Path, stop_after: int) -> None:
    """Four steps an epoch of seven micro-batches: stopped within it, at its end, and in the next one."""
    config = config_of(
        tmp_path,
        model=real_loader_model(tmp_path / "model"),
        model_type="qwen3_asr",
        max_steps=7,
        grad_acc=2,
        learning_rate=3e-3,
        warmup_steps=7,
        log_every=1,
    )
    lines: list[StepLog] = []
    whole = train(config, loader=real_loader(), source_kind="cache", log=lines.append)
    losses = [line.loss for line in lines]
    shorter = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=stop_after))
    train(shorter, loader=real_loader(num_threads=0), source_kind="cache")
    lines.clear()
    resumed = train(config, loader=real_loader(num_threads=1), source_kind="cache", resume=True, log=lines.append)
    assert [line.loss for line in lines] == losses[stop_after:]
    assert (resumed.loss_first, resumed.loss_last) == (whole.loss_first, whole.loss_last)
    assert 0 < resumed.padding < 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def test_resume_without_a_checkpoint_starts_and_after_the_last_step_does_nothing(
    tmp_path: Path, whisper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=2)
    with caplog.at_level(logging.INFO, logger="forebay.train"):
        first = train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache", resume=True)
    assert "no checkpoint in" in caplog.text
    assert "step 2: loss" in caplog.text
    again = train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache", resume=True)
    assert (again.steps, again.loss_first, again.loss_last) == (2, first.loss_first, first.loss_last)
    assert again.checkpoint == first.checkpoint


def test_changed_settings_are_named_on_resume(tmp_path: Path, whisper: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    checkpoint = train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache").checkpoint
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=2))
    report = train(longer, loader=ListLoader([whisper_batch(0)]), source_kind="cache", resume=Path(str(checkpoint)))
    assert report.steps == 2
    assert "max_steps 1 -> 2" in caplog.text


def test_resume_refuses_another_model(tmp_path: Path, whisper: Path) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")
    other = whisper_folder(tmp_path / "other", vocab_size=50)
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, model=str(other)))
    with pytest.raises(ResumeError, match=r"vocab_size is 40 in .*checkpoint-00000001 and 50 in .*other"):
        train(changed, loader=ListLoader([whisper_batch(0)]), source_kind="cache", resume=True)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_resume_names_a_damaged_file(tmp_path: Path, whisper: Path, name: str) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    checkpoint = train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache").checkpoint
    path = Path(str(checkpoint)) / name
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ResumeError, match=r"checkpoint-00000001.*train without --resume"):
        train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache", resume=True)


def test_nan_loss_stops_with_its_step_and_keeps_the_checkpoint_before(tmp_path: Path, whisper: Path) -> None:
    batches = [whisper_batch(seed) for seed in range(4)]
    batches[2]["input_features"][0, 0, 0] = math.nan
    config = config_of(tmp_path, model=whisper, max_steps=4, checkpoint_every=2, log_every=4)
    with pytest.raises(ForebayError, match=r"the loss of step 3 is nan.*forebay train --resume"):
        train(config, loader=ListLoader(batches), source_kind="cache")
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-00000002"


def test_fp16_on_the_cpu_is_refused(tmp_path: Path, whisper: Path) -> None:
    config = config_of(tmp_path, model=whisper, mixed_precision="fp16")
    with pytest.raises(ConfigError, match=r'mixed_precision = "fp16" needs an accelerator.*"bf16" or "no"'):
        train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")


def test_second_precision_in_one_process_is_refused(tmp_path: Path, whisper: Path) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, mixed_precision="bf16"))
    with pytest.raises(ConfigError, match=r'mixed_precision = "bf16" is not possible here'):
        train(other, loader=ListLoader([whisper_batch(0)]), source_kind="cache")


def test_ranks_that_would_train_alone_are_refused(
    tmp_path: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but accelerate sees 1 rank"):
        train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")


def test_filler_of_weight_0_teaches_nothing(tmp_path: Path, whisper: Path) -> None:
    class Filling(ListLoader):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for batch in super().__iter__():
                yield batch
                self.weight = 0
                yield whisper_batch(77)

    batches = [whisper_batch(seed) for seed in range(2)]
    config = config_of(tmp_path, model=whisper, max_steps=4, learning_rate=3e-3, log_every=1)
    expected = losses_of(config, batches)
    accumulating = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_acc=2))
    losses: list[float] = []
    train(accumulating, loader=Filling(batches), source_kind="cache", log=lambda line: losses.append(line.loss))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_environment_does_not_scale_the_loss(tmp_path: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [whisper_batch(seed) for seed in range(2)]
    config = config_of(tmp_path, model=whisper, max_steps=4, learning_rate=3e-3, log_every=1, max_grad_norm=0.05)
    expected = losses_of(config, batches)
    GradientState._reset_state()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert losses_of(config, batches) == expected


def test_loader_is_closed_at_the_last_step_and_on_errors(tmp_path: Path, whisper: Path) -> None:
    loader = ListLoader([whisper_batch(seed) for seed in range(5)])
    train(config_of(tmp_path, model=whisper, max_steps=2), loader=loader, source_kind="cache")
    assert loader.num_closed == 1
    wrong = ListLoader([whisper_batch(0), whisper_batch(1, n_mels=128), whisper_batch(2)])
    with pytest.raises(CacheMismatchError, match="wants 80 mel bins, the cache has 128"):
        train(config_of(tmp_path, model=whisper, max_steps=3), loader=wrong, source_kind="cache")
    assert wrong.num_closed == 1


def test_loader_without_batches_is_refused(tmp_path: Path, whisper: Path) -> None:
    with pytest.raises(PlanError, match="no batch in a whole epoch"):
        train(config_of(tmp_path, model=whisper), loader=ListLoader([]), source_kind="cache")


def test_run_checks_the_model_and_makes_the_loader_of_its_rank(
    tmp_path: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, int]] = []
    constants = {"features": "log_mel", "prompt": "whisper", "n_mels": 80, "pad_token_id": 0}

    def make_loader(config: Any, **ranks: int) -> ListLoader:
        calls.append(ranks)
        loader = ListLoader([whisper_batch(0)])
        loader.source = SimpleNamespace(constants=constants, slots=None)  # type: ignore[attr-defined]
        return loader

    monkeypatch.setattr(module, "make_loader", make_loader)
    config = config_of(tmp_path, model=whisper, max_steps=1)
    report = run(config)
    assert report is not None
    assert (report.steps, report.source) == (1, "uncached")
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    assert calls == [{"dp_rank": 0, "dp_world_size": 1}]
    with pytest.raises(ConfigError, match=r"n_mels is 128, but .* takes 80 mel bins"):
        run(config_of(tmp_path, model=whisper, n_mels=128))
    with pytest.raises(ConfigError, match=r"train\.model is missing"):
        run(dataclasses.replace(config, train=TrainConfig()))
    with pytest.raises(ConfigError, match=r"has no weights, neither model\.safetensors nor"):
        run(config_of(tmp_path, model=whisper, init="pretrained"))
    assert len(calls) == 1
    constants["n_mels"] = 128
    with pytest.raises(CacheMismatchError, match=r"n_mels: the model in .* wants 80, the cache has 128"):
        run(config)


def test_a_resumed_run_takes_the_weights_of_its_checkpoint(tmp_path: Path, whisper: Path) -> None:
    batches = [whisper_batch(seed) for seed in range(2)]
    losses_of(config_of(tmp_path, model=whisper, max_steps=1), batches)
    losses = losses_of(config_of(tmp_path, model=whisper, max_steps=2, init="pretrained"), batches, resume=True)
    assert len(losses) == 1


def test_accelerate_that_is_not_installed_names_the_extra(
    tmp_path: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[train\]'"):
        train(config_of(tmp_path, model=whisper), loader=ListLoader([whisper_batch(0)]), source_kind="cache")


def test_learning_rate_rises_linearly_then_follows_half_a_cosine(tmp_path: Path, whisper: Path) -> None:
    schedule = Schedule(num_steps=12, warmup_steps=4, kind="cosine")
    factors = [schedule.factor(step) for step in range(1, 13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert Schedule(num_steps=1, warmup_steps=0, kind="cosine").factor(1) == 1.0
    config = config_of(tmp_path, model=whisper, max_steps=4, warmup_steps=2, learning_rate=1e-3, log_every=1)
    rates: list[float] = []
    train(
        config,
        loader=ListLoader([whisper_batch(0)]),
        source_kind="cache",
        log=lambda line: rates.append(line.learning_rate),
    )
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_biases_and_norms_are_not_decayed(whisper: Path) -> None:
    model = load_model(whisper, seed=0, init="random")
    decayed, kept = adamw(model, TrainConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in kept["params"]} == {1}
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(kept["params"]) == len(trainable)
