"""Fields and columns that nothing takes are counted by name, of every kind of source; a field twice fails its row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.here_pool import HerePool
from forebay.rows.manifest import OTHERS, Manifest, Unused, described, merged
from tests.rows.helpers import audio, ids, read, rejected, write_manifest, write_tar
from tests.rows.helpers import described as as_json
from tests.rows.pictures import asked, converse, picture, write_lines

TWICE = b'{"text": "a", "text": "b", "audio": "x.flac"}'


def test_counts_are_named_the_most_frequent_first() -> None:
    counts = {"b": 1, "split": 100, "a": 1}
    assert described(counts) == '3 fields are not used: "split" (100 rows), "a" (1 row), "b" (1 row)'
    assert described({"x": 2}) == '1 field is not used: "x" (2 rows)'
    assert described({f"f{n:02}": 1 for n in range(23)}).endswith('"f19" (1 row) and 3 more')


@given(st.dictionaries(st.text(), st.integers(1, 9), max_size=30))
def test_no_character_of_a_name_reaches_a_terminal(counts: dict[str, int]) -> None:
    line = described(counts)
    assert all(c.isprintable() or c in "\u200c\u200d\u3000" for c in line)  # joiners of Hindi and emoji, a wide space
    assert described({"नमस्ते": 1}) == '1 field is not used: "नमस्ते" (1 row)'


def test_names_without_end_fill_no_memory() -> None:
    unused = Unused()
    for number in range(1000):
        unused.add({f"{number:04}" + "x" * 1000})
    assert len(unused.counts) == 101
    assert unused.counts[OTHERS] == 900
    assert max(map(len, unused.counts)) == 60
    unused.add(["\udcff"])
    json.dumps(unused.counts).encode("utf-8")


@given(st.lists(st.lists(st.sampled_from([f"f{n}" for n in range(300)]), max_size=250), max_size=6))
def test_parts_give_what_the_whole_gives_where_few_names_occur(parts: list[list[str]]) -> None:
    whole, split = Unused(), []
    for names in parts:
        part = Unused()
        for name in names:
            part.add([name])
            whole.add([name])
        split.append(part.counts)
    together = merged(split)
    assert sum(together.values()) == sum(whole.counts.values()) == sum(map(len, parts))
    if len({name for names in parts for name in names}) <= 100:
        assert together == whole.counts


def jsonl(folder: Path) -> Manifest:
    (folder / "x.flac").write_bytes(audio())
    rows = [{"audio": "x.flac", "text": "a", "id": str(n), "speaker": n or None, "split": "train"} for n in range(3)]
    return read("jsonl", write_lines(folder / "m.jsonl", rows), root=folder)


def text(folder: Path) -> Manifest:
    rows = [{"audio": "x.flac", "text": "a", "speaker": n or None, "split": None} for n in range(3)]
    return read("text", write_lines(folder / "m.jsonl", rows), root=folder)


def webdataset(folder: Path) -> Manifest:
    fields: list[dict[str, Any]] = [
        {"text": "a", "transcript": "A.", "speaker": 1},
        {"transcription": "b", "speaker": 2},
        {"text": "c", "id": "z"},
    ]
    members = [
        (f"{n}{e}", d) for n, f in enumerate(fields) for e, d in ((".flac", audio(seed=n)), (".json", as_json(**f)))
    ]
    return read("webdataset", write_tar(folder / "a.tar", members), root=folder)


def filelist(folder: Path) -> Manifest:
    write_tar(folder / "a.tar", [("x.flac", audio()), ("x.json", as_json(text="a", speaker=1, id="other"))])
    (folder / "m.tsv").write_text("a.tar\tx\ten\t0.1\n")
    return read("filelist", folder / "m.tsv", root=folder)


def tar(folder: Path) -> Manifest:
    write_tar(folder / "a.tar", [("x.flac", audio()), ("y.flac", audio(seed=1))])
    rows = [{"tar_member_name": f"{name}.flac", "speaker": name, "split": "train"} for name in "xy"]
    return read("tar", write_manifest(folder / "m.parquet", rows), root=folder)


def hf(folder: Path) -> Manifest:
    columns = {"audio": [{"bytes": audio(seed=n), "path": f"{n}.flac"} for n in range(2)], "text": ["a", "b"]}
    table = pa.table({**columns, "transcription": ["A.", "B."], "speaker": [None, 1], "duration": [0.1, 0.1]})
    pq.write_table(table, folder / "d.parquet")
    return read("hf", folder / "d.parquet", root=folder)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (jsonl, {"speaker": 2, "split": 3}),
        (text, {"audio": 3, "speaker": 2}),
        (webdataset, {"speaker": 2, "transcript": 1}),
        (filelist, {"speaker": 1}),
        (tar, {"speaker": 2, "split": 2}),
        (hf, {"speaker": 2, "transcription": 2}),
    ],
)
def test_fields_of_speech_that_nothing_takes(
    tmp_path: Path, make: Callable[[Path], Manifest], expected: dict[str, int]
) -> None:
    manifest = make(tmp_path)
    assert len(manifest.rows) > 0
    assert not manifest.rejected.num_rows
    assert manifest.unused == expected


def test_counts_are_the_same_whatever_reads_the_parts(tmp_path: Path) -> None:
    for number in range(12):
        fields = {"text": "a", f"only{number}": 1, "all": 1}
        write_tar(tmp_path / f"{number:02}.tar", [("x.flac", audio(seed=number)), ("x.json", as_json(**fields))])
    from forebay.config import SourceConfig
    from tests.rows.helpers import read_rows

    source = SourceConfig(kind="webdataset", manifest=str(tmp_path / "*.tar"))
    one = read_rows(source, cache_root=tmp_path)
    pool = read_rows(source, cache_root=tmp_path, map_=HerePool().map)
    assert one.unused == pool.unused == {"all": 12, **{f"only{n}": 1 for n in range(12)}}
    assert list(one.unused) == list(pool.unused)


def test_a_field_twice_in_a_line_fails_that_row(tmp_path: Path) -> None:
    (tmp_path / "x.flac").write_bytes(audio())
    row = {"audio": "x.flac", "text": "t", "id": "fine"}
    for kind in ("jsonl", "text"):
        manifest = read(kind, write_lines(tmp_path / f"{kind}.jsonl", [TWICE, row, "", TWICE]), root=tmp_path)
        assert ids(manifest) == ["fine"]
        assert rejected(manifest) == [(f"{kind}/{n}", "failed", "repeated_field") for n in (1, 4)]
        assert manifest.rows["row"].to_pylist() == [1]
        message = manifest.rejected["message"][1].as_py()
        assert f'{kind}.jsonl, line 4: field "text" stands there twice' in message
        only = read(kind, write_lines(tmp_path / f"{kind}.jsonl", [TWICE]), root=tmp_path)
        assert (len(only.rows), sum(only.counts()["failed"].values())) == (0, 1)


def test_a_field_twice_beside_a_clip_fails_that_clip(tmp_path: Path) -> None:
    members = [("x.flac", audio()), ("x.json", TWICE), ("y.flac", audio(seed=1)), ("y.json", as_json(text="t"))]
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "m.tsv").write_text("a.tar\tx\ten\t0.1\na.tar\ty\ten\t0.1\n")
    for kind, name in (("webdataset", "a.tar"), ("filelist", "m.tsv")):
        manifest = read(kind, tmp_path / name, root=tmp_path)
        assert ids(manifest) == ["y"]
        assert rejected(manifest) == [("x", "failed", "repeated_field")]
        assert 'a.tar: member x.json field "text" stands there twice' in manifest.rejected["message"][0].as_py()


def test_conversations_in_lines_and_tars(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture(1))
    rows: list[Any] = [asked("x.png", id=str(n), split="a", model="m" if n else None) for n in range(3)]
    bad: list[Any] = [asked("x.png", id="film", video="f.mp4"), b'{"question": "a", "question": "b", "answer": "c"}']
    manifest = converse("jsonl", write_lines(tmp_path / "m.jsonl", [*rows, *bad]), root=tmp_path)
    assert manifest.unused == {"split": 3, "model": 2}
    assert rejected(manifest) == [("film", "failed", "has_video"), ("m/4", "failed", "repeated_field")]
    messages = manifest.rejected["message"].to_pylist()
    assert messages[0].startswith("m.jsonl, line 4: field video is given, and videos cannot be stored")
    assert messages[1].startswith('m.jsonl, line 5: field "question" stands there twice')
    documents = [json.dumps(row).encode() if isinstance(row, dict) else row for row in (*rows, *bad)]
    members = [(f"{n}{e}", d) for n, doc in enumerate(documents) for e, d in ((".json", doc), (".png", picture(n)))]
    manifest = converse("webdataset", write_tar(tmp_path / "a.tar", members), root=tmp_path)
    assert manifest.unused == {"split": 3, "model": 2}
    assert rejected(manifest) == [("3", "failed", "has_video"), ("4", "failed", "repeated_field")]
    assert manifest.rejected["message"][0].as_py().startswith("a.tar: member 3.json: field video is given")
