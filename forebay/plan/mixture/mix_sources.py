"""A config to its mixture: which sources, their weights at the head of a run, and how these change over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from forebay.config.tree import Config, WeightSteps
from forebay.errors import ConfigError, PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import Planned
from forebay.plan.mixture.changing import WeightChange, stretches_of
from forebay.plan.mixture.mixture_plan import MIXTURE_VERSION, MixturePlan, mixture_plan
from forebay.plan.mixture.packs_of_sources import pack_mixture, weights_of_packs
from forebay.plan.mixture.sources import MAX_LOGGED, PERIOD, named_weights, quantise, sources_of, weights_of
from forebay.plan.names import combined, with_mixture
from forebay.plan.pack.pack_plan import PackPlan
from forebay.store.source import SampleSource, SourceUnion
from forebay.terminal import first_of

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
