"""Some samples of a source as a source: those that a filter leaves, and the first ones, of a union too."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.tree import FilterConfig
from forebay.errors import CacheError
from forebay.store.selection import Filter, Selection, filtered, first_samples
from forebay.store.source import SourceUnion, source_kind
from tests.store.table_source import TableSource
from tests.train.fake_source import FakeSource


def test_the_first_samples_are_the_sources_own() -> None:
    source = FakeSource([30, 20, 50, 40])
    found = first_samples(source, 3)
    assert len(found) == 3
    assert found.constants is source.constants
    assert found.key != source.key
    assert found.lengths["num_frames"].tolist() == [30, 20, 50]
    assert [found.sample_id(index) for index in (0, 2, -1)] == ["fake-0", "fake-2", "fake-2"]
    for name, value in source.read(2).items():
        np.testing.assert_array_equal(found.read(2)[name], value)
    assert found.slots is None
    assert found.categories("language") is None
    with pytest.raises(IndexError, match="sample 3 of 3 samples chosen of"):
        found.read(3)
    assert found.ids_digest() != first_samples(source, 2).ids_digest()


@pytest.mark.parametrize("count", [None, 4, 9])
def test_a_source_that_has_no_more_stays_itself(count: int | None) -> None:
    source = FakeSource([30, 20, 50, 40])
    assert first_samples(source, count) is source


def test_of_a_union_the_first_sources_come_first() -> None:
    sources = [FakeSource([30, 20], seed=1), FakeSource([50, 40], seed=2), FakeSource([10], seed=3)]
    union = SourceUnion(sources, ["a", "b", "c"])
    found = first_samples(union, 3)
    assert isinstance(found, SourceUnion)
    assert found.names == ["a", "b"]
    assert found.lengths["num_frames"].tolist() == [30, 20, 50]
    assert found.sources[0] is sources[0]
    assert isinstance(found.sources[1], Selection)


def test_values_of_a_column_are_those_of_the_samples() -> None:
    class Spoken(FakeSource):
        def categories(self, name: str) -> tuple[list[str], np.ndarray] | None:
            return ["de", "en", "fr"], np.array([2, 0, 2, 1], np.int32)

    found = first_samples(Spoken([1, 2, 3, 4]), 3).categories("language")
    assert found is not None
    assert found[0] == ["de", "fr"]
    assert found[1].tolist() == [1, 0, 1]


def test_what_is_read_of_a_selection_is_what_the_source_has_there() -> None:
    rows = [{"sample_id": f"clip-{n}", "language": "hi" if n % 3 else "ta"} for n in range(20)]
    source = TableSource(rows)
    found = filtered(source, Filter.of(FilterConfig(where="language == 'ta'")))
    assert found.places.tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert [int(found.read(index)["value"][0]) for index in range(len(found))] == found.places.tolist()
    assert int(found.read(-1)["value"][0]) == 18
    assert found.sample_id(2) == "clip-6"
    assert found.lengths["num_tokens"].tolist() == source.lengths["num_tokens"][found.places].tolist()
    assert found.slots is not None
    assert found.slots.tolist() == found.places.tolist()
    found_values = found.categories("language")
    assert found_values is not None
    assert (found_values[0], found_values[1].tolist()) == (["ta"], [0] * 7)
    assert found.table(["sample_id"])["sample_id"].to_pylist() == [f"clip-{n}" for n in found.places.tolist()]
    assert source_kind(found) == "cache"
    with pytest.raises(IndexError, match="sample 7 of 7 samples chosen of the source abab"):
        found.read(7)
    with pytest.raises(ValueError, match="read-only"):
        found.places[0] = 1


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_selection_of_a_selection_reads_the_source_itself(first: list[bool], second: list[bool]) -> None:
    source = TableSource([{"sample_id": f"{n}"} for n in range(len(first))])
    outer = Selection(source, np.flatnonzero(first), key="1" * 64, filter_key="a")
    inner = Selection(outer, np.flatnonzero(second[: len(outer)]), key="2" * 64, filter_key="b")
    wanted = [n for n, taken in zip(np.flatnonzero(first).tolist(), second, strict=False) if taken]
    assert inner.source is source
    assert inner.places.tolist() == wanted
    assert [inner.sample_id(i) for i in range(len(inner))] == [str(n) for n in wanted]
    assert inner.filter_key not in (None, "a", "b")
    again = pickle.loads(pickle.dumps(inner))  # noqa: S301  our own
    assert [again.sample_id(i) for i in range(len(again))] == [str(n) for n in wanted]
    assert (again.key, again.filter_key) == (inner.key, inner.filter_key)


def test_a_failure_names_the_sample_in_the_source() -> None:
    class Failing(TableSource):
        def read(self, index: int) -> dict[str, np.ndarray]:
            raise CacheError("it is damaged")

    found = Selection(Failing([{"sample_id": str(n)} for n in range(5)]), np.array([1, 4]), key="0", name="the cache")
    with pytest.raises(CacheError, match="it is damaged") as caught:
        found.read(1)
    assert caught.value.__notes__ == ["sample 4 of the cache"]


def test_a_union_is_selected_source_by_source() -> None:
    union = SourceUnion([FakeSource([3, 4], seed=1), FakeSource([5], seed=2)], ["a", "b"])
    with pytest.raises(TypeError, match="a selection is of one source"):
        Selection(union, np.array([0]), key="0")


def test_samples_ahead_are_those_of_the_source() -> None:
    class Watched(TableSource):
        asked: list[int] = []  # noqa: RUF012

        def will_need(self, indices: Iterable[int]) -> None:
            self.asked += indices

    source = Watched([{"sample_id": str(n)} for n in range(5)])
    Selection(source, np.array([1, 4]), key="0").will_need([1, 0])
    assert source.asked == [4, 1]
