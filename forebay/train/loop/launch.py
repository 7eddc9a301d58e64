"""accelerate as the loop uses it: the ranks of a run, the accelerator that places, casts and scales, and the trackers.

A model that is spread over the ranks (FSDP2), or repeated on them (DDP): prepared, gathered, and loaded again.
accelerate's configuration file says which, by the environment variables that `accelerate launch` sets. A checkpoint
has one form under both and on one rank: whole tensors. TensorBoard, wandb, MLflow and the like say what a run's log
says, at its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError, MissingExtraError
from forebay.extras import require_module
from forebay.steps.audio.audio_section import audio_step_of
from forebay.store.files import write_bytes
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.meter import StepLog
from forebay.train.loop.trainable import adamw

_logger = logging.getLogger(__name__)


def require_extras(config: Config, *, command: str, writes: bool) -> None:
    """Returns where what a run needs is installed, before any data is read. writes: the model's texts are compared.

    Raises MissingExtraError.
    """
    require_module("accelerate", "train", what=command)
    if config.train.lora is not None:
        require_module("peft", "lora", what="[train.lora]")
    if config.train.eval and writes and audio_step_of(config) is not None:
        require_module("jiwer", "train", what="evaluation by WER")


def process_state() -> Any:
    """Returns accelerate's process state, its process group started; every rank that torchrun started is in it."""
    require_module("accelerate", "train", what="forebay train")
    from accelerate import PartialState

    state = PartialState(cpu=_is_on_cpu())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ConfigError(
            f"WORLD_SIZE is {started}, but accelerate sees {state.num_processes} rank(s), and each would train alone: "
            "make no PartialState or Accelerator before forebay's",
            code="FB705",
        )
    return state


def make_accelerator(config: Config, *, has_text_alone: bool, may_rest: bool = False) -> Any:
    """Returns accelerate's Accelerator in the precision of the config.

    has_text_alone: some micro-batches have no audio, and give the audio encoder no gradient. may_rest: parts of the
    model may have no gradient in a step (layer drop, masks that are not drawn).
    Raises ConfigError for a precision that is not possible here, and for text alone under FSDP; MissingExtraError
    without accelerate.
    """
    state, settings = process_state(), config.train
    if has_text_alone and state.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ConfigError(
            "a rank with a text alone has no use for the audio encoder, whose weights the other ranks then wait for: "
            "mixtures with text alone do not go with FSDP; use DDP (distributed_type: MULTI_GPU in accelerate's "
            "configuration), or leave the cache without audio out of mixture.source"
        )
    if settings.mixed_precision == "fp16" and state.device.type == "cpu":
        raise ConfigError(
            'train.mixed_precision = "fp16" needs an accelerator, and this run is on the CPU; set it to "bf16" or "no"'
        )
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if given not in ("no", settings.mixed_precision) and state.is_main_process:
        _logger.warning(
            'accelerate\'s configuration says mixed_precision %s; train.mixed_precision = "%s" holds',
            given,
            settings.mixed_precision,
        )
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    finds_unused = has_text_alone or may_rest
    try:
        # The plugin, because a bare number is overridden by an environment variable, and `backward` divides by it.
        return Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # DDP otherwise waits for the gradients of an encoder that a text has no use for.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if finds_unused else None,
            **tracker_settings(config),
        )
    except ValueError as err:
        raise ConfigError(f'train.mixed_precision = "{settings.mixed_precision}" is not possible here: {err}') from err


def _is_on_cpu() -> bool:
    # Unless told so, accelerate takes the ranks of torchrun on a machine without an accelerator for single processes.
    return not torch.accelerator.is_available()


def prepare(accelerator: Any, model: Any, settings: TrainConfig) -> tuple[Any, Any]:
    """Returns the model and its AdamW as the ranks train them. Raises ConfigError for FSDP that is not possible here.

    accelerate leaves its FSDP settings aside on the CPU, without a word, and would take DDP: there the model is sharded
    here, every layer for itself, as accelerate's `TRANSFORMER_BASED_WRAP` does.
    """
    wants_shards = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if wants_shards and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "accelerate's configuration wants FSDP in its first version, whose checkpoints forebay does not write; "
            "set fsdp_version: 2 there (accelerate to-fsdp2 converts the file)"
        )
    if not (wants_shards and accelerator.device.type == "cpu" and accelerator.num_processes > 1):
        prepared, optimizer = accelerator.prepare(model, adamw(model, settings))
        return prepared, optimizer
    if settings.mixed_precision != "no":
        raise ConfigError(
            f'train.mixed_precision = "{settings.mixed_precision}" is not possible with FSDP on the CPU; set it to "no"'
        )
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module)
    fully_shard(model)
    return model, accelerator.prepare_optimizer(adamw(model, settings))


