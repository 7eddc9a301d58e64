"""Evaluations of the demo recordings against a plain loop: load, generate one by one without padding, jiwer."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import pytest
import torch
from transformers import AutoTokenizer

from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache
from forebay.train.collate.collator import Collator
from forebay.train.evaluation.evaluations import evaluate_alone
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import run
from forebay.train.models.model_folder import load_model
from tests.commands import run as command
from tests.commands import run_json
from tests.processes import python, torchrun
from tests.train.evaluation.demo import MAX_TOKENS, NUM_SAMPLES, demo_config

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SET = f'[[train.eval]]\nname = "dev"\nconfig = "THIS"\ngenerate_max_tokens = {MAX_TOKENS}\n'


def folder_of(config: Any) -> Path:
    found = find_cache(config, recipe_of(config)).found
    assert found is not None
    return found.folder


def plain_texts(demo: Path, family: str) -> list[tuple[str, str, str, float, int]]:
    """The oracle: language, reference, hypothesis, summed loss and targets of each sample, one by one."""
    config = demo_config(demo, family)
    cache = open_cache(folder_of(config))
    collate, table = Collator(cache), cache.samples
    model = load_model(Path(config.train.model or ""), seed=0).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.text.tokenizer if config.text else "")
    rows = []
    for index in range(len(cache)):
        batch = collate([cache.read(index)])
        with torch.no_grad():
            loss = float(model(**batch).loss)
            ids = written(model, batch, table["language"][index].as_py())
        text = tokenizer.decode(ids, skip_special_tokens=False)
        text = text.split("<asr_text>")[-1] if family == "qwen3_asr" else text
        text = text.replace(tokenizer.eos_token, "").replace("<|im_end|>", "")
        targets = int((batch["labels"] != -100).sum())
        rows.append((table["language"][index].as_py(), table["text"][index].as_py(), text, loss * targets, targets))
    return rows


def written(model: Any, batch: dict[str, torch.Tensor], language: str) -> list[int]:
    """Texts that transformers' own `generate` writes; for Whisper it makes the prompt of language and task itself."""
    if "decoder_input_ids" in batch:
        features = batch["input_features"]
        found = model.generate(features, language=language, task="transcribe", max_new_tokens=MAX_TOKENS)
        return [token for token in found[0].tolist() if token < 700]  # control tokens of the demo's tokenizer
    prefix = int((batch["labels"] == -100).sum())
    found = model.generate(
        **{name: value for name, value in batch.items() if name.startswith("input_features")},
        input_ids=batch["input_ids"][:, :prefix],
        attention_mask=batch["attention_mask"][:, :prefix],
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return list(found[0, prefix:].tolist())


@pytest.mark.parametrize("family", ["whisper", "qwen3_asr"])
def test_rates_and_loss_are_those_of_a_plain_loop(demo: Path, family: str) -> None:
    """Batches are of three with padded prompts; the taught models lead by more than rounding, so texts are equal."""
    rows = plain_texts(demo, family)
    report = evaluate_alone(demo_config(demo, family, sets=SET))
    assert report is not None
    [outcome] = report.outcomes
    result = outcome.result
    references, hypotheses = [row[1] for row in rows], [row[2] for row in rows]
    assert len(set(hypotheses)) > 4  # not one text for all
    assert 0.05 < result.wer < 1.5  # type: ignore[operator]
    assert result.wer == pytest.approx(jiwer.process_words(references, hypotheses).wer, abs=1e-12)
    assert result.cer == pytest.approx(jiwer.process_characters(references, hypotheses).cer, abs=1e-12)
    assert result.loss == pytest.approx(sum(row[3] for row in rows) / sum(row[4] for row in rows), rel=1e-4)
    assert (result.num_samples, result.name, result.text, result.step) == (NUM_SAMPLES, "dev", "none", 0)
    for language in {row[0] for row in rows}:
        own = [row for row in rows if row[0] == language]
        wanted = jiwer.process_words([row[1] for row in own], [row[2] for row in own]).wer
        assert result.languages[language] == {
            "wer": pytest.approx(wanted),
            "cer": pytest.approx(jiwer.process_characters([row[1] for row in own], [row[2] for row in own]).cer),
            "samples": len(own),
        }
    shown = {each.sample_id: each.hypothesis for each, _ in outcome.worst}
    assert set(shown.values()) <= {text.strip() for text in hypotheses}


def test_normalised_texts_are_named_and_have_fewer_errors(demo: Path) -> None:
    texts = "".join(
        SET.replace('"dev"', f'"{kind}"') + f'text = "{kind}"\nmax_samples = 6\n'
        for kind in ("none", "basic", "whisper")
    )
    report = evaluate_alone(demo_config(demo, "qwen3_asr", sets=texts))
    assert report is not None
    _, none, basic, whisper = report.lines()
    assert ", text" not in none
    assert "(6 samples, text basic, " in basic
    assert "(6 samples, text whisper, " in whisper
    rates = [each.result.cer for each in report.outcomes]
    assert rates[1] is not None
    assert rates[0] is not None
    assert [each.result.num_samples for each in report.outcomes] == [6, 6, 6]
    assert all(each.reference == each.reference.lower() for each, _ in report.outcomes[1].worst)


@pytest.mark.wide
def test_a_cache_is_a_set_too_and_uncached_samples_have_the_same_figures(demo: Path) -> None:
    config = demo_config(demo, "qwen3_asr")
    by_cache = SET.replace("config", "cache").replace("THIS", str(folder_of(config)))
    outcomes = []
    for sets, override in ((SET, "loader.seed=1"), (by_cache, "loader.seed=2"), (SET, 'loader.cache="off"')):
        report = evaluate_alone(demo_config(demo, "qwen3_asr", override, sets=sets))
        assert report is not None
        outcomes.append(report.outcomes[0])
    first = outcomes[0].result
    for outcome in outcomes[1:]:
        assert (outcome.result.wer, outcome.result.cer) == (first.wer, first.cer)
        assert outcome.result.loss == pytest.approx(first.loss, rel=1e-6)
        assert outcome.result.languages == first.languages


def stopping_at(step: int) -> Callable[[StepLog], None]:
    """Returns a log that ends the run at the line of a step."""

    def log(line: StepLog) -> None:
        if line.step == step:
            raise KeyboardInterrupt

    return log


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "elapsed_s"} for line in lines]


