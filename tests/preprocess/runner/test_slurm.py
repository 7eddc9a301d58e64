"""A build as jobs of Slurm: the jobs, what they make, what a second submission makes, and what is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import BuildError, ConfigError
from forebay.preprocess.build_report import Options
from forebay.preprocess.listing_folder import folder_of, submission_file
from forebay.preprocess.pipeline import prepare
from forebay.preprocess.runner.slurm import Asked, planned, submit
from forebay.preprocess.runner.status import StatusReport, status_of
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.lookup import Lookup
from forebay.visible import quoted
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.runner.cluster import Cluster, cluster
from tests.preprocess.vision.corpus import photo_corpus

QUIET = Options(progress=False)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of files that were written just now are trusted, as those of old files are."""
    monkeypatch.setattr("forebay.store.memo._RACY_NS", 0)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "data"
    folder.mkdir()
    return speech_corpus(folder)


def asked(corpus: Corpus, **options: Any) -> Asked:
    return Asked(config=str(corpus.folder / "config.toml"), **options)


def status(corpus: Corpus) -> StatusReport:
    return status_of(corpus.config())


def break_a4(corpus: Corpus) -> None:
    """Writes the first tar again, with a clip in its second shard that is no audio."""
    rows = corpus.rows
    corpus.rows = []
    corpus.add_tar("a.tar", [f"a{i}" for i in range(10)], broken={"a4": b"no audio"})
    corpus.rows = rows
    corpus.write_manifest()


def parts_made(slurm: Cluster) -> list[str]:
    """The parts that jobs were started for, in their order."""
    return [words[words.index("--shards") + 1] for words in slurm.commands if "--shards" in words]


def sealed_shards(root: Path) -> dict[str, bytes]:
    (folder,) = (path.parent for path in root.glob("*/metadata.json"))
    return shard_bytes(folder)


