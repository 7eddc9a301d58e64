"""A model before the first shard: whether its longest batch fits into memory, and what all of it will cost.

A trial is a task as a shard is, of chosen rows; it runs where shards are made, and nothing of it is kept. A batch that
does not fit is refused here with the one that does: it is never cut in two later, because that gives other values.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import BuildError
from forebay.preprocess.build_report import ModelCost
from forebay.preprocess.device_process import model_at_hand, on_device
from forebay.preprocess.group import Cut, Values, narrow
from forebay.preprocess.groups import Listing
from forebay.preprocess.model_group import ModelItems
from forebay.preprocess.shard_task import ShardTask, reading
from forebay.steps.model.free_memory import begin_peak, free_bytes, peak_since, weights_bytes
from forebay.steps.model.model_step import CPU, is_out_of_memory
from forebay.store.layout import Array, Constants, Group
from forebay.store.source_files import SourceFile
from forebay.task_map import WorkerDied
from forebay.visible import human_bytes

TRIED = 64
"""Samples that a dry run makes, and the largest batch that it tries."""
_TRIED_S = 30.0
"""Seconds after which no larger batch is tried."""
Trial = Literal["room", "cost", "batches"]
"""Whether one batch fits; the cost of some samples; the speed in batches of 1, 2, 4, ... of them."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The cost of some samples. stored_bytes: of what is kept of them. model_s: after the preparation of its input.

    batches: seconds of the model a sample, by the size of the batch, of those that fit.
    """

    samples: int
    stored_bytes: int
    prepare_s: float
    model_s: float
    batches: Mapping[int, float] = field(default_factory=dict)


def _longest(group: ModelItems, items: pa.Table, files: Sequence[SourceFile], count: int = 0) -> Array:
    """Returns the places of the items that are longest by what the listing knows, else the first ones.

    Of those whose shape is known they are of one shape, the largest: only such stand in a batch together.
    count: of how many; 0: of one batch.
    """
    count = count or group.step.batch_of(group.step.family())
    lengths = np.zeros(len(items))
    sides = np.array([*group.listed_lengths(items, files).values()])
    if len(sides) and len(items):
        areas = sides.prod(axis=0)
        lengths = areas * (sides == sides[:, [int(areas.argmax())]]).all(axis=0)
    elif "duration_s" in items.column_names:
        lengths = np.nan_to_num(items["duration_s"].to_numpy().astype(np.float64))
    elif "text" in items.column_names:
        lengths = np.array([len(text or "") for text in items["text"].to_pylist()])
    return np.sort(np.argsort(-lengths, kind="stable")[:count])


@dataclass(frozen=True, slots=True)
class TryModel:
    """Makes the rows of a trial, in a worker. sharers: processes that run models on this machine's CPU."""

    sharers: int
    trial: Trial

    def __call__(self, task: ShardTask) -> Tried:
        """Returns the cost. Raises BuildError where their batch does not fit into memory."""
        group = task.groups.item_group(task.group)
        assert isinstance(group, ModelItems)
        model, names = model_at_hand(group.step), task.rows["sample_id"].to_pylist()
        begun_s = time.perf_counter()
        with reading(task) as read:
            prepared = [*group.prepared(model, group.base.samples(task.rows, read(group)))]
        prepare_s = time.perf_counter() - begun_s
        good = [(place, values) for place, values in enumerate(prepared) if "failure" not in values]
        for place, values in good[:1]:  # opens the model, and brings its weights to memory: no part of the cost
            group._outputs(model, [values], [(place, names[place])])
        if self.trial == "room":
            self._require_room(group, [values for _, values in good])
        speeds = self._speeds(group, [values for _, values in good]) if self.trial == "batches" else {}
        begun_s = time.perf_counter()
        made = [*group._made(model, [*enumerate(prepared)], names)] if self.trial == "cost" else []
        return Tried(
            samples=len(made),
            stored_bytes=sum(_size(value) for values in made if "failure" not in values for value in values.values()),
            prepare_s=prepare_s,
            model_s=time.perf_counter() - begun_s,
            batches=speeds,
        )

    def _speeds(self, group: ModelItems, prepared: Sequence[Values]) -> dict[int, float]:
        """Returns the seconds a sample in batches of 1, 2, 4, ... of the longest samples, the better of two runs."""
        found: dict[int, float] = {}
        begun_s = time.perf_counter()
        for size in (1 << power for power in range(len(prepared).bit_length())):
            if time.perf_counter() - begun_s > _TRIED_S or self._overflow(group, prepared[:size]) is not None:
                break
            runs = []
            for _ in range(2):
                run_s = time.perf_counter()
                group._outputs(model_at_hand(group.step), prepared[:size], batch_size=size)
                runs.append((time.perf_counter() - run_s) / size)
            found[size] = min(runs)
        return found

    def _require_room(self, group: ModelItems, prepared: Sequence[Values]) -> None:
        if not prepared or (why := self._overflow(group, prepared)) is None:
            return
        size = len(prepared)
        halves = (1 << power for power in range(math.ceil(math.log2(size)) - 1, -1, -1))
        fits = next((n for n in halves if self._overflow(group, prepared[:n]) is None), 0)
        advice = f"{fits} fit: set batch = {fits} in its section" if fits else "not even one fits: another device"
        raise BuildError(
            f"model.{group.name}: a batch of the {size} longest samples does not fit into memory ({why}); {advice}; "
            "with fewer run.num_workers each process has more of the CPU's memory; nothing was made",
            code="FB312",
        )

    def _overflow(self, group: ModelItems, prepared: Sequence[Values]) -> str | None:
        """Returns why a batch does not fit, None where it does."""
        begun = on_device(begin_peak)
        try:
            group._outputs(model_at_hand(group.step), prepared, batch_size=len(prepared))
        except BuildError as err:
            if err.__cause__ is None or not is_out_of_memory(err.__cause__):
                raise
            return str(err.__cause__).strip().splitlines()[0]
        if not begun:
            return None
        peak, weights, free = on_device(peak_since, begun), weights_bytes(group.step), on_device(free_bytes)
        more = (self.sharers - 1) * weights + self.sharers * peak
        if more <= free:
            return None
        return (
            f"{self.sharers} processes need {human_bytes(more)} more, each {human_bytes(peak)} for a batch and "
            f"{human_bytes(weights)} for weights, and {human_bytes(free)} is free"
        )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else int(np.asarray(value).nbytes)


