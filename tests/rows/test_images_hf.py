from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import SourceColumns
from forebay.config.data import MEANINGS
from forebay.errors import ManifestError, MissingExtraError
from forebay.rows.manifest import meaning_named
from forebay.rows.reader import FilePiece
from forebay.rows.readers import arrow_files as hf_file
from forebay.rows.readers import table_records
from tests.rows.helpers import ids, rejected
from tests.rows.pictures import converse, images_of, picture, source_of, write_picture

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FIVE = [0, 1, 0, 2, 1]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keeps progress bars of the library out of the output."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def table_of(images: pa.Array, **columns: Any) -> pa.Table:
    count = len(images)
    texts = {"question": [f"q{n}" for n in range(count)], "answer": [f"a{n}" for n in range(count)]}
    return pa.table({"image": images, **texts, **columns})


def inside(numbers: list[int]) -> pa.Array:
    return pa.array([{"bytes": picture(n), "path": f"p/{n}.png"} for n in numbers], IMAGE)


def questions(manifest: Any) -> list[str]:
    return [json.loads(text)[0]["content"][-1]["text"] for text in manifest.rows["text"].to_pylist()]


@pytest.mark.parametrize("row_group_size", [1, 2, 100])
@pytest.mark.parametrize("statistics", [True, False])
def test_an_image_in_five_rows_of_parquet_is_one_entry(
    tmp_path: Path, row_group_size: int, *, statistics: bool
) -> None:
    path = tmp_path / "vqa.parquet"
    pq.write_table(table_of(inside(FIVE)), path, row_group_size=row_group_size, write_statistics=statistics)
    manifest = converse("hf", path, root=tmp_path)
    assert ids(manifest) == ["vqa/0", "vqa/2", "vqa/1", "vqa/4", "vqa/3"]
    assert questions(manifest) == ["q0", "q2", "q1", "q4", "q3"]
    assert manifest.rows["images"].to_pylist() == [[0], [0], [1], [1], [2]]
    assert manifest.items["image"]["offset"].to_pylist() == [0, 1, 3]
    assert [file.name for file in manifest.files] == ["vqa.parquet"]


def test_a_saved_folder_reads_as_the_library_reads_it(tmp_path: Path, quiet: None) -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    table = table_of(inside(FIVE)).cast(features.arrow_schema)
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table))
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([3])})
    splits.save_to_disk(str(tmp_path / "data"), num_shards={"train": 2, "test": 1})
    train = converse("hf", tmp_path / "data", root=tmp_path)
    assert sorted(questions(train)) == [
        row["question"] for row in datasets.load_from_disk(str(tmp_path / "data"))["train"]
    ]
    assert len(train.rows["group"].unique()) == 2
    test = converse("hf", tmp_path / "data", root=tmp_path, split="test")
    assert questions(test) == ["q3"]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (pa.array([picture(1), None, picture(1)], pa.large_binary()), [[0], [0], []]),
        (pa.array(["x.png", None, "p/y.png"]), [[0], [], [1]]),
        (pa.array([{"path": "x.png"}, {"path": "p/y.png"}, {"path": "x.png"}]), [[0], [0], [1]]),
        (pa.array([[picture(1), picture(2)], None, [picture(2)]], pa.list_(pa.binary())), [[0, 1], [1], []]),
        (pa.array([["x.png", "p/y.png"], [], ["p/y.png"]], pa.large_list(pa.string())), [[0, 1], [1], []]),
        (
            pa.array(
                [[{"bytes": picture(1)}, {"bytes": None, "path": "x.png"}], [{"path": "x.png"}], []], pa.list_(IMAGE)
            ),
            [[0, 1], [1], []],
        ),
        (
            pa.array([[{"bytes": picture(n)} for n in ns] for ns in ([1, 2], [3], [2])], pa.list_(IMAGE)),
            [[0, 1], [1], [2]],
        ),
    ],
    ids=["binary", "string", "struct of path", "list of binary", "list of string", "list of both", "list, all inside"],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.few
