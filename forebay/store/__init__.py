"""Bytes on disk: the key of a cache and how it is found, its files, how it is opened, read and verified.

cache = forebay.store.open_cache("caches/prompts-train-9f2c1a7b")
sample = cache[0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.store.cache import Cache as Cache
    from forebay.store.cache import open_cache as open_cache
    from forebay.store.lookup import Lookup as Lookup
    from forebay.store.lookup import find_cache as find_cache
    from forebay.store.lookup import sealed_caches as sealed_caches
    from forebay.store.seal import VerifyReport as VerifyReport
    from forebay.store.seal import verify_folder as verify_folder
    from forebay.store.source import SampleSource as SampleSource
    from forebay.store.source import SourceUnion as SourceUnion

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "cache": "Cache open_cache",
        "lookup": "Lookup find_cache sealed_caches",
        "seal": "VerifyReport verify_folder",
        "source": "SampleSource SourceUnion",
    },
)
