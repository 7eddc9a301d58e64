"""Foreign bytes of conversations with clips: a row that is wrong costs itself, and its message names it."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.config.data import MEANINGS, SourceColumns
from forebay.errors import ForebayError
from forebay.preprocess.audio_group import DurationLimits
from forebay.preprocess.clip_group import ClipItems
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import Manifest, meaning_named
from forebay.rows.media_reader import MediaReader
from forebay.steps.audio.audio_section import AudioGroup
from forebay.steps.audio.extractor.conversation_sound import ClipMel
from forebay.steps.audio.waveform import Decode
from tests.faults.children import Children
from tests.faults.fuzzing import PER_TRIAL, WICKED, Fuzz
from tests.faults.row import Row, made
from tests.preprocess.corpus import tone
from tests.strategies import changed_bytes, changed_documents

_DECODE = Decode(sample_rate_hz=16_000, clip_s=None, max_sample_bytes=1_000_000)
_STEPS = AudioGroup(decode=_DECODE, features=ClipMel(n_mels=80, dtype="float16", mask="m"))
_PART = {"type": "audio", "path": "a.flac", "start": 0.25, "end": 0.75, "channel": 0}
_FILES = ("a.flac", "b.wav", "c.ogg", "d.mp3")


def _said(*parts: Any, **row: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A."}]}
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}, answer], **row}


def _rows(raw: Path) -> list[dict[str, Any]]:
    data = base64.b64encode((raw / "a.flac").read_bytes()).decode()
    marked = [{"role": "user", "content": "<audio>x<audio>"}, {"role": "assistant", "content": "A.", "loss": True}]
    return [
        _said(_PART, {"type": "audio", "audio": "b.wav"}, id="parts"),
        {"messages": marked, "audios": [{"path": "c.ogg", "start": 0.1, "duration": 0.5}, "d.mp3"], "id": "column"},
        {"question": "<audio>what?", "answer": "A.", "audio": f"data:audio/flac;base64,{data}", "system": "Hear."},
        _said({"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}, id="inside"),
        _said({"type": "audio", "start": 0.5}, audio="a.flac", id="row"),
    ]


def talk_rows(folder: Path, data: st.DataObject) -> None:
    """Nothing ends a build but what is no object, or no JSON."""
    raw = folder / "raw"
    rows = data.draw(changed_documents(_rows(raw)))
    path = raw / "list.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) if isinstance(rows, list) else json.dumps(rows))
    is_listing = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    try:
        manifest = _read(SourceConfig(kind="jsonl", manifest=(str(path),), max_sample_bytes=1_000_000))
    except ForebayError as err:
        if is_listing:
            raise AssertionError(repr(err)) from err
        raise
    assert not is_listing or len(manifest.rows) + len(manifest.rejected) == len(rows)
    assert all(manifest.rejected["sample_id"].to_pylist())
    for message in manifest.rejected["message"].to_pylist():
        assert "list.jsonl" in message or ": " in message, message


def talk_bytes(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "list.jsonl"
    lines = "".join(f"{json.dumps(row)}\n" for row in _rows(folder / "raw")).encode()
    path.write_bytes(data.draw(changed_bytes(lines, WICKED)))
    _read(SourceConfig(kind="jsonl", manifest=(str(path),), max_sample_bytes=1_000_000))


def talk_parquet(folder: Path, data: st.DataObject) -> None:
    path, is_valid = folder / "raw" / "list.parquet", data.draw(st.booleans())
    number = st.one_of(st.none(), st.floats(), st.floats(-1, 3))
    bounds = data.draw(st.lists(st.fixed_dictionaries({"start": number, "end": number}), min_size=2, max_size=2))
    clips = [{"path": name, **each} for name, each in zip(_FILES, bounds, strict=False)]
    rows = [{**_said({"type": "audio", "text": None}, {"type": "audio"}), "audio": clips, "id": "x"}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    path.write_bytes(path.read_bytes() if is_valid else data.draw(changed_bytes(path.read_bytes(), WICKED)))
    source = SourceConfig(kind="table", manifest=(str(path),), max_sample_bytes=1_000_000, columns=SourceColumns())
    try:
        manifest = _read(source)
    except ForebayError as err:
        if is_valid:
            raise AssertionError(repr(err)) from err
        raise
    assert not is_valid or len(manifest.rows) + len(manifest.rejected) == 1


def talk_sounds(folder: Path, data: st.DataObject) -> None:
    """Recordings with other bytes in them, whole and in stretches."""
    raw = folder / "raw"
    for name in data.draw(st.sets(st.sampled_from(_FILES), min_size=1)):
        (raw / name).write_bytes(data.draw(changed_bytes((raw / name).read_bytes(), WICKED)))
    path = raw / "list.jsonl"
    rows = [_said({**_PART, "path": name}, {"type": "audio", "path": name}, id=name) for name in _FILES]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    try:
        manifest = _read(SourceConfig(kind="jsonl", manifest=(str(path),), max_sample_bytes=1_000_000))
    except ForebayError as err:
        raise AssertionError(repr(err)) from err
    assert len(manifest.rows) + len(manifest.rejected) == len(_FILES)


def _read(source: SourceConfig) -> Manifest:
    """Lists conversations and makes every clip of those that are left, as a build does."""
    meaning = meaning_named("conversations", MEANINGS["conversations"].of_groups(["audio"]))
    group = ClipItems(_STEPS, DurationLimits.of(source, _DECODE))
    manifest = group.checked(list_rows(source, meaning, cache_root=Path(source.manifest[0]).parents[1] / "root"))
    items = group.items(manifest).table
    rows = group.task_rows(items, manifest.files)
    with MediaReader(manifest.files, max_open=2, max_bytes=source.max_sample_bytes, column="audio") as read:
        made_of = list(group.samples(rows, read))
    assert len(made_of) == len(items)
    for values, told in zip(made_of, items["num_audio_samples"].to_pylist(), strict=True):
        assert "failure" in values or values["num_audio_samples"] == told
    return manifest


def _prepare(folder: Path) -> None:
    raw = made(folder / "raw")
    for number, name in enumerate(_FILES):
        soundfile.write(raw / name, np.stack([tone(number, duration_s=1.0)] * 2, axis=1), 16_000)


@contextlib.contextmanager
def _serving(_folder: Path) -> Iterator[Children]:
    with Children("tests.faults.test_fuzz_talks") as children:
        yield children


FUZZ = Fuzz(_prepare, dict.fromkeys((talk_rows, talk_bytes, talk_parquet, talk_sounds), "raw"))
ROW: Row[Any] = Row(
    name="fuzz_talks",
    fault=f"fuzzed conversations with clips: their rows, tables and recordings ({PER_TRIAL} inputs a run)",
    outcome="a bad row or recording costs its rows, by name; else a typed error; nothing run, nothing read outside",
    prepared=_serving,
    trial=FUZZ.trial,
    short=len(FUZZ.targets),
    long=120,
)


def test_foreign_conversations_with_clips_cost_their_rows(tmp_path: Path) -> None:
    with _serving(tmp_path) as children:
        numbers = range(len(FUZZ.targets))
        outcomes = [FUZZ.trial(children, number, made(tmp_path / str(number)), count=8) for number in numbers]
    assert outcomes == [f"{target.__name__} x 8" for target in FUZZ.targets]
