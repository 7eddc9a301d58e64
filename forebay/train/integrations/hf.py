"""A forebay loader in transformers' Trainer: handed over as it is, its state in every checkpoint, resumed exactly."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from forebay.errors import ConfigError, MissingExtraError, ResumeError
from forebay.extras import install_line
from forebay.plan.pack.pack_plan import PackPlan
from forebay.steps.batch import IGNORED
from forebay.train.collate.patches import weight_of
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.models.generic import num_targets
from forebay.train.models.lora import base_of
from forebay.train.models.objective import asked, loses_no_labels, taken_by, watched
from forebay.visible import an

try:
    import accelerate.utils  # transformers says so only when the first TrainingArguments are made
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import get_last_checkpoint

    from forebay.train.integrations.renamed import WholeWeights
except ImportError as err:
    raise MissingExtraError(f"transformers' Trainer needs accelerate; run: {install_line('train')}") from err

__all__ = ["STATE_NAME", "LoaderMixin"]
STATE_NAME = "forebay_loader"
"""Of the loader's state in `stateful_callbacks` of a checkpoint's trainer_state.json."""
_ADVICE = (
    "change the config so that it makes what the model takes, take a class of model that reads the field, or pop the "
    "field in a compute_loss of your Trainer"
)


class LoaderMixin:
    """Mixed into a Trainer, makes it take forebay's loaders as its data sets: `class T(LoaderMixin, Trainer)`.

    `T(train_dataset=make_loader(config), eval_dataset=make_loader(eval_config), ...)`; also a dict of loaders to
    evaluate on, and any other data set beside them. Seq2SeqTrainer and trainers that are made of them are mixed with in
    the same way.

    The loader already gives each rank its share, so accelerate never sees it. After every optimizer step its state is
    written to the Trainer's state, and with it to each checkpoint: that of the batches that the model has learnt from.
    `train` begins at the head of epoch 0; `train(resume_from_checkpoint=...)` goes on with the next batch, in mid-epoch
    too, and reads nothing again, whatever `ignore_data_skip` says. An evaluation goes over epoch 0 of its own loader.
    """

    args: Any
    model: Any
    accelerator: Any
    compute_loss_func: Any
    train_dataset: Any
    eval_dataset: Any
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    gather_function: Any
    _evaluates_loader: bool | None = None
    """Whether the evaluation that runs is of a loader; None: none runs."""
    _knows_scale = False
    _targets: torch.Tensor | None = None
    """Of the micro-batches of all ranks that are learnt from together, or evaluated; None: the Trainer did not ask."""
    _num_batches = 1
    """How many these are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes the Trainer. TRL looks at a first row of each data set: it sees one row in the place of a loader."""
        given = {name: kwargs[name] for name in ("train_dataset", "eval_dataset") if _has_loaders(kwargs.get(name))}
        if not any(kind.__module__.startswith("trl.") for kind in type(self).__mro__):
            given = {}
        super().__init__(*args, **{**kwargs, **{name: _row_of(data) for name, data in given.items()}})
        for name, data in given.items():
            setattr(self, name, data)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Returns the metrics of an evaluation, as the Trainer does; TRL's would prepare a loader that it is given."""
        if not _has_loaders(eval_dataset):
            return super().evaluate(eval_dataset, *args, **kwargs)  # type: ignore[misc]
        kept, self.eval_dataset = self.eval_dataset, eval_dataset
        try:
            return super().evaluate(None, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.eval_dataset = kept

    # The signature is that of transformers' Trainer.
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trains as the Trainer does.

        Raises ConfigError for settings under which batches would be shared out, scaled or scored wrongly; ResumeError
        for a checkpoint without a loader's state, of another plan, or at another place than the Trainer's.
        """
        loader = self.train_dataset
        if not isinstance(loader, Loader):
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self._check_training(loader)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(get_last_checkpoint(self.args.output_dir) or "")
            if not resume_from_checkpoint:
                raise ResumeError(
                    f"no checkpoint in {self.args.output_dir}; call train() without resume_from_checkpoint"
                )
        if resume_from_checkpoint:
            self._restore(loader, Path(resume_from_checkpoint))
        else:
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 0})
        self._follow(_KeepState(loader))
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            bare = self.accelerator.unwrap_model(self.model)
            self._follow(WholeWeights(bare, resumed=Path(resume_from_checkpoint) if resume_from_checkpoint else None))
        # Skipping costs nothing here, and without it the Trainer would count the rest of an epoch as a whole one.
        asked, self.args.ignore_data_skip = self.args.ignore_data_skip, False
        try:
            return super().train(resume_from_checkpoint or None, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.ignore_data_skip = asked

    def _follow(self, callback: TrainerCallback) -> None:
        """Makes the Trainer call a callback, in the place of another of its kind."""
        self.remove_callback(type(callback))  # type: ignore[attr-defined]
        self.add_callback(callback)  # type: ignore[attr-defined]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the Trainer's loss. A model of pairs (CLIP, SigLIP) is asked for its own: it gives none otherwise.

        The Trainer takes it that a model with `**kwargs` divides its loss by `num_items_in_batch`. Many do not (CTC,
        several labels a sample): their loss is a mean, and is scaled as one, by ranks and accumulated batches. Each
        counts by its targets, and a filler not at all.
        Raises CacheMismatchError for a field of a loader's batch that the model does not read.
        """
        if not isinstance(inputs, dict):
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        bare = base_of(self.accelerator.unwrap_model(model))
        count: Any = kwargs.get("num_items_in_batch")
        if is_first := self._is_first_scaled(model, count):
            # With a gradient, the number is found behind the loss where the model has divided by it.
            kwargs["num_items_in_batch"] = count = count.float().requires_grad_()
        with self._watched(model, bare, inputs):
            found = super().compute_loss(model, asked(bare, inputs), *args, **kwargs)  # type: ignore[misc]
        found = self._as_scaled(found, count) if is_first else found
        is_scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and count is not None)
        if is_scaled or self._targets is None or not self._is_of_loader:
            share: Any = weight_of(inputs)
        else:
            share = num_targets(bare, inputs) * self._num_batches / self._targets
        return (found[0] * share, *found[1:]) if isinstance(found, tuple) else found * share

    @property
    def _is_of_loader(self) -> bool:
        """Whether the batches that are learnt from, or evaluated, are a loader's."""
        return isinstance(self.train_dataset, Loader) if self._evaluates_loader is None else self._evaluates_loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Returns the targets of a step on all ranks, as the Trainer counts them; those of fillers do not count."""
        if not self._is_of_loader:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        bare = self.accelerator.unwrap_model(self.model)
        own = torch.tensor(sum(num_targets(bare, batch) for batch in batch_samples), device=device)
        self._targets = self.accelerator.reduce(own, "sum").clamp(min=1)  # no number: that would wait for the device
        self._num_batches = self.accelerator.num_processes * len(batch_samples)
        counted = [batch if weight_of(batch) else _without_targets(batch) for batch in batch_samples]
        found = super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]
        return found.clamp(min=1) if isinstance(found, torch.Tensor) else found

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the Trainer's own returns; a loader's losses are summed up by their targets."""
        self._targets, self._is_filler, bare = None, not weight_of(inputs), self.accelerator.unwrap_model(model)
        own = num_targets(bare, inputs) if self._evaluates_loader else 0
        found = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self._evaluates_loader and found[0] is not None:
            # A loss of `compute_loss` is the rank's part of that of all; behind `generate` it is the batch's own.
            count = own if self._targets is None else int(self._targets)
            self._evaluated += [float(found[0]) * count, count]
        return found

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Returns what the Trainer's own returns; the loss of a loader is the mean over its targets on all ranks."""
        self._evaluates_loader, self._evaluated = isinstance(dataloader, Loader), np.zeros(2)
        try:
            kwargs["metric_key_prefix"] = metric_key_prefix
            if self._evaluates_loader:
                self.gather_function = self._gathered
            output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            if self._evaluates_loader and (name := f"{metric_key_prefix}_loss") in output.metrics:
                total, count = sum(accelerate.utils.gather_object([self._evaluated]))
                output.metrics[name] = float(total / max(count, 1))
            return output
        finally:
            self._evaluates_loader = None

    def _gathered(self, values: Any) -> Any:
        """Returns the rows of all ranks, whose batches have different numbers of them; a filler has none."""

        def rows(own: torch.Tensor) -> torch.Tensor:
            counts = self.accelerator.gather(torch.tensor([0 if self._is_filler else len(own)], device=own.device))
            padded = self.accelerator.pad_across_processes(own, dim=0)
            parts = self.accelerator.gather(padded).split(len(padded))
            return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])

        return accelerate.utils.operations.recursively_apply(rows, values)

    def _is_first_scaled(self, model: Any, count: Any) -> bool:
        """Returns whether this is the first loss that the Trainer itself would have the model divide by a number."""
        is_own = getattr(super().compute_loss, "__func__", None) is Trainer.compute_loss  # type: ignore[misc]
        is_open = self.model_accepts_loss_kwargs and self.compute_loss_func is None and not self._knows_scale
        return bool(is_own and is_open and model.training and isinstance(count, torch.Tensor))

    def _as_scaled(self, found: Any, count: torch.Tensor) -> Any:
        """Returns what compute_loss gave; as a mean where the model did not divide by `count`, and from then on."""
        self._knows_scale = True
        loss = found[0] if isinstance(found, tuple) else found
        if _depends_on(loss, count):
            return found
        self.model_accepts_loss_kwargs = False
        if self.args.average_tokens_across_devices:
            loss = loss / (self.accelerator.num_processes // self.get_tp_size())  # type: ignore[attr-defined]
        return (loss, *found[1:]) if isinstance(found, tuple) else loss

    def _watched(self, model: Any, bare: Any, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Returns what watches the first pass on fields of such names; nothing for batches of other data sets."""
        names, tried = frozenset(inputs), self.__dict__.setdefault("_tried", set())
        if names in tried or not self._is_of_loader:
            return nullcontext()
        tried.add(names)
        return watched(model, names, takes=taken_by(bare), who=f"the Trainer's {type(bare).__name__}", advice=_ADVICE)

    def get_train_dataloader(self) -> Any:
        """Returns this rank's loader, not prepared by accelerate."""
        if not isinstance(self.train_dataset, Loader):
            return super().get_train_dataloader()  # type: ignore[misc]
        return _Handed(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns this rank's loader of an evaluation, at the head of its epoch 0; a name is looked up in the dict."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.eval_dataset[found] if isinstance(found, str) else found
        if not isinstance(found, Loader):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return self._from_its_head(found)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns this rank's loader for `predict`, at the head of its epoch 0."""
        if not isinstance(test_dataset, Loader):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self._from_its_head(test_dataset)

    def num_examples(self, dataloader: Any) -> int:
        """Returns the samples of a loader, of all ranks together; of another DataLoader what the Trainer says."""
        loader = dataloader.loader if isinstance(dataloader, _Handed) else dataloader
        if isinstance(loader, Loader):
            return len(loader.source)
        number: int = super().num_examples(dataloader)  # type: ignore[misc]
        return number

    def _from_its_head(self, loader: Loader) -> Loader:
        if loader is self.train_dataset:
            raise _refused(
                "eval_dataset is the loader of the training, which it would move; make another with make_loader"
            )
        self._check_loader(loader)
        if getattr(self.args, "predict_with_generate", False) and isinstance(loader.plan, PackPlan):
            raise _refused(
                "predict_with_generate is true and the batches are packs, behind whose last sample alone a model would "
                "write; set predict_with_generate=False"
            )
        # The Trainer evaluates without a loss what has neither labels nor a default of return_loss.
        self.can_return_loss |= loses_no_labels(base_of(self.accelerator.unwrap_model(self.model)))
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 0})
        return loader

    def _check_training(self, loader: Loader) -> None:
        self._check_loader(loader)
        if self.args.auto_find_batch_size:
            raise _refused("auto_find_batch_size is true, but batches are those of the plan; leave it out")
        planned, steps = loader.plan.grad_accs, self.args.gradient_accumulation_steps
        if planned is not None and set(planned) != {steps}:
            raise _refused(
                f"plan.calibration wants grad_acc {sorted(set(planned))}, the Trainer has gradient_accumulation_steps "
                f"= {steps} for all; take a calibration without grad_acc, or forebay train"
            )

    def _check_loader(self, loader: Loader) -> None:
        if self.args.n_gpu > 1:
            raise _refused(
                f"the Trainer would cut each batch for {self.args.n_gpu} GPUs of one process; start a process a GPU "
                "with torchrun"
            )
        # transformers 4 has no get_cp_size and no get_sp_size.
        sizes = (getattr(self, f"get_{kind}_size", lambda: 1)() for kind in ("tp", "cp", "sp"))
        shards = math.prod(sizes)
        rank, world = self.accelerator.process_index // shards, self.accelerator.num_processes // shards
        if dist.is_initialized() and dist.get_world_size() != self.accelerator.num_processes:
            raise _refused(
                f"{dist.get_world_size()} processes run, and each Trainer takes itself for {rank + 1} of {world}: they "
                "would train apart; without a GPU set use_cpu=True in its arguments"
            )
        if (loader.dp_rank, loader.dp_world_size) != (rank, world):
            raise _refused(
                f"the loader is that of rank {loader.dp_rank} of {loader.dp_world_size}, the Trainer's is rank {rank} "
                f"of {world}; make it with make_loader(config, dp_rank={rank}, dp_world_size={world})"
            )
        if not self.args.label_smoothing_factor or self.compute_loss_func is not None:
            return
        name, config = type(self.accelerator.unwrap_model(self.model)).__name__, getattr(self.model, "config", None)
        is_shifted = not getattr(config, "is_encoder_decoder", False)
        if is_shifted and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise _refused(
                f"label_smoothing_factor is {self.args.label_smoothing_factor}, and the Trainer would score each token "
                f"of {an(name)} against itself, not the next one; set it to 0, or pass a compute_loss_func"
            )

    def _restore(self, loader: Loader, checkpoint: Path) -> None:
        """Moves the loader to where `checkpoint` left it; ResumeError if the Trainer would go on at another place."""
        path = checkpoint / "trainer_state.json"
        try:
            state = TrainerState.load_from_json(os.fspath(path))
        except (OSError, ValueError, TypeError) as err:
            raise ResumeError(f"cannot read {path}: {err}; resume from an earlier checkpoint", code="FB513") from err
        stored = (state.stateful_callbacks or {}).get(STATE_NAME)
        if stored is None:
            raise ResumeError(
                f"{path} has no state of a forebay loader: it was written by a Trainer without LoaderMixin, or before "
                "step 1; resume from another checkpoint, or call train() without resume_from_checkpoint",
                code="FB516",
            )
        loader.load_state_dict(stored)
        world, accumulated = loader.dp_world_size, self.args.gradient_accumulation_steps
        epoch, updates = divmod(state.global_step, math.ceil(len(loader) / accumulated))
        place = (loader.state.epoch, loader.state.position)
        if place != (epoch, updates * accumulated * world):
            raise ResumeError(
                f"{path}: step {state.global_step} stands at micro-batch {place[1]} of epoch {place[0]}; with {world} "
                f"ranks and gradient_accumulation_steps = {accumulated} the Trainer would go on at "
                f"{updates * accumulated * world} of epoch {epoch}; resume with as many ranks times "
                "gradient_accumulation_steps as wrote it",
                code="FB515",
            )


def _has_loaders(data: Any) -> bool:
    """Returns whether a data set is a loader, or a dict of them."""
    return isinstance(data, Loader) or (isinstance(data, dict) and any(map(_has_loaders, data.values())))


def _row_of(data: Any) -> Any:
    """Returns a data set of one row in the place of each loader: of token ids, so that nothing is to be prepared."""
    from datasets import Dataset

    if isinstance(data, dict):
        return {name: _row_of(each) for name, each in data.items()}
    if not isinstance(data, Loader):
        return data
    if data.source.constants.get("pairs"):  # which TRL's DPOTrainer tokenises
        return Dataset.from_dict({"prompt": ["a"], "chosen": ["a"], "rejected": ["b"]})
    return Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})


