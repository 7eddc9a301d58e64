"""`forebay init`: what it writes, prints and refuses."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.init.folder_files import config_name, name_of
from forebay.init.questions import Chooser
from forebay.init.write_config import InitOptions, init
from tests.commands import run, run_json
from tests.init import layouts
from tests.init.layouts import QWEN3_VL, WHISPER, clips


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with recordings in `prompts/`."""
    layouts.table(tmp_path / "prompts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_prints(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "init", "prompts", "--model", WHISPER, "--weights", "random")
    assert (code, err) == (0, "")
    facts, more, *rest = out.splitlines()
    assert facts == (
        "table: 12 recordings, about 14.8 s (from 12 headers), 0.4 to 2.2 s, 16,000 Hz, languages it 25 %, es"
    )
    assert more == "       25 %, en 17 %, ru 17 %, fr 17 %"
    assert rest == [
        "wrote prompts.toml",
        "next:",
        "  forebay preprocess prompts.toml",
        "  forebay inspect prompts.toml",
        "  forebay train prompts.toml --steps 30",
    ]


def test_the_document(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, "init", "prompts", "--yes", "--model", WHISPER)
    assert document["configs"] == ["prompts.toml"]
    assert document["found"][0]["kind"] == "table"
    assert document["found"][0]["columns"] == {"audio": "path", "text": "sentence", "language": "locale"}
    (decided,) = document["decided"]
    assert decided.startswith("which weights does training begin with")
    assert "for another give --weights pretrained" in decided


def test_what_it_writes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "init", "prompts")
    text = (project / "prompts.toml").read_text()
    assert tomllib.loads(text) == {
        "name": "prompts",
        "source": {
            "kind": "table",
            "manifest": "prompts/metadata.csv",
            "max_duration_s": 30.0,
            "overlong": "drop",
            "columns": {"audio": "path", "text": "sentence", "language": "locale"},
        },
        "audio": {"features": "log_mel"},
        "plan": {"k": 2, "batch_size": 3, "lockstep": 1},
    }
    assert text.startswith("# 12 recordings, about 14.8 s (from 12 headers)")
    assert max(map(len, text.splitlines())) <= 120


def test_paths_are_relative_to_the_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "configs").mkdir()
    document = run_json(capsys, "init", "prompts", "--out", "configs/my.toml")
    assert document["next"][0] == "forebay preprocess configs/my.toml"
    config = load_config("configs/my.toml")
    assert config.source.manifest == os.fspath(project / "prompts" / "metadata.csv")
    assert config.name == "prompts"


def test_a_config_that_is_there_stays(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "prompts.toml").write_text("mine")
    code, _, err = run(capsys, "init", "prompts", "--yes")
    assert code == 2
    assert "prompts.toml is there already; give --out FILE, or --force to replace it" in err
    assert (project / "prompts.toml").read_text() == "mine"
    assert run(capsys, "init", "prompts", "--force")[0] == 0
    assert load_config("prompts.toml").name == "prompts"


def test_without_a_model_a_loop_is_shown(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "init", "prompts")
    assert out.splitlines()[-2].startswith('  python -c "import forebay; print(next(iter(forebay.train.make_loader(')
    assert out.splitlines()[-1] == "(forebay train needs a model: forebay init ... --model DIR)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompts", "--model", "nowhere"], "--model .*nowhere is not a folder"),
        (["prompts", "--model", "s3://b/m"], "--model s3://b/m is a URL"),
        (["prompts", "--model", QWEN3_VL, "--yes"], "hears no sound; name a Whisper or Qwen3-ASR folder"),
        (["prompts", "--split", "test"], "--split test answers no question about this data"),
        (["prompts", "--kind", "hf"], "--kind hf: what is prompts has no such answer; wanted one of table"),
        (["prompts", "--weights", "random"], "--weights is of a model: give --model DIR too"),
        (["prompts", "--column", "text=a", "--column", "text=b"], "--column names text twice"),
        (["prompts", "--column", "text=nothing"], "has no such column; it has path, sentence, locale, speaker"),
        (["prompts", "--out", "no/where.toml"], "no is no folder; make it first"),
        (["photos"], "images are stored as a model's processor makes them; give --model DIR"),
        (
            ["photos", "--model", WHISPER, "--yes"],
            "sees no images: preprocessor_config.json and .* name no image processor; name the",
        ),
        (["books"], "texts are stored as tokens; give --model DIR"),
        (["books", "photos", "--model", QWEN3_VL, "--yes"], "a cache of images is of one kind"),
    ],
)
def test_what_it_refuses(
    arguments: list[object], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.photos(project / "photos")
    layouts.texts(project / "books")
    code, out, err = run(capsys, "init", *arguments)
    assert (code, out) == (2, "")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)
    assert list(project.glob("*.toml")) == []


