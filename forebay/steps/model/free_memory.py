"""Memory that a model needs, and that its device, or this machine, has left."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from forebay.steps.model.model_step import ModelStep

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weights_bytes(step: ModelStep) -> int:
    """Returns the size of a model's weights in the type that it works in, by the headers of its safetensors files."""
    return sum(_bytes_in(path, _SIZES[step.dtype]) for path in Path(step.folder).glob("*.safetensors"))


def _bytes_in(path: Path, float_bytes: int) -> int:
    size = 0
    with contextlib.suppress(OSError, ValueError, struct.error, LookupError, TypeError), path.open("rb") as file:
        # https://huggingface.co/docs/safetensors: the length of the header, uint64, then JSON.
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                is_float = "F" in tensor["dtype"]
                size += math.prod(tensor["shape"]) * float_bytes if is_float else stop - start
    return size


def free_bytes(device: str) -> int:
    """Returns the memory that a device has left; of the CPU, that of the machine and of this process's cgroups."""
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()  # what torch only keeps counts as free
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_field(_PROC / "meminfo", "MemAvailable"), *_left_in_cgroups()])


def begin_peak(device: str) -> int:
    """Makes the peak of this process what it takes now, and returns that; 0 where the kernel does not say."""
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()  # of a batch that did not fit
        return 0  # a device says by itself when it is full
    with contextlib.suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5")
        return _field(_PROC / "self/status", "VmRSS")
    return 0


def peak_since(device: str, begun: int) -> int:
    """Returns by how many bytes the memory of this process was larger at most than when its peak begun."""
    return max(0, _field(_PROC / "self/status", "VmHWM") - begun) if device == "cpu" and begun else 0


def _field(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 1 << 50)


def _left_in_cgroups() -> Iterator[int]:
    """Yields what the cgroups of this process, and those around them, leave; the page cache may go."""
    for line in (_PROC / "self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = _CGROUPS if number == "0" else _CGROUPS / "memory"
        files = (
            ("memory.max", "memory.current") if number == "0" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = top / name.lstrip("/")
        for each in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # `max`: no limit
                limit, used = (int((each / file).read_text()) for file in files)
                yield limit - used + _cached_in(each)


def _cached_in(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0
