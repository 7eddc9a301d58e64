"""Measures forebay beside other formats on the same samples.

python -m benchmarks.formats [--tiny] [--json] [--rounds N] [--plot FILE]

Workload A is ragged float16 log-mel with tokens, in batches of 32. Workload B is packs of uint8 patches with ids. Every
format writes both, and every sample is read back and compared before it counts. All formats are timed in turn, round by
round, in one process with a warm page cache. forebay verifies as it does by default. A format that is not installed is
named; `make bench-peers` installs all of them into an environment of its own. us are microseconds a sample, and ratios
are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.data import BENCH_DATA
from benchmarks.peers import batches, forebay_cache, workloads
from benchmarks.peers.batches import Batches, OrderName, batches_of
from benchmarks.peers.interface import Peer, Reader, Workload
from benchmarks.report import Cost, machine, median, ratio, show, timed

PEERS = (
    "forebay_cache",
    "arrow_by_hand",
    "mds",
    "litdata_chunks",
    "webdataset_tar",
    "hf_datasets",
    "zarr_sharded",
    "array_record_file",
    "lhotse_shar",
    "tensordict_folders",
)
OURS = forebay_cache.NAME
ARROW, MDS, FOLDERS = "Arrow, zero-copy by hand", "MosaicML Streaming (MDS)", "TensorDict folder per sample"
FOLDERS_OPENED = f"{FOLDERS}, opened at each read"
THREADED, FIRST_EPOCH = f"{OURS}, 2 threads", f"{OURS}, first epoch of an opened cache"
RAGGED, RAGGED_THREADED = f"{OURS}, ragged", f"{OURS}, ragged, 2 threads"
REUSED, ARROW_RAGGED = f"{ARROW}, reused buffers", f"{ARROW}, ragged, reused buffers"
SHARDS = "forebay, shards alone"
SHARDS_AT_ONCE = f"{SHARDS}, two at a time"
WRITERS = ("WebDataset + wids", "ArrayRecord (grain)", MDS)
"""The formats that writing is measured against."""
ORDERS: tuple[OrderName, ...] = ("shuffled", "buckets", "by duration")
LIMIT, LIMIT_PADDED = "np.copyto, one buffer", "np.copyto, two buffers and padding"
LIMIT_HELD, LIMIT_THREADED = "np.copyto, two buffers", "np.copyto, one buffer each, 2 threads"
"""What a loop costs that holds a batch while the next is filled, and what two threads gain at most."""
_SLOW_S = 3.0
"""A contestant whose first round takes longer is timed once; its row says so."""

Row = dict[str, Any]
Work = Callable[[], Any]
Costs = dict[str, list[Cost]]


def peers(names: Sequence[str]) -> tuple[list[Any], list[Row]]:
    """Returns the modules of the formats that are installed, ours first, and a row for each of the others."""
    modules = [importlib.import_module(f"benchmarks.peers.{name}") for name in dict.fromkeys(["forebay_cache", *names])]
    absent = []
    for module in list(modules):
        missing = [name for name in module.REQUIRES if importlib.util.find_spec(name) is None]
        if missing:
            absent.append({"format": module.NAME, "not installed": ", ".join(missing)})
            modules.remove(module)
    return modules, absent


def tried(modules: Sequence[Any], folder: Path) -> tuple[list[Any], list[Row]]:
    """Returns the formats that write and read a few samples, and a row for each that fails: the others keep theirs."""
    few = workloads.speech(8)
    good, failed = [], []
    for module in modules:
        target = folder / "tried" / module.NAME
        target.mkdir(parents=True)
        try:
            module.write(target, few)
            check(module, target, few)
        except (Exception, SystemExit) as err:
            if module.NAME == OURS:
                raise
            failed.append({"format": module.NAME, "failed": f"{type(err).__name__}: {err}"[:200]})
        else:
            good.append(module)
    shutil.rmtree(folder / "tried", ignore_errors=True)
    return good, failed


def in_turn(works: Mapping[str, Work], *, rounds: int) -> Costs:
    """Returns the cost of each contestant in each round, after a round that does not count."""
    costs: Costs = {}
    for number in range(rounds + 1):
        for name, work in works.items():
            found = costs.setdefault(name, [])
            if number and found[0].wall_s > _SLOW_S:
                continue
            cost = timed(work)
            if number == 1:
                found.clear()
            found.append(cost)
    return costs


def against(costs: Costs, name: str, base: str) -> float | None:
    """Returns how many times as long as `base` a contestant takes; None if one of them is not there."""
    if name not in costs or base not in costs:
        return None
    ours, theirs = costs[base], costs[name]
    if len(ours) != len(theirs):
        return median(c.wall_s for c in theirs) / median(c.wall_s for c in ours)
    return ratio((cost.wall_s for cost in theirs), (cost.wall_s for cost in ours))


def fsync_below(folder: Path) -> None:
    """Makes every file and name below a folder durable."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(modules: Sequence[Peer], workload: Workload, folder: Path, *, rounds: int) -> tuple[list[Row], Costs]:
    """Writes the workload with every format, checks every sample, and returns what writing costs."""

    def write(peer: Peer) -> None:
        target = folder / peer.NAME / workload.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        peer.write(target, workload)
        fsync_below(target)

    def write_shards(at_once: int) -> None:
        target = folder / "shards"
        shutil.rmtree(target, ignore_errors=True)
        forebay_cache.write_shards(target, workload, at_once=at_once)
        fsync_below(target)

    ours = {SHARDS: functools.partial(write_shards, 1), SHARDS_AT_ONCE: functools.partial(write_shards, 2)}
    works: dict[str, Work] = {**ours, **{peer.NAME: functools.partial(write, peer) for peer in modules}}
    costs = in_turn(works, rounds=rounds)
    shutil.rmtree(folder / "shards")
    rows = [_written(workload, name, costs, size_bytes=None, num_files=None) for name in ours]
    for peer in modules:
        target = folder / peer.NAME / workload.name
        files = [path for path in target.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        check(peer, target, workload)
        rows.append(_written(workload, peer.NAME, costs, size_bytes=size, num_files=len(files)))
    return rows, costs


def _written(workload: Workload, name: str, costs: Costs, *, size_bytes: int | None, num_files: int | None) -> Row:
    return {
        "workload": workload.name,
        "format": name,
        "write MB/s": workload.payload_bytes / 1e6 / median(cost.wall_s for cost in costs[name]),
        "CPU s": median(cost.cpu_s for cost in costs[name]),
        "x ours": against(costs, name, SHARDS),
        "bytes / payload": None if size_bytes is None else f"{size_bytes / workload.payload_bytes:.4f}",
        "files": num_files,
        "runs": len(costs[name]),
    }


def check(peer: Peer, folder: Path, workload: Workload) -> None:
    """Stops the benchmark if a sample that was read is not the one that was written."""
    reader = peer.open_reader(folder, workload)
    for index in range(len(workload)):
        found, wanted = reader.read(index), workload[index]
        for name, array in wanted.items():
            if found[name].dtype != array.dtype or not np.array_equal(found[name], array):
                raise SystemExit(
                    f"{peer.NAME}, workload {workload.name}: {name} of sample {index} is not what was written"
                )


def readers_of(modules: Sequence[Any], workload: Workload, folder: Path) -> dict[str, Reader]:
    found = {}
    for peer in modules:
        opened = {peer.NAME: peer.open_reader, **getattr(peer, "OTHER_READERS", {})}
        found |= {name: open_it(folder / peer.NAME / workload.name, workload) for name, open_it in opened.items()}
    return found


def check_loader(cache: Any, workload: Workload, listed: Batches, form: batches.Form) -> None:
    """Stops the benchmark if a batch of forebay's loader is not the samples, padded or one behind the other."""
    for indices, batch in zip(listed, batches.make_loader(cache, listed, num_threads=2, form=form), strict=True):
        for place, index in enumerate(indices):
            sample = workload[index]
            values, ids, size = torch.from_numpy(sample["values"].copy()), sample["ids"], len(sample["values"])
            if form == "padded":
                row, labels = batch["input_features"][place], batch["labels"][place].numpy()
                same = torch.equal(row.T[:size], values) and not row.T[size:].any()
                same &= np.array_equal(labels[1 : len(ids)], ids[1:])
            else:
                found = [_part(batch, name, place) for name in ("input_features", "input_ids")]
                same = torch.equal(found[0], values) and np.array_equal(found[1].numpy(), ids)
            if not same:
                raise SystemExit(f"{OURS}, {form}: sample {index} of a batch is not what was written")


def _part(batch: Any, name: str, place: int) -> torch.Tensor:
    start, stop = batch[f"{name}_offsets"][place : place + 2].tolist()
    found: torch.Tensor = batch[name][start:stop]
    return found


def read_batches(
    modules: Sequence[Any], workload: Workload, folder: Path, *, rounds: int
) -> tuple[list[Row], dict[str, Costs]]:
    """Returns what padded batches cost in each order."""
    readers = readers_of(modules, workload, folder)
    cache = forebay_cache.open_cache_of(folder / OURS / workload.name)
    for form in ("padded", "ragged"):
        check_loader(cache, workload, batches_of(workload, "shuffled"), form)
    sequential = {peer.NAME for peer in modules if getattr(peer, "SEQUENTIAL", False)}
    rows: list[Row] = []
    all_costs: dict[str, Costs] = {}
    for order in ORDERS:
        listed = batches_of(workload, order)
        works: dict[str, Work] = {
            LIMIT: batches.copyto_loop(workload, listed, num_buffers=1, pad=False),
            LIMIT_PADDED: batches.copyto_loop(workload, listed, num_buffers=2, pad=True),
            LIMIT_HELD: batches.copyto_loop(workload, listed, num_buffers=2, pad=False),
            LIMIT_THREADED: batches.copyto_threads(workload, listed, count=2),
        }
        for name, num_threads in ((OURS, 0), (THREADED, 2)):
            works[name] = functools.partial(_exhaust, batches.make_loader(cache, listed, num_threads=num_threads))
        for name, num_threads in ((RAGGED, 0), (RAGGED_THREADED, 2)):
            ours = batches.make_loader(cache, listed, num_threads=num_threads, form="ragged")
            works[name] = functools.partial(_exhaust, ours)
        works[FIRST_EPOCH] = functools.partial(_first_epoch, folder / OURS / workload.name, listed)
        for name, reader in readers.items():
            if name == OURS or (name in sequential and order != "shuffled"):
                continue
            own = batches_of(workload, "as written") if name in sequential else listed
            works[name] = functools.partial(batches.walk, reader, own, batches.collate)
            if name == ARROW:
                reused, behind = batches.ReusedBuffers(workload), batches.RaggedBuffers(workload)
                works[REUSED] = functools.partial(batches.walk, reader, own, reused.collate)
                works[ARROW_RAGGED] = functools.partial(batches.walk, reader, own, behind.collate)
        costs = all_costs[order] = in_turn(works, rounds=rounds)
        rows += [
            {
                "order": order if name not in sequential else "as written",
                "format": name,
                "samples/s": len(workload) / median(cost.wall_s for cost in found),
                "CPU us": 1e6 * median(cost.cpu_s for cost in found) / len(workload),
                "x ours": against(costs, name, OURS),
                "CPU x copyto": median(c.cpu_s for c in found) / median(c.cpu_s for c in costs[LIMIT]),
                "runs": len(found),
            }
            for name, found in costs.items()
        ]
    return rows, all_costs


def _first_epoch(folder: Path, listed: Batches) -> None:
    """Opens the cache and reads every sample once: every sample is hashed, and every buffer is new."""
    _exhaust(batches.make_loader(forebay_cache.open_cache_of(folder), listed, num_threads=0))


def _exhaust(loader: Any) -> None:
    for _ in loader:
        pass


def read_packs(modules: Sequence[Any], workload: Workload, folder: Path, *, rounds: int) -> tuple[list[Row], Costs]:
    """Returns what copying every pack into one reused buffer costs, in random order."""
    order = np.random.default_rng(0).permutation(len(workload)).tolist()
    room = int(np.diff(workload.offsets).max())
    out = np.zeros((room, workload.width), workload.values.dtype)

    def copy(read: Callable[[int], Any], indices: Sequence[int]) -> None:
        for index in indices:
            values = read(index)["values"]
            np.copyto(out[: len(values)], values)

    works: dict[str, Work] = {LIMIT: functools.partial(copy, workload.__getitem__, order)}
    for peer in modules:
        reader = peer.open_reader(folder / peer.NAME / workload.name, workload)
        indices = sorted(order) if getattr(peer, "SEQUENTIAL", False) else order
        works[peer.NAME] = functools.partial(copy, reader.read, indices)
    costs = in_turn(works, rounds=rounds)
    rows = [
        {
            "format": name,
            "GB/s": workload.values.nbytes / 1e9 / median(cost.wall_s for cost in found),
            "x ours": against(costs, name, OURS),
            "runs": len(found),
        }
        for name, found in costs.items()
    ]
    return rows, costs


def background(modules: Sequence[Any], workload: Workload, folder: Path, *, rounds: int) -> tuple[list[Row], Costs]:
    """Returns what background batches cost: forebay with 2 threads, a DataLoader with 2 workers over each peer."""
    listed = batches_of(workload, "shuffled")
    cache = forebay_cache.open_cache_of(folder / OURS / workload.name)
    works: dict[str, Work] = {
        OURS: functools.partial(_exhaust, batches.make_loader(cache, listed, num_threads=2)),
        RAGGED: functools.partial(_exhaust, batches.make_loader(cache, listed, num_threads=2, form="ragged")),
    }
    for peer in modules:
        if getattr(peer, "SEQUENTIAL", False):
            continue
        opened = functools.partial(peer.open_reader, folder / peer.NAME / workload.name, workload)
        dataset = batches.IndexedReader(opened, len(workload))
        name = f"{OURS}, DataLoader" if peer.NAME == OURS else peer.NAME
        works[name] = functools.partial(_exhaust, batches.dataloader(dataset, listed, num_workers=2))
    costs = in_turn(works, rounds=rounds)
    return [
        {
            "2 threads or workers": name,
            "samples/s": len(workload) / median(cost.wall_s for cost in found),
            "x ours": against(costs, name, OURS),
            "runs": len(found),
        }
        for name, found in costs.items()
    ], costs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few seconds: does it run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rounds", type=int, default=3, help="how often every contestant is timed")
    parser.add_argument("--peers", help="modules of benchmarks/peers beside ours, divided by commas; without: all")
    parser.add_argument("--plot", type=Path, help="where to draw the shuffled batches, a PNG")
    options = parser.parse_args(argv)
    rounds = 1 if options.tiny else options.rounds
    torch.set_num_threads(1)
    modules, absent = peers(options.peers.split(",") if options.peers else PEERS)
    speech, packs = (
        (workloads.speech(96), workloads.packs(3)) if options.tiny else (workloads.speech(), workloads.packs())
    )
    with _quiet(), _folder() as folder:
        from benchmarks.peers.figures import targets

        modules, failed = tried(modules, folder)
        written, write_costs = {}, {}
        for workload in (speech, packs):
            written[workload.name], write_costs[workload.name] = write_all(modules, workload, folder, rounds=rounds)
        read, read_costs = read_batches(modules, speech, folder, rounds=rounds)
        packed, _ = read_packs(modules, packs, folder, rounds=rounds)
        behind, behind_costs = background(modules, speech, folder, rounds=rounds)
    document = {
        "machine": machine("torch", "numpy", "xxhash"),
        "batches of 32, workload A": read,
        "packs copied, workload B": packed,
        "in the background": behind,
        "writing": [*written["A"], *written["B"]],
        "targets": targets(read_costs, behind_costs, write_costs, written),
        "peers": [*absent, *failed] or "all installed",
    }
    show(document, as_json=options.json)
    if options.plot:
        from benchmarks.peers.plot import draw

        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw([row for row in read if row["order"] in ("shuffled", "as written")], options.plot)
    return 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    BENCH_DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH_DATA) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the peers, which print and warn: standard output is for the table."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main())
