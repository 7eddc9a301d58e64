"""The evaluations of a run: when each set's turn is, the line that says what came out, and `<run>/eval.jsonl`.

`forebay eval` evaluates the sets of a config with the weights of a checkpoint, without training.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.store.files import append, write_bytes
from forebay.train.evaluation.evaluate import EvalResult, EvaluationError, EvaluationOutcome, Evaluator, Gather
from forebay.train.evaluation.rates import normalizer, text_encoder, worst_lines
from forebay.train.evaluation.sets import EvalSet, open_sets
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.launch import held_whole, make_accelerator, process_state, require_extras
from forebay.train.loop.trainable import checkpoint_model
from forebay.train.models.families import ModelFacts
from forebay.train.models.lora import ADAPTER_CONFIG, base_of
from forebay.train.models.model_folder import check_config, check_weights, load_model, model_facts
from forebay.train.models.objective import Objective
from forebay.visible import from_here, printable

_logger = logging.getLogger(__name__)
FILE_NAME = "eval.jsonl"
"""In the run's folder: a line an evaluation."""


class Evaluations:
    """The sets of a run, opened and checked; evaluated after steps. Every rank has one and calls it alike."""

    def __init__(
        self, config: Config, *, facts: ModelFacts, accelerator: Any, trained: Mapping[str, Any] | None = None
    ) -> None:
        """Opens the sets: what `open_sets` raises is raised before the first step. Without sets nothing is done.

        trained: constants of the training data, where there is training.
        """
        self._config, self._facts, self._accelerator = config, facts, accelerator
        self.sets: list[EvalSet] = open_sets(
            config, facts=facts, rank=accelerator.process_index, num_ranks=accelerator.num_processes, trained=trained
        )
        tokenizer = Path((config.text and config.text.tokenizer) or facts.folder)
        kinds = {each.settings.text for each in self.sets if each.writes}
        self._normalizers = {kind: normalizer(kind, tokenizer=tokenizer) for kind in sorted(kinds)}
        self._encoder = text_encoder(config) if kinds else None
        self._gather = gather_on_host(accelerator.num_processes) if self.sets else list
        self._log: EvalLog | None = None
        self._mute: list[str] = []
        self.num_done = 0
        """Evaluations that gave a result."""
        self.failed: list[str] = []
        """The others: the set, the step and why, equal on all ranks."""

    def begin(self, folder: Path, *, step: int) -> None:
        """Makes `folder` the run's: lines of steps behind `step`, those of a checkpoint or 0, are cut away."""
        if self._accelerator.is_main_process and self.sets:
            self._log = EvalLog(folder, step=step)

    def after(self, step: int, *, model: Any, is_last: bool) -> list[EvalResult]:
        """Returns the results of the sets whose turn is after `step`, in their order; each has been said and kept.

        model: as accelerate prepared it. After the last step every set is evaluated. One that fails is in `failed`.
        """
        return [outcome.result for outcome in self._of(self._due(step, is_last=is_last), step=step, model=model)]

    def are_due(self, step: int, *, is_last: bool) -> bool:
        """Returns whether a set's turn is after `step`."""
        return bool(self._due(step, is_last=is_last))

    def _due(self, step: int, *, is_last: bool) -> list[EvalSet]:
        return [each for each in self.sets if is_last or (each.settings.every and step % each.settings.every == 0)]

    def now(self, *, step: int, model: Any) -> list[EvaluationOutcome]:
        """Returns the outcomes of all sets; one that fails is in `failed`."""
        return list(self._of(self.sets, step=step, model=model))

    def _of(self, sets: Sequence[EvalSet], *, step: int, model: Any) -> Iterator[EvaluationOutcome]:
        for each in sets:
            try:
                yield self._evaluate(each, step=step, model=model)
                self.num_done += 1
            except EvaluationError as err:
                self.failed.append(f"{printable(each.settings.name)} after step {step}: {printable(str(err))}")
                if self._accelerator.is_main_process:
                    _logger.warning("the evaluation failed of %s", self.failed[-1])

    def _evaluate(self, each: EvalSet, *, step: int, model: Any) -> EvaluationOutcome:
        with held_whole(model):
            outcome = self._evaluator(model).evaluate(each, step=step)
        if self._accelerator.is_main_process:
            _logger.info("%s", line_of(outcome.result))
            if outcome.result.trap is not None:
                _logger.warning("%s after step %d: %s", printable(each.settings.name), step, outcome.result.trap)
            if self._log is not None:
                self._log.add(outcome)
        return outcome

    def _evaluator(self, model: Any) -> Evaluator:
        bare = base_of(self._accelerator.unwrap_model(model))  # adapters are inside of it
        return Evaluator(
            model=bare,
            facts=self._facts,
            device=self._accelerator.device,
            autocast=self._accelerator.autocast,
            encoder=self._encoder,
            normalizers=self._normalizers,
            repetition_limit=self._config.train.repetition_limit,
            pixels=self._config.loader.pixels,
            gather=self._gather,
            objective=Objective(self._facts),
            mute=self._mute,
        )


