"""How fast texts are spoken beside the others of their language: what shows a text that is of another recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forebay.store.layout import Array, Ints


def middle_and_spread(values: Array, *, least: float) -> tuple[float, float]:
    """Returns the median and the robust deviation, MAD / 0.6745, which is `least` or more.

    values: float64 [one or more].
    """
    middle = float(np.median(values))
    return middle, max(float(np.median(np.abs(values - middle))) / 0.6745, least)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The limits that a text is held against, characters without white space; the defaults of `forebay lint` and pages.

    max_per_s, min_per_s: characters a second that nobody speaks, and below which most of a clip is not in its text.
    min_s: seconds of a clip from which it is compared. deviations: robust ones from the median of its language, of
    which there are min_clips clips.
    """

    max_per_s: float = 40.0
    min_per_s: float = 0.5
    min_s: float = 1.0
    deviations: float = 6.0
    min_clips: float = 30


PACE = Pace()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Misfits:
    """Texts that do not fit their recordings. per_s, scores: float64 [num_samples], NaN where nothing is known.

    scores: robust deviations from the language's median. too_many, too_few, outliers: bool, no sample in two of them.
    ranges: of the logarithm by language, median and deviation.
    """

    per_s: Array
    scores: Array
    too_many: Array
    too_few: Array
    outliers: Array
    ranges: dict[int, tuple[float, float]]

    def rows(self) -> Iterator[tuple[str, Array]]:
        """Yields the samples of each check of `forebay lint`."""
        for name in ("too_many", "too_few"):
            yield f"{name}_chars", np.flatnonzero(getattr(self, name))
        yield "chars_outlier", np.flatnonzero(self.outliers)


def misfits(
    chars: Array, seconds: Array, language_of: Ints, *, pace: Pace = PACE, usable: Array | bool = True
) -> Misfits:
    """Returns which texts do not fit. usable: samples that count for, and are held against, their language's median.

    chars: without white space; float or int, as `seconds` and `language_of` [num_samples].
    """
    known = (chars > 0) & (seconds > 0)
    per_s = np.where(known, chars / np.where(known, seconds, 1.0), np.nan)
    is_long = seconds >= pace.min_s
    too_many, too_few = per_s > pace.max_per_s, (per_s < pace.min_per_s) & is_long
    judged = known & is_long & ~too_many & ~too_few & usable
    logs, scores = np.log(per_s), np.full(len(per_s), np.nan)
    ranges = {}
    for code in np.unique(language_of[judged]).tolist():
        of_language = language_of == code
        if (own := judged & of_language).sum() >= pace.min_clips:
            # At least a tenth: of clips that are all alike a small step is no outlier.
            middle, spread = ranges[code] = middle_and_spread(logs[own], least=0.1)
            scores[of_language] = (logs[of_language] - middle) / spread
    outliers = judged & (np.abs(scores) > pace.deviations)
    return Misfits(per_s=per_s, scores=scores, too_many=too_many, too_few=too_few, outliers=outliers, ranges=ranges)
