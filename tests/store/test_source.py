"""Facts of any source of samples, and of a union of several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.store.cache import Cache, open_cache
from forebay.store.source import SourceUnion, source_kind
from tests.store_factory import make_cache
from tests.train.fake_source import FakeSource


@pytest.fixture
def caches(tmp_path: Path) -> list[Cache]:
    counts = {"small": 3, "large": 6}
    return [open_cache(make_cache(tmp_path / name, num_samples=count)) for name, count in counts.items()]


def test_a_source_that_says_no_more_has_defaults() -> None:
    source = FakeSource([200] * 3)
    assert (source.slots, source.tokenizer, source.categories("language")) == (None, None, None)
    source.will_need([0, 99])
    assert source_kind(source) == "uncached"


def test_a_union_lies_in_shards_if_all_its_sources_do(caches: list[Cache]) -> None:
    union = SourceUnion(caches, ["small", "large"])
    assert union.slots is not None
    assert (union.slots >> 32).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert source_kind(union) == "cache"
    mixed = SourceUnion([caches[0], FakeSource([200])], ["small", "made"], shares_batches=False)
    assert mixed.slots is None
    assert source_kind(mixed) == "uncached"


def test_a_union_has_the_tokenizer_and_the_categories_that_all_its_sources_have(caches: list[Cache]) -> None:
    union = SourceUnion(caches, ["small", "large"])
    assert union.tokenizer == caches[0].tokenizer == "0" * 64
    names, codes = union.categories("language") or ([], np.zeros(0))
    assert len(codes) == len(union)
    assert names == sorted(names)
    mixed = SourceUnion([caches[0], FakeSource([200])], ["small", "made"], shares_batches=False)
    assert (mixed.tokenizer, mixed.categories("language")) == (None, None)


def test_a_union_is_known_by_the_recipes_and_samples_of_its_sources_in_their_order(caches: list[Cache]) -> None:
    union, turned = SourceUnion(caches, ["a", "b"]), SourceUnion(caches[::-1], ["b", "a"])
    assert len({union.key, turned.key, *(cache.key for cache in caches)}) >= 3
    assert union.ids_digest() != turned.ids_digest()
    assert union.recipe_key not in {cache.recipe_key for cache in caches}
