from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config import BucketConfig, Config, WindowConfig
from forebay.config.plan import KINDS
from forebay.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 1, "batch_tokens": 3}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 1, "calibration": "c.json"}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_tokens": 0}, "batch_tokens is 0, wanted 1 or more"),
        ({"batch_size": 1, "k": 0}, "k is 0, wanted 1 or more"),
        ({"batch_size": 1, "k": 3, "edges_s": (1.0,)}, r"give one of edges_s and k, not \[1\.0\] and 3"),
        ({"batch_size": (1, 2), "k": 3}, "batch_size has 2 entries for 3 buckets"),
        ({"batch_size": 1, "locality": "local"}, r"locality is 'local', wanted \"global\", \"auto\" or \"shards:N\""),
        ({"batch_size": 1, "locality": "shards:0"}, "locality is 'shards:0', wanted"),
        ({"batch_size": 1, "locality": "shards:-4"}, "locality is 'shards:-4', wanted"),
        ({"batch_size": 1, "locality": "16"}, "locality is '16', wanted"),
    ],
)
def test_impossible_plans_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 1, "batch_seconds": 1.0}, "give exactly one of batch_seconds and batch_size"),
        ({"batch_size": 0}, "batch_size is 0, wanted 1 or more"),
        ({"batch_seconds": 0.0}, "batch_seconds is 0.0, wanted more than 0"),
        ({"batch_size": 1, "window": 0}, "window is 0, wanted 1 or more"),
        ({"batch_size": 1, "lockstep": 0}, "lockstep is 0, wanted 1 or more"),
    ],
)
def test_impossible_windows_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowConfig(**settings)


LEAST = {"bucket": {"batch_size": 1}, "window": {"batch_size": 1}, "pack": {"seq_len": 8}}
FIELDS = {kind: {field.name for field in fields(settings)} for kind, settings in KINDS.items()}
MISPLACED = [(kind, name) for kind in KINDS for name in sorted(set().union(*FIELDS.values()) - FIELDS[kind])]


def planned(document: dict[str, Any]) -> Config:
    return load_config({"name": "x", "source": {"kind": "tar", "manifest": "m"}, "plan": document})


@pytest.mark.parametrize(("kind", "name"), MISPLACED)
def test_a_setting_of_another_kind_is_refused_and_the_kind_is_named(kind: str, name: str) -> None:
    owners = " or ".join(f'"{other}"' for other in KINDS if name in FIELDS[other])
    with pytest.raises(ConfigError, match=f'\\n  plan.{name}: only for kind = {owners}, not "{kind}"$'):
        planned({"kind": kind, **LEAST[kind], name: 1})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kind": "pack"}, "plan.seq_len: missing; for example seq_len = 8192"),
        ({"kind": "packs"}, "plan.kind: Input should be one of 'bucket', 'window', 'pack', got 'packs'"),
        ({"kind": 3}, "plan.kind: Input should be one of 'bucket', 'window', 'pack', got '3'"),
        ({"kind": "window", "batch_size": [1, 2]}, r"plan.batch_size: Input should be a valid integer, got \[1, 2\]"),
        ({"kind": "window", "batch_sizes": 2}, "plan.batch_sizes: unknown field; did you mean plan.batch_size?"),
        ({"bucket": 2, "batch_size": 1}, "plan.bucket: unknown field"),
    ],
)
def test_what_no_kind_of_plan_takes_is_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(document)


def test_a_plan_without_a_kind_is_one_of_buckets() -> None:
    assert (
        planned({"batch_size": 2}).plan
        == planned({"kind": "bucket", "batch_size": 2}).plan
        == BucketConfig(batch_size=2)
    )


def test_locality_is_a_number_of_shards() -> None:
    assert BucketConfig(batch_size=1).locality_shards is None
    assert BucketConfig(batch_size=1, locality="auto").locality_shards is None
    assert BucketConfig(batch_size=1, locality="shards:16").locality_shards == 16


def test_a_calibration_is_relative_to_the_config(tmp_path: Path) -> None:
    text = 'name = "x"\n[source]\nkind = "tar"\nmanifest = "m"\n[plan]\ncalibration = "../c.json"\n'
    (tmp_path / "config.toml").write_text(text)
    config = load_config(tmp_path / "config.toml")
    assert isinstance(config.plan, BucketConfig)
    assert config.plan.calibration == str(tmp_path.parent / "c.json")
