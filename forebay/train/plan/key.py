"""The name of a plan: which cache it plans, by which settings, in which version of the order."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from forebay.config import PlanConfig
from forebay.config.tree import PACK_FIELDS
from forebay.store.canonical import digest
from forebay.train.plan.batch_sizes import read_calibration
from forebay.train.plan.order import ORDER_VERSION

_ADDED = ("edges", "k", "batch_tokens", "calibration")
"""Settings that came later: at their default they stay out, so that plans of before keep their key."""
PACKER_VERSION = 1
"""Bumped when the same lengths and settings give other packs."""


def plan_document(cache_key: str, settings: PlanConfig) -> dict[str, Any]:
    """Returns everything that a plan depends on; it stands in the plan's metadata.json.

    A calibration file is in it by its content. Raises ConfigError where that cannot be read.
    """
    if settings.kind == "pack":
        names = ("kind", "tail", *PACK_FIELDS)
        return {
            "order_version": ORDER_VERSION,
            "packer_version": PACKER_VERSION,
            "cache_keys": [cache_key],
            "settings": {name: getattr(settings, name) for name in names},
        }
    described = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    # 3 and 3.0 seconds are one edge: an int in a TOML file must not make another plan.
    described["edges_s"] = [float(edge) for edge in settings.edges_s]
    if settings.batch_seconds is not None:
        described["batch_seconds"] = float(settings.batch_seconds)
    if settings.calibration is not None:
        described["calibration"] = read_calibration(settings.calibration)
    unused = {name for name in _ADDED if described[name] is None} | set(PACK_FIELDS)
    unused |= {"window"} if settings.kind == "bucket" else set()
    unused |= {"edges_s"} if settings.kind == "window" or settings.k is not None else set()
    unused |= {"locality"} if settings.locality == "global" else set()
    described = {name: value for name, value in described.items() if name not in unused}
    return {"order_version": ORDER_VERSION, "cache_keys": [cache_key], "settings": described}


def plan_key(cache_key: str, settings: PlanConfig) -> str:
    """Returns the sha256 of the plan's document, 64 hex digits; a loader's state carries it."""
    return digest(plan_document(cache_key, settings))