@pytest.mark.parametrize("make", [speech_corpus, photo_corpus], ids=["speech", "vision"])
def test_jobs_make_the_bytes_of_one_process(
    make: Callable[[Path], Any], slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert parts_made(slurm) == ["0::2", "1::2"]
    assert sealed_shards(corpus.root) == wanted
    document = run_json(capsys, "status", config)
    assert (document["state"], document["share"]) == ("sealed", 1.0)
    # A sealed cache: nothing is submitted.
    code, out, err = run(capsys, "preprocess", config, "--runner", "slurm", "--submit")
    assert (code, err) == (0, "")
    assert "already sealed" in out
    assert len(slurm.states()) == 3


def test_a_part_fails_and_a_second_submission_makes_only_that(corpus: Corpus, slurm: Cluster, tmp_path: Path) -> None:
    break_a4(corpus)
    config = corpus.config("run.max_failed_share=0.0")
    submit(config, asked(corpus, num_parts=2, options=["--set=run.max_failed_share=0.0"]))
    assert slurm.states() == ["COMPLETED", "FAILED", "FAILED"]
    seal_log = (corpus.root / ".building" / "logs" / "seal-103.log").read_text()
    assert "2 of 5 shards" in seal_log
    assert "not finished (1, 3)" in seal_log
    found = status(corpus)
    assert [part.state for part in found.parts] == ["done", "failed"]
    assert found.parts[1].job == "102_1"
    assert "1 of 17 samples are bad so far" in str(found.parts[1].error)
    assert found.next[-1] == f"forebay preprocess {corpus.folder}/config.toml --runner slurm --submit"
    lines = "\n".join(found.lines())
    assert "parts: 1 done, 1 failed of 2" in lines
    assert "part 1 failed on" in lines
    # Again, with what mends it: neither is anything prepared, nor part 0 made.
    slurm.commands.clear()
    allowing = ["--set=run.max_failed_share=1.0"]
    again = submit(corpus.config("run.max_failed_share=1.0"), asked(corpus, options=allowing))
    assert (again.num_parts, again.parts) == (2, "1")
    assert again.ids is not None
    assert list(again.ids) == ["parts", "seal"]
    assert parts_made(slurm) == ["1::2"]
    assert any("submitted before: prepare 101" in note for note in again.notes)
    (tmp_path / "one").mkdir()
    alone = speech_corpus(tmp_path / "one")
    break_a4(alone)
    wanted = shard_bytes(Path(build_here(alone.config("run.max_failed_share=1.0")).cache))
    assert sealed_shards(corpus.root) == wanted


def test_when_all_shards_are_there_only_the_seal_is_submitted(corpus: Corpus, slurm: Cluster) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    build_here(config, part=(0, 3))
    build_here(config, part=(1, 3))
    found = planned(config, asked(corpus, num_parts=3))
    assert [job.name for job in found.jobs] == ["parts", "seal"]
    assert "--array=2" in found.jobs[0].options
    folder = next((corpus.root / ".building").glob("*/origin")).parent
    third = planned(config, asked(corpus, num_parts=5, limit=2))
    assert "--array=2%2" in third.jobs[0].options
    build_here(config, part=(2, 5))
    assert not folder.exists()  # the last part seals
    assert planned(config, asked(corpus)).sealed is not None


def test_a_seal_that_is_all_that_is_left(corpus: Corpus, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    build_here(config, part=(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.build_run.Run._compare_sources", _stop)
        with pytest.raises(BuildError, match="stopped"):
            build_here(config, part=(1, 2))
    assert (status(corpus).state, status(corpus).share) == ("finished", 1.0)
    assert status(corpus).next[0].endswith("config.toml --seal")
    found = submit(config, asked(corpus, num_parts=2))
    assert [job.name for job in found.jobs] == ["seal"]
    assert found.jobs[0].after == ()
    assert status(corpus).state == "sealed"


def _stop(_: object) -> None:
    raise BuildError("stopped")


def test_more_parts_than_shards_are_refused_where_the_shards_are_known(corpus: Corpus, slurm: Cluster) -> None:
    config = corpus.config()
    submit(config, asked(corpus, num_parts=6))
    assert slurm.states() == ["FAILED", "CANCELLED", "CANCELLED"]
    log = (corpus.root / ".building" / "logs" / "prepare-101.log").read_text()
    assert "--array 6" in log
    assert "has 5 shards" in log
    assert "--runner slurm --array 5" in log
    with pytest.raises(ConfigError, match=r"--array 6: .* has 5 shards.*--array 5"):
        planned(config, asked(corpus, num_parts=6))
    # Without a number there are as many as there are shards, and the raw data was hashed once.
    assert submit(config, asked(corpus)).parts == "0-4"
    assert slurm.states()[3:] == ["COMPLETED"] * 2


def test_a_part_whose_config_was_edited_makes_nothing(corpus: Corpus, slurm: Cluster) -> None:
    corpus.config()
    path = corpus.folder / "config.toml"

    def edit(arguments: list[str]) -> None:
        if "--shards" in arguments:
            path.write_text(path.read_text().replace('features = "waveform"', 'features = "log_mel"'))

    slurm.before = edit
    submit(corpus.config(), asked(corpus, num_parts=2))
    assert slurm.states() == ["COMPLETED", "FAILED", "FAILED"]
    log = (corpus.root / ".building" / "logs" / "part-102_0.log").read_text()
    assert "so its settings or its raw data are not those" in log
    assert "--prepare" in log
    assert not list(corpus.root.glob("*/metadata.json"))
    found = status(corpus)
    assert [part.state for part in found.parts] == ["not started"] * 2
    assert "gives key" in str(found.parts[0].error)
    assert any("gives key" in line for line in found.lines())


STRANGE = 'it\'s "dätä" $(touch x) %j *; & né'


def test_paths_with_strange_letters_arrive_as_they_are(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / STRANGE
    folder.mkdir()
    corpus = speech_corpus(folder)
    corpus.config()
    config, logs = folder / "config.toml", tmp_path / f"logs {STRANGE}"
    given = ("--set", 'source.exclude=["a0", "it\'s"]', "--cache-root", folder / "other root", "--logs", logs)
    code, out, err = run(capsys, "preprocess", config, "--runner", "slurm", "--array", 2, *given)
    assert (code, err) == (0, "")
    ended = subprocess.run(["bash"], input=out, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "submitted: prepare 101, parts 102, seal 103\n"
    assert slurm.states() == ["COMPLETED"] * 3
    assert sorted(path.name for path in logs.glob("*.log")) == [
        "part-102_0.log",
        "part-102_1.log",
        "prepare-101.log",
        "seal-103.log",
    ]
    assert not (tmp_path / "x").exists()
    document = run_json(capsys, "status", config, *given[:4])
    assert (document["state"], document["samples"]) == ("sealed", 16)


@pytest.mark.parametrize("text", ["plain", "two words", "it's", "a\nb", "\x1b[31m", "caf\udce9", "ünï", "", "$HOME"])
def test_a_word_is_the_same_word_in_bash(text: str) -> None:
    assert quoted(text).isprintable()
    said = subprocess.run(["bash"], input=f"printf %s {quoted(text)}".encode(), capture_output=True, check=True).stdout
    assert os.fsdecode(said) == text


def test_without_sbatch_the_message_says_where_to_go(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    monkeypatch.setenv("PATH", str(corpus.folder))
    with pytest.raises(BuildError, match=r"no sbatch on this machine.*--runner slurm --print"):
        submit(config, asked(corpus))


def test_what_sbatch_says_is_told_and_what_was_submitted_is_named(corpus: Corpus, slurm: Cluster) -> None:
    config = corpus.config('run.sbatch=["--partition=nowhere"]')
    with pytest.raises(BuildError, match=r"sbatch refused the job prepare \(exit status 1\).*partition.*nowhere"):
        submit(config, asked(corpus))
    real = config.run.sbatch
    assert real == ("--partition=nowhere",)
    assert status(corpus).state == "not begun"


def test_options_of_sbatch_are_handed_on(corpus: Corpus) -> None:
    given = 'run.sbatch=["--partition=cpu", "--time=04:00:00", "--cpus-per-task=16"]'
    found = planned(corpus.config(given), asked(corpus, workers=3))
    for job in found.jobs:
        assert {"--partition=cpu", "--time=04:00:00", "--cpus-per-task=16"} <= set(job.options)
        assert "--cpus-per-task=3" not in job.options
    assert all("--cpus-per-task=3" in job.options for job in planned(corpus.config(), asked(corpus, workers=3)).jobs)
    assert found.num_parts == 64
    assert "64 parts, the default" in found.notes[0]


def test_jobs_that_run_models_get_their_gpus(corpus: Corpus) -> None:
    prepare, parts, seal = planned(corpus.config('run.gres="gpu:1"'), asked(corpus)).jobs
    assert "--gres=gpu:1" in prepare.options
    assert "--gres=gpu:1" in parts.options
    assert not [option for option in seal.options if "gres" in option]


@pytest.mark.parametrize("option", ["--array=3", "--output=x", "--dependency=afterok:1"])
def test_options_that_forebay_sets_are_refused(corpus: Corpus, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"run.sbatch .* has '{option}', and --\w+ is set by forebay"):
        planned(corpus.config(f'run.sbatch=["{option}"]'), asked(corpus))


@pytest.mark.parametrize("option", ["-p cpu", "partition=cpu", "--partition cpu", "--x=\\n"])
def test_what_is_no_option_is_refused_with_the_config(corpus: Corpus, option: str) -> None:
    with pytest.raises(ConfigError, match=r"run: sbatch has .*wanted options as \"--partition=cpu\""):
        corpus.config(f'run.sbatch=["{option}"]')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runner", "slurm", "--rebuild"], "--rebuild is not for jobs of Slurm"),
        (["--runner", "slurm", "--shards", "0::2"], "--shards is not for jobs of Slurm"),
        (["--runner", "slurm", "--dry-run"], "--dry-run is not for jobs of Slurm"),
        (["--runner", "slurm", "--cache-root", "s3://bucket/root"], "the cache root is s3://bucket/root"),
        (["--runner", "slurm", "--logs", "a\\b"], "a backslash"),
        (["--runner", "slurm", "--address", "x:1"], "--address is not for jobs of Slurm"),
        (["--submit"], "--submit is for jobs of Slurm"),
        (["--array", "3"], "--array is for jobs of Slurm"),
    ],
)
def test_what_does_not_go_together_is_refused(
    corpus: Corpus, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    corpus.config()
    code, _, err = run(capsys, "preprocess", corpus.folder / "config.toml", *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("text", ["0", "x", "3%0", "3%", "-1"])
def test_an_array_is_a_number(corpus: Corpus, capsys: pytest.CaptureFixture[str], text: str) -> None:
    corpus.config()
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "preprocess", corpus.folder / "config.toml", "--runner", "slurm", f"--array={text}")


def test_a_sealed_cache_is_not_prepared(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    cache = build_here(config).cache
    report = prepare(config, QUIET, num_parts=64)
    assert (report.sealed, report.num_samples, report.num_shards) == (cache, 17, 5)
    assert next(report.lines()).startswith("already sealed: ")
    assert not folder_of(config, recipe_of(config)).exists()
    assert not submission_file(config, recipe_of(config)).exists()


def test_a_stage_is_handed_on(corpus: Corpus) -> None:
    root, stage = "s3://bucket/caches", "s3://bucket/stage"
    config = corpus.config(f"run.cache_root={root}", f"remote.shard_dir={corpus.folder / 'node'}")
    with pytest.raises(ConfigError, match=f"--runner slurm: the cache root is {root}.*--stage URL"):
        planned(config, asked(corpus))
    with pytest.raises(ConfigError, match="in another bucket"):
        planned(config, asked(corpus, stage="s3://other/stage"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.preprocess.runner.status.find_cache", lambda *_, **__: Lookup(recipe=recipe_of(config)))
        found = planned(config, asked(corpus, stage=stage, options=[f"--stage={stage}"], num_parts=3))
    assert [job.name for job in found.jobs] == ["prepare", "parts", "seal"]
    assert all(f"--stage={stage}" in job.script for job in found.jobs)
    assert found.logs == os.path.abspath("forebay-logs")


def test_a_config_is_loaded_as_the_jobs_load_it(corpus: Corpus) -> None:
    corpus.config()
    found = planned(corpus.config(), asked(corpus, options=["--set=loader.seed=3"]))
    assert all("--set=loader.seed=3" in job.script for job in found.jobs)
    assert load_config(corpus.folder / "config.toml", overrides=["loader.seed=3"]).loader.seed == 3
