"""Measures caches of foreign preprocessors: `python -m benchmarks.any_model [--tiny] [--json] [--rounds N]`.

- **Expansion**: codes to values by the table of each channel, in one thread, for layouts that processors give. GB are
  of float32 values, also where the output is bfloat16.
- **Build**: two workers of forebay make the shards of a config (decode, the class's own call, hashes, fsync). Beside
  them stand two bare processes that decode and call the class over half of the data each, and drop what it gives. They
  are timed one by one and in batches of 32; the ratio is to the faster way.
- **Read**: an epoch of a loader without threads. A cache of a foreign extractor stands beside a `log_mel` cache of the
  same clips of 29 s: both have the same bytes on disk, to 1 %, and in a batch. A cache of a processor's images stands
  beside patches of Qwen2-VL for images with as many values. The first epoch, which checks hashes, is not counted.

Every round takes all contestants in turn. Figures are medians of the rounds, and ratios are medians of the ratios
within a round.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch

from benchmarks.data import BENCH_DATA, Corpus, shard_tasks, write_corpus
from benchmarks.plan import SAMPLE_RATE_HZ, usual_durations
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from benchmarks.zoo.classes import Known, extractors, processors, save
from benchmarks.zoo.jobs import COCO_SIZES, Job, crops, image_job, speech_job, write_config
from forebay import load_config
from forebay.config import Config
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.steps.image.tables import expand
from forebay.train import make_loader

BATCH = 32
LONG_S = 29.0
CLAP_S = 9.9
"""Of longer clips ClapFeatureExtractor takes a part at random."""
BUILT = (
    "ASTFeatureExtractor",
    "ClapFeatureExtractor",
    "ParakeetFeatureExtractor",
    "CLIPImageProcessorPil",
    "SiglipImageProcessorPil",
    "ViTImageProcessorPil",
    "SamImageProcessorPil",
    "Qwen2VLImageProcessorPil",
    "Wav2Vec2FeatureExtractor",
    "DacFeatureExtractor",
)
"""Classes whose builds are timed. In those of the last four forebay's own work has the largest part: they do little
themselves, or give large images."""
_FEW = {"SamImageProcessorPil": 48, "Qwen2VLImageProcessorPil": 96}
"""Images of which are built no more: they take megabytes each."""

_LAYOUTS: dict[str, tuple[tuple[int, ...], int, int, int, int]] = {
    "images [64, 3, 224, 224]": ((64, 3, 224, 224), 1, 3, 1, 256),
    "tiles [8, 13, 3, 364, 364]": ((8, 13, 3, 364, 364), 2, 3, 1, 256),
    "patches [n, 1176], channels in runs": ((4096, 1176), 1, 3, 392, 256),
    "patches [n, 768], channels in turn": ((4096, 768), 1, 3, 1, 256),
    "patches [n, 768], one channel, uint16": ((4096, 768), 1, 1, 1, 257),
}
"""Shape, axis of the channels, how many, places of one side by side, values of one."""


def expansion(*, rounds: int, tiny: bool) -> list[dict[str, Any]]:
    """Returns a row a layout: GB of float32 values a second of CPU."""
    rng, rows = np.random.default_rng(0), []
    for name, (whole, axis, channels, inner, count) in _LAYOUTS.items():
        shape = (whole[0] // 8, *whole[1:]) if tiny else whole
        codes = rng.integers(0, count, shape).astype(np.uint8 if count <= 256 else np.uint16)
        table = rng.standard_normal((channels, count)).astype(np.float32)
        row: dict[str, Any] = {"layout": name}
        for dtype in (torch.float32, torch.bfloat16):
            work = partial(expand, codes, table, axis, torch.empty(shape, dtype=dtype), inner=inner)
            work()
            spent = median(timed(work).cpu_s for _ in range(rounds))
            row[f"{str(dtype).removeprefix('torch.')}_gb_per_s"] = 4 * codes.size / spent / 1e9
        rows.append(row)
    return rows


def _known(name: str) -> Known:
    return next(known for known in (*extractors(more=False), *processors(more=False)) if known.name == name)


def jobs(folder: Path, *, names: Sequence[str], hours: float, num_images: int) -> list[Job]:
    """Returns the jobs whose builds are timed, over speech of the usual durations and JPEGs of the sizes of COCO."""
    (folder / "speech").mkdir()
    durations = usual_durations(max(4, int(hours * 3600 / 6.8)))
    at_most = np.minimum(durations, int(CLAP_S * SAMPLE_RATE_HZ))
    speech = write_corpus(folder / "speech", at_most, num_tars=4)
    paths = list(crops(folder, [COCO_SIZES[number % len(COCO_SIZES)] for number in range(num_images)]))
    found = []
    for name in names:
        known, place = _known(name), folder / name
        place.mkdir()
        is_speech, few = known.kind == "extractor", paths[: _FEW.get(name, len(paths))]
        found.append(speech_job(place, known, speech) if is_speech else image_job(place, known, few))
    return found


def building(job: Job, pool: Pool, root: Path, *, rounds: int) -> dict[str, Any]:
    """Returns a row: two workers of a build, beside two bare loops over half of the data each."""
    rows = f"layout.rows_per_shard={-(-len(job.items) // 4)}"
    tasks = shard_tasks(job.config(f"run.cache_root={root}", rows), pool.map)
    halves = [job.items[::2], job.items[1::2]]

    def ours(place: Path) -> Cost:
        spent: list[float] = []
        here = [replace(task, folder=place) for task in tasks]
        whole = timed(lambda: spent.extend(cost.cpu_s for _, cost in pool.run(_made, here)))
        return Cost(whole.wall_s, sum(spent))

    def loops(batch: int) -> Cost:
        costs = pool.map(partial(_bare, job, batch), halves)
        return Cost(max(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs))

    found: dict[str, list[Cost]] = {"ours": [], "one": [], "many": []}
    for round_ in range(rounds + 1):
        costs = {"ours": ours(root / f"{job.known.name}-{round_}"), "one": loops(1), "many": loops(BATCH)}
        if round_:  # the first one loads the libraries
            for name, cost in costs.items():
                found[name].append(cost)
    walls = {name: [cost.wall_s for cost in costs] for name, costs in found.items()}
    cpu = {name: [cost.cpu_s for cost in costs] for name, costs in found.items()}
    faster = min(("one", "many"), key=lambda name: median(walls[name]))
    return {
        "class": job.known.name,
        "items": len(job.items),
        "forebay_wall_s": median(walls["ours"]),
        "bare_one_by_one_wall_s": median(walls["one"]),
        "bare_batches_wall_s": median(walls["many"]),
        "forebay_throughput_of_faster": ratio(walls[faster], walls["ours"]),
        "by_cpu": ratio(cpu[faster], cpu["ours"]),
    }


def _made(task: ShardTask) -> Cost:
    """Returns what making a shard costs a worker."""
    return timed(lambda: make_shard(task))


def _bare(job: Job, batch: int, items: Sequence[Any]) -> Cost:
    return job.bare(items, batch=batch)


def reading(folder: Path, *, rounds: int, num_clips: int, num_images: int) -> list[dict[str, Any]]:
    """Returns a row a cache: CPU of an epoch for a GB of the media fields of its batches, beside the native cache."""
    return [
        *_epochs(_speech_caches(folder / "long", num_clips), rounds=rounds),
        *_epochs(_image_caches(folder / "square", num_images), rounds=rounds),
    ]


def _speech_caches(folder: Path, num_clips: int) -> dict[str, Config]:
    """Returns configs of built caches over the same clips: log-mels, and the extractors of other models."""
    (folder / "data").mkdir(parents=True)
    lengths = np.full(num_clips, int(LONG_S * SAMPLE_RATE_HZ))
    data: Corpus = write_corpus(folder / "data", lengths, num_tars=2)
    names = ("ParakeetFeatureExtractor", "NemotronAsrStreamingFeatureExtractor")
    given = {"log_mel": (), **{name: speech_job(folder / name, _known(name), data).overrides for name in names}}
    found = {}
    for name, overrides in given.items():
        config = data.config(*overrides, *_READ, "plan.batch_seconds=480", cache_root=folder / "caches")
        build(config, Options(progress=False))
        found[name] = config
    return found


def _image_caches(folder: Path, num_images: int) -> dict[str, Config]:
    """Returns configs of built caches over the same squares of 224: patches, and what SigLIP's processor gives."""
    folder.mkdir(parents=True)
    paths = list(crops(folder, [(224, 224)] * num_images))
    found = {}
    for name, class_, vision, text, plan in _IMAGES:
        place = folder / name
        save(replace(_known(class_), settings=_QWEN3_VL if class_.startswith("Qwen") else {}), place / "processor")
        config = load_config(write_config(place, paths, vision=vision, text=text), overrides=[*_READ, *plan])
        build(config, Options(progress=False))
        found[name] = config
    return found


