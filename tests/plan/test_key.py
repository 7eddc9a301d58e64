from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from forebay.config import BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.config.plan import PackCosts
from forebay.errors import ConfigError
from forebay.plan.names import plan_document, plan_key

SETTINGS = BucketConfig(edges_s=(3.0, 5.0), batch_size=4)

CHANGES: dict[str, dict[str, Any]] = {
    "edges_s": {"edges_s": (3.0, 5.5)},
    "edges": {"edges": (16, 32)},
    "k": {"edges_s": BucketConfig(batch_size=4).edges_s, "k": 2},
    "batch_seconds": {"batch_size": None, "batch_seconds": 4.0},
    "batch_tokens": {"batch_size": None, "batch_tokens": 4},
    "batch_size": {"batch_size": (4, 4)},
    "lockstep": {"lockstep": 4},
    "tail": {"tail": "drop"},
    "locality": {"locality": "shards:4"},
    "by": {"by": ("duration", "tokens"), "edges": (16, 32)},
    "token_s": {"by": ("duration", "tokens"), "edges": (16, 32), "token_s": 0.08},
}

PACKS = PackConfig(seq_len=8192)

OF_PACKS: dict[str, Any] = {
    "seq_len": 4096,
    "max_patches": 32768,
    "buffer_size": 64,
    "algorithm": "best_fit_decreasing",
    "pack_seed": 1,
    "overlong": "error",
    "shapes": "fixed",
    "balance": "cost",
}
OF_BALANCE: dict[str, Any] = {"costs": PackCosts(token=1.0), "lockstep": 4}
"""Settings of packs that count only beside `balance`."""
CUTS: list[dict[str, Any]] = [
    {"overlong": "truncate"},
    {"overlong": "truncate", "truncate_side": "left"},
    {"overlong": "truncate", "truncate_side": "left", "repeat_system": True},
    {"overlong": "split"},
    {"overlong": "split", "repeat_system": True},
]


@pytest.mark.parametrize("field", CHANGES)
def test_every_setting_changes_the_key(field: str) -> None:
    assert plan_key("a" * 64, replace(SETTINGS, **CHANGES[field])) != plan_key("a" * 64, SETTINGS)


def test_every_change_is_another_key() -> None:
    keys = {plan_key("a" * 64, replace(SETTINGS, **change)) for change in CHANGES.values()}
    keys |= {plan_key("a" * 64, settings) for settings in (WindowConfig(batch_size=4), PACKS)}
    assert len(keys) == len(CHANGES) + 2
    names = {field.name for settings in (BucketConfig, WindowConfig, PackConfig) for field in fields(settings)}
    assert names == set(CHANGES) | {"kind", "window", "calibration", "max_frames"} | {
        *(*OF_PACKS, *OF_BALANCE),
        *("truncate_side", "repeat_system"),
    }


def test_the_document_holds_what_the_plan_depends_on() -> None:
    common = {"kind", "batch_size", "batch_seconds", "lockstep", "tail"}
    documents: dict[str, PlanConfig] = {
        "edges_s": SETTINGS,
        "k": BucketConfig(k=3, batch_size=4),
        "window": WindowConfig(batch_size=4),
    }
    for name, settings in documents.items():
        assert set(plan_document("a", settings)["settings"]) == common | {name}
    local = plan_document("a", replace(SETTINGS, locality="shards:3"))
    assert local["settings"]["locality"] == "shards:3"


def test_every_setting_of_packs_is_in_their_key_and_in_no_other() -> None:
    documents = [
        plan_document("a", replace(PACKS, **change)) for change in ({}, *({n: v} for n, v in OF_PACKS.items()))
    ]
    always = {"kind", "tail", *OF_PACKS} - {"shapes", "balance"}
    named = [*[always] * (len(OF_PACKS) - 1), always | {"shapes"}, always | {"balance", *OF_BALANCE}]
    assert [set(document["settings"]) for document in documents] == named
    balanced = replace(PACKS, balance="cost")
    others = {plan_key("a", replace(balanced, **{name: value})) for name, value in OF_BALANCE.items()}
    assert len(others | {plan_key("a", balanced), plan_key("a", PACKS)}) == 4
    keys = {plan_key("a", replace(PACKS, **{name: value})) for name, value in {**OF_PACKS, "tail": "drop"}.items()}
    assert len(keys | {plan_key("a", PACKS)}) == len(OF_PACKS) + 2
    assert not set(plan_document("a", SETTINGS)["settings"]) & set(OF_PACKS)
    assert len({plan_key("a", replace(PACKS, **cut)) for cut in CUTS} | keys) == len(OF_PACKS) + 1 + len(CUTS)


def test_the_key_of_packs_is_the_recorded_one() -> None:
    """`short`, the default once, keeps its key."""
    short = "cb4ca6909b80b1bd51782040b26302aa2673c8b0d2ba4e4e0ff526f36e51c341"
    assert plan_key("a" * 64, replace(PACKS, tail="short")) == short
    assert plan_key("a" * 64, PACKS) == "23ea08c503ce6c8cf6dfe77906e93d30f5f4a90346c2f399714976e83b2d9f57"


def test_the_window_is_in_the_key_of_windows_alone() -> None:
    window = WindowConfig(batch_size=4)
    assert plan_key("a", replace(window, window=16)) != plan_key("a", window)
    assert "window" not in plan_document("a", SETTINGS)["settings"]


def test_a_calibration_is_in_the_key_by_its_content(tmp_path: Path) -> None:
    def key(name: str, table: dict[str, Any]) -> str:
        (tmp_path / name).write_text(json.dumps(table))
        return plan_key("a", BucketConfig(edges_s=(3.0,), calibration=str(tmp_path / name)))

    first = key("a.json", {"0": {"batch_size": 4, "grad_acc": 1}})
    assert key("b.json", {"0": {"grad_acc": 1, "batch_size": 4}}) == first
    assert key("b.json", {"0": {"batch_size": 4, "measured_gib": 70.5}}) == first
    assert key("b.json", {"0": {"batch_size": 4, "grad_acc": 2}}) != first
    assert key("b.json", {"0": {"batch_size": 5, "grad_acc": 1}}) != first
    with pytest.raises(ConfigError, match=r"plan\.calibration: cannot read .*c\.json: No such file"):
        plan_key("a", BucketConfig(calibration=str(tmp_path / "c.json")))


def test_the_cache_is_in_the_key() -> None:
    assert plan_key("a", SETTINGS) != plan_key("b", SETTINGS)


def test_whole_seconds_are_one_plan_however_they_are_written() -> None:
    whole = BucketConfig(edges_s=(3, 5), batch_seconds=120)
    assert plan_key("a", whole) == plan_key("a", BucketConfig(edges_s=(3.0, 5.0), batch_seconds=120.0))


def test_the_key_is_the_recorded_one() -> None:
    """`short`, the default once, keeps its key."""
    short = "5bf6de087c2bff3cee0c6b45e724f31c2b2e18cab1c47eb183f922a188759627"
    assert plan_key("a" * 64, replace(SETTINGS, tail="short")) == short
    assert plan_key("a" * 64, SETTINGS) == "2487de16b026ef63c0c042b82b31b9faeca7df085c2181ea977d590943cb5bd3"