def _without_targets(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch whose labels are passed over, where it has any."""
    return batch | {"labels": torch.full_like(batch["labels"], IGNORED)} if "labels" in batch else batch


def _depends_on(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Returns whether a loss was computed of `leaf`, a tensor that wants a gradient."""
    open_, seen = [loss.grad_fn], set()
    while open_:
        step = open_.pop()
        if step is None or step in seen:
            continue
        if getattr(step, "variable", None) is leaf:
            return True
        seen.add(step)
        open_ += [other for other, _ in step.next_functions]
    return False


class _KeepState(TrainerCallback):  # type: ignore[misc]
    """Writes the loader's state to the Trainer's after every optimizer step.

    Not when a checkpoint is saved: a run that is stopped between two micro-batches of a step saves what it had read of
    the step, and learnt nothing from.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Called by the Trainer before it saves or evaluates; it has read this step's micro-batches and no more."""
        state.stateful_callbacks[STATE_NAME] = self._loader.state_dict()


class _Handed:
    """A loader with what the Trainer asks of a DataLoader."""

    batch_size = None
    drop_last = False
    prefetch_factor = None

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`."""
        self.loader.set_epoch(epoch)

    @property
    def dataset(self) -> _Rest:
        """The attribute that accelerate's `skip_first_batches` reads, to skip what was learnt before the checkpoint."""
        return _Rest(self.loader)


class _Rest(IterableDataset[Batch | None]):
    """The epoch in which a loader stands: None, to be skipped, for each step that this rank has done; then batches."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch | None]:
        done = self._loader.state.position // self._loader.dp_world_size
        yield from itertools.repeat(None, done)
        yield from self._loader


def _refused(what: str) -> ConfigError:
    return ConfigError(what, code="FB707")
