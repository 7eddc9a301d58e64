"""Small corpora of synthetic recordings, for tests that build caches."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from forebay import load_config
from forebay.config import Config

RATE_HZ = 16_000


def tone(seed: int, *, duration_s: float) -> np.ndarray:
    """int16 noise, another one for every seed."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(int(duration_s * RATE_HZ)) * 3000).astype(np.int16)


def flac(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE_HZ, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@dataclass
class Corpus:
    """Tars with a parquet manifest (`kind = "tar"`) under one folder, and a config beside them."""

    folder: Path
    rows: list[dict[str, object]] = field(default_factory=list)
    audio: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "caches"

    def add_tar(self, name: str, ids: Sequence[str], *, broken: Mapping[str, bytes] | None = None) -> None:
        """Adds a tar of clips; `broken` gives other bytes for an id."""
        members = {}
        for sample_id in ids:
            seed = zlib.crc32(sample_id.encode())
            samples = tone(seed, duration_s=0.1 + 0.05 * (seed % 5))
            self.audio[sample_id] = samples
            members[f"{sample_id}.flac"] = (broken or {}).get(sample_id, flac(samples))
            self.rows.append(
                {
                    "tar_path": name,
                    "tar_member_name": f"{sample_id}.flac",
                    "transcript": f"text of {sample_id}",
                    "language": "en" if seed % 2 else "fr",
                    "duration_s": len(samples) / RATE_HZ,
                    "sample_id": sample_id,
                }
            )
        write_tar(self.folder / name, members)
        self.write_manifest()

    def write_manifest(self) -> None:
        pq.write_table(pa.Table.from_pylist(self.rows), self.folder / "train.parquet")

    def config(self, *overrides: str) -> Config:
        path = self.folder / "config.toml"
        path.write_text(
            'name = "tones"\n[source]\nkind = "tar"\nmanifest = "train.parquet"\n'
            '[audio]\nfeatures = "waveform"\n[layout]\nrows_per_shard = 4\n'
            '[plan]\nbatch_size = 4\nedges_s = [0.2, 0.3]\n[run]\ncache_root = "caches"\nnum_workers = 2\n'
        )
        return load_config(path, overrides=overrides)


def speech_corpus(folder: Path) -> Corpus:
    """Two tars of 10 and 7 clips."""
    corpus = Corpus(folder)
    corpus.add_tar("a.tar", [f"a{i}" for i in range(10)])
    corpus.add_tar("b.tar", [f"b{i}" for i in range(7)])
    return corpus


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in file_bytes(folder).items() if name.endswith(".tdz")}


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
