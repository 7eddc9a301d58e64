"""Small raw data of every kind in a folder, and its copy in a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.objects.server import Bucket
from forebay import load_config
from forebay.config import Config
from tests.preprocess.vision.corpus import DEMO, photo
from tests.rows.helpers import audio, write_manifest, write_tar

NAMES = ("a", "b", "c", "d")


def _clips(kind: str = "FLAC") -> dict[str, bytes]:
    return {name: audio(1600 + 800 * number, seed=number, kind=kind) for number, name in enumerate(NAMES)}


def _two_tars(folder: Path, prefix: str = "") -> None:
    members = [(f"{name}.flac", data) for name, data in _clips().items()]
    write_tar(folder / f"{prefix}0.tar", members[:2])
    write_tar(folder / f"{prefix}1.tar", members[2:])


def tar(folder: Path) -> str:
    _two_tars(folder)
    rows = [
        {"tar_path": f"{number // 2}.tar", "tar_member_name": f"{name}.flac", "duration_s": None}
        for number, name in enumerate(NAMES)
    ]
    write_manifest(folder / "train.parquet", rows, duration_s=pa.float64())
    return "train.parquet"


def filelist(folder: Path) -> str:
    _two_tars(folder)
    lines = [f"{number // 2}.tar\t{name}\ten\t\n" for number, name in enumerate(NAMES)]
    (folder / "train.tsv").write_text("".join(lines))
    return "train.tsv"


def _webdataset(folder: Path) -> None:
    for number in range(2):
        members: list[tuple[str, bytes]] = []
        for name in NAMES[2 * number : 2 * number + 2]:
            members += [(f"{name}.flac", _clips()[name]), (f"{name}.json", json.dumps({"text": f"of {name}"}).encode())]
        write_tar(folder / f"train-{number}.tar", members)


def webdataset_folder(folder: Path) -> str:
    _webdataset(folder)
    (folder / "notes.txt").write_text("not a tar")
    return ""


def webdataset_glob(folder: Path) -> str:
    _webdataset(folder / "deep")
    write_tar(folder / "deep" / "other.tar", [("z.flac", audio(1600))])
    write_tar(folder / "deep" / "train-x" / "y.tar", [("y.flac", audio(1600))])
    return "d*/train-*.tar"


def jsonl(folder: Path) -> str:
    lines = []
    for number, (name, data) in enumerate(_clips("WAV").items()):
        path = folder / "clips" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        seconds = {"duration_s": 0.1} if number == 0 else {}
        lines.append(json.dumps({"audio": f"clips/{name}.wav", "text": name, **seconds}))
    lines.append(json.dumps({"audio": "clips/absent.wav", "text": "nothing"}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    return "train.jsonl"


def hf(folder: Path) -> str:
    rows = [{"audio": {"bytes": data, "path": None}, "text": name, "id": name} for name, data in _clips().items()]
    pq.write_table(pa.Table.from_pylist(rows[:3]), folder / "train-00000-of-00002.parquet")
    (folder / "loose.flac").write_bytes(_clips()["d"])
    rows[3]["audio"] = {"bytes": None, "path": "loose.flac"}
    schema = pq.read_schema(folder / "train-00000-of-00002.parquet")
    kinds = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = schema.set(schema.get_field_index("audio"), pa.field("audio", kinds))
    pq.write_table(pa.Table.from_pylist(rows[3:], schema), folder / "train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "test-00000-of-00001.parquet")
    return ""


def hf_saved(folder: Path) -> str:
    from datasets import Dataset, DatasetDict

    rows = [{"audio": {"bytes": data, "path": None}, "text": name} for name, data in _clips().items()]
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}).save_to_disk(folder)
    return ""


def ljspeech(folder: Path) -> str:
    (folder / "wavs").mkdir()
    for name, data in _clips("WAV").items():
        (folder / "wavs" / f"{name}.wav").write_bytes(data)
    (folder / "metadata.csv").write_text("".join(f"{name}|Text {name}|text {name}\n" for name in NAMES))
    return ""


def text(folder: Path) -> str:
    (folder / "one.jsonl").write_text("".join(json.dumps({"text": f"line {name}"}) + "\n" for name in NAMES))
    return "*.jsonl"


def subtitles(folder: Path) -> str:
    for name, data in _clips().items():
        (folder / "deep").mkdir(exist_ok=True)
        (folder / "deep" / f"{name}.flac").write_bytes(data)
        (folder / "deep" / f"{name}.srt").write_text(f"1\n00:00:00,000 --> 00:00:00,080\n{name}\n")
    return "deep"


def kaldi(folder: Path) -> str:
    for name, data in _clips().items():
        (folder / f"{name}.flac").write_bytes(data)
    (folder / "wav.scp").write_text("".join(f"{name} {name}.flac\n" for name in NAMES))
    (folder / "segments").write_text("".join(f"u{name} {name} 0 0.08\n" for name in NAMES))
    (folder / "text").write_text("".join(f"u{name} of {name}\n" for name in NAMES))
    return ""


def nemo(folder: Path) -> str:
    for name, data in _clips().items():
        (folder / f"{name}.flac").write_bytes(data)
    lines = [{"audio_filepath": f"{name}.flac", "offset": 0.0, "duration": 0.08, "text": name} for name in NAMES]
    (folder / "m.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "m.json"


def _asked(name: str) -> dict[str, str]:
    return {"id": name, "question": f"What of {name}?", "answer": "Waves."}


def vision_jsonl(folder: Path) -> str:
    (folder / "photos").mkdir()
    for number, name in enumerate(NAMES):
        (folder / "photos" / f"{name}.jpg").write_bytes(photo(number))
    rows = [{**_asked(name), "image": f"photos/{name}.jpg"} for name in (*NAMES, "absent")]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "train.jsonl"


def vision_hf(folder: Path) -> str:
    rows = [{**_asked(name), "image": {"bytes": photo(number)}} for number, name in enumerate(NAMES)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return "train.parquet"


def vision_webdataset(folder: Path) -> str:
    for number, name in enumerate(NAMES):
        members = [(f"{name}.json", json.dumps(_asked(name)).encode()), (f"{name}.jpg", photo(number))]
        write_tar(folder / f"{name}.tar", members)
    return "*.tar"


def vision_folder(folder: Path) -> str:
    for number, name in enumerate(NAMES):
        (folder / "set" / name).mkdir(parents=True)
        (folder / "set" / name / "photo.jpg").write_bytes(photo(number))
        (folder / "set" / name / "photo.txt").write_text(f"waves of {name}")
    (folder / "set" / ".hidden").write_text("x")
    (folder / "set" / "notes.md").write_text("x")
    return "set"


SPEECH: dict[str, tuple[str, Callable[[Path], str]]] = {
    "tar": ("tar", tar),
    "filelist": ("filelist", filelist),
    "webdataset-folder": ("webdataset", webdataset_folder),
    "webdataset-glob": ("webdataset", webdataset_glob),
    "jsonl": ("jsonl", jsonl),
    "hf": ("hf", hf),
    "hf-saved": ("hf", hf_saved),
    "ljspeech": ("ljspeech", ljspeech),
    "text": ("text", text),
    "subtitles": ("subtitles", subtitles),
    "kaldi": ("kaldi", kaldi),
    "nemo": ("nemo", nemo),
}
VISION: dict[str, tuple[str, Callable[[Path], str]]] = {
    "vision-jsonl": ("jsonl", vision_jsonl),
    "vision-hf": ("hf", vision_hf),
    "vision-webdataset": ("webdataset", vision_webdataset),
    "vision-folder": ("folder", vision_folder),
}
"""(kind, what writes its files into a folder and returns the manifest) by a name for the test."""

TOKENIZER = Path(__file__).resolve().parents[2] / "demo" / "speech" / "model"


def config_of(name: str, manifest: str | tuple[str, ...], *, root: Path, node: Path, **source: object) -> Config:
    """Returns the config of data of a kind, wherever its manifest lies."""
    kind = (SPEECH | VISION)[name][0]
    document: dict[str, object] = {
        "name": "raw",
        "source": {"kind": kind, "manifest": manifest, **source},
        "layout": {"rows_per_shard": 2},
        "run": {"cache_root": str(root), "num_workers": 2, "max_failed_share": 0.5},
        "remote": {"shard_dir": str(node), "cache_size_gb": 1.0, "retries": 0},
    }
    if name in VISION:
        document["vision"] = {"processor": str(DEMO / "model")}
        if name == "vision-folder":
            document["text"] = {"prompt": "plain", "tokenizer": str(DEMO / "model")}
    elif name == "text":
        document |= {"audio": {"features": "none"}, "text": {"tokenizer": str(TOKENIZER)}}
    else:
        document["audio"] = {"features": "waveform"}
    return load_config(document)


def put_folder(folder: Path, bucket: Bucket, prefix: str = "") -> list[str]:
    """Puts every file of a folder into a bucket; returns their keys."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    bucket.put_all((prefix + name, data) for name, data in files.items())
    return [prefix + name for name in sorted(files)]
