"""The first samples of a source, of a union too."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.store.selection import Selection, first_samples
from forebay.store.source import SourceUnion
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
