from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from forebay.config import PlanConfig
from forebay.train.plan import plan_document, plan_key

SETTINGS = PlanConfig(edges_s=(3.0, 5.0), batch_size=4)
CHANGES: dict[str, dict[str, Any]] = {
    "edges_s": {"edges_s": (3.0, 5.5)},
    "batch_seconds": {"batch_size": None, "batch_seconds": 4.0},
    "batch_size": {"batch_size": (4, 4)},
    "lockstep": {"lockstep": 4},
    "tail": {"tail": "drop"},
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_setting_changes_the_key(field: str) -> None:
    assert plan_key("a" * 64, replace(SETTINGS, **CHANGES[field])) != plan_key("a" * 64, SETTINGS)


def test_every_setting_is_in_the_document() -> None:
    names = {field.name for field in fields(PlanConfig)}
    assert set(plan_document("a", SETTINGS)["settings"]) == names
    assert names - {"kind"} <= set(CHANGES)


def test_the_cache_is_in_the_key() -> None:
    assert plan_key("a", SETTINGS) != plan_key("b", SETTINGS)


def test_whole_seconds_are_one_plan_however_they_are_written() -> None:
    whole = PlanConfig(edges_s=(3, 5), batch_seconds=120)
    assert plan_key("a", whole) == plan_key("a", PlanConfig(edges_s=(3.0, 5.0), batch_seconds=120.0))


def test_the_key_is_the_recorded_one() -> None:
    assert plan_key("a" * 64, SETTINGS) == "5bf6de087c2bff3cee0c6b45e724f31c2b2e18cab1c47eb183f922a188759627"
