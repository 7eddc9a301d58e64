"""A source as a map-style dataset, for torch's DataLoader and whatever wraps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from forebay.errors import ConfigError
from forebay.plan.cursor import Cursor, CursorStep, Resumable
from forebay.plan.make import Planned
from forebay.store.source import SampleSource
from forebay.train.collate.collator import CropDraws
from forebay.train.collate.patches import FillerSamples, weight_of
from forebay.train.ranks import resolve_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SampleDataset(Dataset[dict[str, Any]]):
    """Samples by index, as dicts of tensors that are copies. A `Collator` of the same source is its `collate_fn`."""

    def __init__(self, source: SampleSource, *, crop_seed: int | None = None) -> None:
        """crop_seed: samples have the draw of their crop beside them, for a `Collator` with `crop_s`."""
        self.source = source
        self._crop_seed = crop_seed
        self._draws: CropDraws | None = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes crops those of `epoch`. Call it before the epoch's iterator is made: running workers have a copy."""
        if self._crop_seed is not None:
            self._draws = CropDraws(seed=self._crop_seed, epoch=epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the stored fields of one sample, each [n, *shape]; never aliases of the cache's read-only memory.

        Of images as their processor gives them a field is a tuple, a tensor an image.
        """
        sample, read = self.source.read_one(int(index))
        if self._draws is not None:
            sample = self._draws.beside(sample, self.source.sample_id(read))
        return {name: _copied(value) for name, value in sample.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several samples; DataLoader asks for whole batches in this way."""
        samples = [self[index] for index in indices]
        return samples if weight_of(indices) else FillerSamples(samples)


def _copied(value: Any) -> Any:
    """Returns an array as a tensor of its own; what is a tuple, an array an image, as a tuple of such."""
    return tuple(map(_copied, value)) if isinstance(value, tuple) else torch.from_numpy(value.copy())


class PlanSampler(Resumable):
    """The sample indices of one rank's batches, an epoch an iteration: a `batch_sampler` for torch's DataLoader.

    The batches are those of `Loader` under the same plan, seed and ranks, and so is the state: it goes from one to the
    other, and to another world size; what a DataLoader fetched ahead counts as given. torchdata's StatefulDataLoader
    keeps the state in its own, whatever its workers fetch ahead. What a `SampleDataset` and a `Collator` make of it
    keeps its weight: multiply each loss by `forebay.train.weight_of(batch)`.
    """

    def __init__(
        self,
        planned: Planned,
        *,
        seed: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """dp_rank, dp_world_size, device_mesh: see `resolve_ranks`; left out, they are found.

        Raises ConfigError for ranks that cannot be, PlanError where no rank has a step.
        """
        ranks = resolve_ranks(dp_rank, dp_world_size, device_mesh=device_mesh)
        self.cursor = Cursor(
            *(planned.plan, planned.key),
            seed=seed,
            rank=ranks.dp_rank,
            world=ranks.dp_world_size,
            locality=planned.locality,
        )

    @property
    def batch_size(self) -> None:
        """None: batches differ in size. What asks for it wants to share the batches among ranks, which is done already.

        Raises ConfigError where that would be a second time (accelerate's `prepare` of a DataLoader asks).
        """
        if self.cursor.world > 1:
            raise ConfigError(
                f"these batches are already those of dp_rank {self.cursor.rank} of {self.cursor.world}, and sharing "
                "them again would leave samples out; do not give this DataLoader to accelerate's prepare, or make the "
                "PlanSampler "
                "with dp_rank=0, dp_world_size=1"
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.cursor.walk())

    def _batches(self, steps: Iterator[CursorStep]) -> Iterator[list[int]]:
        for step in steps:
            # Before the batch is handed out: whoever asks for the state then has it.
            self.cursor.hand_out(step)
            indices = step.samples.tolist()
            yield indices if step.turn.weight else FillerSamples(indices)
