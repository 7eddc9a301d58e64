"""The memory of a training step, computed without a device: a step on fake tensors, added up by torch's tracker.

A fake tensor has a shape, a dtype and a device, and no memory. `MemTracker` sees when each one comes and goes. A model
that looks at values (Qwen3-ASR counts the frames of a mask, Qwen3-VL reads sizes of images) cannot run on fake tensors:
there the tracker watches small real steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from forebay.config.tree import Config
from forebay.errors import CacheMismatchError
from forebay.measure.batch_search import Case, Line
from forebay.measure.step_runner import StepRunner, opened
from forebay.pretrained import from_folder
from forebay.train.collate.patches import pixel_dtype, to_model_inputs
from forebay.train.device import Batch
from forebay.train.loop.trainable import adamw, set_passes, set_trainable
from forebay.train.models.families import ModelFacts
from forebay.train.models.lora import with_adapters
from forebay.train.models.objective import Objective

_logger = logging.getLogger(__name__)
PARTS = ("weights", "gradients", "optimizer", "activations")
"""What memory is for. Activations are all that the other parts are not: the batch and temporaries too."""
_PART_OF = {"Parameter": "weights", "Buffer": "weights", "Gradient": "gradients", "Optstate": "optimizer"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    """The memory that the tracker saw of one step."""

    parts: Mapping[str, float]
    """Bytes of each of `PARTS` at the peak of the passes."""
    update_bytes: int
    """The peak while the optimizer moved the weights."""

    @property
    def total(self) -> float:
        """All bytes at the peak of the passes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedStep:
    """Memory at the peak of the passes of a step, each part as a line in the size of the batch."""

    parts: Mapping[str, Line]
    update_bytes: int
    """What the optimizer takes at most while it moves the weights, whatever the batch is."""
    gradient_bytes: int
    """Of all parameters that learn. At the peak there may be fewer: gradients come as activations go."""

    @property
    def line(self) -> Line:
        """The sum of the parts."""
        return Line(
            base=sum(part.base for part in self.parts.values()), slope=sum(part.slope for part in self.parts.values())
        )

    def at(self, size: int) -> int:
        """Returns the bytes of a step at a size."""
        return max(round(self.line.at(size)), self.update_bytes)

    def largest(self, limit: float, *, most: int) -> int:
        """Returns the largest size whose bytes are not above `limit`, as `Line.largest`; 0 where none is."""
        return self.line.largest(limit, most=most) if self.update_bytes <= limit else 0

    def breakdown(self, size: int) -> dict[str, int]:
        """Returns the bytes of each part at a size."""
        return {name: max(round(part.at(size)), 0) for name, part in self.parts.items()}


def probe(config: Config, facts: ModelFacts, cases: list[Case], *, accumulates: bool) -> list[ProbedStep | None]:
    """Returns the memory of a step on each of `cases`; None where even small steps do not fit.

    accumulates: whether an optimizer step takes several micro-batches, so that gradients lie beside activations.
    """
    source = opened(config)
    found: list[ProbedStep | None] = []
    try:
        steps = FakeSteps(config, facts, source.constants, accumulates=accumulates)
        for case in cases:
            found.append(_probed(steps, case, config, source, sizes=case.fake_sizes))
        return found
    # What fake tensors raise where a value is asked for, and what comes of that in a model of no family.
    except (RuntimeError, CacheMismatchError) as err:
        _logger.info("the model cannot run on fake tensors (%s); probing with small real steps", err)
    real = StepRunner(config, facts, source, accumulates=accumulates)
    found = []
    for case in cases:
        try:
            found.append(_probed(real, case, config, source, sizes=case.real_sizes))
        except torch.OutOfMemoryError:
            found.append(None)
    return found


def tracked_step(steps: FakeSteps | StepRunner, batch: Batch) -> Tracked:
    """Returns the memory of a step on `batch`, on the steps' device."""
    inputs: Any = steps.prepared(batch)
    tracker = _PeakTracker()
    with warnings.catch_warnings(), steps.mode:
        warnings.filterwarnings("ignore", message="Module is None")  # of an output that nobody kept
        if not steps.optimizer.state:  # which the first step makes, with a lower peak than the others
            steps.step(inputs)
        tracker.track_external(steps.model, steps.optimizer)
        with tracker:  # inside the mode: it leaves out what is done in another one
            steps.step(inputs)
    return Tracked(parts=tracker.parts(steps.device), update_bytes=tracker.of_update.get(steps.device, 0))


