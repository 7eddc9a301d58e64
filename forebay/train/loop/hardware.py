"""The use of a machine by a run: cores of this process, and the device's utilisation and memory."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from forebay.extras import install_line

_logger = logging.getLogger(__name__)


class Hardware:
    """Looks at the machine from time to time; a look costs microseconds, and on a GPU asks its driver."""

    def __init__(self, device: torch.device) -> None:
        """Begins to count; logs, once, if the device's utilisation cannot be told for want of a package."""
        self._device = device if device.type == "cuda" else None
        self._load = DeviceLoad(device)
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def look(self) -> dict[str, Any]:
        """Returns what was taken since the last look, or since this object was made; the fields of `StepLog`.

        On a CPU `cpu_share` alone.
        """
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(wall_s - self._wall_s, 1e-9)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        if self._device is None:
            return {"cpu_share": share}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cpu_share": share,
            "device_utilization": self._load.share(),
            "device_memory_bytes": total - free,
            "device_total_bytes": total,
        }


class DeviceLoad:
    """How busy a device is, as its driver saw it last."""

    def __init__(self, device: torch.device) -> None:
        """Logs, once, if that cannot be told for want of a package."""
        self._device = device if device.type == "cuda" and _has_nvml() else None

    def share(self) -> float | None:
        """Returns the share of time in which the device computed; None where nobody tells."""
        if self._device is None:
            return None
        import pynvml

        try:
            return torch.cuda.utilization(self._device) / 100
        except pynvml.NVMLError as err:  # a part of a GPU (MIG) has none
            _logger.info("the device does not tell its utilisation: %s", err)
            self._device = None
            return None


def _has_nvml() -> bool:
    try:
        import pynvml  # noqa: F401
    except ImportError:
        if int(os.environ.get("RANK", "0")) == 0:
            _logger.info("log lines go without the device's utilisation; for it run: %s", install_line("gpu"))
        return False
    return True
