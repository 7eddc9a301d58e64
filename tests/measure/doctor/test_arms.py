"""The arms on the demo's data, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.tree import Config
from forebay.measure import cache_arms as codecs
from forebay.measure import cache_arms as plans
from forebay.measure import cache_arms as raw
from forebay.measure import cache_arms as samples
from forebay.measure import doctor_bench as benches
from forebay.measure import loader_arms as loaders
from forebay.measure import loader_arms as pieces
from forebay.measure.doctor_bench import Bench, DoctorTask
from forebay.measure.predict import Made, Skip
from forebay.preprocess.build_report import Options
from forebay.preprocess.decode import decode_audio
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import load_config
from forebay.store.seal import verify_folder
from forebay.train.collate.collator import Collator

SPEECH, VISION = "configs/demo_speech.toml", "configs/demo_vision.toml"


def bench_of(root: Path, config: str, *settings: str, limit: int | None = None) -> Bench:
    own = load_config(config, overrides=[f'run.cache_root="{root / "caches"}"', "run.num_workers=1", *settings])
    (root / "work").mkdir(parents=True, exist_ok=True)
    return Bench(DoctorTask(config=own, root=str(root / "work"), cores=2, limit=limit))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Made]:
    """The demo's recordings, no cache, and the sample that was made of them."""
    bench = bench_of(tmp_path_factory.mktemp("speech"), SPEECH)
    return bench, samples.made(bench, 0.5)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Made]:
    """The demo's photos."""
    bench = bench_of(tmp_path_factory.mktemp("vision"), VISION)
    return bench, samples.made(bench, 0.5)


def names(stages: Any) -> list[str]:
    return [stage.name for stage in stages]


def test_a_sample_of_recordings_is_a_cache_that_is_whole(speech: tuple[Bench, Made]) -> None:
    bench, made = speech
    assert names(made.stages) == ["raw read", "decode", "features", "tokens", "write shard"]
    assert all(stage.ms > 0 for stage in made.stages)
    assert made.failed == 0
    assert made.bytes_a_sample > 10_000
    assert verify_folder(bench.sample_folder, progress=False).problems == []
    assert not (bench.config.cache_root).exists()  # the user's own root


def test_a_sample_of_photos_is_a_cache_that_is_whole(vision: tuple[Bench, Made]) -> None:
    bench, made = vision
    assert {"raw read", "decode", "resize", "patches", "tokens", "write shard"} <= set(names(made.stages))
    assert verify_folder(bench.sample_folder, progress=False).problems == []
    assert len(bench.cached) == len({bench.cached.sample_id(place) for place in range(len(bench.cached))})
    assert not (bench.config.cache_root).exists()


def test_the_raw_data_is_listed_and_read(speech: tuple[Bench, Made], vision: tuple[Bench, Made]) -> None:
    listed = raw.listing(speech[0], 1.0)
    assert (listed.num_rows, listed.is_whole) == (52, True)
    assert listed.hours == pytest.approx(0.0523, rel=0.01)
    assert raw.find(speech[0], 1.0).place is None
    for bench, _ in (speech, vision):
        found = raw.reads(bench, 0.3)
        assert 1 <= found.samples <= 64  # as many as the disk gives in 0.3 s: a busy one has given one
        assert found.warm_ms > 0
        assert found.mean_bytes > 100
        assert (found.cold_ms is None) == bool(found.why_not_cold)


def test_the_pieces_of_a_batch(speech: tuple[Bench, Made], vision: tuple[Bench, Made]) -> None:
    for bench, _ in (speech, vision):
        found = pieces.pieces(bench, 0.3)
        assert names(found.stages) == ["cached read", "collate"]  # nothing is copied where there is no CUDA
        assert all(stage.ms > 0 for stage in found.stages)


def test_loaders_with_more_threads_than_cores_are_skipped_by_name(speech: tuple[Bench, Made]) -> None:
    found = loaders.cached(speech[0], 0.3)
    assert sorted(found.rates) == [0, 1, 2]
    assert found.skipped == {4: "4 threads on 2 cores"}
    assert all(
        rate.samples_per_s > 0 and rate.seconds_per_frame + rate.seconds_per_sample > 0 for rate in found.rates.values()
    )


def test_loaders_without_a_cache(speech: tuple[Bench, Made], vision: tuple[Bench, Made]) -> None:
    for bench, _ in (speech, vision):
        found = loaders.uncached(bench, 0.3)
        assert sorted(found.rates) == [0, 2]
        assert all(rate.samples_per_s > 0 for rate in found.rates.values())


def test_the_data_loader_makes_the_same_batches(speech: tuple[Bench, Made]) -> None:
    bench = speech[0]
    source, planned = bench.cached, bench.planned
    data = loaders.Batches(source, planned, loaders.makers(bench, source), seed=17)
    batches = list(loaders.loader_over(bench, source, planned, num_threads=0))
    assert len(data) == len(batches)
    for place, wanted in enumerate(batches):
        made, count, frames, _ = data[place]
        assert count == len(wanted["labels"])
        assert frames > 0
        assert all(torch.equal(made[name], value) for name, value in wanted.items())


