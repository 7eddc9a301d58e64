"""Which sources a config mixes, by which weights: which one each sample is of, and how many shards each has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.mixture.assignment import PERIOD, quantise, tempered
from forebay.store.layout import ROW_BITS, Array, Ints
from forebay.store.source import SECONDS, SampleSource, SourceUnion, has_untimed_items, length_of, parts_of

_UNKNOWN = "unknown"
"""An empty value of a column."""

MAX_LOGGED = 20


def shards_of_sources(config: Config, source: SampleSource) -> Ints:
    """Returns how many shards hold samples of each source that is drawn from, int64; of a plan without mixture, all."""
    assert source.slots is not None
    shards: Ints = source.slots >> ROW_BITS
    if not config.mixture.is_given:
        return np.array([len(np.unique(shards))])
    names, source_of = sources_of(config, source)
    count = int(shards.max(initial=0)) + 1
    owners = np.unique(source_of * np.int64(count) + shards) // count
    sizes: Ints = np.bincount(owners, minlength=len(names))[quantise(weights_of(config, source, names, source_of)) > 0]
    return sizes


def sources_of(config: Config, source: SampleSource) -> tuple[list[str], Array]:
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


def weights_of(config: Config, source: SampleSource, names: Sequence[str], source_of: Array) -> list[float]:
    """Returns the weight of each source as the config gives it, of any scale: said, by a ratio, or by hours."""
    settings = config.mixture
    given = [entry.weight for entry in settings.source if entry.weight is not None]
    if given:
        return given
    if settings.asr_ratio is not None and isinstance(source, SourceUnion):
        return _asr_weights(config, source)
    if settings.weights is not None:
        return _named_weights(config, settings.weights, names)
    mute = [name for name, part in zip(names, parts_of(source), strict=False) if not part.constants.has_items]
    if mute and settings.source:
        raise ConfigError(
            f"{config.path}: {mute[0]} has no audio, so hours give it no weight; give every [[mixture.source]] a "
            "weight, or mixture.asr_ratio",
            code="FB116",
        )
    return tempered(_hours(source, source_of, len(names)), settings.temperature)


def _hours(source: SampleSource, source_of: Array, num_sources: int) -> list[float]:
    """Returns the hours of each source that is mixed; of items that have none, the samples."""
    if has_untimed_items(source):
        counts: list[float] = np.bincount(source_of, minlength=num_sources).astype(float).tolist()
        return counts
    samples = np.bincount(source_of, weights=length_of(source, SECONDS), minlength=num_sources)
    hours: list[float] = (samples / (3600 * int(source.constants.get("sample_rate_hz", 1)))).tolist()
    return hours


def _asr_weights(config: Config, source: SourceUnion) -> list[float]:
    """Returns `asr_ratio` shared by the sources with audio, by their hours, and the rest for the one without."""
    ratio = float(config.mixture.asr_ratio or 0)
    mute = [name for name, part in zip(source.names, source.sources, strict=True) if not part.constants.has_items]
    if len(mute) != 1:
        raise ConfigError(
            f"{config.path}: mixture.asr_ratio is the share of micro-batches beside one cache without audio, "
            f"and {len(mute)} of {len(source.names)} have none{': ' if mute else ''}{', '.join(mute)}; "
            "give weights instead",
            code="FB116",
        )
    hours = _hours(source, source.source_of, len(source.names))
    heard = [weight if part.constants.has_items else 0.0 for weight, part in zip(hours, source.sources, strict=True)]
    heard = tempered(heard, config.mixture.temperature)
    return [
        ratio * weight / sum(heard) if part.constants.has_items else 1 - ratio
        for weight, part in zip(heard, source.sources, strict=True)
    ]


def _named_weights(config: Config, weights: Mapping[str, float], names: Sequence[str]) -> list[float]:
    column = config.mixture.column
    unknown = [name for name in weights if name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise ConfigError(
            f'{config.path}: mixture.weights.{unknown[0]}: no sample has {column} "{unknown[0]}"'
            + (f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(names[:MAX_LOGGED])}"),
            code="FB116",
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigError(
            f"{config.path}: mixture.weights has no weight for {column} {', '.join(missing[:MAX_LOGGED])}; "
            "give one, 0 to leave it out",
            code="FB116",
        )
    return [weights[name] for name in names]
