"""Measures preprocessing beside the plain way and its bare arithmetic: `python -m benchmarks.preprocess [--tiny]`.

forebay turns tars of FLAC into shards of float16 log-mels and tokens, hashed and fsynced, in warm worker processes of
one thread each.

- **The plain way** is tarfile, soundfile and transformers' WhisperFeatureExtractor on random batches of 32, padded to
  30 s as the extractor does by default. `per clip` is the plain way without batches and padding. Both drop their output
  and make no tokens.
- **Bare** is pread, soundfile and forebay's feature engine on the same blocks in a loop. It checks, hashes and keeps
  nothing.

Every round takes another share of the corpus, and all contestants in turn. Seconds are medians of the rounds, and
ratios are medians of the ratios within a round. Shards are compared with the extractor's output before anything counts.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import BENCH_DATA, ROOT, Corpus, corpus, shard_tasks
from benchmarks.plan import SAMPLE_RATE_HZ
from benchmarks.report import Cost, arguments, machine, median, ratio, show, timed
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.store.layout import Constants

BATCH_SIZE = 32
BLOCK_SAMPLES = 300 * SAMPLE_RATE_HZ
"""The size of the blocks that `preprocess.samples` hands to the feature engine."""

Clip = tuple[Path, str]
"""(tar, member name)"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The work of a round: whole shards for us, random clips for the plain way; seconds of audio of each."""

    tasks: tuple[ShardTask, ...]
    tasks_s: float
    clips: tuple[Clip, ...]
    clips_s: float