@dataclass(frozen=True, kw_only=True)
class ModelTrials:
    """The trials of a build. run: one trial after the other, in workers. missing: shards that are to be made."""

    config: Config
    listing: Listing
    constants: Constants
    missing: Sequence[Cut]
    devices: Sequence[str]
    run: Callable[[TryModel, Iterator[ShardTask]], Iterator[tuple[ShardTask, Tried]]]

    def require_room(self) -> None:
        """Raises BuildError for a model whose longest batch does not fit into memory, or whose arrays not on the disk.

        Those whose size the form says; of others a dry run tells.
        """
        fixed = [group for group in self._groups() if not group.grows]
        items = {group.name: self.listing.items[group.name].table.slice(0, 1) for group in fixed}
        require_disk(self.config, sum(group.estimate_bytes(items[group.name]) * self._rows(group) for group in fixed))
        self._tried(_longest, "room")

    def costs(self) -> tuple[ModelCost, ...]:
        """Returns what each model will cost here. Raises BuildError where the disk has no room for what it gives."""
        tried = self._tried(self._spread, "cost")
        longest = self._tried(functools.partial(_longest, count=TRIED), "batches")
        costs = tuple(self._cost(group, tried[group.name], longest[group.name]) for group in self._groups())
        require_disk(self.config, sum(cost.total_bytes for cost in costs))
        return costs

    def _groups(self) -> list[ModelItems]:
        names = {cut.group for cut in self.missing}
        return [group for group in self.listing.groups.items if isinstance(group, ModelItems) and group.name in names]

    def _tried(
        self, places: Callable[[ModelItems, pa.Table, Sequence[SourceFile]], Array], trial: Trial
    ) -> dict[Group, Tried]:
        tables = ((group, self.listing.items[group.name].table) for group in self._groups())
        tasks = (self._task(group, places(group, table, self.listing.files)) for group, table in tables)
        sharers = self.devices.count(CPU) if self.devices else min(self._workers, len(self.missing))
        found: dict[Group, Tried] = {}
        try:
            for task, tried in self.run(TryModel(sharers, trial), tasks):
                found[task.group] = tried
        except WorkerDied as err:
            raise BuildError(
                f"{err} while it tried model.{err.task.group}: most often memory was full; set a smaller batch in its "
                "section, or fewer run.num_workers; nothing was made",
                code="FB302",
            ) from err
        return found

    def _spread(self, group: ModelItems, items: pa.Table, files: Any) -> Array:  # noqa: ARG002
        """Returns places over all items; of what lies in a store the first ones, so that few files are downloaded."""
        count = min(TRIED, len(items))
        is_near = not self.listing.files.is_of_store.any()
        return np.linspace(0, len(items) - 1, count).astype(np.int64) if is_near else np.arange(count)

    def _task(self, group: ModelItems, places: Array) -> ShardTask:
        items = self.listing.items[group.name].table.take(pa.array(places))
        files, rows = narrow(group.task_rows(items, self.listing.files), self.listing.files)
        return ShardTask(
            group=group.name,
            key="",
            folder=self.config.cache_root,
            rows=rows,
            files=files,
            groups=self.listing.groups,
            max_open_tars=self.config.run.max_open_tars,
        )

    def _rows(self, group: ModelItems) -> int:
        return sum(cut.rows for cut in self.missing if cut.group == group.name)

    @property
    def _workers(self) -> int:
        return self.config.run.num_workers or os.cpu_count() or 1

    def _cost(self, group: ModelItems, tried: Tried, longest: Tried) -> ModelCost:
        count, size = max(1, tried.samples), tried.stored_bytes / max(1, tried.samples)
        of_model, before = tried.model_s / count, tried.prepare_s / count
        samples = self._rows(group)
        beside = max(of_model / len(self.devices), before / self._workers) if self.devices else 0.0
        a_sample_s = beside or (of_model + before) / self._workers
        return ModelCost(
            model=group.name,
            samples_tried=tried.samples,
            samples=samples,
            bytes_a_sample=size,
            total_bytes=round(size * samples),
            ms_a_sample=1000 * of_model,
            prepare_ms_a_sample=1000 * before,
            hours=a_sample_s * samples / 3600,
            break_even_bytes_s=size / of_model if of_model else 0.0,
            batch=group.step.batch_of(group.step.family()),
            ms_by_batch={size: 1000 * seconds for size, seconds in longest.batches.items()},
            device=self.constants.of(group.name)["made_with"]["device"],
        )


def require_disk(config: Config, size_bytes: int) -> None:
    """Raises BuildError where the disk of the cache root has no room for so many bytes."""
    there = next(folder for folder in (config.cache_root, *config.cache_root.parents) if folder.exists())
    if (free := shutil.disk_usage(there).free) < size_bytes:
        raise BuildError(
            f"what models give takes about {human_bytes(size_bytes)}, and {there} has {human_bytes(free)} free; "
            "keep fewer outputs, free some space (forebay cache prune), or name another disk: --cache-root DIR; "
            "nothing was made",
            code="FB307",
        )
