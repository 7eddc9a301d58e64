"""The tokens that each sample of a cache learns, without its items: packs are balanced by them."""

from __future__ import annotations

import numpy as np

from forebay.store.cache import Cache
from forebay.store.cut_samples import CutSamples
from forebay.store.layout import TEXT, Array, Ints
from forebay.store.selection import origin
from forebay.store.source import SampleSource, length_of

_MASK = "label_mask"


def learnt_tokens(source: SampleSource) -> Array:
    """Returns how many tokens each sample learns, integers [num_samples]; all of its tokens where no mask is stored.

    source: a cache, or some samples of one. Reads one column of every text shard, and checks it.
    """
    base, places = origin(source)
    if not isinstance(base, Cache) or _MASK not in base.fields:
        return length_of(source, "num_tokens")
    found: Ints = np.zeros(len(base), np.int64)
    for shard, samples, rows in base.by_shard():
        values, offsets = base.shard(TEXT, shard).column(_MASK)
        sums = np.concatenate(([0], np.cumsum(values != 0)))[offsets]
        found[samples] = np.diff(sums)[rows]
    if isinstance(source, CutSamples):
        return source.learnt(found)
    return found if places is None else found[places]
