"""Measures the page of a cache: `python -m benchmarks.html_report [--tiny] [--json] [--rounds N]`.

A made-up speech cache of 100,000 samples in 100 shards, waveforms kept, every text another one and some of them twice;
beside it caches of a hundredth and a tenth of its size. Each is written as one HTML file, by a new process
(`python -m forebay inspect CACHE --html FILE`), and the overview is gathered in this process as `--serve` does before
it answers, which is then asked for a page of rows: sorted by text, and searched. All files are in the page cache.
Figures are medians. The target is 10 s for 100,000 samples and 10 MB for a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import BENCH_DATA, ROOT
from benchmarks.report import arguments, machine, median, show
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.serve import PageSearch, Query
from forebay.store.cache import open_cache
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, FieldSpec
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, write_shard

ROWS = 1_000
RATE_HZ = 16_000
TARGET_S, TARGET_BYTES = 10.0, 10_000_000
LANGUAGES = ("de", "en", "hi", "ta")
FIELDS = (
    FieldSpec(name="input_features", dtype="float16", shape=(80,), group="audio"),
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="prefix_len", dtype="int32", group="text"),
    *(FieldSpec(name=name, dtype="str", group="text", role="table") for name in ("sample_id", "text", "language")),
)

Row = dict[str, Any]


def made_cache(root: Path, *, num_shards: int) -> Path:
    """Makes a cache of `num_shards` x 1,000 samples of 2 s whose media are links to one shard; returns its folder."""
    root.mkdir()
    media = root / "audio.tdz"
    entry = write_shard(media, shard_fields(FIELDS, "audio"), _media(), key=digest("audio"))
    text = [_text_shard(root / f"text-{number}.tdz", number) for number in range(num_shards)]
    count = num_shards * ROWS
    index = np.arange(count, dtype=np.int64)
    lengths = np.stack([np.full(count, 2 * RATE_HZ), np.full(count, 200), np.full(count, 8)]).astype("<i4")
    contents = Contents(
        fields=FIELDS,
        shards={"audio": [(media, entry)] * num_shards, "text": text},
        items={},
        arrays={"slots.npy": ((index // ROWS) << ROW_BITS) | index % ROWS, "lengths.npy": lengths},
        files={"rejected.jsonl": b""},
        document=_document(count),
    )
    seal(root / "bench", contents, scratch=root)
    return root / "bench"


def _media() -> list[Row]:
    rng = np.random.default_rng(0)
    tone = np.sin(np.arange(2 * RATE_HZ) * 0.1)
    return [
        {
            "input_features": rng.normal(size=(200, 80)).astype(np.float16),
            "waveform": (tone * 8000 + rng.normal(size=len(tone)) * 500).astype(np.int16),
        }
        for _ in range(ROWS)
    ]


def _text_shard(path: Path, number: int) -> tuple[Path, ShardEntry]:
    rows: list[Row] = [
        {
            "input_ids": np.arange(8, dtype=np.int32) + row,
            "prefix_len": np.ones(1, np.int32),
            "sample_id": f"clip-{number:04d}-{row:04d}",
            # One text in a hundred stands in every shard.
            "text": f"the same words again {row}"
            if row % 100 == 0
            else f"words number {row} of {number} " * (1 + row % 3),
            "language": LANGUAGES[row % len(LANGUAGES)],
        }
        for row in range(ROWS)
    ]
    return path, write_shard(path, shard_fields(FIELDS, "text"), rows, key=digest(["text", number]))


def _document(count: int) -> dict[str, Any]:
    each = {"samples": count // len(LANGUAGES), "hours": count // len(LANGUAGES) * 2 / 3600}
    return {
        "name": "bench",
        "split": "train",
        "key": digest(["bench", count]),
        "recipe_key": digest("bench"),
        "recipe": {"audio": {"features": "log_mel", "n_mels": 80, "sample_rate_hz": RATE_HZ, "keep_waveform": True}},
        "num_samples": count,
        "length_names": ["num_audio_samples", "num_frames", "num_tokens"],
        "constants": {"audio": {"features": "log_mel", "sample_rate_hz": RATE_HZ}, "text": {"prompt": "plain"}},
        "rows_per_shard": ROWS,
        "size_bytes": count * 96_000,
        "languages": dict.fromkeys(LANGUAGES, each),
        **{name: {} for name in ("excluded", "failed", "made_with", "probe", "unused_fields")},
        **dict.fromkeys(("clipped", "longer"), 0),
    }


def written(folder: Path, *, rounds: int) -> Row:
    """Returns what a new process takes to write the page, and how large it is."""
    path = folder.parent / "report.html"
    command = [sys.executable, "-m", "forebay", "inspect", str(folder), "--html", str(path)]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    samples = len(open_cache(folder))
    return {"samples": samples, "page s": median(times), "page MB": path.stat().st_size / 1e6}


def served(folder: Path, *, rounds: int) -> Row:
    """Returns what `--serve` takes before it answers, and for rows sorted by text and searched, each asked anew."""
    times: dict[str, list[float]] = {"overview s": [], "sorted ms": [], "searched ms": []}
    for _ in range(rounds):
        began = time.perf_counter()
        overview = overview_of(open_cache(folder), None, choice=CardChoice(), roots=[])
        times["overview s"].append(time.perf_counter() - began)
        search = PageSearch(rows=overview.rows)
        last = len(overview.rows.shown) - 1
        for name, query in (("sorted ms", Query(by=last)), ("searched ms", Query(text="number 999"))):
            began = time.perf_counter()
            assert len(search.answer(query)["rows"]) > 0
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(found) for name, found in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 1 if options.tiny else options.rounds or 3
    BENCH_DATA.mkdir(exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as name:
        for num_shards in (1, 2) if options.tiny else (1, 10, 100):
            folder = made_cache(Path(name) / str(num_shards), num_shards=num_shards)
            rows.append({**written(folder, rounds=rounds), **served(folder, rounds=rounds)})
    largest = rows[-1]
    targets = [
        {"target": f"page <= {TARGET_S:g} s", "reached": "yes" if largest["page s"] <= TARGET_S else "no"},
        {"target": "page <= 10 MB", "reached": "yes" if largest["page MB"] * 1e6 <= TARGET_BYTES else "no"},
    ]
    show({"machine": machine("numpy", "pyarrow", "pillow"), "a page": rows, "targets": targets}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
