"""One trial: real optimizer steps on one batch, in a process of its own, and what they took."""

from __future__ import annotations

import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.config.tree import Config
from forebay.train.calibrate.case import Case
from forebay.train.calibrate.steps import Steps, opened
from forebay.train.models.table import ModelFacts

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
class Measured:
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
) -> Measured | None:
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
    return Measured(peak_bytes=peaks[0], used_bytes=peaks[1], step_s=round(step_s, 4))


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