def test_worker_processes_are_only_as_many_as_there_are_cores(speech: tuple[Bench, Made]) -> None:
    bench = speech[0]
    task = DoctorTask(config=bench.config, root=str(bench.root), cores=1)
    found = loaders.workers(Bench(task), 1.0)
    assert found.rates == {}
    assert found.skipped == {2: "2 worker processes on 1 core", 8: "8 worker processes on 1 core"}


def test_a_plan_of_all_rows_by_the_lengths_of_some(speech: tuple[Bench, Made], vision: tuple[Bench, Made]) -> None:
    found = plans.plans(speech[0], 1.0)
    assert not found.is_exact
    assert found.num_samples == 52
    assert found.room_is_fixed  # Whisper's 30 s
    assert sum(batch.samples for batch in found.batches) == 52
    assert all(batch.room >= batch.frames > 0 for batch in found.batches)
    packs = plans.plans(vision[0], 1.0)
    assert packs.num_samples == 44
    assert not packs.room_is_fixed


def test_codecs_differ_in_time_and_bytes(vision: tuple[Bench, Made], speech: tuple[Bench, Made]) -> None:
    found = codecs.codecs(vision[0], 0.3)
    assert set(found.read_ms) == {"raw", "zstd", "webp", "source"}
    assert found.bytes_a_sample["webp"] < found.bytes_a_sample["raw"]
    assert found.read_ms["source"] > found.read_ms["raw"]
    with pytest.raises(Skip, match="only images have codecs"):
        codecs.codecs(speech[0], 0.1)


def test_a_slow_decoder_is_the_longest_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return decode_audio(*args, **named)

    monkeypatch.setattr("forebay.preprocess.audio_group.decode_audio", slow)
    made = samples.made(bench_of(tmp_path, SPEECH, "source.max_samples=16"), 0.5)
    ms = {stage.name: stage.ms for stage in made.stages if stage.kind == "raw"}
    assert max(ms, key=lambda name: ms[name]) == "decode"
    assert ms["decode"] > 100


def test_a_slow_collator_is_the_longest_stage(speech: tuple[Bench, Made], monkeypatch: pytest.MonkeyPatch) -> None:
    collate = Collator.collate

    def slow(self: Collator, rows: Any, **named: Any) -> Any:
        time.sleep(0.05 * len(rows))
        return collate(self, rows, **named)

    monkeypatch.setattr(Collator, "collate", slow)
    ms = {stage.name: stage.ms for stage in pieces.pieces(speech[0], 0.3).stages}
    assert ms["collate"] > 10 * ms["cached read"]


def test_the_sealed_cache_is_what_the_arms_read(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, SPEECH, "source.max_samples=12")
    build(bench.config, Options(progress=False))

    def files() -> dict[Path, int]:
        # When a cache was last used is noted beside it, as by any command.
        root = bench.config.cache_root
        return {path: path.stat().st_mtime_ns for path in root.rglob("*") if ".used" not in path.parts}

    before = files()
    opened = raw.find(bench, 1.0)
    assert opened.place is not None
    assert opened.num_samples == len(bench.cached) == 12
    assert opened.size_bytes > 0
    assert plans.plans(bench, 1.0).is_exact
    pieces.pieces(bench, 0.1)
    loaders.cached(bench, 0.2)
    assert files() == before


def test_few_rows_are_listed_where_that_is_asked_for(tmp_path: Path) -> None:
    found = raw.listing(bench_of(tmp_path, SPEECH, limit=8), 1.0)
    assert (found.num_rows, found.is_whole) == (8, False)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (['source.manifest="s3://bucket/train.parquet"'], "source.manifest is a URL"),
        (['mixture.source=[{config = "configs/demo_speech.toml"}]'], "a mixture of caches has no raw data"),
    ],
)
def test_what_has_no_raw_data_here_is_skipped_by_name(tmp_path: Path, settings: list[str], why: str) -> None:
    bench = bench_of(tmp_path, SPEECH, *settings)
    with pytest.raises(Skip, match=why):
        raw.listing(bench, 1.0)


def test_no_sample_and_no_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no cache is sealed, and no sample of one could be made"):
        pieces.pieces(bench_of(tmp_path, SPEECH), 0.1)


def test_tar_indexes_of_the_user_are_read_and_never_written(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    (own / "a.parquet").write_bytes(b"1")
    benches._linked(own, other)
    assert (other / "a.parquet").read_bytes() == b"1"
    benches._linked(tmp_path / "nowhere", tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_config_is_whole(tmp_path: Path) -> None:
    config: Config = bench_of(tmp_path, SPEECH).limited(5)
    assert config.source.max_samples == 5
    assert bench_of(tmp_path, SPEECH, "source.max_samples=3").limited(5).source.max_samples == 3
