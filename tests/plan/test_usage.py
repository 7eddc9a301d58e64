"""Samples used, counted from the order, against the batches that loaders really handed out; and the log of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import ForebayError
from forebay.inspect.command import usage_facts
from forebay.plan.cursor import LoaderState
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.names import plan_key
from forebay.plan.plan_usage import Population, Usage, UsageCounter, expected_shares, population, read_usage, unpack_ids
from forebay.store.cache import open_cache
from forebay.store.source import SourceUnion
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.run import train
from forebay.train.loop.usage_log import UsageLog
from tests.store_factory import make_cache
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.tiny import config_of, real_loader, real_loader_model

NUM_SAMPLES = 53
LANGUAGES = ["de", "fr", "xx"]
SHARD_SIZE = 10


class LabelledSource(FakeSource):
    """Samples with a language, in shards of ten; nothing is of language `xx`."""

    def __init__(self) -> None:
        lengths = np.random.default_rng(5).integers(100, 7000, NUM_SAMPLES).tolist()
        super().__init__(lengths, features="waveform", prompt=None, dtype="int16")
        self.codes = np.random.default_rng(6).integers(0, 2, NUM_SAMPLES).astype(np.int32)

    @property
    def slots(self) -> np.ndarray[Any, Any]:
        index = np.arange(NUM_SAMPLES)
        return index // SHARD_SIZE << 32 | index % SHARD_SIZE

    def categories(self, name: str) -> tuple[list[str], np.ndarray[Any, Any]] | None:
        return (LANGUAGES, self.codes) if name == "language" else None


SOURCE = LabelledSource()


def make_loaders(*, world_size: int = 1, tail: str = "short", lockstep: int = 2, seed: int = 7) -> list[Loader]:
    plan_settings = BucketConfig(edges_s=(0.1, 0.2, 0.4), batch_size=4, lockstep=lockstep, tail=tail)  # type: ignore[arg-type]
    plan = bucket_plan(SOURCE.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=plan_settings)
    key = plan_key(SOURCE.key, plan_settings)
    return [
        loader_of(
            SOURCE, plan, plan_key=key, seed=seed, dp_rank=rank, dp_world_size=world_size, num_threads=0, prefetch=1
        )
        for rank in range(world_size)
    ]


class Run:
    """Ranks in step; keeps, beside them, the samples of every batch of weight 1 that they handed out."""

    def __init__(self, loaders: list[Loader], state: dict[str, Any] | None = None) -> None:
        self.loaders = loaders
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        self.handed_out: list[int] = []
        self._collated: list[list[int]] = []
        for loader in loaders:
            self._watch(loader)
        self._batches = [iter(loader) for loader in loaders]

    def _watch(self, loader: Loader) -> None:
        fill = loader._fill

        def remember(work: Any) -> Any:
            self._collated.append(work.indices if work.step.turn.weight else [])
            return fill(work)

        loader._fill = remember  # type: ignore[method-assign]

    def step(self) -> None:
        for rank, loader in enumerate(self.loaders):
            self._collated.clear()
            try:
                next(self._batches[rank])
            except StopIteration:
                self._batches[rank] = iter(loader)
                next(self._batches[rank])
            (indices,) = self._collated  # no threads: filled when asked for
            self.handed_out += indices

    @property
    def state(self) -> LoaderState:
        return self.loaders[0].state


def assert_counts(usage: Usage, handed_out: list[int]) -> None:
    counts = np.bincount(handed_out, minlength=NUM_SAMPLES)
    assert usage.samples == len(handed_out)
    assert usage.counts["language"].tolist() == np.bincount(SOURCE.codes, counts, len(LANGUAGES)).tolist()
    assert usage.shards.tolist() == np.bincount(np.arange(NUM_SAMPLES) // SHARD_SIZE, counts).tolist()
    assert usage.used.tolist() == np.flatnonzero(counts).tolist()


@settings(max_examples=settings().max_examples // 2)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=3),
    tail=st.sampled_from(["split", "short", "drop", "pad"]),
    lockstep=st.integers(1, 3),
)
def test_counts_are_those_of_the_batches_that_all_ranks_were_handed(
    worlds: list[tuple[int, int]], tail: str, lockstep: int
) -> None:
    """A run of several world sizes, one after the other, each with a counter of its own as after a resume."""
    state = None
    epochs: dict[int, Counter[int]] = {}
    for world_size, steps in worlds:
        run = Run(make_loaders(world_size=world_size, tail=tail, lockstep=lockstep), state)
        counter = UsageCounter(population(SOURCE), run.loaders[0].plan, dp_world_size=world_size, with_ids=True)
        for stretch in range(3):
            begin, before = run.state, len(run.handed_out)
            repeats = 0
            for _ in range(steps if stretch else 1):
                at, epoch = len(run.handed_out), run.state.epoch
                run.step()
                seen = epochs.setdefault(epoch, Counter())
                for index in run.handed_out[at:]:
                    repeats += seen[index] > 0
                    seen[index] += 1
            usage = counter.count(begin, run.state)
            assert_counts(usage, run.handed_out[before:])
            assert usage.repeats == repeats
        state = run.loaders[0].state_dict()


def test_expected_shares_are_those_of_the_data_or_of_the_mixture() -> None:
    people = population(SOURCE)
    plan = make_loaders()[0].plan
    there = np.bincount(SOURCE.codes, minlength=3) / NUM_SAMPLES
    assert expected_shares(people, plan, "language") == pytest.approx(there)

    class Lifted:
        """A mixture in which a sample of `fr` comes three times as often."""

        def sample_weights(self, end: int = 0) -> np.ndarray[Any, Any]:
            return np.where(SOURCE.codes == 1, 3.0, 1.0)

    lifted = there * [1, 3, 1]
    assert expected_shares(people, Lifted(), "language") == pytest.approx(lifted / lifted.sum())  # type: ignore[arg-type]


def test_a_source_without_names_and_shards_is_counted_too() -> None:
    bare = FakeSource([5, 9, 3], features="waveform", prompt=None)
    people = population(bare)
    assert people == Population(num_samples=3, names={}, codes={}, shards=None)
    assert people.shard_sizes.tolist() == []


def test_population_of_a_cache_is_that_of_its_row_table(tmp_path: Path) -> None:
    cache = open_cache(make_cache(tmp_path, num_samples=11, failed_rows=(1, 5)))
    people = population(cache)
    for name in ("language", "source"):
        rows = [people.names[name][code] for code in people.codes[name]]
        assert rows == [value or "unknown" for value in cache.samples[name].to_pylist()]
    assert people.names["language"][0] == "unknown"  # "" stands first
    assert people.shard_sizes.tolist() == np.bincount(np.asarray(cache.slots) >> 32).tolist()
    assert cache.categories("dialect") is None


# The log


def one_rank_sum(values: Any) -> list[int]:
    return [int(value) for value in values]


def log_of(run: Run, path: Path, *, step: int = 0, with_ids: bool = True) -> UsageLog:
    return UsageLog(path, run.loaders[0], step=step, sum_over_ranks=one_rank_sum, with_ids=with_ids)


def walk(run: Run, log: UsageLog, steps: range, *, every: int) -> None:
    for step in steps:
        run.step()
        if step % every == 0:
            log.record(step)


def test_lines_add_up_to_what_was_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "data_usage.jsonl"
    run = Run(make_loaders())
    walk(run, log_of(run, path), range(1, 31), every=10)
    head, lines = read_usage(path)
    loader = run.loaders[0]
    assert (head["plan_key"], head["seed"], head["num_samples"]) == (loader.plan_key, 7, NUM_SAMPLES)
    assert head["languages"]["xx"] == {"samples": 0, "expected": 0.0}
    assert [(line["from_step"], line["step"]) for line in lines] == [(0, 10), (10, 20), (20, 30)]
    counts = np.bincount(run.handed_out, minlength=NUM_SAMPLES)
    languages = np.bincount(SOURCE.codes, counts, 3)
    for i, name in enumerate(LANGUAGES):
        assert sum(line["languages"][name]["samples"] for line in lines) == languages[i]
        assert lines[-1]["languages"][name]["total"] == languages[i]
        assert lines[-1]["languages"][name]["share"] == pytest.approx(languages[i] / counts.sum(), abs=1e-6)
    used = set().union(*(unpack_ids(line["ids"]).tolist() for line in lines))
    assert used == set(run.handed_out)
    report = loader.report()
    assert sum(line["frames"] for line in lines) == report["frames"]
    assert sum(line["padded_frames"] for line in lines) == report["padded_frames"]


def test_ranks_say_together_what_they_padded(tmp_path: Path) -> None:
    run = Run(make_loaders(world_size=3))
    logs: list[UsageLog] = []
    said: list[list[int]] = []

    def sum_over_ranks(values: Any) -> list[int]:
        said.append(list(values))
        return [sum(column) for column in zip(*said, strict=True)]

    for loader in run.loaders:
        logs.append(UsageLog(tmp_path / "u.jsonl", loader, step=0, sum_over_ranks=sum_over_ranks))
    for _ in range(4):
        run.step()
    for log in reversed(logs):  # rank 0 last: by then the others have said theirs
        log.record(4)
    _, [line] = read_usage(tmp_path / "u.jsonl")
    reports = [loader.report() for loader in run.loaders]
    assert line["frames"] == sum(report["frames"] for report in reports)
    assert line["padded_frames"] == sum(report["padded_frames"] for report in reports)
    assert line["samples"] == len(run.handed_out) == sum(report["samples"] for report in reports)
    assert line["dp_world_size"] == 3
    assert "ids" not in line


@settings(max_examples=settings().max_examples // 4)
@given(stop=st.integers(1, 5), lost=st.integers(0, 12), world_size=st.integers(1, 4))
def test_a_resumed_run_counts_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, stop: int, lost: int, world_size: int
) -> None:
    """A run goes `lost` steps beyond its checkpoint and dies; another world size goes on, as if without a crash."""
    path = tmp_path_factory.mktemp("usage") / "u.jsonl"
    saved = stop * 3
    run = Run(make_loaders())
    log = log_of(run, path)
    walk(run, log, range(1, saved + 1), every=3)
    state, kept = run.loaders[0].state_dict(), list(run.handed_out)
    walk(run, log, range(saved + 1, saved + 1 + lost), every=2)
    with open(path, "ab") as file:
        file.write(b'{"step": 99, "from')  # the crash

    again = Run(make_loaders(world_size=world_size), state)
    log = log_of(again, path, step=saved)
    walk(again, log, range(saved + 1, saved + 7), every=3)
    _, lines = read_usage(path)
    assert [(line["from_step"], line["step"]) for line in lines] == [
        (step, step + 3) for step in range(0, saved + 6, 3)
    ]
    handed_out = kept + again.handed_out
    assert sum(line["samples"] for line in lines) == len(handed_out)
    totals = np.bincount(SOURCE.codes[handed_out], minlength=3).tolist()
    assert [lines[-1]["languages"][name]["total"] for name in LANGUAGES] == totals


@pytest.mark.parametrize("damage", ["missing", "other run", "no line at the step", "not a log"])
def test_a_log_that_does_not_lead_to_the_checkpoint_begins_there(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "u.jsonl"
    run = Run(make_loaders(seed=8 if damage == "other run" else 7))
    walk(run, log_of(run, path), range(1, 7), every=6 if damage != "no line at the step" else 4)
    if damage == "missing":
        path.unlink()
    elif damage == "not a log":
        path.write_text("hello\n")
    run = Run(make_loaders())
    for _ in range(6):
        run.step()
    again = Run(make_loaders(), run.loaders[0].state_dict())
    walk(again, log_of(again, path, step=6), range(7, 9), every=2)
    head, lines = read_usage(path)
    assert "the usage log begins at step 6" in caplog.text
    assert head["from_step"] == 6
    assert [(line["from_step"], line["step"]) for line in lines] == [(6, 8)]


def test_a_new_run_replaces_the_log_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    for seed in (1, 2):
        run = Run(make_loaders(seed=seed))
        walk(run, log_of(run, path, with_ids=False), range(1, 5), every=2)
        head, lines = read_usage(path)
        assert head["seed"] == seed
        assert [line["step"] for line in lines] == [2, 4]


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "u.jsonl"
    run = Run(make_loaders())
    log = log_of(run, path)
    log.record(0)
    assert not path.exists()
    run.step()
    log.record(1)
    log.record(1)
    assert len(read_usage(path)[1]) == 1


def test_a_log_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    run = Run(make_loaders())
    log = log_of(run, tmp_path / "logs" / "u.jsonl")
    run.step()
    with pytest.raises(ForebayError, match=r"cannot write the usage log .*u\.jsonl.*train\.usage_every = 0"):
        log.record(1)


def test_many_names_are_counted_without_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.train.loop.usage_log._MAX_COMPARED", 2)
    path = tmp_path / "u.jsonl"
    run = Run(make_loaders())
    walk(run, log_of(run, path), range(1, 5), every=4)
    _, [line] = read_usage(path)
    counts = np.bincount(SOURCE.codes[run.handed_out], minlength=3)
    assert line["languages"] == {n: {"samples": int(c)} for n, c in zip(LANGUAGES, counts, strict=True) if c}
    assert json.loads(path.read_bytes().splitlines()[0])["languages"].keys() == set(LANGUAGES)


def test_the_loop_logs_every_n_steps_at_checkpoints_and_at_the_end(tmp_path: Path) -> None:
    """Stopped at step 4, after which the log is as if it had not been; the epoch has 8 micro-batches."""
    model = real_loader_model(tmp_path / "model")

    def run(max_steps: int, *, resume: bool, **changes: Any) -> list[dict[str, Any]]:
        config = config_of(
            tmp_path,
            model=model,
            model_type="qwen3_asr",
            max_steps=max_steps,
            learning_rate=1e-4,
            usage_ids=True,
            **changes,
        )
        train(config, loader=real_loader(num_threads=0), source_kind="cache", resume=resume)
        return read_usage(run_folder(config) / "logs" / "data_usage.jsonl")[1]

    lines = run(4, resume=False, usage_every=3)
    assert [line["step"] for line in lines] == [3, 4]
    lines = run(9, resume=True, usage_every=3, checkpoint_every=5)
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 9]
    assert lines[-1]["to"] == {"epoch": 1, "position": 1}
    first_epoch = real_loader().plan.order(1, 0).batches(range(8))
    assert set(unpack_ids(lines[0]["ids"]).tolist()) == set(np.concatenate(first_epoch[:3]).tolist())
    assert sum(line["batches"] for line in lines) == 9


def test_no_log_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    model = real_loader_model(tmp_path / "model")
    config = config_of(tmp_path, model=model, model_type="qwen3_asr", max_steps=1, usage_every=0)
    train(config, loader=real_loader(num_threads=0), source_kind="cache")
    assert not (run_folder(config) / "logs" / "data_usage.jsonl").exists()


def test_parts_of_a_mixture_are_counted_against_its_weights(tmp_path: Path) -> None:
    """Two caches of 6 and 12 samples, weighed 3 to 1; languages follow from the parts that they are in."""
    folders = [make_cache(tmp_path, num_samples=6 * n, features="waveform", seed=n) for n in (1, 2)]
    caches = [open_cache(folder) for folder in folders]
    union = SourceUnion(caches, ["small", "large"])
    plan_settings = BucketConfig(edges_s=(2.0,), batch_size=4, lockstep=1)
    plan = bucket_plan(union.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=plan_settings)
    mixture = mixture_plan(plan, union.source_of, names=union.names, weights=[3, 1])
    loader = loader_of(union, mixture, plan_key="m", seed=3, num_threads=0)
    log = UsageLog(tmp_path / "u.jsonl", loader, step=0, sum_over_ranks=one_rank_sum, with_ids=True)
    given: list[int] = []
    for position, _ in zip(range(len(loader)), loader, strict=True):
        given += mixture.order(3, 0).batch(position).tolist()
    log.record(len(loader))
    head, [line] = read_usage(tmp_path / "u.jsonl")
    small = sum(index < 6 for index in given)
    assert line["parts"]["small"] == {
        "samples": small,
        "total": small,
        "share": round(small / len(given), 6),
        "expected": 0.75,
    }
    assert line["repeats"] == len(given) - len(set(given)) > 0
    assert [described["key"] for described in head["caches"]] == [cache.key for cache in caches]
    languages = [[name or "unknown" for name in cache.samples["language"].to_pylist()] for cache in caches]
    for name, row in line["languages"].items():
        expected = 0.75 * languages[0].count(name) / 6 + 0.25 * languages[1].count(name) / 12
        assert row["expected"] == pytest.approx(expected, abs=1e-6)
    never = usage_facts(tmp_path / "u.jsonl")["never_used"]
    ids = [sample_id for cache in caches for sample_id in cache.samples["sample_id"].to_pylist()]
    assert never["sample_ids"] == [ids[i] for i in range(18) if i not in given]
