"""Parts that learn, and at which rate, against plain AdamW loops; recomputed activations change nothing."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import TrainConfig
from forebay.errors import ConfigError, ResumeError
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from forebay.train.loop.trainable import LR_FACTOR, adamw, set_learning_rate, set_trainable
from forebay.train.models.model_folder import load_model
from forebay.train.models.objective import summed_loss
from tests.train.tiny import (
    ListLoader,
    config_of,
    qwen3_asr_batch,
    qwen3_asr_folder,
    whisper_batch,
    whisper_folder,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"), dropout=0.1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_asr_folder(tmp_path_factory.mktemp("qwen"))


def resting(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, seed=0).named_parameters())


def losses_of(config: Any, batches: list[dict[str, torch.Tensor]], **kwargs: Any) -> list[float]:
    lines: list[StepLog] = []
    train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, **kwargs)
    return [line.loss for line in lines]


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("encoder", "model.encoder."),
        ("model.encoder", "model.encoder."),
        ("model.decoder.layers.0", "model.decoder.layers.0."),
        ("layers.1.fc1", ("model.encoder.layers.1.fc1.", "model.decoder.layers.1.fc1.")),
        ("encoder.layers", "model.encoder.layers."),
    ],
)
def test_a_name_is_of_every_module_with_these_whole_parts(whisper: Path, name: str, beginning: Any) -> None:
    """`encoder` is not `encoder_attn` of the decoder, and `layers.1` is not `layers.10`."""
    model = load_model(whisper, seed=0, init="random")
    fixed = resting(model)  # Whisper's sinusoids
    set_trainable(model, TrainConfig(freeze=(name,)))
    wanted = {path for path, _ in model.named_parameters() if path.startswith(beginning)}
    assert wanted
    assert resting(model) == wanted | fixed
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["encodr", "model.encoder.layer", "", "layers.7", "1.fc1.weight"])
def test_a_name_of_no_module_is_refused_with_the_nearest(whisper: Path, name: str) -> None:
    model = load_model(whisper, seed=0, init="random")
    near = "'encoder'" if name == "encodr" else "the nearest are '"
    with pytest.raises(ConfigError, match=rf"train.freeze: '{name}' is the name of no module.*{near}"):
        set_trainable(model, TrainConfig(freeze=("decoder", name)))


def test_a_model_at_rest_is_refused(whisper: Path) -> None:
    model = load_model(whisper, seed=0, init="random")
    with pytest.raises(ConfigError, match=r"leave no parameter that learns; freeze fewer modules"):
        set_trainable(model, TrainConfig(freeze=("encoder", "decoder")))


def test_embeddings_rest_at_a_factor_of_0_tied_ones_too(whisper: Path) -> None:
    model = load_model(whisper, seed=0, init="random")
    fixed = resting(model)
    set_trainable(model, TrainConfig(embed_lr_mult=0.0))
    assert resting(model) - fixed == {"model.decoder.embed_tokens.weight"}


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_parameter_is_in_one_group(tmp_path: Path, *, is_tied: bool) -> None:
    model = load_model(whisper_folder(tmp_path, tie_word_embeddings=is_tied), seed=0, init="random")
    optimizer = adamw(model, TrainConfig(embed_lr_mult=0.25, weight_decay=0.1))
    own = [group for group in optimizer.param_groups if LR_FACTOR in group]
    assert [(group[LR_FACTOR], group["weight_decay"], len(group["params"])) for group in own] == [
        (0.25, 0.1, 1 if is_tied else 2)
    ]
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.125]


def plain_run(config: Any, batches: list[dict[str, torch.Tensor]], *, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The oracle: one AdamW a part of the model, at its own rate, and no groups; returns losses and weights."""
    settings = config.train
    model = load_model(Path(settings.model), seed=config.loader.seed, init="random")
    for name, parameter in model.named_parameters():
        if name.startswith(frozen):
            parameter.requires_grad = False
    embeddings = [model.get_input_embeddings().weight]
    if model.get_output_embeddings().weight is not embeddings[0]:
        embeddings.append(model.get_output_embeddings().weight)
    known = {id(parameter) for parameter in embeddings}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    optimizers = [
        torch.optim.AdamW(embeddings, lr=settings.learning_rate * settings.embed_lr_mult, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.learning_rate, weight_decay=0.0),
    ]
    losses = []
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        total = summed_loss(model(**inputs).logits, batch["labels"], labels_are_shifted=True)
        loss = total / int((batch["labels"] != -100).sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: value.detach() for name, value in model.named_parameters()}}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.few("True")
