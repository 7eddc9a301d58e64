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


from benchmarks.data import corpus
from benchmarks.here_pool import HerePool
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.config.tree import Config
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.lint import LintOptions, Target, lint
from forebay.inspect.checks.raw_data import RawTask, measure_rows, tasks_of
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import recipe_of

HOURS, TINY_HOURS = 0.5, 0.01
LIMITS = Limits()


def listing_of(config: Config) -> Listing:
    """Returns the clips of a config, and their texts."""
    groups = Groups.of(config, recipe_of(config))
    return Listing(groups=groups, manifest=listed(config, groups), key="")


def decode(task: RawTask) -> None:
    """Reads and decodes each clip, and nothing else."""
    audio = task.groups.recipe.audio
    assert audio is not None
    rows = task.rows.select(["sample_id", "file", "offset", "size"]).to_pylist()
    with MediaReader(task.files, max_open=task.max_open_tars, as_listed=True) as read:
        for row in rows:
            data = read(row["file"], row["offset"], row["size"])
            decode_audio(data, audio.decode, sample_id=row["sample_id"], want="int16")


def whole(config: Config) -> None:
    """Runs the command in this process."""
    with mock.patch("forebay.inspect.checks.measured.Pool", HerePool):
        lint([Target(config=config)], [], LintOptions(progress=False, is_raw=True))


def measure(config: Config, *, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each contestant."""
    listing = listing_of(config)
    count = len(listing.rows)
    clips, texts = (tasks_of(config, listing, group, LIMITS)(0, count) for group in ("audio", "text"))
    contestants: dict[str, Callable[[], object]] = {
        "decode": lambda: decode(clips),
        "sounds": lambda: measure_rows(clips),
        "texts": lambda: (measure_rows(clips), measure_rows(texts)),
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
            "clips_per_cpu_s": count / median(cost.cpu_s for cost in found),
            "clips_per_s": count / median(cost.wall_s for cost in found),
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
