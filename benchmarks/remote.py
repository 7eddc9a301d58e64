"""Measures training from a bucket beside training from a local disk: `python -m benchmarks.remote [--tiny] [--json]`.

moto serves a bucket, and a proxy in front of it adds latency and a bandwidth limit; both are a process of their own. A
cache of workload A lies in the bucket and on the disk. Every run is a process of its own with an empty node's folder,
and goes through the same batches in the same order for three epochs.

- **Local and remote.** Epochs of the local cache beside epochs of the remote one, from the second epoch on.
- **First epoch.** Bytes a second that arrived while it ran, as a share of the link's limit.
- **First batch.** From opening the URL to the first batch, less the shards that it needs at the link's limit.
- **A hit.** What a sample costs more in a remote cache whose shards are here than in a local one.
- **Four processes.** GETs of a shard with four ranks on one node.
- **Peers.** MosaicML Streaming and LitData on the same samples in the same bucket, where they are installed (`make
  bench-peers`): first batch, epochs, bytes, and what a start after `kill -9` costs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.data import ROOT
from benchmarks.objects.beside import Beside
from benchmarks.objects.server import ACCESS_KEY, REGION, SECRET_KEY, Bucket
from benchmarks.peers import forebay_cache, litdata_chunks, mds, workloads
from benchmarks.peers.interface import Workload
from benchmarks.report import machine, median, show

BATCH_SIZE = 32
EPOCHS = 3
_CACHE = "cache"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is read. link_bytes_per_s: the limit of the proxy. step_s: what the model takes for a batch."""

    count: int
    rows_per_shard: int
    link_bytes_per_s: float
    latency_s: float
    rounds: int


