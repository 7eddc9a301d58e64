"""A frozen model at work: opened from its folder, given batches, asked for what is kept of each sample.

Arithmetic is deterministic: no TF32, deterministic kernels, no dropout. A batch is a function of its samples alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import platform
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from forebay.config.frozen_models import KeptOutput
from forebay.errors import BuildError, ConfigError
from forebay.pretrained import from_folder, no_bar
from forebay.steps.form import FieldForm
from forebay.steps.model.derived_outputs import DERIVED, STATES
from forebay.steps.model.free_memory import free_bytes, weights_bytes
from forebay.steps.model.frozen_families import FrozenFamily
from forebay.steps.model.model_step import ModelStep, at_samples
from forebay.steps.step import Batch
from forebay.store.layout import Array
from forebay.visible import human_bytes

_CODES = "audio_codes"
_TOKENS = "input_ids"
_ONE_AT_A_TIME = threading.Lock()
"""Threads of an uncached loader share a model, and nobody promises that several may call or open one at once."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model, what it is called with, and what is kept. settings: of derived outputs."""

    step: ModelStep
    family: FrozenFamily
    model: Any
    kept: Mapping[str, KeptOutput]
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    device: torch.device

    @classmethod
    def of(cls, step: ModelStep, device: str = "cpu") -> Self:
        """Returns the model of a step, with its weights on a device.

        Raises BuildError where the folder is not what it was when its key was made, and where the weights do not fit;
        ConfigError where transformers, or diffusers, cannot open the folder, and for arguments that the call
        has not.
        """
        family = step.family()
        kept, arguments = step.outputs(family), step.arguments(family)
        named = {each.setting for each in step.derived(family) if each.setting}
        settings = {name: arguments.pop(name, None) for name in named}
        has_head = step.loader(family) != family.loader
        make_exact(device)
        with at_samples(step, ()):
            _require_weights(step, device)
        model = _loaded(step, family)
        step.require_unchanged()
        keeps_states = any(each.output in (STATES, "mean") for each in kept.values())
        if family.layered and (step.layer is not None or (has_head and keeps_states)):
            arguments["output_hidden_states"] = True
        elif step.layer is not None:
            raise ConfigError(f"model.{step.label}.layer: {family.call} gives no layers; leave it out", code="FB147")
        if not callable(getattr(model, step.call or family.call, None)):
            raise ConfigError(
                f"model.{step.label}.call: {type(model).__name__} has no {step.call}; leave it out for {family.call}",
                code="FB147",
            )
        with at_samples(step, ()):
            placed = model.to(device).eval()
        return cls(step, family, placed, kept, arguments, settings, torch.device(device))

    @property
    def made_by(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def machine(self) -> dict[str, str]:
        """See `machine_of`."""
        return machine_of(str(self.device))

    @property
    def batch_size(self) -> int:
        """Samples that are given to the model at once."""
        return self.step.batch_of(self.family)

    def made(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Array]]:
        """Returns the kept arrays of each sample of a batch, without its padding.

        batch: what the model takes, by name. rows: of each sample, how many rows of the input are its own.
        """
        call = getattr(self.model, self.step.call or self.family.call)
        taken = inspect.signature(call).parameters
        given = {name: self._on_device(value) for name, value in batch.items() if name in taken}
        with _ONE_AT_A_TIME, torch.inference_mode():
            answer = call(**given, **self.arguments)
            if _TOKENS in given and any(each.output == _TOKENS for each in self.kept.values()):
                answer[_TOKENS] = given[_TOKENS]  # what the other outputs stand beside
            steps = None if self.family.steps is None else [self.family.steps(self.model, n) for n in rows]
            found = {name: self._kept(answer, name, steps) for name in self.kept}
        return [{name: arrays[place] for name, arrays in found.items()} for place in range(len(rows))]

    def _on_device(self, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value).contiguous()  # as it is handed over by another process
        return tensor.to(self.device, self.model.dtype if tensor.is_floating_point() else None)

    def _kept(self, answer: Any, field: str, steps: Sequence[int] | None) -> list[Array]:
        output = self.kept[field].output
        derived = DERIVED.get(output)
        parts = [self._rows(answer, name, steps) for name in (derived.of if derived else (output,))]
        if derived is None:
            return list(map(_array, parts[0]))
        setting = None if derived.setting is None else self.settings[derived.setting]
        try:
            return [_array(derived.make(*own, setting, self.model.config)) for own in zip(*parts, strict=True)]
        except ValueError as err:
            raise ConfigError(f"model.{self.step.label}.args: {err}", code="FB147") from err

    def _rows(self, answer: Any, output: str, steps: Sequence[int] | None) -> Sequence[torch.Tensor]:
        """Returns an output of each sample, without its padding."""
        values = self._output(answer, output)
        if output == _CODES:
            values = (values[0] if values.ndim == 4 else values).transpose(1, 2)
        if output in {kept.output for kept in self.kept.values()}:
            values = values.cpu()  # at once: each copy waits for the device
        if steps is None or values.ndim < (2 if output == _TOKENS else 3):
            return list(values)
        if max(steps) > values.shape[1]:
            raise BuildError(
                f"model.{self.step.label}: {output} has {values.shape[1]} steps for {max(steps)} that are expected; "
                "this is a fault of forebay's table of families",
                code="FB147",
            )
        return [row[:end] for row, end in zip(values, steps, strict=True)]

    def _output(self, answer: Any, name: str) -> torch.Tensor:
        if name == STATES and "output_hidden_states" in self.arguments:
            return self._layer(answer.hidden_states)
        found = answer
        for part in name.split(".") if not isinstance(answer, torch.Tensor) else ():
            found = getattr(found, part, None)
        if not isinstance(found, torch.Tensor):
            has = ", ".join(sorted(key for key, value in answer.items() if isinstance(value, torch.Tensor)))
            raise ConfigError(
                f"model.{self.step.label}.keep: {self.made_by} gives no {name}; it gives {has or 'one tensor'}",
                code="FB147",
            )
        return found

    def _layer(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        layer = -1 if self.step.layer is None else self.step.layer
        if not -len(states) <= layer < len(states):
            raise ConfigError(
                f"model.{self.step.label}.layer is {layer}, and {self.made_by} has layers 0 to {len(states) - 1}",
                code="FB147",
            )
        return states[layer]

    def declared(self, first: Mapping[str, Array]) -> tuple[tuple[FieldForm, ...], Mapping[str, str]]:
        """Returns the forms of fields, and the dtypes of those that are one number. first: of a sample alone."""
        numbers = {name: "float32" if a.dtype.kind == "f" else "int64" for name, a in first.items() if not a.ndim}
        forms = (form for name in self.kept if name not in numbers for form in self._form(name, first[name]))
        return tuple(forms), numbers

    def _form(self, field: str, first: Array) -> tuple[FieldForm, ...]:
        """Returns the form of a field, and of the mask of one that grows. first: of a sample alone."""
        kept = self.kept[field]
        if self.family.factor is not None:  # the sides of a latent are those of its image
            holds_moments = kept.output == self.family.output
            more: dict[str, Any] = {"shape": (len(first), None, None), "holds_moments": holds_moments}
            return (FieldForm(name=field, dtype="float32", stored_dtype=kept.dtype, pad=None, **more),)
        grows = self.family.steps is not None and first.ndim >= (1 if kept.output == _TOKENS else 2)
        shape: tuple[int | None, ...] = (None, *first.shape[1:]) if grows else first.shape
        if first.dtype.kind == "f":
            form = FieldForm(name=field, dtype="float32", shape=shape, stored_dtype=kept.dtype)
        else:
            stored = _codes_dtype(self.model) if kept.output == _CODES else "int32"
            form = FieldForm(name=field, dtype="int64", shape=shape, stored_dtype=stored)
        if not grows:
            return (form,)
        return form, FieldForm(name=f"{field}_mask", dtype="int64", shape=(None,), stored_dtype="uint8", mask_of=field)


def machine_of(device: str) -> dict[str, str]:
    """Returns the device, its driver and torch: what numbers depend on beside the weights."""
    torch_is = {"torch": torch.__version__}
    if device == "cpu":
        return torch_is | {"device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    driver = re.search(r"Module\s+(\S+)", _text_of(Path("/proc/driver/nvidia/version")))
    return torch_is | {
        "device": torch.cuda.get_device_name(device),
        "cuda": str(torch.version.cuda),
        "driver": driver[1] if driver else "unknown",
    }


def make_exact(device: str) -> None:
    """Turns TF32 and kernels that differ from run to run off, for what a model does on a device."""
    if device != "cpu":  # switches of the whole process, which trains where samples are made on the fly
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(mode=True, warn_only=True)


@functools.lru_cache(maxsize=4)
def opened_model(step: ModelStep, device: str = "cpu") -> OpenModel:
    """Returns the model of a step; a process keeps the last ones."""
    return OpenModel.of(step, device)


def _require_weights(step: ModelStep, device: str) -> None:
    """Raises BuildError where a model's weights alone are larger than what is free of a device, or of this machine."""
    for place in {"cpu", device}:
        if (wanted := weights_bytes(step)) > (free := free_bytes(place)):
            raise BuildError(
                f"model.{step.label}: its weights take {human_bytes(wanted)} in {step.dtype}, and {place} has "
                f'{human_bytes(free)} free; free some, name another device in run.devices, or set dtype = "bfloat16"',
                code="FB312",
            )


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _loaded(step: ModelStep, family: FrozenFamily) -> Any:
    from safetensors import SafetensorError

    library, folder = importlib.import_module(family.library), Path(step.folder)
    loader, name = step.loader(family), "dtype" if family.library == "transformers" else "torch_dtype"
    options: dict[str, Any] = {name: getattr(torch, step.dtype), "use_safetensors": True}
    try:
        with _ONE_AT_A_TIME, no_bar():
            whole, info = from_folder(getattr(library, loader), folder, **options, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as err:
        raise ConfigError(f"model.{step.label}.folder: cannot open {folder}: {err}", code="FB147") from err
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.{step.label}.folder: {folder} lacks {len(missing)} weights of {type(whole).__name__}, "
            f"{missing[0]} among them: its values would be random; name the folder of the whole model",
            code="FB147",
        )
    if "use_cache" in whole.config:
        whole.config.use_cache = False  # of keys and values, which nobody reads
    is_whole = loader != family.loader or step.call not in (None, family.call)
    return whole if is_whole else functools.reduce(getattr, filter(None, family.part.split(".")), whole)


def _array(values: torch.Tensor) -> Array:
    values = values.float() if values.is_floating_point() else values
    return values.cpu().contiguous().numpy()


def _codes_dtype(model: Any) -> str:
    """Returns the type that holds every code of a model's codebooks."""
    size = getattr(model.config, "codebook_size", 1 << 16)
    return "uint8" if size <= 256 else "uint16"
