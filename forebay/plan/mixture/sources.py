"""The sources that a config mixes, their weights, and which of them each place of a stream is taken from.

At every prefix the stream is as close to the weights as any sequence can be. The weights are normalised, tempered where
they come from hours, and quantised to whole numbers of 65,536.

Weights may change over a run. A stretch in which they stay begins at a place of the stream, and has a sequence of its
own by its weights. The turns of a source go on over all stretches: nothing is lost or repeated where weights change.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from forebay.config.plan import WeightSteps
from forebay.config.tree import Config
from forebay.errors import ConfigError, PlanError
from forebay.store.layout import ROW_BITS, Array, Ints
from forebay.store.source import SECONDS, SampleSource, SourceUnion, has_untimed_items, length_of, parts_of

T = TypeVar("T")


class Assignment:
    """An endless sequence of sources in which each has its share of every prefix.

    It keeps to the share within 1 - 1/(2k - 2) places for k sources. The chairman assignment (Tijdeman 1980, "The
    chairman assignment problem", Discrete Mathematics 32): with d = 1/(2k - 2) and share s, the j-th place of a source
    (j from 1) must lie at n (from 1) where s n - (j - 1) >= d, and not behind the first n where s n - (j - 1) > 1 - d.
    His theorem says that there is such a sequence, so the rule "of the places that may be given now, the one that is
    due first" finds it. After one period (the sum of the weights over their common divisor) every source has exactly
    its share, and the sequence begins again: one period, 256 KiB at most, answers for every place.
    """

    __slots__ = ("_keys", "_occurrences", "_ordinals", "_sources", "_starts", "period", "weights")

    def __init__(self, weights: Array, *, length: int | None = None) -> None:
        """Makes the sequence of `weights`, int64 [k], 0 or more, of sum 1 to 65,536.

        length: places that will be asked for at most; None: any.
        """
        weights = np.asarray(weights, dtype=np.int64)
        if not 1 <= len(weights) <= 2**16 or weights.min() < 0 or not 1 <= weights.sum() <= 2**16:
            raise PlanError(
                f"weights of an assignment are {weights.tolist()[:20]}, wanted 0 or more, of sum 1 to 65536"
            )
        self.weights: Array = weights // np.gcd.reduce(weights)
        self.period = int(self.weights.sum())
        self._sources = sources = _earliest_due_first(tuple(self.weights.tolist()), length or self.period)
        # Sorted by source, then place: where each source's turns lie in a period, and how many it had before a place.
        turns: Array = np.argsort(sources, kind="stable")
        self._occurrences = turns
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(sources, minlength=len(weights)))))
        self._keys = sources[turns].astype(np.int64) * self.period + turns
        self._ordinals = np.empty(len(sources), dtype=np.uint16)
        self._ordinals[turns] = (np.arange(len(sources)) - self._starts[sources[turns]]).astype(np.uint16)

    @property
    def starts(self) -> Array:
        """int64 [1], the places from which other weights hold: of one sequence the first place alone."""
        return np.zeros(1, np.int64)

    @property
    def shares(self) -> Array:
        """float64 [1, k], the shares from each of `starts` on."""
        return self.weights[None] / self.period

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Returns the source of each place and how many places before it have the same source. O(1) a place.

        places: int64, 0 or more, of any shape; both results are int64 of that shape.
        """
        cycles, inside = np.divmod(places, self.period)
        sources = self._sources[inside].astype(np.int64)
        ordinals: Ints = cycles * self.weights[sources] + self._ordinals[inside].astype(np.int64)
        return sources, ordinals

    def places(self, sources: Ints, ordinals: Ints) -> Ints:
        """Returns the place of a source's turn, from 0: the inverse of `locate`. The source's weight is not 0."""
        cycles, inside = np.divmod(ordinals, self.weights[sources])
        found: Ints = cycles * self.period + self._occurrences[self._starts[sources] + inside]
        return found

    def counts(self, places: Ints) -> Ints:
        """Returns how many of the first `places` places each source has, int64 [*places.shape, k]."""
        cycles, inside = np.divmod(places, self.period)
        before = np.searchsorted(self._keys, np.arange(len(self.weights)) * self.period + inside[..., None])
        found: Ints = cycles[..., None] * self.weights + before - self._starts[:-1]
        return found


@functools.lru_cache(maxsize=32)  # a tenth of a second each, and each loader of a run asks for the same
def _earliest_due_first(weights: tuple[int, ...], length: int) -> Array:
    """Returns the first `length` places of one period, uint16, read-only.

    All in integers: a window's ends are ratios of them.
    """
    period = sum(weights)
    length = min(length, period)
    live = sum(weight > 0 for weight in weights)
    if live == 1:
        return _kept([next(number for number, weight in enumerate(weights) if weight)] * length)
    halves = 2 * live - 2  # 1 / d
    released: list[list[tuple[int, int]]] = [[] for _ in range(length)]
    for source, weight in enumerate(weights):
        for turn in range(weight):
            # The smallest n with weight n / period >= turn + d, and the smallest with weight n / period > turn + 1 - d.
            first = -(-(turn * halves + 1) * period // (halves * weight))
            if first > length:
                break
            due = ((turn + 1) * halves - 1) * period // (halves * weight) + 1
            released[first - 1].append((due, source))
    waiting: list[tuple[int, int]] = []
    order = []
    for arrived in released:
        for turn_due in arrived:
            heapq.heappush(waiting, turn_due)
        order.append(heapq.heappop(waiting)[1])
    return _kept(order)


def _kept(order: list[int]) -> Array:
    found = np.array(order, dtype=np.uint16)
    found.flags.writeable = False
    return found


PERIOD = 65_536
"""Quantised weights sum to it, and an assignment repeats after it."""


def quantise(weights: Sequence[float]) -> Array:
    """Returns the weights as int64 [num_sources] that sum to 65,536, each within 1 of its exact share of that.

    weights: [num_sources], 0 or more each, of any scale. Largest remainder (Hamilton's method), in rational arithmetic,
    so that every machine gives the same; of equal remainders the first sources' are rounded up. A weight below 1/65,536
    of the sum may become 0. Raises PlanError for none, too many, a negative or infinite one, or a sum of 0.
    """
    if not 1 <= len(weights) <= PERIOD:
        raise PlanError(f"a mixture has {len(weights)} sources, wanted 1 to {PERIOD}")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise PlanError(f"weight {number} of the mixture is {weight}, wanted a number from 0 on")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if total == 0:
        raise PlanError(
            f"all {len(weights)} weights of the mixture are 0; give one source at least more than 0", code="FB116"
        )
    shares = [weight * PERIOD / total for weight in exact]
    floors = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: floors[i] - shares[i])  # stable: the first of equals
    for number in by_remainder[: PERIOD - sum(floors)]:
        floors[number] += 1
    return np.array(floors, dtype=np.int64)


def tempered(hours: Sequence[float], temperature: float) -> list[float]:
    """Returns the weights hours^temperature, [num_sources], of scale 1 for the largest; no hours give weight 0.

    temperature: 0 or more; 1 is proportional to hours, less lifts the small sources, 0 makes all equal. (Conneau et al.
    2020, section 3.1, call it alpha.) Raises PlanError for a temperature that is none, and where there are no hours.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise PlanError(f"temperature of the mixture is {temperature}, wanted a number from 0 on")
    largest = max(hours, default=0.0)
    if largest <= 0:
        raise PlanError(
            "no source of the mixture has any audio, so hours give no weights; give weights instead", code="FB116"
        )
    return [(part / largest) ** temperature if part > 0 else 0.0 for part in hours]


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
    weights = [
        each if isinstance(each, tuple) else ((0, each),) for each in weights_of(config, source, names, source_of)
    ]
    is_live = quantise([max(weight for _, weight in steps) for steps in weights]) > 0
    sizes: Ints = np.bincount(owners, minlength=len(names))[is_live]
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


def weights_of(
    config: Config, source: SampleSource, names: Sequence[str], source_of: Array
) -> Sequence[float | WeightSteps]:
    """Returns the weight of each source as the config gives it, of any scale: said, by a ratio, or by hours."""
    settings = config.mixture
    given = [entry.weight for entry in settings.source if entry.weight is not None]
    if given:
        return given
    if settings.asr_ratio is not None and isinstance(source, SourceUnion):
        return _asr_weights(config, source)
    if settings.weights is not None:
        return named_weights(config, settings.weights, names)
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


def named_weights(config: Config, weights: Mapping[str, T], names: Sequence[str]) -> list[T]:
    """Returns the weights of a column's values in the order of the sources. Raises ConfigError for other values."""
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


MAX_STRETCHES = 256
"""Of one run: each takes up to 0.1 s to be made."""


class WeightChange(NamedTuple):
    """Other weights of a run. at: the micro-batch of the global order, over epochs, from whose group on they hold."""

    at: int
    weights: Array
    """int64 [k], of 65,536."""
    is_revision: bool = False
    """Whether it was made to a run that has begun: states from before it go on with it."""


class ChangingAssignment:
    """An endless sequence of sources whose weights change at some places; `Assignment` says what the methods give.

    Every prefix is within one place of every share for each stretch that it reaches into.
    """

    __slots__ = ("_bases", "_parts", "shares", "starts")

    def __init__(self, parts: Sequence[Assignment], starts: Sequence[int]) -> None:
        """parts: a sequence for each stretch. starts: the first place of each, rising from 0."""
        self._parts = tuple(parts)
        self.starts: Array = np.array(starts, np.int64)
        self.shares: Array = np.concatenate([part.shares for part in parts])
        lengths = np.diff(self.starts)
        held = [part.counts(length) for part, length in zip(self._parts, lengths, strict=False)]
        self._bases: Array = np.cumsum([np.zeros(self.shares.shape[1], np.int64), *held], axis=0)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Returns the source of each place and how many places before it have the same source."""
        stretches = np.searchsorted(self.starts, places, side="right") - 1
        sources, ordinals = np.empty_like(places), np.empty_like(places)
        for number in np.unique(stretches).tolist():
            own = stretches == number
            sources[own], turns = self._parts[number].locate(places[own] - self.starts[number])
            ordinals[own] = turns + self._bases[number, sources[own]]
        return sources, ordinals

    def places(self, sources: Ints, ordinals: Ints) -> Ints:
        """Returns the place of a source's turn, from 0: the inverse of `locate`."""
        stretches = (self._bases[:, sources] <= ordinals).sum(0) - 1
        found = np.empty_like(ordinals)
        for number in np.unique(stretches).tolist():
            own = stretches == number
            turns = ordinals[own] - self._bases[number, sources[own]]
            found[own] = self._parts[number].places(sources[own], turns) + self.starts[number]
        return found

    def counts(self, places: Ints) -> Ints:
        """Returns how many of the first `places` places each source has, int64 [*places.shape, k]."""
        stretches = np.searchsorted(self.starts, places, side="right") - 1
        found = self._bases[stretches]
        for number in np.unique(stretches).tolist():
            own = stretches == number
            found[own] += self._parts[number].counts(places[own] - self.starts[number])
        return found


AnyAssignment = Assignment | ChangingAssignment


def stretches_of(
    weights: Sequence[float | WeightSteps], *, between: Literal["step", "line"] = "step", line_step: float = 1.0
) -> list[tuple[float, list[float]]]:
    """Returns where other weights begin, rising from 0, and the weights of all sources from there on.

    weights: of each source, a number or steps. between: `line` goes straight from each step to the next in steps of
    `line_step`, each with the line's weight at its middle. Raises PlanError for too many stretches.
    """
    knots = sorted({at for each in weights if isinstance(each, tuple) for at, _ in each} | {0.0})
    begins = knots
    if between == "line":
        pairs = itertools.pairwise(knots)
        begins = [low + i * line_step for low, high in pairs for i in range(_steps(low, high, line_step))] + knots[-1:]
    if len(begins) > MAX_STRETCHES:
        raise PlanError(
            f"the weights of the mixture change {len(begins) - 1} times, at most {MAX_STRETCHES - 1} are possible; "
            "raise mixture.line_step, or give fewer steps",
            code="FB116",
        )
    ends = [*begins[1:], begins[-1]]
    middles = [(low + high) / 2 for low, high in zip(begins, ends, strict=True)] if between == "line" else begins
    return [
        (at, [_weight(each, middle, between) for each in weights]) for at, middle in zip(begins, middles, strict=True)
    ]


def _steps(low: float, high: float, step: float) -> int:
    return min(max(int(-(-(high - low) // step)), 1), MAX_STRETCHES + 1)


def _weight(steps: float | WeightSteps, at: float, between: str) -> float:
    """Returns the weight of one source at a position."""
    if not isinstance(steps, tuple):
        return steps
    place = bisect.bisect_right([begin for begin, _ in steps], at) - 1
    begin, weight = steps[place]
    if between == "step" or place + 1 == len(steps):
        return weight
    end, to = steps[place + 1]
    return weight + (to - weight) * (at - begin) / (end - begin)
