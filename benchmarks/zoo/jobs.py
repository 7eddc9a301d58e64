"""Data and configs of builds over foreign classes, and the bare loop that does the same without forebay."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import soxr
from PIL import Image

from benchmarks.data import ROOT, Corpus
from benchmarks.plan import SAMPLE_RATE_HZ
from benchmarks.report import Cost, timed
from benchmarks.zoo.classes import Known, make, quiet, save
from benchmarks.zoo.inputs import call_extractor, call_processor, rate_of
from forebay import load_config
from forebay.config import Config

PHOTOS = ROOT / "demo" / "vision" / "photos"
MODEL = ROOT / "demo" / "vision" / "model"
COCO_SIZES = ((640, 480), (640, 427), (480, 640), (640, 426), (640, 480), (500, 375))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A class, the config that builds its cache, and where its clips or images lie: files, or places in tars."""

    known: Known
    path: Path
    overrides: tuple[str, ...]
    items: tuple[Any, ...]

    def config(self, *overrides: str) -> Config:
        """Returns the config of this job."""
        return load_config(self.path, overrides=[*self.overrides, *overrides])

    def bare(self, items: Sequence[Any], *, batch: int) -> Cost:
        """Returns what decoding and the class's own call cost, `batch` at a time; what the call gives is dropped."""
        made = make(self.known)

        def work() -> None:
            with quiet():
                for start in range(0, len(items), batch):
                    _call(self.known, made, items[start : start + batch])

        return timed(work)


def _call(known: Known, made: Any, items: Sequence[Any]) -> None:
    if known.kind == "processor":
        call_processor(made, [Image.open(path).convert("RGB") for path in items])
        return
    clips = [sf.read(io.BytesIO(_bytes(*place)), dtype="float32")[0] for place in items]
    rate_hz = rate_of(made)
    if rate_hz != SAMPLE_RATE_HZ:
        clips = [soxr.resample(clip, SAMPLE_RATE_HZ, rate_hz) for clip in clips]
    call_extractor(made, clips)


def _bytes(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def speech_job(folder: Path, known: Known, data: Corpus) -> Job:
    """Returns a job over a corpus of speech. folder: for the extractor's own files."""
    places = []
    for path in sorted(data.folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            places += [(path, member.offset_data, member.size) for member in tar]
    rate_hz = rate_of(make(known))
    overrides = (
        "audio.features=extractor",
        f"audio.extractor={save(known, folder)}",
        f"audio.sample_rate_hz={rate_hz}",
    )
    return Job(known=known, path=data.folder / "bench.toml", overrides=overrides, items=tuple(places))


def image_job(folder: Path, known: Known, paths: Sequence[Path]) -> Job:
    """Returns a job over images. folder: for the processor's own files, a manifest and a config."""
    save(known, folder / "processor")
    config = write_config(folder, paths, vision='images = "processor"')
    return Job(known=known, path=config, overrides=(), items=tuple(paths))


def write_config(folder: Path, paths: Sequence[Path], *, vision: str, text: str = 'prompt = "none"') -> Path:
    """Returns a config over these images, written with its manifest beside the folder `processor`."""
    rows = [{"id": path.stem, "image": str(path), "question": "?", "answer": "!"} for path in paths]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / "any.toml"
    path.write_text(
        'name = "any"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n'
        f'[vision]\nprocessor = "processor"\n{vision}\n'
        f'[text]\ntokenizer = "{MODEL}"\n{text}\n[layout]\nrows_per_shard = {max(1, len(paths) // 8)}\n'
        '[run]\ncache_root = "caches"\nnum_workers = 2\n',
        encoding="utf-8",
    )
    return path


def crops(folder: Path, sizes: Sequence[tuple[int, int]]) -> Iterator[Path]:
    """Yields JPEGs of these (width, height), each another part of a demo photo."""
    photos = [Image.open(path).convert("RGB") for path in sorted(PHOTOS.iterdir())]
    rng = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        photo, share = photos[number % len(photos)], rng.uniform(0.6, 1.0)
        left, top = (round(rng.uniform(0, 1 - share) * side) for side in photo.size)
        box = (left, top, left + round(share * photo.width), top + round(share * photo.height))
        path = folder / f"{number}.jpg"
        photo.crop(box).resize(size).save(path, quality=90)
        yield path
