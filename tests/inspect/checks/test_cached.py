"""A cache is linted by what it keeps, and what it cannot tell is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.inspect.checks.lint import LintOptions, LintReport, Target, lint
from tests.inspect.checks.planted import Planted, found, linted
from tests.preprocess.here_pool import build_here


@pytest.fixture
def faulty(planted: Planted) -> Planted:
    """Silence, a duplicate, a text of another script and a broken file among ten clips."""
    planted.keep(*list(planted.rows)[:10])
    planted.put("en_digits_oh", np.zeros_like(planted.samples("en_digits_oh")))
    planted.add("again", "fr_tt-monkeysintro")
    planted.rows["en_digits_17"]["transcript"] = "семнадцать"
    planted.data["ru_digits_16"] = b"no sound"
    return planted


EVERYTHING = {
    ("silent", "en_digits_oh"),
    ("duplicate", "again"),
    ("wrong_script", "en_digits_17"),
    ("unknown_format", "ru_digits_16"),
}


def of_cache(place: str, **options: object) -> LintReport:
    return lint([Target(place=place)], [], LintOptions(progress=False, **options))  # type: ignore[arg-type]


def test_a_cache_with_waveforms_tells_what_its_raw_data_does(faulty: Planted) -> None:
    config = faulty.config()
    assert found(linted(config)) == EVERYTHING
    report = of_cache(build_here(config).cache)
    assert found(report) == EVERYTHING
    assert report.sets[0].left_out.keys() == {"low_rate", "wrong_rate", "longer_than_stated"}


def test_a_cache_without_waveforms_names_what_it_cannot_tell(faulty: Planted) -> None:
    report = of_cache(build_here(faulty.config('audio.features="log_mel"')).cache)
    assert found(report) == EVERYTHING - {("silent", "en_digits_oh")}
    assert report.sets[0].left_out.keys() == {
        *("low_rate", "wrong_rate", "longer_than_stated"),
        *("silent", "mostly_silent", "clipping", "some_clipping", "narrow_band", "dc_offset", "kills_decoder"),
    }
    assert "audio.keep_waveform" in report.sets[0].left_out["silent"]


def test_a_config_takes_its_cache_where_that_keeps_the_recordings(faulty: Planted) -> None:
    config = faulty.config()
    build_here(config)
    assert [each.is_raw for each in linted(config).sets] == [False]
    assert [each.is_raw for each in linted(config, is_raw=True).sets] == [True]
    other = faulty.config('audio.features="log_mel"')
    build_here(other)
    assert [each.is_raw for each in linted(other).sets] == [True]


def test_a_config_takes_its_cache_where_the_raw_data_is_gone(faulty: Planted) -> None:
    config = faulty.config('audio.features="log_mel"')
    build_here(config)
    for name in ("train.tar", "train.parquet"):
        (Path(config.path).parent / name).unlink()
    report = linted(config)
    assert [each.is_raw for each in report.sets] == [False]
    assert ("duplicate", "again") in found(report)


def test_only_the_first_samples_are_looked_at(faulty: Planted) -> None:
    cache = build_here(faulty.config()).cache
    report = of_cache(cache, most=3)
    assert report.sets[0].num_samples == 3
    assert found(report) == {("silent", "en_digits_oh"), ("unknown_format", "ru_digits_16")}
