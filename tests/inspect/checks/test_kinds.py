"""Sets that lint reads: texts alone, given features, clips that kill their decoder, filtered sets, a mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.errors import CacheError
from forebay.inspect.checks.lint import LintOptions, Target, lint
from forebay.preprocess.pool import Pool
from forebay.steps.recipe import load_config
from tests.given_features import given_config, save
from tests.inspect.checks.planted import Planted, found, linted
from tests.preprocess.here_pool import build_here
from tests.text_corpus import demo_texts, text_config

OF_SOUND = {
    *("silent", "mostly_silent", "clipping", "some_clipping", "narrow_band", "dc_offset", "low_rate", "wrong_rate"),
    *("longer_than_stated", "too_many_chars", "too_few_chars", "chars_outlier", "kills_decoder", "annotation_text"),
}


@pytest.mark.parametrize("is_cached", [False, True])
def test_texts_alone_have_the_checks_of_texts(tmp_path: Path, is_cached: bool) -> None:  # noqa: FBT001
    rows = demo_texts()
    assert found(linted(text_config(tmp_path, rows=rows))) == set()
    rows.append({**rows[3], "id": "again"})
    rows.append({"id": "other", "text": "семнадцать человек", "language": "en"})
    rows.append({"id": "loop", "text": "la la la la la la", "language": "fr"})
    rows.append({"id": "none", "text": " ", "language": "fr"})
    config = text_config(tmp_path, rows=rows)
    wanted = {("duplicate", "again"), ("wrong_script", "other"), ("looping_text", "loop")}
    if is_cached:
        build_here(config, rebuild=True)
    report = linted(config)
    assert [each.is_raw for each in report.sets] == [not is_cached]
    assert found(report) == wanted | (set() if is_cached else {("empty_text", "none")})
    assert report.sets[0].left_out.keys() == OF_SOUND


@pytest.mark.wide
def test_a_clip_that_kills_its_decoder_is_a_finding(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.keep(*list(planted.rows)[:6])
    planted.put("en_digits_oh", np.zeros_like(planted.samples("en_digits_oh")))
    monkeypatch.setattr("forebay.inspect.checks.measured.Pool", Pool)
    monkeypatch.setenv("FOREBAY_TEST_CRASH_ON", "3")
    folder = Path(__file__).parents[2] / "preprocess" / "crashing_decoder"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    planted.add("a6", "fr_digits_50")
    report = linted(planted.config("run.num_workers=1"))
    assert found(report) == {("silent", "en_digits_oh"), ("kills_decoder", "a6")}


def test_what_a_filter_leaves_out_has_no_findings_and_no_twins(planted: Planted, tmp_path: Path) -> None:
    planted.keep(*list(planted.rows)[:6])
    planted.put("en_digits_oh", np.zeros_like(planted.samples("en_digits_oh")))
    planted.add("again", "fr_digits_50")
    path = tmp_path / "drop.txt"
    config = planted.config()
    report = linted(config, drop_ids=path, severity="warning")
    assert path.read_text().split() == ["en_digits_oh", "again"]
    clean = load_config(config.path, overrides=[f'filter.drop_ids="{path}"', 'filter.where="duration_s > 0"'])
    for is_raw in (True, False):
        report = linted(clean, is_raw=is_raw)
        assert found(report) == set()
        assert "[filter] leaves out 2 of 7 samples, which have no findings" in report.sets[0].notes
        assert any("where" in note for note in report.sets[0].notes) == is_raw
        build_here(config)
    path.write_text("fr_digits_50\n")
    assert found(linted(clean, is_raw=True)) == {("silent", "en_digits_oh")}


def test_a_mixture_s_sources_are_named(planted: Planted) -> None:
    planted.keep("en_digits_oh", "es_digits_day-1")
    path = Path(planted.config().path)
    path.write_text(f'{path.read_text()}[[mixture.source]]\nconfig = "config.toml"\n')
    report = linted(load_config(path))
    assert [note for note in report.notes if "[mixture]" in note]


def test_features_that_are_given_have_no_checks_of_sound(tmp_path: Path) -> None:
    features = np.random.default_rng(0).standard_normal((3, 80, 3000)).astype(np.float32)
    features[2] = np.nan
    save(tmp_path / "set", [*features, features[0]], None, text=["one two", "three four", "five six", "seven"])
    report = linted(given_config(tmp_path, has_labels=False))
    assert {each.check for each in report.findings} == {"not_finite", "contradiction"}
    assert len(report.findings) == 3
    assert report.sets[0].left_out.keys() == OF_SOUND


def test_a_set_without_a_sample_has_no_findings(planted: Planted, tmp_path: Path) -> None:
    planted.keep("en_digits_oh")
    config = planted.config('source.languages=["hi"]')
    report = linted(config, drop_ids=tmp_path / "drop.txt")
    assert found(report) == set()
    assert report.sets[0].excluded == {"language": 1}
    assert found(linted(planted.config(), against=(config,))) == set()
    assert found(linted(config, against=(planted.config(),))) == set()


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"metadata\.json"):
        lint([Target(place=str(tmp_path))], [], LintOptions(progress=False))
