"""`[filter]` from a config to batches: which samples are visited, with a cache and without, over ranks and resumes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from forebay.cli.program import main
from forebay.config import Config
from forebay.config.plan import BucketConfig
from forebay.errors import CacheNotFoundError, ConfigError, ResumeError
from forebay.inspect.bucket_manifests import bucket_manifests
from forebay.inspect.command import usage_facts
from forebay.inspect.facts import plans_of, read_pack, read_plan
from forebay.plan.disk import read_metadata
from forebay.plan.make import Planned, make_plan, plan_of, samples_of
from forebay.plan.names import state_key, why_differ
from forebay.preprocess.build_report import BuildReport
from forebay.store.cache import Cache, open_cache
from forebay.store.key import digest
from forebay.store.selection import Selection
from forebay.store.source import SourceUnion
from forebay.train import CachedVLDataset, PlanSampler, SampleDataset, make_loader
from forebay.train.loader import Loader
from forebay.train.loop.usage_log import UsageLog
from forebay.train.select import select
from tests.flat_constants import flat
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo_corpus
from tests.train.fake_source import FakeSource

OFF = 'loader.cache="off"'
FRENCH = "filter.where=language == 'fr'"
NUM_FRENCH = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Built once; no test changes it."""
    found = speech_corpus(tmp_path_factory.mktemp("speech"))
    build_here(found.config())
    return found


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    found = photo_corpus(tmp_path_factory.mktemp("photos"))
    build_here(found.config())
    return found


def french(corpus: Corpus) -> set[str]:
    return {str(row["sample_id"]) for row in corpus.rows if row["language"] == "fr"}


def visited(config: Config, **options: Any) -> list[str]:
    return ids_of(make_loader(config, with_ids=True, **options))


def ids_of(loader: Loader) -> list[str]:
    return [sample_id for _, ids in loader for sample_id in ids]


def listed(tmp_path: Path, name: str, ids: Sequence[str]) -> str:
    (tmp_path / name).write_text("".join(f"{sample_id}\n" for sample_id in ids))
    return f'filter.{name}="{tmp_path / name}"'


def test_an_epoch_is_of_the_samples_that_are_left(corpus: Corpus, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    assert sorted(visited(corpus.config(FRENCH))) == sorted(french(corpus))
    some = sorted(french(corpus))[:3]
    overrides = [FRENCH, listed(tmp_path, "drop_ids", [*some, "nobody"])]
    caplog.clear()
    assert sorted(visited(corpus.config(*overrides))) == sorted(french(corpus) - set(some))
    said = f"{NUM_FRENCH - 3} of 17 samples (where language == 'fr' keeps {NUM_FRENCH}, drop_ids drops 3)"
    assert any(said in message for message in caplog.messages)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"filter.drop_ids: 1 ids are of no sample of {next(corpus.root.glob('tones-*'))}: 'nobody'"
    ]
    assert sorted(visited(corpus.config(listed(tmp_path, "ids", some)))) == some
    quota = visited(corpus.config("filter.quota={language=2}"))
    assert len(quota) == 4
    assert set(quota) < set(visited(corpus.config("filter.quota={language=5}")))


def test_the_same_samples_come_without_the_cache(corpus: Corpus, tmp_path: Path) -> None:
    overrides = ["filter.where=language == 'fr' and duration_s < 0.3", "filter.quota={source=3}"]
    overrides.append(listed(tmp_path, "drop_ids", sorted(french(corpus))[:1]))
    cached, online = (make_loader(corpus.config(*overrides, *more), with_ids=True) for more in ([], [OFF]))
    assert cached.plan_key == online.plan_key
    assert isinstance(online.source, Selection)
    batches = iter(cached)
    next(batches)
    online.load_state_dict(cached.state_dict())
    assert [ids for _, ids in batches] == [ids for _, ids in online]
    texts = "filter.where=text in ('text of a1', 'text of b2')"
    assert sorted(visited(corpus.config(texts))) == ["a1", "b2"]
    assert len(visited(corpus.config("filter.where=index < 3"))) == 3
    with pytest.raises(ConfigError, match=r"'index' at character 1 is no column; .* run: forebay preprocess CONFIG"):
        make_loader(corpus.config("filter.where=index < 3", OFF))


