"""From `[[mixture.source]]` or `mixture.column` to a plan: which sources are mixed, by which weights."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.bucket.plan import BucketPlan
from forebay.plan.make import Planned
from forebay.plan.mixture.assignment import PERIOD, tempered
from forebay.plan.mixture.plan import MIXTURE_VERSION, MixturePlan, mixture_plan
from forebay.plan.names import with_mixture
from forebay.store.layout import Array
from forebay.store.source import SampleSource, SourceUnion, has_audio, is_of_images, parts_of

logger = logging.getLogger(__name__)

_UNKNOWN = "unknown"
"""An empty value of a column."""

_MAX_LOGGED = 20


def mix(config: Config, source: SampleSource, planned: Planned) -> Planned:
    """Returns the mixture that a config asks for over the buckets of a plan, with its key; says the quantised weights.

    source: what is read, with the caches of `[[mixture.source]]` a `SourceUnion`. planned: of all its samples. The key
    is the plan's with names, quantised weights and rules on top: a state does not go on with other weights.
    Raises ConfigError for a column that the source lacks, weights of other values than the column has, or a plan
    without buckets; PlanError where weights and samples give no mixture.
    """
    plan = planned.plan
    if not isinstance(plan, BucketPlan) or plan.locality_shards is not None:
        raise ConfigError(
            f'{config.path}: a mixture needs a plan of buckets over all shards; set plan.kind = "bucket" (one edge for '
            'batches of any lengths) and plan.locality = "global"',
            code="FB116",
        )
    names, source_of = _sources(config, source)
    weights = _weights(config, source, names, source_of)
    mixture = mixture_plan(
        plan,
        source_of,
        names=names,
        weights=weights,
        batches=config.mixture.batches,
        exhausted=config.mixture.exhausted,
    )
    _say(mixture)
    rules = _rules(config.mixture.column, mixture)
    assigned = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(source_of, np.int32).data)
    return Planned(plan=mixture, key=with_mixture(planned.key, {**rules, "source_of": assigned}))


def _sources(config: Config, source: SampleSource) -> tuple[list[str], Array]:
    """Returns the names of the sources that are mixed, and which one each sample is of."""
    if isinstance(source, SourceUnion):
        return source.names, source.source_of
    column = str(config.mixture.column)
    found = source.categories(column)
    if found is None:
        raise ConfigError(
            f'{config.path}: mixture.column is "{column}", and cache {source.key[:16]} has no such text column; '
            'take "language" or "source"',
            code="FB116",
        )
    names = [name or (_UNKNOWN if _UNKNOWN not in found[0] else "") for name in found[0]]
    if len(names) > PERIOD:
        raise ConfigError(f'{config.path}: column "{column}" has {len(names)} values, a mixture at most {PERIOD}')
    return names, found[1]


def _weights(config: Config, source: SampleSource, names: Sequence[str], source_of: Array) -> list[float]:
    settings = config.mixture
    given = [entry.weight for entry in settings.source if entry.weight is not None]
    if given:
        return given
    if settings.asr_ratio is not None and isinstance(source, SourceUnion):
        return _asr_weights(config, source)
    if settings.weights is not None:
        return _named_weights(config, settings.weights, names)
    mute = [name for name, part in zip(names, parts_of(source), strict=False) if not has_audio(part)]
    if mute and settings.source:
        raise ConfigError(
            f"{config.path}: {mute[0]} has no audio, so hours give it no weight; give every [[mixture.source]] a "
            "weight, or mixture.asr_ratio",
            code="FB116",
        )
    return tempered(_hours(source, source_of, len(names)), settings.temperature)


def _hours(source: SampleSource, source_of: Array, num_sources: int) -> list[float]:
    """Returns the hours of each source that is mixed; of images, which have none, the samples."""
    if all(map(is_of_images, parts_of(source))):
        counts: list[float] = np.bincount(source_of, minlength=num_sources).astype(float).tolist()
        return counts
    samples = np.bincount(source_of, weights=source.lengths["num_audio_samples"], minlength=num_sources)
    hours: list[float] = (samples / (3600 * int(source.constants["sample_rate_hz"]))).tolist()
    return hours


def _asr_weights(config: Config, source: SourceUnion) -> list[float]:
    """Returns `asr_ratio` shared by the sources with audio, by their hours, and the rest for the one without."""
    ratio = float(config.mixture.asr_ratio or 0)
    mute = [name for name, part in zip(source.names, source.sources, strict=True) if not has_audio(part)]
    if len(mute) != 1:
        raise ConfigError(
            f"{config.path}: mixture.asr_ratio is the share of micro-batches beside one cache without audio, "
            f"and {len(mute)} of {len(source.names)} have none{': ' if mute else ''}{', '.join(mute)}; "
            "give weights instead",
            code="FB116",
        )
    hours = _hours(source, source.source_of, len(source.names))
    heard = [weight if has_audio(part) else 0.0 for weight, part in zip(hours, source.sources, strict=True)]
    heard = tempered(heard, config.mixture.temperature)
    return [
        ratio * weight / sum(heard) if has_audio(part) else 1 - ratio
        for weight, part in zip(heard, source.sources, strict=True)
    ]


def _named_weights(config: Config, weights: Mapping[str, float], names: Sequence[str]) -> list[float]:
    column = config.mixture.column
    unknown = [name for name in weights if name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise ConfigError(
            f'{config.path}: mixture.weights.{unknown[0]}: no sample has {column} "{unknown[0]}"'
            + (f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(names[:_MAX_LOGGED])}"),
            code="FB116",
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigError(
            f"{config.path}: mixture.weights has no weight for {column} {', '.join(missing[:_MAX_LOGGED])}; "
            "give one, 0 to leave it out",
            code="FB116",
        )
    return [weights[name] for name in names]


def _say(mixture: MixturePlan) -> None:
    rows = sorted(zip(mixture.weights.tolist(), mixture.names, strict=True), reverse=True)
    shown = ", ".join(f"{name} {weight / PERIOD:.6f}" for weight, name in rows[:_MAX_LOGGED])
    more = f" and {len(rows) - _MAX_LOGGED} more" if len(rows) > _MAX_LOGGED else ""
    logger.info("mixture of %d sources: %s%s; %d batches an epoch", len(rows), shown, more, mixture.num_batches)
    for number in np.flatnonzero((mixture.weights == 0) & (mixture.sizes.sum(1) > 0)).tolist():
        logger.warning(
            "%s has weight 0 of %d: none of its %d samples will be seen",
            mixture.names[number],
            PERIOD,
            mixture.sizes[number].sum(),
        )


def _rules(column: str | None, mixture: MixturePlan) -> dict[str, Any]:
    return {
        "mixture_version": MIXTURE_VERSION,
        "column": column,
        "names": list(mixture.names) if column else None,
        "weights": mixture.weights.tolist(),
        "batches": mixture.batches,
        "exhausted": mixture.exhausted,
    }
