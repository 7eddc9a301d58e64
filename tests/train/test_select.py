"""Which source a config gets: the cache of the same key, or the uncached steps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import CacheMismatchError, CacheNotFoundError, ConfigError
from forebay.preprocess import build
from forebay.store.cache import Cache
from forebay.store.source import source_kind
from forebay.train.select import make_loader, select, where_it_lies
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def test_auto_finds_the_cache_by_itself(corpus: Corpus) -> None:
    build_here(corpus.config())
    selected = select(corpus.config())
    assert source_kind(selected) == "cache"
    assert isinstance(selected, Cache)


def test_a_config_may_be_the_path_of_its_file(corpus: Corpus) -> None:
    config = corpus.config()
    report = build(config.path)
    loader = make_loader(str(config.path))
    assert (loader.source.key, loader.plan_key) == (report.key, make_loader(config).plan_key)
    for wrong, what in ((3, "a dict, not int"), (corpus.folder / "absent.toml", r"absent\.toml")):
        with pytest.raises(ConfigError, match=what):
            make_loader(wrong)  # type: ignore[arg-type]


def test_auto_goes_uncached_with_one_warning_that_names_the_command(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    build_here(corpus.config())
    caplog.clear()
    config = corpus.config("audio.sample_rate_hz=8000")
    assert source_kind(select(config)) == "uncached"
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "audio.sample_rate_hz differs (8000 wanted, 16000 stored)" in record.getMessage()
    assert record.getMessage().endswith(f"run: forebay preprocess {config.named}")


def test_require_is_an_error_instead(corpus: Corpus) -> None:
    with pytest.raises(CacheNotFoundError, match=r"no cache for recipe .* run: forebay preprocess .*config.toml"):
        make_loader(corpus.config('loader.cache="require"'))


def test_off_goes_uncached_beside_a_cache(corpus: Corpus) -> None:
    build_here(corpus.config())
    assert source_kind(select(corpus.config('loader.cache="off"'))) == "uncached"


def test_a_changed_source_never_hits(corpus: Corpus) -> None:
    build_here(corpus.config())
    corpus.rows[0]["transcript"] = "another"
    corpus.write_manifest()
    assert source_kind(select(corpus.config())) == "uncached"
    with pytest.raises(CacheNotFoundError, match=r"sources\.train\.parquet differs"):
        select(corpus.config('loader.cache="require"'))


def test_without_the_raw_data_the_cache_serves_and_the_log_says_so(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    build_here(corpus.config())
    for name in ("a.tar", "b.tar", "train.parquet"):
        (corpus.folder / name).unlink()
    assert source_kind(select(corpus.config('loader.cache="require"'))) == "cache"
    assert "its raw data is not here to be compared" in caplog.text


def test_a_cache_can_be_named_outright(corpus: Corpus, tmp_path: Path) -> None:
    report = build_here(corpus.config())
    shutil.move(report.cache, tmp_path / "elsewhere")
    named = f'loader.cache_dir="{tmp_path / "elsewhere"}"'
    selected = select(corpus.config(named))
    assert isinstance(selected, Cache)
    assert selected.folder == tmp_path / "elsewhere"
    with pytest.raises(CacheMismatchError, match=r"audio.sample_rate_hz is 16000 in the cache, 8000 in the config"):
        select(corpus.config(named, "audio.sample_rate_hz=8000"))


def test_a_loader_needs_a_plan(corpus: Corpus) -> None:
    build_here(corpus.config())
    path = corpus.folder / "config.toml"
    text = path.read_text()
    without = text[: text.index("[plan]")] + text[text.index("[run]") :]
    config = corpus.config()
    path.write_text(without)
    from forebay import load_config

    with pytest.raises(ConfigError, match=r"no \[plan\] section"):
        make_loader(load_config(config.path))


def test_ranks_share_the_epoch(corpus: Corpus) -> None:
    build_here(corpus.config())
    loaders = [make_loader(corpus.config(), dp_rank=rank, dp_world_size=2) for rank in range(2)]
    assert len(loaders[0]) == len(loaders[1])
    for loader in loaders:
        for batch in loader:
            assert set(batch) == {"input_values", "attention_mask"}
    assert sum(loader.report()["samples"] for loader in loaders) == 17


def test_batches_go_where_the_caller_says(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="device is meta, wanted cpu or a CUDA device that torch sees"):
        make_loader(corpus.config(), device="meta")
    batch = next(iter(make_loader(corpus.config(), device="cpu", device_prefetch=0)))
    assert all(tensor.device.type == "cpu" for tensor in batch.values())


def test_a_config_that_another_one_names_is_found_under_either_cache_root(corpus: Corpus, tmp_path: Path) -> None:
    """`--cache-root` is known to the config of the command alone, and holds for evaluation sets and mixtures too."""
    named, command = corpus.config(), corpus.config(f'run.cache_root="{tmp_path / "command"}"')
    in_file = replace(command, given=())
    assert where_it_lies(named, command) == command  # which says where a build goes, too
    assert where_it_lies(named, in_file) == named
    build_here(command)
    assert where_it_lies(named, in_file) == in_file
    build_here(named)
    assert where_it_lies(named, command) == command
    assert where_it_lies(named, in_file) == named
    shutil.rmtree(tmp_path / "command")
    assert where_it_lies(named, command) == named