def test_a_sample_that_was_left_out_stands_in_for_none(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.add_tar("a.tar", [f"a{i}" for i in range(12)], broken={f"a{i}": b"no audio" for i in (3, 7)})
    kept = [f"a{i}" for i in range(12) if i not in (4, 8)]  # those behind the bad ones
    source = select(corpus.config(listed(tmp_path, "ids", kept), OFF, "run.max_failed_share=1.0"))
    read = [source.read_one(index) for index in range(len(source))]
    assert [kept[own] for _, own in read] == ["a5" if i == "a3" else "a9" if i == "a7" else i for i in kept]
    found = [len(sample["waveform"]) for sample, _ in read]
    assert found == [len(corpus.audio["a5" if i == "a3" else "a9" if i == "a7" else i]) for i in kept]


def test_plans_are_kept_apart_and_those_without_a_filter_stay(corpus: Corpus) -> None:
    plain = plan_of(corpus.config(), select(corpus.config()))
    assert plain.folder is not None
    before = {path.name: path.read_bytes() for path in plain.folder.iterdir()}
    assert "filter" not in read_metadata(plain.folder)
    assert len(plain.key) == 64
    config = corpus.config(FRENCH)
    chosen = plan_of(config, select(config))
    assert chosen.folder not in (None, plain.folder)
    assert chosen.folder is not None
    assert plan_of(config, select(config)).folder == chosen.folder
    assert {path.name: path.read_bytes() for path in plain.folder.iterdir()} == before
    cache = open_cache(next(corpus.root.glob("tones-*")))
    note = read_metadata(chosen.folder)["filter"]
    assert (note["of"], "selected" in note) == (cache.key, False)
    assert note["said"] == f"{NUM_FRENCH} of 17 samples (where language == 'fr' keeps {NUM_FRENCH})"
    told = {plan["folder"]: plan.get("filter") for plan in plans_of(cache.key, [corpus.root])}
    assert told[str(plain.folder)] is None
    assert told[str(chosen.folder)] == note["said"]
    assert read_plan(chosen.folder)["cache_keys"] == [cache.key]


def test_no_key_of_a_cache_or_of_a_plan_without_a_filter_moved(corpus: Corpus) -> None:
    """The state key as it was before there were filters."""
    source = select(corpus.config())
    settings_ = corpus.config().plan
    assert isinstance(settings_, BucketConfig)
    planned = plan_of(corpus.config(), source, keep=False)
    parts = {"recipe": digest([source.recipe_key]), "sample_ids": digest([source.ids_digest()])}
    from forebay.plan.disk import plan_content

    assert planned.key == state_key(settings_, **parts, content=plan_content(planned.plan, settings_))  # type: ignore[arg-type]
    assert select(corpus.config(FRENCH)).recipe_key == source.recipe_key
    report = build_here(corpus.config(FRENCH))
    assert report.already_sealed


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_another_filter_is_refused_by_its_name(corpus: Corpus, tmp_path: Path, *, shuffle: bool) -> None:
    def loader(*overrides: str) -> Loader:
        return make_loader(corpus.config(*overrides), shuffle=shuffle)

    some = sorted(french(corpus))
    same = loader(listed(tmp_path, "drop_ids", some[:2]))
    states = [loader().state_dict(), loader(FRENCH).state_dict(), same.state_dict()]
    others = [loader(listed(tmp_path, "drop_ids", some[:3])), loader("filter.quota={language=3}")]
    for state in states:
        for other in others:
            with pytest.raises(
                ResumeError,
                match=r"loader state: .* \[filter\] is another one \(key \w+ in the state, \w+ here\): its where",
            ):
                other.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"\[filter\] is another one"):
        loader().load_state_dict(states[1])
    loader(listed(tmp_path, "drop_ids", [*some[1::-1], ""])).load_state_dict(states[2])
    with pytest.raises(ResumeError, match=r"the settings of \[plan\] or a mixture changed since"):
        loader(FRENCH, "plan.batch_size=3").load_state_dict(states[1])


def test_why_keys_differ_names_the_filter_before_what_follows_from_it() -> None:
    plain, one, two = "a" * 16 + "b" * 16 + "c" * 32, "a" * 16 + "b" * 16 + "d" * 48, "a" * 16 + "b" * 16 + "e" * 48
    for stored, wanted in ((plain, one), (one, plain), (one, two)):
        assert why_differ(stored, wanted).startswith("[filter] is another one")
    assert "the recipe" in why_differ(one, "a" * 16 + "f" * 16 + one[32:])


