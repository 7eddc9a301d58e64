"""Costs of a build on many machines before and beside its shards: `python -m benchmarks.many_parts [--tiny] [--json]`.

- **prepare**: `forebay preprocess --prepare` of many small tars in memory. Two slopes come of it, a tar and a clip; a
  third is a GB of hashing. `hours` is what they make of 5,559 tars of 1.8 GB with 75 million clips, on the cores of the
  row, and how long a disk of so many GB a second takes to read them once.
- **memory**: how far the resident memory of the process that prepares rises, a row.
- **together**: parts that start at the same instant, and how many files they hash; once without a prepared build, once
  with one. They are forks of one process without decoding or features, which would only delay them.
- **status**: `forebay status` as a process of its own, and the same in this process, over shards that are empty files.
- **seal**: hashing the finished shards again in one process, and in two workers.

No step computes anything: see `benchmarks/scale.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.here_pool import HerePool
from benchmarks.report import Cost, arguments, machine, median, show, timed
from benchmarks.scale import _BLOCK, _resident, _tar_blocks, _write_config, free, write_source
from forebay import load_config
from forebay.config.tree import Config
from forebay.preprocess.build_report import Options
from forebay.preprocess.group import Cut
from forebay.preprocess.listing_folder import folder_of
from forebay.preprocess.pipeline import build, prepare
from forebay.preprocess.pool import Pool
from forebay.preprocess.prepared import _CUTS_SCHEMA
from forebay.preprocess.runner.status import status_of
from forebay.preprocess.workspace import ORIGIN, Receipt, Workspace, origin_of, save_receipt, workspace_folder
from forebay.steps.recipe import recipe_of
from forebay.store import memo
from forebay.store.files import hash_file
from forebay.store.shard import ShardEntry

QUIET = Options(progress=False)
TARS, TAR_GB, ROWS = 5559, 1.8, 75e6
"""The corpus that hours are said of: 10 TB."""
MEMORY = Path("/dev/shm")


def write_tars(folder: Path, *, num_tars: int, clips: int) -> Path:
    """Writes tars of so many tiny clips each and their manifest; returns the config."""
    folder.mkdir(parents=True)
    blocks = _tar_blocks(clips)
    for number in range(num_tars):
        # Another content each, so that no hash and no index is of two tars.
        (folder / f"t{number:05d}.tar").write_bytes(blocks[:_BLOCK] + number.to_bytes(8, "big") + blocks[_BLOCK + 8 :])
    rows = np.arange(num_tars * clips)
    table = pa.table(
        {
            "tar_path": [f"t{number:05d}.tar" for number in (rows // clips).tolist()],
            "tar_member_name": [f"{number:06d}.wav" for number in (rows % clips).tolist()],
            "transcript": ["what is said in a clip of a large corpus"] * len(rows),
            "language": ["en"] * len(rows),
            "duration_s": np.full(len(rows), 0.02),
            "sample_id": [f"speaker-{number:09d}" for number in rows.tolist()],
        }
    )
    pq.write_table(table, folder / "train.parquet")
    return _write_config(folder, features="log_mel")


def prepare_cost(path: Path) -> Cost:
    """Returns what preparing costs this process and its workers."""
    config = load_config(path, overrides=[f"run.cache_root={path.parent / 'caches'}"])
    before = _children_s()
    with free():
        cost = timed(lambda: prepare(config, QUIET))
    return Cost(cost.wall_s, cost.cpu_s + _children_s() - before)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def prepares(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns a row for every number of tars and clips a tar."""
    found = []
    for num_tars, clips in sizes:
        path = write_tars(folder / f"{num_tars}-{clips}", num_tars=num_tars, clips=clips)
        cost = prepare_cost(path)
        found.append({"tars": num_tars, "clips_a_tar": clips, "cpu_s": cost.cpu_s, "wall_s": cost.wall_s})
        shutil.rmtree(path.parent)
    return found


def slopes(rows: Sequence[dict[str, Any]], gb_s: float) -> dict[str, float]:
    """Returns what a tar, a clip and a GB cost, by least squares over the rows; and the hours of the large corpus."""
    known = np.array([[1.0, row["tars"], row["tars"] * row["clips_a_tar"]] for row in rows])
    (_, tar_s, clip_s), *_ = np.linalg.lstsq(known, np.array([row["cpu_s"] for row in rows]), rcond=None)
    work_s = TARS * tar_s + ROWS * clip_s + TARS * TAR_GB * gb_s
    found = {"ms_a_tar": tar_s * 1e3, "us_a_clip": clip_s * 1e6, "cpu_s_a_gb": gb_s, "cpu_h": work_s / 3600}
    found |= {f"h_on_{cores}_cores": work_s / 3600 / cores for cores in (1, 16)}
    return found | {f"h_at_{rate:g}_gb_s": TARS * TAR_GB / rate / 3600 for rate in (0.5, 2.0, 10.0)}


