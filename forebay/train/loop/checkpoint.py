"""One checkpoint of the reference loop: complete or absent, without a pickle that could run code.

The best evaluation of a run so far, which `train.save_best` wants kept and best.json names.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ForebayError, ResumeError
from forebay.store.files import folder_aside, hash_file, temporary_name, write_bytes
from forebay.store.shared_disk import move, seen
from forebay.train.evaluation.evaluate import HIGHER_IS_BETTER, EvalResult
from forebay.train.models.lora import base_of, is_adapted, save_adapter
from forebay.train.models.model_folder import processor_class


@dataclass(frozen=True, kw_only=True, slots=True)
class BestRecord:
    """The best evaluation so far; what best.json holds."""

    checkpoint: str
    """Name of the checkpoint's folder in the run folder; empty until the checkpoint is written."""
    step: int
    name: str
    """The set, the first one of `[[train.eval]]`."""
    metric: str
    """`wer`, `cer`, `loss`, `accuracy` or `f1`."""
    value: float


class Best:
    """Tells which evaluation is the best so far: the best `train.save_best` on the first set of `[[train.eval]]`.

    Every rank calls `consider` with equal results, so that all ranks agree on whether a checkpoint is written.
    """

    def __init__(self, settings: TrainConfig) -> None:
        """Starts without a best one; `go_on` takes that of a checkpoint."""
        self._metric = settings.save_best
        self._name = settings.eval[0].name if settings.eval else None
        self.record: BestRecord | None = None

    def go_on(self, record: BestRecord | None, *, found: Collection[str]) -> None:
        """Makes `record` the best so far, unless it cannot be compared, or its checkpoint is not among `found`."""
        wanted = (self._name, self._metric)
        if record is not None and self._metric is not None and (record.name, record.metric) != wanted:
            _logger.warning(
                "the best checkpoint so far (%s) was chosen by %s on %s, and now %s on %s chooses: it is forgotten",
                *(record.checkpoint, record.metric, record.name, self._metric, self._name),
            )
            record = None
        if record is not None and record.checkpoint not in found:
            _logger.warning(
                "the best checkpoint so far (%s, %s %.4f on %s) is not in the run folder any more: it is forgotten",
                *(record.checkpoint, record.metric, record.value, record.name),
            )
            record = None
        self.record = record

    def consider(self, results: Sequence[EvalResult]) -> bool:
        """Returns whether a checkpoint is wanted now, since the set's result is better than every one before.

        results: of one step, equal on all ranks. A result that is a trap, None or not finite is never the best. After
        True the caller writes a checkpoint before the next step: it becomes the best one.
        """
        if self._metric is None:
            return False
        for result in (each for each in results if each.name == self._name and each.trap is None):
            value = getattr(result, self._metric)
            if value is None:
                _logger.warning(
                    'train.save_best = "%s", and %s has none; set train.save_best = "loss"', self._metric, result.name
                )
            elif math.isfinite(value) and (self.record is None or self._is_better(value, self.record.value)):
                self.record = BestRecord(
                    checkpoint="", step=result.step, name=result.name, metric=self._metric, value=float(value)
                )
                return True
        return False

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self._metric in HIGHER_IS_BETTER else value < other

    def in_checkpoint(self, name: str) -> BestRecord | None:
        """Returns the record that the checkpoint of this name is to hold, which is its own if `consider` wanted it."""
        if self.record is not None and not self.record.checkpoint:
            self.record = replace(self.record, checkpoint=name)
        return self.record


