"""Growth and edits of large texts cost the shards that they touch; a build and uncached reading list alike."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import Config
from forebay.preprocess.listing import resolve
from forebay.rows.readers import line_blocks as line_index
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import open_cache
from forebay.store.layout import TEXT_INDEX
from forebay.store.memo import Memo
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.text_corpus import TOKENIZER

LINES = 100_000
MIXED = "می\u200cخواهم \u200f abc कार्य"


def config(folder: Path, manifest: str, *overrides: str) -> Config:
    path = folder / "texts.toml"
    path.write_text(
        f'name = "texts"\n[source]\nkind = "text"\nmanifest = "{manifest}"\n[audio]\nfeatures = "none"\n'
        f'[text]\ntokenizer = "{TOKENIZER}"\n[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    return load_config(path, overrides=overrides)


def shard_keys(folder: Path, lines: list[str]) -> list[str]:
    """The keys of the text shards of a file of these lines; a shard of a key that is there is linked, not written."""
    (folder / "texts.txt").write_text("".join(f"{line}\n" for line in lines))
    own = config(folder, "texts.txt")
    listing = resolve(own, Memo(own.cache_root), map, recipe=recipe_of(own))
    assert len(listing.rows) == len(lines)
    probe = dict.fromkeys(listing.groups.names, "0" * 32)
    return [cut.key for cut in listing.groups.cuts(listing, probe=probe, rows_per_shard=512)]


def test_an_edited_and_an_appended_line_in_100_000_make_one_shard_each(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(LINES)]
    keys = shard_keys(tmp_path, lines)
    assert len(keys) == -(-LINES // (8 * 512))
    edited = shard_keys(tmp_path, [*lines[:50_000], "another one", *lines[50_001:]])
    assert [a == b for a, b in zip(keys, edited, strict=True)].count(False) == 1
    grown = shard_keys(tmp_path, [*lines, "one more"])
    assert [a == b for a, b in zip(keys, grown, strict=True)] == [True] * (len(keys) - 1) + [False]


@pytest.mark.parametrize("ending", ["txt", "txt.zst", "parquet"])
def test_a_slice_is_built_and_read_without_a_cache_alike(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "LINES", 16)
    monkeypatch.setattr("forebay.rows.readers.text_files.LINES", 16)
    lines = [f"this is line {number}" for number in range(60)]
    data = "".join(f"{line}\n" for line in lines).encode()
    path = tmp_path / f"t.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"text": lines}), path)
    else:
        path.write_bytes(data if ending == "txt" else pa.Codec("zstd").compress(data, asbytes=True))
    rows = 'source.rows="30:50:2"'
    report = build_here(config(tmp_path, path.name, rows))
    cache = open_cache(report.cache)
    assert cache.samples["text"].to_pylist() == lines[30:50:2]
    assert cache.sample_id(0) == "t/31"
    assert (tmp_path / "caches" / TEXT_INDEX).exists() == (ending == "txt")
    online = select(config(tmp_path, path.name, rows, 'loader.cache="off"'))
    assert online.ids_digest() == cache.ids_digest()
    assert [cache.read(i)["input_ids"].tolist() for i in range(10)] == [
        online.read(i)["input_ids"].tolist() for i in range(10)
    ]
    assert build_here(config(tmp_path, path.name, rows)).already_sealed
    assert not build_here(config(tmp_path, path.name)).already_sealed


def test_a_bad_text_costs_its_sample_and_is_counted(tmp_path: Path) -> None:
    texts = [b"a good one", b"a NUL \\u0000", b"\\ud800", b"\xff", MIXED.encode(), b" \\u200b", b"x" * 10_000_000]
    lines = [b'{"text": "%s"}\n' % text for text in texts]
    (tmp_path / "t.jsonl").write_bytes(b"".join(lines))
    report = build_here(config(tmp_path, "t.jsonl", "source.max_sample_bytes=9000000", "run.max_failed_share=1.0"))
    assert open_cache(report.cache).samples["text"].to_pylist() == ["a good one", MIXED]
    assert (report.failed, report.excluded) == ({"bad_text": 3, "too_large": 1}, {"empty_text": 1})
