"""Bytes on disk: the key of a cache and how it is found, its files, how it is opened, read and verified.

cache = forebay.store.open_cache("caches/prompts-train-9f2c1a7b")
sample = cache[0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.store.cache import Cache, open_cache
    from forebay.store.lookup import Lookup, find_cache, sealed_caches
    from forebay.store.source import SampleSource, SourceUnion
    from forebay.store.verify import VerifyReport, verify_folder

__all__ = [
    "Cache",
    "Lookup",
    "SampleSource",
    "SourceUnion",
    "VerifyReport",
    "find_cache",
    "open_cache",
    "sealed_caches",
    "verify_folder",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Cache": "forebay.store.cache",
        "Lookup": "forebay.store.lookup",
        "SampleSource": "forebay.store.source",
        "SourceUnion": "forebay.store.source",
        "VerifyReport": "forebay.store.verify",
        "find_cache": "forebay.store.lookup",
        "open_cache": "forebay.store.cache",
        "sealed_caches": "forebay.store.lookup",
        "verify_folder": "forebay.store.verify",
    },
)
