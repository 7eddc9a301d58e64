"""Bytes on disk: the key of a cache and how it is found, its files, how it is opened, read and verified.

    cache = forebay.store.open_cache("caches/prompts-train-9f2c1a7b")
    sample = cache[0]

Names are imported when they are first used: importing this loads neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.store.cache import Cache, open_cache
    from forebay.store.lookup import Lookup, find_cache, sealed_caches
    from forebay.store.source import SampleSource
    from forebay.store.verify import VerifyReport, verify_folder

__all__ = [
    "Cache",
    "Lookup",
    "SampleSource",
    "VerifyReport",
    "find_cache",
    "open_cache",
    "sealed_caches",
    "verify_folder",
]

_ROOM = {
    "Cache": "cache",
    "Lookup": "lookup",
    "SampleSource": "source",
    "VerifyReport": "verify",
    "find_cache": "lookup",
    "open_cache": "cache",
    "sealed_caches": "lookup",
    "verify_folder": "verify",
}


def __getattr__(name: str) -> Any:
    if name in _ROOM:
        return getattr(importlib.import_module(f"{__name__}.{_ROOM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
