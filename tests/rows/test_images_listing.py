from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.preprocess.pool import Pool
from forebay.rows import list_rows as conversations
from forebay.rows import listed_media as conversation_images
from forebay.rows.manifest import Manifest
from forebay.rows.readers import table_records as conversation_jsonl
from forebay.rows.source_table import SourceFiles
from tests.rows.helpers import described, ids, rejected, write_tar
from tests.rows.pictures import (
    asked,
    converse,
    images_of,
    picture,
    read_conversations,
    source_of,
    write_lines,
    write_picture,
)

DEMO = Path(__file__).parents[2] / "demo" / "vision"
T = TypeVar("T")
R = TypeVar("R")


@pytest.fixture(params=["jsonl", "hf", "webdataset"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceConfig:
    """Twelve questions about four images, in turn, as each kind; small parts, so that there are several."""
    if request.param == "jsonl":
        for n in range(4):
            write_picture(tmp_path / f"{n}.png", n)
        rows = [asked(f"{n % 4}.png", question=f"q{n}", id=f"id{n}") for n in range(12)]
        return source_of("jsonl", write_lines(tmp_path / "m.jsonl", rows))
    if request.param == "hf":
        images = pa.array([{"bytes": picture(n % 4), "path": None} for n in range(12)])
        texts = {name: [f"{name[0]}{n}" for n in range(12)] for name in ("question", "answer")}
        table = pa.table({"image": images, **texts, "id": [f"id{n}" for n in range(12)]})
        pq.write_table(table, tmp_path / "d.parquet", row_group_size=3)
        return source_of("hf", tmp_path / "d.parquet")
    for tar in range(3):
        members: dict[str, bytes] = {}
        for n in range(4 * tar, 4 * tar + 4):
            members |= {
                f"{n:02}.png": picture(n % 4),
                f"{n:02}.json": described(**asked(question=f"q{n}", id=f"id{n}")),
            }
        write_tar(tmp_path / f"{tar}.tar", members)
    return source_of("webdataset", tmp_path)


def changed(source: SourceConfig, **settings: Any) -> SourceConfig:
    return source_of(source.kind, *source.manifests, **settings)


def read(source: SourceConfig, root: Path, **settings: Any) -> Manifest:
    return converse(source.kind, *source.manifests, root=root, **settings)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0:3", [0, 1, 2]),
        ("5:", [*range(5, 12)]),
        ("::5", [0, 5, 10]),
        ("-2:", [10, 11]),
        (":-9", [0, 1, 2]),
        ("2:100:4", [2, 6, 10]),
    ],
)
@pytest.mark.few
def test_rows_are_a_slice_of_the_manifest(
    source: SourceConfig, tmp_path: Path, rows: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "FIRST_WAVE", 1)
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", 100)
    manifest = read(source, tmp_path, rows=rows)
    assert sorted(manifest.rows["row"].to_pylist()) == expected
    assert sorted(ids(manifest), key=lambda name: int(name[2:])) == [f"id{n}" for n in expected]


def test_a_slice_that_selects_nothing_is_an_error(source: SourceConfig, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"source\.rows is 12:20, which selects none of 12 rows"):
        read(source, tmp_path, rows="12:20")


@pytest.mark.parametrize("wave", [1, 8])
@pytest.mark.parametrize("max_samples", [1, 5, 11, 12, 13])
@pytest.mark.few
def test_max_samples_are_the_first_that_can_be_used(
    source: SourceConfig, tmp_path: Path, max_samples: int, wave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "FIRST_WAVE", wave)
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", 100)
    manifest = read(source, tmp_path, max_samples=max_samples, exclude=["id1", "id9"])
    expected = [n for n in range(12) if n not in (1, 9)][:max_samples]
    assert sorted(manifest.rows["row"].to_pylist()) == expected
    left_out = [1] * (expected[-1] > 1) + [9] * (expected[-1] > 9)
    assert manifest.rejected["row"].to_pylist() == left_out
    assert manifest.counts()["excluded"].get("excluded_by_id", 0) == len(left_out)


def test_what_is_not_selected_is_not_looked_at(tmp_path: Path) -> None:
    good = [f"{n}.png" for n in range(3)]
    for n, name in enumerate(good):
        write_picture(tmp_path / name, n)
    rows = [
        asked(name, id=name) for name in ["skipped.png", *good[:1], "gone.png", "twice.png", *good[1:], "later.png"]
    ]
    rows.insert(4, asked("again.png", id="twice.png"))
    path = write_lines(tmp_path / "m.jsonl", rows)
    manifest = converse("jsonl", path, root=tmp_path, rows="1:", exclude=["twice.png"], max_samples=3)
    assert images_of(manifest) == {name: [name] for name in good}
    assert rejected(manifest) == [
        ("gone.png", "failed", "missing_file"),
        ("twice.png", "excluded", "excluded_by_id"),
        ("twice.png", "failed", "duplicate_id"),
    ]
    assert [file.name for file in manifest.files] == ["m.jsonl", "0.png", "gone.png", "1.png", "2.png"]
    assert manifest.absent == (2,)


