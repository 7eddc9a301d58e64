"""`[[mixture.source]]` or `mixture.column` becomes a plan: which sources are mixed, by which weights."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.bucket.bucket_plan import BucketPlan
from forebay.plan.make import Planned
from forebay.plan.mixture.assignment import PERIOD
from forebay.plan.mixture.mixture_plan import MIXTURE_VERSION, MixturePlan, mixture_plan
from forebay.plan.mixture.sources import MAX_LOGGED, sources_of, weights_of
from forebay.plan.names import with_mixture
from forebay.store.source import SampleSource
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
    weights = weights_of(config, source, names, source_of)
    mixture = mixture_plan(
        plan,
        source_of,
        names=names,
        weights=weights,
        batches=config.mixture.batches,
        exhausted=config.mixture.exhausted,
    )
    _say(mixture)
    column = config.mixture.column
    rules = {
        "mixture_version": MIXTURE_VERSION,
        "column": column,
        "names": list(mixture.names) if column else None,
        "weights": mixture.weights.tolist(),
        "batches": mixture.batches,
        "exhausted": mixture.exhausted,
        "source_of": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(source_of, np.int32).data),
    }
    return replace(planned, plan=mixture, key=with_mixture(planned.key, rules), folder=None)


def _say(mixture: MixturePlan) -> None:
    rows = sorted(zip(mixture.weights.tolist(), mixture.names, strict=True), reverse=True)
    shown = first_of([f"{name} {weight / PERIOD:.6f}" for weight, name in rows], MAX_LOGGED)
    logger.info("mixture of %d sources: %s; %d batches an epoch", len(rows), shown, mixture.num_batches)
    for number in np.flatnonzero((mixture.weights == 0) & (mixture.sizes.sum(1) > 0)).tolist():
        logger.warning(
            "%s has weight 0 of %d: none of its %d samples will be seen",
            mixture.names[number],
            PERIOD,
            mixture.sizes[number].sum(),
        )
