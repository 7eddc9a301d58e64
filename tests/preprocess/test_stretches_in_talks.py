"""Stretches of recordings in conversations: what cutting the files first gives, whatever lists them; bad bounds."""

from __future__ import annotations

import base64
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from forebay.cli import main
from forebay.config import Config
from forebay.preprocess.build_report import BuildReport
from forebay.preprocess.decode import decode_audio
from forebay.rows import media_reader
from forebay.rows.segments import RecordingParts
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.store.cache import Cache, open_cache
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.sound_families import listed, said
from tests.sound_talks import Talks, row

RECORDINGS = {
    "a.wav": (44_100, 2, "PCM_16"),
    "b.flac": (16_000, 3, "PCM_24"),
    "c.ogg": (48_000, 1, None),
    "d.mp3": (22_050, 2, None),
}
STRETCHES = [(3.2, 4.9, None), (0.4, 1.5, 0), (4.5, None, None), (0.25, 1.0, -1), (0.0, 1.333, None)]
SECONDS = 6


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    found = Talks.made(tmp_path_factory.mktemp("stretches"), "qwen2_audio")
    for name, (rate_hz, channels, subtype) in RECORDINGS.items():
        walk = np.cumsum(np.random.default_rng(rate_hz).normal(size=(rate_hz * SECONDS, channels)), axis=0)
        soundfile.write(found.root / "data" / name, 0.8 * walk / np.abs(walk).max(), rate_hz, subtype=subtype)
    return found


def stretches() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (_, channels, _) in RECORDINGS.items():
        for start, end, channel in STRETCHES:
            bounds = {"start": start, "end": end, "channel": None if channel is None else channel % channels}
            yield name, {key: value for key, value in bounds.items() if value is not None}


def piece_of(folder: Path, number: int, name: str, bounds: Mapping[str, Any]) -> str:
    """Cuts a stretch out as a file, as a person does it with soundfile; returns its name."""
    with soundfile.SoundFile(folder / name) as file:
        whole, rate_hz = file.read(dtype="float32", always_2d=True), file.samplerate
        is_16_bit = file.subtype == "PCM_16"
    end = bounds.get("end")
    part = whole[round(bounds["start"] * rate_hz) : None if end is None else round(end * rate_hz)]
    part = part[:, [bounds["channel"]]] if "channel" in bounds else part
    soundfile.write(folder / f"piece{number}.wav", part, rate_hz, subtype="PCM_16" if is_16_bit else "FLOAT")
    return f"piece{number}.wav"


def built(config: Config) -> tuple[Cache, BuildReport]:
    report = build_here(config)
    return open_cache(report.cache), report


def samples_of(cache: Cache) -> dict[str, dict[str, Any]]:
    return {name: cache.read(place) for place, name in enumerate(cache.samples["sample_id"].to_pylist())}


def elsewhere(talks: Talks, root: Path) -> Talks:
    """Returns the same model and recordings under another folder."""
    (root / "data").mkdir()
    (root / "qwen2_audio").symlink_to(talks.model)
    for name in RECORDINGS:
        (root / "data" / name).symlink_to(talks.root / "data" / name)
    return replace(talks, root=root)


