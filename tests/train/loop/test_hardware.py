"""Figures of the machine in a log line: cores of this process; of a GPU what torch and its driver say."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from forebay.train.device import Hardware
from forebay.train.loop.meter import StepLog


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_share_counts_all_threads_since_the_last_look() -> None:
    hardware = Hardware(torch.device("cpu"))
    began_s = time.perf_counter()
    thread = threading.Thread(target=busy, args=(0.05,))
    thread.start()
    busy(0.05)
    thread.join()
    share = hardware.look()["cpu_share"]
    assert share >= 0.09 / (time.perf_counter() - began_s)
    time.sleep(0.2)
    assert hardware.look()["cpu_share"] < share
    assert set(hardware.look()) == {"cpu_share"}


class NVMLError(Exception):
    """The error of nvidia-ml-py."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GB, 12 of them taken, that was busy 97 % of the time."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (68 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_tells_memory_and_utilisation() -> None:
    look = Hardware(torch.device("cuda:0")).look()
    assert look.pop("cpu_share") >= 0
    assert look == {
        "device_utilization": 0.97,
        "device_memory_bytes": 12 * 10**9,
        "device_total_bytes": 80 * 10**9,
    }
    line = StepLog(
        step=3, loss=1.0, learning_rate=1e-3, samples_per_s=9.0, data_wait_share=0.0, padding=0.1, cpu_share=1.5, **look
    )
    assert str(line).endswith("CPU 1.50 cores, device 97 %, 12 GB of 80 GB")


@pytest.mark.usefixtures("gpu")
def test_without_nvidia_ml_py_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware = Hardware(torch.device("cuda:0"))
    for _ in range(2):
        look = hardware.look()
        assert (look["device_utilization"], look["device_memory_bytes"]) == (None, 12 * 10**9)
    assert [record.getMessage() for record in caplog.records] == [
        "log lines go without the device's utilisation; for it run: pip install 'forebay[gpu]' "
        "(from a clone: pip install -e '.[gpu]')"
    ]


@pytest.mark.usefixtures("gpu")
def test_a_device_that_tells_no_utilisation_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")

    def utilization(device: object) -> int:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    hardware = Hardware(torch.device("cuda:0"))
    assert [hardware.look()["device_utilization"] for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "the device does not tell its utilisation: Not Supported"
    ]