def test_every_kind_of_image_column(tmp_path: Path, images: pa.Array, expected: Any, kind: str) -> None:
    write_picture(tmp_path / "x.png", 7)
    write_picture(tmp_path / "p" / "y.png", 8)
    write(table_of(images), tmp_path / f"data.{kind}")
    manifest = converse("hf", tmp_path / f"data.{kind}", root=tmp_path)
    assert manifest.rows["images"].to_pylist() == expected
    assert not manifest.rejected.num_rows


def write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def test_where_all_images_are_there_none_is_read_to_list_them(tmp_path: Path) -> None:
    numbers = [[1, 2], [3]]
    lists = pa.array([[{"bytes": picture(n), "path": "p"} for n in row] for row in numbers], pa.list_(IMAGE))
    for name, images in (("one", inside([1, 2])), ("many", lists)):
        pq.write_table(table_of(images), tmp_path / f"{name}.parquet")
    leaves = {}
    for name in ("one", "many"):
        path = tmp_path / f"{name}.parquet"
        piece = FilePiece(
            source=source_of("hf", path),
            meaning=meaning_named("conversations", MEANINGS["conversations"].of_groups(["image"])),
            group=0,
            name=path.name,
            path=str(path),
        )
        column = table_records.ItemColumn(hf_file.HfFile(path), piece)
        leaves[name] = column.leaves
    assert leaves == {"one": ["image.path"], "many": ["image.list.element.path"]}


def messages_of(count: int, **fields: Any) -> list[Any]:
    asked = [{"type": "image", "text": None}, {"type": "text", "text": "m"}]
    answer = {"role": "assistant", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}][1:]}
    return [[{"role": "user", "content": asked}, {**answer, **fields}] for _ in range(count)]


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_beside_a_question_are_refused_row_by_row(tmp_path: Path, *, as_json: bool) -> None:
    column = [json.dumps(m) for m in messages_of(2)] if as_json else messages_of(2)
    table = table_of(inside([1, 2]), conversations=pa.array(column))
    pq.write_table(table, tmp_path / "both.parquet")
    manifest = converse("hf", tmp_path / "both.parquet", root=tmp_path)
    assert [reason for _, _, reason in rejected(manifest)] == ["two_conversations"] * 2
    assert "both.parquet, row 2: has both messages and question" in manifest.rejected["message"][1].as_py()
    pq.write_table(table.drop_columns(["question", "answer"]), tmp_path / "one.parquet")
    assert questions(converse("hf", tmp_path / "one.parquet", root=tmp_path)) == ["m", "m"]
    empty = pa.array([None, "q"], pa.string())
    pq.write_table(table.set_column(1, "question", empty), tmp_path / "either.parquet")
    assert questions(converse("hf", tmp_path / "either.parquet", root=tmp_path)) == ["m"]


