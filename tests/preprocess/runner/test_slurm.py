"""A build as jobs of Slurm: the jobs, what they make, what a second submission makes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.preprocess.runner.slurm import Asked
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.runner.cluster import Cluster, cluster
from tests.preprocess.vision.corpus import photo_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "data"
    folder.mkdir()
    return speech_corpus(folder)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def asked(corpus: Corpus, **options: object) -> Asked:
    return Asked(config=str(corpus.folder / "config.toml"), **options)  # type: ignore[arg-type]


def sealed_shards(folder: Path, name: str) -> dict[str, bytes]:
    return shard_bytes(next(folder.glob(f"{name}-*")))


@pytest.mark.parametrize("make", [speech_corpus, photo_corpus], ids=["speech", "vision"])
def test_jobs_make_the_bytes_of_one_process(make, slurm: Cluster, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    alone, corpus = make(tmp_path / "one"), make(tmp_path / "many")
    wanted = shard_bytes(Path(build_here(alone.config()).cache))
    corpus.config()
    config = corpus.folder / "config.toml"
    code, out, err = run(capsys, "preprocess", config, "--runner", "slurm", "--array", 2, "--submit")
    assert (code, err) == (0, "")
    assert "submitted: prepare 101, parts 102, seal 103 (parts 0-1 of 2)" in out
    assert f"forebay status {config}" in out
    assert slurm.states() == ["COMPLETED"] * 3
    assert [c[3:5] for c in slurm.commands[1:3]] == [[str(config), "--shards"]] * 2
    assert sealed_shards(corpus.root, corpus.config().name) == wanted
    document = run_json(capsys, "status", config)
    assert (document["state"], document["share"]) == ("sealed", 1.0)
    # A sealed cache: nothing is submitted.
    code, out, err = run(capsys, "preprocess", config, "--runner", "slurm", "--submit")
    assert (code, err) == (0, "")
    assert "already sealed" in out
    assert len(slurm.states()) == 3
