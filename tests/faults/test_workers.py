"""A worker that the machine kills, and a sample that crashes its decoder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import BuildError
from forebay.preprocess.decode import decode_audio
from tests.faults.building import Site, build_here, check_caches, check_settled, site
from tests.faults.row import Row, dice
from tests.faults.shim import Fault

_IDS = [*(f"a{i}" for i in range(6)), *(f"b{i}" for i in range(3))]


def dies(place: Site, number: int, folder: Path) -> str:
    chance = dice("worker", number)
    root = folder / "caches"
    sample_id, end = chance.choice(_IDS), chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
    is_once = chance.random() < 0.5
    ended = place.children.run(_crashing, place.config, root, sample_id, end, folder / "crashed" if is_once else None)
    assert not ended.signal
    if is_once:
        assert ended.error is None, ended.error
        check_settled(root, place.wanted)
        return "died once, retried"
    assert isinstance(ended.error, BuildError), repr(ended.error)
    for part in (f"signal {end.name}", f"'{sample_id}'", f'[source] exclude = ["{sample_id}"]', str(place.config)):
        assert part in str(ended.error), str(ended.error)
    check_caches(root, place.wanted)
    again = place.children.run(build_here, place.config, root, Fault(), {}, f'source.exclude=["{sample_id}"]')
    assert again.error is None, again.error
    assert again.value["num_samples"] == len(_IDS) - 1
    return "stopped with the sample and the line that excludes it"


def _crashing(config: Path, root: Path, sample_id: str, end: signal.Signals, once: Path | None) -> dict[str, Any]:
    def decode(data: bytes, step: Any, *, sample_id: str, **rest: Any) -> Any:
        if sample_id == blamed and (once is None or not once.exists()):
            if once is not None:
                once.touch()
            os.kill(os.getpid(), end)
        return decode_audio(data, step, sample_id=sample_id, **rest)

    blamed = sample_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.preprocess.audio_group.decode_audio", decode)
        return build_here(config, root, Fault(), {})


ROW: Row[Any] = Row(
    name="worker",
    fault="a worker dying (OOM kill), a sample that makes the decoder crash the process",
    outcome="retried, then the build stops and names the sample and the config line that excludes it; never hangs",
    prepared=site,
    trial=dies,
    short=6,
    long=100,
)


def test_a_dying_worker_is_replaced_or_its_sample_named(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