@pytest.mark.parametrize(
    ("name", "column", "reason"),
    [
        ("tools", pa.array([None, [{"type": "f"}]]), "bad_tools"),
        ("tools", pa.array([None, [{"name": "f", "at": datetime(2026, 1, 1, tzinfo=UTC)}]]), "bad_tools"),
        ("tool_calls", pa.array([None, [{"name": "f"}]]), "has_tools"),
        ("tools", pa.array(["", "[...]"]), "bad_tools"),
        ("videos", pa.array([[], [{"bytes": b"v", "path": None}]]), "has_video"),
        ("video", pa.array([None, b"v"]), "has_video"),
        ("video", pa.array([None, {"bytes": b"v"}]), "has_video"),
        ("videos", pa.array([None, ["v.mp4"]]), "has_video"),
        ("audio", pa.array([None, {"bytes": None, "path": "a.wav"}]), "has_audio"),
        ("rejected_messages", pa.array([None, "no"]), "preference_data"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.few
def test_a_column_that_would_change_the_meaning_fails_the_rows_that_have_a_value(
    tmp_path: Path, name: str, column: pa.Array, reason: str, kind: str
) -> None:
    write(table_of(inside([1, 2]), **{name: column}), tmp_path / f"d.{kind}")
    manifest = converse("hf", tmp_path / f"d.{kind}", root=tmp_path)
    assert questions(manifest) == ["q0"]
    assert rejected(manifest) == [("d/1", "failed", reason)]
    assert f"d.{kind}, row 2: field {name}" in manifest.rejected["message"][0].as_py()
    assert manifest.unused == {}


def test_a_column_that_is_named_in_the_config_is_taken_whatever_its_name(tmp_path: Path) -> None:
    table = table_of(inside([1])).rename_columns(["image", "question", "chosen"])
    pq.write_table(table, tmp_path / "d.parquet")
    assert questions(converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(answer="chosen"))) == [
        "q0"
    ]


def test_a_system_column_comes_first(tmp_path: Path) -> None:
    pq.write_table(table_of(inside([1, 2]), system=["Be kind.", None]), tmp_path / "d.parquet")
    manifest = converse("hf", tmp_path / "d.parquet", root=tmp_path)
    roles = [[message["role"] for message in json.loads(text)] for text in manifest.rows["text"].to_pylist()]
    assert roles == [["system", "user", "assistant"], ["user", "assistant"]]


@pytest.mark.parametrize("row_group_size", [1, 100])
def test_other_columns_and_fields_are_counted_by_name(tmp_path: Path, row_group_size: int) -> None:
    table = table_of(inside(FIVE), split=["train"] * 5, id=[*map(str, FIVE)], **{"\x1b[31mred": [1] * 5})
    pq.write_table(
        table.set_column(4, "id", pa.array([*"abcde"])), tmp_path / "a.parquet", row_group_size=row_group_size
    )
    table = pa.table({"image": inside([5]), "messages": pa.array(messages_of(1, name="Bob")), "split": ["x"]})
    pq.write_table(table, tmp_path / "b.parquet")
    manifest = converse("hf", tmp_path / "*.parquet", root=tmp_path)
    assert not manifest.rejected.num_rows
    assert manifest.unused == {"\x1b[31mred": 5, "split": 6, "messages.name": 1}


def test_a_field_twice_in_json_of_a_column_fails_its_row(tmp_path: Path) -> None:
    column = ['[{"role": "user", "role": "assistant", "content": "<image>"}]', json.dumps(messages_of(1)[0])]
    pq.write_table(pa.table({"image": inside([1, 2]), "messages": column}), tmp_path / "d.parquet")
    manifest = converse("hf", tmp_path / "d.parquet", root=tmp_path)
    assert rejected(manifest) == [("d/0", "failed", "repeated_field")]
    assert (
        'd.parquet, row 1: field messages: field "role" stands there twice' in manifest.rejected["message"][0].as_py()
    )


def test_columns_by_other_names_and_ids(tmp_path: Path) -> None:
    table = table_of(inside([1, 2]), id=[11, 12]).rename_columns(["picture", "ask", "reply", "id"])
    pq.write_table(table, tmp_path / "d.parquet")
    names = {"image": "picture", "question": "ask", "answer": "reply"}
    manifest = converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(**names))
    assert ids(manifest) == ["11", "12"]
    with pytest.raises(
        ManifestError, match=r"d\.parquet: no column image \(source\.columns\.image\); it has picture, ask"
    ):
        converse("hf", tmp_path / "d.parquet", root=tmp_path)
    with pytest.raises(ManifestError, match="no column messages, nor question and answer"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(image="picture"))
    with pytest.raises(ManifestError, match=r"no column q \(source\.columns\.question\)"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(image="picture", question="q"))
    with pytest.raises(ManifestError, match="column id is int64, wanted images"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(**{**names, "image": "id"}))


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    images = [
        {"bytes": picture(1), "path": None},
        {"bytes": None, "path": None},
        {"bytes": None, "path": "gone.png"},
        {"bytes": b"", "path": None},
        {"bytes": picture(2)[:20], "path": None},
        {"bytes": bytes(9000), "path": None},
        {"bytes": picture(1), "path": None},
    ]
    table = table_of(pa.array(images, IMAGE)).set_column(1, "question", pa.array([*"abcdef", "<image> <image>"]))
    pq.write_table(table, tmp_path / "d.parquet")
    manifest = converse("hf", tmp_path / "d.parquet", root=tmp_path, max_sample_bytes=8000)
    assert images_of(manifest) == {"d/0": ["d.parquet"]}
    assert rejected(manifest) == [
        ("d/1", "failed", "missing_file"),
        ("d/2", "failed", "missing_file"),
        ("d/3", "failed", "empty_file"),
        ("d/4", "failed", "unreadable_image"),
        ("d/5", "failed", "too_large"),
        ("d/6", "failed", "image_count_mismatch"),
    ]
    assert "d.parquet, row 2: its image has neither bytes nor a path" in manifest.rejected["message"][0].as_py()
    assert [manifest.files[n].name for n in manifest.absent] == ["gone.png"]


def test_a_large_row_group_is_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(inside([*range(40)]), id=[*range(40)]), tmp_path / "d.parquet", row_group_size=25)
    monkeypatch.setattr(hf_file, "_SLICE_BYTES", 600)
    file = hf_file.HfFile(tmp_path / "d.parquet")
    held = set()
    for row in [0, 1, 2, 30, 3, 24, 0, 39, 25, 26, 24, 26]:
        assert file.encoded(row, "image") == picture(row)
        assert file._last is not None
        held.add(len(file._last[1]))
    assert max(held) <= 5
    converse("hf", tmp_path / "d.parquet", root=tmp_path)