def test_every_place_is_looked_at_once_and_in_small_tasks(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_images, "ITEMS_PER_TASK", 2)
    looked: list[tuple[str, int]] = []

    def counting(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterable[R]:
        for task in tasks:
            if isinstance(task, conversation_images.LookTask):
                names = [(task.files[p["file"]].name, p["offset"]) for p in task.places.to_pylist()]
                assert len(names) <= 4
                looked.extend(names)
            yield function(task)

    for max_samples in (None, 5):
        looked.clear()
        chosen = changed(source, max_samples=max_samples)
        read_conversations(chosen, cache_root=tmp_path / "cache_root", map_=counting)
        assert len(looked) == len(set(looked)) == ({"jsonl": 4}.get(source.kind, max_samples or 12))


@pytest.mark.few("jsonl")
def test_worker_processes_give_the_same_tables(source: SourceConfig, tmp_path: Path) -> None:
    alone = read(source, tmp_path)
    with Pool(2) as pool:
        together = read_conversations(source, cache_root=tmp_path / "cache_root", map_=pool.map)
    assert together.rows.equals(alone.rows)
    assert together.files == alone.files
    assert together.items["image"].equals(alone.items["image"])


@pytest.mark.few("webdataset")
def test_texts_that_are_too_many_to_be_held_lie_in_a_file_that_is_gone(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = read(source, tmp_path)
    aside = tmp_path / "cache_root" / ".building"
    assert not aside.exists()
    monkeypatch.setattr("forebay.rows.columns_aside.HELD_BYTES", 64)
    monkeypatch.setattr("forebay.rows.columns_aside._TEXT_ROWS", 5)
    monkeypatch.setattr(conversation_jsonl, "BLOCK_BYTES", 200)
    gc.collect()
    held = pa.total_allocated_bytes()
    mapped = read(source, tmp_path)
    gc.collect()  # what earlier tests left goes at any time, what a reader held goes now
    files = SourceFiles.of(mapped.files)
    of_files = files.names.get_total_buffer_size() + files.own.get_total_buffer_size()
    assert pa.total_allocated_bytes() - held - of_files < mapped.rows.nbytes
    assert mapped.rows.to_pylist() == alone.rows.to_pylist()
    assert mapped.rows.schema.equals(alone.rows.schema)
    assert aside.is_dir()
    assert not any(aside.iterdir())
    aside.rmdir()
    aside.write_bytes(b"no folder")
    assert read(source, tmp_path).rows.to_pylist() == alone.rows.to_pylist()


def test_manifests_of_two_folders_keep_their_own_images(tmp_path: Path) -> None:
    for n, folder in enumerate("ab"):
        write_picture(tmp_path / folder / "x.png", n)
        write_lines(tmp_path / folder / "m.jsonl", [asked("x.png"), asked("x.png")])
    manifest = converse("jsonl", tmp_path / "*" / "m.jsonl", root=tmp_path)
    assert ids(manifest) == ["m/0", "m/1", "b/m/m/0", "b/m/m/1"]
    assert manifest.rows["images"].to_pylist() == [[0], [0], [1], [1]]
    assert manifest.rows["group"].to_pylist() == [0, 0, 1, 1]


def test_rows_appended_to_a_manifest_rename_nothing(tmp_path: Path) -> None:
    for n in range(3):
        write_picture(tmp_path / f"{n}.png", n)
    rows = [asked(f"{n % 3}.png", question=f"q{n}") for n in range(9)]
    few = converse("jsonl", write_lines(tmp_path / "m.jsonl", rows[:5]), root=tmp_path)
    many = converse("jsonl", write_lines(tmp_path / "m.jsonl", rows), root=tmp_path)
    texts = [dict(zip(ids(m), m.rows["text"].to_pylist(), strict=True)) for m in (few, many)]
    assert texts[0].items() <= texts[1].items()


def test_the_demo(tmp_path: Path) -> None:
    manifest = converse("jsonl", DEMO / "train.jsonl", root=tmp_path)
    lines = [json.loads(line) for line in (DEMO / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(ids(manifest)) == sorted(line["id"] for line in lines)
    assert not manifest.rejected.num_rows
    named = {name for names in images_of(manifest).values() for name in names}
    assert len(manifest.items["image"]) == len(named) >= 12
