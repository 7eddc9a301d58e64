"""Evaluations decide about checkpoints in a whole run, which can be stopped anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import EvalConfig
from forebay.errors import ForebayError
from forebay.train.evaluation import evaluations
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop.after_step import AfterStep
from forebay.train.loop.checkpoint import load_state, run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from tests.train.tiny import ListLoader, config_of, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
LOSSES = {2: 3.0, 3: 2.0, 4: 2.5, 5: float("nan"), 6: 1.0, 7: 2.25}
"""Of the steps that are evaluated; step 6 is a trap, so that step 3 is the best one."""


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(self: AfterStep, step: int) -> list[EvalResult]:
        if step not in LOSSES:
            return []
        trap = "repeats itself" if step == 6 else None
        common: dict[str, Any] = {"step": step, "wer": None, "cer": None, "num_samples": 1, "elapsed_s": 0.1}
        return [
            EvalResult(name="test", loss=0.1, text="none", **common),
            EvalResult(name="dev", loss=LOSSES[step], text="none", trap=trap, **common),
        ]

    monkeypatch.setattr(AfterStep, "_evaluate", evaluate)
    monkeypatch.setattr(f"{evaluations.__name__}.open_sets", lambda *_, **__: [])


def run_in(folder: Path, **options: Any) -> Path:
    """Trains seven steps with a checkpoint after every third; returns the run folder."""
    sets = tuple(EvalConfig(name=name, cache=f"/caches/{name}") for name in ("dev", "test"))
    config = config_of(
        folder,
        model=whisper_folder(folder / "model"),
        max_steps=7,
        learning_rate=3e-3,
        log_every=1,
        checkpoint_every=3,
        save_total_limit=2,
        save_best="loss",
        eval=sets,
    )
    loader = ListLoader([whisper_batch(seed) for seed in range(2)])
    train(config, loader=loader, source_kind="cache", **{"log": lambda _: None, **options})
    return run_folder(config)


def contents(folder: Path) -> dict[str, Any]:
    """Returns names, last.json and best.json, and what every checkpoint knows; the model's folder differs."""
    states = {path.name: load_state(path) for path in sorted(folder.glob("checkpoint-*"))}
    return {
        "states": {name: (state.kept, state.best, state.files, state.loss_last) for name, state in states.items()},
        "named": {name: json.loads((folder / name).read_bytes()) for name in ("last.json", "best.json")},
    }


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    return contents(run_in(tmp_path / "whole"))


def test_the_best_evaluation_has_a_checkpoint(whole: dict[str, Any]) -> None:
    assert list(whole["states"]) == [f"checkpoint-{step:08d}" for step in (3, 6, 7)]
    assert whole["named"] == {
        "last.json": {"checkpoint": "checkpoint-00000007"},
        "best.json": {"checkpoint": "checkpoint-00000003", "step": 3, "name": "dev", "metric": "loss", "value": 2.0},
    }


def test_a_run_that_was_stopped_anywhere_has_the_folder_of_one_that_was_not(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    """It is stopped in each of its steps, after the log line and before the evaluation."""
    folder = tmp_path / "stopped"
    for step in range(1, 8):

        def stop(line: StepLog, at: int = step) -> None:
            if line.step == at:
                raise KeyboardInterrupt("stopped")

        with pytest.raises(KeyboardInterrupt, match="stopped"):
            run_in(folder, log=stop, resume=True)
    assert contents(run_in(folder, resume=True)) == whole


def test_a_full_disk_at_the_best_checkpoint_leaves_the_one_before(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved = tmp_path / "full", 0

    def full(*args: Any, **kwargs: Any) -> None:
        nonlocal saved
        saved += 1
        if saved == 2:
            raise OSError(28, "No space left on device")
        torch_save(*args, **kwargs)

    torch_save = torch.save
    with monkeypatch.context() as disk:
        disk.setattr(torch, "save", full)
        with pytest.raises(ForebayError, match=r"of step 3: .*No space left.*make room.*--resume"):
            run_in(folder)
    found = sorted(path.name for path in (folder / "runs" / "tiny").iterdir() if path.name != "logs")
    assert found == ["best.json", "checkpoint-00000002", "last.json"]
    assert json.loads((folder / "runs" / "tiny" / "best.json").read_bytes())["step"] == 2
    assert contents(run_in(folder, resume=True)) == whole
