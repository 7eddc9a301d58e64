"""Groups of a cache are cut, made and linked without the others; items are stored once a source file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import Config
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.preprocess.merge import merge, subset
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import ROW_BITS
from forebay.store.seal import verify_folder
from tests.preprocess.here_pool import build_here
from tests.preprocess.many.oracle import held
from tests.preprocess.vision.corpus import PhotoCorpus


@pytest.fixture
def corpus(tmp_path: Path) -> PhotoCorpus:
    """Three photos with six questions each, asked in turn: five shards of texts, one of images."""
    corpus = PhotoCorpus(tmp_path)
    for number in range(3):
        corpus.add_photo(f"p{number}.jpg", seed=number)
    for turn in range(6):
        for number in (2, 0, 1):
            corpus.ask(f"q{number}-{turn}", f"p{number}.jpg")
    return corpus


def built(config: Config) -> Cache:
    return open_cache(build_here(config).cache)


def inodes(cache: Cache, group: str) -> list[int]:
    return [os.stat(path).st_ino for path, _ in cache.shard_entries(group)]


def cuts_of(config: Config, probe: dict[str, str]) -> dict[str, list[tuple[int, int, str]]]:
    groups = Groups.of(config, recipe_of(config))
    manifest = listed(config, groups)
    from forebay.preprocess.groups import Listing

    found: dict[str, list[tuple[int, int, str]]] = {}
    listing = Listing(groups=groups, manifest=manifest, key="")
    for cut in groups.cuts(listing, probe=probe, rows_per_shard=4):
        found.setdefault(cut.group, []).append((cut.start, cut.stop, cut.key))
    return found


def test_several_rows_and_shards_name_one_item_in_order_of_first_mention(corpus: PhotoCorpus) -> None:
    cache = built(corpus.config())
    assert (cache.num_shards, cache.unit_count("image")) == (5, 1)
    assert cache.metadata["num_images"] == cache.shard("image", 0).entry.rows == 3
    items = cache.items("image")
    assert items.slots.tolist()[:1] == [0]
    first = list(dict.fromkeys(items.slots.tolist()))
    assert first == [0, 1, 2]  # as they are mentioned first
    shards = cache.slots >> ROW_BITS
    assert any(len(np.unique(shards[items.slots == slot])) > 1 for slot in first)
    ids: Any = cache.samples["sample_id"].to_pylist()
    for slot in first:
        assert {ids[n].partition("-")[0] for n in np.flatnonzero(items.slots == slot).tolist()} == {
            ids[int(np.argmax(items.slots == slot))].partition("-")[0]
        }


def test_no_cut_depends_on_the_settings_of_another_group(corpus: PhotoCorpus) -> None:
    config, probe = corpus.config(), {"image": "a", "text": "b"}
    before = cuts_of(config, probe)
    other = cuts_of(config, {**probe, "text": "c"})
    assert other["image"] == before["image"]
    assert [cut[:2] for cut in other["text"]] == [cut[:2] for cut in before["text"]]
    assert {cut[2] for cut in other["text"]}.isdisjoint(cut[2] for cut in before["text"])
    other = cuts_of(corpus.config("vision.codec=zstd"), {**probe, "image": "c"})
    assert other["text"] == before["text"]
    assert {cut[2] for cut in other["image"]}.isdisjoint(cut[2] for cut in before["image"])


def test_a_change_of_one_group_leaves_the_shards_of_the_other(corpus: PhotoCorpus) -> None:
    first = built(corpus.config())
    corpus.rows = [{**row, "answer": "Another answer."} for row in corpus.rows]
    corpus.write_manifest()
    texts = built(corpus.config())
    assert texts.key != first.key
    assert inodes(texts, "image") == inodes(first, "image")
    assert not set(inodes(texts, "text")) & set(inodes(first, "text"))
    images = built(corpus.config("vision.codec=zstd"))
    assert inodes(images, "text") == inodes(texts, "text")
    assert not set(inodes(images, "image")) & set(inodes(texts, "image"))
    assert [row["tensors"] for row in held(images)] == [row["tensors"] for row in held(texts)]


def test_a_merge_and_a_subset_keep_each_item_once(corpus: PhotoCorpus) -> None:
    whole = built(corpus.config())
    rows = held(whole)
    parts = [
        open_cache(subset(str(whole.folder), f"part{n}", where=f"sample_id == 'q{n}-0' or sample_id == 'q{n}-5'").cache)
        for n in (1, 2)
    ]
    for number, part in zip((1, 2), parts, strict=True):
        assert held(part) == [row for row in rows if row["sample_id"] in (f"q{number}-0", f"q{number}-5")]
        assert inodes(part, "image") == inodes(whole, "image")
        assert part.num_shards < whole.num_shards
        assert len(set(part.items("image").slots.tolist())) == 1
    report = merge([str(part.folder) for part in parts], "both")
    both = open_cache(report.cache)
    assert held(both) == [*held(parts[0]), *held(parts[1])]
    assert inodes(both, "image") == inodes(whole, "image")  # one shard, which both have
    assert verify_folder(both.folder).problems == []
    assert 0 < report.sample_bytes < report.size_bytes
    assert replace(report, seconds=0.0).num_samples == 4
