"""Trackers: what TensorBoard has on disk is what the log said, at its step, of a resumed run too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forebay.errors import ConfigError, ForebayError, MissingExtraError
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.launch import Trackers, check_trackers
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import train
from tests.train.tiny import ListLoader, config_of, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def tracked(tmp_path: Path, **settings: Any) -> Any:
    return config_of(
        tmp_path,
        model=whisper_folder(tmp_path / "model"),
        learning_rate=3e-3,
        log_every=1,
        checkpoint_every=2,
        trackers=("tensorboard",),
        **settings,
    )


def curve(config: Any, name: str) -> dict[int, float]:
    """Returns value by step, read back from the event files."""
    events = EventAccumulator(str(run_folder(config) / "logs" / config.name))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboard_has_the_lines_of_the_log_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    config = tracked(tmp_path, max_steps=5)
    lines: list[StepLog] = []

    def stop(line: StepLog) -> None:
        lines.append(line)
        if line.step == 3:
            raise KeyboardInterrupt("stopped")

    batches = [whisper_batch(seed) for seed in range(2)]
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(config, loader=ListLoader(batches), source_kind="cache", log=stop)
    # The event file is closed, and whole, after an error too.
    assert curve(config, "train/loss") == pytest.approx({line.step: line.loss for line in lines})
    del lines[2:]
    train(config, loader=ListLoader(batches), source_kind="cache", log=lines.append, resume=True)
    for name in ("loss", "learning_rate", "grad_norm", "samples_per_s", "cpu_share"):
        wanted = {line.step: getattr(line, name) for line in lines}
        assert curve(config, f"train/{name}") == pytest.approx(wanted), name
    assert list(curve(config, "train/loss")) == [1, 2, 3, 4, 5]
    (settings,) = run_folder(config).glob("logs/tiny/*/hparams.yml")
    assert "train.learning_rate: 0.003" in settings.read_text()


class Told:
    """An accelerator with one tracker, which keeps what it is told."""

    is_main_process = True

    def __init__(self, *, name: str = "wandb", run_id: str = "") -> None:
        self.trackers: list[Any] = []
        self.started: dict[str, Any] = {}
        self.told: list[tuple[dict[str, Any], int]] = []
        self.finished = 0
        self._name, self._run_id = name, run_id

    def init_trackers(self, name: str, *, config: Any, init_kwargs: Any) -> None:
        self.started = {"name": name, "config": config, **init_kwargs}
        active_run = SimpleNamespace(info=SimpleNamespace(run_id=self._run_id))
        self.trackers.append(SimpleNamespace(name=self._name, finish=self.finish, active_run=active_run))

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.told.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def test_evaluations_are_told_under_the_name_of_their_set(tmp_path: Path) -> None:
    accelerator = Told()
    trackers = Trackers(config_of(tmp_path, model=tmp_path, trackers=("wandb",)), accelerator, step=0)
    result = EvalResult(
        name="dev",
        step=100,
        loss=1.25,
        wer=0.3,
        cer=None,
        num_samples=7,
        elapsed_s=2.0,
        text="none",
        languages={"hi": {"wer": 0.4, "cer": 0.1, "samples": 3}},
    )
    trackers.log_evaluation(result)
    ((values, step),) = accelerator.told
    assert step == 100
    assert values == {
        "dev/loss": 1.25,
        "dev/wer": 0.3,
        "dev/num_samples": 7,
        "dev/elapsed_s": 2.0,
        "dev/repetition_share": 0.0,
        "dev/languages.hi.wer": 0.4,
        "dev/languages.hi.cer": 0.1,
        "dev/languages.hi.samples": 3,
    }
    trackers.close()
    trackers.close()
    assert accelerator.finished == 1


def test_wandb_and_mlflow_go_on_with_the_run_that_they_know(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=tmp_path, trackers=("wandb", "mlflow"))
    first, resumed, anew = Told(), Told(name="mlflow", run_id="m7"), Told()
    Trackers(config, first, step=0)
    assert first.started["config"]["train.max_grad_norm"] == 1.0
    assert "mlflow" not in first.started
    Trackers(config, resumed, step=4)
    assert resumed.started["config"] is None
    assert resumed.started["wandb"] == first.started["wandb"]
    assert json.loads((run_folder(config) / "logs/trackers.json").read_bytes())["mlflow"] == "m7"
    again = Told()
    Trackers(config, again, step=8)
    assert again.started["mlflow"] == {"run_id": "m7"}
    Trackers(config, anew, step=0)
    assert anew.started["wandb"]["id"] != first.started["wandb"]["id"]


def test_a_tracker_without_a_writable_folder_stops_the_run(tmp_path: Path) -> None:
    config = tracked(tmp_path, max_steps=1)
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ForebayError, match="cannot start the trackers tensorboard"):
        train(config, loader=ListLoader([whisper_batch(0)]), source_kind="cache")


def test_unknown_and_missing_trackers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord', wanted names among .*wandb; the nearest is 'tensorboard'"):
        check_trackers(config_of(tmp_path, model=tmp_path, trackers=("tensorbord",)).train)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(MissingExtraError, match="pip install tensorboard"):
        check_trackers(config_of(tmp_path, model=tmp_path, trackers=("tensorboard",)).train)
    monkeypatch.setitem(sys.modules, "accelerate.tracking", None)
    check_trackers(config_of(tmp_path, model=tmp_path).train)
