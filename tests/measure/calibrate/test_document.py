"""The file of a calibration: whole after every change, read by plans, and not mistaken for another file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.config import BucketConfig
from forebay.errors import ConfigError
from forebay.measure.batch_search import bucket_cases
from forebay.measure.calibrate import _fill
from forebay.measure.calibrate_bench import Entries
from forebay.plan.bucket_plan import read_calibration
from forebay.plan.make import make_plan, samples_of
from forebay.plan.names import plan_key
from forebay.store.cache import open_cache
from tests.store_factory import make_cache

ENTRY = {"batch_size": 40, "grad_acc": 2, "peak_bytes": 10, "memory": {"weights": 3}, "made_by": "a"}


def test_entries_are_on_disk_at_once_in_the_order_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "calibrated_bs.json"
    entries = Entries.of(path)
    for name in ("b_3_5", "b_0_3"):
        entries.put(name, ENTRY, order=["b_0_3", "b_3_5"])
        assert json.loads(path.read_bytes())[name] == ENTRY
    assert list(json.loads(path.read_bytes())) == ["b_0_3", "b_3_5"]
    entries.drop("b_0_3")
    entries.drop("b_0_3")
    assert list(json.loads(path.read_bytes())) == ["b_3_5"]
    assert Entries.of(path).entries == {"b_3_5": ENTRY}


def test_an_entry_is_kept_where_the_same_facts_made_it(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "c.json", {"b_0_3": ENTRY, "b_3_5": {"batch_size": 1}})
    assert entries.kept("b_0_3", "a") == ENTRY
    assert entries.kept("b_0_3", "b") is None
    assert entries.kept("b_3_5", "a") is None
    assert entries.kept("b_5_7", "a") is None
    assert entries.foreign({"b_0_3": "a", "b_3_5": "a", "b_5_7": "a"}) == ["b_3_5"]


def test_plans_read_sizes_alone_so_what_was_measured_is_in_no_key(tmp_path: Path) -> None:
    keys = []
    for number, peak in enumerate((10, 20)):
        entries = Entries.of(tmp_path / f"{number}.json")
        entries.put("b_0_3", {**ENTRY, "peak_bytes": peak}, order=["b_0_3"])
        assert read_calibration(str(entries.path)) == {"b_0_3": {"batch_size": 40, "grad_acc": 2}}
        keys.append(plan_key("a", BucketConfig(edges_s=(3.0,), calibration=str(entries.path))))
    assert keys[0] == keys[1]


def test_cells_are_cases_and_an_empty_one_takes_no_entry_of_fewer_tokens(tmp_path: Path) -> None:
    ids = [[1] * length for length in (4, 30, 4)]
    cache = open_cache(make_cache(tmp_path, num_samples=9, input_ids=ids))
    settings = BucketConfig(by=("duration", "tokens"), edges_s=(0.01, 5.0, 9.0), edges=(8, 40), batch_seconds=9.0)
    cases = bucket_cases(cache, settings)
    full = cases["b_0.01_5_t40"]
    assert full is not None
    assert [name for name, case in cases.items() if case] == ["b_0.01_5_t8", "b_0.01_5_t40"]
    assert (full.tokens, full.seconds) == (30, max(cache.lengths["num_audio_samples"][1::3]) / 16_000)
    entries = Entries.of(tmp_path / "c.json")
    for size, name in ((7, "b_0.01_5_t8"), (3, "b_0.01_5_t40")):
        entries.put(name, {"batch_size": size, "grad_acc": 1}, order=list(cases))
    _fill(entries, cases)
    assert [entries.entries[name]["batch_size"] for name in cases] == [7, 3, 7, 3, 1, 1]
    settings = replace(settings, batch_seconds=None, calibration=str(entries.path))
    assert make_plan(samples_of(cache), settings).batch_sizes.tolist() == [7, 3, 7, 3, 1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"--out: .*c\.json is there and is not JSON: .*; name another file"),
        ("[]", r"--out: .*c\.json is there and is no calibration; name another file"),
        ('{"b_0_3": 3}', r"--out: .*c\.json is there and is no calibration; name another file"),
    ],
)
def test_a_file_that_is_no_calibration_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Entries.of(path)
    assert path.read_text(encoding="utf-8") == content
