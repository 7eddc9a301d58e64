"""One rank of `test_readers`: `python -m tests.remote.reader URL ENDPOINT FOLDER RANK WORLD EPOCHS [DIE_AT]`.

It prints the digest of every batch. At step DIE_AT it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import xxhash

from forebay.config import BucketConfig
from forebay.plan.make import Planned, make_plan, samples_of
from forebay.store.cache import Cache, open_cache
from forebay.train.loader import Loader, LoaderSettings
from tests.remote.stored import node_settings

PLAN = BucketConfig(edges_s=(0.3, 0.6, 2.0), batch_size=3, lockstep=2)


def loader_of(cache: Cache, *, rank: int, world: int) -> Loader:
    planned = Planned(plan=make_plan(samples_of(cache), PLAN), key="0")
    return Loader(cache, planned, LoaderSettings(seed=5, num_threads=2), dp_rank=rank, dp_world_size=world)


def digests(loader: Loader, *, epochs: int, die_at: int = -1) -> list[str]:
    found: list[str] = []
    for _ in range(epochs):
        for batch in loader:
            if len(found) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(xxhash.xxh3_64_hexdigest(b"".join(batch[name].numpy().tobytes() for name in sorted(batch))))
    return found


def main(url: str, endpoint: str, folder: str, rank: str, world: str, epochs: str, die_at: str = "-1") -> None:
    cache = open_cache(url, remote=node_settings(Path(folder), endpoint))
    loader = loader_of(cache, rank=int(rank), world=int(world))
    print("\n".join(digests(loader, epochs=int(epochs), die_at=int(die_at))))


if __name__ == "__main__":
    main(*sys.argv[1:])
