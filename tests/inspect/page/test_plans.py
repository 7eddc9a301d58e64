"""Plans on a page: that of the config first, some of it drawn to scale, whatever a folder holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from forebay.config.plan import BucketConfig, PlanConfig, WindowConfig
from forebay.config.tree import Config, FilterConfig
from forebay.inspect.page.page_samples import PageColumns
from forebay.inspect.page.plan_history import PlanView, views_of
from forebay.inspect.page.words import chart
from forebay.plan.make import plan_of
from forebay.store.cache import open_cache
from forebay.store.metadata import checksum
from forebay.store.selection import Filter, filtered
from tests.inspect.conftest import Built
from tests.inspect.page.html import read_page
from tests.preprocess.corpus import speech_corpus
from tests.store_factory import make_cache


def config_of(root: Path, plan: PlanConfig) -> Config:
    """A config whose plan is this one; nothing else of it is asked for."""
    root.mkdir(exist_ok=True)
    corpus = speech_corpus(root)
    return dataclasses.replace(corpus.config(f"run.cache_root={root / 'caches'}"), plan=plan)


@pytest.fixture
def columns(tmp_path: Path) -> PageColumns:
    return PageColumns(open_cache(make_cache(tmp_path / "caches", num_samples=40)))


BUCKETS = BucketConfig(edges_s=(0.5, 1.0, 2.0), batch_size=4, lockstep=1)


def test_a_plan_that_is_not_kept_is_made_and_leaves_nothing(tmp_path: Path, columns: PageColumns) -> None:
    config = config_of(tmp_path / "raw", BUCKETS)
    before = sorted(tmp_path.rglob("*"))
    (view,) = views_of(columns, config, roots=[tmp_path / "caches"])
    assert sorted(tmp_path.rglob("*")) == before
    assert (view.is_wanted, view.is_kept) == (True, False)
    assert view.facts["num_batches"] == sum(bucket["batches"] for bucket in view.facts["statistics"]["buckets"])
    assert view.padding is not None
    assert not np.isnan(view.padding).any()
    seconds = columns.seconds
    assert seconds is not None
    low = (seconds < 0.5) * seconds
    assert view.padding[int(np.argmax(low))] == 0
    for drawn in view.drawn:
        lengths = [segment.length for row in drawn.rows for segment in row]
        assert lengths == sorted(lengths, reverse=True)
        assert drawn.room == lengths[0]


def test_a_kept_plan_of_the_config_comes_first(tmp_path: Path, columns: PageColumns) -> None:
    config = config_of(tmp_path / "raw", BUCKETS)
    other = dataclasses.replace(config, plan=WindowConfig(batch_size=4))
    root = columns.cache.folder.parent
    for plan in (config, other):
        moved = dataclasses.replace(plan, run=dataclasses.replace(plan.run, cache_root=str(root)))
        plan_of(moved, columns.cache)
    found = views_of(columns, config, roots=[root])
    assert [(view.is_wanted, view.is_kept, view.facts["kind"]) for view in found] == [
        (True, True, "bucket"),
        (False, True, "window"),
    ]
    assert found[1].drawn == ()
    assert [view.is_wanted for view in views_of(columns, None, roots=[root])] == [False, False]


def test_the_plan_of_a_filter_is_of_the_samples_that_it_leaves(tmp_path: Path, columns: PageColumns) -> None:
    config = dataclasses.replace(config_of(tmp_path / "raw", BUCKETS), filter=FilterConfig(where="duration_s < 0.9"))
    seconds = columns.seconds
    assert seconds is not None
    root = columns.cache.folder.parent
    (made,) = views_of(columns, config, roots=[root])
    for folder in (None, root):
        if folder is not None:
            moved = dataclasses.replace(config, run=dataclasses.replace(config.run, cache_root=str(root)))
            plan_of(moved, filtered(columns.cache, Filter.of(config.filter)))
        (view,) = views_of(columns, config, roots=[root])
        assert (view.is_wanted, view.is_kept) == (True, folder is not None)
        assert view.padding is not None
        assert np.array_equal(~np.isnan(view.padding), seconds < 0.9)
        assert np.array_equal(view.padding, made.padding, equal_nan=True)  # type: ignore[arg-type]
        shown = [segment for drawn in view.drawn for row in drawn.rows for segment in row]
        assert all(segment.length == seconds[segment.index] < 0.9 for segment in shown)
    (alone,) = views_of(columns, None, roots=[root])
    assert (alone.is_wanted, alone.is_kept, alone.drawn, alone.padding) == (False, True, (), None)


def test_packs_are_drawn_from_the_emptiest_with_their_images(photos: Built) -> None:
    columns = PageColumns(open_cache(photos.folder))
    (view,) = views_of(columns, None, roots=[photos.folder.parent])
    assert view.fills is not None
    used = [sum(segment.length for segment in pack.rows[0]) for pack in view.drawn]
    assert used == sorted(used)
    image_id = columns.cache.constants["image_token_id"]
    for pack in view.drawn:
        for segment in pack.rows[0]:
            ids = columns.cache.read(segment.index)["input_ids"]
            assert segment.length == len(ids)
            assert sum(end - start for start, end in segment.images) == np.count_nonzero(ids == image_id)
            assert all((ids[start:end] == image_id).all() for start, end in segment.images)
    page = read_page(chart("packs", view.drawn))
    assert page.odd == []
    widths = [float(element["width"].rstrip("%")) for element in page.elements("rect")]
    assert max(widths) <= 100
    assert f"{len(view.drawn)} packs drawn to scale" in page.elements("svg")[0]["aria-label"]


def test_a_plan_of_other_samples_is_left_out_with_a_word(
    tmp_path: Path, columns: PageColumns, caplog: pytest.LogCaptureFixture
) -> None:
    root = columns.cache.folder.parent
    config = config_of(tmp_path / "raw", BUCKETS)
    moved = dataclasses.replace(config, run=dataclasses.replace(config.run, cache_root=str(root)))
    folder = plan_of(moved, columns.cache).folder
    assert folder is not None
    members = np.load(folder / "members.npy")
    members[3] = 4_000
    _replace(folder, "members", members)
    assert views_of(columns, None, roots=[root]) == []
    assert "its members are no samples of a cache with 40" in caplog.text


def _replace(folder: Path, name: str, array: np.ndarray) -> None:
    """Puts another array into a plan, signed as if it had always been there."""
    import xxhash

    np.save(folder / f"{name}.npy", array)
    document = json.loads((folder / "metadata.json").read_bytes())
    data = (folder / f"{name}.npy").read_bytes()
    document["arrays"][name] |= {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    document["checksum"] = checksum(document)
    (folder / "metadata.json").write_text(json.dumps(document), encoding="ascii")


def test_a_config_without_a_plan_shows_none(tmp_path: Path, columns: PageColumns) -> None:
    config = dataclasses.replace(config_of(tmp_path / "raw", BUCKETS), plan=None)
    assert views_of(columns, config, roots=[tmp_path / "caches"]) == []


@pytest.mark.parametrize(
    ("edges", "counts"), [([0, 1], [0]), ([0.0, 2.5, 5.0, 31.1], [3, 0, 1]), (list(range(0, 180, 10)), [1] * 17)]
)
def test_a_histogram_has_a_bar_for_each_bin_that_holds_something(edges: list[float], counts: list[int]) -> None:
    page = read_page(chart("histogram", edges, counts, "s", "samples"))
    assert page.odd == []
    assert len(page.elements("rect")) == sum(count > 0 for count in counts)
    assert len(page.elements("text")) <= 8
    assert f"{sum(counts):,} in all" in page.elements("svg")[0]["aria-label"]


def test_fills_are_counted_whole() -> None:
    view = PlanView(facts={}, is_wanted=False, is_kept=False, fills=np.array([0.42, 0.97, 1.0, 1.0]))
    edges, counts = view.fill_counts
    assert (edges[0], edges[-1], sum(counts)) == (40, 100, 4)
    assert PlanView(facts={}, is_wanted=False, is_kept=False).fills is None
