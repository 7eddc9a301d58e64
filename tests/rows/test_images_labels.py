"""Classes, texts and bare images of every kind of source: the same rows whatever holds them."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError, ManifestError
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.image_class import labels_of
from forebay.steps.recipe import recipe_of
from forebay.steps.text.label import Labels
from tests.preprocess.vision.corpus import DEMO
from tests.rows.pictures import images_of, picture, read_conversations, write_lines, write_picture

ROWS = [("a", "dog"), ("b", "cat"), ("c", "dog"), ("d", None)]
PROMPTS: dict[str, dict[str, Any]] = {
    "label": {},
    "none": {},
    "plain": {"tokenizer": str(DEMO / "model")},
}


def config_of(manifest: Path, kind: str, *, prompt: str = "label", **source: Any) -> Config:
    document = {
        "name": "labels",
        "source": {"kind": kind, "manifest": str(manifest), **source},
        "vision": {"processor": str(DEMO / "model")},
        "text": {"prompt": prompt, **PROMPTS[prompt]},
        "run": {"cache_root": str(manifest.parent / "caches")},
    }
    return load_config(document)


def rows_of(config: Config) -> Manifest:
    return read_conversations(config.source, cache_root=config.cache_root, meaning=config.meaning)


def texts_of(manifest: Manifest) -> dict[str, str]:
    return dict(zip(manifest.rows["sample_id"].to_pylist(), manifest.rows["text"].to_pylist(), strict=True))


def tarred(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def written(folder: Path, kind: str) -> tuple[Path, str]:
    """Writes ROWS as a kind of source, and returns its manifest and the kind's name in a config."""
    for number, (name, _) in enumerate(ROWS):
        write_picture(folder / f"{name}.png", number)
    lines = [{"id": name, "image": f"{name}.png", "label": label, "text": label} for name, label in ROWS]
    if kind == "jsonl":
        return write_lines(folder / "rows.jsonl", lines), kind
    if kind == "csv":
        with open(folder / "rows.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
        return folder / "rows.csv", "table"
    if kind in ("parquet", "hf"):
        data = {name: [line[name] for line in lines] for name in ("id", "label", "text")}
        data["image"] = [{"bytes": picture(number), "path": None} for number in range(len(ROWS))]  # type: ignore[misc]
        pq.write_table(pa.table(data), folder / "rows.parquet")
        return folder / "rows.parquet", "table" if kind == "parquet" else "hf"
    members = {}
    for number, (name, label) in enumerate(ROWS):
        members[f"{name}.png"] = picture(number)
        if label is not None:
            members |= {f"{name}.cls": label.encode(), f"{name}.txt": label.encode()}
    return tarred(folder / "rows.tar", members), kind


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hf", "webdataset"])
def test_every_kind_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    manifest, name = written(tmp_path, kind)
    expected = {key: label for key, label in ROWS if label is not None}
    found = rows_of(config_of(manifest, name))
    assert texts_of(found) == expected
    assert found.counts() == {"excluded": {"no_label": 1}, "failed": {}}
    assert labels_of(found.rows) == Labels(names=("cat", "dog"), count=2)
    texts = rows_of(config_of(manifest, name, prompt="plain"))
    assert (texts_of(texts), texts.counts()["excluded"]) == (expected, {"no_text": 1})
    assert labels_of(texts.rows) is None
    alone = rows_of(config_of(manifest, name, prompt="none"))
    assert texts_of(alone) == {key: "" for key, _ in ROWS}
    assert len(alone.items["image"]) == len(ROWS)
    assert {*alone.unused} == (set() if kind == "webdataset" else {"label", "text"})


def test_columns_have_names_and_are_in_the_key(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "a.png")
    table = tmp_path / "rows.csv"
    table.write_text("picture,species,said\na.png,7,hello\n")
    config = config_of(table, "table", columns={"image": "picture", "label": "species"})
    found = rows_of(config)
    assert texts_of(found) == {"rows/0": "7"}
    assert labels_of(found.rows) == Labels(names=None, count=8)
    assert found.unused == {"said": 1}
    assert images_of(found) == {"rows/0": [path.name]}
    texts = config_of(table, "table", columns={"image": "picture", "text": "said"}, prompt="plain")
    assert texts_of(rows_of(texts)) == {"rows/0": "hello"}
    keys = {recipe_of(each).key for each in (config, texts, config_of(table, "table"))}
    assert len(keys) == 3
    with pytest.raises(ManifestError, match=r"no column label; it has picture, species, said; set image or label"):
        rows_of(config_of(table, "table", columns={"image": "picture"}))
    with pytest.raises(ManifestError, match=r"no column kind \(source.columns.label\)"):
        rows_of(config_of(table, "table", columns={"image": "picture", "label": "kind"}))
    with pytest.raises(ConfigError, match=r'source.columns.label is "x".*reads only the columns image, text, id'):
        config_of(table, "table", columns={"label": "x"}, prompt="plain")


def test_one_name_among_integers_renumbers_them_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_picture(tmp_path / "a.png")
    table = tmp_path / "rows.csv"
    table.write_text("image,label\na.png,2\na.png,10\na.png,n/a\n")
    assert labels_of(rows_of(config_of(table, "table")).rows) == Labels(names=("10", "2", "n/a"), count=3)
    assert "2 of 3 classes are integers, and 'n/a' is none, so all are names: without" in caplog.text
    caplog.clear()
    lines = [{"image": "a.png", "label": label} for label in ("2", "10", "n/a")]
    named = rows_of(config_of(write_lines(tmp_path / "rows.jsonl", lines), "jsonl"))
    assert labels_of(named.rows) == Labels(names=("10", "2", "n/a"), count=3)
    assert not caplog.records


def test_a_row_without_a_class_names_the_fields_that_it_has(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    found = rows_of(config_of(write_lines(tmp_path / "rows.jsonl", [{"image": "a.png", "class": "cat"}]), "jsonl"))
    assert (found.counts()["excluded"], found.unused) == ({"no_label": 1}, {"class": 1})


@pytest.mark.parametrize("has_lists", [False, True])
def test_a_class_label_of_datasets_has_its_own_order(has_lists: bool, tmp_path: Path) -> None:  # noqa: FBT001
    kind = datasets.ClassLabel(names=["dog", "mouse", "cat"])
    labels: list[Any] = [[0, 2], [], [1]] if has_lists else [2, -1, 0]
    data = {"image": [{"bytes": picture(n), "path": None} for n in range(3)], "label": labels}
    features = datasets.Features({"image": datasets.Image(), "label": [kind] if has_lists else kind})
    datasets.Dataset.from_dict(data, features=features).save_to_disk(tmp_path / "set")
    found = rows_of(config_of(tmp_path / "set", "hf"))
    assert labels_of(found.rows) == Labels(names=("dog", "mouse", "cat"), count=3, is_multi=has_lists)
    expected = ['["dog", "cat"]', "[]", '["mouse"]'] if has_lists else ["cat", "dog"]
    assert list(texts_of(found).values()) == expected
    assert found.counts()["excluded"] == ({} if has_lists else {"no_label": 1})


def test_integers_with_missing_values_are_integers(tmp_path: Path) -> None:
    table = pa.table({"image": [picture(n) for n in range(3)], "label": [4.0, None, float("nan")]})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = rows_of(config_of(tmp_path / "rows.parquet", "table"))
    assert list(texts_of(found).values()) == ["4"]
    assert found.counts() == {"excluded": {"no_label": 2}, "failed": {}}


def test_integers_of_a_csv_that_pandas_wrote_beside_a_blank_are_integers(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    table = tmp_path / "rows.csv"
    table.write_text("image,label\na.png,10.0\na.png,\na.png,2.0\na.png,1\na.png,2.00\n")
    found = rows_of(config_of(table, "table"))
    assert labels_of(found.rows) == Labels(names=None, count=11)
    assert found.rows["text"].to_pylist() == ["10", "2", "1", "2"]
    table.write_text("image,label\na.png,1.0\na.png,1.5\n")
    assert labels_of(rows_of(config_of(table, "table")).rows) == Labels(names=("1.0", "1.5"), count=2)


def test_bad_rows_cost_themselves(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    (tmp_path / "torn.png").write_bytes(picture(1)[:20])
    rows: list[Any] = [
        {"image": "a.png", "label": "x"},
        {"image": "a.png", "label": 0.5},
        {"label": "x"},
        {"image": ["a.png", "a.png"], "label": "x"},
        {"image": "a.png", "label": "x", "id": []},
        {"image": "torn.png", "label": "y"},
        {"image": "none.png", "label": "y"},
        '{"image": "a.png", "label": 1, "label": 2}',
    ]
    found = rows_of(config_of(write_lines(tmp_path / "rows.jsonl", rows), "jsonl"))
    assert texts_of(found) == {"rows/0": "x"}
    counts = {"bad_label": 1, "bad_row": 1, "image_count_mismatch": 2, "repeated_field": 1}
    assert found.counts() == {"excluded": {}, "failed": {**counts, "unreadable_image": 1, "missing_file": 1}}
    assert labels_of(found.rows) == Labels(names=("x",), count=1)


def test_members_of_a_tar_beside_an_image(tmp_path: Path) -> None:
    members = {
        "a.jpg": picture(1, kind="JPEG"),
        "a.json": json.dumps({"label": "of json", "id": "one", "mood": 1}).encode(),
        "a.cls": b"of cls",
        "b/c.png": picture(2),
        "b/c.cls": b"3\n",
        "d.png": picture(3),
        "d.json": b"{",
        "e.png": picture(4),
        "e.txt": b"\xff",
        "lonely.cls": b"1",
    }
    tar = tarred(tmp_path / "x.tar", members)
    found = rows_of(config_of(tar, "webdataset"))
    assert texts_of(found) == {"one": "of json", "b/c": "3"}
    assert found.counts() == {"excluded": {}, "failed": {"bad_row": 1, "bad_text": 1}}
    assert found.unused == {"mood": 1, "(members without an image)": 1}


def test_a_tokenizer_is_only_needed_for_tokens(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    source = {"kind": "jsonl", "manifest": str(write_lines(tmp_path / "rows.jsonl", [{"image": "a.png"}]))}
    document: dict[str, Any] = {"name": "x", "source": source, "vision": {"processor": str(DEMO / "model")}}
    for prompt in ("chat", "plain", None):
        text = {} if prompt is None else {"prompt": prompt}
        with pytest.raises(ConfigError, match=r"text.tokenizer: missing"):
            load_config({**document, "text": text})
        with pytest.raises(ConfigError, match=r"text.tokenizer: missing"):
            load_config({**document, "text": {**text, "tokenizer": ""}})
    config = load_config({**document, "text": {"prompt": "none"}})
    assert config.text is not None
    assert config.text.tokenizer == ""
    assert len(rows_of(config).rows) == 1
    with pytest.raises(ConfigError, match=r"text.classes: unknown field"):
        load_config({**document, "text": {"prompt": "none", "classes": ["a"]}})
    with pytest.raises(ConfigError, match=r"classes names 'a' twice"):
        load_config({**document, "text": {"prompt": "label", "classes": ["a", "a"]}})
    del document["vision"]
    with pytest.raises(ConfigError, match=r'text.prompt = "label" is only for a config with \[vision\]'):
        load_config({**document, "text": {"prompt": "label"}})
