"""The loader: batches of one rank in the plan's order, filled ahead by threads into reused buffers."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch

from forebay.config.frozen_models import TokenPattern
from forebay.config.tree import DeviceFeaturesConfig
from forebay.errors import ConfigError
from forebay.plan.cursor import WEIGHTLESS, Cursor, CursorStep, FollowedEpochs, LoaderState, Resumable
from forebay.plan.in_order import InOrderPlan
from forebay.plan.make import Planned
from forebay.plan.remote_cost import check_remote, windows_of
from forebay.spans import COLLATE, DATA_WAIT, READ, span
from forebay.steps.batch import IGNORED
from forebay.steps.step import Batch, PaddingSide
from forebay.store.by_hand import source_facts, table_html
from forebay.store.layout import Ints
from forebay.store.remote.foresight import Foresight
from forebay.store.source import Sample, SampleSource, SourceUnion, parts_of
from forebay.train.augment.augmentation import Augmentation
from forebay.train.augment.draws import Drawing, EpochDraws, Variants, without_variants
from forebay.train.collate.collator import BatchColumns, BatchMaker, Collator, CropDraws
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.collate.patches import as_arrays, as_filler
from forebay.train.collate.ragged import RaggedCollator, check_ragged
from forebay.train.device import Ahead, is_host, side_stream
from forebay.train.prefetch import BufferRing, Prefetch, ReadAhead
from forebay.train.ranks import resolve_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """How a loader works; impossible values raise ConfigError (also ValueError)."""

    seed: int = 0
    """The seed of the order, and of crops."""
    epochs: int | None = None
    """Iterations from this epoch on are empty; None: no end."""
    dtype: torch.dtype = torch.float32
    """The dtype of floating-point fields."""
    padding_side: PaddingSide = "right"
    crop_s: float | None = None
    """Batches are of random crops of so many seconds, drawn by (seed, epoch, sample id); see `CropDraws`."""
    tokens: Mapping[str, TokenPattern] = field(default_factory=dict, hash=False)
    """Codes that stand in batches as tokens, by field."""
    form: Literal["padded", "ragged"] = "padded"
    """`ragged`: a batch is a `RaggedBatch`, what the cache holds of its samples, one behind the other."""
    mask_fillers: bool = False
    """Batches of weight 0 have all labels -100. A sum of token losses over ranks is then right by itself; a mean over
    the batch's own tokens is NaN. Batches without labels, or with several classes a sample, cannot be masked: where
    there are fillers, the first batch raises ConfigError."""
    as_tensordict: bool = False
    """Batches are TensorDicts."""
    output: Literal["torch", "numpy"] = "torch"
    """`numpy`: the fields of batches are arrays of the same memory, for loops of other frameworks."""
    with_ids: bool = False
    """What is handed out is a pair: the batch, and the ids of its samples in their order, a list of strings."""
    with_columns: tuple[str, ...] = ()
    """What is handed out is a pair: the batch, and these columns of its samples, lists in their order by name."""
    num_threads: int = 2
    """Threads that fill batches; 0: batches are filled in the caller's thread, when asked."""
    prefetch: int = 4
    """Batches filled ahead."""
    pin_memory: bool | None = None
    """Host memory is pinned; None: where CUDA is present."""
    device: torch.device | str | None = None
    """Where batches are handed out: copied to a CUDA device on a side stream; None or cpu: on the host."""
    device_prefetch: int = 1
    """Batches copied to the device ahead."""

    def __post_init__(self) -> None:
        for name, least in (("num_threads", 0), ("prefetch", 1), ("device_prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r} (wanted {least} or more)")
        if self.with_ids and self.with_columns:
            raise ConfigError('with_ids and with_columns are both given; name "sample_id" among with_columns')
        if self.output not in ("torch", "numpy"):
            raise ConfigError(f"output is {self.output!r}, wanted 'torch' or 'numpy'")
        if self.output == "numpy" and (self.as_tensordict or not is_host(self.device)):
            raise ConfigError('output is "numpy", which is arrays on the host: leave device and as_tensordict out')
        if self.output == "numpy" and self.dtype == torch.bfloat16:
            raise ConfigError('output is "numpy", which has no bfloat16; set loader.dtype = "float32" or "float16"')
        if self.pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory is true but torch sees no CUDA device; leave loader.pin_memory out")

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is pinned here."""
        return torch.cuda.is_available() if self.pin_memory is None else self.pin_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class FillTimes:
    """Seconds that all threads together took to fill the batches handed out."""

    read_s: float = 0.0
    read_cpu_s: float = 0.0
    """Of the reads, those of the CPU; the rest waited, for a disk or for a core."""
    collate_s: float = 0.0

    def __add__(self, other: FillTimes) -> FillTimes:
        return FillTimes(
            read_s=self.read_s + other.read_s,
            read_cpu_s=self.read_cpu_s + other.read_cpu_s,
            collate_s=self.collate_s + other.collate_s,
        )


class Loader(Resumable):
    """Iterable over this rank's batches of one epoch; the next iteration is the next epoch.

    A batch is a dict of CPU tensors with the model's argument names (see `Collator` and `PackCollator`), right for
    `model(**batch)`, pinned where CUDA is present; of packs with uint8 patches a `PatchBatch`, which is no mapping.
    With `with_ids` a pair is handed out: the batch, and the ids of its samples; with `with_columns` the batch, and what
    the row table says of its samples, see `BatchColumns`. A batch itself holds what models take.
    A batch is the user's for as long as any view of it lives: its memory is used again only when the last view is gone.
    Under a mixture with `per_source` each batch is of one source and has that source's own fields.
    Order and contents depend on (plan, seed, epoch, rank, world size) alone, never on threads. After an error or a
    `break` the next `for` begins the epoch where it had begun; to go on at the next batch instead:
    `loader.load_state_dict(loader.state_dict())`.
    """

    def __init__(
        self,
        source: SampleSource,
        planned: Planned,
        settings: LoaderSettings,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        collator: BatchMaker | None = None,
        finish: Callable[[Any], Batch] | None = None,
        augment: Callable[[SampleSource], Augmentation] | None = None,
        features: DeviceFeaturesConfig | None = None,
        varies: bool = False,
    ) -> None:
        """Starts nothing yet: threads live from `iter` to the end of the iterator.

        dp_rank, dp_world_size: left out, those of `resolve_ranks`. Every rank does as many steps; see
        `forebay.plan.cursor` for the epoch's end. collator: what makes the batches, for example of packs; None: a
        `Collator` of the settings.
        finish: what makes the batch handed out of the one that was copied to the device.
        augment: what is changed of the samples of a source, in every epoch in another way.
        features: what is made of waveforms below the cut.
        varies: whether one of the variants of each sample is handed out; else samples as they are.
        Raises ConfigError (also ValueError) for impossible values, PlanError where no rank has a step.
        """
        if dp_rank is None or dp_world_size is None:
            dp_rank, dp_world_size = resolve_ranks(dp_rank, dp_world_size)
        self.source, self.plan, self.plan_key, self.settings = source, planned.plan, planned.key, settings
        self.cursor = Cursor(
            planned.plan, planned.key, seed=settings.seed, rank=dp_rank, world=dp_world_size, locality=planned.locality
        )
        self.batch_sampler = FollowedEpochs(self.cursor, is_in_order=isinstance(planned.plan, InOrderPlan))
        check_remote(source, self.cursor, threads=settings.num_threads)
        check_ragged(
            settings.form,
            is_packed=collator is not None,
            crop_s=settings.crop_s,
            as_tensordict=settings.as_tensordict,
        )
        self._side_stream, self._finish = side_stream(settings.device), finish
        # One a source: a micro-batch is of one of them, or they are all alike.
        variants = (Variants.all_of(part.constants, part.fields.values()) for part in parts_of(source))
        self._variants = [found if varies else () for found in variants]
        self._changes_batches = augment is not None
        self._is_drawn = augment is not None or any(self._variants)
        self._collators = [collator or self._collator(part, augment, features) for part in parts_of(source)]
        # Filled ahead, being filled, in the user's hands (one, and the one before it).
        num_buffers = settings.prefetch + settings.num_threads + 2
        self._ring = BufferRing(max_free=num_buffers, pin_memory=settings.is_pinned)
        self._read_ahead = ReadAhead(source)
        self._totals = _Totals()
        self._columns = BatchColumns(source, settings.with_columns) if settings.with_columns else None
        self._weight = 1
        self._indices: list[int] = []

    def _collator(
        self,
        part: SampleSource,
        augment: Callable[[SampleSource], Augmentation] | None,
        features: DeviceFeaturesConfig | None,
    ) -> BatchMaker:
        settings = self.settings
        if settings.form == "ragged":
            return RaggedCollator(without_variants(list(part.fields.values()), part.constants))
        return Collator(
            part,
            dtype=settings.dtype,
            padding_side=settings.padding_side,
            crop_s=settings.crop_s,
            tokens=settings.tokens,
            on_device=self._side_stream is not None,
            augmentation=augment(part) if augment is not None else None,
            features=DeviceFeatures.wanted(features, part),
        )

    def __repr__(self) -> str:
        return f"Loader({self._said()}, of {self.source!r})"

    def _repr_html_(self) -> str:
        return table_html("Loader", [("loader", self._said()), *source_facts(self.source)])

    def _said(self) -> str:
        """The samples that are handed out, and their place."""
        state = self.cursor.state
        rank = f", rank {self.dp_rank} of {self.dp_world_size}" if self.dp_world_size > 1 else ""
        return f"{self.plan.described()}{rank}, seed {state.seed}, epoch {state.epoch}, position {state.position}"

    @property
    def dp_rank(self) -> int:
        """Which of the ranks this is."""
        return self.cursor.rank

    @property
    def dp_world_size(self) -> int:
        """How many ranks share the epochs."""
        return self.cursor.world

    @property
    def dataset(self) -> NoReturn:
        """Raises AttributeError: transformers' Trainer would read again what it had read before a checkpoint."""
        raise AttributeError(
            "a forebay Loader has no dataset to be read again: to resume under transformers' Trainer, mix "
            "forebay.train.integrations.hf.LoaderMixin into it (examples/hf_trainer.py); elsewhere use load_state_dict"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Returns this rank's batches from where the loader stands to the end of that epoch. Starts the threads."""
        settings, steps = self.settings, self.cursor.walk()
        start = self.cursor.state
        left = self.cursor.steps_left(start)
        if settings.epochs is not None and start.epoch >= settings.epochs:
            left = 0
        draws = None if settings.crop_s is None else CropDraws(seed=start.seed, epoch=start.epoch)
        changes = EpochDraws(start.seed, start.epoch) if self._is_drawn else None
        # All shards of a block of a moving window are touched in its first steps.
        windows = windows_of(self.plan)
        depth = 0 if windows is None else windows.held(blocks=1)
        foresight = Foresight.of(self.source, self._ahead, depth=depth) if left else None
        filled = Prefetch(
            self._fill,
            self._work(itertools.islice(steps, left), draws, changes, foresight),
            num_threads=settings.num_threads if left else 0,
            prefetch=settings.prefetch,
        )
        return self._deliver(filled, foresight, num_steps=left)

    @property
    def weight(self) -> int:
        """The weight of the batch handed out last: 1, or 0 if it only fills the epoch's last step.

        Zeros come on several ranks, where the last step would leave some without a sample: under `plan.tail = "split"`
        where fewer samples are left than ranks, under "short" where fewer batches are. `weight_of(batch)` is the same.
        """
        return self._weight

    @property
    def indices(self) -> list[int]:
        """The samples of the batch handed out last, in their order, by their index in `source`; empty before it.

        Where one stood in for a bad one it is that one.
        """
        return self._indices

    @property
    def epoch(self) -> int:
        """Epoch of the batch that comes next."""
        return self.cursor.state.epoch

    @property
    def state(self) -> LoaderState:
        """Where the next batch is; `state_dict` says it in JSON values."""
        return self.cursor.state

    @property
    def grad_acc(self) -> int | None:
        """Micro-batches a rank that the plan wants in the optimizer step that comes next; None: the plan says nothing.

        That of the bucket of the next micro-batch of all ranks together: the same on every rank.
        """
        if self.plan.grad_accs is None:
            return None
        place = self.cursor.state
        return self.plan.grad_accs[self.plan.order(place.seed, place.epoch).bucket(place.position)]

    @property
    def fill_times(self) -> FillTimes:
        """The times of filling the batches that this object has handed out."""
        return self._totals.times

    def report(self) -> dict[str, Any]:
        """Returns totals of the batches handed out by this object, and the epoch of the next one.

        `samples` (fillers of weight 0 left out), `batches` and `steps` (equal: one batch a step), `frames` and
        `padded_frames` (stored frames, and frames of padding beside them), `padding` (padded share of all), `wait_s`
        (seconds in which the caller waited for a batch).
        """
        totals = self._totals
        return {
            "samples": totals.samples,
            "batches": totals.batches,
            "steps": totals.batches,
            "epoch": self.epoch,
            "frames": totals.frames,
            "padded_frames": totals.room - totals.frames,
            "padding": 1 - totals.frames / totals.room if totals.room else 0.0,
            "wait_s": totals.wait_s,
        }

    def _work(
        self,
        steps: Iterator[CursorStep],
        draws: CropDraws | None,
        changes: EpochDraws | None,
        foresight: Foresight | None,
    ) -> Iterator[_Work]:
        """Yields what to fill, step by step."""
        for number, step in enumerate(steps):
            work = _Work(number, step, step.samples.tolist(), draws, changes, foresight)
            self._read_ahead.announce(work.indices)
            yield work

    def _ahead(self) -> Iterator[Ints]:
        """Returns the samples of the steps from the head of the walk on, through all epochs that there are."""
        epochs, steps = self.settings.epochs, self.cursor.ahead()
        if epochs is not None:
            steps = itertools.takewhile(lambda step: step.place.epoch < epochs, steps)
        return (step.samples for step in steps)

    def _fill(self, work: _Work) -> _Filled:
        """Returns the batch of one step; runs in a thread."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        samples: Sequence[Sample] | None = None
        try:
            with self._read_ahead.watch():
                with span(READ):
                    samples, read = self._read(work)
                    beside = self._beside(read)  # while the shards are here: to ask later can be a download
                read_s, read_cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
                part = self.source.part(work.indices[0]) if isinstance(self.source, SourceUnion) else 0
                collator = self._collators[part]
                with span(COLLATE):
                    drawing = Drawing([*map(self.source.sample_id, read)], work.changes) if work.changes else None
                    if drawing is not None:
                        for variants in self._variants[part]:
                            samples = variants.chosen(samples, drawing)
                    more = {"drawing": drawing} if drawing and self._changes_batches else {}
                    batch = collator.collate(samples, allocate=self._ring.take, **more)
                collate_s = time.perf_counter() - began_s - read_s
        except Exception as err:
            place = f"micro-batch {work.step.turn.position} of epoch {work.step.place.epoch}"
            which = "" if samples is None else f": samples {work.indices} of cache {self.source.key[:16]}"
            err.add_note(f"while filling {place}{which}")
            raise
        if self.settings.mask_fillers and self.plan.tail in WEIGHTLESS and self.dp_world_size > 1:
            _check_maskable(batch)
            if not work.step.turn.weight:
                batch["labels"].fill_(IGNORED)
        frames, room = collator.count_frames(samples)
        if work.foresight is not None:
            work.foresight.done(work.number)
        times = FillTimes(read_s=read_s, read_cpu_s=read_cpu_s, collate_s=collate_s)
        return _Filled(batch, work.step, read, beside, part=part, frames=frames, room=room, times=times)

    def _read(self, work: _Work) -> tuple[Sequence[Sample], list[int]]:
        """Returns the samples of a batch, together where that can be, and the index of each."""
        draws, together = work.draws, None if work.draws else self.source.read_batch(work.indices)
        if together is not None:
            return together, work.indices
        samples, read = [], []
        for index in work.indices:
            try:
                sample, own = self.source.read_one(index)
                samples.append(draws.beside(sample, self.source.sample_id(own)) if draws else sample)
            except Exception as err:
                err.add_note(f"sample {index} of cache {self.source.key[:16]}")
                raise
            read.append(own)
        return samples, read

    def _beside(self, read: list[int]) -> Any:
        """Returns what is handed out beside a batch of these samples; None where that is the batch alone."""
        if self._columns is not None:
            return self._columns.of(read)
        return [self.source.sample_id(index) for index in read] if self.settings.with_ids else None

    def _deliver(
        self, filled: Prefetch[_Work, _Filled], foresight: Foresight | None, *, num_steps: int
    ) -> Iterator[Batch]:
        items = filled if self._side_stream is None else self._on_device(filled, self._side_stream.start)
        try:
            for _ in range(num_steps):
                # Nothing here may keep a name on the batch: its buffers are free when the user drops it.
                yield self._take(items)
        finally:
            filled.close()
            if foresight is not None:
                foresight.close()

    def _on_device(self, filled: Iterator[_Filled], start: Callable[..., Callable[[], Any]]) -> Iterator[_Filled]:
        def started(item: _Filled) -> Callable[[], _Filled]:
            finish = self._finish or getattr(self._collators[item.part], "finish", None)
            # No name on the host's memory.
            ready, counts = start(item.batch, finish), dataclasses.replace(item, batch={})
            return lambda: dataclasses.replace(counts, batch=ready())

        return Ahead(filled, started, depth=self.settings.device_prefetch)

    def _take(self, filled: Iterator[_Filled]) -> Any:
        began = time.perf_counter()
        with span(DATA_WAIT):
            item = next(filled)
        self._totals.add(item, wait_s=time.perf_counter() - began)
        self._weight, self._indices = item.step.turn.weight, item.indices
        self.cursor.hand_out(item.step)
        if self.settings.as_tensordict:
            from tensordict import TensorDict

            has_rows = all(getattr(collator, "has_rows", True) for collator in self._collators)
            batch = TensorDict(item.batch, batch_size=[len(item.indices)] if has_rows else [])
        else:
            batch = item.batch if self.settings.output == "torch" else as_arrays(item.batch)
            batch = batch if self._weight else as_filler(batch)
        return batch if item.beside is None else (batch, item.beside)


def _check_maskable(batch: Any) -> None:
    """Raises ConfigError for a batch whose labels have no value that a loss passes over."""
    if "labels" not in batch:
        found = "the batches have no labels"
    elif batch["labels"].is_floating_point():
        found = f"labels are {str(batch['labels'].dtype).removeprefix('torch.')}, several classes a sample"
    else:
        return
    raise ConfigError(
        f"mask_fillers is true, and {found}: no value of theirs would be passed over by the loss; leave mask_fillers "
        'out and multiply each loss by loader.weight, or set plan.tail = "drop" or "pad"'
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """One batch to fill. number: of the step in its iteration. foresight: what hears that the batch is filled."""

    number: int
    step: CursorStep
    indices: list[int]
    draws: CropDraws | None
    changes: EpochDraws | None
    foresight: Foresight | None


@dataclass(frozen=True, slots=True)
class _Filled:
    """One batch and what it counts for.

    indices: of what was read. beside: what is handed out beside the batch. part: the source that it is of.
    """

    batch: Any
    step: CursorStep
    indices: list[int]
    beside: Any
    part: int
    frames: int
    room: int
    times: FillTimes


@dataclass(slots=True)
class _Totals:
    """Sums over the batches handed out."""

    samples: int = 0
    batches: int = 0
    frames: int = 0
    room: int = 0
    wait_s: float = 0.0
    times: FillTimes = dataclasses.field(default_factory=FillTimes)

    def add(self, item: _Filled, *, wait_s: float) -> None:
        """Counts a batch as handed out."""
        self.samples += len(item.indices) * item.step.turn.weight
        self.batches += 1
        self.frames += item.frames
        self.room += item.room
        self.wait_s += wait_s
        self.times += item.times