def test_embeddings_learn_at_their_own_rate_as_in_a_plain_loop(tmp_path: Path, *, is_tied: bool) -> None:
    folder = whisper_folder(tmp_path / "model", tie_word_embeddings=is_tied)
    config = config_of(
        tmp_path, model=folder, max_steps=6, learning_rate=3e-3, schedule="constant", embed_lr_mult=0.1, log_every=1
    )
    batches = [whisper_batch(seed) for seed in range(3)]
    expected = plain_run(config, batches * 2)
    assert losses_of(config, batches) == pytest.approx(expected["losses"], rel=1e-5)
    trained = weights_of(Path(str(find_checkpoint(run_folder(config)))))
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(trained[name].detach(), weight, rtol=1e-4, atol=1e-5)
    same = dataclasses.replace(config, train=dataclasses.replace(config.train, embed_lr_mult=1.0))
    assert losses_of(same, batches) != pytest.approx(expected["losses"], rel=1e-5)


def test_frozen_modules_stay_as_they_were_and_the_rest_learns_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Weight decay is on, and has no hold on what rests."""
    folder = whisper_folder(tmp_path / "model")
    config = config_of(
        tmp_path, model=folder, max_steps=3, learning_rate=3e-3, schedule="constant", freeze=("encoder",), log_every=1
    )
    batches = [whisper_batch(seed) for seed in range(3)]
    expected = plain_run(config, batches, frozen=("model.encoder",))
    assert losses_of(config, batches) == pytest.approx(expected["losses"], rel=1e-5)
    decayed = dataclasses.replace(config, train=dataclasses.replace(config.train, weight_decay=0.5))
    losses_of(decayed, batches)
    trained = weights_of(Path(str(find_checkpoint(run_folder(config)))))
    made = dict(load_model(folder, seed=0, init="random").named_parameters())
    assert all(torch.equal(trained[name], made[name]) == name.startswith("model.encoder") for name in ENOUGH)


ENOUGH = ("model.encoder.conv1.weight", "model.encoder.layers.1.fc1.weight", "model.decoder.layers.0.fc1.weight")


def test_resume_goes_on_with_frozen_modules_and_the_rates_of_today(tmp_path: Path, whisper: Path) -> None:
    config = config_of(
        tmp_path,
        model=whisper,
        max_steps=4,
        learning_rate=3e-3,
        schedule="linear",
        warmup_ratio=0.5,
        freeze=("encoder",),
        embed_lr_mult=0.5,
        weight_decay=0.1,
        log_every=1,
        checkpoint_every=2,
    )
    batches = [whisper_batch(seed) for seed in range(2)]
    whole = losses_of(config, batches)
    (tmp_path / "runs").rename(tmp_path / "whole")

    def stop(line: StepLog) -> None:
        if line.step == 3:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(config, loader=ListLoader(batches), source_kind="cache", log=stop)
    (tmp_path / "runs" / "tiny").rename(tmp_path / "kept")
    checkpoint = find_checkpoint(tmp_path / "kept")
    assert losses_of(config, batches, resume=checkpoint) == whole[2:]
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, embed_lr_mult=0.01, weight_decay=9.0))
    changed = losses_of(other, batches, resume=checkpoint)
    assert changed[0] == whole[2]  # of the weights of the checkpoint
    assert changed[1] != whole[3]  # of the rates of today
    thawed = dataclasses.replace(config, train=dataclasses.replace(config.train, freeze=()))
    with pytest.raises(ResumeError, match=r"does not fit the model.*\(freeze \['encoder'\] -> \[\]\).*set them back"):
        losses_of(thawed, batches, resume=checkpoint)


@pytest.mark.parametrize("model_type", ["whisper", "qwen3_asr"])
@pytest.mark.few("qwen3_asr")
def test_activations_that_are_computed_again_change_no_loss(
    tmp_path: Path, whisper: Path, qwen: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropout is on, and a part is frozen, behind which a re-entrant checkpoint would lose the gradients."""
    is_whisper = model_type == "whisper"
    batches = [(whisper_batch if is_whisper else qwen3_asr_batch)(seed) for seed in range(2)]
    config = config_of(
        tmp_path,
        model=whisper if is_whisper else qwen,
        model_type=model_type,
        max_steps=4,
        learning_rate=3e-3,
        freeze=("model.encoder.conv1", "encoder.layers.0") if is_whisper else ("audio_tower",),
        log_every=1,
    )
    again = dataclasses.replace(config, train=dataclasses.replace(config.train, gradient_checkpointing=True))
    plain = losses_of(config, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert losses_of(again, batches) == pytest.approx(plain, rel=1e-6)
    assert "use_cache" not in caplog.text
    assert len(set(plain)) == 4
