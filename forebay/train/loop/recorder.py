"""Records some steps of a run with torch.profiler: the loop's stretches, the model's modules, and what they call."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forebay.spans import FORWARD, listening
from forebay.store.files import temporary_name

_logger = logging.getLogger(__name__)
MARK = "forebay/"
"""In front of the names of our own stretches."""
WARM_UP = 1
"""Steps before those that are recorded: memory is allocated in them, threads start, and torch.profiler does."""

_PARTS = {
    "encoder": "encoder",
    "audio_tower": "encoder",
    "visual": "encoder",
    "decoder": "decoder",
    "language_model": "decoder",
}
"""What a model's module is called in the table, by the last part of its name."""
_DEPTH = 3
"""Levels below those modules that have a stretch of their own: a layer's attention, for one."""


class Recorder:
    """Records steps of the thread that makes it a context: a warm-up step, then `num_steps`."""

    def __init__(self, *, num_steps: int) -> None:
        self.num_steps = num_steps
        # Kineto says on standard error, unasked, that it begins and ends.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=WARM_UP, active=num_steps, repeat=1),
            experimental_config=_all_threads(),
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(listening(lambda name: torch.profiler.record_function(MARK + name)))
        self._stack.enter_context(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def watch(self, model: torch.nn.Module) -> int:
        """Returns the steps that the run is to do; until the context ends, the model's parts have stretches.

        Not those of a compiled model: a hook would cut its graph.
        """
        for module, name in [] if _is_compiled(model) else named_parts(model):
            for remove in _hooked(module, f"{MARK}{FORWARD}: {name}"):
                self._stack.callback(remove)
        return WARM_UP + self.num_steps

    def step_done(self) -> None:
        """Ends one step and begins the next one."""
        self._profile.step()

    def write(self, path: Path) -> None:
        """Makes `path` the trace of the recorded steps, as Perfetto and chrome://tracing read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path).with_suffix(".json")
        try:
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())


def named_parts(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Returns the modules that get a stretch, and its name: `encoder`, `encoder.layers.self_attn`.

    Indices are left out: layers that are alike are one.
    """
    found: list[tuple[torch.nn.Module, str]] = []
    roots: dict[str, str] = {}
    for path, module in model.named_modules():
        parent = next((root for root in roots if path.startswith(f"{root}.")), None)
        if parent is None:
            if (part := _PARTS.get(path.rpartition(".")[2])) is not None:
                roots[path] = part
                found.append((module, part))
            continue
        below = path.removeprefix(f"{parent}.")
        if below.count(".") < _DEPTH and not isinstance(module, torch.nn.ModuleList):
            names = [roots[parent], *(name for name in below.split(".") if not name.isdecimal())]
            found.append((module, ".".join(names)))
    return found


def _hooked(module: torch.nn.Module, name: str) -> list[Callable[[], None]]:
    """Returns what removes the hooks that make a stretch of every call of a module."""
    open_: list[Any] = []

    def begin(*_: object) -> None:
        open_.append(torch.profiler.record_function(name))
        open_[-1].__enter__()

    def end(*_: object) -> None:
        open_.pop().__exit__(None, None, None)

    # always_call: also after an error.
    return [
        module.register_forward_pre_hook(begin, prepend=True).remove,
        module.register_forward_hook(end, always_call=True).remove,
    ]


def _all_threads() -> Any:
    """Returns the setting with which torch.profiler hears the loader's threads, too; None where torch has none."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        _logger.warning("torch %s records no threads but the main one: the loader's are missing", torch.__version__)
        return None