_logger = logging.getLogger(__name__)
POINTER = "last.json"
_VERSION = 1
_NAME = re.compile(r"checkpoint-[0-9]{8,}(-[0-9]+)?\Z", re.ASCII)
_STATE = "state.json"
_ANEW = "train without --resume"
_OPTIMIZER = "optimizer.pt"
_KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "loss_first": (float,),
    "loss_last": (float,),
    "loader": (dict,),
    "settings": (dict,),
    "scaler": (dict, type(None)),
    "files": (dict,),
    "skipped_steps": (int,),
    "skipped_in_a_row": (int,),
    "kept": (list,),
    "base": (dict,),
    "evaluated": (bool,),
}
"""The fields of state.json beside `version` and `best`, and what each one is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The state in a checkpoint beside weights and optimizer moments; kept as state.json.

    The learning rate and the random state of a step are functions of (config, step, rank) and need no room here.
    """

    step: int
    """Optimizer steps done."""
    loss_first: float
    loss_last: float
    """Losses of step 1 and of `step`."""
    loader: dict[str, Any]
    """`loader.state_dict()`: where the next batch is."""
    settings: dict[str, Any]
    """The settings that change the arithmetic, and the world size, to tell what differs on resume."""
    scaler: dict[str, Any] | None = None
    """Loss scale of fp16."""
    files: dict[str, str] = field(default_factory=dict)
    """xxh3-128 of the files with weights and moments; `write_checkpoint` fills it in."""
    kept: list[str] = field(default_factory=list)
    """Names of the run's checkpoints that stay, oldest first, this one among them."""
    best: BestRecord | None = None
    """The best evaluation so far."""
    base: dict[str, str] = field(default_factory=dict)
    """xxh3-128 of the weights in `train.model` that an adapter was trained on."""
    evaluated: bool = True
    """Whether the evaluations after `step` are done: a checkpoint is written before them."""
    version: int = _VERSION
    skipped_steps: int = 0
    """Steps that the scaler of fp16 has skipped, of all steps, and of the last ones in a row."""
    skipped_in_a_row: int = 0


def run_folder(config: Config) -> Path:
    """Returns the folder of a config's training runs: `<train.output_dir>/<name>`."""
    return Path(config.train.output_dir) / config.name


def write_checkpoint(
    target: Path,
    state: TrainState,
    *,
    model: Any,
    optimizer: Mapping[str, Any],
    processor: Mapping[str, Path],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Makes `target` a checkpoint folder, whole or not at all; a checkpoint of that name is replaced.

    It can be used for inference as it lies: it holds transformers' `save_pretrained` form (safetensors), or peft's for
    a model with adapters (see `save_adapter`), and the files of `processor`. Training goes on from optimizer.pt
    (readable with `weights_only=True`) and state.json. weights: the model's
    state dict, where the model itself has only parts of it (FSDP). Raises ForebayError where it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        with folder_aside(target, clear=lambda: _make_free(target)) as temporary:
            _write_model(temporary, target, model=model, processor=processor, weights=weights)
            torch.save(dict(optimizer), temporary / _OPTIMIZER)
            sealed = replace(state, files=_hashes(temporary))
            (temporary / _STATE).write_text(json.dumps(asdict(sealed), indent=1), encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as err:
        raise cannot_write(target, state.step, err) from err


def cannot_write(target: Path, step: int, err: Exception) -> ForebayError:
    """Returns the error that says that a checkpoint was not written, and what to do."""
    return ForebayError(
        f"cannot write checkpoint {target} of step {step}: {err}; the last whole checkpoint stays in force: "
        "make room, or lower train.save_total_limit, and go on with forebay train --resume",
        code="FB703",
    )


def _write_model(
    folder: Path, target: Path, *, model: Any, processor: Mapping[str, Path], weights: Mapping[str, torch.Tensor] | None
) -> None:
    if is_adapted(model):
        save_adapter(model, folder, target=target, weights=weights)
        if (name := processor_class(processor, base_of(model).config.model_type)) is not None:
            (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}), encoding="utf-8")
    else:
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    for name, path in processor.items():
        if not (folder / name).exists():
            shutil.copyfile(path, folder / name)


def checkpoint_name(step: int, attempt: int = 1) -> str:
    """Returns the name of the checkpoint of a step; attempt 2, 3, ... where a name is taken."""
    return f"checkpoint-{step:08d}" + (f"-{attempt}" if attempt > 1 else "")


