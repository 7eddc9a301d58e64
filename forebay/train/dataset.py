"""A source as a map-style dataset, for torch's DataLoader and whatever wraps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Dataset

from forebay.train.plan import BucketPlan, Order, num_steps, turn
from forebay.train.source import SampleSource


class SampleDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples by index, as dicts of tensors that are copies. A `Collator` of the same source is its `collate_fn`."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns the stored fields of one sample, each [n, *shape]; never aliases of the cache's read-only memory."""
        return {name: torch.from_numpy(value.copy()) for name, value in self.source.read(int(index)).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Returns several samples; DataLoader asks for whole batches in this way."""
        return [self[index] for index in indices]


class PlanSampler:
    """The sample indices of one rank's batches, epoch by epoch: a `batch_sampler` for torch's DataLoader.

    The batches are those of `Loader` under the same plan, seed and ranks. DataLoader needs `set_epoch` before each epoch.
    """

    def __init__(self, plan: BucketPlan, *, seed: int, dp_rank: int = 0, dp_world_size: int = 1) -> None:
        self.plan, self.seed = plan, seed
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`."""
        self._epoch = epoch

    def __len__(self) -> int:
        return num_steps(self.plan.num_batches, self.dp_world_size, tail=self.plan.tail)

    def __iter__(self) -> Iterator[list[int]]:
        order = Order(self.plan, seed=self.seed, epoch=self._epoch)
        for step in range(len(self)):
            place = turn(len(order), step, dp_rank=self.dp_rank, dp_world_size=self.dp_world_size, tail=self.plan.tail)
            yield order.batch(place.position).tolist()
