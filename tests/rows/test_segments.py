"""Segments of recordings: rows are what cutting the files first gives, and a recording is decoded once a shard."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dill  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.cli import main
from forebay.config import Config
from forebay.errors import ConfigError, DecodeError, ManifestError
from forebay.inspect.checks.lint import LintOptions, Target, lint
from forebay.inspect.checks.measured import overlap_s
from forebay.preprocess.decode import Heard
from forebay.rows import media_reader, segments
from forebay.rows.media_reader import MediaReader
from forebay.rows.segments import Bounds, FileStretch, RecordingParts, cut_recordings
from forebay.store.cache import Cache, open_cache
from forebay.store.source_files import SourceFile
from forebay.train import make_loader
from forebay.train.uncached.uncached_source import PlainSamples
from tests.preprocess.corpus import file_bytes, json_lines, write_tar
from tests.preprocess.here_pool import build_here

RECORDINGS = [
    ("a.wav", 16_000, 1, "PCM_16"),
    ("b.flac", 8_000, 3, "PCM_16"),
    ("c.mp3", 44_100, 2, None),
    ("d.ogg", 48_000, 1, None),
    ("e.wav", 22_050, 6, "FLOAT"),
    ("f.flac", 44_100, 1, "PCM_24"),
    ("g.mp3", 16_000, 1, None),
]
ALL = tuple(recording[0] for recording in RECORDINGS)
SECONDS = 8
STRETCHES = [(0.0, 1.5, None), (3.25, 5.0, 0), (2.0, 2.75, -1), (6.123, math.nan, None), (1.1, 4.4, None)]
Row = tuple[str, float, float, int | None, str]


def sound(rate_hz: int, channels: int) -> np.ndarray[Any, Any]:
    walk = np.cumsum(np.random.default_rng(rate_hz + channels).normal(size=(rate_hz * SECONDS, channels)), axis=0)
    return np.asarray(0.8 * walk / np.abs(walk).max())


def decoded(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """All samples [n, channels] as libsndfile gives them, 16-bit integers where they are such, and the rate."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        dtype = "int16" if file.subtype == "PCM_16" else "float32"
        return file.read(dtype=dtype, always_2d=True), file.samplerate


def cut(data: bytes, bounds: Bounds) -> tuple[np.ndarray[Any, Any], int]:
    whole, rate_hz = decoded(data)
    start, stop = bounds.frames(rate_hz)
    part = whole[start:stop]
    return (part if bounds.channel is None else part[:, [bounds.channel]]), rate_hz


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segments")
    for name, rate_hz, channels, subtype in RECORDINGS:
        soundfile.write(folder / name, sound(rate_hz, channels), rate_hz, subtype=subtype)
    return folder


def rows_of(names: Sequence[str] = ALL) -> list[Row]:
    channels = {name: count for name, _, count, _ in RECORDINGS}
    rows = [
        (name, start, end, None if c is None else c % channels[name], f"text of {name} {start}")
        for name in names
        for start, end, c in STRETCHES
    ]
    np.random.default_rng(0).shuffle(rows)
    return rows


def config_of(folder: Path, rows: Sequence[Row], *overrides: str, name: str = "t") -> Config:
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["audio", "begin", "stop", "line", "text"])
        writer.writerows([("" if v is None or v != v else v for v in row) for row in rows])
    return written(folder, name, f'kind = "table"\nmanifest = "{name}.csv"\n', *overrides)


def written(folder: Path, name: str, source: str, *overrides: str) -> Config:
    (folder / f"{name}.toml").write_text(
        f'name = "{name}"\n[source]\n{source}[source.columns]\nstart = "begin"\nend = "stop"\nchannel = "line"\n'
        '[audio]\nfeatures = "waveform"\ndtype = "float32"\n[layout]\nrows_per_shard = 7\n'
        "[plan]\nbatch_size = 4\nedges_s = [2.0, 4.0]\n"
        f'[run]\ncache_root = "{name}_caches"\nnum_workers = 2\nmax_failed_share = 0.9\n'
    )
    return load_config(folder / f"{name}.toml", overrides=overrides)


