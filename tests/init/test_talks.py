"""Conversations with clips, laid out as people keep them, become a config that builds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.store.cache import open_cache
from tests.commands import run
from tests.init.layouts import QWEN3_VL, WHISPER, write_csv, write_lines
from tests.init.test_builds import built
from tests.sound_families import clips, model_folder, said
from tests.sound_talks import Talks, row

SECONDS = (1.2, 0.731, 1.9, 0.5, 1.0, 1.5)
PART = {"type": "audio"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("qwen2_audio", tmp_path_factory.mktemp("models"))


def talks(names: Sequence[str], *, audio: str = "audio") -> list[dict[str, Any]]:
    """Returns a conversation a clip, and one without."""
    rows = [said(f"<audio>What is clip {n}?", "A cat.", id=f"t{n}", **{audio: name}) for n, name in enumerate(names)]
    return [*rows, said("Nothing?", "No.", id="none")]


def lines(folder: Path) -> Path:
    return write_lines(folder / "train.jsonl", talks(clips(folder, SECONDS)))


def lists(folder: Path) -> Path:
    rows = talks([], audio="audios")
    names = clips(folder / "sounds", SECONDS)
    pairs = [[f"sounds/{each}" for each in names[start : start + 2]] for start in range(5)]
    rows += [said("<audio>and <audio>?", "Dogs.", audios=pair) for pair in pairs]
    return write_lines(folder / "train.jsonl", rows)


def parts(folder: Path) -> Path:
    names = clips(folder, SECONDS)
    rows = [row({**PART, "path": name}, {**PART, "audio": names[0], "start": 0.2, "end": 0.9}) for name in names]
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


def elsewhere(folder: Path) -> Path:
    names = clips(folder / "wavs" / "deeper", SECONDS)
    return write_lines(folder / "lists" / "train.jsonl", talks([f"deeper/{name}" for name in names])).parents[1]


def cells(folder: Path) -> Path:
    rows = [{**each, "messages": json.dumps(each["messages"])} for each in talks(clips(folder, SECONDS))[:-1]]
    return write_csv(folder / "train.csv", rows)


def structs(folder: Path, *, is_inside: bool = False) -> Path:
    names = clips(folder, SECONDS)
    data = {name: (folder / name).read_bytes() for name in names} if is_inside else {}
    rows = [said("<audio>What?", "A cat.", sounds={"bytes": data.get(name), "path": name}) for name in names]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def inside(folder: Path) -> Path:
    return structs(folder, is_inside=True)


LAYOUTS: dict[Callable[[Path], Path], tuple[str, int]] = {
    lines: ("jsonl", 7),
    lists: ("jsonl", 6),
    parts: ("jsonl", 6),
    elsewhere: ("table", 7),
    cells: ("table", 6),
    inside: ("hf", 6),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_conversations_with_clips(
    layout: Callable[[Path], Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, count = LAYOUTS[layout]
    cache = open_cache(built(tmp_path, capsys, layout(tmp_path / "talks"), "--model", model, "--weights", "random"))
    assert (len(cache), cache.metadata["excluded"], cache.listed) == (count, {}, ("audio",))
    (config,) = tmp_path.glob("*.toml")
    document = tomllib.loads(config.read_text())
    assert (document["source"]["kind"], document["audio"]["features"]) == (kind, "extractor")
    assert document["train"]["model"] == document["audio"]["extractor"]


def test_images_beside_clips_and_clips_that_are_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    omni = Talks.made(tmp_path, "qwen2_5_omni")
    cache = open_cache(built(tmp_path, capsys, tmp_path / "data", "--model", omni.model, "--weights", "random"))
    assert {*cache.listed} == {"audio", "image"}
    assert len(cache) == len(omni.names)
    long = write_lines(tmp_path / "long" / "x.jsonl", talks(clips(tmp_path / "long", [1.0, 1.1, 1.2, 2.6])))
    cache = open_cache(built(tmp_path, capsys, long, "--model", model, "--weights", "random", "--out", "long.toml"))
    assert (cache.metadata["excluded"], len(cache)) == ({"too_long": 1}, 4)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give --model DIR: the folder of a model that hears and talks"),
        (["--model", QWEN3_VL], "clips of conversations are stored as a model's processor makes them"),
        (["--model", WHISPER], "WhisperProcessor"),
    ],
)
def test_a_model_that_does_not_hear_or_talk_is_refused(
    arguments: list[object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "init", lines(tmp_path / "talks"), *arguments, "--out", tmp_path / "x.toml")
    assert code != 0
    assert why in err
