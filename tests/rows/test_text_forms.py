"""The forms of `kind = "text"`: the same texts give the same rows, slices read what they take, bad texts cost one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.config.data import SourceColumns, SourceConfig
from forebay.errors import ConfigError, ManifestError
from forebay.rows.readers import line_blocks as line_index
from forebay.rows.readers import line_blocks as lines
from forebay.rows.readers import text_files
from forebay.rows.readers.line_blocks import CODECS
from forebay.rows.readers.text_files import JsonLines
from tests.rows.helpers import read_rows

LINES = [f"texts.{kind}{end}" for kind in ("txt", "jsonl") for end in ("", *CODECS)]
FORMS = (*LINES, "texts.parquet")
KEPT = "می\u200cخواهم \u200fעברית abc कार्य"


def write(path: Path, texts: list[str], **columns: list[Any]) -> Path:
    """Writes texts in the form of a file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=7)
        return path
    names = ["text", *columns]
    rows = [dict(zip(names, row, strict=True)) for row in zip(texts, *columns.values(), strict=True)]
    written = texts if ".txt" in path.name else [json.dumps(row) for row in rows]
    data = "".join(f"{line}\n" for line in written).encode()
    codec = CODECS.get(path.suffix)
    path.write_bytes(data if codec is None else pa.Codec(codec).compress(data, asbytes=True))
    return path


def source(path: Path | tuple[Path, ...], **changes: Any) -> SourceConfig:
    paths = path if isinstance(path, tuple) else (path,)
    return SourceConfig(kind="text", manifest=tuple(map(str, paths)), **changes)


def read(path: Path | tuple[Path, ...], root: Path | str = "caches", **changes: Any) -> Any:
    return read_rows(source(path, **changes), cache_root=root)


def rows_of(manifest: Any) -> list[tuple[Any, ...]]:
    columns = ("row", "sample_id", "text", "language", "prompt", "duration_s", "explicit_id")
    return list(zip(*(manifest.rows[name].to_pylist() for name in columns), strict=True))


TEXTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1), min_size=1, max_size=20
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=TEXTS)
def test_all_forms_of_the_same_texts_give_the_same_rows(tmp_path: Path, texts: list[str]) -> None:
    texts = [text if text.strip(" \t\x0b\x0c") and text[0] not in "{\ufeff" else f"a{text}" for text in texts]
    found = {name: rows_of(read(write(tmp_path / name, texts))) for name in FORMS}
    wanted = [(i, f"texts/{i + 1}", text, None, None, 0.0, False) for i, text in enumerate(texts)]
    assert found == dict.fromkeys(FORMS, wanted)


@pytest.mark.parametrize("name", [name for name in FORMS if ".txt" not in name])
def test_fields_are_read_by_their_names(tmp_path: Path, name: str) -> None:
    more: dict[str, list[Any]] = {
        "lang": ["hi", None],
        "key": ["a", None],
        "before": [None, "say"],
        "speaker": [3, 4],
        "other": [1, 1],
    }
    path = write(tmp_path / name, ["one", "two"], **more)
    columns = SourceColumns(language="lang", id="key", prompt="before")
    manifest = read(path, columns=columns, keep_columns=("speaker",))
    assert [row[1:5] for row in rows_of(manifest)] == [("a", "one", "hi", None), ("texts/2", "two", None, "say")]
    assert manifest.rows["kept:speaker"].to_pylist() == [3, 4]
    assert manifest.unused == {"other": 2}
    assert rows_of(read(path, columns=columns, languages=("HI",)))[0][1] == "a"
    sentence = write(tmp_path / f"s{name}", ["x"], sentence=["y"])
    assert rows_of(read(sentence, columns=SourceColumns(text="sentence")))[0][2] == "y"


def test_a_parquet_file_says_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", ["x"], sentence=["y"])
    with pytest.raises(ConfigError, match=r"no column sentense \(source\.columns\.text\); it has text, s.*; did you"):
        read(path, columns=SourceColumns(text="sentense"))
    with pytest.raises(ConfigError, match=r"no column sex \(source\.keep_columns\); it has text, sentence"):
        read(path, keep_columns=("sex",))
    with pytest.raises(ManifestError, match=r"has no column language, and source\.languages is \['en'\]"):
        read(path, languages=("en",))
    pq.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(ManifestError, match=r"t\.parquet: column text is int64, wanted string"):
        read(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ManifestError, match=r"t\.parquet is neither parquet nor"):
        read(path)


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt.zst", ["x"])
    with pytest.raises(ConfigError, match=r"no fields, and source\.columns is \{'id': 'key'\}; leave columns out"):
        read(path, columns=SourceColumns(id="key"))
    with pytest.raises(ManifestError, match=r"whose lines have no language"):
        read(path, languages=("en",))


