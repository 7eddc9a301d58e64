"""A prepared build: listed and hashed once, read by every part, refused where config, data or numerics differ."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.build_report import Options
from forebay.preprocess.listing_folder import folder_of
from forebay.preprocess.pipeline import prepare
from forebay.preprocess.prepared import load
from forebay.steps.recipe import recipe_of
from forebay.store import memo
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here

QUIET = Options(progress=False)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed; all work is done in this process."""
    seen: list[str] = []
    real = memo.hash_now

    def counting(path: str) -> Any:
        seen.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(memo, "hash_now", counting)
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
    return seen


def test_parts_hash_nothing_and_make_the_bytes_of_one_process(
    corpus: Corpus, tmp_path_factory: pytest.TempPathFactory, hashed: list[str]
) -> None:
    wanted = shard_bytes(Path(build_here(speech_corpus(tmp_path_factory.mktemp("one")).config()).cache))
    config = corpus.config()
    hashed.clear()
    report = prepare(config, QUIET)
    assert (report.num_samples, report.num_files, report.num_shards, report.already_prepared) == (17, 3, 5, False)
    assert sorted(hashed) == ["a.tar", "b.tar", "train.parquet"]
    again = prepare(config, QUIET)
    assert (again.key, again.already_prepared) == (report.key, True)
    # Whether files are old enough to be trusted must not decide what parts do.
    (corpus.root / "hashes.memo").unlink()
    parts = [build_here(config, part=(i, 3), key=report.key[:8]) for i in (1, 0, 2)]
    assert sorted(hashed) == ["a.tar", "b.tar", "train.parquet"]
    assert shard_bytes(Path(parts[-1].cache)) == wanted
    assert not folder_of(config, recipe_of(config)).exists()


def test_what_is_read_is_what_was_written(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    found = load(config, recipe_of(config))
    assert found is not None
    assert found.listing.rows["sample_id"].to_pylist() == list(corpus.audio)
    assert [(cut.start, cut.stop) for cut in found.cuts] == 2 * [(0, 4), (4, 8), (8, 10), (10, 14), (14, 17)]
    assert all(file.stat is not None and len(file.xxh3_128) == 32 for file in found.listing.files)


def test_a_seal_names_the_shards_that_no_part_has_made(corpus: Corpus) -> None:
    config = corpus.config()
    build_here(config, part=(0, 2))
    with pytest.raises(BuildError, match=r"--seal: 2 of 5 shards .* not finished \(1, 3\).*forebay status"):
        build_here(config, seal_only=True)
    build_here(config, part=(1, 2))
    assert build_here(config, seal_only=True).already_sealed


def test_more_parts_than_shards_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"--shards 0::6: .* has 5 shards.*N of at most 5"):
        build_here(corpus.config(), part=(0, 6))


def test_a_part_with_another_config_is_refused(corpus: Corpus) -> None:
    key = prepare(corpus.config(), QUIET).key
    other = corpus.config("source.max_samples=8")
    with pytest.raises(ConfigError, match=rf"--key {key[:8]}: .* gives key .*--prepare"):
        build_here(other, part=(0, 2), key=key[:8])


def test_a_part_whose_data_changed_lists_again(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    key = prepare(corpus.config(), QUIET).key
    corpus.add_tar("c.tar", ["c0"])
    with pytest.raises(ConfigError, match=f"--key {key[:8]}"):
        build_here(corpus.config(), part=(0, 2), key=key[:8])
    with caplog.at_level(logging.WARNING):
        build_here(corpus.config(), part=(0, 2))
    assert prepare(corpus.config(), QUIET).num_samples == 18
    assert "train.parquet is not what it was when the build was prepared" in caplog.text


def test_a_machine_of_other_numerics_is_refused(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    path = folder_of(config, recipe_of(config)) / "prepared.json"
    document = json.loads(path.read_bytes())
    document["probe"]["audio"], document["host"] = "0" * 32, "node7"
    path.write_text(json.dumps(document))
    with pytest.raises(BuildError, match=r"audio steps give other values on .* \(probe \w+\) than on node7 \(probe 0"):
        build_here(config, part=(0, 2))


def test_a_damaged_prepared_build_is_made_again(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    (folder_of(config, recipe_of(config)) / "rows.arrow").write_bytes(b"short")
    assert not prepare(config, QUIET).already_prepared


def test_another_number_of_the_device_is_the_same_file(corpus: Corpus, hashed: list[str]) -> None:
    """Two machines that mount one file system may number it differently."""
    path = corpus.folder / "a.tar"
    stat = memo.stat_now(path)
    assert stat is not None
    assert memo.is_same(stat, (stat[0] + 1, *stat[1:]))
    assert not memo.is_same(stat, (stat[0], stat[1] + 1, *stat[2:]))
    assert not memo.is_same((-5, *stat[1:]), (-6, *stat[1:])), "objects of two stores"
    assert not memo.is_same(None, stat)
