"""Measures `forebay lint` beside the decode alone: `python -m benchmarks.lint [--tiny] [--json] [--rounds N]`.

The clips are those of the half-hour corpus, FLAC in tars; one process, one thread. `decode` reads and decodes each clip
as a build does. `sounds` is what a worker of lint does beside that: levels, clipping, band, hashes. `texts` adds the
tokens, which a build's reasons need, and the scripts of the texts. `lint` is the command as a whole, with listing,
checks, duplicates and report. Every round times all of them in turn; ratios are medians of the ratios in a round.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from forebay.preprocess.modality import modality_of
from forebay.preprocess.speech.modality import Speech

from benchmarks.data import corpus
from benchmarks.here_pool import HerePool
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.config.tree import Config
from forebay.lint.clips import ClipTask, measure_clips
from forebay.lint.command import LintOptions, Target, lint
from forebay.lint.limits import Limits
from forebay.preprocess.speech.decode import decode_audio
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import recipe_of

HOURS, TINY_HOURS = 0.5, 0.01
LIMITS = Limits()


def task_of(config: Config) -> ClipTask:
    """Returns all clips of a config as one task."""
    modality = modality_of(config, recipe_of(config))
    assert isinstance(modality, Speech)
    manifest = modality.manifest(config)
    return ClipTask(
        start=0,
        rows=manifest.rows,
        files=manifest.files,
        modality=modality,
        limits=LIMITS,
        max_open_tars=config.run.max_open_tars,
        is_heard=True,
    )


def decode(task: ClipTask) -> None:
    """Reads and decodes each clip, and nothing else."""
    rows = task.rows.select(["sample_id", "file", "offset", "size"]).to_pylist()
    with MediaReader(task.files, max_open=task.max_open_tars, as_listed=True) as read:
        for row in rows:
            data = read(row["file"], row["offset"], row["size"])
            decode_audio(data, task.modality.recipe.decode, sample_id=row["sample_id"], want="int16")


def sounds(task: ClipTask) -> None:
    """Measures each clip, and no text."""
    with mock.patch("forebay.lint.clips._texts"):
        measure_clips(task)


def whole(config: Config) -> None:
    """Runs the command in this process."""
    with mock.patch("forebay.lint.raw.Pool", HerePool):
        lint([Target(config=config)], [], LintOptions(progress=False, is_raw=True))


def measure(config: Config, *, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each contestant."""
    task = task_of(config)
    contestants: dict[str, Callable[[], object]] = {
        "decode": lambda: decode(task),
        "sounds": lambda: sounds(task),
        "texts": lambda: measure_clips(task),
        "lint": lambda: whole(config),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for work in contestants.values():
        work()
    for _ in range(rounds):
        for name, work in contestants.items():
            costs[name].append(timed(work))
    alone = [cost.cpu_s for cost in costs["decode"]]
    return [
        {
            "work": name,
            "clips_per_cpu_s": len(task.rows) / median(cost.cpu_s for cost in found),
            "clips_per_s": len(task.rows) / median(cost.wall_s for cost in found),
            "cpu_of_decode": ratio([cost.cpu_s for cost in found], alone),
        }
        for name, found in costs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    options = arguments(__doc__, argv)
    found = corpus(hours=TINY_HOURS if options.tiny else HOURS, num_tars=1)
    rounds = options.rounds or (1 if options.tiny else 5)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(found.config(cache_root=Path(folder)), rounds=rounds)
    clips = {"clips": len(found.rows), "hours": round(found.audio_s / 3600, 3), "rounds": rounds}
    show({"machine": machine("numpy", "soundfile"), "data": clips, "lint": rows}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