@pytest.mark.parametrize("name", FORMS)
def test_a_bad_text_costs_itself(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ["good", "n\0l", KEPT, "x" * 200, "last"])
    manifest = read(path, max_sample_bytes=180)
    assert [row[1:3] for row in rows_of(manifest)] == [
        *zip(("texts/1", "texts/2", "texts/3", "texts/5"), ("good", "n\0l", KEPT, "last"), strict=True)
    ]
    ((sample_id, reason, large),) = manifest.failed()
    assert (sample_id, reason) == ("texts/4", "too_large")
    assert f"{name}, {'row' if path.suffix == '.parquet' else 'line'} 4: " in large
    assert "has more than 180 bytes, which is source.max_sample_bytes; correct the manifest" in large


def test_lone_surrogates_and_broken_bytes_cost_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\\ud800"}\n{"text": "\xff"}\n{"text": "\\ud83d\\ude00"}\n')
    manifest = read(path)
    assert [row[2] for row in rows_of(manifest)] == ["a", "\U0001f600"]
    (_, surrogate, half), (_, broken, where) = manifest.failed()
    assert (surrogate, broken) == ("bad_text", "bad_text")
    assert "line 2: field text holds half of a surrogate pair" in half
    assert "line 3: is not UTF-8: 'utf-8' codec can't decode byte 0xff in position 10" in where
    column = pa.array([b"a", b"\xff", b"\xed\xa0\x80", None]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "t.parquet")
    manifest = read(tmp_path / "t.parquet")
    assert [row[1:3] for row in rows_of(manifest)] == [("t/1", "a"), ("t/4", None)]
    assert [(sample_id, reason) for sample_id, reason, _ in manifest.failed()] == [
        ("t/2", "bad_text"),
        ("t/3", "bad_text"),
    ]
    assert "t.parquet, row 2: column text is not UTF-8" in next(manifest.failed())[2]


def test_marks_of_direction_and_joiners_are_kept(tmp_path: Path) -> None:
    for name in FORMS:
        assert rows_of(read(write(tmp_path / name, [KEPT])))[0][2] == KEPT


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.sampled_from(FORMS), min_size=1, max_size=3, unique=True),
    start=st.none() | st.integers(-60, 60),
    stop=st.none() | st.integers(-60, 60),
    step=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(1, 9),
)
def test_a_slice_is_the_slice_of_all_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    start: int | None,
    stop: int | None,
    step: int | None,
    most: int | None,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(line_index, "LINES", 4)
        patched.setattr(text_files, "LINES", 4)
        patched.setattr(line_index, "write_bytes", Path.write_bytes)
        patched.setattr(lines, "_FIRST_BYTES", 40)
        paths = tuple(
            write(tmp_path / f"{number}{name}", [f"{name} {i}" for i in range(20)]) for number, name in enumerate(names)
        )
        everything = rows_of(read(paths))
        rows = ":".join("" if part is None else str(part) for part in (start, stop, step))
        wanted = everything[slice(start, stop, step)][:most]
        if not wanted:
            with pytest.raises(ManifestError, match=r"source\.rows is .*, which selects none of \d+ rows; correct it"):
                read(paths, tmp_path, rows=rows, max_samples=most)
            return
        found = rows_of(read(paths, tmp_path, rows=rows, max_samples=most))
        assert found == wanted


def test_a_slice_of_a_large_file_reads_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {i}" for i in range(60_000)]
    plain, table = write(tmp_path / "t.txt", texts), tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": texts}), table, row_group_size=5000)
    wanted = [(f"t/{i + 1}", texts[i]) for i in range(50_000, 50_010)]
    assert [row[1:3] for row in rows_of(read(plain, tmp_path, rows="50000:50010"))] == wanted
    assert [row[1:3] for row in rows_of(read(table, tmp_path, rows="50000:50010"))] == wanted
    numbers: list[int] = []
    blocks = lines._blocks

    def counted(*args: Any, **named: Any) -> Any:
        for block in blocks(*args, **named):
            numbers.extend(range(block.place.line, block.after.line))
            yield block

    monkeypatch.setattr(lines, "_blocks", counted)
    assert [row[1:3] for row in rows_of(read(plain, tmp_path, rows="50000:50010"))] == wanted
    first = [number for number in numbers if number < 40_000]
    assert len(first) < 8000  # of the look at the form
    assert len(numbers) - len(first) < 8000