def built(config: Config) -> Cache:
    return open_cache(build_here(config).cache)


def by_text(cache: Cache) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    texts = cache.table(["text"])["text"].to_pylist()
    return {text: cache.read(index) for index, text in enumerate(texts)}


@pytest.mark.parametrize("features", ["waveform", "log_mel"])
@pytest.mark.few("log_mel")
def test_a_segment_is_the_file_that_was_cut_out(folder: Path, tmp_path: Path, features: str) -> None:
    rows = rows_of()
    overrides = ['audio={features="log_mel"}'] if features == "log_mel" else ["audio.sample_rate_hz=24000"]
    found = by_text(built(config_of(folder, rows, *overrides)))
    lines = []
    for number, (name, start, end, channel, text) in enumerate(rows):
        part, rate_hz = cut((folder / name).read_bytes(), Bounds(start, end, channel))
        subtype = "PCM_16" if part.dtype == np.int16 else "FLOAT"
        soundfile.write(tmp_path / f"{number}.wav", part, rate_hz, subtype=subtype)
        lines.append(f"{number}.wav,{text}\n")
    (tmp_path / "cut.csv").write_text("audio,text\n" + "".join(lines))
    text = (folder / "t.toml").read_text().replace("t.csv", "cut.csv")
    head, _, rest = text.partition("[source.columns]")
    (tmp_path / "cut.toml").write_text(head + rest[rest.index("[audio]") :])
    wanted = by_text(built(load_config(tmp_path / "cut.toml", overrides=overrides)))
    assert found.keys() == wanted.keys()
    assert len(found) == len(RECORDINGS) * len(STRETCHES)
    for each, values in wanted.items():
        for field, array in values.items():
            assert np.array_equal(found[each][field], array), (each, field)


@given(data=st.data(), name=st.sampled_from([name for name, *_ in RECORDINGS]))
def test_any_stretches_in_any_order_are_those_of_the_whole(folder: Path, data: st.DataObject, name: str) -> None:
    content = (folder / name).read_bytes()
    whole, rate_hz = decoded(content)
    parts = RecordingParts(io.BytesIO(content), name=name)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.floats(0, SECONDS - 0.1))
        end = data.draw(st.just(math.nan) | st.floats(start + 0.001, SECONDS + 3))
        channel = data.draw(st.none() | st.integers(0, whole.shape[1] - 1))
        bounds = Bounds(start, end, channel)
        wanted, _ = cut(content, bounds)
        if not len(wanted):
            with pytest.raises(DecodeError, match="and a row is from"):
                parts.wav(bounds, max_bytes=None)
            continue
        found, found_hz = decoded(parts.wav(bounds, max_bytes=None))
        assert found_hz == rate_hz
        assert np.array_equal(found, wanted)


def test_uncached_steps_listings_and_readers_know_segments(folder: Path) -> None:
    config = config_of(folder, rows_of(), "audio.sample_rate_hz=16000", name="both")
    cache = built(config)
    cached, uncached = (
        make_loader(config),
        make_loader(load_config(folder / "both.toml", overrides=['loader.cache="off"'])),
    )
    exact = ("a.wav", "b.flac", "e.wav", "f.flac")
    recordings = cache.table(["recording"])["recording"].to_pylist()
    assert {name for name, *_ in RECORDINGS} == set(recordings)
    ours = np.asarray(uncached.source.lengths["num_audio_samples"])
    for index, name in enumerate(recordings):  # headers say them, without decoding
        assert abs(ours[index] - cache.lengths["num_audio_samples"][index]) <= (0 if name in exact else 1)
    assert [uncached.source.sample_id(i) for i in range(len(cache))] == [cache.sample_id(i) for i in range(len(cache))]
    plain, heard = PlainSamples(config, [cache.sample_id(i) for i in range(len(cache))]), Heard(config, cache)
    for index in range(len(cache)):
        waveform = cache.read(index)["waveform"]
        assert np.array_equal(uncached.source.read(index)["waveform"], waveform)
        assert np.array_equal(plain[index]["waveform"], waveform)
        (row,) = cache.table().slice(index, 1).to_pylist()
        sound = heard(row)
        assert sound is not None
        assert np.abs(sound / 32768 - waveform).max() < 1e-4
    assert sum(len(batch["input_values"]) for batch in cached) == len(cache)


