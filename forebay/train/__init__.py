"""A cache to a step: select, uncached fallback, plan, order, loader, collate, loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.train.collate.expand import to_model_inputs
    from forebay.train.select import make_loader
    from forebay.train.vl_dataset import CachedVLDataset, build_vl_dataloader

__all__ = ["CachedVLDataset", "build_vl_dataloader", "make_loader", "to_model_inputs"]

_LAZY = {
    "make_loader": "forebay.train.select",
    "CachedVLDataset": "forebay.train.vl_dataset",
    "build_vl_dataloader": "forebay.train.vl_dataset",
    "to_model_inputs": "forebay.train.collate.expand",
}


def __getattr__(name: str) -> Any:
    # Not at import: torch takes a second to load, and `forebay.plan` needs none of it.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'forebay.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What is not loaded yet is listed too: completion and `dir` know nothing of `__getattr__`.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