def test_a_stretch_is_the_file_that_was_cut_out_and_a_recording_is_opened_once(
    talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows, pieces = talks.root / "data", [], []
    for number, (name, bounds) in enumerate(stretches()):
        rows.append(row({"type": "audio", "audio": name, **bounds}, id=f"{number}"))
        piece = piece_of(folder, number, name, bounds)
        pieces.append(row({"type": "audio", "audio": piece}, id=f"{number}"))
    np.random.default_rng(1).shuffle(rows)
    twice = {"type": "audio", "path": "a.wav", "start": 3.2, "duration": 1.7}
    to_end = {**twice, "duration": None, "end": 4.9000001}
    rows.append(row(twice, to_end, to_end, id="twice"))
    listed(folder, rows)
    opened: list[str] = []

    class Counted(RecordingParts):
        def __init__(self, file: Any, *, name: str) -> None:
            opened.append(Path(name).name)
            super().__init__(file, name=name)

    monkeypatch.setattr(media_reader, "RecordingParts", Counted)
    config = talks.config()
    cache, report = built(config)
    assert report.failed == {}
    assert sorted(opened) == sorted(RECORDINGS)
    listed(folder, pieces, "pieces.jsonl")
    wanted = samples_of(built(talks.config(manifest="data/pieces.jsonl"))[0])
    found = samples_of(cache)
    for name, sample in wanted.items():
        for field, values in sample.items():
            assert np.array_equal(found[name][field], values), (name, field)
    assert all(np.array_equal(clip, wanted["0"]["input_features"][0]) for clip in found["twice"]["input_features"])
    assert sum(entry.rows for _, entry in cache.shard_entries("audio")) == len(RECORDINGS) * len(STRETCHES)
    names = dict(zip(cache.samples["sample_id"].to_pylist(), cache.samples["audios"].to_pylist(), strict=True))
    assert json.loads(names["3"]) == ["a.wav, 0.25 s to 1.00 s, channel 1"]
    assert json.loads(names["4"]) == ["a.wav, 0.00 s to 1.333 s"]
    uncached = make_loader(talks.config('run.cache_root="no"'))
    assert {tuple(ids) for batch in uncached for ids in batch["input_ids"].tolist()} == {
        tuple(ids) for batch in make_loader(config) for ids in batch["input_ids"].tolist()
    }


def _parquet(talks: Talks, marks: list[dict[str, Any]], *, is_inside: bool) -> str:
    folder = talks.root / "data"
    clips = [
        {**mark, "path": mark["path"], "bytes": (folder / mark["path"]).read_bytes() if is_inside else None}
        for mark in marks
    ]
    messages = said("<audio><audio>q", "A.")["messages"]
    kind = pa.list_(pa.struct({"bytes": "binary", "path": "string", "start": "float32", "end": "float64"}))
    table = pa.table({"id": ["x"], "messages": [messages], "audios": pa.array([clips], kind)})
    pq.write_table(table, folder / "train.parquet")
    return "train.parquet"


def _lines(talks: Talks, marks: list[dict[str, Any]]) -> str:
    listed(talks.root / "data", [said("<audio><audio>q", "A.", id="x", audios=marks)])
    return "train.jsonl"


def _inline(talks: Talks, marks: list[dict[str, Any]]) -> str:
    data = [base64.b64encode((talks.root / "data" / mark["path"]).read_bytes()).decode() for mark in marks]
    return _lines(talks, [{**m, "path": f"data:audio/x;base64,{d}"} for m, d in zip(marks, data, strict=True)])


def _tar(talks: Talks, marks: list[dict[str, Any]]) -> str:
    folder = talks.root / "data"
    with tarfile.open(folder / "train.tar", "w") as tar:
        listed(folder, [said("<audio><audio>q", "A.", id="x", audios=marks)])
        tar.add(folder / "train.jsonl", "x.json")
        for number, mark in enumerate(marks):
            tar.add((folder / mark["path"]).resolve(), f"x.{number}{Path(mark['path']).suffix}")
    return "train.tar"


def _csv(talks: Talks, marks: list[dict[str, Any]]) -> str:
    cell = json.dumps(marks).replace('"', '""')
    talk = json.dumps(said("<audio><audio>q", "A.")["messages"]).replace('"', '""')
    (talks.root / "data" / "train.csv").write_text(f'id,messages,audios\nx,"{talk}","{cell}"\n')
    return "train.csv"


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("jsonl", _lines),
        ("jsonl", _inline),
        ("table", _csv),
        ("webdataset", _tar),
        ("table", partial(_parquet, is_inside=False)),
        ("table", partial(_parquet, is_inside=True)),
    ],
    ids=["lines", "inline", "csv", "tar", "paths", "bytes"],
)
@pytest.mark.few("lines", "tar", "bytes")
def test_a_column_of_stretches_beside_marks(
    kind: str, write: Callable[[Talks, list[dict[str, Any]]], str], talks: Talks, tmp_path: Path
) -> None:
    own = elsewhere(talks, tmp_path)
    marks = [{"path": "b.flac", "start": 1.25, "end": 2.5}, {"path": "d.mp3", "start": 4.5, "end": None}]
    column = "" if kind != "table" else '\n[source.columns]\naudio = "audios"'
    name = write(own, marks)
    config = own.config(source=f'kind = "{kind}"\nmanifest = "data/{name}"{column}')
    cache, report = built(config)
    assert (report.failed, len(cache)) == ({}, 1)
    for number, mark in enumerate(marks):
        piece_of(tmp_path / "data", number, str(mark["path"]), {k: v for k, v in mark.items() if v is not None})
    listed(tmp_path / "data", [said("<audio><audio>q", "A.", audios=["piece0.wav", "piece1.wav"])], "pieces.jsonl")
    wanted = built(own.config(manifest="data/pieces.jsonl"))[0].read(0)
    for field, values in wanted.items():
        assert np.array_equal(cache.read(0)[field], values), field


BAD: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "bad_segment": [
        {"start": 2.0, "end": 1.0},
        {"start": 1.0, "end": 1.0},
        {"start": -1.0, "end": 1.0},
        {"end": 0.0},
        {"start": "1.0"},
        {"start": True, "end": 2.0},
        {"start": [1]},
        {"start": 1e999},
        {"start": 1.0, "end": 1.00000001},
        {"channel": -1},
        {"channel": 0.5},
        {"channel": "left"},
        {"start_time": 1.0, "end": 2.0},
        {"offset": 1.0, "duration": 0.5},
        {"start": 1.0, "duration": -0.5},
    ],
    "two_values": [{"start": 1.0, "end": 2.0, "duration": 3.0}],
    "no_such_channel": [{"channel": 2, "end": 1.0}, {"start": 1.0, "end": 2.0, "channel": 7}],
    "segment_past_end": [{"start": 6.0}, {"start": 7.0, "end": 8.0}, {"start": 1e308}, {"start": 9, "end": 1e308}],
    "duration_mismatch": [{"start": 5.5, "end": 7.0}],
    "clip_too_long": [{"start": 1.0}],
}


