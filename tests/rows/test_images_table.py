"""`kind = "table"` of conversations, and kept columns of every kind: the same samples whatever the form."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError, ManifestError
from forebay.store.cache import Cache, open_cache
from forebay.train.select import make_loader, select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.rows.pictures import converse, write_picture

COLUMNS = {"image": "photo", "question": "asked", "answer": "said", "id": "name"}
KEPT = ["grade", "place"]


def rows() -> list[dict[str, Any]]:
    """Rows of real photos; one has no place."""
    found = [json.loads(line) for line in (DEMO / "train.jsonl").read_text().splitlines()]
    chosen = [row for row in found if isinstance(row.get("image"), str) and "question" in row][:4]
    return [
        {
            **{"name": row["id"], "photo": row["image"], "asked": row["question"], "said": row["answer"]},
            **{"grade": number / 2, "place": None if number == 1 else f"place {number}"},
        }
        for number, row in enumerate(chosen)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif path.suffix == ".arrow":
        made = pa.Table.from_pylist(table)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    return path


def config_of(manifest: Path, root: Path, *overrides: str, **source: Any) -> Config:
    document = {
        "name": "table",
        "source": {"manifest": str(manifest), **source},
        "vision": {"processor": str(DEMO / "model")},
        "plan": {"kind": "pack", "seq_len": 400},
        "loader": {"num_threads": 0},
        "run": {"cache_root": str(root), "num_workers": 1, "max_failed_share": 1.0},
    }
    return load_config(document, overrides=overrides)


def built(config: Config) -> Cache:
    return open_cache(build_here(config).cache)


def table_of(cache: Cache) -> dict[str, list[Any]]:
    samples: Any = cache.samples
    return {name: samples[name].to_pylist() for name in samples.column_names if name != "source"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos")
    shutil.copytree(DEMO / "photos", path / "photos")
    return path


def test_all_forms_give_the_same_samples(folder: Path, tmp_path: Path) -> None:
    expected = rows()
    first: dict[str, list[Any]] | None = None
    for name in ("t.csv", "t.jsonl", "t.parquet", "t.arrow"):
        path = write(folder / name, expected)
        cache = built(config_of(path, tmp_path / name, kind="table", columns=COLUMNS, keep_columns=KEPT))
        found = table_of(cache)
        assert found["sample_id"] == [row["name"] for row in expected]
        assert {column: found[column] for column in KEPT} == {c: [row[c] for row in expected] for c in KEPT}
        first = first or found
        assert found == first
        assert cache.metadata["unused_fields"] == {}


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_row_says_whether_it_is_learnt(folder: Path, tmp_path: Path, name: str) -> None:
    learnt: list[Any] = [True, False, False, None] if name == "t.parquet" else ["True", "0", "false", ""]
    if name == "t.jsonl":
        learnt = [1, 0, False, None]
    table = [{**row, "train": said, "mask": None} for row, said in zip(rows(), learnt, strict=True)]
    report = build_here(config_of(write(folder / name, table), tmp_path, kind="table", columns=COLUMNS))
    assert table_of(open_cache(report.cache))["sample_id"] == [rows()[0]["name"], rows()[3]["name"]]
    assert report.failed == {"nothing_to_learn": 2}
    assert not {"train", "mask"} & report.unused_fields.keys()


def test_a_mask_that_is_an_image_says_nothing_of_learning(folder: Path, tmp_path: Path) -> None:
    table = [{**row, "mask": {"bytes": photo(0), "path": None}} for row in rows()]
    cache = built(config_of(write(folder / "m.parquet", table), tmp_path, kind="table", columns=COLUMNS))
    assert len(cache) == 4
    assert cache.metadata["unused_fields"]["mask"] == 4


def test_uncached_and_cached_packs_have_the_same_columns(folder: Path, tmp_path: Path) -> None:
    path = write(folder / "u.csv", rows())
    source: dict[str, Any] = {"kind": "table", "columns": COLUMNS, "keep_columns": KEPT}
    config = config_of(path, tmp_path, **source)
    off = config_of(path, tmp_path, "loader.cache=off", **source)
    for _ in range(2):  # the second time from the listing that was kept
        uncached = select(off)
    cache = built(config)
    assert uncached.column_names == cache.column_names
    assert uncached.table().to_pydict() == cache.samples.to_pydict()
    assert uncached.categories("place")[0] == cache.categories("place")[0]  # type: ignore[index]
    expected = {row["name"]: (row["grade"], row["place"]) for row in rows()}
    for each in (config, off):
        loader: Any = make_loader(each, with_columns=("sample_id", *KEPT))
        seen = []
        for _, columns in loader:
            for name, *values in zip(*columns.values(), strict=True):
                assert tuple(values) == expected[name]
                seen.append(name)
        assert sorted(seen) == sorted(expected)


def test_images_of_another_folder_than_the_manifests_are_the_same_samples(folder: Path, tmp_path: Path) -> None:
    """LLaVA's layout: a JSON array whose images lie in COCO's folder, some rows with text alone."""
    chat = [{"from": "human", "value": "Say yes."}, {"from": "gpt", "value": "Yes."}]
    with_images = [{"id": row["name"], "image": row["photo"], "question": row["asked"]} for row in rows()]
    lines = [{**row, "answer": "A."} for row in with_images[:2]] + [{"id": "t", "conversations": chat}]
    lines.append({**with_images[2], "answer": "B."})
    (tmp_path / "llava.json").write_text(json.dumps(lines, indent=1))
    write(folder / "beside.jsonl", lines)
    beside = built(config_of(folder / "beside.jsonl", tmp_path / "one", kind="jsonl"))
    for kind in ("jsonl", "table"):
        config = config_of(tmp_path / "llava.json", tmp_path / kind, kind=kind, image_dir=str(folder))
        found = built(config)
        assert table_of(found) == table_of(beside)
        report = build_here(config)
        assert report.already_sealed
        uncached = select(replace(config, loader=replace(config.loader, cache="off")))
        assert len(uncached) == len(found) == 4
    with pytest.raises(ManifestError, match=r"source.image_dir .*gone is no folder"):
        built(config_of(tmp_path / "llava.json", tmp_path, kind="jsonl", image_dir=str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r'source.image_dir is for source.kind = "table" or "jsonl"'):
        config_of(tmp_path / "x.tar", tmp_path, kind="webdataset", image_dir=str(folder))


def test_bad_rows_of_a_csv_cost_themselves(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(photo(ord(name)))
    chat = json.dumps([{"role": "user", "content": "<image><image>Both?"}, {"role": "assistant", "content": "Yes."}])
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["image", "messages", "id", "note"])
    writer.writerows(
        [["a.jpg", chat.replace("<image><image>", "<image>"), "one", "x"], ['["a.jpg", "b.jpg"]', chat, "two", ""]]
    )
    writer.writerows([["a.jpg", "[no JSON", "three", ""], ["a.jpg"], ["", chat, "five", ""]])
    (tmp_path / "t.csv").write_text(text.getvalue())
    report = build_here(config_of(tmp_path / "t.csv", tmp_path / "caches", kind="table"))
    assert (report.num_samples, report.failed) == (2, {"bad_conversation": 1, "bad_row": 1, "image_count_mismatch": 1})
    cache = open_cache(report.cache)
    assert cache.metadata["unused_fields"] == {"note": 5}
    assert cache.lengths["num_images"].tolist() == [1, 2]


def test_images_in_parquet_are_read_without_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    cells = pa.array([{"bytes": photo(1), "path": None}, {"bytes": photo(2), "path": "x"}])
    table = pa.table({"image": cells, "question": ["a?", "b?"], "answer": ["a", "b"], "grade": [1, None]})
    pq.write_table(table, tmp_path / "t.parquet")
    cache = built(config_of(tmp_path / "t.parquet", tmp_path / "caches", kind="table", keep_columns=["grade"]))
    assert table_of(cache)["grade"] == [1, None]


def test_a_column_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    path = write(folder / "m.csv", rows())
    with pytest.raises(ManifestError, match=r"no column messages, nor question and answer; it has name, photo"):
        built(config_of(path, tmp_path, kind="table", columns={"image": "photo"}))
    with pytest.raises(ManifestError, match=r"no column ask .source.columns.question.; it has name"):
        built(config_of(path, tmp_path, kind="table", columns={**COLUMNS, "question": "ask"}))
    with pytest.raises(ConfigError, match=r"no column grad .*did you mean grade\?"):
        built(config_of(path, tmp_path, kind="table", columns=COLUMNS, keep_columns=["grad"]))
    with pytest.raises(ConfigError, match=r"audio_dir is for recordings; name .* as source.image_dir"):
        config_of(path, tmp_path, kind="table", audio_dir=str(tmp_path))


def test_json_lines_and_tars_keep_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(photo(1))
    base = {"image": "a.jpg", "question": "What?", "answer": "Waves."}
    lines = [
        {**base, "id": "x", "place": "here", "grade": 1},
        {**base, "id": "y", "grade": "A"},
        {**base, "place": [1]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_here(config_of(tmp_path / "t.jsonl", tmp_path / "caches", kind="jsonl", keep_columns=KEPT))
    found = table_of(open_cache(report.cache))
    assert (found["place"], found["grade"]) == (["here", None], ["1", "A"])
    assert report.failed == {"bad_conversation": 1}
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in (("x.json", json.dumps(lines[0]).encode()), ("x.jpg", photo(1))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    cache = built(config_of(tmp_path / "t.tar", tmp_path / "tars", kind="webdataset", keep_columns=["place"]))
    assert table_of(cache)["place"] == ["here"]
    assert cache.metadata["unused_fields"] == {"grade": 1}
    with pytest.raises(ConfigError, match=r"has a field plac with a value .*; did you mean place\?|no row"):
        built(config_of(tmp_path / "t.tar", tmp_path / "none", kind="webdataset", keep_columns=["plac"]))


@pytest.mark.parametrize("end", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_rows_of_alpaca_and_ms_swift_are_conversations_of_any_table(tmp_path: Path, end: str) -> None:
    write_picture(tmp_path / "0.png", 0)
    history = [["h", "g"], ["e", "f"]]
    said = history if end != ".csv" else json.dumps(history)
    alpaca = {"image": "0.png", "instruction": "i", "input": "n", "output": "a", "history": said, "system": "s", "x": 1}
    swift = {"image": "0.png", "query": "i\nn", "response": "a", "history": said, "system": "s", "x": 1}
    found = []
    text = {"image": "0.png", "text": "<image>i"}
    manifest = converse("table", write(tmp_path / f"text{end}", [text]), root=tmp_path)
    assert [message["role"] for message in json.loads(manifest.rows["text"][0].as_py())] == ["user"]
    pair = {"image": "0.png", "prompt": "q", "chosen": "a", "rejected": "b"}
    manifest = converse("table", write(tmp_path / f"pair{end}", [pair]), root=tmp_path)
    assert "rejected" in json.loads(manifest.rows["text"][0].as_py())[1]
    for number, row in enumerate((alpaca, swift)):
        manifest = converse("table", write(tmp_path / f"{number}{end}", [row]), root=tmp_path)
        found.append(json.loads(manifest.rows["text"][0].as_py()))
        assert manifest.unused == {"x": 1}
    assert found[0] == found[1]
    texts = [part.get("text") for message in found[0] for part in message["content"]]
    assert texts == ["s", None, "h", "g", "e", "f", "i\nn", "a"]