_READ = (
    "run.num_workers=1",
    "loader.num_threads=0",
    "loader.prefetch=1",
    'loader.cache="require"',
    'loader.dtype="float32"',
)
_QWEN3_VL = {"patch_size": 16, "size": {"shortest_edge": 16_384, "longest_edge": 131_072}}
_IMAGES = (
    (
        "patches",
        "Qwen2VLImageProcessorPil",
        'images = "patches"',
        'prompt = "chat"',
        ("plan.kind=pack", "plan.seq_len=2048"),
    ),
    (
        "SiglipImageProcessorPil",
        "SiglipImageProcessorPil",
        'images = "processor"',
        'prompt = "none"',
        ("plan.batch_size=32",),
    ),
)


def _epochs(configs: dict[str, Config], *, rounds: int) -> list[dict[str, Any]]:
    """Returns a row a cache; the first one is the native that the others are compared with."""
    sizes: dict[str, int] = {}
    works: dict[str, Callable[[], Any]] = {}
    for name, config in configs.items():
        loader = make_loader(config)
        sizes[name] = sum(_media_bytes(batch) for batch in loader)
        works[name] = lambda loader=loader: [None for _ in loader] and None
    costs: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            costs[name].append(timed(work).cpu_s / sizes[name] * 1e9)
    native = next(iter(costs.values()))
    return [
        {
            "cache": name,
            "batch_mb": sizes[name] / 1e6,
            "cpu_ms_per_gb": 1e3 * median(found),
            "times_the_native": ratio(found, native),
        }
        for name, found in costs.items()
    ]


def _media_bytes(batch: Any) -> int:
    names = [name for name in batch if name.startswith(("pixel_values", "input_features"))]
    return sum(batch[name].nbytes for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    rounds = 1 if options.tiny else options.rounds or 3
    torch.set_num_threads(1)
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as place, Pool(2, shows=False) as pool:
        folder = Path(place)
        work = (
            jobs(folder, names=BUILT[2:4], hours=0.01, num_images=8)
            if options.tiny
            else jobs(folder, names=BUILT, hours=0.4, num_images=512)
        )
        document = {
            "machine": machine("numpy", "torch", "transformers", "pillow", "soundfile"),
            "rounds": rounds,
            "expansion": expansion(rounds=rounds, tiny=options.tiny),
            "build": [building(job, pool, folder, rounds=rounds) for job in work],
            "read": reading(
                folder, rounds=rounds, num_clips=4 if options.tiny else 96, num_images=8 if options.tiny else 256
            ),
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import the contestants by it.
    from benchmarks import any_model

    sys.exit(any_model.main())
