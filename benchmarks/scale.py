"""Measures whether the cost of a row stays the same in a larger build: `python -m benchmarks.scale [--tiny] [--json]`.

The build reads tars of a thousand tiny clips and one parquet manifest, and seals a cache with two workers. The workers'
arithmetic is taken out, so that the main process has no time to hide in: `FreeLine` gives values of a few bytes, and
nothing is read or decoded. Hashing, tar indexes, shards, fsync, receipts and the seal are the product's own. A fresh
process builds each size.

- **CPU** is seconds of user and system time of the main process alone.
- **Memory** is how far the VmHWM (/proc/self/status) of the process rises above what was resident when the build began.
  A build of 1,000 rows has loaded every library before. `slope` is what one more row adds between the last two sizes.
- **Bytes a task** is the longest pickle of `(function, task)` that was sent to a worker.

The next table is the same for every kind of source (`benchmarks/source_kinds.py`), with the slope of CPU and memory.
`again` is CPU of finding the sealed cache: one more build of the same config, hashes known. The files are three seconds
old by then, since the memo distrusts younger ones. What hashes the files is in the workers. The table behind it is of
conversations alone, at larger sizes: the slope says what ten million would take.

The next table is a worker's own cost for short WAV clips: `make_shard` on real clips, features and text, in one
process.

The last table is `forebay inspect CACHE`, its `--html FILE` and `forebay lint CACHE` on sealed caches of small
recordings with ids of 25 and texts of about 80 characters (`benchmarks/looked.py`). Memory and slope are as above, of
the process of the command after it looked at a cache of 999 samples; lint has one worker beside it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data import BENCH_DATA, SPEECH, shard_tasks
from benchmarks.looked import ROWS, made_cache
from benchmarks.report import Cost, arguments, machine, median, show, timed
from benchmarks.source_kinds import KINDS, write_kind
from forebay import load_config
from forebay.cli import program
from forebay.config import Config
from forebay.preprocess.audio_group import AudioItems
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.group import Read, Values
from forebay.preprocess.groups import GROUPS
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool
from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.preprocess.text_group import TextItems
from forebay.store.cache import open_cache
from forebay.store.layout import Group

CLIPS_PER_TAR = 1000
SAMPLE_RATE_HZ = 16_000
_BLOCK = 512
"""The size of a tar's header, and of the content of a tiny clip."""
_PAGE = 1 << 20

_CONFIG = """name = "scale"
[source]
kind = "tar"
manifest = "train.parquet"
[audio]
features = "{features}"
[text]
tokenizer = "{model}"
prompt = "whisper"
max_label_tokens = 448
[run]
num_workers = 2
"""

Array = np.ndarray[Any, Any]


class FreeAudio(AudioItems):
    """Recordings that cost nothing: none is read."""

    __slots__ = ()

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:  # noqa: ARG002
        """Yields one frame a row."""
        frame = np.zeros((1, 80), np.float16)
        silence = np.zeros(1, np.float32)
        for _ in range(len(rows)):
            yield {"num_audio_samples": np.int64(320), "input_features": frame, "pad_value": silence}

    def probe(self) -> str:
        """Returns no digest of anything."""
        return "free audio"

    def constants(self) -> dict[str, Any]:
        """Returns nothing: no loader reads such a cache."""
        return {}


class FreeImages(ImageItems):
    """Images that cost nothing: none is read."""

    __slots__ = ()

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:  # noqa: ARG002
        """Yields no patches."""
        specs = self.form.fields()
        made = {spec.name: np.zeros((0, *spec.shape), spec.numpy_dtype) for spec in specs}
        for name in rows["hash"].to_pylist():
            yield {"image_hash": name, **made}

    def probe(self) -> str:
        """Returns no digest of anything."""
        return "free images"


class FreeText(TextItems):
    """Texts that cost nothing: no token is made."""

    __slots__ = ()

    def samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        """Yields two tokens a row."""
        tokens = {"input_ids": np.zeros(2, np.int32), "label_mask": np.ones(2, np.uint8)}
        table = {field.name: "" for field in self.fields() if field.role == "table"}
        wanted = [name for name in rows.column_names if name in (*table, "file")]
        for row in rows.select(wanted).to_pylist():
            yield {**table, **row, "source": names[row.pop("file")], **tokens}

    def probe(self, told: Mapping[str, Sequence[Any]]) -> str:  # noqa: ARG002
        """Returns no digest of anything."""
        return "free text"

    def constants(self) -> dict[str, Any]:
        """Returns nothing: no loader reads such a cache."""
        return {}


