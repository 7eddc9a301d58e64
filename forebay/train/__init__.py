"""A cache to a step: select, uncached fallback, plan, order, loader, collate, loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.train.select import make_loader

__all__ = ["make_loader"]


def __getattr__(name: str) -> Any:
    # Not at import: torch takes a second to load, and `forebay.train.plan` needs none of it.
    if name == "make_loader":
        from forebay.train.select import make_loader

        return make_loader
    raise AttributeError(f"module 'forebay.train' has no attribute {name!r}")
