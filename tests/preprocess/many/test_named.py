"""A merge or a subset in a config: used where it is named, never by itself, and never where its sources changed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.config import Config
from forebay.errors import CacheMismatchError, CacheNotFoundError
from forebay.plan.make import plan_of
from forebay.preprocess.merge import merge, subset
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import Lookup, find_cache
from forebay.store.source_comparison import described
from forebay.train.select import make_loader, select
from tests.preprocess.corpus import Corpus, shard_bytes
from tests.preprocess.here_pool import build_here
from tests.preprocess.many.oracle import held


class Two:
    """Two corpora of one recipe, each with its cache and config, and the merge of both caches."""

    def __init__(self, folder: Path) -> None:
        self.corpora = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            corpus = Corpus(folder / name)
            corpus.add_tar("a.tar", [f"{name}-{number}" for number in range(6)])  # the same name in both
            self.corpora.append(corpus)
        self.caches = [Path(build_here(corpus.config()).cache) for corpus in self.corpora]
        self.merged = Path(merge([str(cache) for cache in self.caches], "both").cache)

    def config(self, number: int = 0, *overrides: str, cache: Path | None = None) -> Config:
        named = f"loader.cache_dir={json.dumps(str(cache or self.merged))}"
        return self.corpora[number].config(named, *overrides)

    def of_both(self, *overrides: str) -> Config:
        manifests = [str(corpus.folder / "train.parquet") for corpus in self.corpora]
        return self.config(0, f"source.manifest={json.dumps(manifests)}", *overrides)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def look(config: Config) -> Lookup:
    return find_cache(config, recipe_of(config))


def ids_of_epoch(config: Config) -> list[str]:
    loader = make_loader(config, dp_rank=0, dp_world_size=1, with_ids=True)
    found: list[str] = []
    for _, ids in loader:
        found += ids
    return found


def test_a_loader_reads_a_merge_that_a_config_names(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ids = ids_of_epoch(two.config(0, "plan.batch_size=2", "plan.lockstep=1"))
    assert sorted(ids) == sorted([f"{name}-{number}" for name in ("one", "two") for number in range(6)])
    keys = ", ".join(open_cache(cache).key[:16] for cache in two.caches)
    assert f"{two.merged} is a merge of the caches {keys}" in caplog.text


def test_a_plan_of_a_merge_is_kept_under_its_own_key(two: Two) -> None:
    config = two.config()
    cache = open_cache(two.merged)
    first, again = plan_of(config, cache), plan_of(config, open_cache(two.merged))
    assert first.folder is not None
    assert (first.key, first.folder) == (again.key, again.folder)
    alone = plan_of(two.corpora[0].config(), open_cache(two.caches[0]))
    assert alone.folder != first.folder
    assert alone.key != first.key


def test_the_sources_that_a_config_shows_are_compared(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    assert (look(two.of_both()).state, look(two.config(0)).state, look(two.config(1)).state) == (
        "same",
        "absent",
        "absent",
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(select(two.config(0)), Cache)
    assert "unchecked: its raw data is not here to be compared" in caplog.text
    two.corpora[1].rows[0]["transcript"] = "another"
    two.corpora[1].write_manifest()
    assert look(two.config(0)).state == "absent"
    for config in (two.config(1), two.of_both()):
        with pytest.raises(
            CacheMismatchError,
            match=r"train\.parquet by source\.manifest is not what this cache was made of \(it is a merge of the",
        ):
            select(config)


def test_a_tar_of_another_content_is_noticed(two: Two) -> None:
    corpus = two.corpora[0]
    corpus.rows.clear()
    manifest = (corpus.folder / "train.parquet").read_bytes()
    corpus.add_tar("a.tar", ["other"])
    (corpus.folder / "train.parquet").write_bytes(manifest)
    with pytest.raises(CacheMismatchError, match=r": a\.tar by source\.manifest is not what this cache was made of"):
        look(two.config(0))


def test_a_config_of_other_steps_is_refused(two: Two) -> None:
    with pytest.raises(CacheMismatchError, match=r"both: audio\.sample_rate_hz is 16000 in the cache, 8000 in"):
        look(two.config(0, "audio.sample_rate_hz=8000"))
    # What `[source]` chooses is not compared: it was chosen when the caches were built.
    assert look(two.config(0, "source.max_duration_s=9.0")).found is not None


def test_a_plain_config_never_takes_a_merge_or_a_subset(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    plain = two.corpora[0].config()
    subset(str(two.caches[0]), "some", where="duration_s > 0.2")
    assert look(plain).found is not None
    found = look(plain)
    assert found.found is not None
    assert found.found.folder == two.caches[0]
    two.caches[0].rename(two.caches[0].parent.parent / "gone")
    lost = look(plain)
    assert (lost.found, lost.nearest, lost.differs) == (None, None, [])
    with pytest.raises(CacheNotFoundError, match=r"no cache for recipe \w+ in .*caches; run: forebay preprocess"):
        select(two.corpora[0].config('loader.cache="require"'))


def test_a_build_links_the_shards_of_a_merge_and_makes_the_cache_of_the_config(two: Two) -> None:
    wanted = shard_bytes(two.caches[0])
    two.caches[0].rename(two.caches[0].parent.parent / "gone")
    report = build_here(two.config(0))  # a build makes the cache of the config, whatever is named
    assert Path(report.cache) == two.caches[0]
    assert (report.shards_written, report.shards_linked) == (0, 4)
    assert shard_bytes(two.caches[0]) == wanted


def test_a_subset_is_used_and_compared_like_a_merge(two: Two) -> None:
    some = Path(subset(str(two.caches[0]), "some", where="duration_s > 0.2").cache)
    config = two.config(0, cache=some)
    assert look(config).state == "same"
    ids = [row["sample_id"] for row in held(open_cache(some))]
    assert sorted(ids_of_epoch(two.config(0, "plan.batch_size=1", "plan.lockstep=1", cache=some))) == sorted(ids)
    assert 0 < len(ids) < 6
    two.corpora[0].rows[0]["transcript"] = "another"
    two.corpora[0].write_manifest()
    with pytest.raises(CacheMismatchError, match=r"it is a subset of the cache \w{16}, where duration_s > 0\.2\)"):
        look(config)


def test_a_confined_config_takes_no_merge_of_caches_from_anywhere(two: Two) -> None:
    with pytest.raises(CacheMismatchError, match=r"of which some were built without source\.confined"):
        look(two.config(0, "source.confined=true"))


def test_words_of_a_derived_cache() -> None:
    assert (
        described({"subset": {"of": "ab" * 32, "samples": "0"}})
        == "a subset of the cache abababababababab, by a list of ids"
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    code = cli.main(["cache", *arguments, "--no-progress", "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out or "null"), captured.err


def test_the_commands(
    two: Two, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [str(corpus.folder / "config.toml") for corpus in two.corpora]
    code, merged, _ = run(capsys, "merge", *configs, "--out", "both")
    assert (code, merged["cache"], merged["already_there"]) == (0, str(two.merged), True)
    code, made, _ = run(capsys, "subset", "one/caches/both", "--where", "sample_id != 'one-3'", "--out", "./few")
    assert (code, made["cache"], made["num_samples"]) == (0, str(tmp_path / "few"), 11)
    (tmp_path / "ids.txt").write_text("one-1\ntwo-2\ntwo-9\n")
    code, _, err = run(capsys, "subset", "few", "--ids", "ids.txt", "--out", "two-of-them")
    assert (code, "1 of 3 ids are no samples" in err) == (2, True)
    code, made, _ = run(capsys, "subset", "few", "--ids", "ids.txt", "--out", "two-of-them", "--missing", "ok")
    assert (code, made["num_samples"], made["missing"]) == (0, 2, 1)
    assert Path(made["cache"]) == tmp_path / "two-of-them"  # beside the cache
    code, _, err = run(capsys, "merge", "few", "two-of-them", "--out", "x")
    assert (code, "2 sample ids are in two of the caches" in err) == (1, True)
    assert run(capsys, "subset", "nothing", "--where", "True", "--out", "x")[0] == 3
    with pytest.raises(SystemExit, match="2"):
        cli.main(["cache", "subset", "few", "--out", "x"])
    assert cli.main(["cache", "subset", "few", "--where", "True", "--out", "all"]) == 0
    assert "to use it, in a config of the same steps:" in capsys.readouterr().out


def test_a_named_cache_may_be_relative_to_the_config(two: Two) -> None:
    path = two.corpora[0].folder / "config.toml"
    two.corpora[0].config()
    config = load_config(path, overrides=['loader.cache_dir="caches/both"'])
    found = look(config).found
    assert found is not None
    assert found.folder.resolve() == two.merged.resolve()
