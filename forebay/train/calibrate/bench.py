"""The bench of a calibration: its device, its limit, and how the entry of one bucket, or of packs, is found there."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.train.calibrate.case import PACK_UNIT, Case, PackCase
from forebay.train.calibrate.document import made_by
from forebay.train.calibrate.isolated import Died, Isolated
from forebay.train.calibrate.probe import Probed, probe
from forebay.train.calibrate.search import Bounds, Outcome, Search
from forebay.train.calibrate.trial import Device, Measured, device, trial
from forebay.train.models.table import ModelFacts
from forebay.visible import human_bytes

_logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.91
"""Share of the device that a batch may take where no limit is given; the rest is the driver's, and for fragments."""
DEFAULT_START = 128
"""First batch that is tried where nothing says how much a batch takes."""
MAX_SIZE = 4096
"""Samples of a batch, or units of a pack, at most."""
_HOST_SIZE = 4
"""Samples of the trial on the CPU at most: it shows that the steps work, and what they take here."""
_HOST_STEPS = 2
"""Steps of the trial on the CPU: the second has the optimizer's state, and so the peak."""
_HOST_SHARE = 0.5
"""Share of the host's free memory that a trial there may take, by its line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """What `forebay calibrate` was asked for."""

    buckets: tuple[str, ...] = ()
    """Names or indices of buckets; empty: all."""
    start_bs: int | None = None
    """Batch of the first trial. None: that of the line; without a line `DEFAULT_START`."""
    min_bs: int = 8
    max_memory_gb: float | None = None
    """GB of 10^9 bytes. None: `DEVICE_SHARE` of the device."""
    steps: int = 5
    target_samples: int | None = None
    """Samples of an optimizer step, over all ranks. None: `train.grad_acc` micro-batches a step."""
    out: Path | None = None
    """None: `calibrated_bs.json` beside the config."""

    def __post_init__(self) -> None:
        for name, least in (("start_bs", 1), ("min_bs", 1), ("steps", 2), ("target_samples", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, wanted {least} or more")
        if self.max_memory_gb is not None and not 0 < self.max_memory_gb < float("inf"):
            raise ConfigError(f"--max-memory-gb is {self.max_memory_gb:g}, wanted more than 0")
        if self.start_bs is not None and self.start_bs < self.min_bs:
            raise ConfigError(f"--start-bs is {self.start_bs} and --min-bs {self.min_bs}; start at the least or above")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where trials are made: a config, its device, and processes of their own."""

    config: Config
    facts: ModelFacts
    options: CalibrateOptions
    processes: Isolated
    device: Device
    world_size: int
    limit_bytes: int

    @classmethod
    def of(cls, config: Config, facts: ModelFacts, options: CalibrateOptions, processes: Isolated) -> Bench:
        """Returns the bench of this machine. Raises ConfigError where nothing says what the limit is."""
        found = processes.call(device)
        if isinstance(found, Died):
            raise ForebayError(f"the look at the device was {found}")
        if options.max_memory_gb is not None:
            limit = round(options.max_memory_gb * 1e9)
        elif found.is_cuda:
            limit = int(DEVICE_SHARE * found.total_bytes)
        else:
            raise ConfigError(
                "there is no CUDA device here whose memory could be the limit; give the memory of the device that is "
                "to train, in GB of 10^9 bytes: --max-memory-gb G"
            )
        _warn(found, limit)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(config, facts, options, processes, found, world_size, limit)

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step may take several micro-batches, so that gradients lie beside activations."""
        return self.options.target_samples is not None or self.config.train.grad_acc > 1

    def least(self, case: Case) -> int:
        """Returns the smallest size that counts: `--min-bs` samples, or the units of the longest sample of packs."""
        return case.least if isinstance(case, PackCase) else self.options.min_bs

    def made_by(self, case: Case) -> str:
        """Returns what an entry of a case is made by, see `document.made_by`."""
        return made_by(
            self.config,
            self.facts,
            case,
            device=self.device.name,
            limit_bytes=self.limit_bytes,
            is_shared=self.world_size > 1,
            accumulates=self.accumulates,
            least=self.least(case),
            start=self.options.start_bs,
        )

    def probe(self, cases: Sequence[Case]) -> list[Probed | None]:
        """Returns the memory of a step of each case as a line; None where no line could be had."""
        if not cases:
            return []
        found = self.processes.call(probe, self.config, self.facts, list(cases), accumulates=self.accumulates)
        return [None] * len(cases) if isinstance(found, Died) else found

    def entry(self, case: Case, probed: Probed | None) -> dict[str, Any] | None:
        """Returns the entry of a case, its `grad_acc` left out; None where it does not fit at its least size."""
        limit = self.limit_bytes - self._of_ranks(probed)
        found = self._measured(case, probed, limit) if self.device.is_cuda else self._by_line(case, probed, limit)
        if found is None:
            return None
        size = found.pop("size")
        shape: dict[str, Any] = {"batch_size": size}
        if isinstance(case, PackCase):
            shape = {"seq_len": size * PACK_UNIT, "max_patches": case.max_patches(size)}
        return {
            **shape,
            **found,
            "limit_bytes": self.limit_bytes,
            "world_size": self.world_size,
            "device": self.device.name,
            "model": self.facts.folder.name,
            "longest": dict(case.longest),
            "memory": self._breakdown(probed, size, found["peak_bytes"]),
            "made_by": self.made_by(case),
        }

    def with_grad_acc(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an entry with the micro-batches of an optimizer step; those of packs are `train.grad_acc`."""
        if "batch_size" not in entry:
            return dict(entry)
        target, batch = self.options.target_samples, entry["batch_size"]
        grad_acc = self.config.train.grad_acc if target is None else -(-target // (batch * self.world_size))
        rest = {name: value for name, value in entry.items() if name not in ("batch_size", "grad_acc", "world_size")}
        return {"batch_size": batch, "grad_acc": grad_acc, **rest, "world_size": self.world_size}

    def _of_ranks(self, probed: Probed | None) -> int:
        """Returns the bytes that ranks cost beside a trial, which is alone: DDP has a second copy of the gradients."""
        is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        return 0 if probed is None or self.world_size == 1 or is_sharded else probed.gradient_bytes

    def _measured(self, case: Case, probed: Probed | None, limit: int) -> dict[str, Any] | None:
        """Returns size, peak and time of the largest batch that fits, by trials on the device."""
        seen: dict[int, Measured] = {}

        def attempt(size: int) -> Outcome:
            found = self._trial(case, size, limit=limit, steps=self.options.steps)
            if found is None:
                return Outcome(fits=False)
            seen[size] = found
            return Outcome(fits=found.peak_bytes <= limit, peak_bytes=found.used_bytes)

        line = None if probed is None else probed.line
        start = self.options.start_bs or (DEFAULT_START if line is None else None)
        search = Search(Bounds(limit_bytes=limit, least=self.least(case), most=MAX_SIZE), line=line, start=start)
        size = search.run(attempt)
        if size is None:
            return None
        best = seen[size]
        return {
            "size": size,
            "peak_bytes": best.peak_bytes,
            "step_s": best.step_s,
            "trials": search.trials,
            "measured": True,
        }

    def _by_line(self, case: Case, probed: Probed | None, limit: int) -> dict[str, Any] | None:
        """Returns size and peak by the line, and what a small trial on the CPU took."""
        least = self.least(case)
        size = 0 if probed is None else probed.largest(limit, most=MAX_SIZE)
        if probed is None or size < least:
            return None
        found: dict[str, Any] = {"size": size, "peak_bytes": probed.at(size), "step_s": None}
        small = least if isinstance(case, PackCase) else min(least, _HOST_SIZE)
        if probed.at(small) > _HOST_SHARE * self.device.free_bytes:
            _logger.warning("%s: no trial on the CPU, whose free memory is too small for one", case.name)
            return {**found, "trials": 0, "measured": False}
        taken = self._trial(case, small, limit=limit, steps=min(self.options.steps, _HOST_STEPS))
        here = None if taken is None else {"size": small, "peak_bytes": taken.peak_bytes, "step_s": taken.step_s}
        return {**found, "trials": 1, "measured": False, "cpu": here}

    def _trial(self, case: Case, size: int, *, limit: int, steps: int) -> Measured | None:
        ask = partial(self.processes.call, trial, self.config, self.facts, case, size)
        found = ask(steps=steps, limit_bytes=limit, accumulates=self.accumulates)
        if isinstance(found, Died):
            _logger.info("%s: the trial of %s was %s", case.name, self.amount(case, size), found)
            return None
        return found

    def _breakdown(self, probed: Probed | None, size: int, peak_bytes: int) -> dict[str, int]:
        """Returns what the bytes at the peak are for; `ranks` are DDP's copies, `other` is the allocator's."""
        if probed is None:
            return {"other": peak_bytes}
        parts = {**probed.breakdown(size), "ranks": self._of_ranks(probed)}
        return {**parts, "other": max(peak_bytes - sum(probed.breakdown(size).values()), 0)}

    def amount(self, case: Case, size: int) -> str:
        """Returns a size for a message."""
        if isinstance(case, PackCase):
            return f"seq_len {size * PACK_UNIT}, max_patches {case.max_patches(size)}"
        return f"{size} samples" if size != 1 else "1 sample"

    def line(self, case: Case, entry: Mapping[str, Any]) -> str:
        """Returns one line for a terminal."""
        if isinstance(case, PackCase):
            what = f"seq_len {entry['seq_len']}, max_patches {entry['max_patches']}"
        else:
            what = f"{entry['batch_size']} samples a batch, grad_acc {entry['grad_acc']}"
        took = f", {entry['step_s']:.3g} s a step" if entry["step_s"] is not None else ""
        how = f"measured in {entry['trials']} trials" if entry["measured"] else "by its line"
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in entry["memory"].items() if size)
        cpu = entry.get("cpu")
        on_cpu = ""
        if cpu:
            small = self.amount(case, cpu["size"])
            on_cpu = f"; on the CPU {small} took {human_bytes(cpu['peak_bytes'])}, {cpu['step_s']:.3g} s a step"
        return f"{case.name}: {what}, {human_bytes(entry['peak_bytes'])} {how} ({parts}){took}{on_cpu}"


def _warn(found: Device, limit: int) -> None:
    if not found.is_cuda:
        _logger.warning(
            "no CUDA device here: sizes are those of a line through two probes, checked by a small trial on the CPU, "
            'and say "measured": false; calibrate on the device that is to train'
        )
    elif found.free_bytes < limit:
        _logger.warning(
            "%s of %s are free on %s, and the limit is %s: other processes use it, and trials will fail for them",
            human_bytes(found.free_bytes),
            human_bytes(found.total_bytes),
            found.name,
            human_bytes(limit),
        )
