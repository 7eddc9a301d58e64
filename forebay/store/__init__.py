"""Bytes on disk: key and lookup, layout, shard writer and reader, cache, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.store.cache import Cache, open_cache
    from forebay.store.lookup import find_cache
    from forebay.store.source import SampleSource, SourceUnion
    from forebay.store.verify import VerifyReport, verify_folder

__all__ = ["Cache", "SampleSource", "SourceUnion", "VerifyReport", "find_cache", "open_cache", "verify_folder"]

__getattr__, __dir__ = face(
    __name__,
    {
        "Cache": "forebay.store.cache",
        "SampleSource": "forebay.store.source",
        "SourceUnion": "forebay.store.source",
        "VerifyReport": "forebay.store.verify",
        "find_cache": "forebay.store.lookup",
        "open_cache": "forebay.store.cache",
        "verify_folder": "forebay.store.verify",
    },
)
