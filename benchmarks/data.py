"""Makes the corpus of the benchmarks under `bench-data/`: hours of FLAC in tars, from the demo recordings.

A clip is demo recordings of one language, end to end, cut to a duration from the usual histogram of speech corpora.
FLAC sees real speech, and there are few files to download. The corpus is built once. The same libsndfile gives the same
bytes each time.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf

from benchmarks.plan import SAMPLE_RATE_HZ, usual_durations
from forebay import load_config
from forebay.config import Config
from forebay.preprocess.listing import resolve
from forebay.preprocess.shard_task import ShardTask
from forebay.steps.recipe import recipe_of
from forebay.store.files import temporary_name
from forebay.store.memo import Memo
from forebay.task_map import Map

ROOT = Path(__file__).parents[1]
BENCH_DATA = ROOT / "bench-data"
SPEECH = ROOT / "demo" / "speech"
FORMS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
"""How clips may be written: by the end of their names what libsndfile calls container and encoding."""
_VERSION = 1
"""Bumped when the same hours give other files."""

_CONFIG = """name = "bench"
[source]
kind = "tar"
manifest = "train.parquet"
max_duration_s = 30.0
[audio]
features = "log_mel"
[text]
tokenizer = "model"
prompt = "whisper"
max_label_tokens = 448
[run]
num_workers = 2
"""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A folder with `train-*.tar`, `train.parquet`, `model/` (the demo's tokenizer) and `bench.toml`."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The manifest, one mapping a clip."""
        rows: list[dict[str, Any]] = pq.read_table(self.folder / "train.parquet").to_pylist()
        return rows

    @property
    def audio_s(self) -> float:
        """Seconds of audio in all clips."""
        return float(sum(row["duration_s"] for row in self.rows))

    def config(self, *overrides: str, cache_root: Path) -> Config:
        """Returns the log-mel recipe over this corpus, with overrides, and caches under `cache_root`."""
        return load_config(self.folder / "bench.toml", overrides=[f"run.cache_root={cache_root}", *overrides])


def shard_tasks(config: Config, map_: Map) -> list[ShardTask]:
    """Returns the tasks of a build of a config, in its order, for folders to be named (`dataclasses.replace`)."""
    listing = resolve(config, Memo(config.cache_root), map_, recipe=recipe_of(config))
    groups = listing.groups
    cuts = groups.cuts(listing, probe=dict.fromkeys(groups.names, ""), rows_per_shard=config.layout.rows_per_shard)
    tasks = []
    for cut in sorted(cuts, key=lambda cut: cut.index):  # recordings with their texts
        files, rows = groups.task_rows(listing, cut)
        tasks.append(
            ShardTask(
                group=cut.group,
                key=f"{cut.group}-{cut.start:08d}",
                folder=config.cache_root,
                rows=rows,
                files=files,
                groups=groups,
                max_open_tars=config.run.max_open_tars,
            )
        )
    return tasks


@dataclass(frozen=True, slots=True)
class _Recording:
    samples: Array
    text: str


def corpus(*, hours: float, num_tars: int, form: str = "flac") -> Corpus:
    """Returns the corpus of at least so many hours; builds it if it is missing (5 hours: half a minute of CPU).

    form: of `FORMS`.
    """
    folder = BENCH_DATA / f"speech-{hours:g}h-{num_tars}tars-v{_VERSION}{'' if form == 'flac' else f'-{form}'}"
    if not folder.is_dir():
        BENCH_DATA.mkdir(exist_ok=True)
        aside = temporary_name(folder)
        aside.mkdir()
        write_corpus(aside, _lengths(hours), num_tars=num_tars, form=form)
        aside.rename(folder)
    return Corpus(folder=folder)


def write_corpus(folder: Path, lengths: Array, *, num_tars: int, form: str = "flac") -> Corpus:
    """Returns a corpus of clips of these lengths, in audio samples, written into an empty folder."""
    recordings = _recordings()
    rows: list[dict[str, Any]] = []
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), num_tars)):
        name = f"train-{number:05d}.tar"
        with tarfile.open(folder / name, "w") as tar:
            for index in part.tolist():
                row = _add(tar, index, length=int(lengths[index]), recordings=recordings, form=form)
                rows.append({"tar_path": name, **row})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    shutil.copytree(SPEECH / "model", folder / "model")
    (folder / "bench.toml").write_text(_CONFIG, encoding="utf-8")
    return Corpus(folder=folder)


def _lengths(hours: float) -> Array:
    """Returns int64 [clips], audio samples: no more clips than the hours need."""
    wanted = hours * 3600 * SAMPLE_RATE_HZ
    drawn = usual_durations(int(hours * 3600 / 4) + 16)  # the mean is 6.8 s
    return drawn[: int(np.searchsorted(np.cumsum(drawn), wanted)) + 1]


def _recordings() -> dict[str, list[_Recording]]:
    """The demo recordings by language."""
    found: dict[str, list[_Recording]] = {}
    for row in pq.read_table(SPEECH / "train.parquet").to_pylist():
        with tarfile.open(SPEECH / row["tar_path"]) as tar:
            member = tar.extractfile(row["tar_member_name"])
            assert member is not None
            samples, rate_hz = sf.read(io.BytesIO(member.read()), dtype="int16")
        assert rate_hz == SAMPLE_RATE_HZ
        found.setdefault(row["language"], []).append(_Recording(samples, row["transcript"]))
    return found


def _add(
    tar: tarfile.TarFile, index: int, *, length: int, recordings: Mapping[str, Sequence[_Recording]], form: str
) -> dict[str, Any]:
    rng = np.random.default_rng([_VERSION, index])
    language = sorted(recordings)[int(rng.integers(len(recordings)))]
    samples, text = _concatenated(recordings[language], length, rng)
    buffer = io.BytesIO()
    container, subtype = FORMS[form]
    sf.write(buffer, samples, SAMPLE_RATE_HZ, format=container, subtype=subtype)
    sample_id = f"{language}-{index:06d}"
    info = tarfile.TarInfo(f"{sample_id}.{form}")
    info.size = len(buffer.getvalue())  # not tell(): libsndfile ends by writing the header again
    buffer.seek(0)
    tar.addfile(info, buffer)
    return {
        "tar_member_name": info.name,
        "transcript": text,
        "language": language,
        "duration_s": length / SAMPLE_RATE_HZ,
        "sample_id": sample_id,
    }


def _concatenated(recordings: Sequence[_Recording], length: int, rng: np.random.Generator) -> tuple[Array, str]:
    """Returns recordings end to end, cut to `length`, and their texts; the last text is cut to what is heard."""
    parts: list[Array] = []
    texts: list[str] = []
    missing = length
    while missing:
        chosen = recordings[int(rng.integers(len(recordings)))]
        part = chosen.samples[:missing]
        words = chosen.text.split()
        parts.append(part)
        texts += words[: max(1, len(words) * len(part) // len(chosen.samples))]
        missing -= len(part)
    return np.concatenate(parts), " ".join(texts)