def test_cached_batches_are_the_uncached_ones_where_headers_are_exact(folder: Path) -> None:
    config = config_of(folder, rows_of(("a.wav", "b.flac")), name="exact")
    built(config)
    off = load_config(folder / "exact.toml", overrides=['loader.cache="off"'])
    for one, other in zip(make_loader(off), make_loader(config), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_row_table_says_where_segments_lie_and_shards_hold_whole_recordings(folder: Path) -> None:
    cache = built(config_of(folder, rows_of(("a.wav", "b.flac")), name="table"))
    rows = cache.table(["sample_id", "recording", "start_s", "end_s", "channel"]).to_pylist()
    assert [row["recording"] for row in rows] == sorted(
        (row["recording"] for row in rows), key=[r["recording"] for r in rows].index
    )
    starts = [row["start_s"] for row in rows if row["recording"] == "b.flac"]
    assert starts == sorted(starts)
    (row,) = (row for row in rows if row["sample_id"] == "b_0002000_0002750_ch2")
    assert row == {
        "sample_id": "b_0002000_0002750_ch2",
        "recording": "b.flac",
        "start_s": 2.0,
        "end_s": 2.75,
        "channel": 2,
    }
    (last,) = (row for row in rows if row["sample_id"] == "b_0006123")
    assert last["channel"] is None
    assert last["end_s"] == pytest.approx(SECONDS, abs=1e-3)
    assert [entry.rows for _, entry in cache.shard_entries("audio")] == [5, 5]


def test_a_recording_is_opened_once_a_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Counted(RecordingParts):
        def _open(self) -> Any:
            opened.append(self._name)
            return super()._open()

    monkeypatch.setattr(media_reader, "RecordingParts", Counted)
    built(config_of(folder, rows_of(), name="once"))
    assert sorted(map(os.path.basename, opened)) == [name for name, *_ in RECORDINGS]


@given(
    recordings=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    groups=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    most=st.integers(1, 12),
)
def test_shards_hold_whole_recordings_or_one(recordings: list[int], groups: list[int], most: int) -> None:
    group = np.repeat(np.cumsum(groups)[: len(recordings)], recordings)
    numbers = np.repeat(np.arange(len(recordings)), recordings)
    found = list(cut_recordings(numbers, group, rows_per_shard=most))
    assert [place for start, stop in found for place in range(start, stop)] == list(range(len(numbers)))
    for start, stop in found:
        assert len(set(group[start:stop])) == 1
        assert stop - start <= most or len(set(numbers[start:stop])) == 1
    of_shard = [set(numbers[start:stop]) for start, stop in found]
    assert sum(map(len, of_shard)) == len(recordings)


def test_bad_rows_cost_themselves_with_a_reason(folder: Path) -> None:
    good: list[Row] = [("a.wav", 1.0, 2.0, None, "good")]
    bad: list[tuple[Row, str]] = [
        (("a.wav", 5, 4, None, "1"), "bad_segment"),
        (("a.wav", -1, 4, None, "2"), "bad_segment"),
        (("a.wav", 0, 1, -1, "3"), "bad_segment"),
        (("a.wav", math.nan, 4, None, "4"), "bad_segment"),
        (("a.wav", 1.00001, 1.00002, None, "4a"), "bad_segment"),
        (("a.wav", 40, 41, None, "5"), "segment_past_end"),
        (("a.wav", 7, 15, None, "6"), "duration_mismatch"),
        (("b.flac", 0, 1, 7, "7"), "no_such_channel"),
        (("gone.wav", 0, 1, None, "8"), "missing_file"),
        (("a.wav", 1.0, 2.0, None, "again"), "duplicate_id"),
    ]
    cache = built(config_of(folder, [*good, *(row for row, _ in bad)], "run.max_failed_share=0.95", name="bad"))
    assert len(cache) == 1
    found = [line["reason"] for line in json_lines(cache.folder / "rejected.jsonl")]
    assert sorted(found) == sorted(reason for _, reason in bad)
    lines = {line["reason"]: line["message"] for line in json_lines(cache.folder / "rejected.jsonl")}
    assert "has 8.00 s, and a row is from 40.00 s to 41.00 s" in lines["segment_past_end"]
    assert "has 3 channels, and a row is of channel 7" in lines["no_such_channel"]


def test_segments_that_are_too_large_or_of_damaged_recordings_are_left_out(folder: Path, tmp_path: Path) -> None:
    rows: list[Row] = [("a.wav", 0.0, 1.0, None, "short"), ("a.wav", 0.0, 7.0, None, "long")]
    cache = built(config_of(folder, rows, "source.max_sample_bytes=100000", name="large"))
    assert (len(cache), cache.metadata["failed"]) == (1, {"too_large": 1})
    data = bytearray((folder / "b.flac").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = bytes(4000)
    (tmp_path / "x.flac").write_bytes(data)
    bounds = [(0.0, 1.0), (1.0, 2.0), (5.0, 7.0), (6.0, 7.0)]
    cache = built(config_of(tmp_path, [("x.flac", *each, None, f"{each}") for each in bounds]))
    assert (cache.table(["text"])["text"].to_pylist(), cache.metadata["failed"]) == (
        ["(0.0, 1.0)", "(1.0, 2.0)"],
        {"corrupt_audio": 2},
    )


def test_duration_behind_a_start_is_the_segments_and_alone_the_recordings(folder: Path) -> None:
    (folder / "s.csv").write_text("audio,begin,line,seconds,text\na.wav,1.0,,2.5,one\na.wav,4.0,,1.0,two\n")
    source = 'kind = "table"\nmanifest = "s.csv"\n'
    config = written(folder, "s", source, "source.columns.end=text", "source.columns.duration=seconds")
    with pytest.raises(ManifestError, match="text"):
        built(config)
    text = (folder / "s.toml").read_text().replace('end = "stop"', 'duration = "seconds"')
    (folder / "s.toml").write_text(text)
    rows = built(load_config(folder / "s.toml")).table(["start_s", "end_s"]).to_pylist()
    assert rows == [{"start_s": 1.0, "end_s": 3.5}, {"start_s": 4.0, "end_s": 5.0}]
    (folder / "s.toml").write_text(text.replace('start = "begin"\n', ""))
    (folder / "s.csv").write_text("audio,line,seconds,text\nb.flac,2,8.0,one\n")
    cache = built(load_config(folder / "s.toml"))
    assert cache.lengths["num_audio_samples"].tolist() == [16_000 * SECONDS]


def test_bytes_in_the_rows_of_a_table_are_cut_too(folder: Path, tmp_path: Path) -> None:
    data = (folder / "b.flac").read_bytes()
    rows: dict[str, list[Any]] = {
        "audio": [data, data],
        "begin": [1.0, 2.0],
        "stop": [2.0, 2.5],
        "line": [None, 1],
        "text": ["1", "2"],
    }
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    config = written(tmp_path, "p", 'kind = "table"\nmanifest = "t.parquet"\n', "audio.sample_rate_hz=8000")
    found = by_text(built(config))
    for place, text in enumerate(("1", "2")):
        part, _ = cut(data, Bounds(rows["begin"][place], rows["stop"][place], rows["line"][place]))
        mono = part.astype(np.float32) / 32768
        assert np.allclose(found[text]["waveform"], mono.mean(1), atol=1e-6)


def test_a_member_of_a_tar_is_read_in_place(folder: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"pad": b"1" * 777, "b.flac": (folder / "b.flac").read_bytes()})
    data = (tmp_path / "x.tar").read_bytes()
    content = (folder / "b.flac").read_bytes()
    source = SourceFile(entry=0, name="x.tar", path=tmp_path / "x.tar")
    with MediaReader([source], max_open=1) as read:
        found = read(0, data.index(b"fLaC"), len(content), Bounds(2.0, 3.0, 1))
    assert np.array_equal(decoded(found)[0], cut(content, Bounds(2.0, 3.0, 1))[0])
    part = FileStretch(os.open(tmp_path / "x.tar", os.O_RDONLY), data.index(b"fLaC"), len(content))
    assert part.read() == content


def test_the_key_knows_where_segments_lie(folder: Path) -> None:
    rows: list[Row] = [("a.wav", 1.0, 2.0, None, "one")]
    first = built(config_of(folder, rows, name="key"))
    moved = built(config_of(folder, [("a.wav", 1.0, 2.001, None, "one")], name="key"))
    again = built(config_of(folder, rows, name="key"))
    assert first.key == again.key != moved.key
    assert file_bytes(first.folder) == file_bytes(again.folder)


def test_kinds_that_have_no_segments_refuse_their_columns(folder: Path) -> None:
    for source in ('kind = "webdataset"\nmanifest = "t.tar"\n', 'kind = "folder"\nmanifest = "."\n'):
        with pytest.raises(ConfigError, match=r"source\.columns\.start"):
            written(folder, "refused", source)


def test_json_lines_and_members_of_tars_are_cut_as_a_table_is(folder: Path, tmp_path: Path) -> None:
    rows = rows_of(("a.wav", "b.flac"))
    wanted = by_text(built(config_of(folder, rows, name="wanted")))
    lines = [
        {"audio": name, "text": text, "begin": start, "stop": None if math.isnan(end) else end, "line": channel}
        for name, start, end, channel, text in rows
    ]
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = built(written(folder, "lines", 'kind = "jsonl"\nmanifest = "t.jsonl"\n'))
    assert by_text(found).keys() == wanted.keys()
    assert all(np.array_equal(by_text(found)[text]["waveform"], row["waveform"]) for text, row in wanted.items())
    assert found.metadata["unused_fields"] == {}
    assert "b_0002000_0002750_ch2" in found.table(["sample_id"])["sample_id"].to_pylist()
    write_tar(tmp_path / "x.tar", {name: (folder / name).read_bytes() for name in ("a.wav", "b.flac")})
    table = {
        "tar_path": ["x.tar"] * len(rows),
        "tar_member_name": [row[0] for row in rows],
        "transcript": [row[4] for row in rows],
        "language": ["en"] * len(rows),
        "duration_s": pa.nulls(len(rows), pa.float64()),
        "begin": [row[1] for row in rows],
        "stop": pa.array([row[2] for row in rows], from_pandas=True),
        "line": pa.array([row[3] for row in rows], pa.int64()),
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    cache = built(written(tmp_path, "tars", 'kind = "tar"\nmanifest = "t.parquet"\n'))
    assert by_text(cache).keys() == wanted.keys()
    assert all(np.array_equal(by_text(cache)[text]["waveform"], row["waveform"]) for text, row in wanted.items())
    assert set(cache.table(["recording"])["recording"].to_pylist()) == {"x.tar:a.wav", "x.tar:b.flac"}


def test_readers_of_a_plain_data_set_go_where_its_workers_are(folder: Path) -> None:
    """`datasets` pickles what it maps, by dill, and workers of a DataLoader may be spawned."""
    config = config_of(folder, rows_of(("a.wav",)), name="sent")
    cache = built(config)
    plain = PlainSamples(config, [cache.sample_id(i) for i in range(len(cache))])
    first = plain[0]["waveform"]
    copy = dill.loads(dill.dumps(plain))  # noqa: S301 - our own bytes
    assert np.array_equal(copy[0]["waveform"], first)


def test_what_no_wav_holds_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = RecordingParts(io.BytesIO((folder / "a.wav").read_bytes()), name="a.wav")
    monkeypatch.setattr(segments, "_MAX_WAV_BYTES", 32_000)
    assert len(parts.wav(Bounds(0.0, 1.0), max_bytes=None)) == 32_044
    with pytest.raises(DecodeError, match=r"a\.wav, 0\.00 s to 1\.50 s: 48000 bytes, and a WAV holds 32000") as err:
        parts.wav(Bounds(0.0, 1.5), max_bytes=None)
    assert err.value.reason == "too_large"


BOUNDS = st.tuples(st.integers(0, 2), st.none() | st.integers(0, 1), st.integers(0, 20), st.integers(1, 9))


@given(st.lists(BOUNDS, max_size=12))
def test_overlaps_are_those_of_plain_loops(rows: list[tuple[int, int | None, int, int]]) -> None:
    columns = [np.array([row[at] for row in rows], np.float64) for at in (2, 3)]
    found = overlap_s(
        np.array([row[0] for row in rows], np.int64),
        pa.chunked_array([[row[1] for row in rows]], pa.int64()),
        columns[0],
        columns[0] + columns[1],
    )
    order = sorted(range(len(rows)), key=lambda at: (rows[at][2], rows[at][2] + rows[at][3]))
    for place, at in enumerate(order):
        earlier = [rows[other] for other in order[:place] if rows[other][:2] == rows[at][:2]]
        ends = [min(start + length, rows[at][2] + rows[at][3]) for *_, start, length in earlier]
        assert found[at] == max([0, *(end - rows[at][2] for end in ends)])


def test_lint_export_sound_and_evaluation_sets_know_segments(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = [("a.wav", 1.0, 2.0, 0, "1"), ("a.wav", 1.5, 3.0, 0, "2"), ("a.wav", 2.5, 4.0, None, "3")]
    config, name = config_of(folder, rows, 'filter.where="start_s > 1"', name="shown"), "a_0001500_0003000_ch0"
    path = str(folder / "shown.toml")
    part, _ = cut((folder / "a.wav").read_bytes(), Bounds(1.5, 3.0, 0))
    for _ in range(2):  # raw data, then the cache
        report = lint([Target(config=load_config(path))], (), LintOptions(progress=False))
        findings = [(each.severity, each.sample_id) for each in report.findings if each.check == "overlap"]
        assert findings == [("info", name)]
        assert name not in report.dropped()
        built(config)
    assert len(make_loader(config).source) == 2
    kind = ("--set", "audio.dtype=int16")
    assert main(["preprocess", path, *kind, "--no-progress"]) == 0
    assert main(["inspect", path, *kind, "--sample", name, "--wav", str(tmp_path / "o.wav")]) == 0
    assert np.array_equal(decoded((tmp_path / "o.wav").read_bytes())[0], part)
    assert main(["export", path, *kind, "--form", "webdataset", "--out", str(tmp_path / "tars")]) == 0
    assert main(["evalset", path, *kind, "--out", str(tmp_path / "sets"), "--no-progress"]) == 0
    capsys.readouterr()
    for made in (tmp_path / "tars", tmp_path / "sets"):
        (tar,) = made.glob("*.tar")
        with tarfile.open(tar) as opened:
            member = opened.extractfile(f"{name}.wav")
            assert member is not None
            assert np.array_equal(decoded(member.read())[0], part)
    page = write_page(path, tmp_path / "p.html", kind)
    assert name in page
    assert "start_s" in page


def write_page(config: str, path: Path, more: Sequence[str]) -> str:
    assert main(["inspect", config, *more, "--html", str(path), "--no-progress"]) == 0
    return path.read_text()


def test_columns_of_segments_are_not_kept_again(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep_columns: 'channel' is the name of a column that caches have anyway"):
        config_of(folder, rows_of(("a.wav",)), 'source.keep_columns=["channel"]', name="kept")
