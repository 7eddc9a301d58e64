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

import pyarrow as pa
import pyarrow.parquet as pq

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
def all_clips() -> tuple[Clip, ...]:
    """Every recording of the demo."""
    return tuple(clip for tar in sorted((DEMO / "speech").glob("*.tar")) for clip in _clips(tar))


@cache
def clips() -> tuple[Clip, ...]:
    """Twelve short recordings in several languages."""
    return tuple([clip for clip in all_clips() if clip.duration_s < 3][:12])


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


def audio_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for clip in clips():
        audio = {"bytes": clip.data, "path": file_name(clip)}
        rows.append({"audio": audio, "sentence": clip.text, "locale": clip.language, "speaker": f"s{len(rows) % 3}"})
    return rows


def save_to_disk(folder: Path) -> Path:
    """A `save_to_disk` folder with an `Audio()` column, and columns of other names than usual."""
    _dataset().save_to_disk(str(folder))
    return folder


def dataset_dict(folder: Path) -> Path:
    """The same as `train`, its first rows as `test`."""
    from datasets import DatasetDict

    train = _dataset()
    DatasetDict({"train": train, "test": train.select(range(2))}).save_to_disk(str(folder))
    return folder


def _dataset() -> Any:
    from datasets import Audio, Dataset, Features, Value
    from datasets.table import InMemoryTable

    text = Value("string")
    features = Features({"audio": Audio(decode=False), "sentence": text, "locale": text, "speaker": text})
    # As a table: to encode rows the library asks for torchcodec.
    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.Table.from_pylist(audio_rows())
    rows = rows.set_column(0, "audio", pa.array([row["audio"] for row in audio_rows()], audio))
    return Dataset(InMemoryTable(rows.cast(features.arrow_schema)))


def parquet(folder: Path) -> Path:
    """A repository of the Hub: `data/train-00000-of-00001.parquet`, and a test split."""
    for split, rows in (("train", audio_rows()), ("test", audio_rows()[:2])):
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    return folder


def photo_rows() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (DEMO / "vision" / "train.jsonl").read_text().splitlines()[:10]]
    return [{**row, "image": {"bytes": (DEMO / "vision" / row["image"]).read_bytes(), "path": None}} for row in rows]


def photo_parquet(folder: Path) -> Path:
    """Photos in the rows of a parquet file, with columns of other names than usual."""
    rows = [{"picture": r["image"], "query": r["question"], "response": r["answer"]} for r in photo_rows()]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def photo_table(folder: Path) -> Path:
    """Photos, and a CSV of questions with columns of other names than usual."""
    photos(folder)
    lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    (folder / "questions.jsonl").unlink()
    rows = [{"file": row["image"], "query": row["question"], "response": row["answer"]} for row in lines]
    write_csv(folder / "questions.csv", rows, delimiter=";")
    return folder


def photo_tars(folder: Path) -> Path:
    members: dict[str, bytes] = {}
    for number, row in enumerate(photo_rows()):
        members[f"{number:04d}.jpg"] = row["image"]["bytes"]
        members[f"{number:04d}.json"] = json.dumps({name: row[name] for name in ("question", "answer")}).encode()
    write_tar(folder / "a-000.tar", members)
    return folder


def beside(folder: Path) -> Path:
    """Recordings in folders of their languages, a `.txt` of the same name beside each."""
    paths = write_clips(folder, by_language=True)
    for clip in clips():
        paths[clip.id].with_suffix(".txt").write_text(clip.text)
    return folder


def librispeech(folder: Path) -> Path:
    """`84/121123/84-121123-0000.flac` and `84-121123.trans.txt`."""
    place = folder / "train-clean" / "84" / "121123"
    place.mkdir(parents=True)
    lines = []
    for number, clip in enumerate(clips()):
        name = f"84-121123-{number:04d}"
        (place / f"{name}.flac").write_bytes(clip.data)
        lines.append(f"{name} {clip.text}")
    (place / "84-121123.trans.txt").write_text("\n".join(lines) + "\n")
    return folder


def table(folder: Path) -> Path:
    """Recordings in a folder, and a CSV that names them."""
    write_clips(folder / "wavs")
    rows = [
        {"path": f"wavs/{file_name(c)}", "sentence": c.text, "locale": c.language, "speaker": f"s{number % 3}"}
        for number, c in enumerate(clips())
    ]
    write_csv(folder / "metadata.csv", rows)
    return folder


def common_voice(folder: Path) -> Path:
    """`train.tsv`, `dev.tsv` and `test.tsv` beside `clips/`."""
    write_clips(folder / "clips")
    rows = [
        {
            "client_id": f"{number % 3:064x}",
            "path": file_name(clip),
            "sentence": clip.text,
            "up_votes": 2,
            "down_votes": 0,
            "age": "",
            "gender": "",
            "accents": "",
            "locale": clip.language,
            "segment": "",
        }
        for number, clip in enumerate(clips())
    ]
    for split, part in (("train", rows[2:]), ("dev", rows[:1]), ("test", rows[1:2]), ("validated", rows)):
        write_csv(folder / f"{split}.tsv", part, delimiter="\t")
    return folder


def named(folder: Path) -> Path:
    """Recordings, and a CSV that names them without their extensions."""
    paths = write_clips(folder / "sound", by_language=True)
    rows = [{"utt": paths[clip.id].stem, "transcript": clip.text, "lang": clip.language} for clip in clips()]
    write_csv(folder / "texts.csv", rows)
    return folder


def texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "corpus.txt").write_text("".join(f"{clip.text}\n" for clip in clips()))
    return folder
