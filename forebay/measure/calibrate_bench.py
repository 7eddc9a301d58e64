"""The bench of a calibration: its device, its limit, and how the entry of one bucket, or of packs, is found there.

`calibrated_bs.json`: an entry a bucket, written after each, and which entries still hold.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.measure.batch_search import Case, Search, TrialOutcome
from forebay.measure.child_process import Died, Isolated
from forebay.measure.fake_tensors import ProbedStep, probe
from forebay.measure.machine import Device, device, resident_bytes
from forebay.measure.step_runner import StepRunner, opened
from forebay.store.files import hash_file, write_bytes
from forebay.store.key import digest
from forebay.train.models.families import ModelFacts
from forebay.visible import human_bytes

FILE_NAME = "calibrated_bs.json"
_VERSION = 1
"""Raised when the same facts give another entry: entries of before are made again."""
_OF_MEMORY = ("lora", "freeze", "embed_lr_mult", "gradient_checkpointing", "compile", "mixed_precision", "text_encoder")
"""Settings of [train] that memory depends on."""


@dataclass(slots=True)
class Entries:
    """The entries of a file; every change is on disk at once, whole."""

    path: Path
    entries: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> Entries:
        """Returns those of a file, none where it is not there. Raises ConfigError where it is no such file."""
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            found = {}
        except OSError as err:
            raise ConfigError(f"--out: cannot read {path}: {err.strerror}") from err
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"--out: {path} is there and is not JSON: {err}; name another file") from err
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise ConfigError(f"--out: {path} is there and is no calibration; name another file")
        return cls(path, found)

    def kept(self, name: str, made_by: str | None) -> dict[str, Any] | None:
        """Returns the entry of a name where the same facts made it."""
        entry: dict[str, Any] | None = self.entries.get(name)
        return entry if entry is not None and made_by is not None and entry.get("made_by") == made_by else None

    def foreign(self, names: Mapping[str, str]) -> list[str]:
        """Returns which of these names have an entry that other facts made. names: what each would be made by now."""
        return [name for name, made in names.items() if name in self.entries and self.kept(name, made) is None]

    def put(self, name: str, entry: Mapping[str, Any], *, order: list[str]) -> None:
        """Makes an entry the one of a name, on disk too. order: of all names; the file has others behind them."""
        entries = {**self.entries, name: dict(entry)}
        known = [each for each in order if each in entries]
        self.entries = {each: entries[each] for each in (*known, *(e for e in entries if e not in known))}
        self._write()

    def drop(self, name: str) -> None:
        """Takes the entry of a name out, on disk too."""
        if self.entries.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        write_bytes(self.path, (json.dumps(self.entries, indent=1) + "\n").encode())


_logger = logging.getLogger(__name__)
_DEVICE_SHARE = 0.91
"""Share of the device that a batch may take where no limit is given; the rest is the driver's, and for fragments."""
_DEFAULT_START = 128
"""First batch that is tried where nothing says how much a batch takes."""
_MAX_SIZE = 4096
"""Samples of a batch, or units of a pack, at most."""
_HOST_SIZE = 4
"""Samples of the trial on the CPU at most: it shows that the steps work, and what they take here."""
_HOST_STEPS = 2
"""Steps of the trial on the CPU: the second has the optimizer's state, and so the peak."""
_HOST_SHARE = 0.5
"""Share of the host's free memory that a trial there may take, by its line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """The request of `forebay calibrate`."""

    buckets: tuple[str, ...] = ()
    """Names or indices of buckets; empty: all."""
    start_bs: int | None = None
    """Batch of the first trial. None: that of the line; without a line `_DEFAULT_START`."""
    min_bs: int = 8
    max_memory_gb: float | None = None
    """GB of 10^9 bytes. None: `_DEVICE_SHARE` of the device."""
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


class CalibrationBench:
    """Where trials are made: a config, its device, what a batch may take there, and processes of their own."""

    def __init__(self, config: Config, facts: ModelFacts, options: CalibrateOptions, processes: Isolated) -> None:
        """Looks at this machine. Raises ConfigError where nothing says what the limit is."""
        self.config, self.options = config, options
        self._facts, self._processes = facts, processes
        found = processes.call(device)
        if isinstance(found, Died):
            raise ForebayError(f"the look at the device was {found}")
        if options.max_memory_gb is None and not found.is_cuda:
            raise ConfigError(
                "there is no CUDA device here whose memory could be the limit; give the memory of the device that is "
                "to train, in GB of 10^9 bytes: --max-memory-gb G"
            )
        given = options.max_memory_gb
        self.limit_bytes = int(_DEVICE_SHARE * found.total_bytes) if given is None else round(given * 1e9)
        self.device, self.world_size = found, int(os.environ.get("WORLD_SIZE", "1"))
        self._accumulates = options.target_samples is not None or config.train.grad_acc > 1
        """Whether an optimizer step may take several micro-batches, so that gradients lie beside activations."""
        _warn(found, self.limit_bytes)

    def least(self, case: Case) -> int:
        """Returns the smallest size that counts: `--min-bs` samples, or the units of the longest sample of packs."""
        return case.least(self.options.min_bs)

    def made_by(self, case: Case) -> str:
        """Returns the digest of all that the entry of a case depends on; its first 16 hex digits."""
        config, train = self.config, dataclasses.asdict(self.config.train)
        document = {
            "version": _VERSION,
            "model": hash_file(self._facts.folder / "config.json"),
            "train": json.loads(json.dumps({name: train[name] for name in _OF_MEMORY})),
            "has_norm": config.train.max_grad_norm > 0,
            "dtype": [config.loader.dtype, config.loader.varlen],
            "longest": [case.name, case.longest],
            "torch": [torch.__version__, transformers.__version__],
            "device": self.device.name,
            "limit_bytes": self.limit_bytes,
            "is_shared": self.world_size > 1,
            "accumulates": self._accumulates,
            "least": self.least(case),
            "start": self.options.start_bs,
        }
        return digest(document)[:16]

    def probe(self, cases: Sequence[Case]) -> list[ProbedStep | None]:
        """Returns the memory of a step of each case as a line; None where no line could be had."""
        if not cases:
            return []
        found = self._processes.call(probe, self.config, self._facts, list(cases), accumulates=self._accumulates)
        if isinstance(found, Died):
            _logger.warning("the process that computes the memory of a step was %s: trials begin without it", found)
            return [None] * len(cases)
        return found

    def entry(self, case: Case, probed: ProbedStep | None) -> dict[str, Any] | None:
        """Returns the entry of a case, its `grad_acc` left out; None where it does not fit at its least size."""
        limit = self.limit_bytes - self._of_ranks(probed)
        found = self._measured(case, probed, limit) if self.device.is_cuda else self._by_line(case, probed, limit)
        if found is None:
            return None
        size, memory = found.pop("size"), {}
        if probed is not None:
            memory = {**probed.breakdown(size), "ranks": self._of_ranks(probed)}  # `ranks` are DDP's copies
        other = max(found["peak_bytes"] - sum(memory.values()) + memory.get("ranks", 0), 0)  # the allocator's
        return {
            **case.entry(size),
            **found,
            "limit_bytes": self.limit_bytes,
            "world_size": self.world_size,
            "device": self.device.name,
            "model": self._facts.folder.name,
            "longest": case.longest,
            "memory": {**memory, "other": other},
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

    def _of_ranks(self, probed: ProbedStep | None) -> int:
        """Returns the bytes that ranks cost beside a trial, which is alone: DDP has a second copy of the gradients."""
        is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        return 0 if probed is None or self.world_size == 1 or is_sharded else probed.gradient_bytes

    def _measured(self, case: Case, probed: ProbedStep | None, limit: int) -> dict[str, Any] | None:
        """Returns size, peak and time of the largest batch that fits, by trials on the device."""
        seen: dict[int, MeasuredStep] = {}

        def attempt(size: int) -> TrialOutcome:
            found = self._trial(case, size, limit=limit, steps=self.options.steps)
            if found is None:
                return TrialOutcome(fits=False)
            seen[size] = found
            return TrialOutcome(fits=found.peak_bytes <= limit, peak_bytes=found.used_bytes)

        line = None if probed is None else probed.line
        start = self.options.start_bs or (_DEFAULT_START if line is None else None)
        search = Search(limit_bytes=limit, least=self.least(case), most=_MAX_SIZE, line=line, start=start)
        size = search.run(attempt)
        if size is None:
            return None
        best = seen[size]
        taken = {"peak_bytes": best.peak_bytes, "step_s": best.step_s}
        return {"size": size, **taken, "trials": search.trials, "measured": True}

    def _by_line(self, case: Case, probed: ProbedStep | None, limit: int) -> dict[str, Any] | None:
        """Returns size and peak by the line, and what a small trial on the CPU took."""
        least = self.least(case)
        size = 0 if probed is None else probed.largest(limit, most=_MAX_SIZE)
        if probed is None or size < least:
            return None
        found: dict[str, Any] = {"size": size, "peak_bytes": probed.at(size), "step_s": None}
        small = case.least(min(least, _HOST_SIZE))
        if probed.at(small) > _HOST_SHARE * self.device.free_bytes:
            _logger.warning("%s: no trial on the CPU, whose free memory is too small for one", case.name)
            return {**found, "trials": 0, "measured": False}
        taken = self._trial(case, small, limit=limit, steps=min(self.options.steps, _HOST_STEPS))
        here = None if taken is None else {"size": small, "peak_bytes": taken.peak_bytes, "step_s": taken.step_s}
        return {**found, "trials": 1, "measured": False, "cpu": here}

    def _trial(self, case: Case, size: int, *, limit: int, steps: int) -> MeasuredStep | None:
        named = {"steps": steps, "limit_bytes": limit, "accumulates": self._accumulates}
        found = self._processes.call(trial, self.config, self._facts, case, size, **named)
        if isinstance(found, Died):
            _logger.info("%s: the trial of %s was %s", case.name, case.amount(size), found)
            return None
        return found

    def line(self, case: Case, entry: Mapping[str, Any]) -> str:
        """Returns one line for a terminal."""
        took = f", {entry['step_s']:.3g} s a step" if entry["step_s"] is not None else ""
        how = f"measured in {entry['trials']} trials" if entry["measured"] else "by its line"
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in entry["memory"].items() if size)
        on_cpu = ""
        if cpu := entry.get("cpu"):
            small = case.amount(cpu["size"])
            on_cpu = f"; on the CPU {small} took {human_bytes(cpu['peak_bytes'])}, {cpu['step_s']:.3g} s a step"
        return f"{case.name}: {case.told(entry)}, {human_bytes(entry['peak_bytes'])} {how} ({parts}){took}{on_cpu}"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """The costs of the steps of a trial.

    On CUDA `peak_bytes` is what the allocator has reserved at most, `used_bytes` what tensors had of it at most. On the
    CPU both are the peak of the process's resident memory, less what it had before batch and model were made.
    """

    peak_bytes: int
    used_bytes: int
    step_s: float
    """Median of the steps behind the first."""


def trial(
    config: Config, facts: ModelFacts, case: Case, size: int, *, steps: int, limit_bytes: int, accumulates: bool
) -> MeasuredStep | None:
    """Returns what `steps` optimizer steps on a batch of the case took; None where memory did not suffice.

    limit_bytes: on CUDA, the allocator gives no more than this. accumulates: see `StepRunner`.
    Call it in a process of its own: a process that ran out of memory is of no use for another trial.
    """
    source, with_cuda = opened(config), torch.cuda.is_available()
    if with_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), 0)
    before = 0 if with_cuda else resident_bytes()
    try:
        batch = case.batch(config, source, size)
        reserved, used, step_s = StepRunner(config, facts, source, accumulates=accumulates).measured(batch, steps)
    except (RuntimeError, MemoryError) as err:
        if is_out_of_memory(err):
            return None
        raise
    return MeasuredStep(peak_bytes=reserved - before, used_bytes=used - before, step_s=step_s)


def is_out_of_memory(err: Exception) -> bool:
    """Returns whether an error says that an allocation failed, on a device or on the host."""
    # What a RuntimeError of torch, cuBLAS or cuDNN says there.
    said = r"out of memory|not enough memory|can't allocate memory|_ALLOC_FAILED"
    return isinstance(err, (torch.OutOfMemoryError, MemoryError)) or re.search(said, str(err)) is not None