def test_languages_without_a_tag_are_not_written(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"path": f"wavs/{layouts.file_name(clip)}", "sentence": clip.text, "locale": "tlh" if n else "English"}
        for n, clip in enumerate(clips())
    ]
    layouts.write_csv(project / "prompts" / "metadata.csv", rows)
    document = run_json(capsys, "init", "prompts", "--model", WHISPER, "--weights", "random")
    (decided,) = document["decided"]
    assert decided.startswith("the tokenizer has no tag for tlh: no language is written")
    text = tomllib.loads((project / "prompts.toml").read_text())["text"]
    assert text["language_tag_mode"] == "none"


def test_two_folders_that_are_alike_are_one_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts.table(project / "more")
    document = run_json(capsys, "init", "prompts", "more", "--out", "my.toml")
    assert document["configs"] == ["my.toml"]
    assert load_config("my.toml").source.manifests == tuple(
        os.fspath(project / name / "metadata.csv") for name in ("prompts", "more")
    )
    assert document["found"][0]["count"] == 2 * len(clips())


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(NAMES, NAMES, st.lists(NAMES, min_size=3, max_size=3, unique_by=lambda name: name.strip().lower()))
def test_any_names_of_folders_files_and_columns_are_written_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, folder: str, stem: str, columns: list[str]
) -> None:
    data = tmp_path_factory.mktemp("names") / f"d{folder}"
    data.mkdir()
    clip = clips()[0]
    (data / "a.flac").write_bytes(clip.data)
    path = data / f"t{stem}.jsonl"
    path.write_text(json.dumps(dict(zip(columns, ["a.flac", clip.text, "kept"], strict=True))) + "\n")
    out = data.parent / "out.toml"
    given = {"kind": "table", "column audio": columns[0], "column text": columns[1]}
    report = init(InitOptions(data=(os.fspath(data),), out=out), Chooser(given=given, takes_first=True))
    config = load_config(out)
    assert config.source.manifest == os.fspath(path)
    assert (config.source.columns.audio, config.source.columns.text) == tuple(columns[:2])
    assert report.configs


def test_a_folder_that_is_not_utf_8_is_refused_and_its_name_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layouts.table(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    with contextlib.chdir(tmp_path):
        code, _, err = run(capsys, "init", data, "--out", "my.toml")
        assert code == 2
        assert "is not UTF-8, which is all that TOML can hold" in err
        os.symlink(data, tmp_path / "link")
        assert run(capsys, "init", "link", "--out", "my.toml")[0] == 0


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/hindi/train.csv", "hindi"),
        ("/data/hindi/clips", "hindi"),
        ("/data/My Prompts (2)", "My-Prompts-2"),
        ("/data/हिन्दी", "हनद"),
        ("/data/fleurs/data/train-00000-of-00002.parquet", "fleurs"),
        ("/data/../x\n\x1by", "x-y"),
        ("/data/train", "train"),
        ("/data/caf\udce9", "caf"),
    ],
)
def test_names(path: str, name: str) -> None:
    assert name_of(Path(path)) == name


@given(st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1, max_size=3))
def test_any_path_has_a_name_that_a_config_may_have(texts: list[str]) -> None:
    name = config_name([Path("/") / text for text in texts])
    assert name
    assert not name.startswith(".")
    assert all(c.isalnum() or c in "._-" for c in name)
    assert len(name) <= 60


BOUNDS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("csv", {"Start": 0.5, "end": 1.0}, {"start": "Start", "end": "end"}),
    ("csv", {"offset": 0.0, "duration": 0.1}, {"start": "offset", "duration": "duration"}),
    ("jsonl", {"offset": 0.0, "duration": 0.1}, {"start": "offset"}),
    ("jsonl", {"start": 0.5, "end": 1.0, "channel": 0}, {"start": "start", "end": "end", "channel": "channel"}),
    ("csv", {"start": 60.0, "end": 61.0}, {"start": "start", "end": "end"}),
]


@pytest.mark.parametrize(("form", "bounds", "wanted"), BOUNDS)
def test_a_table_of_pieces_of_recordings_is_read_as_segments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
    bounds: dict[str, Any],
    wanted: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = layouts.write_clips(tmp_path / "data")
    rows = [{"audio": path.name, "text": "a text", **bounds} for path in paths.values()]
    if form == "csv":
        layouts.write_csv(tmp_path / "data" / "rows.csv", rows)
    else:
        (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run(capsys, "init", "data", "--yes", "--out", "made.toml")
    assert code == 0, err
    assert "12 segments" in out
    columns = load_config("made.toml").source.columns
    found = {name: getattr(columns, name) for name in ("start", "end", "channel", "duration")}
    assert {name: column for name, column in found.items() if column is not None} == wanted


def test_pieces_that_are_files_already_are_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paths, seconds = layouts.write_clips(tmp_path / "data"), {clip.id: clip.duration_s for clip in layouts.clips()}
    rows = [
        {"audio": path.name, "text": "a text", "start": 60.0, "end": 60.0 + seconds[name]}
        for name, path in paths.items()
    ]
    layouts.write_csv(tmp_path / "data" / "rows.csv", rows)
    code, _, err = run(capsys, "init", "data", "--yes", "--out", "made.toml")
    assert code == 0, err
    assert not load_config("made.toml").source.has_segments
