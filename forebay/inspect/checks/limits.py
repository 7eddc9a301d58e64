"""Every limit of the checks, in one dataclass; and the checks by name, with what each of them says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from forebay.errors import ConfigError
from forebay.steps.text.line import MAX_DIGIT_SHARE
from forebay.store.layout import Array, Ints
from forebay.visible import did_you_mean


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


Severity = Literal["error", "warning", "info"]
Need = Literal["sound", "file", "seconds", "text", "pixels", "content", "sizes", "classes", "length", "segments"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The worst first."""


def _limit(default: float, says: str) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of the checks. `--limit NAME=VALUE` sets one; `--explain-checks` prints all."""

    quiet_dbfs: float = _limit(-55.0, "level of a piece of 20 ms, without its mean, below which the piece is quiet")
    quiet_share: float = _limit(0.9, "share of quiet pieces from which a clip is mostly silent")
    full_scale: float = _limit(0.9999, "magnitude from which a sample is at full scale")
    clipped_share: float = _limit(0.001, "share of samples at full scale from which some of a clip is clipped")
    badly_clipped_share: float = _limit(0.05, "share of samples at full scale from which a clip is spoiled")
    band_db: float = _limit(-52.0, "power above 60 % of the band, over all power, below which the band is narrow")
    dc_offset: float = _limit(0.01, "magnitude of a clip's mean, of full scale, from which it has an offset")
    rate_match: float = _limit(0.005, "share by which stated over real seconds may miss the ratio of two sample rates")
    max_chars_per_s: float = _limit(PACE.max_per_s, "characters a second, spaces left out, that nobody speaks")
    min_chars_per_s: float = _limit(PACE.min_per_s, "characters a second below which most of a clip is not in its text")
    min_rated_s: float = _limit(PACE.min_s, "seconds of a clip from which its characters a second are compared")
    outlier_deviations: float = _limit(
        PACE.deviations, "robust deviations from its language's median that make an outlier"
    )
    outlier_min_clips: float = _limit(PACE.min_clips, "clips of a language from which outliers are looked for")
    wrong_script_share: float = _limit(0.5, "share of letters of foreign scripts from which a text is of another")
    mixed_script_share: float = _limit(0.25, "share of letters of foreign scripts from which a text mixes scripts")
    min_letters: float = _limit(3, "letters that a text needs before its script is judged")
    repeated_texts: float = _limit(20, "samples with the same text from which the text repeats too often")
    repeated_min_chars: float = _limit(12, "characters that such a text has at least: short commands do repeat")
    max_digit_share: float = _limit(MAX_DIGIT_SHARE, "share of digits in a transcript above which it is of times")
    loops: float = _limit(4, "times that the same words stand in a row from which a text loops")
    overlap_s: float = _limit(0.1, "seconds that a segment shares with an earlier one, above which they overlap")
    min_image_side: float = _limit(28, "pixels of an image's shorter side below which it is tiny")
    min_class_samples: float = _limit(2, "samples of a class below which there is nothing to learn it from")
    class_ratio: float = _limit(
        20, "samples of the largest class over those of the smallest from which classes are uneven"
    )
    blank_range: float = _limit(8, "values of 255 between the darkest and the brightest pixel, below which it is blank")

    @property
    def pace(self) -> Pace:
        """Those of characters a second."""
        return Pace(
            max_per_s=self.max_chars_per_s,
            min_per_s=self.min_chars_per_s,
            min_s=self.min_rated_s,
            deviations=self.outlier_deviations,
            min_clips=self.outlier_min_clips,
        )

    def described(self, names: Sequence[str]) -> list[str]:
        """Returns a line for each of some limits: its name, its value, what it means."""
        said = {each.name: each.metadata["says"] for each in fields(self)}
        return [f"{name} = {getattr(self, name):g}: {said[name]}" for name in names]

    def changed(self, settings: Sequence[str]) -> Limits:
        """Returns the limits with each `NAME=VALUE` set. Raises ConfigError for what is no limit or no number."""
        known = [each.name for each in fields(self)]
        values: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in known:
                all_of_them = "; all of them: forebay lint --explain-checks"
                near = did_you_mean(name, known) or all_of_them
                raise ConfigError(f"--limit {setting}: no limit is called {name!r}{near}")
            try:
                values[name] = float(text)
            except ValueError as err:
                raise ConfigError(f"--limit {setting}: {text!r} is no number, wanted for example {name}=1") from err
        return replace(self, **values)


@dataclass(frozen=True, slots=True)
class Check:
    """A check. says: what a finding of it means. needs: what it cannot do without. limits: names of those it uses."""

    name: str
    severity: Severity
    needs: Need
    says: str
    limits: str = ""


CHECKS = (
    Check("silent", "error", "sound", "no piece of the clip is louder", "quiet_dbfs"),
    Check("mostly_silent", "warning", "sound", "most pieces of the clip are quiet", "quiet_dbfs quiet_share"),
    Check("clipping", "error", "sound", "much of the clip is at full scale", "full_scale badly_clipped_share"),
    Check(
        "some_clipping",
        "warning",
        "sound",
        "some of the clip is at full scale",
        "full_scale clipped_share badly_clipped_share",
    ),
    Check(
        "dc_offset",
        "warning",
        "sound",
        "the clip's mean is not zero: its recorder adds a constant, which is no sound",
        "dc_offset",
    ),
    Check("low_rate", "warning", "file", "the file has fewer samples a second than the config: the build upsamples it"),
    Check(
        "narrow_band",
        "info",
        "sound",
        "nothing is in the upper half of the band: the clip was upsampled, or is of a telephone",
        "band_db",
    ),
    Check(
        "wrong_rate",
        "error",
        "file",
        "stated over real seconds is the ratio of two sample rates: one of the two is of another rate",
        "rate_match",
    ),
    Check(
        "longer_than_stated",
        "warning",
        "file",
        "the clip has more audio than its manifest says, by more than source.duration_tolerance; a build keeps it",
    ),
    Check(
        "overlap",
        "info",
        "segments",
        "some of the segment is of an earlier segment of its recording and channel too: two texts are of one sound",
        "overlap_s",
    ),
    Check("duplicate", "warning", "content", "the same content and text as another sample"),
    Check(
        "contradiction",
        "error",
        "content",
        "the same recording or image as another sample, under another text or class: one of the two is wrong",
    ),
    Check("leak", "error", "content", "the same content as a sample of a set that is evaluated on, or of --against"),
    Check(
        "shared_image",
        "warning",
        "content",
        "an image of a set that is evaluated on, or of --against, under another conversation",
    ),
    Check(
        "too_many_chars",
        "error",
        "seconds",
        "more characters a second than anybody speaks: the text is of another clip, or the clip is cut",
        "max_chars_per_s",
    ),
    Check(
        "too_few_chars",
        "warning",
        "seconds",
        "few characters a second: the text is of a part of the clip",
        "min_chars_per_s min_rated_s",
    ),
    Check(
        "chars_outlier",
        "warning",
        "seconds",
        "characters a second far from those of the language",
        "outlier_deviations outlier_min_clips min_rated_s",
    ),
    Check(
        "wrong_script",
        "error",
        "text",
        "the letters are of a script that the language is not written in",
        "wrong_script_share min_letters",
    ),
    Check(
        "mixed_scripts",
        "warning",
        "text",
        "some letters are of a script that the language is not written in; without a language, of a second script",
        "mixed_script_share wrong_script_share min_letters",
    ),
    Check("mixed_word", "warning", "text", "a word mixes Latin, Cyrillic or Greek letters, which look alike"),
    Check("empty_text", "warning", "text", "the text is empty"),
    Check("repeated_text", "warning", "text", "many samples have this same text", "repeated_texts repeated_min_chars"),
    Check(
        "annotation_text",
        "warning",
        "seconds",
        "tabs, line ends, or mostly digits: an annotation tool wrote the text, and its times would be learnt",
        "max_digit_share",
    ),
    Check("looping_text", "warning", "text", "the same words stand in a row again and again", "loops"),
    Check(
        "cut_text",
        "warning",
        "length",
        "the text beside an image is longer than text.max_length, and its end is cut off",
    ),
    Check(
        "tiny_image", "warning", "sizes", "an image of few pixels, which the processor makes larger", "min_image_side"
    ),
    Check("blank_image", "warning", "pixels", "an image of one colour", "blank_range"),
    Check("single_class", "warning", "classes", "all samples have one class: there is nothing to tell apart"),
    Check("empty_class", "warning", "classes", "a class, or a folder of one, has no sample"),
    Check(
        "small_class",
        "warning",
        "classes",
        "a class has too few samples to be learnt, or to stand in training and test data",
        "min_class_samples",
    ),
    Check(
        "uneven_classes",
        "warning",
        "classes",
        "the largest class has many times the samples of the smallest",
        "class_ratio min_class_samples",
    ),
    Check("kills_decoder", "error", "sound", "decoding it ends the process"),
)
"""Those of a build itself come beside them, under the build's own reasons: `truncated_audio`, `header_mismatch`,
`duration_mismatch`, `corrupt_audio`, `unreadable_image`, `no_assistant_turn`, ... (errors); `empty_text`,
`label_too_long` (warnings)."""

BY_NAME = {check.name: check for check in CHECKS}


def check_lines(limits: Limits) -> Iterator[str]:
    """Yields what `forebay lint --explain-checks` prints."""
    for check in CHECKS:
        yield f"{check.name} ({check.severity}): {check.says}"
        yield from (f"    {line}" for line in limits.described(check.limits.split()))
    yield (
        "What a build leaves out as bad is an error under the build's own reason, for example truncated_audio, "
        "header_mismatch, duration_mismatch, corrupt_audio, unreadable_image, no_assistant_turn; label_too_long is a "
        "warning."
    )
