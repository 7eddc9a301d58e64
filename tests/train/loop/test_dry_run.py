"""A dry run reads what training would read, needs no model, and leaves nothing behind but the plan."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from forebay import cli
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.train.loop.run import dry_run
from forebay.train.prefetch import THREAD_NAME
from forebay.train.select import make_loader
from tests.preprocess.corpus import Corpus, file_bytes, speech_corpus
from tests.preprocess.here_pool import build_here


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    made = speech_corpus(tmp_path)
    build_here(made.config())
    return made


def test_it_reports_what_the_loader_gives(corpus: Corpus) -> None:
    config = corpus.config("loader.seed=5")
    loader = make_loader(config)
    sizes = [len(batch["input_values"]) for batch in loader] * 2  # two epochs of the same buckets
    epoch = len(loader)
    report = dry_run(config, steps=2 * epoch)
    assert (report.steps, report.epochs, report.num_batches) == (2 * epoch, 2.0, epoch)
    assert (report.samples, report.repeats, report.source) == (sum(sizes), 0, "cache")
    assert report.padding == pytest.approx(loader.report()["padding"], abs=0.2)
    languages = Counter(str(row["language"]) for row in corpus.rows)
    for name, count in languages.items():
        share = pytest.approx(count / 17, abs=1e-6)
        assert report.languages[name] == {"samples": 2 * count, "share": share, "expected": share}
    assert {name: row["samples"] for name, row in report.sources.items()} == {"a.tar": 20, "b.tar": 14}
    assert (report.shards_touched, report.num_shards) == (5, 5)  # ten rows in fours are three shards, seven are two
    assert min(report.batches_per_s, report.samples_per_s, report.first_batch_s, report.size_bytes) > 0


def test_few_steps_touch_few_shards(corpus: Corpus) -> None:
    config = corpus.config("plan.batch_size=1")
    report = dry_run(config, steps=1)
    assert (report.steps, report.samples, report.shards_touched, report.num_shards) == (1, 1, 1, 5)
    assert report.epochs == round(1 / 17, 4)
    assert sum(row["share"] for row in report.languages.values()) == 1.0


def test_uncached_it_says_so(corpus: Corpus) -> None:
    report = dry_run(corpus.config('loader.cache="off"'), steps=3)
    assert (report.source, report.num_shards, report.shards_touched) == ("uncached", 0, 0)
    assert sum(row["samples"] for row in report.sources.values()) == report.samples
    cached = dry_run(corpus.config(), steps=3)
    assert (report.languages, report.sources) == (cached.languages, cached.sources)


def test_it_writes_nothing_but_the_plan_and_that_both_are_used(corpus: Corpus) -> None:
    import threading

    before = file_bytes(corpus.folder)
    dry_run(corpus.config(), steps=3)
    new = file_bytes(corpus.folder).keys() - before.keys()
    assert {name.split("/")[1] for name in new} <= {"plans", ".used"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def test_it_raises_what_a_loader_raises(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="--steps is 0, wanted 1 or more"):
        dry_run(corpus.config(), steps=0)
    with pytest.raises(CacheNotFoundError, match="run: forebay preprocess"):
        dry_run(corpus.config('loader.cache="require"', "audio.sample_rate_hz=8000"))


def test_the_command(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(corpus.folder / "config.toml")
    assert cli.main(["train", config, "--dry-run", "--steps", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    wanted = {
        "steps",
        "batches_per_s",
        "samples_per_s",
        "padding",
        "languages",
        "sources",
        "shards_touched",
        "num_shards",
    }
    assert wanted <= document.keys()
    assert document["steps"] == 4
    assert cli.main(["train", config, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("200 batches (")
    assert "shards touched: 5 of 5" in lines
    assert any(line.startswith("language en: ") and ", expected " in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps is 0, wanted 1 or more"),
        (["--dry-run", "--resume"], "--resume does not go with --dry-run"),
    ],
)
def test_options_that_do_not_go_together(
    corpus: Corpus, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["train", str(corpus.folder / "config.toml"), *options]) == 2
    assert message in capsys.readouterr().err