def test_a_stopped_and_resumed_run_has_the_losses_and_evaluations_of_a_whole_one(demo: Path, tmp_path: Path) -> None:
    sets = SET.replace('"dev"', '"often"') + "every = 1\nmax_samples = 4\n"
    sets += SET.replace('"dev"', '"last"')
    settings = ["train.checkpoint_every=2", "train.save_total_limit=10"]
    losses: dict[str, list[float]] = {"whole": [], "stopped": []}
    random_states = []
    for name, stops in (("whole", ()), ("stopped", (4,))):
        config = demo_config(demo, "qwen3_asr", *settings, f'train.output_dir="{tmp_path / name}"', sets=sets)
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                run(config, log=stopping_at(stop))
            assert [line["step"] for line in lines_of(tmp_path / name / "qwen3_asr")] == [1, 2, 3]
        report = run(config, resume=bool(stops), log=lambda line, own=losses[name]: own.append(line.loss))  # type: ignore[misc]
        assert report is not None
        random_states.append(torch.get_rng_state())
    assert losses["stopped"] == losses["whole"][2:]
    whole, stopped = (lines_of(tmp_path / name / "qwen3_asr") for name in ("whole", "stopped"))
    assert [(line["name"], line["step"]) for line in whole] == [*(("often", step) for step in range(1, 5)), ("last", 4)]
    assert stopped == whole
    assert torch.equal(*random_states)
    listing = (tmp_path / "whole" / "qwen3_asr" / "eval" / "last-00000004.txt").read_text()
    assert listing.startswith("Step 4: last WER ")
    assert "REF: " in listing
    assert "HYP: " in listing
    plain: list[float] = []
    config = demo_config(demo, "qwen3_asr", f'train.output_dir="{tmp_path / "plain"}"')
    run(config, log=lambda line: plain.append(line.loss))
    assert plain == losses["whole"]  # evaluations leave the run as it is
    assert not (tmp_path / "plain" / "qwen3_asr" / "eval.jsonl").exists()


def test_a_run_says_one_line_a_set_and_the_command_evaluates_its_last_checkpoint(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f'train.output_dir="{tmp_path}"', "train.max_steps=1"]
    config = demo_config(demo, "qwen3_asr", *overrides, sets=SET)
    with caplog.at_level(logging.INFO):
        run(config)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Step ")]
    assert line.startswith("Step 1: dev WER ")
    [kept] = lines_of(tmp_path / "qwen3_asr")
    rates = f"WER {100 * kept['wer']:.2f} %, CER {100 * kept['cer']:.2f} %, loss {kept['loss']:.3f}"
    assert line.startswith(f"Step 1: dev {rates} (12 samples, ")
    given = ["eval", config.path, *(part for override in overrides for part in ("--set", override))]
    document = run_json(capsys, *given)
    assert document["checkpoint"] == str(tmp_path / "qwen3_asr" / "checkpoint-00000001")
    [found] = document["sets"]
    assert (found["wer"], found["cer"], found["step"]) == (kept["wer"], kept["cer"], 1)
    assert found["loss"] == pytest.approx(kept["loss"], rel=1e-6)
    assert {"sample_id", "reference", "hypothesis", "wer", "word_errors", "language"} == set(found["worst"][0])
    # The best checkpoint goes before the last one; a folder that is named before both.
    best = tmp_path / "qwen3_asr" / "checkpoint-00000000"
    shutil.copytree(demo / "qwen3_asr_model", best)
    (tmp_path / "qwen3_asr" / "best.json").write_text(json.dumps({"checkpoint": best.name}))
    code, out, _ = command(capsys, *given)
    assert code == 0
    assert out.splitlines()[0].endswith("checkpoint-00000000")
    assert out.splitlines()[1].startswith("Step 0: dev WER ")
    document = run_json(capsys, *given, "--checkpoint", demo / "qwen3_asr_model")
    assert document["checkpoint"] == str(demo / "qwen3_asr_model")


@pytest.mark.wide
def test_two_ranks_have_the_wer_of_one_exactly(demo: Path, tmp_path: Path) -> None:
    """Batches of three on two ranks, an odd number of them: the last step has a filler, which must not count."""
    arguments = [demo, tmp_path]
    alone = python("-m", "tests.train.evaluation.ranks_worker", *arguments)
    assert alone.returncode == 0, alone.stderr[-4000:]
    both = torchrun("tests.train.evaluation.ranks_worker", *arguments)
    assert both.returncode == 0, both.stderr[-4000:]
    one, two = (json.loads((tmp_path / f"of_{count}.json").read_text()) for count in (1, 2))
    assert one["sharded"]["num_batches"] % 2 == 1
    for name in ("result", "worst", "sharded"):
        assert two[name] == one[name], name