@contextmanager
def free() -> Iterator[None]:
    """Builds make samples that cost nothing, until the block ends."""
    with (
        mock.patch.dict(GROUPS, {"audio": FreeAudio.of, "image": FreeImages.of}),
        mock.patch("forebay.preprocess.groups.TextItems", FreeText),
    ):
        yield


def write_source(folder: Path, *, num_rows: int) -> Path:
    """Writes tars of CLIPS_PER_TAR headers, each with a block of zeros, and their manifest; returns the config."""
    folder.mkdir(parents=True)
    tars = -(-num_rows // CLIPS_PER_TAR)
    blocks = _tar_blocks(min(CLIPS_PER_TAR, num_rows))
    for number in range(tars):
        (folder / f"train-{number:05d}.tar").write_bytes(blocks)
    clip = np.arange(num_rows)
    numbers, members = clip // CLIPS_PER_TAR, clip % CLIPS_PER_TAR
    names = [f"train-{number:05d}.tar" for number in range(tars)]
    table = pa.table(
        {
            "tar_path": pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), names).cast(pa.string()),
            "tar_member_name": [f"{member:06d}.wav" for member in members.tolist()],
            "transcript": [f"what is said in clip {number} of a large corpus" for number in clip.tolist()],
            "language": pa.array(["en", "fr"]).take(pa.array(clip % 2)),
            "duration_s": np.full(num_rows, 0.02),
            "sample_id": [f"speaker-{number:09d}" for number in clip.tolist()],
        }
    )
    pq.write_table(table, folder / "train.parquet")
    return _write_config(folder, features="log_mel")


def _tar_blocks(count: int) -> bytes:
    """Returns a tar of `count` members of eight zeros each: `000000.wav` and on."""
    header = np.frombuffer(_member("000000.wav", bytes(8)), np.uint8)
    blocks = np.tile(header, (count, 1))
    digits = np.char.zfill(np.arange(count).astype(str), 6).astype("S6")
    blocks[:, :6] = np.frombuffer(digits.tobytes(), np.uint8).reshape(count, 6)
    # POSIX.1-1988: the sum of the header's bytes with spaces in the checksum's own place, as six octal digits.
    blocks[:, 148:156] = ord(" ")
    sums = blocks[:, :_BLOCK].sum(axis=1, dtype=np.int64)
    octal = np.frombuffer("".join(f"{s:06o}\0 " for s in sums.tolist()).encode("ascii"), np.uint8)
    blocks[:, 148:156] = octal.reshape(count, 8)
    return blocks.tobytes() + bytes(2 * _BLOCK)


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % _BLOCK)


def _write_config(folder: Path, *, features: str) -> Path:
    path = folder / "scale.toml"
    path.write_text(_CONFIG.format(features=features, model=SPEECH / "model"), encoding="utf-8")
    return path


class _Counting(Connection):
    """A connection that remembers the longest message by the name of its function."""

    longest: ClassVar[dict[str, int]] = {}

    def send(self, obj: Any) -> None:
        data = ForkingPickler.dumps(obj)
        function = obj[0]
        name = getattr(getattr(function, "function", function), "__name__", "?")
        self.longest[name] = max(self.longest.get(name, 0), len(data))
        self.send_bytes(data)


def measure(work: tuple[Path, Path]) -> dict[str, Any]:
    """Returns what a build costs its main process, after one of `warm`. work: the configs (warm, measured)."""
    warm, path = work
    _free_build(warm)
    with _counted() as longest, _resident() as memory:
        rows, cost = _free_build(path)
    return {
        "rows": rows,
        "main_cpu_us_a_row": cost.cpu_s / rows * 1e6,
        "peak_bytes": memory["peak"],
        "task_bytes": dict(longest),
        "wall_s": cost.wall_s,
    }


def _free_build(path: Path) -> tuple[int, Cost]:
    """Returns the samples of a build into a folder of its own, and what it cost this process."""
    reports: list[BuildReport] = []
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as root,
        free(),
    ):
        config = load_config(path, overrides=[f"run.cache_root={root}"])
        cost = timed(lambda: reports.append(build(config, Options(progress=False))))
    return reports[0].num_samples, cost


@contextmanager
def _counted() -> Iterator[Mapping[str, int]]:
    _Counting.longest = {}
    with mock.patch("forebay.preprocess.pool.Connection", _Counting):
        yield _Counting.longest


