"""Several caches, or the languages of one, as a mixture: from the config to batches."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import CacheCorruptError, CacheMismatchError, CacheNotFoundError, ConfigError, ResumeError
from forebay.inspect.plan_lines import show_weights, weight_lines
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.plan_usage import expected_shares, population
from forebay.store.cache import Cache, open_cache
from forebay.store.source import SourceUnion, source_kind
from forebay.train.loader import Loader
from forebay.train.select import make_loader, select
from tests.flat_constants import flat
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.store_factory import make_cache

HEAD = 'name = "both"\n[source]\nkind = "tar"\nmanifest = "none.parquet"\n[audio]\nfeatures = "waveform"\n'

PLAN = (
    '[plan]\nbatch_size = 4\nlockstep = 1\nedges_s = [30.0]\n[run]\ncache_root = "caches"\n[loader]\nnum_threads = 0\n'
)
STEPS = '[[mixture.source]]\ncache = "a"\nweight = '
LINE = '[mixture]\nweights_between = "line"\n'
CHANGE = "[[mixture.change]]\nat = {at}\nweights = [1.0]\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def mixed(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "mixture.toml"
    path.write_text(HEAD + PLAN + text)
    return load_config(path, overrides=overrides)


def two_caches(root: Path, *, weights: tuple[float, float] | None = (3, 1), **changes: Any) -> str:
    """Entries of two sealed caches of 12 and 9 samples."""
    first = make_cache(root, features="waveform", num_samples=12, seed=1)
    second = make_cache(root, **{"features": "waveform", "num_samples": 9, "seed": 2, **changes})
    lines = [f"weight = {weight}\n" for weight in weights] if weights else ["", ""]
    return "".join(f'[[mixture.source]]\ncache = "{c}"\n{line}' for c, line in zip((first, second), lines, strict=True))


def owners(loader: Loader, epoch: int = 0) -> np.ndarray[Any, Any]:
    assert isinstance(loader.source, SourceUnion)
    order = loader.plan.order(loader.state.seed, epoch)
    return loader.source.source_of[np.concatenate(order.batches(np.arange(len(order))))]


def test_a_union_is_its_sources_one_behind_the_other(tmp_path: Path) -> None:
    folders = [make_cache(tmp_path, num_samples=count, seed=count) for count in (5, 1, 7)]
    caches = [open_cache(folder) for folder in folders]
    union = SourceUnion(caches, [str(folder) for folder in folders])
    assert len(union) == 13
    assert union.source_of.tolist() == [0] * 5 + [1] + [2] * 7
    wanted = [(cache, index) for cache in caches for index in range(len(cache))]
    for index, (cache, inside) in enumerate(wanted):
        sample, alone = union.read(index), cache.read(inside)
        assert sample.keys() == alone.keys()
        assert all(np.array_equal(sample[name], alone[name]) for name in alone)
        assert union.sample_id(index) == cache.sample_id(inside)
        assert {name: values[index] for name, values in union.lengths.items()} == {
            name: values[inside] for name, values in cache.lengths.items()
        }
    names, codes = union.categories("language") or ([], np.zeros(0, int))
    assert [names[code] for code in codes] == [cache.samples["language"][i].as_py() for cache, i in wanted]
    assert union.categories("nothing") is None
    assert union.slots is not None
    assert len(np.unique(union.slots)) == 13
    assert union.key != SourceUnion(caches[::-1], union.names[::-1]).key
    with pytest.raises(IndexError, match=r"sample 13 of 13 samples in 3 sources"):
        union.read(13)
    again = pickle.loads(pickle.dumps(union))  # noqa: S301 - our own bytes
    assert again.key == union.key
    assert source_kind(union) == "cache"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "log_mel"}, r"field input_features is absent in the former and float16 \[n, 80\] in the latter"),
        ({"tokenizer": "1" * 64}, r"text.tokenizer is 0{16} in the former and 1{16} in the latter"),
        ({"tokenizer": None}, r"field input_ids is int32 \[n\] in the former and absent in the latter"),
        (
            {"metadata": {"constants": flat(features="waveform", sample_rate_hz=8000, prompt="plain").to_json()}},
            r"sample_rate_hz is 16000 in the former and 8000 in the latter",
        ),
    ],
)
def test_caches_whose_samples_cannot_stand_in_one_batch(tmp_path: Path, changes: Any, message: str) -> None:
    config = mixed(tmp_path, two_caches(tmp_path, **changes))
    with pytest.raises(CacheMismatchError, match=rf"cannot mix .*prompts-train-.* and .*prompts-train-.*: {message}"):
        make_loader(config)


def test_a_damaged_sample_names_its_cache(tmp_path: Path) -> None:
    folders = [make_cache(tmp_path, num_samples=3, seed=seed) for seed in (1, 2)]
    union = SourceUnion([open_cache(folder) for folder in folders], ["one", "two"])
    path = folders[1] / "audio" / "00000.tdz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(CacheCorruptError, match=r"00000.tdz") as caught:
        [union.read(index) for index in range(6)]
    assert any(note.endswith("of two") for note in caught.value.__notes__)


def test_weights_of_several_caches_hold_at_every_sample(tmp_path: Path) -> None:
    loader = make_loader(mixed(tmp_path, two_caches(tmp_path)))
    assert isinstance(loader.plan, MixturePlan)
    assert loader.plan.shares.tolist() == [0.75, 0.25]
    samples = np.concatenate([owners(loader, epoch) for epoch in range(40)])
    running = np.cumsum(samples == 1)
    assert np.abs(running - np.arange(1, len(samples) + 1) / 4).max() < 1
    batches = list(loader)
    assert len(batches) == len(loader) == 21 // 4
    assert {len(batch["labels"]) for batch in batches} == {4}


def test_left_out_weights_are_hours_to_the_temperature(tmp_path: Path) -> None:
    text = two_caches(tmp_path, weights=None)
    hours = [
        float(cache.lengths["num_audio_samples"].sum()) for cache in map(open_cache, sorted(tmp_path.glob("prompts-*")))
    ]
    for temperature in (1.0, 0.3, 0.0):
        plan = make_loader(mixed(tmp_path, text, f"mixture.temperature={temperature}")).plan
        assert isinstance(plan, MixturePlan)
        wanted = np.array(sorted(hours)) ** temperature
        assert np.sort(plan.shares) == pytest.approx(wanted / wanted.sum(), abs=2e-5)


def test_batches_of_one_source_each(tmp_path: Path) -> None:
    text = two_caches(tmp_path)
    loader = make_loader(mixed(tmp_path, text, 'mixture.batches="per_source"'))
    rows = owners(loader).reshape(-1, 4)
    assert (rows == rows[:, :1]).all()
    assert len({*rows[:, 0].tolist()}) == 2


def test_an_epoch_that_ends_with_a_source_repeats_nothing(tmp_path: Path) -> None:
    text = two_caches(tmp_path, weights=(1, 1))
    loader = make_loader(mixed(tmp_path, text, 'mixture.exhausted="end"'))
    order = loader.plan.order(0, 0)
    used = Counter(np.concatenate(order.batches(np.arange(len(order)))).tolist())
    assert set(used.values()) == {1}
    assert len(used) == 18 // 4 * 4


def test_languages_of_one_cache_with_weights_changed_at_train_time(corpus: Corpus) -> None:
    report = build_here(corpus.config())
    files = sorted(path for path in Path(report.cache).rglob("*"))
    column = 'mixture.column="language"'
    cache = open_cache(report.cache)
    language = np.array(cache.samples["language"].to_pylist())
    for weights, share in (("{en = 1, fr = 1}", 0.5), ("{en = 3.0, fr = 1}", 0.75), ("{en = 1, fr = 0}", 1.0)):
        loader = make_loader(corpus.config(column, f"mixture.weights={weights}", "plan.lockstep=1"))
        assert isinstance(loader.source, Cache)
        used = np.concatenate(
            [b for e in range(20) for b in loader.plan.order(0, e).batches(range(loader.plan.num_batches))]
        )
        assert isinstance(loader.plan, MixturePlan)
        assert abs((language[used] == "en").sum() - share * len(used)) < loader.plan.bound
        people = population(loader.source)
        assert expected_shares(people, loader.plan, "language").tolist() == pytest.approx([share, 1 - share])
    assert sorted(path for path in Path(report.cache).rglob("*")) == files


def test_uncached_sources_mix_as_their_caches_do(corpus: Corpus) -> None:
    build_here(corpus.config())
    column = ('mixture.column="language"', "plan.lockstep=1")
    cached = make_loader(corpus.config(*column))
    uncached = make_loader(corpus.config(*column, 'loader.cache="off"'))
    for one, two in zip(cached, uncached, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    entries = "".join(f'[[mixture.source]]\nconfig = "{corpus.folder / "config.toml"}"\n' for _ in range(2))
    config = mixed(corpus.folder, entries)
    assert source_kind(select(config)) == "cache"
    assert source_kind(select(load_config(config.path, overrides=['loader.cache="off"']))) == "uncached"
    assert len(select(config)) == 2 * len(cached.source)


def test_a_run_goes_on_with_another_world_size_and_no_other_weights(tmp_path: Path) -> None:
    text = two_caches(tmp_path)
    config = mixed(tmp_path, text)
    whole = list(make_loader(config))
    ranks = [make_loader(config, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    running = [iter(loader) for loader in ranks]
    seen = [next(batches) for _ in range(2) for batches in running]
    states = [loader.state_dict() for loader in ranks]
    for batches in running:
        batches.close()  # type: ignore[attr-defined]
    assert states[0] == states[1]
    alone = make_loader(config)
    alone.load_state_dict(states[0])
    seen += list(alone)
    assert len(seen) == len(whole)
    for one, two in zip(seen, whole, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in two)
    other = make_loader(mixed(tmp_path, text.replace("weight = 3", "weight = 2")))
    with pytest.raises(ResumeError, match=r"plan_key is [0-9a-f]{16}, the plan here has [0-9a-f]{16}"):
        other.load_state_dict(states[0])
    twice = make_loader(mixed(tmp_path, text.replace("weight = 3", "weight = 6").replace("weight = 1", "weight = 2")))
    twice.load_state_dict(states[0])


def test_weight_zero_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_loader(mixed(tmp_path, two_caches(tmp_path, weights=(1, 0))))
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().endswith("has weight 0 of 65536: none of its 9 samples will be seen")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['mixture.column="speaker"'],
            r'mixture.column is "speaker", and cache .* has no such text column',
        ),
        (
            ['mixture.column="language"', "mixture.weights={eng = 1.0, fr = 1.0}"],
            r'mixture.weights.eng: no sample has language "eng"; did you mean "en"\?',
        ),
        (
            ['mixture.column="language"', "mixture.weights={en = 1.0}"],
            r"mixture.weights has no weight for language fr; give one, 0 to leave it out",
        ),
        (
            ['mixture.column="language"', 'plan={kind = "window", batch_size = 4}'],
            r"a mixture needs a plan of buckets; set plan.kind",
        ),
    ],
)
def test_a_column_that_cannot_be_mixed(corpus: Corpus, overrides: list[str], message: str) -> None:
    build_here(corpus.config())
    with pytest.raises(ConfigError, match=message):
        make_loader(corpus.config(*overrides))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[mixture.source]]\nweight = 1\n", r"mixture.source.0: give exactly one of cache and config"),
        ('[[mixture.source]]\ncache = "a"\nconfig = "b"\n', r"mixture.source.0: give exactly one of cache and config"),
        (
            '[[mixture.source]]\ncache = "a"\nweights = 1\n',
            r"mixture.source.0.weights: unknown field; did you mean .*weight",
        ),
        ('[[mixture.source]]\ncache = "a"\nweight = -1\n', r"weight is -1.0, wanted 0 or more"),
        (
            '[[mixture.source]]\ncache = "a"\nweight = 1\n[[mixture.source]]\ncache = "b"\n',
            r"source has 1 weights for 2 caches; give all of them, or none",
        ),
        ('[mixture]\ncolumn = "language"\n[[mixture.source]]\ncache = "a"\n', r"give one of source and column"),
        (
            'cache_dir = "c"\n[[mixture.source]]\ncache = "a"\n',
            r"cache_dir names one cache; with a mixture give each its own",
        ),
        ("[mixture]\nweights = {en = 1.0}\n", r'weights needs column, for example "language"'),
        (
            '[mixture]\ncolumn = "language"\nweights = {en = -1.0}\n',
            r"weights.en is -1.0, wanted 0 or more",
        ),
        (
            '[mixture]\ncolumn = "language"\ntemperature = 0.5\nweights = {en = 1.0}\n',
            r"give one of weights and temperature",
        ),
        ("[mixture]\ntemperature = -0.5\n", r"temperature is -0.5, wanted 0 or more"),
        (f"{STEPS}[[1, 1.0]]\n", r"weight has steps at \[1.0\], wanted positions that rise from 0"),
        (f"{STEPS}[[0, 1.0], [5, 1.0], [5, 2.0]]\n", r"weight has steps at \[0.0, 5.0, 5.0\]"),
        (f"{STEPS}[]\n", r"weight has steps at \[\]"),
        (f"{STEPS}[[0, 1.0], [5, -1.0]]\n", r"weight has a step to -1.0, wanted 0 or more"),
        (f"{LINE}{STEPS}[[0, 1.0]]\n", r"line_step is None, and weights_between is .line."),
        (f"{LINE}line_step = 0.0\n{STEPS}[[0, 1.0]]\n", r"line_step is 0.0, wanted more than 0"),
        (f"{LINE}line_step = 4\n{STEPS}1.0\n", r"weights_between and weights_in are of steps of a weight"),
        (f'[mixture]\nexhausted = "end"\n{STEPS}[[0, 1.0], [5, 2.0]]\n', r"exhausted = .end. begins each epoch anew"),
        ("[[mixture.change]]\nat = 5\nweights = [1.0]\n", r"change needs \[\[mixture.source\]\], or column"),
        (f"{STEPS}1.0\n" + 2 * CHANGE.format(at=5), r"change has places \[5, 5\], wanted rising ones"),
        (f"{STEPS}1.0\n" + CHANGE.format(at=0), r"at is 0, wanted 1 or more"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed(tmp_path, text)


def test_paths_of_a_mixture_are_relative_to_the_file(tmp_path: Path) -> None:
    config = mixed(tmp_path, '[[mixture.source]]\ncache = "../x/./c"\n[[mixture.source]]\nconfig = "/abs/d.toml"\n')
    assert [(entry.cache, entry.config) for entry in config.mixture.source] == [
        (str(tmp_path.parent / "x" / "c"), None),
        (None, "/abs/d.toml"),
    ]
    with pytest.raises(CacheNotFoundError, match=r"x/c"):
        make_loader(config)


def test_weights_of_a_config_change_over_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = two_caches(tmp_path, weights=None).split("[[mixture.source]]")[1:]
    weights = zip(entries, ("[[0, 1], [4, 3.0]]", 1), strict=True)
    steps = "".join(f"[[mixture.source]]{entry}weight = {weight}\n" for entry, weight in weights)
    plain, changed = mixed(tmp_path, steps), mixed(tmp_path, steps + CHANGE.format(at=7).replace("[1.0]", "[0, 1]"))
    loader, revised = make_loader(plain), make_loader(changed)
    assert loader.plan_key == revised.plan_key != make_loader(mixed(tmp_path, steps.replace("[4,", "[5,"))).plan_key
    parts = [owners(each, 0).tolist() + owners(each, 1).tolist() for each in (loader, revised)]
    assert parts[0][: 4 * 7] == parts[1][: 4 * 7]
    assert set(parts[1][4 * 7 :]) == {1}
    assert abs(np.bincount(parts[0][:16])[0] - 8) <= 1
    assert abs(np.bincount(parts[0][16:40])[0] - 18) <= 2
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    revised.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match=r"mixture.change has places"):
        revised.load_state_dict({**loader.state_dict(), "epoch": 2})
    assert show_weights(revised.plan, seed=3, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(s["from"], s["epoch"], s["position"], s["is_revision"]) for s in found["stretches"]] == [
        (0, 0, 0, False),
        (4, 0, 4, False),
        (7, 1, 2, True),
    ]
    assert [[part["weight"] for part in s["sources"].values()] for s in found["stretches"]] == [
        [0.5, 0.5],
        [0.75, 0.25],
        [0, 1],
    ]
    assert [part["drawn"] for part in found["stretches"][2]["sources"].values()] == [0, 1]
    assert len(list(weight_lines(found))) == 3 + 4
    epochs = steps.replace("[4,", "[0.8,")
    in_epochs = make_loader(mixed(tmp_path, '[mixture]\nweights_in = "epochs"\n' + epochs)).plan
    assert isinstance(in_epochs, MixturePlan)
    assert [change.at for change in in_epochs.changes] == [4]


def test_languages_change_over_the_run(corpus: Corpus) -> None:
    build_here(corpus.config())
    line = ("mixture.weights_between=line", "mixture.line_step=2", "mixture.weights={en=[[0, 1.0], [4, 0.0]], fr=1.0}")
    plan = make_loader(corpus.config('mixture.column="language"', *line, "plan.lockstep=1")).plan
    assert isinstance(plan, MixturePlan)
    assert plan.stretch_shares[:, 0] == pytest.approx([0.75 / 1.75, 0.2, 0], abs=2**-16)
    assert [change.at for change in plan.changes] == [2, 4]
