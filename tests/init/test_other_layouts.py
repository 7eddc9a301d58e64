"""Folders as other tools leave them: read with their texts, or refused with the name of what holds these."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import load_config, open_cache
from forebay.errors import ConfigError
from tests.commands import run, run_json
from tests.images.test_omni_videos import shows_videos
from tests.init import layouts
from tests.init.layouts import QWEN3_VL, WHISPER, clips, file_name, write_clips, write_csv, write_lines
from tests.init.test_builds import built
from tests.init.test_recognise import one
from tests.sound_families import model_folder

TEXTS = [clip.text for clip in clips()]


def stem(name: str) -> str:
    return name.rpartition(".")[0]


def audiofolder(folder: Path) -> Path:
    """A folder as `datasets` has it: `train/metadata.csv` and `test/metadata.csv` beside their recordings."""
    for split, part in (("test", clips()[:2]), ("train", clips()[2:])):
        for clip in part:
            (folder / split).mkdir(parents=True, exist_ok=True)
            (folder / split / file_name(clip)).write_bytes(clip.data)
        rows = [{"file_name": file_name(clip), "transcription": clip.text} for clip in part]
        write_csv(folder / split / "metadata.csv", rows)
    return folder


def kaldi(folder: Path) -> Path:
    paths = write_clips(folder / "wavs")
    for name, line in (("text", "{utt} {text}"), ("wav.scp", "{utt} {path}"), ("utt2spk", "{utt} speaker")):
        made = [line.format(utt=p.stem, path=p, text=c.text) for c, p in zip(clips(), paths.values(), strict=True)]
        (folder / "data" / "train").mkdir(parents=True, exist_ok=True)
        (folder / "data" / "train" / name).write_text("\n".join(made) + "\n")
    return folder


def label_studio(folder: Path) -> Path:
    write_clips(folder / "media")
    rows = [
        {
            "id": number,
            "data": {"audio": f"/data/upload/1/ab12-{file_name(clip)}"},
            "annotations": [{"result": [{"value": {"text": [clip.text]}, "type": "textarea"}]}],
            "file_upload": file_name(clip),
        }
        for number, clip in enumerate(clips())
    ]
    (folder / "project-1-at-2026.json").write_text(json.dumps(rows))
    return folder


def fleurs(folder: Path) -> Path:
    """A table of tabs without a header, whose second column names recordings in another folder."""
    write_clips(folder / "audio" / "train")
    lines = [
        "\t".join((str(n), file_name(c), c.text, c.text.lower(), " ".join(c.text), "16000", "FEMALE"))
        for n, c in enumerate(clips())
    ]
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    return folder


def vctk(folder: Path) -> Path:
    for clip, path in zip(clips(), write_clips(folder / "wav48").values(), strict=True):
        (folder / "txt").mkdir(exist_ok=True)
        (folder / "txt" / path.with_suffix(".txt").name).write_text(clip.text)
    return folder


def textgrids(folder: Path) -> Path:
    for path in write_clips(folder).values():
        path.with_suffix(".TextGrid").write_text('File type = "ooTextFile"')
    return folder


def utf16(folder: Path) -> Path:
    names = write_clips(folder).values()
    lines = [f"{path.name},they said {clip.text}" for clip, path in zip(clips(), names, strict=True)]
    (folder / "t.csv").write_text("path,text\n" + "\n".join(lines), encoding="utf-16")
    return folder


def sidecars(folder: Path) -> Path:
    for clip, path in zip(clips(), write_clips(folder).values(), strict=True):
        path.with_suffix(".json").write_text(json.dumps({"transcript": clip.text}, indent=1))
    return folder


def lost(folder: Path) -> Path:
    """A table whose recordings have moved to a folder of other names."""
    write_clips(folder / "wavs")
    rows = [{"path": f"old/{n}.flac", "sentence": clip.text} for n, clip in enumerate(clips())]
    write_csv(folder / "table.csv", rows)
    (folder / "notes.txt").write_text(f"{file_name(clips()[0])} is too loud\n")
    return folder


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (kaldi, "data/train/text looks"),
        (label_studio, "project-1-at-2026.json (column annotations)"),
        (fleurs, "train.tsv looks"),
        (vctk, "txt/"),
        (textgrids, ".TextGrid"),
        (sidecars, ".json"),
        (utf16, "t.csv looks"),
        (lost, "notes.txt looks"),
    ],
)
def test_what_looks_like_texts_and_is_not_read_is_named(
    layout: Callable[[Path], Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layout(tmp_path / "data")
    code, out, err = run(capsys, "init", data, "--yes", "--out", tmp_path / "my.toml")
    assert (code, out, (tmp_path / "my.toml").exists()) == (2, "", False)
    assert "without texts, and " in err
    assert name in err
    assert "FB134" in err
    assert not one(data, kind="folder").has_text


def test_a_folder_of_kaldi_without_its_recordings_names_the_texts(tmp_path: Path) -> None:
    data = kaldi(tmp_path / "data")
    shutil.rmtree(data / "wavs")
    with pytest.raises(ConfigError, match=r"nothing here is data .*\n.*\n  data/train/text looks like texts"):
        one(data)


def test_recordings_beside_files_that_are_no_texts_are_read(tmp_path: Path) -> None:
    data = kaldi(tmp_path / "data")
    (data / "data" / "train" / "text").unlink()
    (data / "README.txt").write_text("These are recordings of prompts, made in 2019.\n")
    (data / "config.json").write_text('{\n "sampling_rate": 16000\n}\n')
    assert (one(data).kind, one(data).has_text) == ("folder", False)


def test_a_split_is_a_folder_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = audiofolder(tmp_path / "prompts")
    cache = open_cache(built(tmp_path, capsys, data, "--yes"))
    assert cache.samples["text"].to_pylist() == TEXTS[2:]
    assert one(data).notes == ["Other splits are left out: test/metadata.csv; --split NAME takes another."]
    assert (one(data, split="test").count, one(data / "test").count) == (2, 2)
    shutil.move(data / "test", data / "validation")
    shutil.copytree(data / "train", data / "train-other")
    assert (one(data, split="validation").count, one(data).count, one(data).is_exact) == (2, 20, True)
    with pytest.raises(ConfigError, match=r"--split other: metadata.csv .* is of no such split; wanted one of"):
        one(data, split="other")


def test_every_table_of_many_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(clips()[0].data)
    for number in range(40):
        write_lines(tmp_path / f"part-{number:03d}.jsonl", [{"audio": "a.flac", "text": "a"}] * (number + 1))
    assert (len(one(tmp_path).manifests), one(tmp_path).count) == (40, 820)


@pytest.mark.parametrize("delimiter", ["\t", ";", "|", ","])
@pytest.mark.few(",", "|")
def test_the_header_that_is_proposed_makes_a_table_that_builds(
    delimiter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fleurs(tmp_path / "it's")
    lines = (data / "train.tsv").read_text().replace(",", "").replace("|", "").replace("\t", delimiter)
    (data / "train.tsv").unlink()
    table = data / ("train.tsv" if delimiter == "\t" else "train.csv")
    table.write_text(lines)
    _, _, err = run(capsys, "init", data, "--yes")
    command = next(line for line in err.splitlines() if "(printf" in line).partition("on that: ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True)
    (made,) = data.glob("*.named.*")
    assert made.read_text().splitlines()[0] == delimiter.join(["c1", "path", "text", "c4", "c5", "c6", "c7"])
    cache = open_cache(built(tmp_path, capsys, made, "--yes"))
    assert sorted(cache.samples["text"].to_pylist()) == sorted(text.replace(",", "") for text in TEXTS)


@pytest.mark.parametrize("is_array", [False, True])
def test_a_manifest_of_nemo_is_read(
    is_array: bool,  # noqa: FBT001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "prompts"
    paths = write_clips(data / "wavs")
    rows = [{"audio_filepath": str(paths[c.id]), "text": c.text, "duration": c.duration_s} for c in clips()]
    manifest = write_lines(data / "train_manifest.json", rows)
    write_lines(data / "test_manifest.json", rows[:2])
    if is_array:
        manifest.write_text(json.dumps(rows, indent=1))
    (data / "dataset_info.json").write_text('{\n "version": 1\n}\n')
    cache = open_cache(built(tmp_path, capsys, data))
    assert cache.samples["text"].to_pylist() == TEXTS
    assert one(data).count == len(TEXTS)
    assert one(manifest).columns == {"audio": "audio_filepath"}


@pytest.mark.parametrize(
    "text",
    [
        "tier\tspeaker\t0.0\t1.5\t{}",
        'File type = "ooTextFile"\nObject class = "TextGrid"\ntext = "{}"',
        "1\n00:00:00,000 --> 00:00:01,500\n{}",
        "0 61440 {}",
        "0 3600000 sil\n3600000 7200000 a",
    ],
)
def test_exports_of_annotation_tools_are_no_transcripts(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layouts.beside(tmp_path / "data")
    written = sorted(data.rglob("*.txt"))
    for path in written:
        path.write_text(text.format(path.read_text()))
    code, _, err = run(capsys, "init", data, "--yes", "--out", tmp_path / "my.toml")
    assert code == 2
    assert "an annotation tool wrote this text (12 of 12 that were looked at have tabs, times or mostly digits)" in err
    assert "FB135" in err
    assert one(data, kind="folder").has_text
    for path in written[1:]:
        path.write_text("twenty one people came")
    assert "(1 of 12 that were looked at" in one(data).notes[0]


def test_a_conversation_without_an_image_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LLaVA: one JSON array, images in folders of other names, and rows of text alone."""
    data = layouts.photos(tmp_path / "zoo" / "coco")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate((data / "questions.jsonl").read_text().splitlines()):
        row = json.loads(line)
        said = [{"from": "human", "value": f"<image>\n{row['question']}"}, {"from": "gpt", "value": row["answer"]}]
        rows.append({"id": str(number), "image": row["image"], "conversations": said})
    said = [{"from": "human", "value": "Say yes."}, {"from": "gpt", "value": "Yes."}]
    rows.insert(3, {"id": "alone", "conversations": said})
    (data / "questions.jsonl").unlink()
    (tmp_path / "zoo" / "llava.json").write_text(json.dumps(rows, indent=2))
    cache = open_cache(built(tmp_path, capsys, tmp_path / "zoo", "--model", QWEN3_VL, "--weights", "random"))
    assert sorted(cache.samples["sample_id"].to_pylist()) == sorted(row["id"] for row in rows)
    (config,) = tmp_path.glob("*.toml")
    assert load_config(config).source.image_dir == os.fspath(data)


