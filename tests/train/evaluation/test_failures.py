"""References of an evaluation are what the labels say, and an evaluation that fails costs no training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import Config
from forebay.train.evaluation import evaluations
from forebay.train.evaluation.evaluate import Evaluator
from forebay.train.evaluation.evaluations import evaluate_alone
from forebay.train.loop.run import run
from tests.commands import run as command
from tests.preprocess.here_pool import build_here
from tests.processes import torchrun
from tests.train.evaluation.demo import ROOT, demo_config, make_demo

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SET = '[[train.eval]]\nname = "dev"\nconfig = "THIS"\ngenerate_max_tokens = 4\nmax_samples = 3\nevery = 1\n'
TEXTS = {"de": ("12 mal", "zwölf mal"), "en": ("12 times", "twelve times")}


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untaught")
    make_demo(folder, "whisper", is_taught=False)
    return folder


def with_numbers(folder: Path) -> list[str]:
    """Overrides that make the demo one whose texts depend on the row's language."""
    rows = pq.read_table(ROOT / "demo/speech/train.parquet").to_pylist()[:4]
    for number, row in enumerate(rows):
        row["language"] = sorted(TEXTS)[number % 2]
        row |= {"transcript": TEXTS[row["language"]][0], "tar_path": str(ROOT / "demo/speech" / row["tar_path"])}
    pq.write_table(pa.Table.from_pylist(rows), folder / "numbers.parquet")
    return [f'source.manifest="{folder / "numbers.parquet"}"', 'text.normalize=["nfkc", "numbers"]']


def test_references_are_in_the_rows_language_cached_or_not(untaught: Path, tmp_path: Path) -> None:
    overrides = [*with_numbers(tmp_path), f'run.cache_root="{tmp_path / "caches"}"']
    cache = build_here(demo_config(untaught, "whisper", *overrides)).cache
    sets = SET.replace('config = "THIS"', f'cache = "{cache}"').replace("max_samples = 3\n", "")
    report = evaluate_alone(demo_config(untaught, "whisper", *overrides, sets=sets))
    assert report is not None
    [outcome] = report.outcomes
    assert len(outcome.worst) == 4
    assert all(each.reference == TEXTS[each.language][1] for each, _ in outcome.worst)


def test_a_text_that_fails_costs_its_reference_alone(
    untaught: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, seen = demo_config(untaught, "whisper", sets=SET), []

    def normal(text: str) -> str:
        seen.append(text)
        if text == seen[0]:
            raise ValueError("no such numeral")
        return text

    monkeypatch.setattr(evaluations, "normalizer", lambda *_, **__: normal)
    report = evaluate_alone(config)
    assert report is not None
    [outcome] = report.outcomes
    assert outcome.result.num_samples == 3
    assert len(outcome.worst) == 2
    assert outcome.result.wer is not None
    assert "1 samples have no reference and count in no rate; the first: " in caplog.text


def failing(monkeypatch: pytest.MonkeyPatch, *steps: int, error: BaseException, folder: Path) -> list[bool]:
    """Makes evaluations number 1, 2, ... end in an error; returns whether each began with a checkpoint."""
    began: list[bool] = []
    own = Evaluator._pass

    def fail(self: Evaluator, each: Any) -> Any:
        began.append((folder / "last.json").is_file())
        if len(began) in steps:
            raise error
        return own(self, each)

    monkeypatch.setattr(Evaluator, "_pass", fail)
    return began


def trained(untaught: Path, folder: Path, *overrides: str) -> Config:
    settings = [
        "train.max_steps=3",
        "train.repetition_limit=1.0",
        'train.save_best="loss"',
        f'train.output_dir="{folder}"',
        *overrides,
    ]
    return demo_config(untaught, "whisper", *settings, sets=SET)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "whisper" / "eval.jsonl").read_text().splitlines()]
    return [{**line, "elapsed_s": 0} for line in lines]


def test_the_run_goes_on_behind_an_evaluation_that_fails(
    untaught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("out of memory")
    began = failing(monkeypatch, 1, error=error, folder=tmp_path / "whisper")
    with caplog.at_level(logging.WARNING):
        report = run(trained(untaught, tmp_path))
    assert report is not None
    assert began == [True, True, True]
    assert (report.steps, report.evaluations, report.evaluations_failed) == (3, 2, 1)
    why = "dev after step 1: RuntimeError: out of memory"
    assert report.lines()[-1] == f"1 of 3 evaluations failed, the last: {why}"
    assert f"the evaluation failed of {why}" in caplog.text
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 3]


def test_where_no_evaluation_works_the_command_ends_with_1(
    untaught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 1, 2, 3, 4, error=RuntimeError("no"), folder=tmp_path / "whisper")
    overrides = ["train.max_steps=1", f'train.output_dir="{tmp_path}"']
    config = demo_config(untaught, "whisper", *overrides, sets=SET)
    given = [config.path, *(part for override in overrides for part in ("--set", override))]
    code, out, _ = command(capsys, "train", *given, "--json")
    assert code == 1
    document = json.loads(out)
    assert (document["evaluations_failed"], document["steps"]) == (1, 1)
    code, out, _ = command(capsys, "eval", *given)
    assert code == 1
    assert out.splitlines()[-1] == "1 of 1 evaluations failed, the last: dev after step 1: RuntimeError: no"
    code, out, _ = command(capsys, "eval", *given, "--json")
    assert (code, json.loads(out)["evaluations_failed"]) == (1, 1)


@pytest.mark.wide
def test_a_run_that_was_stopped_in_an_evaluation_makes_up_for_it(
    untaught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, whole = "train.checkpoint_every=1", tmp_path / "whole"
    run(trained(untaught, whole, every))
    for stopped_in in (1, 2, 3):
        stopped = tmp_path / f"stopped in {stopped_in}"
        with monkeypatch.context() as stopping:
            failing(stopping, stopped_in, error=KeyboardInterrupt("stopped"), folder=tmp_path)
            with pytest.raises(KeyboardInterrupt, match="stopped"):
                run(trained(untaught, stopped, every))
        run(trained(untaught, stopped, every), resume=True)
        assert lines_of(stopped) == lines_of(whole)
        assert (whole / "whisper" / "best.json").read_text() == (stopped / "whisper" / "best.json").read_text()
        names = [sorted(path.name for path in (folder / "whisper").iterdir()) for folder in (whole, stopped)]
        assert names[0] == names[1]


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.wide)])
def test_an_evaluation_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(
    untaught: Path, tmp_path: Path, way: str
) -> None:
    """The failure is in the model, where FSDP holds gathered weights; the steps behind it are those of a whole run."""
    sets = SET.replace("max_samples = 3", "max_samples = 5")
    config = demo_config(untaught, "whisper", sets=sets).path
    text = Path(config).read_text().replace("max_steps = 4", "max_steps = 3\nrepetition_limit = 1.0")
    Path(config).write_text(text)
    outcome = torchrun("tests.train.evaluation.failing_worker", config, tmp_path, way)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    found = json.loads((tmp_path / f"{way}.json").read_text())
    assert [found[name]["counts"] for name in ("whole", "failing")] == [[3, 3, 0], [3, 2, 1]]
    why = "dev after step 2: RuntimeError: out of memory"
    assert found["failing"]["last"] == f"1 of 3 evaluations failed, the last: {why}"
    assert outcome.stderr.count(f"the evaluation failed of {why}") == 1
    assert found["failing"]["losses"] == found["whole"]["losses"]
    whole, failing = (lines_of(tmp_path / name) for name in ("whole", "failing"))
    assert failing == [line for line in whole if line["step"] != 2]
