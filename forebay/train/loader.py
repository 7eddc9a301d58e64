"""The loader: batches of one rank in the plan's order, filled ahead by threads into reused buffers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from forebay.errors import ConfigError, PlanError
from forebay.plan import Plan, Turn, check_ranks, next_position, num_steps, turn
from forebay.plan.cursor import LoaderState
from forebay.steps.batch import IGNORED
from forebay.store.source import SampleSource, SourceUnion, parts_of
from forebay.train.collate import Batch, BatchMaker, Collator, PaddingSide
from forebay.train.collate.crop import CropDraws
from forebay.train.device import Ahead, side_stream
from forebay.train.prefetch import Prefetch
from forebay.train.ranks import resolve_ranks
from forebay.train.read_ahead import ReadAhead
from forebay.train.ring import BufferRing

_ORDER_CHUNK = 64
"""Steps whose sample indices are computed at once: a fraction of the cost of one by one."""


class Loader:
    """Iterable over this rank's batches of one epoch; the next iteration is the next epoch.

    A batch is a dict of CPU tensors with the model's argument names (see `Collator` and `PackCollator`), right for
    `model(**batch)`, pinned where CUDA is present; of packs with uint8 patches a `PatchBatch`, which is no mapping.
    It is the user's for as long as any view of it lives: its memory is used again only when the last one is gone.
    Under a mixture with `per_source` each batch is of one source and has that source's own fields.
    Order and contents depend on (plan, seed, epoch, rank, world size) alone, never on threads. An epoch left before its end
    begins again, where it had begun, at the next iteration; to go on instead: `loader.load_state_dict(loader.state_dict())`.
    """

    def __init__(
        self,
        source: SampleSource,
        plan: Plan,
        *,
        plan_key: str,
        seed: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        padding_side: PaddingSide = "right",
        num_threads: int = 2,
        prefetch: int = 4,
        pin_memory: bool | None = None,
        as_tensordict: bool = False,
        epochs: int | None = None,
        mask_fillers: bool = False,
        crop_s: float | None = None,
        collator: BatchMaker | None = None,
        device: torch.device | str | None = None,
        device_prefetch: int = 1,
        earlier_key: str | None = None,
        finish: Callable[[Any], Batch] | None = None,
    ) -> None:
        """Starts nothing yet: threads live from `iter` to the end of the iterator.

        dp_rank, dp_world_size: left out, those of `resolve_ranks`. Every rank does as many steps; see
        `forebay.plan.ranks` for the epoch's end.
        dtype: of floating-point fields. num_threads: that fill batches; 0: in the caller's thread, when asked.
        prefetch: batches filled ahead. pin_memory: None: where CUDA is present. as_tensordict: batches as TensorDicts.
        epochs: iterations from this epoch on are empty; None: no end.
        mask_fillers: batches of weight 0 (see `weight`) have all labels -100. A sum of token losses over ranks is then right
        by itself; a mean over the batch's own tokens is NaN.
        crop_s: batches are of random crops of so many seconds, drawn by (seed, epoch, sample id); see `forebay.train.collate.crop`.
        collator: what makes the batches, for example of packs; None: a `Collator` of dtype, padding_side and crop_s.
        device: where batches are handed out: copied to a CUDA device on a side stream, `device_prefetch` batches ahead; None or
        cpu: on the host. finish: what makes the batch handed out of the one that was copied to the device.
        plan_key, earlier_key: `key` and `earlier_key` of `plan_of`; states of any other plan are refused.
        Raises ConfigError (also ValueError) for impossible values, PlanError where no rank has a step.
        """
        if dp_rank is None or dp_world_size is None:
            dp_rank, dp_world_size = resolve_ranks(dp_rank, dp_world_size)
        check_ranks(dp_rank, dp_world_size)
        if num_threads < 0 or prefetch < 1 or device_prefetch < 0:
            raise ConfigError(
                f"num_threads is {num_threads} (wanted 0 or more), prefetch is {prefetch} (wanted 1 or more), "
                f"device_prefetch is {device_prefetch} (wanted 0 or more)"
            )
        self.source, self.plan, self.plan_key, self.seed = source, plan, plan_key, seed
        self._earlier_key = earlier_key
        self.dp_rank, self.dp_world_size, self.epochs = dp_rank, dp_world_size, epochs
        if len(self) == 0:
            raise PlanError(
                f'{plan.num_batches} micro-batches are no full step of {dp_world_size} ranks and plan.tail is "{plan.tail}": '
                'use fewer ranks, smaller batches, or plan.tail = "short"'
            )
        self._num_threads, self._prefetch = num_threads, prefetch
        self._as_tensordict, self._mask_fillers = as_tensordict, mask_fillers
        # One a source: a micro-batch is of one of them, or they are all alike.
        self._collators: list[BatchMaker] = [
            collator or Collator(part, dtype=dtype, padding_side=padding_side, crop_s=crop_s)
            for part in parts_of(source)
        ]
        self._is_cropped = crop_s is not None
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory is true but torch sees no CUDA device; leave train.pin_memory out")
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        # Filled ahead, being filled, in the user's hands (one, and the one before it).
        self._ring = BufferRing(max_free=prefetch + num_threads + 2, pin_memory=pinned)
        self._side_stream, self._device_prefetch, self._finish = side_stream(device), device_prefetch, finish
        self._read_ahead = ReadAhead(source)
        self._totals = _Totals()
        self._weight = 1
        self._start = self._next = LoaderState(plan_key=plan_key, seed=seed, epoch=0, position=0)
        self._iteration = 0

    def __len__(self) -> int:
        """Steps of this rank, as of every other, in a whole epoch."""
        return num_steps(self.plan.num_batches, self.dp_world_size, tail=self.plan.tail)

    @property
    def dataset(self) -> NoReturn:
        """Raises AttributeError: transformers' Trainer asks for it to read again what it had read before a checkpoint."""
        raise AttributeError(
            "a forebay Loader has no dataset to be read again: to resume under transformers' Trainer, mix "
            "forebay.train.integrations.hf.LoaderMixin into it (examples/hf_trainer.py); elsewhere use load_state_dict"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Returns this rank's batches from where the loader stands to the end of that epoch. Starts the threads."""
        self._iteration += 1
        start = self._next = self._start
        left = self._steps_left(start)
        if self.epochs is not None and start.epoch >= self.epochs:
            left = 0
        filled = Prefetch(
            self._fill, self._work(start, left), num_threads=self._num_threads if left else 0, prefetch=self._prefetch
        )
        return self._deliver(filled, start, num_steps=left, iteration=self._iteration)

    @property
    def weight(self) -> int:
        """Of the batch handed out last: 1, or 0 where it only fills the epoch's last step and is not to be learnt from.

        Zeros come under `plan.tail = "short"` on several ranks, where the last step would leave some without a batch.
        """
        return self._weight

    @property
    def epoch(self) -> int:
        """Epoch of the batch that comes next."""
        return self._next.epoch

    @property
    def state(self) -> LoaderState:
        """Where the next batch is; `state_dict` says it in JSON values."""
        return self._next

    @property
    def grad_acc(self) -> int | None:
        """Micro-batches a rank that the plan wants in the optimizer step that comes next; None: the plan says nothing.

        That of the bucket of the next micro-batch of all ranks together: the same on every rank.
        """
        if self.plan.grad_accs is None:
            return None
        place = self._next
        return self.plan.grad_accs[self.plan.order(place.seed, place.epoch).bucket(place.position)]

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`, from its head; in the epoch where the loader stands nothing changes."""
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}, wanted 0 or more")
        if epoch != self._start.epoch:
            self._stand_at(LoaderState(plan_key=self.plan_key, seed=self.seed, epoch=epoch, position=0))

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values; batches filled ahead but not handed out do not count.

        `position` is the next micro-batch of all ranks together: the same on every rank, and usable at any world size.
        """
        return self._next.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin at the batch that `state` names, at once; its seed becomes the loader's.

        Raises ResumeError, naming field and both values, for another plan, a newer version, wrong types or a place
        outside of the plan; nothing has changed then.
        """
        loaded = LoaderState.from_json(
            state, plan_key=self.plan_key, num_batches=self.plan.num_batches, earlier_key=self._earlier_key
        )
        self.seed = loaded.seed
        self._stand_at(loaded if self._steps_left(loaded) else loaded.next_epoch())

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

    def _stand_at(self, state: LoaderState) -> None:
        self._iteration += 1  # iterators that are still about no longer move the loader
        self._start = self._next = state

    def _steps_left(self, state: LoaderState) -> int:
        return num_steps(self.plan.num_batches, self.dp_world_size, tail=self.plan.tail, start=state.position)

    def _work(self, start: LoaderState, steps: int) -> Iterator[_Work]:
        """Yields what to fill, step by step."""
        order = self.plan.order(start.seed, start.epoch)
        draws = CropDraws(seed=start.seed, epoch=start.epoch) if self._is_cropped else None
        for chunk in range(0, steps, _ORDER_CHUNK):
            turns = [
                turn(
                    len(order),
                    step,
                    dp_rank=self.dp_rank,
                    dp_world_size=self.dp_world_size,
                    tail=self.plan.tail,
                    start=start.position,
                )
                for step in range(chunk, min(chunk + _ORDER_CHUNK, steps))
            ]
            batches = order.batches([place.position for place in turns])
            for place, indices in zip(turns, batches, strict=True):
                work = _Work(start.epoch, place, indices.tolist(), draws)
                self._read_ahead.announce(work.indices)
                yield work

    def _fill(self, work: _Work) -> _Filled:
        """Returns the batch of one step; runs in a thread."""
        with self._read_ahead.watch():
            return self._filled(work)

    def _filled(self, work: _Work) -> _Filled:
        index = None
        try:
            samples = []
            for index in work.indices:
                sample = self.source.read(index)
                samples.append(work.draws.beside(sample, self.source.sample_id(index)) if work.draws else sample)
            index = None
            collator = self._collator_of(work.indices[0])
            batch = collator.collate(samples, allocate=self._ring.take)
        except Exception as err:
            which = f"samples {work.indices}" if index is None else f"sample {index}"
            err.add_note(
                f"while filling micro-batch {work.turn.position} of epoch {work.epoch}: "
                f"{which} of cache {self.source.key[:16]}"
            )
            raise
        if self._mask_fillers and not work.turn.weight and "labels" in batch:
            batch["labels"].fill_(IGNORED)
        frames, room = collator.count_frames(samples)
        return _Filled(batch, work.turn, num_samples=len(samples), frames=frames, room=room)

    def _collator_of(self, index: int) -> BatchMaker:
        return self._collators[self.source.part(index) if isinstance(self.source, SourceUnion) else 0]

    def _deliver(
        self, filled: Prefetch[_Work, _Filled], start: LoaderState, *, num_steps: int, iteration: int
    ) -> Iterator[Batch]:
        items = filled if self._side_stream is None else self._on_device(filled, self._side_stream.start)
        try:
            for step in range(num_steps):
                # Nothing here may keep a name on the batch: its buffers are free when the user drops it.
                yield self._take(items, start, steps_done=step + 1, steps=num_steps, iteration=iteration)
        finally:
            filled.close()

    def _on_device(self, filled: Iterator[_Filled], start: Callable[[Any], Callable[[], Any]]) -> Iterator[_Filled]:
        def started(item: _Filled) -> Callable[[], _Filled]:
            finish, counts = start(item.batch), dataclasses.replace(item, batch={})  # no name on the host's memory
            # Finished when it is handed out: what waits on the device is as small as what was copied.
            return lambda: dataclasses.replace(counts, batch=self._finish(finish()) if self._finish else finish())

        return Ahead(filled, started, depth=self._device_prefetch)

    def _take(
        self, filled: Iterator[_Filled], start: LoaderState, *, steps_done: int, steps: int, iteration: int
    ) -> Any:
        began = time.perf_counter()
        item = next(filled)
        self._totals.add(item, wait_s=time.perf_counter() - began)
        self._weight = item.turn.weight
        if iteration == self._iteration:
            self._advance(start, steps_done=steps_done, steps=steps)
        if not self._as_tensordict:
            return item.batch
        from tensordict import TensorDict

        # A pack has no dimension of samples, of a single one either.
        return TensorDict(item.batch, batch_size=[] if "position_ids" in item.batch else [item.num_samples])

    def _advance(self, start: LoaderState, *, steps_done: int, steps: int) -> None:
        if steps_done == steps:
            self._start = self._next = start.next_epoch()
        else:
            batches = self.plan.num_batches
            self._next = start.at(
                next_position(batches, steps_done, dp_world_size=self.dp_world_size, start=start.position)
            )


@dataclass(frozen=True, slots=True)
class _Work:
    """One batch to fill."""

    epoch: int
    turn: Turn
    indices: list[int]
    draws: CropDraws | None


@dataclass(frozen=True, slots=True)
class _Filled:
    """One batch and what it counts for."""

    batch: Any
    turn: Turn
    num_samples: int
    frames: int
    room: int


@dataclass(slots=True)
class _Totals:
    """Sums over the batches handed out."""

    samples: int = 0
    batches: int = 0
    frames: int = 0
    room: int = 0
    wait_s: float = 0.0

    def add(self, item: _Filled, *, wait_s: float) -> None:
        """Counts a batch as handed out."""
        self.samples += item.num_samples * item.turn.weight
        self.batches += 1
        self.frames += item.frames
        self.room += item.room
        self.wait_s += wait_s
