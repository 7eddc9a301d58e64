"""Measures whether the loader keeps a GPU busy: `python -m benchmarks.gpu_feed [--tiny] [--json]`.

A step of Whisper's size (encoder and decoder of large-v3, random weights, bf16) trains on batches of 16 from the cache
of the bench corpus; the loader copies the batches to the device. The same step trains on the same batches without a
cache, made by torch's DataLoader with 2 and 8 workers. The rows show the share of the time that is spent waiting for
data, samples a second, and the share of the time in which the GPU worked on steps (CUDA events around each step).

A vision step has 27 layers of width 1152, as Qwen3-VL's tower has. It trains on the packs of workload B; patches go to
the device as uint8 and are expanded there. Copies to the device are timed against one large pinned copy. Without CUDA
all of it runs to its end on the CPU with small models, and the report names what could not be measured.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.data import BENCH_DATA, corpus
from benchmarks.peers import forebay_cache, workloads
from benchmarks.report import arguments, machine, median, show
from forebay.config import BucketConfig, Config
from forebay.plan.make import plan_of
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache
from forebay.train.collate.collator import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.loader import Loader, LoaderSettings
from forebay.train.ring import BufferRing
from forebay.train.uncached.uncached_source import UncachedSource

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], None]

BATCH_SIZE = 16
NUM_MELS = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large the models are, and for how many steps each feed is watched."""

    whisper: dict[str, int]
    vision_width: int
    vision_layers: int
    steps: int
    hours: float
    packs: int


LARGE = Size(
    whisper={"d_model": 1280, "layers": 32, "heads": 20, "ffn": 5120},
    vision_width=1152,
    vision_layers=27,
    steps=60,
    hours=2.0,
    packs=24,
)
SMALL = Size(
    whisper={"d_model": 16, "layers": 1, "heads": 2, "ffn": 32},
    vision_width=16,
    vision_layers=1,
    steps=4,
    hours=0.05,
    packs=2,
)


def whisper_step(size: Size, device: torch.device) -> Step:
    """Returns a training step of a Whisper of this size on log-mel batches."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, heads, ffn = (size.whisper[name] for name in ("layers", "heads", "ffn"))
    config = WhisperConfig(
        num_mel_bins=NUM_MELS,
        d_model=size.whisper["d_model"],
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
    )
    model = WhisperForConditionalGeneration(config).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(batch: Batch) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def vision_step(size: Size, device: torch.device) -> Step:
    """Returns a training step of a transformer over the patches of one pack, in windows of 256 patches."""
    width = size.vision_width
    layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
    encoder = torch.nn.TransformerEncoder(layer, size.vision_layers, enable_nested_tensor=False)
    embed = torch.nn.Linear(workloads.PATCH_BYTES, width)
    model = torch.nn.Sequential(embed, encoder).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(batch: Batch) -> None:
        patches = batch["patches"]
        whole = len(patches) // 256 * 256
        expanded = patches[:whole].reshape(-1, 256, patches.shape[1]).to(torch.bfloat16) / 127.5 - 1
        model(expanded).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def watch(batches: Iterable[Batch], step: Step, *, steps: int, device: torch.device) -> Row:
    """Returns what a number of steps took, and how much of it was waiting and (CUDA) work of the GPU."""
    is_cuda = device.type == "cuda"
    iterator = iter(batches)
    step(_moved(next(iterator), device))  # allocations, kernels, workers
    waits: list[float] = []
    spans: list[tuple[Any, Any]] = []
    samples = 0
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(iterator, None)
        waits.append(time.perf_counter() - asked)
        if batch is None:
            break
        batch = _moved(batch, device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
        for event in events[:1]:
            event.record()
        step(batch)
        for event in events[1:]:
            event.record()
            spans.append((events[0], event))
        samples += len(next(iter(batch.values())))
    _synchronize(device)
    wall_s = time.perf_counter() - began
    busy_s = sum(first.elapsed_time(last) for first, last in spans) / 1e3
    return {
        "samples or patches/s": samples / wall_s,
        "wait share": sum(waits) / wall_s,
        "GPU busy share": busy_s / wall_s if is_cuda else None,
        "steps": len(waits),
    }


def _moved(batch: Batch, device: torch.device) -> Batch:
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in moved.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speech_feeds(config: Config, size: Size, device: torch.device) -> list[Row]:
    """Returns a row for the cache and one for each number of workers without it."""
    step = whisper_step(size, device)
    build(config)
    found = find_cache(config, recipe_of(config)).found
    assert found is not None
    cache = open_cache(found.folder)
    planned = plan_of(config, cache, keep=False)
    loader = Loader(cache, planned, LoaderSettings(dtype=torch.bfloat16, device=device))
    rows = [
        {
            "step": "Whisper",
            "fed by": "cache, 2 threads",
            **watch(_again(loader), step, steps=size.steps, device=device),
        }
    ]
    for workers in (2, 8):
        source = UncachedSource(config)
        uncached = torch.utils.data.DataLoader(
            SampleDataset(source),
            batch_sampler=PlanSampler(planned, seed=0),
            collate_fn=Collator(source, dtype=torch.bfloat16),
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )
        found_row = watch(_again(uncached), step, steps=size.steps, device=device)
        rows.append({"step": "Whisper", "fed by": f"uncached, {workers} workers", **found_row})
    return rows


def vision_feed(size: Size, device: torch.device, folder: Path) -> Row:
    """Returns the row of packs of patches, which go to the device as uint8."""
    forebay_cache.write(folder, workloads.packs(size.packs))
    cache = forebay_cache.open_cache_of(folder)
    ring = BufferRing(max_free=4, pin_memory=device.type == "cuda")

    def packs() -> Iterator[Batch]:
        while True:
            for index in range(len(cache)):
                values = cache.read(index)["input_features"]
                patches = ring.take("patches", values.shape, dtype=torch.uint8)
                np.copyto(patches.numpy(), values)
                yield {"patches": patches}

    row = watch(packs(), vision_step(size, device), steps=size.steps, device=device)
    return {"step": "vision", "fed by": "cache, in the loop", **row}


def _again(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def copies(device: torch.device) -> list[Row]:
    """Returns GB/s to the device for copies of a batch's size, and the limit: one pinned copy of 1 GiB."""
    if device.type != "cuda":
        return []
    rows = []
    for name, size_bytes in (("batch of 16, 15 MiB", 15 << 20), ("limit, 1 GiB", 1 << 30)):
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        times = []
        for _ in range(12):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            host.to(device, non_blocking=True)
            last.record()
            torch.cuda.synchronize(device)
            times.append(first.elapsed_time(last) / 1e3)
        rows.append({"copy": name, "GB/s": size_bytes / 1e9 / median(times)})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    size = LARGE if has_cuda and not options.tiny else SMALL
    data = corpus(hours=size.hours, num_tars=2)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as name:
        config = dataclasses.replace(
            data.config(cache_root=Path(name) / "caches"), plan=BucketConfig(batch_size=BATCH_SIZE)
        )
        (Path(name) / "packs").mkdir()
        feeds = [*speech_feeds(config, size, device), vision_feed(size, device, Path(name) / "packs")]
    document: dict[str, Any] = {
        "machine": machine("torch", "transformers"),
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "feeds": feeds,
    }
    if has_cuda:
        document["copies to the device"] = copies(device)
    else:
        document["not measured"] = (
            "no CUDA device: GPU busy share, GB/s to the device, copies beside a step, "
            "models of full size (these are small)"
        )
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
