"""Data is taken for a kind of source, and a question is asked if it may be two."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.init.candidate import Candidate, facts, problems
from forebay.init.questions import Chooser, Wish
from forebay.init.recognise import recognise
from forebay.rows.readers.line_blocks import CODECS
from tests.init import layouts
from tests.init.layouts import DEMO, clips


def one(data: object, **given: str) -> Candidate:
    chooser = Chooser(given={name.replace("__", " ").replace("_", "-"): value for name, value in given.items()})
    (found,) = recognise([os.fspath(data)], chooser)  # type: ignore[call-overload]
    assert chooser.used == set(chooser.given)
    return found


KINDS: dict[Callable[[Path], Path], str] = {
    layouts.webdataset: "webdataset",
    layouts.jsonl: "jsonl",
    layouts.ljspeech: "ljspeech",
    layouts.table: "table",
    layouts.common_voice: "table",
    layouts.beside: "folder",
    layouts.librispeech: "folder",
    layouts.named: "folder",
    layouts.save_to_disk: "hf",
    layouts.dataset_dict: "hf",
    layouts.parquet: "hf",
    layouts.photos: "jsonl",
    layouts.photo_table: "table",
    layouts.photo_parquet: "hf",
    layouts.photo_tars: "webdataset",
    layouts.texts: "text",
}


@pytest.mark.parametrize("layout", KINDS, ids=lambda layout: layout.__name__)
def test_every_layout_is_known(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    found = one(layout(tmp_path / "data"))
    assert found.kind == KINDS[layout]
    number = {"common_voice": len(clips()) - 2, "photos": 10, "photo_table": 10, "photo_parquet": 10, "photo_tars": 10}
    assert (found.count, found.is_exact) == (number.get(layout.__name__, len(clips())), True)
    if found.meaning.name == "speech":
        assert found.sounds is not None
        assert found.sounds.rates == {16_000: found.count}
        assert sum(found.sounds.seconds) == pytest.approx(found.hours * 3600)
        assert found.texts[0] in {clip.text for clip in clips()}
    if found.languages:
        assert set(found.languages) <= {clip.language for clip in clips()}


def test_tars_with_a_list_or_a_manifest_beside_them_are_a_question() -> None:
    with pytest.raises(ConfigError) as caught:
        one(DEMO / "speech")
    options = [line.split()[1] for line in str(caught.value).splitlines()[1:]]
    assert options == ["tar", "webdataset", "filelist"]
    for kind in options:
        assert one(DEMO / "speech", kind=kind).count == 52


def test_texts_beside_recordings_and_in_a_table_are_a_question(tmp_path: Path) -> None:
    data = layouts.table(tmp_path / "both")
    for clip in clips():
        (data / "wavs" / layouts.file_name(clip)).with_suffix(".txt").write_text(clip.text)
    with pytest.raises(ConfigError, match=r"--kind table .*\n  --kind folder "):
        one(data)
    assert one(data, kind="folder").kind == "folder"


def test_two_tables_of_other_columns_are_a_question_by_name(tmp_path: Path) -> None:
    data = layouts.table(tmp_path / "two")
    rows = [{"file": f"wavs/{layouts.file_name(clip)}", "words": clip.text} for clip in clips()]
    layouts.write_csv(data / "other.csv", rows)
    with pytest.raises(ConfigError, match=r"--kind table:metadata\.csv .*\n  --kind table:other\.csv "):
        one(data)
    assert one(data, kind="table:other.csv").columns == {"audio": "file", "text": "words"}


def test_folders_of_languages_are_languages(tmp_path: Path) -> None:
    found = one(layouts.beside(tmp_path / "data"))
    assert found.source == {"languages_from_folders": True}
    assert found.languages.total() == len(clips())
    assert one(tmp_path / "data", languages_from_folders="false").source == {}


def test_a_split_is_taken_by_its_name_and_the_others_are_named(tmp_path: Path) -> None:
    found = one(layouts.dataset_dict(tmp_path / "data"))
    assert found.source == {"split": "train"}
    assert found.notes == ["Other splits: test."]
    assert one(tmp_path / "data", split="test").count == 2
    shutil.rmtree(tmp_path / "data" / "train")
    assert one(tmp_path / "data").source == {"split": "test"}


def test_recordings_in_another_folder_than_the_table(tmp_path: Path) -> None:
    layouts.write_clips(tmp_path / "data" / "deep" / "sound")
    rows = [{"path": layouts.file_name(clip), "text": clip.text} for clip in clips()]
    layouts.write_csv(tmp_path / "data" / "tables" / "all.csv", rows)
    found = one(tmp_path / "data")
    assert found.source == {"audio_dir": tmp_path / "data" / "deep" / "sound"}


def test_files_of_one_kind_are_one_source_and_so_are_folders(tmp_path: Path) -> None:
    members = {"a.flac": clips()[0].data, "a.txt": b"one"}
    tars = [layouts.write_tar(tmp_path / name / "x.tar", members) for name in ("a", "b")]
    for data in (tars, [tar.parent for tar in tars]):
        (found,) = recognise([os.fspath(path) for path in data], Chooser())
        assert found.manifests == tuple(data)
        assert found.count == 2


def test_what_will_fail_is_said(tmp_path: Path) -> None:
    data = layouts.jsonl(tmp_path / "data")
    next((data / "audio").iterdir()).write_bytes(b"no sound")
    (line,) = problems(one(data))
    assert line.startswith("1 of 12 recordings that were looked at cannot be read")


def test_facts_are_one_line() -> None:
    assert facts(one(DEMO / "speech", kind="tar")) == (
        "52 clips, about 3 min (from 52 rows), 0.4 to 31.1 s, languages en 21 %, ru 21 %, it 19 %, es 19 %, fr 19 %"
    )


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({"a.m4a": b"", "b.m4a": b""}, ["seen: 2 .m4a", ".m4a is not read: convert it"]),
        ({"a.json": b"[{}]"}, ["a.json has columns ; none holds paths"]),
        ({"a.tar.gz": b""}, ["a.tar.gz is a compressed tar"]),
        ({"a.csv": b"x,y\n1,2\n"}, ["a.csv has columns x, y; none holds paths of recordings or images"]),
        ({"a.csv": b"x.wav,hello\n"}, ["a.csv begins with 'x.wav' instead of a header line"]),
        ({}, ["seen: no files", "forebay init knows:"]),
    ],
)
def test_nothing_known_says_what_was_seen(files: dict[str, bytes], lines: list[str], tmp_path: Path) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match="nothing here is data that forebay knows") as caught:
        one(tmp_path)
    assert [line for line in lines if line not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("s3://bucket/x", "s3://bucket/x is a URL, and forebay init looks at files of this machine"),
        ("nowhere", "nowhere does not exist; name a folder or a file of data"),
    ],
)
def test_data_that_cannot_be_looked_at(data: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(data)


def test_a_table_away_from_its_images_names_their_folder(tmp_path: Path) -> None:
    data = layouts.photos(tmp_path / "zoo")
    lines = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()]
    (data / "questions.jsonl").unlink()
    rows = [{"file": row["image"].removeprefix("photos/"), "q'": row["question"], "a": row["answer"]} for row in lines]
    layouts.write_csv(data / "it's.csv", rows, delimiter=";")
    found = one(data, column__question="q'", column__answer="a")
    assert (found.kind, found.meaning.name, found.count) == ("table", "vision", 10)
    assert found.source == {"image_dir": data / "photos"}
    assert found.pictures is not None
    assert len(found.pictures.sizes) == 10


@pytest.mark.parametrize(
    ("names", "prompt", "manifests"),
    [
        (("cat/1.jpg", "dog/deep/2.png"), "label", ["."]),
        (("set/images/cat/1.jpg", "set/images/dog/2.jpg"), "label", ["set/images"]),
        (("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg"), "label", ["train"]),
        (("cat/1.jpg", "cat/2.jpg"), "none", ["cat"]),
        (("1.jpg", "2.jpg", "3.jpg", "cat/4.jpg", "dog/5.jpg"), "none", ["."]),
        (("1.jpg", "1.txt", "2.BMP", "2.txt"), "plain", ["."]),
    ],
)
def test_a_folder_of_images(names: tuple[str, ...], prompt: str, manifests: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"a text")
    found = one(tmp_path)
    assert (found.kind, found.meaning.name, found.prompt) == ("folder", "vision", prompt)
    assert found.manifests == tuple(tmp_path / each for each in manifests)
    counts = {"cat": 1, "dog": 1} if prompt == "label" else {}
    assert (dict(found.classes), found.has_all_classes) == (counts, True)


def test_classes_and_texts_of_images_are_a_question_where_the_model_leaves_it_open(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "cat/1.txt", "dog/2.jpg", "dog/2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"a text")
    with pytest.raises(ConfigError, match=r"beside the images .*\n  --prompt plain .*\n  --prompt label "):
        recognise([os.fspath(tmp_path)], Chooser(wish=Wish()))
    for wanted in ("plain", "label", "none"):
        (found,) = recognise([os.fspath(tmp_path)], Chooser(given={"prompt": wanted}, wish=Wish()))
        assert found.prompt == wanted
    (found,) = recognise([os.fspath(tmp_path)], Chooser(wish=Wish(value="label", why="it says so")))
    assert found.prompt == "label"


def test_pictures_beside_recordings_are_no_question(tmp_path: Path) -> None:
    layouts.beside(tmp_path)
    (tmp_path / "cover.jpg").write_bytes(b"")
    found = one(tmp_path)
    assert (found.meaning.name, "Beside them lie 1 image, which" in found.notes[-1]) == ("speech", True)


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
ENDS = ("", ".wav", ".jpg", ".csv", ".tsv", ".jsonl", ".tar", ".txt", ".parquet")
FILE_NAMES = st.tuples(NAMES, st.sampled_from(ENDS))


@given(st.lists(st.tuples(FILE_NAMES, st.binary(max_size=60)), max_size=6))
def test_any_folder_is_found_or_refused(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[tuple[str, str], bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for (stem, extension), data in files:
        name = (stem + extension)[:60]
        if name not in (".", "..") and not (folder / name).exists():
            (folder / name).write_bytes(data)
    try:
        found = recognise([os.fspath(folder)], Chooser(takes_first=True))
    except ConfigError as err:
        assert folder.name in str(err)  # noqa: PT017  either of two is right
    else:
        assert all(path.is_relative_to(folder) for each in found for path in each.manifests)
        assert found


@pytest.mark.parametrize("name", ["t.txt.gz", "t.txt.zst", "t.jsonl.gz", "t.jsonl.zst", "t.parquet"])
def test_texts_are_found_packed_and_in_a_column(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    lines = [f"this is sentence {number} of a few" for number in range(30)]
    written = lines if ".txt" in name else [json.dumps({"text": line}) for line in lines]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"sentence": lines, "number": list(range(30))}), path)
    else:
        path.write_bytes(pa.Codec(CODECS[path.suffix]).compress("\n".join(written).encode(), asbytes=True))
    for place in (path, path.parent):
        found = one(place)
        assert (found.kind, found.meaning.name, found.count, found.is_exact) == ("text", "text", 30, True)
        assert found.columns == ({"text": "sentence"} if name == "t.parquet" else {})
        assert set(found.texts) <= set(lines)
        assert found.texts
    if path.suffix != ".parquet":
        path.write_bytes(path.read_bytes()[:20])
        with pytest.raises(ConfigError, match=rf"{name} cannot be unpacked .* truncated or damaged"):
            one(path)


def test_more_tables_than_are_looked_into_are_said_and_named_ones_are_all_taken(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(clips()[0].data)
    for number in range(510):
        (tmp_path / f"t{number:03}.csv").write_text("audio,text\na.flac,some words of it\n")
    found = one(tmp_path, kind="table")
    assert len(found.manifests) == 500
    assert found.notes == [
        "Of 510 tables 500 were looked into, evenly spread from t000.csv to t508.csv, and the others are left out: "
        "name them (forebay init DIR/*.csv), or a folder with fewer."
    ]
    [named] = recognise([*map(os.fspath, sorted(tmp_path.glob("*.csv")))], Chooser())
    assert (len(named.manifests), named.count, named.notes) == (510, 510, [])


def test_more_folders_of_parquet_than_are_looked_into_are_said(tmp_path: Path) -> None:
    for number in range(26):
        folder = tmp_path / f"lang{number:02}"
        folder.mkdir()
        pq.write_table(pa.table({"audio": [clips()[0].data], "text": ["some words"]}), folder / "part.parquet")
    found = one(tmp_path)
    assert len(found.manifests) == 24
    [note] = [note for note in found.notes if note.startswith("Of 26 folders with parquet or arrow files the first 24")]
    assert "lang24 on are left out: name them" in note


def test_many_json_files_that_are_not_looked_into_are_said(tmp_path: Path) -> None:
    for number in range(25):
        (tmp_path / f"{number}.json").write_text('[{"audio_filepath": "a.flac", "text": "t"}]')
    with pytest.raises(ConfigError, match=r"25 \.json files, more than 24, were not looked into: name those that are"):
        one(tmp_path)


def test_a_named_table_of_words_alone_is_not_left_out_in_silence(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
    (tmp_path / "words.jsonl").write_text(json.dumps({"id": "a", **row}) + "\n")
    photo = str(DEMO / "vision" / "photos" / "bird.jpg")
    (tmp_path / "shown.jsonl").write_text(json.dumps({**row, "images": [photo]}) + "\n")
    said = "words.jsonl has conversations that name no image, clip or video"
    with pytest.raises(ConfigError, match=said):
        recognise([str(tmp_path / "words.jsonl")], Chooser({}))
    (found,) = recognise([str(tmp_path / name) for name in ("shown.jsonl", "words.jsonl")], Chooser({}))
    assert (found.count, [note.startswith(said) for note in found.notes]) == (1, [True])
