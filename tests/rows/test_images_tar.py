"""`kind = "tar"` of images: a parquet manifest over tars, with a row a conversation or an image of a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay import load_config
from forebay.rows.list_images import read_conversations
from forebay.store.cache import open_cache
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.rows.helpers import rejected, write_tar
from tests.rows.pictures import converse, images_of, picture, source_of

ROW = {"question": "q", "answer": "a"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_name_members_of_any_tar(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "deep/y.png": picture(2)})
    write_tar(tmp_path / "b.tar", {"./z.png": picture(3), "again.png": picture(1)})
    rows = [
        {"id": 1, "tar_path": "b.tar", "tar_member_name": ["z.png"], **ROW, "mood": 3},
        {"id": 2, "tar_path": "a.tar", "tar_member_name": ["deep/y.png", "./x.png"], **ROW, "mood": 3},
        {"id": 3, "tar_path": "b.tar", "tar_member_name": ["again.png", "z.png"], **ROW, "mood": 3},
    ]
    manifest = converse("tar", write(tmp_path / "m.parquet", rows), root=tmp_path, keep_columns=("mood",))
    # The third row's first image is the second row's second, in another tar.
    assert images_of(manifest) == {"1": ["z.png"], "2": ["deep/y.png", "x.png"], "3": ["x.png", "z.png"]}
    assert [file.name for file in manifest.files] == ["m.parquet", "b.tar", "a.tar"]
    assert manifest.rows["kept:mood"].to_pylist() == [3, 3, 3]
    assert not manifest.rejected.num_rows


def test_an_image_that_is_not_there_costs_its_row(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "bad.png": b"no image"})
    (tmp_path / "broken.tar").write_bytes(b"x" * 700)
    places: list[tuple[str | None, str | None]] = [
        ("a.tar", "x.png"),
        ("a.tar", "y.png"),
        ("gone.tar", "x.png"),
        ("broken.tar", "x.png"),
    ]
    places += [("a.tar", "bad.png"), (None, "x.png"), ("a.tar", None), ("", "x.png")]
    rows = [{"id": n, "tar_path": tar, "tar_member_name": name, **ROW} for n, (tar, name) in enumerate(places)]
    manifest = converse("tar", write(tmp_path / "m.parquet", rows), root=tmp_path)
    assert list(images_of(manifest)) == ["0"]
    assert [(sample, reason) for sample, _, reason in rejected(manifest)] == [
        ("1", "missing_member"),
        ("2", "missing_file"),
        ("3", "unreadable_tar"),
        ("4", "unreadable_image"),
        *((str(number), "missing_file") for number in (5, 6, 7)),
    ]
    assert [manifest.files[number].name for number in manifest.absent] == ["gone.tar"]


def test_a_row_may_have_a_class(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.png": picture(1), "y.png": picture(2)})
    rows = [{"tar_path": "a.tar", "tar_member_name": f"{name}.png", "label": name} for name in "yx"]
    source = source_of("tar", write(tmp_path / "m.parquet", rows))
    manifest = read_conversations(source, cache_root=tmp_path / "root", reads="labels")
    assert manifest.rows["sample_id"].to_pylist() == ["m/0", "m/1"]
    assert manifest.rows["text"].to_pylist() == ["y", "x"]


def test_it_is_built_and_read_without_a_cache_alike(tmp_path: Path) -> None:
    write_tar(tmp_path / "lists" / "a.tar", {f"{n}.jpg": photo(n) for n in range(3)})
    rows = [
        {"id": str(n), "tar_path": "a.tar", "tar_member_name": [f"{n}.jpg", "0.jpg"][: 1 + n % 2], **ROW}
        for n in range(3)
    ]
    write(tmp_path / "lists" / "m.parquet", rows)
    text = f'name = "t"\n[source]\nkind = "tar"\nmanifest = "lists"\n[vision]\nprocessor = "{DEMO / "model"}"\n'
    (tmp_path / "c.toml").write_text(f'{text}[run]\ncache_root = "caches"\nnum_workers = 1\n')
    report = build_here(load_config(tmp_path / "c.toml"))
    assert (report.num_samples, report.failed) == (3, {})
    cache = open_cache(report.cache)
    online = select(load_config(tmp_path / "c.toml", overrides=['loader.cache="off"']))
    for index in range(3):
        cached, made = cache.read(index), online.read(index)
        assert {name: [part.tobytes() for part in values] for name, values in cached.items()} == {
            name: [part.tobytes() for part in values] for name, values in made.items()
        }
