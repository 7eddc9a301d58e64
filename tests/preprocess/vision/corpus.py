"""Small corpora of photos and questions, for tests that build vision caches."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from forebay import load_config
from forebay.config import Config

DEMO = Path(__file__).resolve().parents[3] / "demo" / "vision"


def photo(seed: int, *, width: int = 96, height: int = 80, kind: str = "JPEG") -> bytes:
    """Waves and noise, another picture for every seed."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [120 + 90 * np.sin((x * (c + 1) + y * seed) / 17 + c) for c in range(3)]
    pixels = (np.stack(waves, -1) + rng.normal(0, 9, (height, width, 3))).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def class_folders(folder: Path, classes: Mapping[str, Sequence[str]]) -> None:
    """Makes a folder a class, with photos of the demo and a text beside each."""
    for name, photos in classes.items():
        (folder / name).mkdir(parents=True)
        for photo in photos:
            shutil.copy(DEMO / "photos" / photo, folder / name)
            (folder / name / photo).with_suffix(".txt").write_text(f"the {name}")


@dataclass
class PhotoCorpus:
    """Photos with a JSONL manifest under one folder, and a config beside them."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "caches"

    def add_photo(self, name: str, data: bytes | None = None, *, seed: int = 0) -> None:
        (self.folder / name).write_bytes(photo(seed) if data is None else data)

    def ask(self, sample_id: str, image: str | list[str], *, answer: str = "An answer.") -> None:
        """Adds a question about one photo or several."""
        self.rows.append({"id": sample_id, "image": image, "question": f"What of {sample_id}?", "answer": answer})
        self.write_manifest()

    def write_manifest(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        (self.folder / "train.jsonl").write_text(lines)

    def config(self, *overrides: str) -> Config:
        path = self.folder / "config.toml"
        path.write_text(
            'name = "photos"\n[source]\nkind = "jsonl"\nmanifest = "train.jsonl"\n'
            f'[vision]\nprocessor = "{DEMO / "model"}"\n[layout]\nrows_per_shard = 4\n'
            '[plan]\nkind = "pack"\nseq_len = 400\n'
            '[run]\ncache_root = "caches"\nnum_workers = 2\nmax_failed_share = 1.0\n'
        )
        return load_config(path, overrides=overrides)


def photo_corpus(folder: Path) -> PhotoCorpus:
    """Four photos with three questions each, asked in turn, and one question about two of them."""
    corpus = PhotoCorpus(folder)
    for number in range(4):
        corpus.add_photo(f"p{number}.jpg", photo(number, width=64 + 40 * number))
    for turn in range(3):
        for number in range(4):
            corpus.ask(f"q{number}-{turn}", f"p{number}.jpg")
    corpus.ask("both", ["p1.jpg", "p3.jpg"])
    return corpus
