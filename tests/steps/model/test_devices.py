"""A process a device gives the same bytes; a model fits, is worth it and keeps its promise, or it is said before."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.here_pool import HerePool
from forebay import load_config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.build_report import Options
from forebay.preprocess.device_process import ArrayChannel
from forebay.preprocess.model_group import _probed
from forebay.preprocess.pipeline import build
from forebay.preprocess.probes import beyond_promise, in_words, promise_of, sample_of
from forebay.preprocess.runner import ray as ray_runner
from forebay.preprocess.runner.ray import Ray
from forebay.steps.model import free_memory
from forebay.steps.model.open_model import OpenModel, opened_model
from forebay.store.cache import open_cache
from forebay.task_map import begin
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import SPEECH, Corpus, section

CODES, WORDS, STATES = section("dac", "audio"), section("t5", "text"), section("whisper", "audio")
SMALL = "[layout]\nrows_per_shard = 2\n"
ARRAYS = hnp.arrays(st.sampled_from([np.uint8, np.int64, np.float32, np.bool_]), hnp.array_shapes(min_side=0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("devices"), "dac", "t5", "whisper")


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> Callable[..., Any]:
    def made(text: str, *overrides: str) -> Any:
        corpus.config(SPEECH + text)
        return load_config(corpus.folder / "config.toml", overrides=[f'run.cache_root="{tmp_path}"', *overrides])

    return made


def test_devices_make_the_same_bytes(config: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for root, devices in (("a", '"cpu"'), ("b", '["cpu", "cpu"]')):
        text = CODES + WORDS + STATES + SMALL
        changed = f'run.cache_root="{tmp_path / root}"', f"run.devices={devices}", "run.num_workers=3"
        cache = open_cache(build(config(text, *changed), Options(progress=False)).cache)
        found.append((shard_bytes(Path(str(cache.place))), cache.constants, cache.metadata["made_with"]))
    assert found[0] == found[1]
    assert found[0][2]["torch"] == torch.__version__
    assert "device" in found[0][2]


@given(st.lists(st.lists(ARRAYS, max_size=4), min_size=1, max_size=4))
def test_arrays_arrive_as_they_were(messages: list[list[Any]]) -> None:
    with ThreadPoolExecutor(2) as threads:  # each waits for the memory of the other
        pair = [*threads.map(ArrayChannel, [Connection(end.detach()) for end in socket.socketpair()])]
    for message in messages:
        for sender, receiver in (pair, pair[::-1]):
            sender.send(("made", message))
            what, found = receiver.recv()
            assert what == "made"
            for one, other in zip(found, message, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
    for channel in pair:
        channel.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('run.devices=["gpu0"]', "devices has 'gpu0', wanted names as"),
        ("run.devices=[]", "devices is empty"),
        ('run.gres="gpu 1"', "gres is 'gpu 1'"),
        ("run.num_gpus=-1", "num_gpus is -1"),
        ('run.devices=["cuda:7"]', r"run.devices names cuda:7, and torch sees .* here"),
    ],
)
def test_what_is_no_device_is_refused(config: Callable[..., Any], line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_here(config(CODES, line))


def test_a_batch_that_does_not_fit_is_refused_with_the_one_that_does(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(self: OpenModel, batch: Any, rows: Any) -> Any:
        if len(rows) > 3:  # as many as the built-in inputs are
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return real(self, batch, rows)

    real = OpenModel.made
    monkeypatch.setattr(OpenModel, "made", made)
    with pytest.raises(BuildError, match=r"4 longest .* \(CUDA out of memory.*2 fit: set batch = 2") as caught:
        build_here(config(section("whisper", "audio", "batch = 4")))
    assert caught.value.code == "FB312"
    assert not [*tmp_path.rglob("*.tdz")]


def test_what_a_model_raises_names_its_samples(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: OpenModel, batch: Any, rows: Any) -> Any:
        if rows == [17_920]:
            raise RuntimeError("CUDA error: device lost")
        return real(self, batch, rows)

    real = OpenModel.made
    monkeypatch.setattr(OpenModel, "made", made)
    monkeypatch.setattr("forebay.preprocess.model_trial.ModelTrials.require_room", lambda _: None)
    with pytest.raises(BuildError, match=r"model.dac: RuntimeError at the batch of '1' and 0 more: CUDA error"):
        build_here(config(CODES + SMALL))


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (1_000, r"its weights take 516 kB in float32, and cpu has 1 kB free"),
        (
            8_000_000,
            r"5 longest .*\(2 processes need .* more, each .* for a batch and .* for weights, and 8 MB is free\)",
        ),
    ],
)
def test_memory_of_the_machine_is_asked_before_the_first_shard(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, free: int, message: str
) -> None:
    for module in ("steps.model.open_model", "preprocess.model_trial"):
        monkeypatch.setattr(f"forebay.{module}.free_bytes", lambda _: free)
    monkeypatch.setattr("forebay.preprocess.model_trial.peak_since", lambda *_: 5_000_000)
    opened_model.cache_clear()
    with pytest.raises(BuildError, match=message):
        build_here(config(STATES + SMALL, "run.num_workers=2"))


def test_cgroups_bound_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "cgroup" / "job" / "step"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable: 80 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/job/step\n")
    monkeypatch.setattr(free_memory, "_PROC", tmp_path)
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path / "cgroup")
    assert free_memory.free_bytes("cpu") == 80 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("9\n")
    for name, value in (("max", "5000"), ("current", "4000"), ("stat", "anon 7\ninactive_file 30\n")):
        (group.parent / f"memory.{name}").write_text(value)
    assert free_memory.free_bytes("cpu") == 1030


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(-8, 8, width=32)), st.floats(0, 1))
def test_numbers_of_another_machine_lie_within_the_promise(values: Any, by: float) -> None:
    runs = [{"states": values, "codes": np.arange(9)}], [{"states": values + np.float32(by), "codes": np.arange(9)}]
    promise = promise_of(*runs)
    assert (promise["within"] == 0) == (in_words(promise) == "equal")
    kept = [json.loads(json.dumps({"promise": promise, "sample": sample_of(run)})) for run in runs]
    assert beyond_promise(kept[0], kept[1]) is None
    exact = {**kept[0], "promise": promise_of(runs[0], runs[0])}
    assert (beyond_promise(exact, kept[1]) is None) == (
        not promise["within"] or kept[0] == kept[1] | {"promise": promise}
    )
    flipped = {"sample": {**kept[0]["sample"], "codes": [*range(8), 5]}}
    assert beyond_promise(kept[0], flipped) == "codes has 1 other codes of 9, and 0 of 9 are promised"


@pytest.mark.parametrize("by", [1e-9, 1e-3])
def test_a_build_goes_on_only_where_numbers_are_within_the_promise(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    def made(self: OpenModel, batch: Any, rows: Any) -> Any:
        return [{name: array + np.float32(by) for name, array in of_one.items()} for of_one in real(self, batch, rows)]

    real, text = OpenModel.made, WORDS + "[layout]\nrows_per_shard = 2\n"
    build_here(config(text), part=(0, 2))
    _probed.cache_clear()
    monkeypatch.setattr(OpenModel, "made", made)
    try:
        if by < 1e-6:
            assert build_here(config(text), part=(1, 2)).sealed
        else:
            with pytest.raises(
                BuildError, match=r"model.t5: t5 differs by 0.001, and [\d.]+e-0\d is promised.*AVX"
            ) as caught:
                build_here(config(text), part=(1, 2))
            assert caught.value.code == "FB305"
    finally:
        _probed.cache_clear()


def test_a_later_machine_is_held_to_the_first_one(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Any) -> None:
        raise BuildError("stopped")

    def another(*outputs: Any) -> Any:
        return {name: [value + 1 for value in values] for name, values in sample_of(*outputs).items()}

    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.model_trial.ModelTrials.require_room", stop)
        with pytest.raises(BuildError, match="stopped"):
            build_here(config(WORDS))
    _probed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.model_group.sample_of", another)
        with pytest.raises(BuildError, match=r"t5 differs by 1, .* where the build began"):
            build_here(config(WORDS))
    _probed.cache_clear()
    assert build_here(config(WORDS)).sealed


@pytest.mark.parametrize("part", [None, (0, 2)])
@pytest.mark.parametrize("by", [1e-9, 1.0])
@pytest.mark.few
def test_shards_of_another_machine_are_linked_where_it_keeps_the_promise(
    config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: float,
    part: tuple[int, int] | None,
) -> None:
    def another(*outputs: Any) -> Any:
        return {name: [value + by for value in values] for name, values in sample_of(*outputs).items()}

    first = build_here(config(WORDS + SMALL), part=part)  # of one part: the folder of a build that is not sealed
    _probed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.model_group.sample_of", another)
        again = build_here(config(WORDS + WORDS.replace('name = "t5"', 'name = "more"') + SMALL))
    _probed.cache_clear()
    of_model = 2 if part is None else 1
    assert first.shards_written - again.shards_linked == (0 if by < 1 else of_model)
    said = r"no shard of model.t5 is linked from .*: t5 differs by 1, and .* is promised: .*AVX.* there, .*AVX.* here"
    assert bool(re.search(said, caplog.text)) == (by == 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; its twin on the CPU stands first")
def test_a_gpu_makes_the_same_bytes_again(config: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for root in "ab":
        changed = f'run.cache_root="{tmp_path / root}"', 'run.devices=["cuda:0"]', "run.num_workers=2"
        cache = open_cache(build(config(CODES + WORDS + SMALL, *changed), Options(progress=False)).cache)
        found.append(shard_bytes(Path(str(cache.place))))
        assert "cuda" in cache.metadata["made_with"]
    assert found[0] == found[1]


@pytest.mark.wide
def test_a_dry_run_says_what_the_whole_costs(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corpus: Corpus
) -> None:
    built = build_here(config(CODES + STATES), dry_run=True)
    for cost, size in zip(built.models, (339, 5 * 1500 * 32 * 2), strict=True):
        assert (cost.samples_tried, cost.samples, cost.total_bytes) == (5, 5, size)
        assert cost.break_even_bytes_s == pytest.approx(cost.bytes_a_sample / cost.ms_a_sample * 1000)
        assert cost.hours > 0
    assert [[*cost.ms_by_batch] for cost in built.models] == [[1, 2, 4]] * 2
    assert built.models[0].batch == 1
    assert built.estimated_bytes is not None
    assert built.estimated_bytes > sum(cost.total_bytes for cost in built.models)
    lines = "\n".join(built.lines())
    assert "model.whisper: 5 samples tried on" in lines
    assert "96 kB a sample, 480 kB for 5" in lines
    assert "model.whisper: ms of its longest samples in batches of 1: " in lines
    speeds = dict(zip((1, 2, 4, 8), (8.0, 4.0, 2.0, 1.99), strict=True))
    tried = [replace(built.models[0], batch=batch, ms_by_batch=speeds) for batch in (1, 4, 8, 64)]
    assert [cost.proposed_batch for cost in tried] == [4, 4, 8, 4]
    assert "batch = 4 in its section is fastest" in [*tried[0].lines()][-1]
    assert "8, as it is, is as good as any" in [*tried[2].lines()][-1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for is_dry in (True, False):  # of outputs of one shape the build itself knows it
        with pytest.raises(BuildError, match=r"what models give takes about 480 kB, and .* has 1 kB free") as caught:
            build_here(config(CODES + STATES), dry_run=is_dry)
        assert caught.value.code == "FB307"


def test_ray_gets_the_gpus_of_tasks_that_run_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeRay:
        """Answers as Ray does where it is asked; notes the options of every task."""

        asked: ClassVar[list[Any]] = []

        def __getattr__(self, name: str) -> Any:
            return {"wait": lambda running, timeout: (running[:1], []), "get": self._get, "exceptions": self}.get(
                name, lambda *_, **__: self
            )

        def options(self, **options: Any) -> Any:
            self.asked.append(options)
            return SimpleNamespace(remote=lambda *_: object())

        def __call__(self, _: Any) -> Any:
            return self

        def _get(self, _: Any) -> bytes:
            return pickle.dumps((socket.gethostname(), "done", 1))

        RayError = Exception

    ray = Ray(gpus={"dac": 0.25})
    ray._ray = FakeRay()
    monkeypatch.setattr(ray, "_room", lambda: 1)
    tasks = [SimpleNamespace(group=name) for name in ("text", "dac")]
    assert [value for _, value in ray.run(len, tasks)] == [1, 1]
    assert FakeRay.asked == [{"num_gpus": 0}, {"num_gpus": 0.25}]


class Nodes(HerePool):
    """Nodes of a cluster, whose devices give other numbers than the driver's CPU."""

    is_at_work: ClassVar[bool] = False
    seen: ClassVar[list[str]] = []

    def __init__(self, *_: Any, gpus: Any) -> None:
        super().__init__()

    def run(self, function: Any, tasks: Any) -> Any:
        for task in tasks:
            self.seen.append(f"{task.group} {getattr(function, '__name__', 'shard')}")
            Nodes.is_at_work = True
            yield task, function(task)
            Nodes.is_at_work = False


@pytest.mark.parametrize("num_gpus", [0, 0.5])
def test_nodes_with_gpus_are_held_to_the_first_of_them(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_gpus: float
) -> None:
    def made(self: OpenModel, batch: Any, rows: Any) -> Any:
        by = np.float32(Nodes.is_at_work and num_gpus)
        return [{name: array + by for name, array in of_one.items()} for of_one in real(self, batch, rows)]

    real = OpenModel.made
    monkeypatch.setattr(OpenModel, "made", made)
    monkeypatch.setattr("forebay.preprocess.device_process.device", lambda: None)  # there is no GPU here
    monkeypatch.setattr("forebay.preprocess.pipeline.Ray", Nodes)
    monkeypatch.setattr(Nodes, "seen", [])
    for cached in (_probed, ray_runner._probe, ray_runner._constants):
        cached.cache_clear()
    assert build_here(config(WORDS, f"run.num_gpus={num_gpus}"), runner="ray").sealed
    begin(is_tried_again=False)
    _probed.cache_clear()
    assert ("t5 _measure_on_gpu" in Nodes.seen) == (num_gpus > 0)
    assert {"t5 shard", "audio shard", "text shard"} <= {*Nodes.seen}
