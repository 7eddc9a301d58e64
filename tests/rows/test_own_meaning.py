"""Rows of recordings and images whose meaning is a class beside the config: no line of the product knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
import xxhash

from forebay import load_config
from forebay.config import Config
from forebay.errors import ConfigError, ManifestError
from forebay.preprocess.pool import Pool
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import ROW_SCHEMA, Manifest
from forebay.rows.meanings.own import meaning_of
from forebay.rows.media_reader import MediaReader
from forebay.task_map import Map
from tests.rows.helpers import audio, described, ids, rejected, write_tar
from tests.rows.pictures import picture, write_lines

TOKENIZER = Path(__file__).resolve().parents[2] / "demo" / "speech" / "model"
CLASS = '''
from forebay.errors import SampleError


class Shown:
    """Somebody speaks of the photos that he shows."""

    columns = ("audio", "text", "image", "language", "id")
    groups = ("audio", "image")

    def row(self, record):
        if record.get("mood") == "bad":
            raise SampleError("bad_mood", "is said in a bad mood")
        if record.get("mood") == "broken":
            return {}["nothing"]
        if record.get("mood") == "list":
            return [record]
        return {
            "text": record["text"].upper(),
            "language": record.get("language"),
            "id": record.get("id"),
            "audio": record["audio"],
            "image": record.get("photos", record.get("image")),
            **record.get("more", {}),
        }
'''


def config_of(folder: Path, kind: str, manifest: str, *, code: str = CLASS, **source: Any) -> Config:
    (folder / "rows.py").write_text(code)
    lines = [f"{name} = {json.dumps(value)}" for name, value in source.items()]
    text = f'name = "own"\n[source]\nkind = "{kind}"\nmanifest = "{manifest}"\nmeaning = "rows.py:Shown"\n'
    text += "\n".join(lines) + f'\n[text]\ntokenizer = "{TOKENIZER}"\nprompt = "whisper"\n'
    (folder / "c.toml").write_text(f'{text}[run]\ncache_root = "caches"\nallow_code = true\n')
    return load_config(folder / "c.toml")


def listed(config: Config, map_: Map = map) -> Manifest:
    """Returns the rows of a config; every item is what its place says."""
    manifest = list_rows(config.source, meaning_of(config), cache_root=config.cache_root, map_=map_)
    images = manifest.items["image"]
    assert images is not None
    with MediaReader(manifest.files, max_open=2, column="image") as read:
        for image in images.to_pylist():
            data = read(image["file"], image["offset"], image["size"])
            assert xxhash.xxh3_128_hexdigest(data) == image["hash"]
    with MediaReader(manifest.files, max_open=2, column="audio") as read:
        for row in manifest.rows.to_pylist():
            assert len(read(row["file"], row["offset"], row["size"])) > 0
            assert row["duration_s"] == pytest.approx(0.1)
    assert manifest.rows.schema.names[: len(ROW_SCHEMA)] == ROW_SCHEMA.names
    assert manifest.rows.schema.names[len(ROW_SCHEMA) :][:2] == ["images", "item_group"]
    return manifest


def spoken(folder: Path, *rows: dict[str, Any]) -> str:
    """Writes JSON lines of clips and photos, and three of each."""
    for number, name in enumerate("abc"):
        (folder / f"{name}.flac").write_bytes(audio(1600, seed=number))
        (folder / f"{name}.png").write_bytes(picture(number))
    return write_lines(folder / "m.jsonl", [{"text": "hello", **row} for row in rows]).name


ROWS: list[dict[str, Any]] = [
    {"audio": "a.flac", "photos": ["a.png", "b.png"], "language": "en"},
    {"audio": "b.flac", "photos": "c.png", "language": "de"},
    {"audio": "c.flac", "photos": ["b.png"], "language": "en", "id": 7},
    {"audio": "a.flac", "photos": [], "id": "alone"},
]


def test_a_row_is_a_recording_and_lists_images_that_are_shared(tmp_path: Path) -> None:
    config = config_of(tmp_path, "jsonl", spoken(tmp_path, *ROWS))
    manifest = listed(config)
    assert ids(manifest) == ["a", "7", "b", "alone"]
    assert manifest.rows["images"].to_pylist() == [[0, 1], [1], [2], []]
    assert manifest.rows["item_group"].to_pylist() == [0, 0, 1, 2]
    assert manifest.rows["text"].to_pylist() == ["HELLO"] * 4
    assert manifest.rows["language"].to_pylist() == ["en", "en", "de", None]
    names = [manifest.files[number].name for number in manifest.rows["file"].to_pylist()]
    assert names == ["a.flac", "c.flac", "b.flac", "a.flac"]
    with Pool(2) as pool:
        assert listed(config, pool.map).rows.equals(manifest.rows)


def test_filters_and_early_ends_are_those_of_all_rows(tmp_path: Path) -> None:
    name = spoken(
        tmp_path,
        *ROWS,
        {"audio": "gone.flac", "photos": "a.png"},
        {"audio": "b.flac", "photos": "gone.png", "id": "shy"},
    )
    some = listed(config_of(tmp_path, "jsonl", name, languages=["en"]))
    assert ids(some) == ["a", "7"]
    assert [reason for _, _, reason in rejected(some)] == ["language"] * 4
    everything = listed(config_of(tmp_path, "jsonl", name))
    assert rejected(everything) == [("gone", "failed", "missing_file"), ("shy", "failed", "missing_file")]
    assert ids(listed(config_of(tmp_path, "jsonl", name, max_samples=2))) == ["a", "b"]
    assert ids(listed(config_of(tmp_path, "jsonl", name, exclude=["a"], keep_columns=["id"]))) == ["b", "7", "alone"]


def test_what_a_class_raises_or_returns_costs_that_row(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"audio": "a.flac", "mood": "bad"},
        {"audio": "a.flac", "mood": "broken"},
        {"audio": "a.flac", "mood": "list"},
        {"audio": 3},
        {"audio": ["a.flac", "b.flac"]},
        {"audio": "a.flac", "photos": 4.5},
        {"audio": "a.flac", "more": {"text": 1}},
        {"audio": "a.flac", "more": {"id": ""}},
        {"audio": "a.flac", "more": {"speaker": "x"}},
        {"audio": "a.flac", "more": {"duration_s": "long"}},
        {"audio": "a.flac", "photos": ""},
        {"photos": "a.png"},
    ]
    manifest = listed(config_of(tmp_path, "jsonl", spoken(tmp_path, *bad, ROWS[1])))
    assert ids(manifest) == ["b"]
    found = manifest.rejected.to_pylist()
    assert [row["reason"] for row in found] == ["bad_mood", *["meaning_failed"] * 9, "missing_file", "meaning_failed"]
    assert [row["sample_id"] for row in found] == [f"m/{number}" for number in range(len(bad))]
    messages = [row["message"].removeprefix(f"m.jsonl, line {row['row'] + 1}: ") for row in found]
    assert messages == [
        "is said in a bad mood",
        "rows.py:Shown raised KeyError: 'nothing' (line 15)",
        "rows.py:Shown returned a list, wanted a dict",
        "rows.py:Shown returned audio as 3, wanted the name of a file, (tar, member) or what the record has",
        "rows.py:Shown returned audio as ['a.flac', 'b.flac'], wanted one item",
        "rows.py:Shown returned image as 4.5, wanted the name of a file, (tar, member) or what the record has",
        "rows.py:Shown: field text is a number (1), wanted a string",
        "rows.py:Shown returned id as '', wanted a text or an integer",
        "rows.py:Shown returned ['speaker'], wanted some of ['audio', 'duration_s', 'id', 'image', 'language', "
        "'prompt', 'text']",
        "rows.py:Shown: field duration_s is a string ('long'), wanted seconds as a number",
        "the name of an image is empty, wanted a file name",
        "rows.py:Shown raised KeyError: 'audio' (line 22)",
    ]


def test_media_may_lie_in_the_rows_of_a_data_file(tmp_path: Path) -> None:
    table = {
        "audio": [{"bytes": audio(1600, seed=n), "path": f"{n}.flac"} for n in range(3)],
        "image": [[{"bytes": picture(n % 2), "path": None}, {"bytes": picture(2), "path": None}] for n in range(3)],
        "text": ["a", "b", "c"],
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=2)
    manifest = listed(config_of(tmp_path, "table", "t.parquet"))
    assert ids(manifest) == ["t/0", "t/1", "t/2"]
    assert manifest.rows["images"].to_pylist() == [[0, 1], [2, 1], [0, 1]]


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_a_table_gives_columns_under_the_names_of_their_settings(tmp_path: Path, end: str) -> None:
    spoken(tmp_path)
    table = pa.table(
        {"clip": ["a.flac", "b.flac"], "image": ["a.png", "b.png"], "said": ["x", "y"], "key": ["k1", "k2"]}
    )
    path = tmp_path / f"t.{end}"
    pq.write_table(table, path) if end == "parquet" else pcsv.write_csv(table, path)
    named = '[source.columns]\naudio = "clip"\ntext = "said"\nid = "key"\n'
    config = config_of(tmp_path, "table", path.name)
    text = Path(config.path).read_text()
    Path(config.path).write_text(text.replace("[text]", f"{named}[text]"))
    found = listed(load_config(config.path))
    assert ids(found) == ["k1", "k2"], rejected(found)
    Path(config.path).write_text(text.replace("[text]", named.replace('"clip"', '"clips"') + "[text]"))
    with pytest.raises(ManifestError, match="clips") as caught:
        listed(load_config(config.path))
    assert caught.value.code == "FB202"


def test_a_tar_gives_the_members_of_a_name_by_their_extensions(tmp_path: Path) -> None:
    code = CLASS.replace('record["audio"]', 'record["flac"]').replace('record.get("image")', 'record.get("png")')
    members = {
        "0.flac": audio(1600),
        "0.png": picture(),
        "0.json": described(text="one", language="en"),
        "1.png": picture(1),
        "1.json": described(text="two"),
        "2.json": described(text="three"),
        "2.flac": audio(1600, seed=2),
    }
    write_tar(tmp_path / "a.tar", members)
    manifest = listed(config_of(tmp_path, "webdataset", "a.tar", code=code))
    assert ids(manifest) == ["0", "2"]
    assert manifest.rows["images"].to_pylist() == [[0], []]
    assert rejected(manifest) == [("1", "failed", "meaning_failed")]


def test_items_may_be_named_members_of_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio(1600), "x.png": picture()})
    code = CLASS.replace('"audio": record["audio"]', '"audio": ("a.tar", record["audio"])').replace(
        '"image": record.get("photos", record.get("image"))', '"image": [("a.tar", name) for name in record["photos"]]'
    )
    rows = [
        {"text": "a", "audio": "x.flac", "photos": ["x.png"]},
        {"text": "b", "audio": "y.flac", "photos": []},
        {"text": "c", "id": "c", "audio": "./x.flac", "photos": ["y.png"]},
    ]
    write_lines(tmp_path / "m.jsonl", rows)
    manifest = listed(config_of(tmp_path, "jsonl", "m.jsonl", code=code))
    assert ids(manifest) == ["x"]
    assert rejected(manifest) == [("y", "failed", "missing_member"), ("c", "failed", "missing_member")]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (CLASS.replace("def row(", "def rows("), r"class Shown of .*rows\.py has no method row\(record\); add it"),
        (CLASS + "\nraise ValueError('no')\n", r"rows\.py: importing it raised ValueError: no \(line 27\)"),
        (
            CLASS.replace("    def row(", "    def __init__(self):\n        raise OSError('x')\n\n    def row("),
            r"Shown of .* cannot be made: it raised OSError: x",
        ),
    ],
)
def test_a_class_that_cannot_be_made_stops_the_listing(tmp_path: Path, code: str, message: str) -> None:
    config = config_of(tmp_path, "jsonl", spoken(tmp_path, *ROWS), code=code)
    with pytest.raises(ConfigError, match=message) as caught:
        listed(config)
    assert caught.value.code == "FB144"


def test_a_file_that_changes_is_not_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "jsonl", spoken(tmp_path, *ROWS))
    meaning = meaning_of(config)
    (tmp_path / "rows.py").write_text(CLASS + "\n# edited\n")
    with pytest.raises(ConfigError, match=r"rows\.py has changed: its sha256 was"):
        list_rows(config.source, meaning, cache_root=config.cache_root)


def test_a_kind_without_records_has_no_rows_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_text("a.tar\tx\ten\t1.0\n")
    with pytest.raises(
        ManifestError, match=r'source\.kind is "filelist", which has no rows for source\.meaning = "rows'
    ):
        listed(config_of(tmp_path, "filelist", "m.tsv"))
