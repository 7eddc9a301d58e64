"""200 epochs over a small cache, with restarts: memory without slope, and every sample of every epoch exactly once."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import BucketConfig
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_key
from forebay.store.cache import open_cache
from tests.faults.children import Children, serving
from tests.faults.row import Row, dice
from tests.store_factory import make_cache
from tests.train.loaders import loader_of

NUM_EPOCHS = 200
_NUM_SAMPLES = 24
_FIRST_ID = 10
_GROWTH_BYTES = 4_000_000
"""What the last two thirds of a run may add by their slope: a leak of a small batch an epoch is more in 200."""


def soaked(children: Children, number: int, folder: Path, *, num_epochs: int = NUM_EPOCHS) -> str:
    ids = [[1, _FIRST_ID + index, 2] for index in range(_NUM_SAMPLES)]
    cache = make_cache(
        folder, num_samples=_NUM_SAMPLES, rows_per_shard=3, max_duration_s=0.5, features="waveform", input_ids=ids
    )
    ended = children.run(_soak, cache, num_epochs)
    assert not ended.signal
    assert ended.error is None, ended.error
    restarts, resident = ended.value
    settled = resident[len(resident) // 3 :]  # pools and caches fill in the beginning
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    assert slope * len(settled) < _GROWTH_BYTES, f"{slope:.0f} bytes an epoch"
    return f"{num_epochs} epochs, {restarts} restarts, {slope:.0f} bytes an epoch"


def _soak(folder: Path, num_epochs: int) -> tuple[int, list[int]]:
    """Returns the number of restarts, and the resident memory after every epoch."""
    chance = dice("soak", 0)
    loader, restarts, resident = _loader(folder), 0, []
    for epoch in range(num_epochs):
        seen: list[int] = []
        while len(seen) < _NUM_SAMPLES:
            stop = chance.choice([None, chance.randrange(1, 8)])
            for batch in loader:
                seen += (batch["labels"][:, 1] - _FIRST_ID).tolist()
                stop = None if stop is None else stop - 1
                if stop == 0:
                    break
            if stop == 0 and len(seen) < _NUM_SAMPLES:
                state, loader = loader.state_dict(), _loader(folder)
                loader.load_state_dict(state)
                restarts += 1
        assert sorted(seen) == list(range(_NUM_SAMPLES)), f"epoch {epoch}: {sorted(seen)}"
        if epoch % 10 == 0:
            gc.collect()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return restarts, resident


def _loader(folder: Path) -> Any:

    cache, settings = open_cache(folder), BucketConfig(batch_size=3, edges_s=(0.2, 0.5))
    plan = bucket_plan(cache.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    key = plan_key(cache.key, settings)
    return loader_of(cache, plan, plan_key=key, seed=1, dp_rank=0, dp_world_size=1)


ROW: Row[Any] = Row(
    name="soak",
    fault=f"soak: {NUM_EPOCHS} epochs over a small cache with restarts",
    outcome="memory without slope, every sample of every epoch exactly once",
    prepared=serving,
    trial=soaked,
    short=1,
)


def test_a_long_run_keeps_its_memory_and_its_samples(tmp_path: Path) -> None:
    with Children() as children:
        assert "30 epochs" in soaked(children, 0, tmp_path, num_epochs=30)