def no_sync(accelerator: Any, model: Any) -> AbstractContextManager[None]:
    """Returns a context in which backward passes leave the ranks' gradients apart."""
    if isinstance(model, FSDPModule) and not accelerator.is_fsdp2:
        return _apart(model)
    context: AbstractContextManager[None] = accelerator.no_sync(model)
    return context


@contextlib.contextmanager
def _apart(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(requires_gradient_sync=True)


@contextlib.contextmanager
def held_whole(model: Any) -> Iterator[None]:
    """Makes every rank hold the whole of a sharded model for a while, so that ranks can use it apart.

    Ranks evaluate different numbers of batches and write texts of different lengths. A gather inside of a forward pass
    would wait for a rank that has no pass to do. Every rank enters and leaves. Other models stay as they are.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
        module.unshard()
    try:
        yield
    except Exception as err:
        if modules:
            _forget(modules[0], err)
        raise
    finally:
        # torch does not say what it was before. Of the root it may have been false, which saves a gather.
        reshards = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(reshard_after_forward=reshards, recurse=False)


def _forget(root: FSDPModule, err: Exception) -> None:
    """Makes a sharded model forget the pass that an error ended, so that the next one gathers what other ranks' do."""
    reset = getattr(root, "reset_iter_state", None)
    if reset is None:
        raise ForebayError(
            f"an evaluation failed under FSDP ({err}), and torch {torch.__version__} cannot go on behind it (it has no "
            "FSDPModule.reset_iter_state); the checkpoint that was due is written: install torch 2.13 or later, and go "
            "on with forebay train --resume"
        ) from err
    reset()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the parts of all ranks. Every rank calls it for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_optimizer(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizer's state of whole tensors; of sharded ones on the CPU. Every rank calls it."""
    state: dict[str, Any] = optimizer.state_dict()
    moments = {
        index: {name: whole(value).cpu() if isinstance(value, DTensor) else value for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Makes the optimizer's moments those of `gathered_optimizer`, each rank's part of them.

    Weight decay and factors stay those of the optimizer: settings of today, not of the checkpoint. Raises ValueError
    or KeyError where the state is that of other parameters.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {name: _as_part(value, of=parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
        if index < len(parameters)
    }
    optimizer.load_state_dict({**state, "state": moments})
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group.update(own)


def _as_part(value: Any, *, of: torch.Tensor) -> Any:
    if not isinstance(of, DTensor) or not isinstance(value, torch.Tensor) or value.shape != of.shape:
        return value  # a count of steps has no parts
    return distribute_tensor(value.to(of.device), of.device_mesh, of.placements)


class Gathered:
    """A model and its whole weights, so that rank 0 alone can write a checkpoint."""

    def __init__(self, accelerator: Any, model: Any) -> None:
        """Gathers sharded weights on the CPU of rank 0, one after the other. Every rank makes it."""
        # The casts of mixed precision stay in place. A wrapper of torch.compile, which accelerate's file may ask for,
        # has other names of weights.
        self.model = accelerator.unwrap_model(model, keep_torch_compile=False)
        self.weights: dict[str, torch.Tensor] | None = None
        """The state dict, where the model itself has only a part of it; None where the model has the whole."""
        if isinstance(self.model, FSDPModule):
            sharded: Any = self.model
            found: dict[str, torch.Tensor] = {}
            seen: dict[int, torch.Tensor] = {}
            for name, value in sharded.state_dict(keep_vars=True).items():
                if id(value) not in seen:  # tied weights stay one tensor
                    full = whole(value.detach())
                    seen[id(value)] = full.cpu() if accelerator.is_main_process else full.new_empty(0)
                found[name] = seen[id(value)]
            self.weights = found


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
                for tracker in self._accelerator.trackers:
                    if tracker.name == "mlflow":
                        ids["mlflow"] = tracker.active_run.info.run_id
                if ids:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_bytes(folder / _IDS, json.dumps(ids).encode())
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
