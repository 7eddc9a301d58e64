"""Steps that the scaler of fp16 skips: counted, survived, and too many in a row named. On the CPU, and on a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from forebay.config import Config
from forebay.errors import ForebayError
from forebay.train.loop import run as module
from forebay.train.loop.checkpoint import find_checkpoint, load_state, run_folder
from forebay.train.loop.launch import make_accelerator
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import TrainReport, train
from tests.train.tiny import ListLoader, config_of, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SCALE = 2.0**12
"""Where the scale begins: low enough that no step overflows by it."""


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def fp16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate refuses fp16 on a CPU, where torch itself casts and scales: its parts are put together here."""

    def make(config: Config, **kwargs: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        plain = dataclasses.replace(config, train=dataclasses.replace(config.train, mixed_precision="no"))
        accelerator = make_accelerator(plain, **kwargs)
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return accelerator

    monkeypatch.setattr(module, "make_accelerator", make)


def fp16_config(folder: Path, whisper: Path, **changes: Any) -> Config:
    settings = {"max_steps": 6, "learning_rate": 1e-3, "log_every": 1, "mixed_precision": "fp16", **changes}
    return config_of(folder, model=whisper, **settings)


def trained(config: Config, batches: list[dict[str, torch.Tensor]], **kwargs: Any) -> tuple[TrainReport, list[StepLog]]:
    lines: list[StepLog] = []
    report = train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, **kwargs)
    return report, lines


def bad_batch(seed: int) -> dict[str, torch.Tensor]:
    batch = whisper_batch(seed)
    batch["input_features"][0, 0, 0] = math.nan
    return batch


@pytest.mark.usefixtures("fp16_on_cpu")
def test_a_loss_that_is_not_finite_skips_its_step_and_is_counted(tmp_path: Path, whisper: Path) -> None:
    """Steps 2 and 5 have the bad batch: the weights stay, and the step before and after it have one loss."""
    good = whisper_batch(0)
    report, lines = trained(fp16_config(tmp_path, whisper), [good, bad_batch(1), good])
    losses = [line.loss for line in lines]
    assert [line.skipped_steps for line in lines] == [0, 1, 1, 1, 2, 2]
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False, True, False]
    assert losses[0] > losses[2] > losses[3] > losses[5]
    assert (report.skipped_steps, report.loss_first, report.loss_last) == (2, losses[0], losses[5])
    assert "2 steps skipped" in str(lines[-1])
    state = json.loads((Path(str(report.checkpoint)) / "state.json").read_text(encoding="utf-8"))
    assert (state["skipped_steps"], state["skipped_in_a_row"]) == (2, 0)
    assert state["scaler"]["scale"] == SCALE / 4


@pytest.mark.usefixtures("fp16_on_cpu")
def test_a_loss_of_inf_with_finite_gradients_is_skipped_too(
    tmp_path: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose logit is -inf has a loss of inf; the gradient of the sum is that of its finite part."""

    def with_inf(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs) + torch.tensor(math.inf)

    from forebay.train.models import objective

    real = objective.summed_loss
    monkeypatch.setattr(objective, "summed_loss", with_inf)
    report, _ = trained(fp16_config(tmp_path, whisper, max_steps=3), [whisper_batch(0)])
    assert report.skipped_steps == 3


@pytest.mark.usefixtures("fp16_on_cpu")
def test_count_goes_on_after_a_resume_and_the_losses_too(tmp_path: Path, whisper: Path) -> None:
    batches = [whisper_batch(0), bad_batch(1), bad_batch(2), whisper_batch(3)]
    config = fp16_config(tmp_path, whisper, max_steps=8, checkpoint_every=2)
    report, whole = trained(config, batches)
    (tmp_path / "runs").rename(tmp_path / "whole")

    def stop(line: StepLog) -> None:
        if line.step == 3:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(config, loader=ListLoader(batches), source_kind="cache", log=stop)
    run_folder(config).rename(tmp_path / "kept")
    checkpoint = find_checkpoint(tmp_path / "kept")
    assert checkpoint is not None
    assert (load_state(checkpoint).skipped_steps, load_state(checkpoint).skipped_in_a_row) == (1, 1)
    again, lines = trained(config, batches, resume=checkpoint)
    assert [repr(line.loss) for line in lines] == [repr(line.loss) for line in whole[2:]]
    assert [line.skipped_steps for line in lines] == [2, 2, 2, 3, 4, 4]
    assert (again.skipped_steps, again.loss_first) == (report.skipped_steps, report.loss_first) == (4, whole[0].loss)
    # Two in a row are one before the resume and one after it.
    with pytest.raises(ForebayError, match=r"skipped steps 2 to 3, which are train.max_skipped_steps = 2 in a row"):
        trained(
            dataclasses.replace(config, train=dataclasses.replace(config.train, max_skipped_steps=2)),
            batches,
            resume=checkpoint,
        )


@pytest.mark.usefixtures("fp16_on_cpu")
def test_too_many_in_a_row_end_the_run_with_the_remedy(tmp_path: Path, whisper: Path) -> None:
    config = fp16_config(tmp_path, whisper, max_steps=9, max_skipped_steps=3, checkpoint_every=2)
    wanted = r"skipped steps 3 to 5, .*lower train.learning_rate or train.embed_lr_mult .*forebay train --resume"
    with pytest.raises(ForebayError, match=wanted):
        trained(config, [whisper_batch(0), whisper_batch(1), *map(bad_batch, range(4))])
    checkpoint = find_checkpoint(run_folder(config))
    assert checkpoint is not None
    assert load_state(checkpoint).step == 4


def test_states_from_before_the_count_have_none(tmp_path: Path, whisper: Path) -> None:
    config = config_of(tmp_path, model=whisper, max_steps=1)
    report, _ = trained(config, [whisper_batch(0)])
    path = Path(str(report.checkpoint)) / "state.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["skipped_steps"], document["skipped_in_a_row"]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert load_state(path.parent).skipped_steps == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_fp16_on_a_gpu_skips_and_counts(tmp_path: Path, whisper: Path) -> None:
    """accelerate's own scaler, which begins at 65536: steps at the begin may be skipped beside the bad one."""
    good = whisper_batch(0)
    report, lines = trained(fp16_config(tmp_path, whisper, max_steps=12), [good] * 11 + [bad_batch(1)])
    before, after = lines[-2].skipped_steps, lines[-1].skipped_steps
    assert after == before + 1 == report.skipped_steps
    assert report.loss_last < report.loss_first
