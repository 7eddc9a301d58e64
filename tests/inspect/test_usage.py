"""`forebay inspect --usage FILE` on logs of real loaders over a cache, half an epoch and more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import cli
from forebay.config import BucketConfig
from forebay.errors import CacheCorruptError, ConfigError
from forebay.inspect.command import usage_facts
from forebay.inspect.plan_lines import usage_lines
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.plan_usage import read_usage, to_line
from forebay.store.cache import Cache, open_cache
from forebay.train.loop.usage_log import UsageLog
from tests.store_factory import make_cache
from tests.train.loaders import loader_of


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(make_cache(tmp_path / "caches", num_samples=18, rows_per_shard=3, features="waveform"))


def logged(cache: Cache, path: Path, *, steps: int, with_ids: bool = True) -> list[int]:
    """Makes the log of so many steps; returns the samples that they were given."""
    settings = BucketConfig(edges_s=(2.0,), batch_size=2, lockstep=1)
    plan = bucket_plan(cache.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    loader = loader_of(cache, plan, plan_key="p", seed=3, num_threads=0)
    log = UsageLog(path, loader, step=0, sum_over_ranks=list, with_ids=with_ids)
    batches = iter(loader)
    for step in range(1, steps + 1):
        next(batches)
        log.record(step)
    used: list[int] = np.concatenate(plan.order(3, 0).batches(range(steps))).tolist()
    return used


def never_used(facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = facts["never_used"]
    return found


def test_expected_stands_beside_actual_and_the_unused_is_listed(cache: Cache, tmp_path: Path) -> None:
    used = logged(cache, tmp_path / "u.jsonl", steps=4)
    facts = usage_facts(tmp_path / "u.jsonl")
    assert (facts["steps"], facts["samples"], facts["batches"], facts["repeats"]) == (4, 8, 4, 0)
    assert (facts["epoch"], facts["position"], facts["num_batches"], facts["seed"]) == (0, 4, 9, 3)
    languages = np.array([name or "unknown" for name in cache.samples["language"].to_pylist()])
    for name, row in facts["languages"].items():
        count = int((languages[used] == name).sum())
        assert row == {
            "samples": count,
            "share": count / 8,
            "expected": pytest.approx((languages == name).mean(), abs=1e-6),
            "there": int((languages == name).sum()),
        }
    unused = sorted({*range(18)} - {*used})
    assert never_used(facts)["samples"] == unused
    assert never_used(facts)["sample_ids"] == cache.samples["sample_id"].take(unused).to_pylist()
    counts = np.bincount(np.array(used) // 3, minlength=6)
    assert facts["shards"] == {
        "num": 6,
        "touched": int((counts > 0).sum()),
        "min_passes": counts.min() / 3,
        "max_passes": counts.max() / 3,
    }
    assert never_used(facts)["shards"] == np.flatnonzero(counts == 0).tolist()


def test_after_an_epoch_nothing_is_unused(cache: Cache, tmp_path: Path) -> None:
    logged(cache, tmp_path / "u.jsonl", steps=9)
    facts = usage_facts(tmp_path / "u.jsonl")
    assert not any(never_used(facts).values())
    assert (facts["epoch"], facts["position"]) == (1, 0)
    lines = list(usage_lines(facts))
    assert lines[-1] == "never used: nothing"
    assert "1.00 times the 18 there are" in lines[1]
    assert any(line.startswith("shards: 6 of 6 touched, each used 1.00 to 1.00 times") for line in lines)


def test_without_ids_the_report_says_how_to_get_them(cache: Cache, tmp_path: Path) -> None:
    logged(cache, tmp_path / "u.jsonl", steps=4, with_ids=False)
    facts = usage_facts(tmp_path / "u.jsonl")
    assert (never_used(facts)["samples"], never_used(facts)["sample_ids"]) == (None, None)
    assert list(usage_lines(facts))[-1] == "never used samples: not recorded; set train.usage_ids = true"


@pytest.mark.parametrize("fate", ["gone", "another"])
def test_without_its_cache_samples_are_named_by_number(cache: Cache, tmp_path: Path, fate: str) -> None:
    logged(cache, tmp_path / "u.jsonl", steps=4)
    shutil.rmtree(cache.folder)
    if fate == "another":
        other = make_cache(tmp_path / "others", num_samples=18, features="waveform", seed=1)
        shutil.move(other, cache.folder)
    facts = usage_facts(tmp_path / "u.jsonl")
    assert len(never_used(facts)["samples"]) == 10
    assert never_used(facts)["sample_ids"] is None
    assert str(never_used(facts)["samples"][0]) in list(usage_lines(facts))[-1]


def test_gaps_are_told(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    logged(cache, path, steps=4)
    head, lines = read_usage(path)
    path.write_bytes(b"".join(map(to_line, [{**head, "from_step": 5}, {**lines[0], "from_step": 7, "step": 9}])))
    facts = usage_facts(path)
    assert facts["gaps"] == [[0, 5], [5, 7]]
    assert "  nothing is recorded of steps 6 to 7" in list(usage_lines(facts))


def test_names_that_could_move_the_cursor_are_escaped(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    logged(cache, path, steps=4)
    path.write_bytes(path.read_bytes().replace(b'"unknown"', b'"\\u001b[2J"'))
    assert not any("\x1b" in line for line in usage_lines(usage_facts(path)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shards":', b'"shard":'),
        (b'"samples":8', b'"samples":"8"'),
        (b'"ids":"', b'"ids":"!'),
        (b'"num_samples":18', b'"num_samples":3'),
    ],
)
def test_a_damaged_log_is_named(cache: Cache, tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "u.jsonl"
    logged(cache, path, steps=1)
    content = path.read_bytes().replace(b'"samples":2,"batches"', b'"samples":8,"batches"')
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(CacheCorruptError, match=r"u\.jsonl does not hold a usage log"):
        usage_facts(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*u\.jsonl.*name a run's logs/data_usage\.jsonl"):
        usage_facts(tmp_path / "u.jsonl")


def test_the_command(cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "u.jsonl"
    logged(cache, path, steps=4)
    assert cli.main(["inspect", "--usage", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(usage_facts(path)))
    assert cli.main(["inspect", "--usage", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == list(usage_lines(usage_facts(path)))
    assert cli.main(["inspect", str(cache.folder), "--usage", str(path)]) == 2
    assert "is all that is looked at" in capsys.readouterr().err
    assert cli.main(["inspect"]) == 2
    assert "inspect needs a cache (a folder or URL) or a config, or --usage FILE" in capsys.readouterr().err
