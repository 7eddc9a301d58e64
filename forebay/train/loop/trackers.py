"""TensorBoard, wandb, MLflow and the like, by accelerate's trackers: what a run's log says, at its step."""

from __future__ import annotations

import dataclasses
import difflib
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError, MissingExtraError
from forebay.store.files import write_bytes
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.meter import StepLog

_IDS = "trackers.json"
"""Under `logs/`: what the services call the run, so that a resumed run goes on there."""


def check_trackers(settings: TrainConfig) -> None:
    """Returns when every name of `train.trackers` is one of accelerate's and its package is installed.

    Raises ConfigError for another name, with all of accelerate's and the nearest, MissingExtraError for a package that
    is missing: accelerate itself would go on without such a tracker, and without a word.
    """
    if not settings.trackers:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    for name in settings.trackers:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"train.trackers names {name!r}, wanted names among {', '.join(known)}{hint}")
        if name not in map(str, get_available_trackers()):
            raise MissingExtraError(
                f"train.trackers names {name!r} and its package is not installed; run: pip install {name}"
            )


def tracker_settings(config: Config) -> dict[str, Any]:
    """Returns what an `Accelerator` is to be made with for the trackers of a config; nothing where it names none."""
    if not config.train.trackers:
        return {}
    from accelerate.utils import ProjectConfiguration

    folder = run_folder(config)
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
    return {"log_with": list(config.train.trackers), "project_config": project}


class Trackers:
    """The trackers of a run. Only rank 0's say anything; without `train.trackers` nothing does."""

    def __init__(self, config: Config, accelerator: Any, *, step: int) -> None:
        """Starts them. step: steps done before; above 0 they go on with the run that they know.

        accelerator: made with `tracker_settings`. Raises ForebayError where a tracker cannot start.
        """
        self._accelerator = accelerator
        if not config.train.trackers:
            return
        folder = run_folder(config) / "logs"
        ids = _read_ids(folder) if step else {}
        try:
            accelerator.init_trackers(
                config.name,
                # The settings of a resumed run are there already, and TensorBoard would show them as another run.
                config=None if step else dict(_scalars(dataclasses.asdict(config))),
                init_kwargs=_arguments(config.train.trackers, ids, folder=folder, step=step),
            )
            if accelerator.is_main_process:
                self._keep_ids(folder, ids)
        except Exception as err:  # each service has errors of its own: no account, no network, no database
            accelerator.trackers.clear()  # what has not started cannot be finished
            raise ForebayError(
                f"cannot start the trackers {', '.join(config.train.trackers)} under {folder}: {err}; "
                "mend that, or leave train.trackers out"
            ) from err

    def log(self, line: StepLog) -> None:
        """Hands the figures of a log line on, as `train/loss` and so on."""
        self._hand_on("train", dataclasses.asdict(line), step=line.step)

    def log_evaluation(self, result: EvalResult) -> None:
        """Hands the figures of an evaluation on, as `dev/wer` and so on."""
        self._hand_on(result.name, dataclasses.asdict(result), step=result.step)

    def close(self) -> None:
        """Finishes them. Calling it again does nothing."""
        # Not `end_training`, which would also end the process group, whoever started that.
        while self._accelerator.trackers:
            self._accelerator.trackers.pop().finish()

    def _hand_on(self, group: str, figures: Mapping[str, Any], *, step: int) -> None:
        if not self._accelerator.trackers:
            return
        numbers = {name: value for name, value in _scalars(figures) if not isinstance(value, str | bool)}
        numbers.pop("step")
        self._accelerator.log({f"{group}/{name}": value for name, value in numbers.items()}, step=step)

    def _keep_ids(self, folder: Path, ids: dict[str, str]) -> None:
        for tracker in self._accelerator.trackers:
            if tracker.name == "mlflow":
                ids["mlflow"] = tracker.active_run.info.run_id
        if ids:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / _IDS, json.dumps(ids).encode())


def _arguments(names: tuple[str, ...], ids: dict[str, str], *, folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Returns what each tracker is made with; a new id of wandb's is added to `ids`."""
    found: dict[str, dict[str, Any]] = {}
    if "tensorboard" in names and step:
        found["tensorboard"] = {"purge_step": step + 1}  # what came after the checkpoint comes again
    if "wandb" in names:
        ids.setdefault("wandb", uuid.uuid4().hex[:16])
        folder.mkdir(parents=True, exist_ok=True)
        found["wandb"] = {"id": ids["wandb"], "resume": "allow", "dir": str(folder)}
    if "mlflow" in ids:
        found["mlflow"] = {"run_id": ids["mlflow"]}
    return found


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / _IDS).read_bytes())
    except (OSError, ValueError):
        return {}  # another run then, at those services
    return {str(name): str(value) for name, value in ids.items()} if isinstance(ids, dict) else {}


def _scalars(values: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yields every number, text and truth value of nested mappings by its dotted name; nothing else."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, prefix=f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
