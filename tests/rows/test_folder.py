"""`kind = "folder"`: recordings below a folder, their texts beside them, in lists, or in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config import SourceColumns
from forebay.errors import ConfigError, ManifestError
from forebay.preprocess.listing import resolve
from forebay.rows.manifest import Manifest
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache
from forebay.store.memo import Memo
from forebay.train.select import select
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here
from tests.rows.helpers import SPEECH, audio, ids, read, rejected
from tests.rows.tables import recordings


def put(folder: Path, files: dict[str, str | None]) -> Path:
    """Writes files below a folder; None: another recording each."""
    for number, (name, text) in enumerate(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(audio(1600 + 16 * number, seed=number) if text is None else text.encode())
    return folder


def texts_of(manifest: Manifest) -> dict[str, str | None]:
    return dict(zip(manifest.rows["sample_id"].to_pylist(), manifest.rows["text"].to_pylist(), strict=True))


def document_of(folder: Path, root: Path, **source: Any) -> dict[str, Any]:
    return {
        "name": "folder",
        "source": {"kind": "folder", "manifest": str(folder), **source},
        "audio": {"features": "log_mel", "n_mels": 80, "dtype": "float16"},
        "text": {"tokenizer": str(SPEECH / "model"), "prompt": "whisper"},
        "run": {"cache_root": str(root), "num_workers": 1},
    }


def test_texts_stand_beside_the_recordings(tmp_path: Path) -> None:
    files: dict[str, str | None] = {
        "hi/a/1.flac": None,
        "hi/a/1.txt": "\ufeff one \n",
        "hi/2.FLAC": None,
        "hi/2.lab": "two",
        "top.flac": None,
        "top.normalized.txt": "three",
        "top.original.txt": "3",
        "en/none.flac": None,
        "README.txt": "hello",
        ".hidden/x.flac": None,
        "en/._1.flac": "resource fork",
        "notes.md": "",
    }
    folder = put(tmp_path / "wavs", files)
    manifest = read("folder", folder, root=tmp_path, languages_from_folders=True)
    assert texts_of(manifest) == {"en/none": None, "hi/2": "two", "hi/a/1": "one", "top": "three"}
    assert manifest.rows["language"].to_pylist() == ["en", "hi", "hi", None]
    assert manifest.unused == {"(texts without a recording)": 2}
    assert manifest.rows["duration_s"].to_pylist()[0] == pytest.approx((1600 + 16 * 7) / 16_000)
    plain = read("folder", folder, root=tmp_path)
    assert plain.rows["language"].null_count == 4


def test_librispeech_is_read_as_it_is(tmp_path: Path) -> None:
    files: dict[str, str | None] = {
        "dev/84/121123/84-121123-0000.flac": None,
        "dev/84/121123/84-121123-0001.flac": None,
        "dev/84/121123/84-121123.trans.txt": "84-121123-0000 GO ON\n84-121123-0001 BUT IN LESS\n84-121123-0002 X\n",
        "dev/174/50561/174-50561-0000.flac": None,
        "dev/174/50561/174-50561.trans.txt": "174-50561-0000 FORGOTTEN TOO\r\n",
    }
    manifest = read("folder", put(tmp_path, files), root=tmp_path)
    assert texts_of(manifest) == {
        "dev/174/50561/174-50561-0000": "FORGOTTEN TOO",
        "dev/84/121123/84-121123-0000": "GO ON",
        "dev/84/121123/84-121123-0001": "BUT IN LESS",
    }
    assert manifest.unused == {"(texts without a recording)": 1}


def test_two_recordings_of_one_name_have_two_ids(tmp_path: Path) -> None:
    folder = put(tmp_path, {"a.flac": None, "a.wav": None, "b/a.flac": None})
    assert ids(read("folder", folder, root=tmp_path)) == ["a", "a.wav", "b/a"]


def test_a_text_that_is_no_utf_8_or_a_link_to_nothing_costs_its_recording(tmp_path: Path) -> None:
    folder = put(tmp_path, {"a.flac": None, "b.flac": None, "b.txt": "two", "c.flac": None})
    (folder / "a.txt").write_bytes(b"\xff\xfe")
    (folder / "c.txt").symlink_to("gone.txt")
    manifest = read("folder", folder, root=tmp_path)
    assert ids(manifest) == ["b"]
    assert rejected(manifest) == [("a", "failed", "bad_text"), ("c", "failed", "missing_file")]
    config = load_config(document_of(folder, tmp_path / "caches"))
    recipe, memo = recipe_of(config), Memo(tmp_path / "caches")
    key = resolve(config, memo, map, recipe=recipe).key
    assert resolve(config, memo, map, recipe=recipe).key == key
    (folder / "gone.txt").write_text("three")
    assert resolve(config, memo, map, recipe=recipe).key != key


def test_what_cannot_be_decoded_costs_itself(tmp_path: Path) -> None:
    folder = put(tmp_path, {"a.flac": None, "b.flac": "no sound", "c.flac": ""})
    (folder / "d.flac").symlink_to("gone.flac")
    assert rejected(read("folder", folder, root=tmp_path)) == [
        ("b", "failed", "unknown_duration"),
        ("c", "failed", "empty_file"),
        ("d", "failed", "missing_file"),
    ]


@pytest.mark.parametrize("column", ["path", "path without extension", "name", "stem"])
def test_a_table_gives_the_texts(tmp_path: Path, column: str) -> None:
    folder = put(tmp_path / "wavs", {"x/a.flac": None, "x/b.flac": None, "c.flac": None})
    names = {
        "path": ("./x/a.flac", "c.flac"),
        "path without extension": ("x/a", "c"),
        "name": ("a.flac", "c.flac"),
        "stem": ("a", "c"),
    }[column]
    rows = f"{names[0]},one,hi,1\n{names[1]},three,en,2\ngone,no,en,3\n{names[0]},again,en,4\n,none,en,5\n"
    (tmp_path / "t.csv").write_text(f"file,text,language,snr\n{rows}")
    settings: dict[str, Any] = {"texts": str(tmp_path / "t.csv"), "columns": SourceColumns(audio="file")}
    manifest = read("folder", folder, root=tmp_path, **settings, keep_columns=("snr",))
    assert texts_of(manifest) == {"c": "three", "x/a": "one", "x/b": None}
    assert manifest.rows["language"].to_pylist() == ["en", "hi", None]
    assert manifest.rows["kept:snr"].to_pylist() == [2, 1, None]
    assert [reason for _, _, reason in rejected(manifest)] == ["missing_file", "repeated_row", "missing_file"]
    assert [file.name for file in manifest.files][-1] == "../t.csv"


def test_a_name_that_may_mean_two_recordings_is_refused_with_both(tmp_path: Path) -> None:
    folder = put(tmp_path / "wavs", {"x/a.flac": None, "y/a.flac": None})
    (tmp_path / "t.csv").write_text("audio,text\na,one\n")
    with pytest.raises(ManifestError, match=r"t.csv, row 1: 'a' may be 'x/a.flac' or 'y/a.flac'; write the path below"):
        read("folder", folder, root=tmp_path, texts=str(tmp_path / "t.csv"))


def test_ids_of_the_table_are_taken(tmp_path: Path) -> None:
    folder = put(tmp_path, {"a.flac": None, "b.flac": None})
    (tmp_path / "metadata.jsonl").write_text('{"audio": "b", "text": "two", "id": 17, "seconds": 0.5}\n')
    settings: dict[str, Any] = {"texts": str(tmp_path / "metadata.jsonl")}
    manifest = read("folder", folder, root=tmp_path, **settings, columns=SourceColumns(duration="seconds"))
    assert texts_of(manifest) == {"a": None, "17": "two"}
    assert manifest.rows["duration_s"].to_pylist() == [0.1, 0.5]


def test_a_recording_without_text_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "wavs"
    for number, (name, data, text, language) in enumerate(recordings(4)):
        (folder / language).mkdir(parents=True, exist_ok=True)
        (folder / language / name).write_bytes(data)
        if number != 1:
            (folder / language / name).with_suffix(".txt").write_text(text, encoding="utf-8")
    document = document_of(folder, tmp_path / "caches", languages_from_folders=True)
    report = build_here(load_config(document))
    assert (report.num_samples, report.excluded, report.failed) == (3, {"no_text": 1}, {})
    cache = open_cache(report.cache)
    expected = sorted(
        (f"{lang}/{Path(name).stem}", text, lang) for n, (name, _, text, lang) in enumerate(recordings(4)) if n != 1
    )
    samples: Any = cache.samples
    assert list(zip(*(samples[c].to_pylist() for c in ("sample_id", "text", "language")), strict=True)) == expected
    uncached = select(load_config(document, overrides=["loader.cache=off"]))
    assert [uncached.sample_id(i) for i in range(len(uncached))] == [sample_id for sample_id, _, _ in expected]
    for name, values in cache.lengths.items():
        assert values.tolist() == uncached.lengths[name].tolist()
    del document["text"]
    assert build_here(load_config(document)).num_samples == 4


def test_one_more_recording_is_another_cache_and_one_more_note_is_none(tmp_path: Path) -> None:
    folder = put(tmp_path / "wavs", {"a.flac": None, "a.txt": "one"})
    config = load_config(document_of(folder, tmp_path / "caches"))
    build_here(config)
    put(folder, {"notes.md": "x"})
    assert find_cache(config, recipe_of(config)).found is not None
    put(folder, {"deep/b.flac": None})
    assert find_cache(config, recipe_of(config)).found is None
    assert build_here(config).excluded == {"no_text": 1}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"keep_columns": ["snr"]}, "keep_columns are columns of source.texts, and there is none"),
        ({"kind": "table", "texts": "t.csv"}, r'source.texts is for source.kind = "folder", and it is "table"'),
        (
            {"kind": "jsonl", "audio_dir": "x"},
            r'source.audio_dir is for source.kind table, kaldi, nemo, lhotse, and it is "jsonl"',
        ),
        ({"columns": {"labels": "l"}}, r'source.columns.labels is not for source.kind = "folder"'),
        ({"kind": "ljspeech", "keep_columns": ["a"]}, r'not read from source.kind = "ljspeech", wanted "tar" or'),
        ({"kind": "jsonl", "keep_columns": ["text"]}, "'text' is the name of a column that caches have anyway"),
        ({"kind": "jsonl", "keep_columns": ["a b"]}, "'a b' is no name of letters, digits and underscores"),
        ({"kind": "jsonl", "keep_columns": ["a", "a"]}, "'a' is named twice"),
    ],
)
def test_settings_that_say_nothing_are_refused(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**document_of(tmp_path, tmp_path), "source": {"kind": "folder", "manifest": "x", **source}})


def test_a_language_that_is_a_link_is_read_and_circles_end(tmp_path: Path) -> None:
    put(tmp_path / "set", {"hi/1.flac": None, "hi/1.txt": "one"})
    put(tmp_path / "far", {"a/2.flac": None, "a/2.txt": "two"})
    (tmp_path / "set" / "ta").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "again").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "hi" / "loop").symlink_to("..")
    manifest = read("folder", tmp_path / "set", root=tmp_path, languages_from_folders=True)
    assert texts_of(manifest) == {"hi/1": "one", "ta/a/2": "two"}
    assert manifest.rows["language"].to_pylist() == ["hi", "ta"]
    with pytest.raises(ManifestError, match=r"ta/a/2\.flac', which is .*far/a/2\.flac' and not below .*set'") as err:
        read("folder", tmp_path / "set", root=tmp_path, confined=True)
    assert err.value.code == "FB206"


def test_what_is_not_read_fails_by_name_and_a_cache_of_nothing_says_so(tmp_path: Path) -> None:
    folder = put(tmp_path / "set", {"a.txt": "one", "both.flac": None, "both.m4a": "x"})
    for name, head in {"a.m4a": b"\0\0\0\x1cftypM4A ", "b.webm": b"\x1a\x45\xdf\xa3", "c.AAC": b"\xff\xf1"}.items():
        (folder / name).write_bytes(head + bytes(200))
    (folder / "d.wav").write_bytes(audio(0, kind="WAV"))
    document = document_of(folder, tmp_path / "caches", min_duration_s=1.0)
    document["run"]["max_failed_share"] = 1.0
    report = build_here(load_config(document))
    assert next(iter(report.lines())).startswith("sealed without a sample: ")
    rows = {row["sample_id"]: row for row in json_lines(Path(report.cache) / "rejected.jsonl")}
    reasons = {name: row["reason"] for name, row in rows.items()}
    assert reasons == {"a": "format", "b": "format", "both": "too_short", "c": "format", "d": "empty_audio"}
    assert "a.m4a: sample a: it is M4A or MP4, which is not read; convert it: ffmpeg" in rows["a"]["message"]
    assert "its header says 0 samples" in rows["d"]["message"]
    assert "0.101 s is below" in rows["both"]["message"]


def test_the_list_of_what_was_left_out_says_why_where_shards_are_linked_too(tmp_path: Path) -> None:
    folder = put(tmp_path / "set", {"a.flac": None, "a.txt": "one", "b.flac": None, "b.txt": "two"})
    (folder / "b.flac").write_bytes(audio(1600)[:-1000])
    document = document_of(folder, tmp_path / "caches")
    document["run"]["max_failed_share"] = 1.0
    said = []
    for prompt in ("whisper", "plain"):
        document["text"]["prompt"] = prompt
        report = build_here(load_config(document))
        ((row),) = json_lines(Path(report.cache) / "rejected.jsonl")
        said.append(row["message"])
    assert report.shards_linked == 1
    assert said[0] == said[1]
    assert said[0].startswith("sample b: the audio cannot be decoded")
