"""A device's process, or what prepares for it, that is killed; and weights that change between the key and the load."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.errors import BuildError
from forebay.preprocess import pool
from forebay.preprocess.build_report import Options
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.pipeline import build
from forebay.steps.model.open_model import OpenModel
from tests.faults.building import check_caches, check_settled, forked_workers
from tests.faults.children import Children
from tests.faults.row import Row, dice
from tests.faults.shim import Fault, Shim
from tests.preprocess.corpus import shard_bytes
from tests.steps.model.test_families import LENGTHS_S, SPEECH, Corpus, section
from tests.steps.model.tiny_frozen import RATE_HZ

WEIGHTS = "dac/model.safetensors"
HOP = 512
"""The extractor pads a clip to a multiple of it."""
_SHARDS = "[layout]\nrows_per_shard = 2\n"


@dataclass(frozen=True)
class Modelled:
    """A corpus with a codec, the server of children, and the shards that a build without devices gives, by name."""

    folder: Path
    children: Children
    wanted: dict[str, bytes]


@contextlib.contextmanager
def modelled(folder: Path) -> Iterator[Modelled]:
    Corpus(folder, "dac").config(SPEECH + section("dac", "audio") + _SHARDS)
    with Children("transformers.models.dac.modeling_dac", "transformers.models.dac.feature_extraction_dac") as children:
        ended = children.run(_build, folder / "config.toml", folder / "wanted", '"cpu"', "nobody", "", None)
        assert ended.error is None, ended.error
        yield Modelled(folder, children, shard_bytes(Path(ended.value)))


def _build(config: Path, root: Path, devices: str, victim: str, sample_id: str, once: Path | None) -> str:
    """Builds with workers that are forked from here. victim: what is killed at a sample, `once` or each time."""

    def kill() -> None:
        if once is None or not once.exists():
            if once is not None:
                once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def made(self: OpenModel, batch: Any, rows: Any) -> Any:
        if victim == "device" and len(rows) == 1 and 0 <= rows[0] - LENGTHS_S[int(sample_id)] * RATE_HZ < HOP:
            kill()
        return real(self, batch, rows)

    def decode(data: bytes, step: Any, *, sample_id: str, **rest: Any) -> Any:
        if victim == "preparer" and sample_id == blamed:
            kill()
        return decode_audio(data, step, sample_id=sample_id, **rest)

    def start(place: pool.Pool) -> Any:
        if victim == "weights":  # their key is made before a worker is
            (config.parent / WEIGHTS).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return fork(place)

    blamed, real, whole = sample_id, OpenModel.made, (config.parent / WEIGHTS).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        fork = forked_workers(Shim(patch, Fault()))
        patch.setattr(pool.Pool, "_start", start)
        patch.setattr("forebay.preprocess.audio_group.decode_audio", decode)
        patch.setattr(OpenModel, "made", made)
        changed = [f'run.cache_root="{root}"', f"run.devices={devices}", "run.num_workers=2"]
        return build(load_config(config, overrides=changed), Options(progress=False)).cache


def dies(place: Modelled, number: int, folder: Path) -> str:
    chance = dice("devices", number)
    victim, sample_id = chance.choice(["device", "preparer"]), chance.choice(["1", "2", "3"])
    is_once, root = chance.random() < 0.5, folder / "caches"
    again = functools.partial(place.children.run, _build, place.folder / "config.toml", root, '["cpu", "cpu"]')
    ended = again(victim, sample_id, folder / "killed" if is_once else None)
    if not is_once:
        assert isinstance(ended.error, BuildError), repr(ended.error)
        for part in ("signal SIGKILL", f"'{sample_id}'", f'[source] exclude = ["{sample_id}"]'):
            assert part in str(ended.error), str(ended.error)
        check_caches(root, place.wanted)
        ended = again("nobody", "", None)
    assert ended.error is None, ended.error
    assert (folder / "killed").exists() == is_once
    check_settled(root, place.wanted)
    return f"{victim} killed once: the same bytes" if is_once else f"{victim}: stopped with the sample"


def poisoned(place: Modelled, number: int, folder: Path) -> str:
    devices = dice("weights", number).choice(['"cpu"', '["cpu"]'])
    root, weights = folder / "caches", place.folder / WEIGHTS
    whole = weights.read_bytes()
    ended = place.children.run(_build, place.folder / "config.toml", root, devices, "weights", "", None)
    weights.write_bytes(whole)
    assert isinstance(ended.error, BuildError), repr(ended.error)
    assert "dac changed during the build (its digest was" in str(ended.error)
    assert ended.error.code == "FB303"
    assert check_caches(root, place.wanted) == 0
    return "stopped with both digests"


DEVICE: Row[Any] = Row(
    name="device",
    fault="kill -9 of the process of a device, or of one that prepares for it",
    outcome="once: byte-equal shards; each time: the build stops with the sample, what is finished stays",
    prepared=modelled,
    trial=dies,
    short=2,  # once and each time, of the device
    long=60,
)
POISONED: Row[Any] = Row(
    name="weights",
    fault="weights that change between the key and the load",
    outcome="the build stops with both digests, and nothing is sealed",
    prepared=modelled,
    trial=poisoned,
    short=1,
    long=4,
)
ROWS = [DEVICE, POISONED]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_devices_and_weights(row: Row[Any], tmp_path: Path) -> None:
    assert sum(row.check(tmp_path).values()) == row.short
