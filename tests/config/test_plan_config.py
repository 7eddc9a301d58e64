from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.config import PlanConfig, load_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 1, "batch_tokens": 3}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 1, "calibration": "c.json"}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_tokens": 0}, "batch_tokens is 0, wanted 1 or more"),
        ({"batch_size": 1, "k": 0}, "k is 0, wanted 1 or more"),
        ({"batch_size": 1, "window": 0}, "window is 0, wanted 1 or more"),
        ({"batch_size": 1, "k": 3, "edges_s": (1.0,)}, r"give one of edges_s and k, not \[1\.0\] and 3"),
        ({"batch_size": (1, 2), "k": 3}, "batch_size has 2 entries for 3 buckets"),
        ({"batch_size": 1, "locality": "local"}, r"locality is 'local', wanted \"global\" or \"shards:N\""),
        ({"batch_size": 1, "locality": "shards:0"}, "locality is 'shards:0', wanted"),
        ({"batch_size": 1, "locality": "shards:-4"}, "locality is 'shards:-4', wanted"),
        ({"batch_size": 1, "locality": "16"}, "locality is '16', wanted"),
        ({"kind": "window", "batch_size": (1, 2)}, r"batch_size is \[1, 2\], kind \"window\" has no buckets"),
        ({"kind": "window", "batch_size": 1, "k": 4}, 'k is only for kind = "bucket", not "window"'),
        ({"kind": "window", "batch_size": 1, "edges_s": (1.0,)}, 'edges_s is only for kind = "bucket", not "window"'),
        ({"kind": "window", "batch_tokens": 9}, 'batch_tokens is only for kind = "bucket", not "window"'),
        ({"kind": "window", "batch_size": 1, "locality": "shards:2"}, 'locality is only for kind = "bucket"'),
    ],
)
def test_impossible_plans_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanConfig(**settings)


def test_locality_is_a_number_of_shards() -> None:
    assert PlanConfig(batch_size=1).locality_shards is None
    assert PlanConfig(batch_size=1, locality="shards:16").locality_shards == 16


def test_a_calibration_is_relative_to_the_config(tmp_path: Path) -> None:
    text = 'name = "x"\n[source]\nkind = "tar"\nmanifest = "m"\n[plan]\ncalibration = "../c.json"\n'
    (tmp_path / "config.toml").write_text(text)
    config = load_config(tmp_path / "config.toml")
    assert config.plan is not None
    assert config.plan.calibration == str(tmp_path.parent / "c.json")