@contextmanager
def _resident() -> Iterator[dict[str, int]]:
    """Yields a mapping that has, afterwards, `peak`: how far resident memory rose in between, in bytes."""
    found: dict[str, int] = {}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew at VmRSS (Linux 4.0)
    before = _status("VmRSS")
    yield found
    found["peak"] = _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main_process(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row for every size, and one for what a further row adds to memory."""
    warm = write_source(folder / "warm", num_rows=min(1000, sizes[0]))
    found = []
    for size in sizes:
        path = write_source(folder / str(size), num_rows=size)
        with Pool(1) as pool:  # a process of its own: memory that was freed would hide the next size's
            found.append(pool.map(measure, [(warm, path)])[0])
        shutil.rmtree(path.parent)
    rows = [
        {
            "rows": f"{cost['rows']:,}",
            "main_cpu_us_a_row": cost["main_cpu_us_a_row"],
            "peak_bytes_a_row": cost["peak_bytes"] / cost["rows"],
            "shard_task_bytes": cost["task_bytes"]["make_shard"],
            "locate_task_bytes": cost["task_bytes"]["locate_tar"],
            "wall_s": cost["wall_s"],
        }
        for cost in found
    ]
    for cost, smaller in zip(rows[1:], itertools.pairwise(found), strict=True):
        small, large = smaller
        cost["slope"] = (large["peak_bytes"] - small["peak_bytes"]) / (large["rows"] - small["rows"])
    return [{**row, "slope": row.get("slope")} for row in rows]


def measure_kind(work: tuple[Path, Path]) -> dict[str, Any]:
    """Returns what a build costs its main process, and one that finds its cache.

    work: the configs of a small build before it, and of the measured one.
    """
    warm, path = work
    reports: list[BuildReport] = []
    with free():
        for config in (_load(warm), _load(path)):
            with _resident() as memory:
                cost = timed(lambda config=config: reports.append(build(config, Options(progress=False))))
        again = timed(lambda: reports.append(build(_load(path), Options(progress=False))))
    if reports[-1].shards_written:
        raise RuntimeError(f"{path}: the cache was not found again")
    found = {"cpu_s": cost.cpu_s, "peak_bytes": memory["peak"], "again_s": again.cpu_s}
    return {"rows": reports[1].num_samples, **found, "wall_s": cost.wall_s}


def _load(path: Path) -> Config:
    return load_config(path, overrides=[f"run.cache_root={path.parent / 'caches'}"])


def kinds(
    folder: Path, sizes: Sequence[int], *, names: Iterable[str] = KINDS, settled_s: float = 3.0
) -> list[dict[str, Any]]:
    """Returns a row for every kind of source and size, with what a further row adds since the size before.

    settled_s: how old files are when they are hashed.
    """
    rows = []
    for kind in names:
        warm, smaller = write_kind(kind, folder / kind / "warm", num_rows=100), dict[str, Any]()
        for size in sizes:
            path = write_kind(kind, folder / kind / str(size), num_rows=size)
            time.sleep(settled_s)
            shutil.rmtree(warm.parent / "caches", ignore_errors=True)
            with Pool(1, shows=False) as pool:
                found = pool.map(measure_kind, [(warm, path)])[0]
            row: dict[str, Any] = {"kind": kind, "rows": f"{found['rows']:,}"}
            for name, unit, per in (
                ("cpu_s", "cpu_us", 1e6),
                ("peak_bytes", "peak_bytes", 1),
                ("again_s", "again_us", 1e6),
            ):
                row[f"{unit}_a_row"] = found[name] / found["rows"] * per
                more = found["rows"] - smaller.get("rows", 0)
                row[f"{unit}_slope"] = (found[name] - smaller[name]) / more * per if smaller else None
            rows.append({**row, "wall_s": found["wall_s"]})
            smaller = found
            shutil.rmtree(path.parent)
    return rows


def write_clips(folder: Path, *, num_clips: int, duration_s: float) -> Path:
    """Writes one tar of WAV clips of noise with its manifest; returns the config."""
    folder.mkdir(parents=True)
    import soundfile

    length = round(duration_s * SAMPLE_RATE_HZ)
    noise = np.random.default_rng(0).integers(-3000, 3000, num_clips + length, np.int16)
    rows = []
    with open(folder / "clips.tar", "wb") as file:
        for number in range(num_clips):
            buffer = io.BytesIO()
            soundfile.write(buffer, noise[number : number + length], SAMPLE_RATE_HZ, format="WAV", subtype="PCM_16")
            file.write(_member(f"{number:06d}.wav", buffer.getvalue()))
            text = f"clip number {number}"
            rows.append({"tar_path": "clips.tar", "tar_member_name": f"{number:06d}.wav", "transcript": text})
        file.write(bytes(2 * _BLOCK))
    table = pa.Table.from_pylist([{**row, "language": "en", "duration_s": duration_s} for row in rows])
    pq.write_table(table, folder / "train.parquet")
    return _write_config(folder, features="waveform")


def workers(folder: Path, *, num_clips: int, rounds: int) -> list[dict[str, Any]]:
    """Returns milliseconds of CPU a clip of `make_shard` on short WAV clips, by duration, features and group."""
    found = []
    for duration_s, features in itertools.product((0.1, 0.5), ("waveform", "log_mel")):
        path = write_clips(folder / f"{features}-{duration_s}", num_clips=num_clips, duration_s=duration_s)
        config = load_config(path, overrides=[f"audio.features={features}", f"run.cache_root={path.parent / 'caches'}"])
        with Pool(1) as pool:
            tasks = shard_tasks(config, pool.map)
            costs = [pool.map(shard_costs, [tasks])[0] for _ in range(rounds + 1)][1:]  # the first loads libraries
        row: dict[str, Any] = {"clips of": f"{duration_s:g} s", "features": features}
        for group in ("audio", "text"):
            row[f"{group}_ms_a_clip"] = median(cost[group] for cost in costs) / num_clips * 1e3
        found.append(row)
    return found


def shard_costs(tasks: Sequence[ShardTask]) -> dict[Group, float]:
    """Returns CPU seconds of making these shards, by group."""
    costs: dict[Group, float] = {"audio": 0.0, "text": 0.0}
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        for task in tasks:
            here = replace(task, folder=Path(folder))
            costs[task.group] += timed(lambda here=here: make_shard(here)).cpu_s
    return costs


LOOKS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect",),
    "inspect --html": ("inspect", "--html", "page.html"),
    "lint": ("lint", "--workers", "1"),
}


def looks(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row for every command and size of a cache, and what a further row of a cache adds to memory."""
    warm = made_cache(folder / "warm", num_shards=1)
    caches = {size: made_cache(folder / str(size), num_shards=size // ROWS) for size in sizes}
    rows = []
    for name in LOOKS:
        smaller: dict[str, Any] = {}
        for cache in caches.values():
            with Pool(1, shows=False) as pool:
                found = pool.map(look, [(name, warm, cache)])[0]
            peak, count = found["peak_bytes"], found["rows"]
            slope = (peak - smaller["peak_bytes"]) / (count - smaller["rows"]) if smaller else None
            row = {"rows": f"{count:,}", "peak_bytes_a_row": peak / count, "slope": slope, "wall_s": found["wall_s"]}
            rows.append({"command": name, **row})
            smaller = found
    return rows


def look(work: tuple[str, Path, Path]) -> dict[str, Any]:
    """Returns what a command costs its process. work: its name, a cache that it looks at before, the cache."""
    name, warm, cache = work
    _look(name, warm)
    with _resident() as memory:
        cost = timed(lambda: _look(name, cache))
    return {"rows": len(open_cache(cache)), "peak_bytes": memory["peak"], "wall_s": cost.wall_s}


def _look(name: str, cache: Path) -> None:
    command, *options = LOOKS[name]
    outputs = [str(cache.parent / option) if option.endswith(".html") else option for option in options]
    with contextlib.redirect_stdout(io.StringIO()):
        code = program.main([command, str(cache), *outputs])
    if code:
        raise RuntimeError(f"forebay {command} ended with {code}")


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    sizes = (500, 2000) if options.tiny else (10_000, 100_000, 1_000_000)
    loose = (200, 400) if options.tiny else (5_000, 20_000, 80_000)
    chats = (200, 400) if options.tiny else (250_000, 1_000_000)
    looked = (1000, 2000) if options.tiny else (10_000, 100_000, 300_000)
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as name:
        folder = Path(name)
        document = {
            "machine": machine("numpy", "pyarrow", "soundfile"),
            "main_process": main_process(folder, sizes),
            "kinds": kinds(folder / "kinds", loose, settled_s=0.0 if options.tiny else 3.0),
            "conversations": kinds(folder / "chats", chats, names=["conversations"], settled_s=0.0),
            "workers": workers(
                folder, num_clips=64 if options.tiny else 2048, rounds=1 if options.tiny else options.rounds or 5
            ),
            "looks": looks(folder / "looked", looked),
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import `measure` and `FreeLine` by it.
    from benchmarks import scale

    sys.exit(scale.main())
