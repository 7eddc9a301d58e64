"""`forebay eval`: the sets of a config with the weights of a checkpoint, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.train.evaluation.evaluate import EvaluationOutcome
from forebay.train.evaluation.evaluations import Evaluations, failed_line, line_of
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.launch import make_accelerator, process_state, require_extras
from forebay.train.models.families import ModelFacts
from forebay.train.models.lora import ADAPTER_CONFIG
from forebay.train.models.model_folder import check_config, check_weights, load_model, model_facts
from forebay.train.models.trainee import checkpoint_model
from forebay.visible import from_here

_POINTERS = ("best.json", "last.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """The document of `forebay eval --json`; its fields are an interface."""

    checkpoint: str
    """Folder of the weights."""
    outcomes: list[EvaluationOutcome]
    failed: list[str] = field(default_factory=list)
    """Sets that could not be evaluated, and why."""

    def to_json(self) -> dict[str, Any]:
        """Returns `checkpoint`, `evaluations_failed` (how many) and `sets`: each `EvalResult`, and its `worst` 20."""
        sets = [{**asdict(each.result), "worst": [_as_json(*pair) for pair in each.worst]} for each in self.outcomes]
        return {"checkpoint": self.checkpoint, "sets": sets, "evaluations_failed": len(self.failed)}

    def lines(self) -> Iterator[str]:
        """Yields what `forebay eval` prints."""
        yield f"weights of {from_here(self.checkpoint)}"
        yield from (line_of(each.result) for each in self.outcomes)
        if self.failed:
            yield failed_line(self.failed, num_done=len(self.outcomes))


def evaluate_alone(config: Config, *, checkpoint: Path | None = None) -> EvalReport | None:
    """Returns the report of all sets of `[[train.eval]]`; None on ranks other than 0.

    checkpoint: a folder that training has written, or any transformers folder of the model; None: the run's best
    checkpoint, else its last one, else `train.model`. The run's files stay as they are.
    Raises ConfigError without sets or a model, what `open_sets` raises, ForebayError for weights that cannot be read.
    """
    if not config.train.eval:
        raise ConfigError(f"{config.path}: there is no set to evaluate; add one: [[train.eval]] with name and config")
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of the model that was trained", code="FB108"
        )
    facts = model_facts(Path(config.train.model), config)
    check_config(facts, config)
    require_extras(config, command="forebay eval", writes=facts.writes)
    folder = checkpoint or _of_run(run_folder(config)) or facts.folder
    init = config.train.init if folder == facts.folder else "pretrained"
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if not is_adapter:
        check_weights(folder, init=init)
    state = process_state()
    try:
        accelerator = make_accelerator(config, has_text_alone=False)
        evaluations = Evaluations(config, facts=facts, accelerator=accelerator)
        if is_adapter:
            model = checkpoint_model(config, facts, folder)
        else:
            model = accelerator.prepare_model(_model(config, facts, folder), evaluation_mode=True)
        outcomes = evaluations.now(step=_step_of(folder), model=model)
        report = EvalReport(checkpoint=str(folder), outcomes=outcomes, failed=evaluations.failed)
        return report if state.is_main_process else None
    finally:
        if torch.distributed.is_initialized():
            state.destroy_process_group()


def _model(config: Config, facts: ModelFacts, folder: Path) -> Any:
    """Returns the model with the weights of a folder: `train.model`, a whole checkpoint, or one of adapters."""
    if folder == facts.folder:
        check_weights(folder, init=config.train.init)
        model = load_model(folder, seed=config.loader.seed, init=config.train.init, facts=facts)
    elif (folder / ADAPTER_CONFIG).is_file():
        model = checkpoint_model(config, facts, folder)
    else:
        check_weights(folder, init="pretrained")
        model = checkpoint_model(replace(config, train=replace(config.train, lora=None)), facts, folder)
    if facts.prepare_text_alone is not None:
        facts.prepare_text_alone(model, config.train.text_encoder)
    return model


def _of_run(folder: Path) -> Path | None:
    """Returns the best checkpoint of a run folder, else the last one; None where there is none."""
    for name in _POINTERS:
        try:
            found = folder / str(json.loads((folder / name).read_bytes())["checkpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if found.is_dir():
            return found
    return None


def _step_of(folder: Path) -> int:
    """Returns the steps that a checkpoint's model has had; 0 for a folder that training has not written."""
    try:
        return int(json.loads((folder / "state.json").read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _as_json(written: Any, errors: Any) -> dict[str, Any]:
    names = ("sample_id", "language", "reference", "hypothesis")
    return {**{name: getattr(written, name) for name in names}, "wer": errors.wer, "word_errors": errors.word_errors}