FIG = {"id": "a", "image": "fig.jpg"}
ASKED, SAID = {"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A fig."}
TWO_ANSWERS: list[dict[str, Any]] = [
    {**FIG, "question": "What is it?", "chosen": "A fig.", "rejected": "A cat."},
    {**FIG, "messages": [ASKED, SAID], "rejected_response": "A cat."},
    {**FIG, "prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "A cat."}]},
]


@pytest.mark.parametrize("row", TWO_ANSWERS, ids=["question", "ms-swift", "TRL"])
def test_rows_with_an_answer_to_reject_are_pairs(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(layouts.DEMO / "vision/photos/fig.jpg", tmp_path / "data")
    write_lines(tmp_path / "data" / "rows.jsonl", [row, {**row, "id": "b"}])
    cache = open_cache(built(tmp_path, capsys, tmp_path / "data", "--model", QWEN3_VL, "--weights", "random"))
    assert "rejected_input_ids" in cache.fields


def test_videos_are_shown_to_a_model_that_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    for name in ("photos/fig.jpg", "sunset.mp4"):
        shutil.copy(layouts.DEMO / "vision" / name, tmp_path / "data")
    part = {"role": "user", "content": [{"type": "video", "video": "sunset.mp4"}, {"type": "text", "text": "And?"}]}
    rows: list[dict[str, Any]] = [
        {"videos": ["sunset.mp4"], "question": "<video>What is it?", "answer": "A table."},
        {"video": "sunset.mp4", "messages": [{**ASKED, "content": "<video>What?"}, SAID]},
        {"messages": [part, SAID]},
    ]
    for each in rows:  # of one form in a file; the last one has no other field
        write_lines(tmp_path / "data" / "rows.jsonl", [{**each, "id": "1"}, {**each, "id": "2"}])
        cache = open_cache(built(tmp_path, capsys, tmp_path / "data", "--model", QWEN3_VL, "--weights", "random"))
        assert len(cache) == 2
        (config,) = tmp_path.glob("*.toml")
        assert "videos of 2.4 to 2.4 s" in config.read_text()
        config.unlink()
    with contextlib.chdir(tmp_path):
        gemma = ("--model", layouts.DEMO / "vision/gemma3_model", "--weights", "random", "--out", "gemma.toml")
        run_json(capsys, "init", tmp_path / "data", *gemma)
    assert "videos are left out" in (tmp_path / "gemma.toml").read_text()
    shows_videos(omni := model_folder("qwen2_5_omni", tmp_path))
    cache = open_cache(built(tmp_path, capsys, tmp_path / "data", "--model", omni, "--weights", "random"))
    assert (len(cache), "pixel_values_videos" in cache.fields) == (2, True)


def test_rows_of_alpaca_keep_what_stands_beside_the_instruction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layouts.photos(tmp_path / "coco")
    lines = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()[:3]]
    (data / "questions.jsonl").unlink()
    photo = f"data:image/jpeg;base64,{base64.b64encode((data / lines[0]['image']).read_bytes()).decode()}"
    rows = [{"instruction": r["question"], "input": "Look.", "output": r["answer"], "image": photo} for r in lines]
    (tmp_path / "alpaca").mkdir()
    write_lines(tmp_path / "alpaca" / "rows.jsonl", rows)
    cache = open_cache(built(tmp_path, capsys, tmp_path / "alpaca", "--model", QWEN3_VL, "--weights", "random"))
    asked = [json.loads(text)[0]["content"][1]["text"] for text in cache.samples["text"].to_pylist()]
    assert asked == [f"{row['question']}\nLook." for row in lines]


def test_paths_that_are_not_there_are_said_and_audio_dir_takes_them(tmp_path: Path) -> None:
    sounds = tmp_path / "elsewhere"
    write_clips(sounds)
    table = write_csv(tmp_path / "t" / "a.csv", [{"path": file_name(c), "text": c.text} for c in clips()])
    tried = rf"a.csv has columns path, text; none holds paths .*: path '{file_name(clips()[0])}' is not in .*/t; "
    with pytest.raises(ConfigError, match=rf"{tried}give --audio-dir DIR"):
        one(table)
    for data in (table, table.parent):
        assert one(data, audio_dir=str(sounds)).source == {"audio_dir": sounds}
    with pytest.raises(ConfigError, match=rf"{tried[:-2].replace('is not in', 'is not in .*gone,')}"):
        one(table, audio_dir=str(tmp_path / "gone"))
    named = write_csv(tmp_path / "n" / "a.csv", [{"utt": stem(file_name(c)), "text": c.text} for c in clips()])
    found = one(named, audio_dir=str(sounds))
    assert (found.kind, found.manifests, found.source) == ("folder", (sounds,), {"texts": named})


@pytest.mark.parametrize("form", ["csv", "jsonl", "json"])
def test_shares_of_languages_are_of_the_whole_column(form: str, tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(clips()[0].data)
    rows = [{"audio": "a.flac", "text": "hello there", "language": "hi" if n < 1900 else "ta"} for n in range(2000)]
    path = tmp_path / f"t.{form}"
    if form == "csv":
        write_csv(path, rows)
    else:
        path.write_text(json.dumps(rows)) if form == "json" else write_lines(path, rows)
    assert one(path).languages == {"hi": 1900, "ta": 100}


@pytest.mark.parametrize("layout", [layouts.ljspeech, layouts.librispeech])
def test_whisper_without_a_language_is_said(
    layout: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my.toml"
    report = run_json(capsys, "init", layout(tmp_path / "a"), "--model", WHISPER, "--yes", "--out", out)
    assert "The language of the texts is not known, and Whisper is told none" in " ".join(report["decided"])
    assert 'text.language = "detect"' in " ".join(out.read_text().replace("\n# ", " ").split())
    labelled = run_json(
        capsys, "init", layouts.table(tmp_path / "b"), "--model", WHISPER, "--yes", "--out", out, "--force"
    )
    assert not any("told none" in said for said in labelled["decided"])
