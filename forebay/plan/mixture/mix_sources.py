"""A config to its mixture: which sources, their weights at the head of a run, and how these change over it.

In a mixture of packs each source has the packs of its own plan, and the mixture draws packs as it draws samples. So
every pack is of one source, shares are exact at every prefix, and other weights need no other packs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from forebay.config.plan import WeightSteps
from forebay.config.tree import Config
from forebay.errors import ConfigError, PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.interface import in_batches, places_of
from forebay.plan.make import Planned
from forebay.plan.mixture.mixture_plan import MIXTURE_VERSION, Exhausted, MixtureOrder, MixturePlan, mixture_plan
from forebay.plan.mixture.sources import (
    MAX_LOGGED,
    PERIOD,
    WeightChange,
    named_weights,
    quantise,
    sources_of,
    stretches_of,
    tempered,
    weights_of,
)
from forebay.plan.names import combined, with_mixture
from forebay.plan.pack.pack_plan import PackPlan
from forebay.store.layout import Array, Ints
from forebay.store.source import SampleSource, SourceUnion, length_of
from forebay.terminal import first_of


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


logger = logging.getLogger(__name__)


def mix(config: Config, source: SampleSource, planned: Planned) -> Planned:
    """Returns the mixture that a config asks for over the buckets of a plan, with its key; says the quantised weights.

    source: what is read, with the caches of `[[mixture.source]]` a `SourceUnion`. planned: of all its samples. The key
    is the plan's with names, quantised weights and rules on top: a state does not go on with other weights.
    Raises ConfigError for a column that the source lacks, weights of other values than the column has, or a plan
    without buckets; PlanError where weights and samples give no mixture.
    """
    plan = planned.plan
    if not isinstance(plan, BucketPlan):
        raise ConfigError(
            f'{config.path}: a mixture needs a plan of buckets; set plan.kind = "bucket" (one edge for batches of any '
            "lengths)",
            code="FB116",
        )
    names, source_of = sources_of(config, source)
    settings = config.mixture
    make = partial(mixture_plan, plan, source_of, names=names, batches=settings.batches, exhausted=settings.exhausted)
    mixture, rules = _over_the_run(config, names, weights_of(config, source, names, source_of), make)
    rules["source_of"] = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(source_of, np.int32).data)
    return replace(planned, plan=mixture, key=with_mixture(planned.key, rules), folder=None)


def mix_packs(config: Config, union: SourceUnion, planned: Sequence[Planned]) -> Planned:
    """Returns the mixture of the packs of several sources. planned: of each its own plan of packs. Raises as `mix`."""
    plans = [cast("PackPlan", each.plan) for each in planned]
    weights, of_a_pack = weights_of_packs(config, union, plans)
    make = partial(pack_mixture, plans, names=union.names, exhausted=config.mixture.exhausted)
    mixture, rules = _over_the_run(config, union.names, weights, make, of_a_batch=of_a_pack)
    return Planned(plan=mixture, key=with_mixture(combined(each.key for each in planned), rules))


def _over_the_run(
    config: Config,
    names: Sequence[str],
    weights: Sequence[float | WeightSteps],
    make: Callable[..., MixturePlan],
    *,
    of_a_batch: Sequence[float] | None = None,
) -> tuple[MixturePlan, dict[str, Any]]:
    """Returns the mixture under weights that may change over the run, and what its key holds.

    make: by the weights at the head. of_a_batch: what a batch of each source holds of that which has these shares.
    """

    def scaled(given: Sequence[float]) -> Sequence[float]:
        return given if of_a_batch is None else [w / held for w, held in zip(given, of_a_batch, strict=True)]

    settings = config.mixture
    line: dict[str, Any] = {"between": settings.weights_between, "line_step": settings.line_step or 1.0}
    (_, first), *steps = stretches_of(weights, **line)
    mixture = make(weights=scaled(first))
    unit = mixture.num_batches if settings.weights_in == "epochs" else 1
    curve = [(round(at * unit), scaled(later)) for at, later in steps]
    revised = [(at, scaled(later)) for at, later in _revised(config, names)]
    mixture = with_changes(mixture, curve, revised=revised)
    _say(mixture)
    column = settings.column
    return mixture, {
        "mixture_version": MIXTURE_VERSION,
        "column": column,
        "names": list(mixture.names) if column else None,
        "weights": mixture.weights.tolist(),
        "batches": mixture.batches,
        "exhausted": mixture.exhausted,
        # Changes of a run that has begun are in its states: see `Cursor`.
        **({"changes": [[at, quantise(later).tolist()] for at, later in curve]} if curve else {}),
    }


def with_changes(
    mixture: MixturePlan,
    curve: Sequence[tuple[int, Sequence[float]]],
    *,
    revised: Sequence[tuple[int, Sequence[float]]] = (),
) -> MixturePlan:
    """Returns a mixture whose weights change over the run, by micro-batches of the global order.

    curve: what the run was begun with. revised: made to it later; from the first of them on the curve counts no more.
    Raises PlanError for weights that are none, and for a source with a weight and no samples.
    """
    first = min((at for at, _ in revised), default=None)
    kept = [(at, weights, False) for at, weights in curve if first is None or at < first]
    changes = []
    for at, weights, is_revision in [*kept, *((at, weights, True) for at, weights in revised)]:
        if len(weights) != len(mixture.names):
            raise PlanError(
                f"mixture.change at {at} has {len(weights)} weights for {len(mixture.names)} sources: "
                f"{', '.join(mixture.names[:MAX_LOGGED])}",
                code="FB116",
            )
        quantised = quantise(weights)
        for number in np.flatnonzero((quantised > 0) & (mixture.sizes.sum(1) == 0))[:1].tolist():
            raise PlanError(
                f"source {mixture.names[number]!r} of the mixture has weight {weights[number]} from micro-batch {at} "
                "on and no samples; leave it out",
                code="FB116",
            )
        changes.append(WeightChange(at, quantised, is_revision))
    return replace(mixture, changes=tuple(changes))


def _revised(config: Config, names: Sequence[str]) -> list[tuple[int, list[float]]]:
    return [
        (
            change.at,
            named_weights(config, change.weights, names) if isinstance(change.weights, dict) else list(change.weights),
        )
        for change in config.mixture.change
    ]


def _say(mixture: MixturePlan) -> None:
    rows = sorted(zip(mixture.weights.tolist(), mixture.names, strict=True), reverse=True)
    shown = first_of([f"{name} {weight / PERIOD:.6f}" for weight, name in rows], MAX_LOGGED)
    logger.info("mixture of %d sources: %s; %d batches an epoch", len(rows), shown, mixture.num_batches)
    if mixture.changes:
        logger.info("weights change %d times, last at micro-batch %d", len(mixture.changes), mixture.changes[-1].at)
    never = ~mixture.stretch_shares.any(0)
    for number in np.flatnonzero(never & (mixture.sizes.sum(1) > 0)).tolist():
        logger.warning(
            "%s has weight 0 of %d: none of its %d samples will be seen",
            mixture.names[number],
            PERIOD,
            mixture.sizes[number].sum(),
        )
