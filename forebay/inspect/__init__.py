"""Read-only reports on what is on disk: a cache, one of its samples, a plan, and what a run has used.

    forebay.inspect.show(Path("caches/prompts-train-9f2c1a7b"), forebay.inspect.InspectOptions(sample="0"))

Names are imported when they are first used: importing this loads neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.inspect.command import InspectOptions, show
    from forebay.inspect.facts import cache_facts
    from forebay.inspect.sample import ImageSample, Sample, read_sample

__all__ = ["ImageSample", "InspectOptions", "Sample", "cache_facts", "read_sample", "show"]

_ROOM = {
    "ImageSample": "sample",
    "InspectOptions": "command",
    "Sample": "sample",
    "cache_facts": "facts",
    "read_sample": "sample",
    "show": "command",
}


def __getattr__(name: str) -> Any:
    if name in _ROOM:
        return getattr(importlib.import_module(f"{__name__}.{_ROOM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