@given(
    taken=st.lists(st.booleans(), min_size=30, max_size=30).filter(any),
    world=st.integers(1, 3),
    stop=st.integers(0, 6),
    later=st.integers(1, 3),
)
def test_ranks_and_resumes_visit_exactly_the_samples_that_are_left(
    taken: list[bool], world: int, stop: int, later: int
) -> None:
    source = FakeSource([10 + n % 7 for n in range(30)])
    places = np.flatnonzero(taken)
    chosen = Selection(source, places, key="1" * 64, filter_key="2" * 64)
    config = BucketConfig(k=2, batch_size=3, lockstep=1, tail="short")
    source.constants = flat(**source.constants, sample_rate_hz=16_000)
    chosen.constants = source.constants
    planned = Planned(plan=make_plan(samples_of(chosen), config), key="0" * 64)

    def samplers(number: int) -> list[PlanSampler]:
        return [PlanSampler(planned, seed=1, dp_rank=rank, dp_world_size=number) for rank in range(number)]

    seen: Counter[int] = Counter()
    before = samplers(world)
    walks = [iter(sampler) for sampler in before]
    count = planned.plan.num_batches
    for _ in range(min(stop, (count - 1) // world)):
        for walk in walks:
            seen.update(next(walk))
    after = samplers(later)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    left = [list(sampler) for sampler in after]
    position = before[0].state_dict()["position"]
    for step in range(len(left[0])):
        for rank in range(later):
            if position + step * later + rank < count:  # the rest only fills the last step
                seen.update(left[rank][step])
    assert sorted(chosen.places[index] for index in seen) == places.tolist()
    assert set(seen.values()) == {1}
    for index in seen:
        assert chosen.read(index) == source.read(int(places[index])) or True
        assert chosen.sample_id(index) == f"fake-{places[index]}"


def test_a_data_loader_with_workers_reads_the_selection(corpus: Corpus) -> None:
    config = corpus.config(FRENCH)
    source = select(config)
    sampler = PlanSampler(plan_of(config, source), seed=0, dp_rank=0, dp_world_size=1)
    loader = DataLoader(SampleDataset(source), batch_sampler=sampler, num_workers=1, collate_fn=list)
    found = sorted(len(sample["waveform"]) for batch in loader for sample in batch)
    assert found == sorted(len(corpus.audio[sample_id]) for sample_id in french(corpus))


# Mixtures


def second_corpus(folder: Path) -> Corpus:
    corpus = Corpus(folder)
    corpus.add_tar("c.tar", [f"c{i}" for i in range(12)])
    build_here(corpus.config())
    return corpus


def test_the_filter_of_a_mixture_is_of_every_source_and_on_top_of_its_own(corpus: Corpus, tmp_path: Path) -> None:
    other = second_corpus(tmp_path)
    text = (corpus.folder / "config.toml").read_text()
    (corpus.folder / "own.toml").write_text(text + "[filter]\nwhere = \"source != 'b.tar'\"\n")
    place = next(other.root.glob("tones-*"))
    mixed = f'mixture.source=[{{config="{corpus.folder}/own.toml", weight=1}}, {{cache="{place}", weight=1}}]'
    config = corpus.config(mixed, FRENCH, 'mixture.exhausted="end"', "plan.lockstep=1")
    source = select(config)
    assert isinstance(source, SourceUnion)
    wanted = [
        {i for i in french(corpus) if i.startswith("a")},
        french(other),
    ]
    assert [{part.sample_id(i) for i in range(len(part))} for part in source.sources] == wanted
    loader = make_loader(config, with_ids=True)
    assert set(ids_of(loader)) <= wanted[0] | wanted[1]
    for changed in ("filter.where=language == 'en'", "filter.where=True"):
        with pytest.raises(ResumeError, match=r"\[filter\] is another one"):
            make_loader(corpus.config(mixed, changed, 'mixture.exhausted="end"', "plan.lockstep=1")).load_state_dict(
                loader.state_dict()
            )


def test_ids_of_another_source_of_the_mixture_are_not_missing(corpus: Corpus, tmp_path: Path, caplog: Any) -> None:
    other = second_corpus(tmp_path)
    places = [next(c.root.glob("tones-*")) for c in (corpus, other)]
    mixed = "mixture.source=[" + ", ".join(f'{{cache="{place}", weight=1}}' for place in places) + "]"
    select(corpus.config(mixed, listed(tmp_path, "ids", ["a1", "c3", "nobody"])))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == [f"filter.ids: 1 ids are of no sample of {places[0]} and {places[1]}: 'nobody'"]
    with pytest.raises(ConfigError, match=rf"\[filter\] leaves none of the 12 samples of {places[1]}: ids keeps 0"):
        select(corpus.config(mixed, listed(tmp_path, "ids", ["a1"])))


def test_a_column_of_a_mixture_has_the_values_that_are_left(corpus: Corpus) -> None:
    config = corpus.config('mixture.column="language"', FRENCH)
    assert make_loader(config).plan.names == ("fr",)  # type: ignore[attr-defined]
    weights = "mixture.weights={en=1, fr=1}"
    with pytest.raises(ConfigError, match=r'mixture\.weights\.en: no sample has language "en"'):
        make_loader(corpus.config('mixture.column="language"', weights, FRENCH))


# What builds, reports and evaluations make of it


def test_a_build_plans_what_is_left_and_checks_the_files_first(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.add_tar("a.tar", [f"a{i}" for i in range(6)])
    with pytest.raises(ConfigError, match=r"filter\.drop_ids .*absent\.txt cannot be read: No such file"):
        build_here(corpus.config(f'filter.drop_ids="{tmp_path}/absent.txt"'))
    assert not corpus.root.exists()
    report: BuildReport = build_here(corpus.config(listed(tmp_path, "ids", ["a1", "a2"]), "plan.batch_size=1"))
    assert report.num_samples == 6
    assert report.plan is not None
    assert report.plan.startswith("plan: 2 batches")


def test_inspect_says_what_is_left(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", corpus.config().path, "--set", FRENCH]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"filter: {NUM_FRENCH} of 17 samples (where language == 'fr' keeps {NUM_FRENCH})" in printed
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_samples"] == 17
    assert (document["filter"]["samples"], document["filter"]["of"]) == (NUM_FRENCH, 17)
    assert document["filter"]["steps"][0]["setting"] == "where"
    assert main(["inspect", corpus.config().path]) == 0
    assert "filter:" not in capsys.readouterr().out


def test_bucket_manifests_list_what_is_left(corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config("filter.where=language == 'fr' and source == 'b.tar'")
    written = bucket_manifests(config, tmp_path / "out", seed=3, places=lambda _: None)
    rows = [row for path in written[:-1] for row in pq.read_table(path).to_pylist()]
    wanted = {str(row["sample_id"]) for row in corpus.rows if row["language"] == "fr" and row["tar_path"] == "b.tar"}
    assert sorted(row["sample_id"] for row in rows) == sorted(wanted)
    assert json.loads(written[-1].read_bytes())["total_samples"] == len(wanted)


def test_the_usage_log_counts_and_names_the_samples_of_the_cache(corpus: Corpus, tmp_path: Path) -> None:
    loader = make_loader(corpus.config(FRENCH, "plan.lockstep=1"), dp_rank=0, dp_world_size=1)
    path = tmp_path / "data_usage.jsonl"
    log = UsageLog(path, loader, step=0, with_ids=True, sum_over_ranks=list)
    batches = iter(loader)
    next(batches)
    handed_out = {loader.source.sample_id(index) for index in loader.indices}
    log.record(1)
    facts = usage_facts(path)
    assert facts["num_samples"] == NUM_FRENCH
    used = {"samples": len(handed_out), "share": 1.0, "expected": 1.0, "there": NUM_FRENCH}
    assert facts["languages"] == {"fr": used}
    assert set(facts["never_used"]["sample_ids"]) == french(corpus) - handed_out
    assert set(facts["caches"][0]) == {"folder", "key"}


def test_an_evaluation_set_has_the_filter_of_its_own_config(corpus: Corpus) -> None:
    texts = select(corpus.config(FRENCH)).table(["text"])["text"].to_pylist()
    assert sorted(str(text) for text in texts) == sorted(f"text of {i}" for i in french(corpus))


# Packs


def test_packs_of_what_is_left_are_read_by_the_folder_of_their_plan(photos: PhotoCorpus) -> None:
    keep = "filter.where=sample_id != 'q0-0' and num_tokens > 0"
    plain, config = photos.config("plan.seq_len=120"), photos.config("plan.seq_len=120", keep)
    whole = plan_of(plain, select(plain))
    loader = make_loader(config, with_ids=True)
    chosen = plan_of(config, loader.source)
    assert whole.folder is not None
    assert chosen.folder is not None
    ids = ids_of(loader)
    assert "q0-0" not in ids
    assert len(ids) == len(set(ids)) == len(loader.source)
    data = CachedVLDataset(chosen.folder, 0, 1, seed=config.loader.seed)
    again = make_loader(config)
    for left, right in zip(data, again, strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
    data.load_state_dict(make_loader(config).state_dict())
    with pytest.raises(ResumeError, match=r"\[filter\] is another one"):
        data.load_state_dict(make_loader(plain).state_dict())
    cache = open_cache(next(photos.root.glob("photos-*")))
    assert isinstance(CachedVLDataset(whole.folder, 0, 1).source, Cache)
    pack = read_pack(cache, read_plan(chosen.folder), "q1-0")
    assert "q1-0" in [segment.row["sample_id"] for segment in pack.segments]
    assert "q0-0" not in [
        segment.row["sample_id"]
        for number in range(read_plan(chosen.folder)["num_packs"])
        for segment in read_pack(cache, read_plan(chosen.folder), str(number)).segments
    ]


def test_a_cache_whose_only_plan_is_of_a_filter_asks_for_its_name(photos: PhotoCorpus, tmp_path: Path) -> None:
    config = photos.config("filter.where=sample_id != 'q0-0'", f'run.cache_root="{tmp_path}"')
    build_here(config)
    with pytest.raises(
        CacheNotFoundError, match=r"plans of what a \[filter\] left are there: photos_train_seq400.*name"
    ):
        CachedVLDataset(next(tmp_path.glob("photos-*")), 0, 1)
