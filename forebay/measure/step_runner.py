"""Training steps as the loop does them, on batches that a calibration makes.

One trial: real optimizer steps on one batch, in a process of its own, and what they took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.measure.batch_search import Case
from forebay.store.source import SampleSource
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loop.launch import make_accelerator
from forebay.train.loop.learner import Learner
from forebay.train.loop.micro_batches import Group, count_samples
from forebay.train.models.families import ModelFacts
from forebay.train.models.objective import Objective
from forebay.train.select import as_stored, select


def opened(config: Config) -> SampleSource:
    """Returns the samples of a config's sealed cache, or of those of its mixture.

    Raises CacheNotFoundError, which names the command to run, where it is not there.
    """
    return select(dataclasses.replace(config, loader=dataclasses.replace(config.loader, cache="require")))


def for_trials(config: Config) -> Config:
    """Returns a config whose run neither writes nor evaluates, and whose packs keep their uint8 patches."""
    train = dataclasses.replace(
        config.train,
        max_steps=None,
        epochs=None,
        warmup_steps=0,
        warmup_ratio=None,
        eval=(),
        save_best=None,
        trackers=(),
        output_dir=str(Path(tempfile.gettempdir()) / f"forebay-calibrate-{os.getpid()}"),  # never made
    )
    return as_stored(dataclasses.replace(config, train=train))


class _NoLoader:
    """Stands where the loop has a loader: a calibration makes its batches itself."""

    weight = 1

    def __iter__(self) -> Iterator[Batch]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """There is nothing to go on from."""

    def report(self) -> Mapping[str, Any]:
        return {}


class Steps:
    """The loop's learner on batches of the caller's; its model and optimizer are real."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        constants: Mapping[str, Any],
        *,
        accumulates: bool,
        has_text_alone: bool = False,
    ) -> None:
        """Loads the model. accumulates: a step takes the same micro-batch twice, so that gradients are there."""
        self._accelerator = make_accelerator(config, has_text_alone=has_text_alone, may_rest=facts.own_loss is not None)
        self._learner = Learner(config, facts=facts, accelerator=self._accelerator, constants=constants)
        self._learner.start(None, loader=_NoLoader())
        self._objective, self._times, self._count = Objective(facts), 2 if accumulates else 1, 0
        self.device: torch.device = self._accelerator.device
        self.losses: list[float] = []

    @property
    def model(self) -> Any:
        """The model inside of what accelerate made of it."""
        return self._learner._model

    @property
    def optimizer(self) -> Any:
        """The optimizer inside of what accelerate made of it."""
        return self._learner._optimizer.optimizer

    @property
    def mode(self) -> AbstractContextManager[None]:
        """What `warm` and `step` are to be called under: nothing."""
        return contextlib.nullcontext()

    def prepared(self, batch: Batch) -> Batch:
        """Returns what `warm` and `step` take for a batch: the batch."""
        return batch

    def warm(self, batch: Batch) -> None:
        """The optimizer has its state from now on: the first step has a lower peak than the others."""
        if not self._count:
            self.step(batch)

    def step(self, batch: Batch) -> float:
        """Returns the seconds of one optimizer step on `batch`, the work of the device included."""
        started_s = time.perf_counter()
        fields = fields_of(batch)
        targets = self._objective.units(fields)
        ranks = self._learner.num_ranks
        group = Group(
            batches=[(batch, 1)] * self._times,
            num_targets=max(targets * self._times * ranks, 1),
            num_samples=count_samples(batch) * self._times * ranks,
            wait_s=0.0,
        )
        self._count += 1
        outcome = self._learner.update(group, step=self._count)
        self.losses.append(float(outcome.loss))  # waits for the device
        return time.perf_counter() - started_s


_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|_ALLOC_FAILED")
"""What a RuntimeError of torch, cuBLAS or cuDNN says where an allocation failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the config's model is trained on here."""

    type: str
    name: str
    total_bytes: int
    free_bytes: int
    """What other processes leave of it."""

    @property
    def is_cuda(self) -> bool:
        """Whether its memory is what is calibrated; the memory of a host is not."""
        return self.type == "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """What the steps of a trial took.

    On CUDA `peak_bytes` is what the allocator has reserved at most, `used_bytes` what tensors had of it at most. On the
    CPU both are the peak of the process's resident memory, less what it had before batch and model were made.
    """

    peak_bytes: int
    used_bytes: int
    step_s: float
    """Median of the steps behind the first."""


def device() -> Device:
    """Returns the device that accelerate would take: the first of CUDA, else the CPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return Device(type="cuda", name=torch.cuda.get_device_name(0), total_bytes=total, free_bytes=free)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free_kb = int(_field(Path("/proc/meminfo"), "MemAvailable"))
    return Device(type="cpu", name="CPU", total_bytes=pages, free_bytes=free_kb * 1024)


def trial(
    config: Config, facts: ModelFacts, case: Case, size: int, *, steps: int, limit_bytes: int, accumulates: bool
) -> MeasuredStep | None:
    """Returns what `steps` optimizer steps on a batch of the case took; None where memory did not suffice.

    limit_bytes: on CUDA, the allocator gives no more than this. accumulates: see `Steps`.
    Call it in a process of its own: a process that ran out of memory is of no use for another trial.
    """
    source = opened(config)
    with_cuda = torch.cuda.is_available()
    if with_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), 0)
    before = 0 if with_cuda else resident_bytes()
    try:
        batch = case.batch(config, source, size)
        loop = Steps(config, facts, source.constants, accumulates=accumulates)
        times_s = [loop.step(batch) for _ in range(steps)]
    except (RuntimeError, MemoryError) as err:
        if isinstance(err, MemoryError) or is_out_of_memory(err):
            return None
        raise
    step_s = statistics.median(times_s[1:] or times_s)
    if with_cuda:
        peaks = torch.cuda.max_memory_reserved(0), torch.cuda.max_memory_allocated(0)
    else:
        peaks = (peak_resident_bytes() - before,) * 2
    return MeasuredStep(peak_bytes=peaks[0], used_bytes=peaks[1], step_s=round(step_s, 4))


def is_out_of_memory(err: RuntimeError) -> bool:
    """Returns whether an error says that an allocation failed, on a device or on the host."""
    return isinstance(err, torch.OutOfMemoryError) or _NO_MEMORY.search(str(err)) is not None


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(_field(Path("/proc/self/status"), "VmRSS")) * 1024


def peak_resident_bytes() -> int:
    """Returns the highest resident memory of this process since it began, or since `reset_peak_resident`."""
    return int(_field(Path("/proc/self/status"), "VmHWM")) * 1024


def reset_peak_resident() -> None:
    """Makes the highest resident memory what it is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _field(path: Path, name: str) -> str:
    found = re.search(rf"^{name}:\s+(\d+)", path.read_text(encoding="ascii"), re.MULTILINE)
    return found[1] if found else "0"
