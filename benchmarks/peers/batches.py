"""Batches of 32 from any reader, in orders that all readers share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.peers.interface import Array, Reader, Sample, Workload
from forebay.plan.make import Planned
from forebay.store.layout import Ints
from forebay.store.source import SampleSource
from forebay.train.loader import Loader, LoaderSettings

BATCH_SIZE = 32
OrderName = Literal["shuffled", "buckets", "by duration", "as written"]
Form = Literal["padded", "ragged"]
Batches = list[list[int]]


def batches_of(workload: Workload, order: OrderName) -> Batches:
    """Returns sample indices batch by batch.

    shuffled: one permutation of all. by duration: sorted by length. buckets: as sorted, the batches shuffled.
    """
    rng = np.random.default_rng(0)
    lengths = np.diff(workload.offsets)
    indices = np.arange(len(lengths))
    if order == "shuffled":
        indices = rng.permutation(len(lengths))
    elif order != "as written":
        indices = np.argsort(lengths, kind="stable")
    found: Batches = [indices[i : i + BATCH_SIZE].tolist() for i in range(0, len(indices), BATCH_SIZE)]
    if order == "buckets":
        rng.shuffle(found)
    return found


class ListedPlan:
    """A plan of given batches, for forebay's loader; every epoch is the same."""

    lockstep, tail, grad_accs = 1, "short", None

    def __init__(self, batches: Batches) -> None:
        self._batches = [np.array(batch) for batch in batches]
        self.num_batches = len(batches)

    def order(self, seed: int, epoch: int) -> ListedPlan:  # noqa: ARG002
        return self

    def __len__(self) -> int:
        return self.num_batches

    def batch(self, position: int) -> Ints:
        return self._batches[position]

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        return [self._batches[position] for position in positions]

    def bucket(self, position: int) -> int:  # noqa: ARG002
        return 0

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        return np.zeros(len(positions), np.int64)


def make_loader(source: SampleSource, batches: Batches, *, num_threads: int, form: Form = "padded") -> Loader:
    """Returns forebay's loader over given batches: float16 features, labels, masks; or ragged ones."""
    plan: Any = ListedPlan(batches)
    settings = LoaderSettings(dtype=torch.float16, num_threads=num_threads, form=form)
    return Loader(source, Planned(plan=plan, key="0"), settings)


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Returns `values` [B, longest, width] padded with 0, and `labels` int64 [B, longest] with -100."""
    lengths = [len(sample["values"]) for sample in samples]
    first = samples[0]["values"]
    values = np.zeros((len(samples), max(lengths), *first.shape[1:]), first.dtype)
    for row, sample, length in zip(values, samples, lengths, strict=True):
        row[:length] = sample["values"]
    return {"values": torch.from_numpy(values), "labels": _labels(samples)}


def _labels(samples: Sequence[Sample]) -> torch.Tensor:
    labels = np.full((len(samples), max(len(sample["ids"]) for sample in samples)), -100, np.int64)
    for row, sample in zip(labels, samples, strict=True):
        row[: len(sample["ids"])] = sample["ids"]
    return torch.from_numpy(labels)


class ReusedBuffers:
    """`collate` into two buffers in turn, as a user who knows what page faults cost would write it."""

    def __init__(self, workload: Workload) -> None:
        shape = (BATCH_SIZE * int(np.diff(workload.offsets).max()), workload.width)
        self._buffers = [np.zeros(shape, workload.values.dtype) for _ in range(2)]

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        lengths = [len(sample["values"]) for sample in samples]
        longest, buffer = max(lengths), self._buffers[0]
        self._buffers.reverse()
        values = buffer[: len(samples) * longest].reshape(len(samples), longest, -1)
        for row, sample, length in zip(values, samples, lengths, strict=True):
            row[:length] = sample["values"]
            row[length:] = 0
        return {"values": torch.from_numpy(values), "labels": _labels(samples)}


class RaggedBuffers:
    """Values and ids one behind the other in two buffers in turn, and where each sample begins: nothing is padded."""

    def __init__(self, workload: Workload) -> None:
        rows = BATCH_SIZE * int(np.diff(workload.offsets).max())
        ids = BATCH_SIZE * int(np.diff(workload.id_offsets).max())
        self._buffers = [
            (_aligned((rows, workload.width), workload.values.dtype), _aligned((ids,), workload.ids.dtype))
            for _ in range(2)
        ]

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        batch = {}
        for name, buffer in zip(("values", "ids"), self._buffers[0], strict=True):
            arrays = [sample[name] for sample in samples]
            offsets = np.cumsum([0, *map(len, arrays)])
            out = buffer[: offsets[-1]]
            np.concatenate(arrays, out=out)
            batch |= {name: torch.from_numpy(out), f"{name}_offsets": torch.from_numpy(offsets)}
        self._buffers.reverse()
        return batch


def walk(reader: Reader, batches: Batches, collate_fn: Callable[[Sequence[Sample]], Any]) -> None:
    """Reads every batch once and drops it."""
    for batch in batches:
        collate_fn([reader.read(index) for index in batch])


def copyto_loop(workload: Workload, batches: Batches, *, num_buffers: int, pad: bool) -> Callable[[], None]:
    """Returns the limit: a bare `np.copyto` of the same slices into reused memory; with `pad` also of the zeros."""
    shape = (BATCH_SIZE * int(np.diff(workload.offsets).max()), workload.width)
    buffers = [_aligned(shape, workload.values.dtype) for _ in range(num_buffers)]
    starts, stops = workload.offsets[:-1].tolist(), workload.offsets[1:].tolist()
    longest = [max(stops[i] - starts[i] for i in batch) for batch in batches]

    def work() -> None:
        for number, (batch, room) in enumerate(zip(batches, longest, strict=True)):
            out = buffers[number % num_buffers][: len(batch) * room].reshape(len(batch), room, -1)
            for row, index in enumerate(batch):
                values = workload.values[starts[index] : stops[index]]
                np.copyto(out[row, : len(values)], values)
                if pad:
                    out[row, len(values) :] = 0

    return work


def copyto_threads(workload: Workload, batches: Batches, *, count: int) -> Callable[[], None]:
    """Returns `copyto_loop` in so many threads, each with a buffer and a share of the batches of its own."""
    loops = [copyto_loop(workload, batches[part::count], num_buffers=1, pad=False) for part in range(count)]

    def work() -> None:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda loop: loop(), loops))

    return work


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns zeros that begin at a cache line, as torch's and forebay's memory do: the limit is to be the best."""
    found: Array = torch.zeros(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype).numpy()
    return found


class IndexedReader(torch.utils.data.Dataset[Any]):
    """A reader as a map-style dataset; opened in each worker."""

    def __init__(self, open_reader: Callable[[], Reader], length: int) -> None:
        self._open, self._length = open_reader, length

    @functools.cached_property
    def _reader(self) -> Reader:
        return self._open()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._reader.read(index)


def dataloader(dataset: IndexedReader, batches: Batches, *, num_workers: int) -> Any:
    """Returns torch's DataLoader over a reader."""
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
