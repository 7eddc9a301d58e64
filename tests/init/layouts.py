"""The demo's recordings and photos, laid out as people keep them."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo"
WHISPER = DEMO / "speech" / "model"
QWEN3_ASR = DEMO / "speech" / "qwen3_asr_model"
QWEN3_VL = DEMO / "vision" / "model"


class Clip(NamedTuple):
    id: str
    data: bytes
    text: str
    language: str
    duration_s: float


@cache
def clips() -> tuple[Clip, ...]:
    """Twelve short recordings in several languages."""
    found = [clip for tar in sorted((DEMO / "speech").glob("*.tar")) for clip in _clips(tar)]
    return tuple([clip for clip in found if clip.duration_s < 3][:12])


def _clips(path: Path) -> Iterator[Clip]:
    with tarfile.open(path) as tar:
        members = {member.name: member for member in tar.getmembers()}
        for name in members:
            if name.endswith(".json"):
                fields = json.loads(_read(tar, name))
                data = _read(tar, f"{name.removesuffix('.json')}.flac")
                yield Clip(fields["id"], data, fields["transcription"], fields["language"], fields["duration"])


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def file_name(clip: Clip) -> str:
    return f"{clip.id.replace('/', '_')}.flac"


def write_clips(folder: Path, *, by_language: bool = False) -> dict[str, Path]:
    """Writes the recordings and returns their paths by id."""
    paths = {}
    for clip in clips():
        path = (folder / clip.language if by_language else folder) / file_name(clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(clip.data)
        paths[clip.id] = path
    return paths


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], *, delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def webdataset(folder: Path) -> Path:
    members = {}
    for clip in clips():
        name = clip.id.replace("/", "_")
        members[f"{name}.flac"] = clip.data
        members[f"{name}.json"] = json.dumps({"text": clip.text, "language": clip.language}).encode()
    write_tar(folder / "shard-000.tar", members)
    return folder


def jsonl(folder: Path) -> Path:
    write_clips(folder / "audio")
    rows = [{"audio": f"audio/{file_name(c)}", "text": c.text, "language": c.language, "id": c.id} for c in clips()]
    write_lines(folder / "clips.jsonl", rows)
    return folder


def ljspeech(folder: Path) -> Path:
    write_clips(folder / "wavs")
    lines = [f"{file_name(clip).removesuffix('.flac')}|{clip.text}|{clip.text}" for clip in clips()]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def photos(folder: Path) -> Path:
    """The first ten conversations, with their photos beside them."""
    rows = [json.loads(line) for line in (DEMO / "vision" / "train.jsonl").read_text().splitlines()[:10]]
    (folder / "photos").mkdir(parents=True)
    for name in {row["image"] for row in rows}:
        shutil.copy(DEMO / "vision" / name, folder / name)
    write_lines(folder / "questions.jsonl", rows)
    return folder
