"""Cache roots with made-up caches, plans, builds and leftovers in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import cli
from forebay.config import BucketConfig, Config
from forebay.plan.disk import save_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_folder
from forebay.plan.statistics import batch_statistics
from tests.store.sealed import build, config_of, raw_data

DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Made:
    """A root with caches of several configs, by their names."""

    root: Path
    configs: dict[str, Config]
    caches: dict[str, Path]

    def toml(self, name: str) -> Path:
        """Returns the config file of a cache."""
        return self.root.parent / f"{name}.toml"


def made_root(folder: Path, names: str = "a b c", *, days_old: float = 60.0) -> Made:
    """Makes `folder`/caches with a sealed cache of each name, none of which was used for so many days."""
    raw_data(folder / "data")
    configs, caches = {}, {}
    for number, name in enumerate(names.split()):
        config = config_of(folder, source={"min_duration_s": float(number)})
        (folder / f"{name}.toml").write_text(
            f'name = "made_up"\n[source]\nkind = "webdataset"\nmanifest = "data"\nmin_duration_s = {number}.0\n'
            '[audio]\nfeatures = "waveform"\n[run]\ncache_root = "caches"\n'
        )
        configs[name], caches[name] = config, build(config, seed=number)
        age(caches[name], days_old)
    return Made(folder / "caches", configs, caches)


def shape(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Returns number, size, mode and time of everything below a folder; nothing is read, which would count as a use."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[path.relative_to(folder).as_posix()] = (status.st_ino, status.st_size, status.st_mode, status.st_mtime_ns)
    return found


def age(folder: Path, days: float) -> None:
    """Makes everything in a folder, and the folder, look as if it was last read and written so many days ago."""
    then = time.time() - days * DAY_S
    for path in (*folder.rglob("*"), folder) if folder.is_dir() else (folder,):
        os.utime(path, (then, then), follow_symlinks=False)


def noted(root: Path, name: str, *, host: str, days: float) -> None:
    """Notes a use of a cache by a host so many days ago."""
    path = root / ".used" / name / host
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"host": host, "pid": 1, "time": time.time()}))
    age(path, days)


def made_plan(root: Path, key: str, *, days: float = 60.0) -> Path:
    """Makes a plan of the cache of a key, by the code that makes plans."""
    lengths = np.random.default_rng(2).integers(500, 32_000, 40)
    settings = BucketConfig(batch_seconds=60.0)
    plan = bucket_plan(lengths, sample_rate_hz=1000, settings=settings)
    folder = plan_folder(root, dataset="made_up", split="train", cache_key=key, settings=settings)
    save_plan(plan, folder, cache_key=key, settings=settings, statistics=batch_statistics(plan, lengths))
    age(folder, days)
    return folder


def made_build(root: Path, *, key: str = "0123456789abcdef", days: float = 60.0) -> Path:
    """Makes what a build that was killed leaves."""
    folder = root / ".building" / key
    (folder / "audio").mkdir(parents=True)
    (folder / "text").mkdir()
    (folder / "lock").touch()
    (folder / "origin").write_text("f" * 64)
    (folder / "audio" / f"{'ab' * 32}.tdz").write_bytes(b"shard")
    (folder / "audio" / f"{'ab' * 32}.json").write_text("{}")
    (folder / "audio" / f"{'ab' * 32}.lock").touch()
    age(folder, days)
    return folder


@contextmanager
def process_with(code: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs Python code in another process, which has printed a line when the block begins and ends with the block."""
    command = [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\nimport sys\nsys.stdin.read()"]
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = cli.DONE) -> dict[str, Any]:
    """Returns the document of a command of `forebay cache`, which must end with `code`."""
    assert cli.main(["cache", *map(str, arguments), "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def did(document: dict[str, Any]) -> dict[str, str]:
    """Returns what became of each item of such a document, by name."""
    return {row["name"]: row["did"] for row in document["items"]}
