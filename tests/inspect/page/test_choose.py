"""Which samples a page shows, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.errors import ConfigError
from forebay.inspect.page.page_samples import (
    SHOWN,
    DoubtGroups,
    Doubts,
    PageColumns,
    by_ids,
    clipped_share,
    longest,
    spread,
    worst,
)
from forebay.store.cache import open_cache
from tests.store_factory import make_cache


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> PageColumns:
    return PageColumns(open_cache(make_cache(tmp_path_factory.mktemp("many"), num_samples=90, features="waveform")))


def test_all_of_few_samples_are_shown(tmp_path: Path) -> None:
    found = spread(PageColumns(open_cache(make_cache(tmp_path, num_samples=7))))
    assert [chosen.index for chosen in found] == list(range(7))


def test_a_spread_is_of_every_language_from_short_to_long_and_always_the_same(columns: PageColumns) -> None:
    found = [chosen.index for chosen in spread(columns)]
    assert len(found) == SHOWN
    assert found == sorted(set(found))
    assert found == [chosen.index for chosen in spread(columns)]
    names, codes = columns.languages
    assert np.bincount(codes[found], minlength=len(names)).tolist() == [8, 8, 8]
    lengths = columns.length[found]
    assert lengths.min() <= np.quantile(columns.length, 0.15)
    assert lengths.max() >= np.quantile(columns.length, 0.85)


def test_a_language_of_one_sample_is_shown(columns: PageColumns) -> None:
    few = PageColumns(columns.cache)
    codes = np.zeros(90, np.int32)
    codes[17] = 1
    few.__dict__["languages"] = (["en", "rare"], codes)
    assert 17 in [chosen.index for chosen in spread(few)]


def test_more_languages_than_places_show_the_largest(columns: PageColumns) -> None:
    few = PageColumns(columns.cache)
    few.__dict__["languages"] = ([str(i) for i in range(45)], np.repeat(np.arange(45), 2).astype(np.int32))
    assert len(spread(few)) == SHOWN


def test_the_longest_come_first(columns: PageColumns) -> None:
    found = [chosen.index for chosen in longest(columns)]
    assert found[0] == int(np.argmax(columns.length))
    assert columns.length[found].tolist() == sorted(columns.length, reverse=True)[:SHOWN]


def test_the_worst_of_each_way_come_in_turn(columns: PageColumns, monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.full(90, np.nan)
    z[[3, 4, 5]] = [9.0, -12.0, 3.0]
    padding = np.full(90, np.nan)
    padding[[4, 8]] = [0.6, 0.5]
    read = columns.cache.read

    def loud(index: int) -> dict[str, np.ndarray]:
        tensors = read(index)
        return {**tensors, "waveform": np.full(100, 32767, np.int16)} if index == 20 else tensors

    monkeypatch.setattr(columns.cache, "read", loud)
    none = DoubtGroups(num_groups=0, num_samples=0, shown=())
    checks = {4: "chars_outlier", 3: "chars_outlier"}
    doubts = Doubts(exact=none, near=none, z=z, misfits=np.array([4, 3]), checks=checks)
    found = worst(columns, doubts, padding=padding)
    assert [chosen.index for chosen in found] == [4, 20, 3, 8]
    assert "-12.0 deviations" in found[0].why
    assert "99.00 % of its waveform stands at full scale" in found[1].why
    assert "50 % of its row is padding" in found[3].why


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([0, 32767, 0, -32767], 0.0),
        ([32767, 32767, 0, 0], 0.25),
        ([-32768, -32768, -32768, 0], 0.5),
        ([5], 0.0),
        ([], 0.0),
    ],
)
def test_clipping_holds_a_waveform_at_full_scale(values: list[int], share: float) -> None:
    assert clipped_share(np.array(values, np.int16)) == share


def test_ids_come_from_the_command_line_or_a_file(columns: PageColumns, tmp_path: Path) -> None:
    assert [chosen.index for chosen in by_ids(columns, "clip-0004, clip-0001,clip-0004")] == [4, 1]
    path = tmp_path / "ids.txt"
    path.write_text("clip-0089\n\nclip-0000\n", encoding="utf-8")
    assert [chosen.index for chosen in by_ids(columns, str(path))] == [89, 0]


def test_ids_that_are_not_there_are_named(columns: PageColumns, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no sample 'nobody' and 1 more of the 3 named"):
        by_ids(columns, "clip-0001,nobody,neither")
    with pytest.raises(ConfigError, match="no ids in it"):
        by_ids(columns, " , ")
    with pytest.raises(ConfigError, match="names 201 samples, a report shows at most 200"):
        by_ids(columns, ",".join(f"clip-{i}" for i in range(201)))
    path = tmp_path / "bytes.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="line 1 is no UTF-8"):
        by_ids(columns, str(path))
