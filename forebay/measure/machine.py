"""The use of a machine by an arm: CPU seconds and memory of its processes, its device, and the device's peak."""

from __future__ import annotations

import os
import platform
import re
import resource
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.train.loop.hardware import DeviceLoad

_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250.0, 80.0),
    ("GH200", 989.0, 67.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A6000", 154.8, 38.7),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)
"""By a part of a device's name, the first that fits: dense TFLOP/s of its data sheet, half precision and float32."""

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def peak_flops(device: str, *, precision: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name, None where it is in no table.

    precision: `train.mixed_precision`; "no" is float32 without TF32, as torch multiplies unless told otherwise.
    """
    for part, half, single in _PEAKS:
        if part in device:
            return 1e12 * (single if precision == "no" else half)
    return None


def device_name() -> str | None:
    """Returns the name of the CUDA device, None on the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """Returns what figures depend on: processor, cores, torch's threads, versions, the load when it began."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its children, those that ended and those that live."""
    own, ended = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    fields = (_told(pid, "stat").rpartition(")")[2].split() for pid in _descendants(os.getpid()))
    living = sum(int(ticks) for found in fields for ticks in found[11:13]) / _TICKS_A_SECOND
    return own.user + own.system + ended.ru_utime + ended.ru_stime + living


def host_bytes() -> int:
    """Returns the most memory that this process has had, and what its children have now, shared pages shared out."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = (line for pid in _descendants(os.getpid()) for line in _told(pid, "smaps_rollup").splitlines())
    return own + sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, _told(pid, f"task/{task.name}/children").split()):
            found += [child, *_descendants(child)]
    return found


def _told(pid: int, file: str) -> str:
    """Returns a file of a process, an empty text where it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


class Utilisation:
    """Asks the driver ten times a second how busy the device is while a block runs. Without CUDA: no samples.

    bucket: that of the step at hand, to be set by the arm; the host may be a little ahead of the device. samples:
    bucket and share of time in which the device computed, of each look.
    """

    def __init__(self) -> None:
        self.bucket = -1
        self.samples: list[tuple[int, float]] = []
        self._load = DeviceLoad(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Utilisation:
        if self._load.share() is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.1) and (share := self._load.share()) is not None:
            self.samples.append((self.bucket, share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that the config's model is trained on here. is_cuda: its memory is calibrated; a host's is not."""

    is_cuda: bool
    name: str
    total_bytes: int
    free_bytes: int
    """What other processes leave of it."""


def device() -> Device:
    """Returns the device that accelerate would take: the first of CUDA, else the CPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return Device(is_cuda=True, name=torch.cuda.get_device_name(0), total_bytes=total, free_bytes=free)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(is_cuda=False, name="CPU", total_bytes=pages, free_bytes=_field_bytes("meminfo", "MemAvailable"))


def release_memory() -> None:
    """Gives the device memory that no tensor holds back to other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return _field_bytes("self/status", "VmRSS")


def reset_peaks() -> None:
    """Makes the peaks what is taken now."""
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peaks() -> tuple[int, int]:
    """Returns the most bytes since this process began, or since `reset_peaks`: reserved, and held by tensors.

    On the CPU both are the resident memory of this process.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return (_field_bytes("self/status", "VmHWM"),) * 2


def _field_bytes(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc", file).read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