def test_what_stands_beside_texts_in_a_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "LICENSE.txt", ["a licence"])
    write(tmp_path / "data.jsonl.zst", ["one"])
    assert [row[1] for row in rows_of(read(tmp_path))] == ["LICENSE/1"]
    assert "LICENSE.txt is read, and not data.jsonl.zst; name what is meant by a glob" in caplog.text
    caplog.clear()
    (tmp_path / "LICENSE.txt").unlink()
    write(tmp_path / "more.parquet", ["two"])
    assert [row[1] for row in rows_of(read(tmp_path))] == ["data/1"]
    assert "and not more.parquet" in caplog.text
    (tmp_path / "data.jsonl.zst").unlink()
    assert [row[1] for row in rows_of(read(tmp_path))] == ["more/1"]
    both = (write(tmp_path / "t.txt", ["one"]), write(tmp_path / "t.txt.gz", ["one"]))
    assert [row[1] for row in rows_of(read(both))] == ["t/1", "t.txt/t/1"]


def test_max_samples_takes_the_first_of_every_form(tmp_path: Path) -> None:
    for name in FORMS:
        path = write(tmp_path / name, [str(i) for i in range(40)])
        assert [row[2] for row in rows_of(read(path, max_samples=9, exclude=("texts/2",)))] == [*"0", *"23456789"]
        everything = source(path, exclude=("texts/3",))
        assert (
            rows_of(read_rows(replace(everything, max_samples=38), cache_root="c"))
            == rows_of(read_rows(everything, cache_root="c"))[:38]
        )


NAMES = st.sampled_from(["text", "id", "sample_id", "language", "prompt", "other", "t\\u0065xt"])
JSON_VALUES = st.sampled_from(
    [
        "null",
        "1",
        '""',
        '"a"',
        '"a: b"',
        '"ह"',
        '"\\u0939"',
        '"\\ud800"',
        '"\\u0000"',
        "[1]",
        '{"a": 1}',
        "NaN",
        '"\\""',
        "1e999",
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.lists(st.tuples(NAMES, JSON_VALUES), max_size=4),
    spaces=st.lists(st.sampled_from(["", " ", "\t"]), min_size=3, max_size=3),
    tail=st.sampled_from(["", " ", "}", ","]),
)
def test_a_quick_look_at_a_line_says_what_the_close_one_says(
    tmp_path: Path, fields: list[tuple[str, str]], spaces: list[str], tail: str
) -> None:
    a, b, c = spaces
    objects = ",".join(f'{a}"{name}"{b}:{c}{value}' for name, value in fields)
    line = f"{a}{{{objects}}}{tail}".encode()
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b"\n")
    assert outcome(path) == outcome(path, is_close=True)


def outcome(path: Path, *, is_close: bool = False) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        if is_close:
            patched.setattr(JsonLines, "_quickly", lambda *_: None)
        try:
            manifest = read(path)
        except ManifestError as err:
            return str(err)
        return rows_of(manifest), list(manifest.failed()), manifest.unused


def test_a_named_field_that_no_line_has_and_other_forms_in_a_compressed_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl.zst", ["one"], lang=["hi"])
    with pytest.raises(ConfigError, match=r"no line has a field lange \(source\.columns\.language\); did you"):
        read(path, columns=SourceColumns(language="lange"))
    path.write_bytes(pa.Codec("zstd").compress(b'{"text": "a"}\n{"text": 3}\n', asbytes=True))
    with pytest.raises(ManifestError, match=r"t\.jsonl\.zst, line 2: field text is a number"):
        read(path)
    path.write_bytes(pa.Codec("zstd").compress(b"a,b\n1,2\n", asbytes=True))
    with pytest.raises(ManifestError, match=r"t\.jsonl\.zst, unpacked, is a CSV, wanted JSON lines"):
        read(path)
    packed = tmp_path / "t.txt.gz"
    packed.write_bytes(pa.Codec("gzip").compress("text".encode("utf-16"), asbytes=True))
    with pytest.raises(ManifestError, match=r"t\.txt\.gz is text in UTF-16, wanted plain text"):
        read(packed)