def test_a_damaged_data_file_stops_with_its_name(tmp_path: Path) -> None:
    pq.write_table(table_of(inside([*range(40)])), tmp_path / "d.parquet", compression="zstd", use_dictionary=False)
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[40:600] = bytes(560)
    (tmp_path / "d.parquet").write_bytes(data)
    with pytest.raises(ManifestError, match=r"d\.parquet is damaged: .*; copy or write it again"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table_of(inside([1])), tmp_path / "d.parquet")
    monkeypatch.setattr("forebay.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"forebay\[hf\]"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path)


def test_the_column_of_ids_can_be_named(tmp_path: Path) -> None:
    pq.write_table(table_of(inside([1, 2]), sample_id=[*"vw"], name=[*"ab"]), tmp_path / "d.parquet")
    manifest = converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(id="name"))
    assert ids(manifest) == ["a", "b"]
    assert manifest.unused == {"sample_id": 2}
    with pytest.raises(ManifestError, match=r"no column key \(source\.columns\.id\)"):
        converse("hf", tmp_path / "d.parquet", root=tmp_path, columns=SourceColumns(id="key"))


@pytest.mark.parametrize("form", ["structs", "json"])
def test_tools_of_a_table_have_no_fields_of_other_rows(tmp_path: Path, form: str) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    tools: list[list[Any]] = [
        [{"name": "f", "parameters": {"x": {"type": "int"}}}],
        [{"name": "g", "parameters": {"y": {"min": 1}}}],
    ]
    talks = [
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{**call, "name": each[0]["name"], "arguments": {name: 1}}]},
            {"role": "tool", "content": "1"},
        ]
        for each, name in zip(tools, "xy", strict=True)
    ]
    columns: dict[str, Any] = {"tools": tools, "messages": talks}
    if form == "json":
        columns = {name: [json.dumps(each) for each in values] for name, values in columns.items()}
    images = pa.array([[], []], pa.list_(pa.binary()))
    pq.write_table(pa.table({"image": images, **columns}), tmp_path / "d.parquet")
    found = [
        json.loads(text) for text in converse("hf", tmp_path / "d.parquet", root=tmp_path).rows["text"].to_pylist()
    ]
    assert [each[0]["tools"] for each in found] == tools
    assert [each[1]["tool_calls"][0]["function"]["arguments"] for each in found] == [{"x": 1}, {"y": 1}]
