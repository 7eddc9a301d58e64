"""`kind = "table"`: the same rows whatever the form, the form's own quirks, and rows that cost themselves."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config import SourceColumns
from forebay.errors import ConfigError, ManifestError
from forebay.rows.manifest import Manifest
from forebay.rows.readers.csv_tables import WantedColumns, read_csv
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import FORMAT_VERSION
from forebay.store.lookup import find_cache
from tests.preprocess.here_pool import build_here
from tests.rows.helpers import SPEECH, audio, ids, read, rejected
from tests.rows.tables import COLUMNS, FORMS, write_clips, write_table

CLIP = audio(1600)


def clips(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(CLIP)


def listed(path: Path, data: str | bytes, **settings: Any) -> Manifest:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read("table", path, root=path.parent, **settings)


def config_of(manifest: Path, root: Path, **source: Any) -> Any:
    document = {
        "name": "table",
        "source": {"kind": "table", "manifest": str(manifest), "columns": COLUMNS, **source},
        "audio": {"features": "log_mel", "n_mels": 80, "dtype": "float16"},
        "text": {"tokenizer": str(SPEECH / "model"), "prompt": "whisper"},
        "plan": {"kind": "bucket", "edges_s": [30], "batch_size": 3, "lockstep": 1, "tail": "short"},
        "run": {"cache_root": str(root), "num_workers": 1},
    }
    return load_config(document)


def contents(cache: Cache) -> dict[str, Any]:
    samples: Any = cache.samples
    return {name: samples[name].to_pylist() for name in samples.column_names}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cache]:
    """A cache of the same recordings by each form of table."""
    root = tmp_path_factory.mktemp("tables")
    rows = write_clips(root / "cv" / "clips")
    made = {}
    for form in FORMS:
        table = write_table(root / "cv" / form, rows)
        config = config_of(
            table, root / form, audio_dir=str(root / "cv" / "clips"), keep_columns=["snr", "up_votes", "client_id"]
        )
        made[form] = open_cache(build_here(config).cache)
    return made


def test_all_forms_give_the_same_samples(caches: dict[str, Cache]) -> None:
    first = caches[FORMS[0]]
    assert len(first) == 8
    keys = {tuple(entry.key for group in first.groups for _, entry in c.shard_entries(group)) for c in caches.values()}
    assert len(keys) == 1
    for cache in caches.values():
        assert contents(cache) == contents(first)


def test_kept_columns_are_those_of_the_rows(caches: dict[str, Cache], tmp_path: Path) -> None:
    rows = write_clips(tmp_path)
    samples: Any = caches["commas.csv"].samples
    assert {name: samples[name].to_pylist() for name in ("client_id", "snr", "up_votes")} == {
        name: [row[name] for row in rows] for name in ("client_id", "snr", "up_votes")
    }
    assert [samples.schema.field(n).type for n in ("client_id", "snr", "up_votes")] == [
        pa.large_string(),
        pa.float64(),
        pa.int64(),
    ]
    assert samples["sample_id"].to_pylist() == [Path(row["path"]).stem for row in rows]
    assert samples["source"].to_pylist() == [row["path"] for row in rows]


def test_media_do_not_depend_on_kept_columns(caches: dict[str, Cache], tmp_path: Path) -> None:
    cache = caches["commas.csv"]
    root = cache.folder.parents[1] / "cv"
    config = config_of(root / "commas.csv", tmp_path, audio_dir=str(root / "clips"))
    other = open_cache(build_here(config).cache)
    assert [e.key for _, e in other.shard_entries("audio")] == [e.key for _, e in cache.shard_entries("audio")]
    assert "snr" not in other.column_names
    assert other.metadata["format_version"] == FORMAT_VERSION
    assert other.metadata["unused_fields"] == {"client_id": 8, "snr": 8, "up_votes": 8}


def test_audio_dir_is_in_no_key(tmp_path: Path) -> None:
    rows = write_clips(tmp_path / "one" / "clips", count=2)
    table = write_table(tmp_path / "one" / "a.csv", rows)
    config = config_of(table, tmp_path / "caches", audio_dir=str(tmp_path / "one" / "clips"))
    report = build_here(config)
    (tmp_path / "one" / "clips").rename(tmp_path / "elsewhere")
    moved = config_of(table, tmp_path / "caches", audio_dir=str(tmp_path / "elsewhere"))
    found = find_cache(moved, recipe_of(moved))
    assert found.found is not None
    assert (str(found.found.folder), found.state) == (str(report.cache), "same")
    (tmp_path / "elsewhere" / rows[0]["path"]).write_bytes(CLIP)
    assert find_cache(moved, recipe_of(moved)).found is None


def test_paths_are_relative_to_the_table(tmp_path: Path) -> None:
    clips(tmp_path / "data" / "wavs", "a.flac", "b.flac")
    manifest = listed(tmp_path / "data" / "t.csv", "audio,text\nwavs/a.flac,one\nwavs/b.flac,two\n")
    assert ids(manifest) == ["wavs/a", "wavs/b"]
    assert [file.name for file in manifest.files] == ["t.csv", "wavs/a.flac", "wavs/b.flac"]
    assert manifest.rows["duration_s"].to_pylist() == [0.1, 0.1]


def test_recordings_in_a_folder_beside_the_table_are_pointed_at(tmp_path: Path) -> None:
    clips(tmp_path / "cv" / "clips", "a.flac", "b.flac")
    (tmp_path / "cv" / "other").mkdir()
    with pytest.raises(
        ManifestError, match=r"'a.flac', which is not beside it but in .*set source.audio_dir = .*/clips"
    ):
        listed(tmp_path / "cv" / "t.csv", "audio,text\na.flac,one\nb.flac,two\n")
    clips(tmp_path / "cv", "b.flac")
    assert ids(listed(tmp_path / "cv" / "t.csv", "audio,text\na.flac,one\nb.flac,two\n")) == ["b"]


def test_quotes_of_a_csv_quote_and_those_of_a_tsv_are_text(tmp_path: Path) -> None:
    clips(tmp_path, "a.flac", "b.flac", "c.flac")
    manifest = listed(
        tmp_path / "t.csv",
        '\ufeffaudio,text\r\na.flac,"He said ""hi"",\nand left"\r\n\r\nb.flac,5" of it\r\nc.flac,""\r\n',
    )
    assert manifest.rows["text"].to_pylist() == ['He said "hi",\nand left', '5" of it', None]
    manifest = listed(tmp_path / "t.tsv", 'audio\ttext\na.flac\t"Ich bin da", sagt er.\nb.flac\t"auf\nc.flac\tzu"\n')
    assert manifest.rows["text"].to_pylist() == ['"Ich bin da", sagt er.', '"auf', 'zu"']
    manifest = listed(tmp_path / "q.tsv", '"audio"\t"text"\n"a.flac"\t"one\ttwo"\n')
    assert manifest.rows["text"].to_pylist() == ["one\ttwo"]


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_another_delimiter_is_found_and_said(
    tmp_path: Path, mark: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    clips(tmp_path, "a.flac")
    with caplog.at_level("INFO"):
        manifest = listed(tmp_path / "t.csv", f"audio{mark}text\na.flac{mark}one, two\n")
    assert manifest.rows["text"].to_pylist() == ["one, two"]
    assert f"t.csv: its columns are parted by {name}" in caplog.text


def test_bad_rows_cost_themselves(tmp_path: Path) -> None:
    clips(tmp_path, "a.flac", "b.flac", "z.flac")
    data = b"audio,text,n\na.flac,one,1\nb.flac,two\ngone.flac,three,3\n,four,4\nb.flac,\xff\xfe,5\nz.flac,,6\n"
    manifest = listed(tmp_path / "t.csv", data)
    assert ids(manifest) == ["a", "z"]
    assert manifest.rows["text"].to_pylist() == ["one", None]
    assert rejected(manifest) == [
        ("t/1", "failed", "bad_row"),
        ("gone", "failed", "missing_file"),
        ("t/3", "failed", "missing_file"),
        ("b", "failed", "bad_text"),
    ]
    messages = manifest.rejected["message"].to_pylist()
    assert "t.csv, row 2: 2 columns, the header has 3" in messages[0]
    assert "row 5: column text is not UTF-8" in messages[3]


def test_bad_lines_cost_themselves(tmp_path: Path) -> None:
    clips(tmp_path, "a.flac", "b.flac")
    lines = ['{"audio": "a.flac", "text": "one"}', '{"audio": "b.flac", "text": ["x"]}', '{"audio": "b.f', "", "[1]"]
    manifest = listed(tmp_path / "t.jsonl", "\n".join([*lines, '{"audio": "b.flac", "text": null, "text": "x"}']))
    assert ids(manifest) == ["a"]
    assert [reason for _, _, reason in rejected(manifest)] == ["bad_row", "bad_row", "bad_row", "repeated_field"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_url_and_data_in_the_place_of_a_name_cost_their_rows(tmp_path: Path, form: str) -> None:
    clips(tmp_path, "a.flac")
    names = ["https://example.org/a.flac", "a.flac", "data:audio/flac;base64,ZkxhQw"]
    rows = [{"path": name, "sentence": "one"} for name in names]
    columns = SourceColumns(audio="path", text="sentence")
    for kind in ("table", "hf") if form == "parquet" else ("table",):
        manifest = read(kind, write_table(tmp_path / f"t.{form}", rows), root=tmp_path, columns=columns)
        assert [row["text"] for row in manifest.rows.to_pylist()] == ["one"]
        assert [reason for _, _, reason in rejected(manifest)] == ["missing_file", "missing_file"]
        url, data = manifest.rejected["message"].to_pylist()
        assert "row 1: column path is 'https://example.org/a.flac', and nothing is fetched from elsewhere" in url
        assert "row 3: column path is a data: URI" in data


def test_durations_are_those_of_the_named_column(tmp_path: Path) -> None:
    clips(tmp_path, "a.flac", "b.flac", "c.flac")
    data = "audio,text,seconds\na.flac,one,0.5\nb.flac,two,\nc.flac,three,0:03\n"
    manifest = listed(tmp_path / "t.csv", data, columns=SourceColumns(duration="seconds"))
    assert manifest.rows["duration_s"].to_pylist() == [0.5, 0.1]
    assert manifest.rows["stated_s"].to_pylist() == [0.5, None]
    assert rejected(manifest) == [("c", "failed", "bad_row")]
    assert "'0:03', wanted seconds as a number" in manifest.rejected["message"][0].as_py()
    unnamed = listed(tmp_path / "u.csv", "audio,text,duration\na.flac,one,9\n")
    assert unnamed.rows["duration_s"].to_pylist() == [0.1]
    assert unnamed.unused == {"duration": 1}


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path, form: str) -> None:
    rows = write_clips(tmp_path, count=2)
    table = write_table(tmp_path / f"t.{form}", rows)
    with pytest.raises(ManifestError, match=r"no column audio .source.columns.audio.; it has path, sentence"):
        read("table", table, root=tmp_path)
    near = SourceColumns(audio="path", text="sentences")
    with pytest.raises(ManifestError, match=r"no column sentences .*did you mean sentence"):
        read("table", table, root=tmp_path, columns=near)
    with pytest.raises(ConfigError, match=r"no column client .source.keep_columns.; it has .*did you mean client_id"):
        read("table", table, root=tmp_path, columns=SourceColumns(**COLUMNS), keep_columns=("client",))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"PAR1....", "is a parquet file, wanted a table in UTF-8 with a header line"),
        ("t.csv", b"", "is empty, wanted a table with a header line"),
        ("t.csv", b'audio,text\na.flac,"open\nb.flac,two\n', "line 3: unexpected end of data: a quotation mark"),
        ("t.csv", b'audio,text,x\na.flac,one,"open\nb.flac,two,"x\n', "line 3: .*a quotation mark is not closed"),
        ("t.csv", b"audio,audio\na.flac,b\n", "column audio occurs more than once"),
        ("t.jsonl", b"audio,text\na.flac,x\n", "is a CSV, wanted JSON lines"),
        ("t.jsonl", b"", "is empty, wanted an object a line"),
        ("t.txt", b"audio,text\n", "the name of a table ends in .csv, .tsv, .parquet, .jsonl, .arrow"),
        ("t.arrow", b"nothing", "is neither parquet nor an arrow stream"),
    ],
)
def test_what_is_no_table_is_called_what_it_is(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    clips(tmp_path, "a.flac")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ManifestError, match=message):
        read("table", tmp_path / name, root=tmp_path)


def test_bytes_in_parquet_and_arrow_are_read_without_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": CLIP, "path": "x/a.flac"}, {"bytes": None, "path": "b.flac"}, {"bytes": None, "path": None}]
    table = pa.table(
        {"audio": pa.array(cells, kind), "text": list("abc"), "snr": pa.array([1.5, None, 2], pa.float32())}
    )
    clips(tmp_path, "b.flac")
    pq.write_table(table, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("t.parquet", "t.arrow"):
        manifest = read("table", tmp_path / name, root=tmp_path, keep_columns=("snr",))
        assert ids(manifest) == ["x/a", "b"]
        assert rejected(manifest) == [("t/2", "failed", "missing_file")]
        assert manifest.rows["kept:snr"].to_pylist() == [1.5, None]


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8),
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([",", ";"]),
)
def test_a_csv_is_read_as_the_csv_module_reads_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], mark: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    text = io.StringIO()
    writer = csv.writer(text, delimiter=mark, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([("audio", "text"), *rows])
    (folder / "t.csv").write_text(text.getvalue(), encoding="utf-8", newline="")
    table = read_csv(folder / "t.csv", WantedColumns(frozenset(("audio", "text")), "audio"))
    with open(folder / "t.csv", encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file, delimiter=mark))
    found = table.columns(["audio", "text"]).to_pylist()
    assert found == [{name: value or None for name, value in row.items()} for row in expected]
    assert not table.problems


@given(st.binary(max_size=200), st.sampled_from(["t.csv", "t.tsv", "t.jsonl"]))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    heads = {
        "t.csv": b"audio,text,n\n",
        "t.tsv": b"audio\ttext\tn\n",
        "t.jsonl": b'{"audio": "a", "text": "b", "n": 1}\n',
    }
    head = heads[name]
    (folder / name).write_bytes(head + data)
    try:
        manifest = read("table", folder / name, root=folder, keep_columns=("n",))
    except ManifestError:
        return
    assert {reason for _, _, reason in rejected(manifest)} <= {
        *("missing_file", "bad_row", "bad_text", "repeated_field", "duplicate_id", "empty_file"),
        *("unknown_duration", "bad_metadata"),
    }


@given(
    st.lists(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n\t\ufeff"), min_size=1, max_size=8),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_tsv_is_read_as_it_stands(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    """The oracle is a split by tabs: no quotation mark means anything, and a row of another length is bad."""
    folder = tmp_path_factory.mktemp("tsv")
    text = "".join("\t".join(row) + "\n" for row in [["audio", "text"], *rows])
    (folder / "t.tsv").write_text(text, encoding="utf-8", newline="")
    table = read_csv(folder / "t.tsv", WantedColumns(frozenset(("audio", "text")), "audio"))
    found = [(row["audio"], row["text"]) for row in table.columns(["audio", "text"]).to_pylist()]
    assert found == [tuple(row) if len(row) == 2 else (None, None) for row in rows]
    assert [*table.problems] == [number for number, row in enumerate(rows) if len(row) != 2]


def test_confined_holds_for_the_table_and_for_audio_dir_each(tmp_path: Path) -> None:
    clips(tmp_path / "elsewhere", "a.flac")
    table = tmp_path / "data" / "t.csv"
    with pytest.raises(ManifestError, match=r"source.confined allows no other place"):
        listed(table, "audio,text\n../elsewhere/a.flac,one\n", confined=True)
    clips(tmp_path / "data" / "clips", "b.flac")
    (tmp_path / "data" / "clips" / "a.flac").symlink_to(tmp_path / "elsewhere" / "a.flac")
    audio_dir = {"audio_dir": str(tmp_path / "data" / "clips"), "confined": True}
    assert ids(listed(table, "audio,text\nb.flac,one\n", **audio_dir)) == ["b"]
    with pytest.raises(ManifestError, match=r"source.confined allows no other place"):
        listed(table, "audio,text\na.flac,one\n", **audio_dir)
    with pytest.raises(ManifestError, match=r"source.audio_dir .*gone is no folder"):
        listed(table, "audio,text\nb.flac,one\n", audio_dir=str(tmp_path / "gone"))
