"""A mixture of packs: each source has the packs of its own plan, and the mixture draws packs as it draws samples.

So every pack is of one source, shares are exact at every prefix, and other weights need no other packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.config.tree import Config, WeightSteps
from forebay.errors import ConfigError
from forebay.plan.interface import in_batches, places_of
from forebay.plan.mixture.mixture_plan import Exhausted, MixtureOrder, MixturePlan
from forebay.plan.mixture.sources import quantise, tempered
from forebay.plan.pack.pack_plan import PackPlan
from forebay.store.layout import Array, Ints
from forebay.store.source import SampleSource, SourceUnion, length_of


@dataclass(frozen=True, kw_only=True, eq=False)
class PackMixture(MixturePlan):
    """A mixture whose samples are packs. pack_members, pack_offsets: as those of a `PackPlan`, over all sources.

    num_samples: of all sources, in packs or not.
    """

    pack_members: Array
    pack_offsets: Array
    num_samples: int

    def order(self, seed: int, epoch: int) -> PackMixtureOrder:
        return PackMixtureOrder(self, seed=seed, epoch=epoch)

    def described(self) -> str:
        return f"{self.num_batches} packs of {len(self.names)} sources"

    def sample_weights(self, end: int = 0) -> Array:
        """See `MixturePlan`: a sample comes as often as its pack; 0 of those that are in none."""
        sizes, shares = np.diff(self.pack_offsets), self.shares_until(end)
        each = np.repeat(shares / np.maximum(self.sizes[:, 0], 1), self.sizes[:, 0])
        weights = np.zeros(self.num_samples)
        weights[self.pack_members] = np.repeat(each, sizes)
        return weights


class PackMixtureOrder(MixtureOrder):
    """One epoch of a mixture of packs; `drawn` and `repeated` count packs."""

    plan: PackMixture

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        packs = np.concatenate([np.empty(0, np.int64), *super().batches(positions)])
        starts = self.plan.pack_offsets[packs]
        sizes = self.plan.pack_offsets[packs + 1] - starts
        found: Ints = self.plan.pack_members[places_of(starts, sizes)].astype(np.int64)
        return in_batches(found, sizes)


def pack_mixture(
    plans: Sequence[PackPlan], *, names: Sequence[str], weights: Sequence[float], exhausted: Exhausted
) -> PackMixture:
    """Returns the mixture of the packs of several sources. plans: of each its own. weights: of packs, of any scale.

    Raises PlanError for weights that are none.
    """
    firsts = np.cumsum([0, *(plan.num_samples for plan in plans)])
    counts = np.array([plan.num_batches for plan in plans], np.int64)
    sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    return PackMixture(
        names=tuple(names),
        weights=quantise(weights),
        sizes=counts[:, None],
        members=np.arange(counts.sum()),
        offsets=np.concatenate(([0], np.cumsum(counts))),
        batch_sizes=np.ones(1, np.int64),
        class_names=("packs",),
        lockstep=1,
        tail=plans[0].tail,
        batches="per_source",
        exhausted=exhausted,
        patch_classes=tuple(sorted({size for plan in plans for size in plan.patch_classes})),
        pack_members=np.concatenate([_all(plan) + first for plan, first in zip(plans, firsts[:-1], strict=True)]),
        pack_offsets=np.concatenate(([0], np.cumsum(sizes))),
        num_samples=int(firsts[-1]),
    )


def weights_of_packs(
    config: Config, union: SourceUnion, plans: Sequence[PackPlan]
) -> tuple[Sequence[float | WeightSteps], list[float]]:
    """Returns the weights in `mixture.shares_of` as the config has them, and what a pack of each source holds of it.

    Left out, weights are what all packs of a source hold, to the power of `mixture.temperature`. Raises ConfigError for
    a source that holds none of it.
    """
    unit = config.mixture.shares_of
    held = [_held(source, plan, unit) for source, plan in zip(union.sources, plans, strict=True)]
    if not all(held):
        raise ConfigError(
            f'{config.path}: mixture.shares_of is "{unit}", and {union.names[held.index(0)]} has no {unit} in its '
            "packs; leave that source out, or name another unit",
            code="FB116",
        )
    given = [entry.weight for entry in config.mixture.source if entry.weight is not None]
    weights = given or tempered(held, config.mixture.temperature)
    return weights, [each / plan.num_batches for each, plan in zip(held, plans, strict=True)]


def _held(source: SampleSource, plan: PackPlan, unit: str) -> float:
    if unit == "packs":
        return plan.num_batches
    return len(plan.members) if unit == "samples" else float(length_of(source, f"num_{unit}")[_all(plan)].sum())


def _all(plan: PackPlan) -> Ints:
    return plan.members_at(np.arange(len(plan.members)))