def test_bad_bounds_cost_their_row_by_a_reason_and_are_named(talks: Talks, tmp_path: Path) -> None:
    own = elsewhere(talks, tmp_path)
    good: list[dict[str, Any]] = [{"start": 5.0}, {"start": 4.4, "end": 6.2}, {"end": 1, "duration": "x"}]
    good.append({"start": 1, "end": 2, "channel": 1})
    rows = [row({"type": "audio", "audio": "a.wav", **bounds}, id=f"good {n}") for n, bounds in enumerate(good)]
    for reason, each in BAD.items():
        for number, bounds in enumerate(each):
            part = {"type": "audio", "audio": "a.wav", **bounds}
            rows.append(row(part, id=f"{reason} part {number}"))
            rows.append(said("<audio>q", "A.", audio={"path": "a.wav", **bounds}, id=f"{reason} column {number}"))
    rows.append(row({"type": "audio", "start": 1, "end": 2}, audio={"path": "a.wav", "end": 2}, id="two_values both"))
    rows.append(row({"type": "audio", "audio": "none.wav", "start": 1, "end": 2}, id="missing_file"))
    rows.append(said("<audio>q", "A.", audio={"start": 1, "end": 2}, id="bad_conversation no name"))
    listed(tmp_path / "data", rows)
    text = (tmp_path / "data" / "train.jsonl").read_text().replace("Infinity", "1e999")
    (tmp_path / "data" / "train.jsonl").write_text(text)
    cache, report = built(own.config())
    lines = [json.loads(line) for line in (cache.folder / "rejected.jsonl").read_text().splitlines()]
    assert {each["sample_id"]: each["reason"] for each in lines} == {
        str(each["id"]): str(each["id"]).split()[0] for each in rows if not str(each["id"]).startswith("good")
    }
    assert sum(report.failed.values()) == len(lines)
    assert sorted(cache.samples["sample_id"].to_pylist()) == [f"good {n}" for n in range(len(good))]
    assert cache.metadata["unused_fields"] == {"messages.content.duration": 1}
    messages = {each["sample_id"]: each["message"] for each in lines}
    assert "line 5: message 1: part audio: 2.00 s to 1.00 s is no stretch" in messages["bad_segment part 0"]
    assert "field audio: field start is a string ('1.0'), wanted seconds" in messages["bad_segment column 4"]
    assert "a.wav, 5.50 s to 7.00 s: its recording has 0.50 s of it" in messages["duration_mismatch part 0"]


def test_stretches_are_named_and_heard_where_caches_are_looked_into(
    talks: Talks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = elsewhere(talks, tmp_path)
    part = {"type": "audio", "audio": "a.wav", "start": 1.0, "end": 2.0, "channel": 0}
    rows = [row(part, {"type": "audio", "path": "d.mp3", "start": 4.5}, id="two"), row(part, id="one")]
    listed(tmp_path / "data", [*rows, said("no clip", "A.", id="none"), row({"type": "audio", "path": "x"}, id="bad")])
    cache, _ = built(own.config())
    monkeypatch.chdir(tmp_path.parent)
    config = f"{tmp_path.name}/config.toml"

    def inspect(*more: str) -> tuple[int, str]:
        status = main(["inspect", config, *more])
        return status, "".join(capsys.readouterr())

    assert "clip 0: a.wav, 1.00 s to 2.00 s, channel 0" in inspect("--sample", "two")[1]
    assert main(["lint", config]) == 0
    assert inspect("--html", f"{tmp_path.name}/p.html")[0] == 0
    assert "a.wav, 1.00 s to 2.00 s, channel 0" in (tmp_path / "p.html").read_text()
    capsys.readouterr()
    status, said_then = inspect("--sample", "two", "--wav", f"{tmp_path.name}/x.wav")
    assert (status, said_then.count("wrote "), "x-1.wav" in said_then) == (0, 2, True)
    inspect("--sample", "one", "--wav", f"{tmp_path.name}/y.wav")
    wanted = decode_audio(
        (tmp_path / "data" / piece_of(tmp_path / "data", 0, "a.wav", part)).read_bytes(),
        Decode(sample_rate_hz=16_000, clip_s=None, max_sample_bytes=1 << 28),
        sample_id="x",
        want="int16",
    )
    (heard,) = Waveform().make([wanted])
    for name in ("x-0.wav", "y.wav"):
        assert np.array_equal(soundfile.read(tmp_path / name, dtype="int16")[0], heard["waveform"]), name
    assert not (tmp_path / "x.wav").exists()
    assert "sample none of" in inspect("--sample", "none", "--wav", "z.wav")[1]
    assert "name the config" in "".join(
        [str(main(["inspect", str(cache.folder), "--sample", "one", "--wav", "z.wav"])), *capsys.readouterr()]
    )
    (tmp_path / "data" / "d.mp3").unlink()
    status, said_then = inspect("--sample", "two", "--wav", f"{tmp_path.name}/z.wav")
    assert status != 0
    assert "is not at hand as it was read" in said_then
    assert not [*tmp_path.glob("z*.wav")]