def _probed(steps: Any, case: Case, config: Config, source: Any, *, sizes: tuple[int, int]) -> ProbedStep:
    """Returns the memory of a step on batches of the case, on a line through two sizes."""
    learning = [parameter for parameter in steps.model.parameters() if parameter.requires_grad]
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in learning)
    (first, low), (second, high) = ((s, tracked_step(steps, case.batch(config, source, s))) for s in sizes)
    parts = {name: Line.through((first, low.parts[name]), (second, high.parts[name])) for name in PARTS}
    return ProbedStep(parts=parts, update_bytes=high.update_bytes, gradient_bytes=gradient_bytes)


class _PeakTracker(MemTracker):
    """torch's tracker without its statistics by module, which cost modules times operations; frozen weights may be."""

    def __init__(self) -> None:
        super().__init__()
        self.of_update: dict[torch.device, int] = {}
        """The peak while the optimizer moved the weights, by device: it does not depend on the batch."""

    def _update_peak_stats(self, peak_state: Any) -> None:  # noqa: ARG002
        if self._in_opt:
            for device, now in self._curr_mem_snap.items():
                self.of_update[device] = max(self.of_update.get(device, 0), now["Total"])
            return
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw and module in self.memory_tracking:
            del self.memory_tracking[module]  # the second micro-batch of a step is like the first
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:  # noqa: FBT001, FBT002
        # Its hooks can only be put on parameters that learn; on the others they are never called.
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad = True
        try:
            return super()._track_module_params_and_buffers(module, install_grad_hooks)
        finally:
            for parameter in frozen:
                parameter.requires_grad = False

    def parts(self, device: torch.device) -> dict[str, float]:
        """Returns the bytes of each of `PARTS` at the peak of the passes."""
        found = dict.fromkeys(PARTS, 0.0)
        for kind, size in self.get_tracker_snapshot("peak").get(device, {}).items():
            if kind != "Total":
                found[_PART_OF.get(getattr(kind, "value", ""), "activations")] += size
        return found


class FakeSteps:
    """Training steps of the config's model on fake tensors: what `Learner.update` does, without a value.

    mode: what `step` is to be called under.
    """

    def __init__(self, config: Config, facts: ModelFacts, constants: Mapping[str, Any], *, accumulates: bool) -> None:
        """Makes model and optimizer. accumulates: a step takes the same micro-batch twice."""
        self._config, self._objective, self._constants = config, Objective(facts), constants
        self._times = 2 if accumulates else 1
        # Of the host on every machine: on an H200 fake tensors of the device gave no line, and trials had none.
        self.device = torch.device("cpu")
        self.mode = FakeTensorMode()
        self.model = fake_model(config, facts, mode=self.mode, device=self.device)
        self.optimizer = adamw(self.model, config.train)
        for group in self.optimizer.param_groups:
            group["foreach"] = True  # the default on CUDA, with its temporaries, and a tenth of the operations

    def prepared(self, batch: Batch) -> Mapping[str, Any]:
        """Returns the model's arguments for a batch, on the host."""
        return to_model_inputs(batch, self._constants, dtype=pixel_dtype(self._config.loader.pixels))

    def step(self, inputs: Mapping[str, Any]) -> None:
        """Does an optimizer step on arguments of these shapes."""
        for _ in range(self._times):
            self._backward({name: self._fake(value) for name, value in inputs.items()})
        limit = self._config.train.max_grad_norm
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit if limit > 0 else math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, inputs: dict[str, Any]) -> None:
        # A function of its own: neither inputs nor loss are there while the optimizer moves the weights.
        dtype = _AUTOCAST.get(self._config.train.mixed_precision)
        with contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype):
            loss = self._objective(self.model, inputs, units=1).loss
        loss.backward()

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.device)


def fake_model(config: Config, facts: ModelFacts, *, mode: FakeTensorMode, device: torch.device) -> Any:
    """Returns the model that the loop would train, in float32, as fake tensors on `device`; no weights are read."""
    wanted = from_folder(transformers.AutoConfig, facts.folder)
    with torch.device("meta"):
        model = getattr(transformers, facts.model_class)(wanted).float().train()
        if config.train.lora is not None:
            model = with_adapters(model, config.train.lora, seed=0, base=None)
    with mode:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        model.tie_weights()
    if facts.prepare_text_alone is not None:
        facts.prepare_text_alone(model, config.train.text_encoder)
    set_trainable(model, config.train)
    set_passes(model, dataclasses.replace(config.train, compile=False))
    return model