def is_checkpoint(path: Path) -> bool:
    """Returns whether a path is a folder that `write_checkpoint` has made, under a name that it gives."""
    if _NAME.match(path.name) is None or path.is_symlink() or not path.is_dir():
        return False
    try:
        document = json.loads((path / _STATE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"version", "step", "loader", "settings", "files"} <= document.keys()


def _make_free(target: Path) -> None:
    if is_checkpoint(target):
        discard(target)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint folder; what cannot be removed now is left under a name that the next run sweeps."""
    aside = temporary_name(checkpoint)
    try:
        # First the name: half a checkpoint must not look like one.
        move(checkpoint, aside)
    except OSError as err:
        _logger.warning("cannot remove the old checkpoint %s: %s", checkpoint, err)
    else:
        shutil.rmtree(aside, ignore_errors=True)


def find_checkpoint(folder: Path) -> Path | None:
    """Returns the last checkpoint of a run folder, None where there is none yet; without last.json the newest.

    Raises ResumeError where last.json names a checkpoint that is not there.
    """
    pointer = folder / POINTER
    try:
        name = json.loads(pointer.read_bytes())["checkpoint"]
    except FileNotFoundError:
        return max(filter(is_checkpoint, folder.glob("checkpoint-*")), default=None)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise _refused(f"cannot read {pointer}: {err!r}; {_ways_on(folder)}") from err
    # Another node may have written it, and its name may show before the folder does.
    state = folder / str(name) / _STATE
    if not seen(lambda: os.path.isfile(state), folder, what=f"{name}, which {POINTER} names"):
        raise _refused(f"{pointer} names {name}, which is not a checkpoint in {folder}; {_ways_on(folder)}")
    return folder / str(name)


def _ways_on(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if is_checkpoint(path))
    return "".join(f'write {{"checkpoint": "{name}"}} there to go on from it, or ' for name in names[-1:]) + _ANEW


def load_state(checkpoint: Path) -> TrainState:
    """Returns state.json of a checkpoint folder, whose weights and optimizer state are the bytes that were written.

    Raises ResumeError, naming the file and both values, where one is missing or not what it was.
    """
    path = checkpoint / _STATE
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise _refused(f"{checkpoint} is not a checkpoint of forebay: {err}; train without --resume") from err
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise ResumeError(
            f"{path} has version {version!r}, this forebay reads {_VERSION}; train without --resume", code="FB512"
        )
    # Checkpoints of before have neither the skipped steps nor what stays beside them.
    document = {"skipped_steps": 0, "skipped_in_a_row": 0, "kept": [], "base": {}, "evaluated": True, **document}
    for name, kinds in _KINDS.items():
        if name not in document or not isinstance(document[name], kinds):
            raise ResumeError(
                f"{path}: {name} is {document.get(name)!r}, wanted a {kinds[0].__name__}; train without --resume"
            )
    if not all(isinstance(name, str) for name in document["kept"]):
        raise ResumeError(f"{path}: kept is {document['kept']!r}, wanted names of checkpoints; train without --resume")
    _verify(checkpoint, document["files"])
    return TrainState(**{name: document[name] for name in _KINDS}, best=_best_of(document.get("best"), path))


def change_state(checkpoint: Path, **changes: Any) -> None:
    """Makes fields of state.json others, at once or not at all. Raises OSError where it cannot be written."""
    path = checkpoint / _STATE
    write_bytes(path, json.dumps(json.loads(path.read_bytes()) | changes, indent=1).encode())


def _best_of(document: object, path: Path) -> BestRecord | None:
    if document is None:
        return None
    wanted = {"checkpoint": str, "step": int, "name": str, "metric": str, "value": float}
    if isinstance(document, dict) and {key: type(value) for key, value in document.items()} == wanted:
        return BestRecord(**document)
    raise ResumeError(f"{path}: best is {document!r}, wanted {', '.join(wanted)}; train without --resume")


def _hashes(folder: Path) -> dict[str, str]:
    paths = sorted([*folder.rglob("*.safetensors"), folder / _OPTIMIZER])
    return {str(path.relative_to(folder)): hash_file(path) for path in paths}


def _verify(checkpoint: Path, stored: Mapping[str, str]) -> None:
    # Neither safetensors nor torch.load looks at checksums: a flipped bit would be trained on.
    try:
        computed = _hashes(checkpoint)
    except OSError as err:
        raise _refused(f"cannot read {err.filename}: {err.strerror}; train without --resume") from err
    for name in sorted({*stored, *computed}):
        if computed.get(name) != stored.get(name):
            raise _refused(
                f"{checkpoint / name} has checksum {computed.get(name)}, state.json says {stored.get(name)}; "
                f"restore the file, name an earlier checkpoint in {POINTER}, or train without --resume"
            )


def load_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Returns the optimizer's state on the CPU; ResumeError if optimizer.pt is damaged or holds more than tensors."""
    path = checkpoint / _OPTIMIZER
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as err:
        raise _refused(f"cannot read {path}: {err}; train without --resume") from err
    if not isinstance(loaded, dict):
        raise _refused(f"{path} holds a {type(loaded).__name__}, wanted a dict; train without --resume")
    return loaded


def _refused(what: str) -> ResumeError:
    return ResumeError(what, code="FB513")
