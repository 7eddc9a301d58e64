"""Every kind of source of conversations, from the raw files to a batch: the same photos and words, the same samples."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo

PHOTOS = [photo(number, width=64 + 32 * number) for number in range(3)]
ROWS: list[tuple[str, list[int], str, str]] = [
    ("a", [0], "What?", "Waves."),
    ("b", [1], "Which?", "These."),
    ("c", [0], "Why?", "Because."),
    ("d", [2, 1], "Same?", "No."),
]


def jsonl(folder: Path) -> str:
    for number, data in enumerate(PHOTOS):
        (folder / f"{number}.jpg").write_bytes(data)
    rows = [{"id": i, "images": [f"{n}.jpg" for n in n_], "question": q, "answer": a} for i, n_, q, a in ROWS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 'kind = "jsonl"\nmanifest = "train.jsonl"'


def webdataset(folder: Path) -> str:
    with tarfile.open(folder / "train.tar", "w") as tar:
        for sample_id, numbers, question, answer in ROWS:
            members = {f"{sample_id}.{place}.jpg": PHOTOS[n] for place, n in enumerate(numbers)}
            members[f"{sample_id}.json"] = json.dumps({"question": question, "answer": answer}).encode()
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return 'kind = "webdataset"\nmanifest = "train.tar"'


def parquet(folder: Path) -> str:
    rows = [
        {
            "id": sample_id,
            "pictures": [{"bytes": PHOTOS[n], "path": None} for n in numbers],
            "ask": question,
            "answer": answer,
        }
        for sample_id, numbers, question, answer in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return 'kind = "hf"\nmanifest = "train.parquet"\ncolumns = {image = "pictures", question = "ask"}'


KINDS = {"jsonl": jsonl, "webdataset": webdataset, "hf": parquet}


def config(folder: Path, kind: str, *overrides: str) -> Config:
    path = folder / "config.toml"
    path.write_text(
        f'name = "kinds"\n[source]\n{KINDS[kind](folder)}\n[vision]\nprocessor = "{DEMO / "model"}"\n'
        '[plan]\nkind = "pack"\nseq_len = 300\n[run]\ncache_root = "caches"\n'
    )
    return load_config(path, overrides=overrides)


def read(cache: Any) -> dict[str, dict[str, Any]]:
    return {cache.sample_id(index): cache.read(index) for index in range(len(cache))}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(build_here(config(tmp_path_factory.mktemp("jsonl"), "jsonl")).cache)


@pytest.mark.parametrize("kind", ["webdataset", "hf"])
def test_a_kind_gives_the_samples_of_another(wanted: Cache, tmp_path: Path, kind: str) -> None:
    report = build_here(config(tmp_path, kind))
    cache = open_cache(report.cache)
    assert (report.num_samples, report.failed, cache.metadata["num_images"]) == (4, {}, 3)
    made, others = read(cache), read(wanted)
    assert {name.rsplit("/")[-1] for name in made} == set(others)
    for name, sample in made.items():
        other = others[name.rsplit("/")[-1]]
        np.testing.assert_array_equal(sample["input_ids"], other["input_ids"])
        for ours, theirs in zip(sample["patches"], other["patches"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    online = select(config(tmp_path, kind, 'loader.cache="off"'))
    for index in range(len(cache)):
        assert online.sample_id(index) == cache.sample_id(index)
        for ours, theirs in zip(online.read(index)["patches"], cache.read(index)["patches"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    batch = next(iter(make_loader(config(tmp_path, kind))))
    assert batch["position_ids"].shape == (4, 1, batch["input_ids"].shape[1])


@pytest.mark.parametrize(("rows", "ids"), [("1:3", {"b", "c"}), ("::2", {"a", "c"}), (":1", {"a"})])
def test_a_slice_of_the_manifest_s_rows(tmp_path: Path, rows: str, ids: set[str]) -> None:
    source = select(config(tmp_path, "jsonl", f'source.rows="{rows}"', 'loader.cache="off"'))
    assert {source.sample_id(index) for index in range(len(source))} == ids
