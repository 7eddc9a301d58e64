from __future__ import annotations

import dataclasses

from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.doctor_report import Advice, advice
from forebay.measure.predict import Codecs, OtherPlan, Pieces, Rates, Reads, StageCost
from forebay.steps.recipe import load_config
from tests.measure.doctor.figures import demo, measured, plan, rate, sealed, steps


def lines(found: MeasuredArms, *settings: str) -> dict[str, Advice]:
    return {each.line: each for each in advice(found, demo(*settings))}


def test_the_cache_comes_first_where_it_saves_the_most() -> None:
    first = advice(measured(), demo())[0]
    assert first.line == "forebay preprocess configs/demo_speech.toml"
    assert "idle 31 % -> 0.1 %" in first.gain
    assert "100 MB" in first.gain
    assert first.sure == "extrapolated"
    assert not first.settings


def test_nobody_is_told_to_build_a_cache_that_is_there() -> None:
    assert not [line for line in lines(sealed()) if "preprocess" in line]


def test_a_step_that_never_waits_is_the_bottleneck() -> None:
    first = advice(sealed(), demo())[0]
    assert "the step is the bottleneck: data can be no faster" in first.text


def test_buckets_are_cut_where_the_lengths_are() -> None:
    others = tuple(
        OtherPlan(settings={"k": k}, padding=p, num_batches=100) for k, p in ((8, 0.1), (32, 0.02), (64, 0.015))
    )
    found = lines(sealed(plan=plan(padding=0.158, others=others)))
    best = found["plan.k = 32"]  # 64 saves hardly more
    assert best.gain == "padding 16 % -> 2.0 %"
    assert best.sure == "measured"
    assert best.settings == {"plan.k": 32, "plan.edges_s": None}
    fixed = lines(sealed(plan=plan(padding=0.158, others=others, is_fixed=True)))
    assert "plan.k = 32" not in fixed  # a clip takes 30 s of room in any bucket


def test_buckets_that_are_the_best_stay() -> None:
    others = tuple(OtherPlan(settings={"k": k}, padding=p, num_batches=100) for k, p in ((8, 0.1), (32, 0.09)))
    assert not [line for line in lines(sealed(plan=plan(padding=0.08, others=others))) if line.startswith("plan.")]


def test_threads_are_the_fewest_that_are_as_good() -> None:
    rates = Rates(rates={n: rate(n, batch_s=0.1) for n in (0, 1, 2, 4)})
    found = lines(sealed(cached=rates, num_threads=1))
    assert found["loader.num_threads = 2"].settings == {"loader.num_threads": 2}
    assert not [line for line in lines(sealed(cached=rates, num_threads=2)) if "threads" in line]
    unknown = sealed(cached=rates, num_threads=1, steps=None)
    assert not [line for line in lines(unknown) if "threads" in line]


def test_a_codec_pays_if_it_is_smaller_and_the_loader_keeps_up() -> None:
    codecs = Codecs(
        read_ms={"raw": 0.5, "zstd": 5.0, "webp": 5.0, "source": 417.0},
        bytes_a_sample={"raw": 1e6, "zstd": 9e5, "webp": 3e5, "source": 1e5},
        own="raw",
        samples_a_pack=6.0,
    )
    config = demo()
    found = sealed(codecs=codecs, steps=steps(0.05))
    assert not [each for each in advice(found, config) if "codec" in each.text]  # a config of audio
    vision = load_config("configs/demo_vision.toml")
    best = next(each for each in advice(found, vision) if "codec" in each.text)
    assert best.line == 'vision.codec = "webp"'
    assert "0.5 ms -> 5 ms to read a pack; source" not in best.gain
    assert "zstd" not in best.text
    assert "417 ms" in best.gain
    assert best.needs == "build"
    fast = sealed(codecs=codecs, steps=steps(0.001))
    assert not [each for each in advice(fast, vision) if "codec" in each.text]


def test_a_slow_disk_is_named() -> None:
    stages = (StageCost(name="cached read", kind="cache", ms=0.1, samples=50),)
    slow = sealed(pieces=Pieces(stages=stages, cold_ms=200.0))
    assert any("storage of the cache is slow" in each.text for each in advice(slow, demo()))
    fine = sealed(pieces=Pieces(stages=stages, cold_ms=0.15))
    assert not any("storage" in each.text for each in advice(fine, demo()))
    reads = Reads(warm_ms=0.1, cold_ms=300.0, mean_bytes=1e5, samples=20)
    assert any("storage of raw data is slow" in each.text for each in advice(measured(raw_read=reads), demo()))


def test_a_build_on_fewer_cores_than_there_are_is_named() -> None:
    found = lines(measured(num_workers=1), "run.num_workers=1")
    assert found["run.num_workers = 4"].settings == {"run.num_workers": 4}
    assert "run.num_workers = 4" not in lines(measured(), "run.num_workers=4")


def test_longer_queues_help_batches_of_unequal_length() -> None:
    base = plan()
    short, long_ = base.batches[0], base.batches[0]
    uneven = dataclasses.replace(
        base,
        batches=(*(dataclasses.replace(short, frames=100),) * 9, dataclasses.replace(long_, frames=100_000)) * 5,
    )
    found = lines(
        sealed(plan=uneven, cached=Rates(rates={1: rate(1, batch_s=0.05)}), num_threads=1, prefetch=1),
        "loader.prefetch=1",
    )
    assert any(line.startswith("loader.prefetch = ") for line in found)
    assert not any(line.startswith("loader.prefetch") for line in lines(sealed()))


def test_what_saves_more_comes_first() -> None:
    ranks = [each.rank for each in advice(measured(num_workers=1), demo("run.num_workers=1"))]
    assert ranks == sorted(ranks, reverse=True)
