from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.store.trees import flip


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = cli.DONE) -> dict[str, Any]:
    assert cli.main(["cache", *map(str, arguments), "--json", "--no-progress"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def built(corpus: Corpus, *overrides: str) -> Path:
    return Path(build_here(corpus.config(*overrides)).cache)


def test_a_cache_is_the_same_as_itself_and_as_its_config_s(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(corpus)
    document = run(capsys, "diff", folder, corpus.folder / "config.toml")
    assert document["same"]
    assert document["samples"]["same"] == 17
    assert document["sources"]["same"] == 3
    assert document["recipe"] == []


def test_data_that_changed_is_named_by_file_and_by_sample(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    first = built(corpus)
    corpus.rows = [row for row in corpus.rows if row["sample_id"] != "a3"]
    corpus.add_tar("c.tar", ["c0", "a3"])
    second = built(corpus)
    document = run(capsys, "diff", first, second)
    assert not document["same"]
    assert document["recipe"] == []
    assert document["sources"]["first"] == {"only_b": ["c.tar"], "content": ["train.parquet"]}
    assert {name: document["samples"][name] for name in ("only_a", "only_b", "same")} == {
        "only_a": 0,
        "only_b": 1,
        "same": 17,
    }
    assert document["samples"]["first"] == {"only_b": ["c0"]}
    assert cli.main(["cache", "diff", str(second), str(first), "--no-progress"]) == cli.DONE
    out = capsys.readouterr().out
    assert "the recipes are the same" in out
    assert "samples: 17 the same in both, 1 only in A\n  only in A: c0" in out


def test_values_under_one_id_are_compared_by_their_hashes(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    first = built(corpus)
    corpus.rows = [row for row in corpus.rows if row["tar_path"] == "b.tar"]
    corpus.add_tar("a.tar", [f"a{i}" for i in range(10)], broken={"a4": _other()})
    document = run(capsys, "diff", first, built(corpus))
    assert document["samples"]["first"] == {"audio": ["a4"]}
    assert document["samples"]["same"] == 16


def _other() -> bytes:
    from tests.preprocess.corpus import flac, tone

    return flac(tone(99, duration_s=0.2))


def test_settings_are_compared_where_no_cache_is_yet(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(corpus)
    corpus.config()
    path = corpus.folder / "config.toml"
    path.write_text(
        path.read_text().replace('manifest = "train.parquet"', 'manifest = "train.parquet"\nmax_samples = 3')
    )
    document = run(capsys, "diff", folder, path)
    assert document["recipe"] == [{"field": "source.max_samples", "a": None, "b": 3}]
    assert document["b"]["cache"] is None
    assert document["samples"] is None


def test_verify_says_that_all_is_well(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(corpus)
    document = run(capsys, "verify", folder, corpus.folder / "config.toml")
    assert document["ok"]
    assert [one["cache"] for one in document["caches"]] == [str(folder)] * 2
    (one,) = run(capsys, "verify", "--all", "--cache-root", corpus.root)["caches"]
    assert one["checked_bytes"] > 0
    assert run(capsys, "verify", corpus.root)["caches"] == [one]


def test_verify_names_shard_field_and_sample_and_the_command_that_mends(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = built(corpus)
    from forebay.store.cache import open_cache

    cache = open_cache(folder)
    shard = cache.shard("audio", 1)
    spans = dict(zip([field.name for field in shard.fields], shard.entry.spans, strict=True))
    start = spans["waveform"][0] + 2 * int(shard.lengths("waveform")[0])
    damaged = cache.sample_id(5)
    del cache, shard
    flip(folder / "audio" / "00001.tdz", start)
    document = run(capsys, "verify", corpus.folder / "config.toml", code=cli.FAILED)
    (found,) = document["caches"]
    (damage,) = found["damages"]
    assert damage == {"shard": "audio/00001.tdz", "fields": ["waveform"], "rows": [1], "samples": [damaged]}
    assert found["mend"] == f"forebay preprocess {corpus.folder / 'config.toml'} --verify"
    assert cli.main(["cache", "verify", str(folder), "--no-progress"]) == cli.FAILED
    out = capsys.readouterr().out
    assert f"audio/00001.tdz: damaged in waveform; samples {damaged}" in out
    assert out.endswith("run: forebay preprocess CONFIG --verify\n")
    assert cli.main(["preprocess", str(corpus.folder / "config.toml"), "--verify", "--no-progress"]) == cli.DONE
    capsys.readouterr()
    assert run(capsys, "verify", folder)["ok"]


def test_damaged_metadata_and_foreign_files_have_their_own_remedies(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = built(corpus)
    (folder / "notes.txt").write_text("mine")
    (found,) = run(capsys, "verify", folder, code=cli.FAILED)["caches"]
    assert "move" in found["mend"]
    (folder / "notes.txt").unlink()
    os.truncate(folder / "audio" / "00000.tdz", 100)
    (found,) = run(capsys, "verify", folder, code=cli.FAILED)["caches"]
    assert (found["damages"], found["mend"]) == ([], "forebay preprocess CONFIG --verify")
    flip(folder / "metadata.json", 40)
    (found,) = run(capsys, "verify", folder, code=cli.FAILED)["caches"]
    assert found["mend"] == "forebay preprocess CONFIG --rebuild"


def test_verify_without_a_name_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "verify"]) == cli.BAD_CONFIG
    assert "verify what?" in capsys.readouterr().err