def ours(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what making these shards costs; their folder is new, because finished shards are not made again."""
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        return timed(lambda: [make_shard(replace(task, folder=Path(folder))) for task in tasks])


def bare(tasks: Sequence[ShardTask]) -> Cost:
    """Returns what the libraries alone cost on the media of these shards."""
    return timed(lambda: [None for task in tasks if task.group == "audio" for _ in frames(task)])


def bare_stored(tasks: Sequence[ShardTask]) -> Cost:
    """Returns the same, with the frames of a shard in one fsynced file: no hash, no table, no text, no rename."""

    def work(path: Path) -> None:
        for task in tasks:
            if task.group == "audio":
                with open(path, "wb", buffering=0) as file:
                    file.write(np.concatenate(list(frames(task))).data)
                    os.fsync(file.fileno())

    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        return timed(lambda: work(Path(folder) / "frames"))


def frames(task: ShardTask) -> Iterator[Any]:
    """Yields the features of a shard's clips, from soundfile and the feature engine in blocks."""
    import soundfile

    audio = task.groups.recipe.audio
    assert audio is not None
    places = zip(task.rows["offset"].to_pylist(), task.rows["size"].to_pylist(), strict=True)
    with open(task.files[0].path, "rb") as file:
        block: list[Any] = []
        for offset, size in places:
            block.append(soundfile.read(io.BytesIO(os.pread(file.fileno(), size, offset)), dtype="float32")[0])
            if sum(map(len, block)) >= BLOCK_SAMPLES:
                yield from (fields["input_features"] for fields in audio.features.compute(block))
                block = []
        yield from (fields["input_features"] for fields in audio.features.compute(block))


def plain(clips: Sequence[Clip]) -> Cost:
    """Returns what batches of 32 with the extractor's default padding cost."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()

    def work() -> None:
        with opened(clips) as read:
            for start in range(0, len(clips), BATCH_SIZE):
                batch = [read(clip) for clip in clips[start : start + BATCH_SIZE]]
                extractor(batch, sampling_rate=SAMPLE_RATE_HZ, return_tensors="np")

    return timed(work)


def per_clip(clips: Sequence[Clip]) -> Cost:
    """Returns what the extractor costs when it is asked clip by clip, without padding."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor()

    def work() -> None:
        with opened(clips) as read:
            for clip in clips:
                extractor(read(clip), sampling_rate=SAMPLE_RATE_HZ, padding="longest", return_tensors="np")

    return timed(work)


@contextlib.contextmanager
def opened(clips: Sequence[Clip]) -> Iterator[Callable[[Clip], Any]]:
    """Yields a reader of clips as float32, over tars that are opened and listed once."""
    import soundfile

    with contextlib.ExitStack() as stack:
        tars = {path: stack.enter_context(tarfile.open(path)) for path in sorted({path for path, _ in clips})}
        members = {path: {member.name: member for member in tar.getmembers()} for path, tar in tars.items()}

        def read(clip: Clip) -> Any:
            path, name = clip
            file = tars[path].extractfile(members[path][name])
            assert file is not None
            return soundfile.read(io.BytesIO(file.read()), dtype="float32")[0]

        yield read


def difference(task: ShardTask) -> float:
    """Returns how far the 30 s inputs rebuilt from a shard are from the extractor's, 1.0 being what is allowed.

    Allowed are 1e-6 before rounding to float16, and its half unit in the last place.
    """
    import torch
    from transformers import WhisperFeatureExtractor

    from forebay.steps.audio.log_mel import LogMel
    from forebay.steps.batch import collate, fresh
    from forebay.steps.step import Stored
    from forebay.store.shard import Shard, shard_fields

    extractor = WhisperFeatureExtractor()
    clips = [(task.files[0].path, name) for name in task.rows["member"].to_pylist()[: 2 * BATCH_SIZE]]
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder, opened(clips) as read:
        here = replace(task, folder=Path(folder))
        entry = make_shard(here)[0].entry
        made = Shard(here.path, entry, shard_fields(task.groups.fields(), "audio"))
        for index, clip in enumerate(clips):
            wanted = extractor(read(clip), sampling_rate=SAMPLE_RATE_HZ, return_tensors="np")["input_features"][0]
            form = LogMel.batch(Stored("", Constants({}), {spec.name: spec for spec in LogMel().fields()}))
            batch = collate(form, [form.items(made.row(index))], dtype=torch.float32, allocate=fresh, are_rows=True)
            found = batch["input_features"][0].numpy()
            allowed = 1e-6 + 2.0**-11 * np.maximum(np.abs(wanted), 2.0**-14)
            worst = max(worst, float((np.abs(found - wanted) / allowed).max()))
    return worst


def shares(data: Corpus, tasks: Sequence[ShardTask], *, count: int) -> list[Share]:
    """Returns the corpus in `count` shares: consecutive shards, and random clips; each clip in one of either."""
    rows = data.rows
    order = np.random.default_rng(0).permutation(len(rows))
    groups = sorted({task.rows["sample_id"][0].as_py() for task in tasks})
    found = []
    for part, ids in zip(np.array_split(order, count), np.array_split(np.array(groups), count), strict=True):
        mine = tuple(task for task in tasks if task.rows["sample_id"][0].as_py() in set(ids.tolist()))
        clips = tuple((data.folder / rows[i]["tar_path"], str(rows[i]["tar_member_name"])) for i in part.tolist())
        found.append(
            Share(
                tasks=mine,
                tasks_s=sum(float(task.rows["duration_s"].to_numpy().sum()) for task in mine if task.group == "audio"),
                clips=clips,
                clips_s=sum(rows[i]["duration_s"] for i in part.tolist()),
            )
        )
    return found


def efficiency(pool: Pool, parts: Sequence[Share]) -> list[dict[str, Any]]:
    """Returns CPU seconds an hour of audio of every contestant in one process, and how many times ours that is."""
    costs: dict[str, list[float]] = {}
    for share in parts:
        contestants: list[tuple[str, Callable[[Any], Cost], Any, float]] = [
            ("forebay, shards of media and text", ours, share.tasks, share.tasks_s),
            ("plain: batches of 32 padded to 30 s", plain, share.clips, share.clips_s),
            ("plain, per clip, no padding", per_clip, share.clips, share.clips_s),
            ("bare: read, decode, features", bare, share.tasks, share.tasks_s),
            ("bare, frames written and fsynced", bare_stored, share.tasks, share.tasks_s),
        ]
        for name, contestant, items, audio_s in contestants:
            cost = pool.map(contestant, [items])[0]
            costs.setdefault(name, []).append(cost.cpu_s / (audio_s / 3600))
    first = next(iter(costs.values()))
    return [
        {
            "one process": name,
            "cpu_s_per_hour": median(found),
            "hours_per_cpu_s": 1 / median(found),
            "times_ours": ratio(found, first),
        }
        for name, found in costs.items()
    ]


def other_forms(pool: Pool, *, hours: float, num_tars: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the CPU of one process over clips in other forms, and how many times that of bare loops it is."""
    rows = []
    for form in ("mp3", "opus"):
        data = corpus(hours=hours, num_tars=num_tars, form=form)
        with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root:
            tasks = shard_tasks(data.config(cache_root=Path(root)), pool.map)
            pool.map(ours, [tasks[:2]])
            costs = [[pool.map(work, [tasks])[0].cpu_s for work in (ours, bare, bare_stored)] for _ in range(rounds)]
        made, plainly, stored = zip(*costs, strict=True)
        rows.append(
            {
                "one process, tars of": form,
                "cpu_s_per_hour": median(made) / (data.audio_s / 3600),
                "times_bare": ratio(made, plainly),
                "times_bare_stored": ratio(made, stored),
            }
        )
    return rows


def two_processes(tasks: Sequence[ShardTask], *, rounds: int) -> list[dict[str, Any]]:
    """Returns the wall time of two workers over all shards, beside two processes that loop over half of them each."""
    halves = [[task for index, task in enumerate(tasks) if index // 2 % 2 == half] for half in (0, 1)]
    walls: dict[str, list[float]] = {}
    with Pool(2) as pool, tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:

        def build() -> float:
            here = [replace(task, folder=Path(folder) / "shards") for task in tasks]
            return timed(lambda: list(pool.run(make_shard, here))).wall_s

        def loops(work: Callable[[Sequence[ShardTask]], Cost]) -> float:
            return max(cost.wall_s for cost in pool.map(work, halves))

        contestants: list[tuple[str, Callable[[], float]]] = [
            ("forebay, two workers", build),
            ("two loops over make_shard", lambda: loops(ours)),
            ("bare: two loops of read, decode, features", lambda: loops(bare)),
            ("bare, frames written and fsynced", lambda: loops(bare_stored)),
        ]
        for round_ in range(rounds + 1):
            for name, work in contestants:
                wall_s = work()
                shutil.rmtree(Path(folder) / "shards", ignore_errors=True)
                if round_:  # the first one loads the libraries
                    walls.setdefault(name, []).append(wall_s)
    first = next(iter(walls.values()))
    return [
        {"two processes": name, "wall_s": median(found), "forebay_throughput_of_it": ratio(found, first)}
        for name, found in walls.items()
    ]


def command(data: Corpus) -> list[dict[str, Any]]:
    """Returns the cost of the whole command with two workers: from nothing to a sealed cache, and once more over it."""
    rows = []
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root:
        arguments_ = [str(data.folder / "bench.toml"), "--set", f"run.cache_root={root}", "--json"]
        for name in ("to a sealed cache", "over the sealed cache"):
            process = subprocess.Popen(
                [sys.executable, "-m", "forebay", "preprocess", *arguments_],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            start = time.perf_counter()
            _, status, usage = os.wait4(process.pid, 0)  # with the workers, which it waits for
            if status:
                raise SystemExit(f"forebay preprocess {' '.join(arguments_)} ended with status {status}")
            wall_s = time.perf_counter() - start
            rows.append({"forebay preprocess": name, "wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    data = corpus(hours=0.05 if options.tiny else 5, num_tars=2 if options.tiny else 8)
    rounds = 1 if options.tiny else options.rounds or 4
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as root, Pool(1) as pool:
        tasks = shard_tasks(data.config(cache_root=Path(root)), pool.map)
        worst = pool.map(difference, tasks[:1])[0]
        if worst > 1:
            raise SystemExit(f"shards are {worst:.2f} times as far from WhisperFeatureExtractor's output as allowed")
        parts = shares(data, tasks, count=rounds)
        pool.map(ours, [tasks[:2]])  # loads the libraries
        pool.map(plain, [parts[0].clips[:BATCH_SIZE]])
        one = efficiency(pool, parts)
        others = other_forms(pool, hours=0.05 if options.tiny else 1, num_tars=2, rounds=rounds)
    document = {
        "machine": machine("numpy", "torch", "transformers", "soundfile"),
        "hours": data.audio_s / 3600,
        "rounds": rounds,
        "difference_of_allowed": worst,
        "one_process": one,
        "other_forms": others,
        "two_processes": two_processes(tasks, rounds=2 * rounds),
        "command": command(data),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import the contestants by it.
    from benchmarks import preprocess

    sys.exit(preprocess.main())
