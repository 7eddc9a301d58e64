"""Samples made on the fly by the very steps of a build: the fallback where there is no cache, bit for bit the same values.

The only part of this room that reaches `preprocess`.
"""

from forebay.train.uncached.speech import UncachedSource
from forebay.train.uncached.vision import UncachedVisionSource

__all__ = ["UncachedSource", "UncachedVisionSource"]