FULL = Size(count=8_000, rows_per_shard=128, link_bytes_per_s=100e6, latency_s=0.02, rounds=3)
TINY = Size(count=200, rows_per_shard=25, link_bytes_per_s=50e6, latency_s=0.002, rounds=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few seconds: does it run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _CHILDREN[options.child](json.loads(sys.stdin.read()))
        return 0
    size = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory() as scratch, Beside() as objects:
        document = {"machine": machine("obstore"), **_measure(Path(scratch), objects, size)}
    show(document, as_json=options.json)
    return 0


def _measure(scratch: Path, objects: Beside, size: Size) -> dict[str, Any]:
    workload = _workload(size)
    forebay_cache.write(scratch / "data" / "forebay", workload)
    contestants = ["forebay", *(name for name in _PEERS if importlib.util.find_spec(_PEERS[name][0]) is not None)]
    failed: dict[str, str] = {}
    for name in contestants[1:]:
        _try(failed, name, lambda name: _PEERS[name][1].write(scratch / "data" / name, workload))
    bucket = objects.make_bucket()
    data = scratch / "data"
    bucket.put_all((p.relative_to(scratch).as_posix(), p.read_bytes()) for p in sorted(data.rglob("*")) if p.is_file())
    run = _Runs(scratch, objects, size, bucket)
    rows = [*_beside_local(run, workload), *_hits(run), *_four(run)]
    missing = sorted(set(_PEERS) - set(contestants))
    return {
        "the link": {"MB/s": size.link_bytes_per_s / 1e6, "latency ms": size.latency_s * 1e3},
        "the data": {
            "samples": len(workload),
            "MB": round(workload.payload_bytes / 1e6),
            "rows a shard": size.rows_per_shard,
        },
        "forebay": rows,
        "beside peers, on one bucket": [
            row for name in contestants if name not in failed and (row := _try(failed, name, partial(_peer, run)))
        ],
        "failed": ", ".join(f"{name}: {why}" for name, why in failed.items()) or "none",
        "not installed here (make bench-peers)": ", ".join(missing) or "none",
    }


def _try(failed: dict[str, str], name: str, work: Callable[[str], Any]) -> Any:
    """Returns what is measured of a contestant; a peer that fails is noted, and costs its own row alone."""
    try:
        return work(name)
    except (Exception, SystemExit) as err:
        if name == "forebay":
            raise
        failed[name] = f"{type(err).__name__}: {err}"[:200]
        return None


def _workload(size: Size) -> Workload:
    return workloads.speech(size.count, rows_per_shard=size.rows_per_shard)


class _Runs:
    """Runs children: each in a process of its own, with an empty folder of a node unless it is given one."""

    def __init__(self, scratch: Path, objects: Beside, size: Size, bucket: Bucket) -> None:
        self.scratch, self.objects, self.size, self.bucket = scratch, objects, size, bucket
        self._number = 0

    def folder(self) -> Path:
        """Returns a new, empty folder."""
        self._number += 1
        folder = self.scratch / f"node-{self._number}"
        folder.mkdir()
        return folder

    def start(self, child: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a child through the proxy, with its limits."""
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.objects.endpoint,
            "S3_ENDPOINT_URL": self.objects.endpoint,
            "PYTHONPATH": str(ROOT),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote", "--child", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"endpoint": self.objects.endpoint, **options}))
        process.stdin.close()
        return process

    def __call__(self, child: str, **options: Any) -> dict[str, Any]:
        """Returns what a child prints last, with the bytes and GETs that the proxy counted meanwhile."""
        self.objects.clear()
        process = self.start(child, **options)
        assert process.stdout is not None
        printed = process.stdout.read()
        if process.wait():
            raise RuntimeError(f"{child} {options} ended with {process.returncode}")
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found | self.counted()

    def counted(self) -> dict[str, Any]:
        """Returns the bytes that were sent and the GETs by key since the last `clear`."""
        traffic = self.objects.traffic()
        gets = {key: count for (method, key), count in traffic.requests.items() if method == "GET"}
        return {"bytes": sum(each.sent for each in traffic.exchanges), "gets": gets}


def _beside_local(run: _Runs, workload: Workload) -> Iterator[dict[str, Any]]:
    size = run.size
    ratios, shares, shares_in_windows, firsts, in_window = [], [], [], [], []
    run.objects.limit(latency_s=size.latency_s, bytes_per_s=size.link_bytes_per_s)
    place = f"{run.bucket.url}/data/forebay/{_CACHE}"
    local_place = str(run.scratch / "data" / "forebay" / _CACHE)
    for _ in range(size.rounds):
        local = run("epochs", place=local_place, epochs=EPOCHS, node=str(run.folder()))
        remote = run(
            "epochs", place=f"{run.bucket.url}/" + ("data/forebay/" + _CACHE), epochs=EPOCHS, node=str(run.folder())
        )
        ratios.append(median(local["epoch_s"][1:]) / median(remote["epoch_s"][1:]))
        shares.append(remote["bytes"] / remote["epoch_s"][0] / size.link_bytes_per_s)
        shard_s = workload.payload_bytes / len(workload) * size.rows_per_shard / size.link_bytes_per_s
        windows = run("epochs", place=place, epochs=1, node=str(run.folder()), locality="shards:8")
        shares_in_windows.append(windows["bytes"] / windows["epoch_s"][0] / size.link_bytes_per_s)
        firsts.append(remote["first_s"] - shard_s * remote["first_shards"])
        window = run("epochs", place=place, epochs=0, node=str(run.folder()), locality="shards:2")
        in_window.append(window["first_s"] - shard_s * window["first_shards"])
    yield {
        "what": "speed of the second epoch on, remote / local",
        "figure": round(median(ratios), 3),
        "target": ">= 0.95",
    }
    for what, found in (("a global shuffle", shares), ("windows of 8 shards", shares_in_windows)):
        figure = round(median(found), 3)
        yield {"what": f"first epoch of {what}, share of the link", "figure": figure, "target": ">= 0.9"}
    for what, found, shards in (
        ("first batch of a global shuffle", firsts, remote["first_shards"]),
        ("first batch within windows of 2 shards", in_window, window["first_shards"]),
    ):
        figure = round(median(found), 3)
        yield {"what": f"{what}, s beyond the download of its {shards} shards", "figure": figure, "target": "<= 1"}


def _hits(run: _Runs) -> Iterator[dict[str, Any]]:
    run.objects.limit()
    local = str(run.scratch / "data" / "forebay" / _CACHE)
    found = run("hits", place=f"{run.bucket.url}/" + ("data/forebay/" + _CACHE), local=local, node=str(run.folder()))
    yield {"what": "a hit, us a sample more than local", "figure": round(found["more_us"], 2), "target": "<= 5"}


def _four(run: _Runs) -> Iterator[dict[str, Any]]:
    run.objects.limit(latency_s=run.size.latency_s, bytes_per_s=run.size.link_bytes_per_s)
    node = str(run.folder())
    run.objects.clear()
    place = f"{run.bucket.url}/" + ("data/forebay/" + _CACHE)
    ranks = [run.start("epochs", place=place, epochs=1, node=node, rank=rank, world=4) for rank in range(4)]
    for process in ranks:
        assert process.stdout is not None
        process.stdout.read()
        if process.wait():
            raise RuntimeError(f"a rank ended with {process.returncode}")
    counts = [n for key, n in run.counted()["gets"].items() if key.endswith(".tdz")]
    yield {"what": "GETs a shard, 4 processes on a node", "figure": max(counts), "target": "1"}


def _peer(run: _Runs, name: str) -> dict[str, Any]:
    """Returns the figures of one contestant: a whole run, then one that is killed in the middle and started again."""
    size = run.size
    run.objects.limit(latency_s=size.latency_s, bytes_per_s=size.link_bytes_per_s)
    place = f"{run.bucket.url}/" + (f"data/{name}/{_CACHE}" if name == "forebay" else f"data/{name}")
    child = "epochs" if name == "forebay" else name
    whole = run(child, place=place, epochs=2, node=str(run.folder()))
    node = str(run.folder())
    process = run.start(child, place=place, epochs=2, node=node)
    time.sleep(whole["imports_s"] + whole["epoch_s"][0] / 2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    try:
        again = run(child, place=place, epochs=1, node=node)
        killed = f"starts again by itself, {again['bytes'] / 1e6:.0f} MB more, first batch {again['first_s']:.1f} s"
    except RuntimeError as err:
        killed = f"does not start again: {err}"
    return {
        "what": name,
        "first batch s": round(whole["first_s"], 2),
        "epochs s": " ".join(f"{s:.2f}" for s in whole["epoch_s"]),
        "MB": round(whole["bytes"] / 1e6),
        "GETs": sum(whole["gets"].values()),
        "killed in the first epoch": killed,
    }


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(document) + "\n")


def _epochs(options: dict[str, Any]) -> None:
    """Goes through the epochs of a cache by the loader, and prints what they took."""
    began = time.perf_counter()
    import forebay
    from forebay.config import BucketConfig
    from forebay.config.remote import RemoteConfig
    from forebay.plan.make import Planned, make_plan, samples_of
    from forebay.store.layout import ROW_BITS
    from forebay.train.loader import Loader, LoaderSettings

    imported = time.perf_counter()
    remote = RemoteConfig(endpoint=options["endpoint"], shard_dir=options["node"])
    cache = forebay.open_cache(options["place"], remote=remote)
    settings = BucketConfig(batch_size=BATCH_SIZE, locality=options.get("locality", "global"))
    planned = Planned(plan=make_plan(samples_of(cache), settings), key="0" * 64)
    first = planned.plan.order(0, 0).batch(0)
    first_shards = len(np.unique(np.asarray(cache.slots)[first] >> ROW_BITS))
    loader = Loader(
        cache,
        planned,
        LoaderSettings(),
        dp_rank=options.get("rank", 0),
        dp_world_size=options.get("world", 1),
    )
    first_s, epoch_s = None, []
    for _ in range(max(options["epochs"], 1)):
        start = imported if not epoch_s else time.perf_counter()
        for batch in loader:
            if first_s is None:
                first_s = time.perf_counter() - imported
            assert batch["input_features"].shape[0]
            if not options["epochs"]:
                break
        epoch_s.append(time.perf_counter() - start)
    _print({"imports_s": imported - began, "first_s": first_s, "epoch_s": epoch_s, "first_shards": first_shards})


def _hit_costs(options: dict[str, Any]) -> None:
    """Reads every sample of a cache whose shards are here, and of a local one, in turns."""
    import forebay
    from forebay.config.remote import RemoteConfig

    remote = forebay.open_cache(
        options["place"], remote=RemoteConfig(endpoint=options["endpoint"], shard_dir=options["node"])
    )
    local = forebay.open_cache(options["local"])
    order = np.random.default_rng(0).permutation(len(local)).tolist()
    for cache in (local, remote):
        for index in order:
            cache.read(index)
    taken: dict[str, list[float]] = {"local": [], "remote": []}
    for _ in range(15):
        for name, cache in (("local", local), ("remote", remote)):
            start = time.perf_counter()
            for index in order:
                cache.read(index)
            taken[name].append((time.perf_counter() - start) / len(order) * 1e6)
    _print({"more_us": median(b - a for a, b in zip(taken["local"], taken["remote"], strict=True))})


def _padded(samples: list[Any]) -> Any:
    """Returns the batch that the loader makes of these samples: float32 frames, padded, with a mask."""
    import torch

    longest = max(len(sample["values"]) for sample in samples)
    batch = torch.zeros(len(samples), samples[0]["values"].shape[1], longest)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        values = torch.from_numpy(np.array(sample["values"]))
        batch[row, :, : len(values)] = values.T
        mask[row, : len(values)] = 1
    return batch, mask


def _through(make: Any, options: dict[str, Any], began: float, imported: float) -> None:
    loader, first_s, epoch_s = make(), None, []
    for _ in range(options["epochs"]):
        start = imported if not epoch_s else time.perf_counter()
        for batch, _ in loader:
            if first_s is None:
                first_s = time.perf_counter() - imported
            assert batch.shape[0]
        epoch_s.append(time.perf_counter() - start)
    _print({"imports_s": imported - began, "first_s": first_s, "epoch_s": epoch_s})


def _mds(options: dict[str, Any]) -> None:
    """MosaicML Streaming with two workers, as its documents say."""
    began = time.perf_counter()
    streaming = mds._streaming()
    from torch.utils.data import DataLoader

    imported = time.perf_counter()

    def make() -> Any:
        data = streaming.StreamingDataset(
            remote=options["place"], local=options["node"], shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1
        )
        return DataLoader(data, batch_size=BATCH_SIZE, num_workers=2, collate_fn=_padded, persistent_workers=True)

    _through(make, options, began, imported)


def _litdata(options: dict[str, Any]) -> None:
    """LitData with two workers, as its documents say."""
    began = time.perf_counter()
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for a store on loopback
    imported = time.perf_counter()

    def make() -> Any:
        data = litdata.StreamingDataset(
            options["place"],
            cache_dir=options["node"],
            shuffle=True,
            storage_options={"endpoint_url": options["endpoint"]},
        )
        return litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=2, collate_fn=_padded)

    _through(make, options, began, imported)


_PEERS: dict[str, tuple[str, Any]] = {"MosaicML Streaming": ("streaming", mds), "LitData": ("litdata", litdata_chunks)}
_CHILDREN = {"epochs": _epochs, "hits": _hit_costs, "MosaicML Streaming": _mds, "LitData": _litdata}

if __name__ == "__main__":
    sys.exit(main())
