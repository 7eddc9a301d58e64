"""Nodes that are killed while they build by a stage: the cache is whole or not there, and the next one goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.objects.beside import Beside
from benchmarks.objects.server import Bucket as Store
from forebay import load_config
from tests.faults.children import Children, Ended
from tests.faults.row import Row, dice
from tests.faults.test_push import at, die_at
from tests.preprocess.corpus import Corpus, shard_bytes
from tests.preprocess.here_pool import build_here

_NEVER = 1 << 30
_PARTS: tuple[Sequence[tuple[int, int] | None], ...] = ((None, None), ((0, 2), (1, 2)))
_METHODS = ("put", "read", "info", "stream", "objects", "copy", "remove", "read_range")


@dataclass(frozen=True)
class Site:
    """A corpus, the shards of its cache by name, a store, and the calls of it that a whole build makes."""

    config: Path
    wanted: dict[str, bytes]
    server: Beside
    children: Children
    num_calls: int


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Prepares them."""
    corpus = Corpus(folder)
    corpus.add_tar("a.tar", [f"a{i}" for i in range(8)])
    wanted = shard_bytes(Path(build_here(corpus.config()).cache))
    config = folder / "config.toml"
    with Beside() as server, Children("obstore.store", "tests.preprocess.here_pool", __name__) as children:
        bucket = server.make_bucket()
        ended = children.run(build_there, config, bucket.url, server.endpoint, folder / "node", None, _NEVER)
        assert ended.error is None, ended.error
        yield Site(config, wanted, server, children, ended.value[1])


def build_there(
    config: Path, url: str, endpoint: str, node: Path, part: tuple[int, int] | None, kill_at: int
) -> tuple[bool, int]:
    """Builds in this process, which is killed at its `kill_at`-th call of the store.

    Returns whether the cache is sealed, and how many calls there were.
    """
    with at(endpoint) as patch:
        calls = die_at(patch, _METHODS, kill_at)
        places = (f"run.cache_root={url}/caches", f"remote.shard_dir={node}", "remote.max_concurrent=2")
        report = build_here(load_config(config, overrides=places), stage=f"{url}/stage", part=part)
    return report.sealed, next(calls)


def killed(place: Site, number: int, folder: Path) -> str:
    chance = dice("stage-kill", number)
    bucket = place.server.make_bucket()
    seen = []
    for turn in range(chance.randrange(1, 4)):
        num_drivers = chance.randrange(1, 3)
        parts = chance.choice(_PARTS)[:num_drivers]
        calls = [
            (
                build_there,
                place.config,
                bucket.url,
                place.server.endpoint,
                folder / f"node{turn}-{index}",
                part,
                chance.randrange(place.num_calls) if chance.random() < 0.8 else _NEVER,
            )
            for index, part in enumerate(parts)
        ]
        seen += list(map(_what, place.children.run_all(calls)))
        _check_whole_or_absent(place, bucket)
    last = (build_there, place.config, bucket.url, place.server.endpoint, folder / "last", None, _NEVER)
    assert _what(place.children.run(*last)) == "sealed"
    _check_whole_or_absent(place, bucket)
    assert bucket.names("stage") == []
    assert not [path for path in folder.glob("*/stage/*") if path.parent.parent.name == "last"]
    return "killed, then sealed" if "killed" in seen else "sealed"


def _what(ended: Ended) -> str:
    assert ended.error is None, ended.error
    return "killed" if ended.signal else "sealed" if ended.value[0] else "unsealed"


def _check_whole_or_absent(place: Site, bucket: Store) -> None:
    names = bucket.names("caches")
    if any(name.endswith("metadata.json") for name in names):
        found = {name.split("/", 2)[2]: bucket.get(name) for name in names if name.endswith(".tdz")}
        assert found == place.wanted


ROW = Row(
    name="stage-kill",
    fault="one or two drivers, or parts of nodes that share no folder, killed at any request of a build by a stage",
    outcome="no cache, or the whole one, whatever node goes on; nothing is left in the stage",
    prepared=site,
    trial=killed,
    short=6,
    long=500,
)


@pytest.mark.wide
def test_nodes_killed(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