def hashing(folder: Path, *, size_bytes: int) -> float:
    """Returns CPU seconds of hashing a GB that is in memory."""
    path = folder / "hashed"
    path.write_bytes(np.random.default_rng(0).bytes(size_bytes))
    seconds = median(timed(lambda: hash_file(path)).cpu_s for _ in range(3))
    path.unlink()
    return seconds / size_bytes * 1e9


def resident(work: tuple[Path, Path]) -> int:
    """Returns how far memory rises while a build is prepared, in bytes; work: the configs (warm, measured)."""
    warm, path = work
    prepare_cost(warm)
    with _resident() as memory:
        prepare_cost(path)
    return memory["peak"]


def memory_rows(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns bytes of memory a row for every number of rows, and what a further row adds."""
    warm = write_source(folder / "warm", num_rows=min(1000, sizes[0]))
    peaks: list[tuple[int, int, int]] = []
    for size in sizes:
        path = write_source(folder / f"rows-{size}", num_rows=size)
        with Pool(1) as pool:
            peak_bytes = pool.map(resident, [(warm, path)])[0]
        on_disk = sum(file.stat().st_size for file in path.parent.rglob("prepared-*/*"))
        shutil.rmtree(path.parent)
        shutil.rmtree(warm.parent / "caches")
        peaks.append((size, peak_bytes, on_disk))
    found = [
        {"rows": size, "peak_bytes_a_row": peak / size, "disk_bytes_a_row": disk / size} for size, peak, disk in peaks
    ]
    for row, (small, large) in zip(found[1:], itertools.pairwise(peaks), strict=True):
        row["slope"] = (large[1] - small[1]) / (large[0] - small[0])
        row["gb_at_75m_rows"] = row["slope"] * ROWS / 1e9
    return [{"slope": None, "gb_at_75m_rows": None, **row} for row in found]


def together(folder: Path, *, num_parts: int, is_prepared: bool) -> dict[str, Any]:
    """Returns how many files so many parts hash that start at one instant."""
    path = write_tars(folder / f"parts-{is_prepared}", num_tars=2 * num_parts, clips=20)
    config = load_config(path, overrides=[f"run.cache_root={path.parent / 'caches'}"])
    log = path.parent / "hashed.log"
    log.touch()
    real = memo.hash_now

    def noting(file: str) -> Any:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{os.path.basename(file)}\n".encode())
        os.close(descriptor)
        return real(file)

    time.sleep(2.1)  # what was written just now is hashed again by everybody
    with (
        mock.patch.object(memo, "hash_now", noting),
        mock.patch("forebay.preprocess.pipeline.Pool", HerePool),
        free(),
    ):
        if is_prepared:
            prepare(config, QUIET)
        prepared = log.read_text().split()
        started = time.perf_counter()
        ends = _forked(
            [
                lambda part=part: build(config, Options(progress=False, part=(part, num_parts)))
                for part in range(num_parts)
            ]
        )
        wall_s = time.perf_counter() - started
    names = log.read_text().split()
    sealed = len(list(path.parent.glob("caches/*/metadata.json")))
    files = 2 * num_parts + 1
    shutil.rmtree(path.parent)
    return {
        "prepared": "yes" if is_prepared else "no",
        "parts": num_parts,
        "files": files,
        "hashed_by_prepare": len(prepared),
        "hashed_by_parts": len(names) - len(prepared),
        "hashed_twice": len(names) - len(set(names)),
        "parts_failed": sum(1 for end in ends if end != 0),
        "sealed": sealed,
        "wall_s": wall_s,
    }


def _forked(works: Sequence[Callable[[], Any]]) -> list[int]:
    """Runs works in forks of this process that begin at one instant, and returns how they ended."""
    gate, opened = os.pipe()
    children = []
    for work in works:
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.close(opened)
                os.read(gate, 1)  # until the other end is closed
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(gate)
    os.close(opened)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def large_build(folder: Path, *, num_shards: int, num_parts: int) -> Config:
    """Makes what a prepared build of so many shards leaves on disk, half of them finished; returns the config."""
    path = write_tars(folder / f"status-{num_shards}", num_tars=1, clips=4)
    config = load_config(path, overrides=[f"run.cache_root={path.parent / 'caches'}"])
    recipe = recipe_of(config)
    with free():
        prepare(config, QUIET)
    prepared = folder_of(config, recipe)
    document = json.loads((prepared / "prepared.json").read_bytes())
    keys = [f"{number:032x}" for number in range(2 * num_shards)]
    cuts = [
        Cut(group=group, index=i, start=512 * i, stop=512 * i + 512, key=keys[i + first])
        for group, first in (("audio", 0), ("text", num_shards))
        for i in range(num_shards)
    ]
    columns = {name: [getattr(cut, name) for cut in cuts] for name in _CUTS_SCHEMA.names}
    path = prepared / "cuts.arrow"
    path.unlink()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _CUTS_SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=_CUTS_SCHEMA))
    document["files"]["cuts.arrow"] = {"size_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
    (prepared / "prepared.json").write_text(json.dumps(document))
    workspace = workspace_folder(config, document["key"])
    for group in ("audio", "text"):
        (workspace / group).mkdir(parents=True)
    (workspace / ORIGIN).write_text(origin_of(config, recipe.key))
    for cut in cuts:
        for ending in ("tdz", "json", "lock") if cut.index < num_shards // 2 else ():
            os.close(os.open(workspace / cut.group / f"{cut.key}.{ending}", os.O_CREAT | os.O_WRONLY))
    _records(workspace, num_parts=num_parts, num_shards=num_shards)
    return config


def _records(workspace: Path, *, num_parts: int, num_shards: int) -> None:
    from forebay.preprocess.runner.parts import PartRecord

    (workspace / "parts").mkdir()
    now = time.time()
    for part in range(num_parts):
        record = PartRecord(
            runner="slurm", host=f"node{part}", place="ffffffff", pid=1, started=now - 4000, last_sign=now,
            part=(part, num_parts), job=f"77_{part}", shards=num_shards, groups=("audio", "text"),
            to_make=2 * num_shards // num_parts, made=num_shards // num_parts,
            history=tuple((now - 15.0 * i, 1000 - i, 512 * (1000 - i)) for i in range(40, -1, -1)),
        )  # fmt: skip
        (workspace / "parts" / f"{part}-of-{num_parts}.run").write_text(json.dumps(asdict(record)))


def statuses(folder: Path, sizes: Sequence[int], *, rounds: int) -> list[dict[str, Any]]:
    """Returns seconds of `forebay status` for every number of shards a group."""
    found = []
    for size in sizes:
        config = large_build(folder, num_shards=size, num_parts=64)
        root = f"--cache-root={config.run.cache_root}"
        command = [sys.executable, "-m", "forebay", "status", config.path, root]
        walls, cpus = [], []
        for _ in range(rounds):
            before = _children_s()
            walls.append(timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)).wall_s)  # noqa: B023
            cpus.append(_children_s() - before)
        inside = median(timed(lambda: status_of(config)).cpu_s for _ in range(rounds))  # noqa: B023
        found.append({"shards": size, "cpu_s": median(cpus), "wall_s": median(walls), "without_start_cpu_s": inside})
        shutil.rmtree(Path(config.path).parent)
    return found


def seals(folder: Path, *, num_shards: int, size_bytes: int) -> list[dict[str, Any]]:
    """Returns seconds of finding finished shards whole, one by one and in two workers."""
    space = Workspace(folder / "seal")
    (space.folder / "audio").mkdir(parents=True)
    data = np.random.default_rng(0).bytes(size_bytes)
    keys = [f"{number:032x}" for number in range(num_shards)]
    for key in keys:
        path = space.path("audio", key)
        path.write_bytes(data)
        digest = hash_file(path)
        entry = ShardEntry(key=key, size_bytes=size_bytes, xxh3_128=digest, rows=1, hash_offset=0, spans=())
        save_receipt(path, Receipt(entry=entry, failures=()))
    named: list[Any] = [("audio", key) for key in keys]
    found = []
    with Pool(2) as pool:
        pool.map(abs, [1, 2])
        for name, map_ in (("one by one (before)", map), ("two workers", pool.map)):
            costs = []
            for _ in range(3):
                here = Workspace(space.folder)
                costs.append(timed(lambda: here.has_all(named, map_)))  # noqa: B023
                assert len(here.receipts) == num_shards
            gb = num_shards * size_bytes / 1e9
            wall_s = median(cost.wall_s for cost in costs)
            found.append({"how": name, "gb": gb, "wall_s": wall_s, "gb_a_second": gb / wall_s})
    shutil.rmtree(space.folder)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    tiny = options.tiny
    sizes = [(10, 20), (40, 20), (10, 200)] if tiny else [(200, 20), (1000, 20), (3000, 20), (200, 400), (1000, 400)]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        gb_s = hashing(folder, size_bytes=10**7 if tiny else 10**9)
        rows = prepares(folder, sizes)
        parts = 4 if tiny else 64
        document = {
            "machine": machine("numpy", "pyarrow", "xxhash"),
            "prepare": rows,
            "slopes": [slopes(rows, gb_s)],
            "memory": memory_rows(folder, (500, 2000) if tiny else (200_000, 1_000_000)),
            "together": [together(folder, num_parts=parts, is_prepared=known) for known in (False, True)],
            "status": statuses(folder, (100,) if tiny else (1_000, 100_000), rounds=1 if tiny else options.rounds or 5),
            "seal": seals(folder, num_shards=4 if tiny else 40, size_bytes=10**7 if tiny else 5 * 10**7),
        }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    # Under its real name, not `__main__`: workers import `resident` by it.
    from benchmarks import many_parts

    sys.exit(many_parts.main())
