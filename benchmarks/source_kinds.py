"""Writes one data set as every kind of source: `write_kind` gives a config whose build costs its main process alone.

A clip is a WAV of 32 samples, its text some 40 characters. Loose kinds have a file a clip (`folder` two). Conversations
have some 100 characters and an image, which a thousand of them share.
"""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data import ROOT, SPEECH

_CLIPS_PER_FILE = 1000
_SAMPLE_RATE_HZ = 16_000
_CONFIG = """name = "kinds"
[source]
{source}
[audio]
features = "log_mel"
[text]
tokenizer = "{model}"
prompt = "whisper"
[run]
num_workers = 2
{run}
"""
_TEXT_CONFIG = """name = "kinds"
[source]
{source}
[audio]
features = "none"
[text]
tokenizer = "{model}"
prompt = "plain"
[run]
num_workers = 2
"""
_CHAT_CONFIG = """name = "kinds"
[source]
{source}
[vision]
processor = "{model}"
[text]
tokenizer = "{model}"
prompt = "chat"
[run]
num_workers = 2
{run}
"""
_CODE = """import json

def clips():
    data = open("{clip}", "rb").read()
    for number in range({count}):
        text = "what is said in clip %d of a large corpus" % number
        yield {{"id": "clip-%09d" % number, "audio": data, "text": text}}
"""


def clip() -> bytes:
    """Returns a WAV of 32 samples of silence: 16 kHz, 16-bit mono."""
    data, rate = bytes(64), _SAMPLE_RATE_HZ
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def said(number: int) -> str:
    """Returns the text of a clip."""
    return f"what is said in clip {number} of a large corpus"


def write_kind(kind: str, folder: Path, *, num_rows: int) -> Path:
    """Writes so many clips in one of KINDS; returns the config."""
    folder.mkdir(parents=True)
    source = KINDS[kind](folder, num_rows)
    run = "allow_code = true" if kind == "python" else ""
    text = {"text": _TEXT_CONFIG, "conversations": _CHAT_CONFIG}.get(kind, _CONFIG)
    home = ROOT / "demo" / "vision" if kind == "conversations" else SPEECH
    path = folder / "kinds.toml"
    path.write_text(text.format(source=source, model=home / "model", run=run), encoding="utf-8")
    return path


def _loose(folder: Path, num_rows: int, *, texts: bool = False) -> Iterator[str]:
    """Writes a file a clip, a thousand a folder; yields their names."""
    data = clip()
    for number in range(num_rows):
        name = f"clips/{number // _CLIPS_PER_FILE:05d}/{number:09d}"
        path = folder / name
        if not number % _CLIPS_PER_FILE:
            path.parent.mkdir(parents=True)
        path.with_suffix(".wav").write_bytes(data)
        if texts:
            path.with_suffix(".txt").write_text(said(number), encoding="utf-8")
        yield f"{name}.wav"


def _csv(folder: Path, num_rows: int, *, above: str = "clips/") -> str:
    with open(folder / "train.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["audio", "text"])
        table.writerows(
            [name.removeprefix("clips/"[len(above) :]), said(number)]
            for number, name in enumerate(_loose(folder, num_rows))
        )
    return 'kind = "table"\nmanifest = "train.csv"'


def _jsonl(folder: Path, num_rows: int) -> str:
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for number, name in enumerate(_loose(folder, num_rows)):
            file.write(json.dumps({"audio": name, "text": said(number)}) + "\n")
    return 'kind = "jsonl"\nmanifest = "train.jsonl"'


def _folder(folder: Path, num_rows: int) -> str:
    for _ in _loose(folder, num_rows, texts=True):
        pass
    return 'kind = "folder"\nmanifest = "clips"'


def _folder_with_table(folder: Path, num_rows: int) -> str:
    _csv(folder, num_rows, above="")
    return 'kind = "folder"\nmanifest = "clips"\ntexts = "train.csv"'


def _webdataset(folder: Path, num_rows: int) -> str:
    data = clip()
    for start in range(0, num_rows, _CLIPS_PER_FILE):
        with tarfile.open(folder / f"train-{start:09d}.tar", "w") as tar:
            for number in range(start, min(start + _CLIPS_PER_FILE, num_rows)):
                for ending, part in (("wav", data), ("txt", said(number).encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{ending}")
                    info.size = len(part)
                    tar.addfile(info, io.BytesIO(part))
    return 'kind = "webdataset"\nmanifest = "train-*.tar"'


def _tar(folder: Path, num_rows: int) -> str:
    _webdataset(folder, num_rows)
    numbers = range(num_rows)
    table: dict[str, Any] = {
        "tar_path": [f"train-{number // _CLIPS_PER_FILE * _CLIPS_PER_FILE:09d}.tar" for number in numbers],
        "tar_member_name": [f"{number:09d}.wav" for number in numbers],
        "transcript": list(map(said, numbers)),
        "language": ["en"] * num_rows,
        "duration_s": [0.002] * num_rows,
    }
    pq.write_table(pa.table(table), folder / "train.parquet")
    return 'kind = "tar"\nmanifest = "train.parquet"'


def _hf(folder: Path, num_rows: int) -> str:
    data = clip()
    sounds = pa.array(
        [{"bytes": data, "path": None}] * num_rows, pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    table = pa.table({"audio": sounds, "text": list(map(said, range(num_rows)))})
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=_CLIPS_PER_FILE)
    return 'kind = "hf"\nmanifest = "train-00000-of-00001.parquet"'


def _text(folder: Path, num_rows: int) -> str:
    (folder / "train.txt").write_text("".join(f"{said(number)}\n" for number in range(num_rows)), encoding="utf-8")
    return 'kind = "text"\nmanifest = "train.txt"'


def _conversations(folder: Path, num_rows: int) -> str:
    from PIL import Image

    (folder / "images").mkdir()
    for number in range(0, num_rows, _CLIPS_PER_FILE):
        colour = number // _CLIPS_PER_FILE
        picture = Image.new("RGB", (128, 128), (colour % 256, colour // 256 % 256, 0))
        picture.save(folder / "images" / f"{number:09d}.png")
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for number in range(num_rows):
            turns = [
                ("user", f"<image>\nWhat is shown in picture {number}?"),
                ("assistant", f"A colour: {said(number)}."),
            ]
            name = f"images/{number // _CLIPS_PER_FILE * _CLIPS_PER_FILE:09d}.png"
            messages = [{"role": role, "content": content} for role, content in turns]
            row = {"id": f"conversation-{number:09d}", "images": [name], "messages": messages}
            file.write(json.dumps(row) + "\n")
    return 'kind = "jsonl"\nmanifest = "train.jsonl"'


def _python(folder: Path, num_rows: int) -> str:
    (folder / "clip.wav").write_bytes(clip())
    (folder / "inputs.py").write_text(_CODE.format(clip=folder / "clip.wav", count=num_rows), encoding="utf-8")
    return 'kind = "python"\nmanifest = "inputs.py:clips"'


KINDS: Mapping[str, Callable[[Path, int], str]] = {
    "csv of files": _csv,
    "json lines of files": _jsonl,
    "folder, texts beside": _folder,
    "folder, texts in a table": _folder_with_table,
    "tar": _tar,
    "webdataset": _webdataset,
    "hf": _hf,
    "text": _text,
    "conversations": _conversations,
    "python": _python,
}