def line_of(result: EvalResult) -> str:
    """Returns what is said of an evaluation: `Step 100: dev WER 29.59 %, CER 11.20 %, loss 1.234 (500 samples, 41 s)`.

    Behind the samples stands the normalisation of the texts, where there is one. Of classes accuracy and F1 are said.
    """
    known = {"WER": result.wer, "CER": result.cer, "accuracy": result.accuracy, "F1": result.f1}
    rates = [f"{name} {100 * rate:.2f} %" for name, rate in known.items() if rate is not None]
    if result.accuracy is None and result.f1_micro is not None:
        rates.append(f"F1 of all classes together {100 * result.f1_micro:.2f} %")
    figures = ", ".join([*rates, f"loss {result.loss:.3f}"])
    text = "" if result.text == "none" or result.wer is None else f", text {result.text}"
    spent = f"{result.elapsed_s:.0f} s" if result.elapsed_s >= 9.95 else f"{result.elapsed_s:.1f} s"
    return f"Step {result.step}: {printable(result.name)} {figures} ({result.num_samples} samples{text}, {spent})"


def failed_line(failed: Sequence[str], *, num_done: int) -> str:
    """Returns what is said at the end where evaluations failed."""
    return f"{len(failed)} of {len(failed) + num_done} evaluations failed, the last: {failed[-1]}"


class EvalLog:
    """`eval.jsonl` of a run and the listings of its worst samples; written by rank 0."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """Touches no file yet. step: of the checkpoint that the run goes on from, or 0: the file is begun anew."""
        self._folder, self._path = folder, folder / FILE_NAME
        self._kept: bytes | None = b"".join(_lines_up_to(self._path, step)) if step else b""

    def add(self, outcome: EvaluationOutcome) -> None:
        """Appends the line of an evaluation and writes its listing; ForebayError where they cannot be written."""
        line = (json.dumps(asdict(outcome.result)) + "\n").encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            append(self._path, line, kept=self._kept)
            self._kept = None
            if outcome.result.wer is not None:
                self._list_worst(outcome)
        except OSError as err:
            raise ForebayError(
                f"cannot write {err.filename or self._path}: {err.strerror}; make room, then go on with "
                "forebay train --resume",
                code="FB703",
            ) from err

    def _list_worst(self, outcome: EvaluationOutcome) -> None:
        result, folder = outcome.result, self._folder / "eval"
        folder.mkdir(exist_ok=True)
        head = f"The {len(outcome.worst)} worst samples by WER:" if outcome.worst else "No sample has a wrong word."
        lines = [line_of(result), head, "", *worst_lines(outcome.worst)]
        name = re.sub(r"[^\w.-]", "_", result.name)
        write_bytes(folder / f"{name}-{result.step:08d}.txt", "\n".join(lines).encode("utf-8", "backslashreplace"))


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """Returns the whole lines of an earlier part of the run up to `step`; what is no such line ends them."""
    try:
        found = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    kept = []
    for line in found:
        try:
            if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line)
    return kept


def gather_on_host(num_ranks: int) -> Gather:
    """Returns a function that gives every rank what all ranks gave it, over gloo on the host."""
    if num_ranks == 1:
        return lambda value: [value]
    group = torch.distributed.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * num_ranks
        torch.distributed.all_gather_object(found, value, group=group)
        return found

    return gather


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
    for name in ("best.json", "last.json"):
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
