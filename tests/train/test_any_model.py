"""A model of no family from data to checkpoint: by `forebay train`, in a loop of one's own, and in the Trainer."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jiwer
import pytest
import torch
import transformers
from transformers import AutoTokenizer, Trainer, TrainingArguments

import forebay
from forebay.config import Config
from forebay.errors import CacheMismatchError
from forebay.steps.text.symbols import Special, SymbolTable
from forebay.train.evaluation.evaluations import evaluate_alone
from forebay.train.evaluation.sets import open_sets
from forebay.train.integrations.hf import LoaderMixin
from forebay.train.loop.run import run
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.select import make_loader
from tests.preprocess.corpus import speech_corpus
from tests.preprocess.here_pool import build_here
from tests.train.models import foreign

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

_CTC = """
name = "ctc"
[source]
kind = "tar"
manifest = "train.parquet"
[audio]
features = "waveform"
[text]
tokenizer = "symbols"
prompt = "plain"
end_token = false
[plan]
batch_size = 4
edges_s = [0.2, 0.3]
lockstep = 1
[run]
cache_root = "caches"
num_workers = 1
[train]
model = "model"
init = "random"
max_steps = 24
learning_rate = 1e-2
log_every = 24
"""
_SET = """
[[train.eval]]
name = "all"
config = "ctc.toml"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings, a table of their letters, a Wav2Vec2 with a place for each, and a sealed cache."""
    folder = tmp_path_factory.mktemp("ctc")
    corpus = speech_corpus(folder)
    for row in corpus.rows:
        row["transcript"] = f"of {row['sample_id']}"
    corpus.write_manifest()
    texts = [str(row["transcript"]) for row in corpus.rows]
    table = SymbolTable.of(texts, split="characters", special=Special(eos="</s>"))
    (folder / "symbols").mkdir()
    for name, data in table.files().items():
        (folder / "symbols" / name).write_bytes(data)
    foreign.wav2vec2(
        folder / "model", vocab_size=len(table.tokens), conv_stride=(8, 8), ctc_loss_reduction="mean", hidden_size=32
    )
    (folder / "ctc.toml").write_text(_CTC)
    (folder / "evaluated.toml").write_text(_CTC + _SET)
    build_here(load(folder))
    return folder


def load(folder: Path, *overrides: str) -> Config:
    return forebay.load_config(folder / "evaluated.toml", overrides=overrides)


def test_ctc_is_trained_on_recordings_and_its_words_are_those_of_a_plain_loop(folder: Path, tmp_path: Path) -> None:
    config = load(folder, f'train.output_dir="{tmp_path}"')
    report = run(config)
    assert report is not None
    assert report.loss_last < 0.8 * report.loss_first
    assert report.checkpoint is not None
    found = evaluate_alone(config)
    assert found is not None
    [outcome] = found.outcomes
    model, losses, texts = load_model(Path(report.checkpoint), seed=0).eval(), [], []
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "symbols")
    for batch in loader:
        assert set(batch) == {"input_values", "attention_mask", "labels"}
        with torch.no_grad():
            output = model(**batch)
        losses.append((float(output.loss), len(batch["labels"])))
        frames = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1)).tolist()
        for logits, length, labels in zip(output.logits, frames, batch["labels"], strict=True):
            best = [token for token, _ in itertools.groupby(logits[:length].argmax(-1).tolist())]
            texts.append([tokenizer.decode([i for i in ids if i > 0]) for ids in (labels.tolist(), best)])
    assert outcome.result.num_samples == len(texts) == 17
    assert outcome.result.loss == pytest.approx(sum(loss * n for loss, n in losses) / 17, rel=1e-5)
    references, hypotheses = zip(*texts, strict=True)
    assert references[0].startswith("of ")
    assert outcome.result.wer == pytest.approx(jiwer.wer(list(references), [text.strip() for text in hypotheses]))


def test_a_cache_with_end_tokens_is_refused_before_the_first_step(folder: Path) -> None:
    config = load(folder, "text.end_token=true")
    build_here(config)
    with pytest.raises(CacheMismatchError, match=r"has the end token \d+ behind each text, and Wav2Vec2ForCTC"):
        run(config)


@pytest.mark.parametrize("kind", ["wav2vec2", "parakeet"])
@pytest.mark.few("parakeet")
def test_ctc_is_trained_on_what_an_extractor_makes(kind: str, folder: Path, tmp_path: Path) -> None:
    """The batch is the extractor's own, and the loss the model's of it."""
    size = len(json.loads((folder / "symbols" / "tokenizer.json").read_bytes())["model"]["vocab"])
    settings: dict[str, Any] = {"vocab_size": size, "ctc_loss_reduction": "mean"}
    if kind == "wav2vec2":
        model = foreign.wav2vec2(tmp_path / "model", conv_stride=(8, 8), **settings)
        extractor: Any = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    else:
        model = foreign.parakeet(tmp_path / "model", every=2, **settings)
        extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
    extractor.save_pretrained(model)
    text = _CTC.replace('features = "waveform"', f'features = "extractor"\nextractor = "{model}"')
    for name in ("symbols", "train.parquet"):
        text = text.replace(f'"{name}"', f'"{folder / name}"')
    (tmp_path / "ctc.toml").write_text(text)
    config = forebay.load_config(tmp_path / "ctc.toml")
    build_here(config)
    first = next(iter(make_loader(config, dp_rank=0, dp_world_size=1)))
    report = run(config)
    assert report is not None
    own = load_model(model, seed=0, init="random")(**first).loss.item()
    assert report.loss_first == pytest.approx(own, rel=1e-4)
    assert report.loss_last < 0.95 * report.loss_first


class LoaderTrainer(LoaderMixin, Trainer):  # type: ignore[misc]  # transformers has no types here
    """The Trainer of the tests."""


def trained_by_trainer(model: Any, loader: Any, folder: Path) -> list[float]:
    """Returns the losses of a few steps."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=12, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = LoaderTrainer(model=model, args=arguments, train_dataset=loader)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_asks_models_of_pairs_for_their_loss(tmp_path: Path) -> None:
    model = load_model(foreign.siglip(tmp_path / "model"), seed=0, init="random")
    trainer = LoaderTrainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))
    batch = foreign.pairs(0)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(model(**batch, return_loss=True).loss.item())
    assert "return_loss" not in batch


def test_a_model_that_forebay_has_no_texts_of_is_evaluated_by_its_loss(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(folder, f'train.model="{foreign.speech2text(tmp_path)}"')
    facts = replace(model_facts(tmp_path, config), generates=False)
    with caplog.at_level("INFO", logger="forebay"):
        [found] = open_sets(config, facts=facts, rank=0, num_ranks=1)
    assert not found.writes
    assert '"all": a Speech2TextForConditionalGeneration is evaluated by its loss; forebay has texts of' in caplog.text


@pytest.fixture(scope="module")
def seq2seq(folder: Path) -> Config:
    """A Speech2Text on mel frames and texts with an end token, with a set to evaluate."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "symbols")
    model = foreign.speech2text(folder / "seq2seq", vocab_size=len(tokenizer), end=tokenizer.eos_token_id, bins=16)
    transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(model)
    text = _CTC.replace('features = "waveform"', 'features = "extractor"\nextractor = "seq2seq"')
    text = text.replace("end_token = false", "").replace('model = "model"', 'model = "seq2seq"')
    (folder / "seq2seq.toml").write_text(text + _SET.replace("ctc.toml", "seq2seq.toml"))
    config = forebay.load_config(folder / "seq2seq.toml")
    build_here(config)
    return config


def with_limit(config: Config, limit: int) -> Config:
    [entry] = config.train.eval
    return replace(config, train=replace(config.train, eval=(replace(entry, generate_max_tokens=limit),)))


def test_what_a_seq2seq_model_writes_is_what_its_own_generate_gives(seq2seq: Config) -> None:
    found = evaluate_alone(with_limit(seq2seq, 12))
    assert found is not None
    [outcome] = found.outcomes
    assert seq2seq.train.model is not None
    model = load_model(Path(seq2seq.train.model), seed=seq2seq.loader.seed, init="random").eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(seq2seq.text.tokenizer if seq2seq.text else ""), []
    for batch in make_loader(seq2seq, dp_rank=0, dp_world_size=1, shuffle=False):
        labels = batch.pop("labels")
        for ids, row in zip(model.generate(**batch, max_new_tokens=12, do_sample=False), labels, strict=True):
            texts.append([tokenizer.decode(each, skip_special_tokens=True) for each in (row[row >= 0], ids)])
    references, hypotheses = zip(*texts, strict=True)
    assert references[0].startswith("of ")
    assert outcome.result.num_samples == len(texts) == 17
    assert outcome.result.wer == pytest.approx(jiwer.wer(list(references), [text.strip() for text in hypotheses]))
    assert outcome.result.cer is not None


def test_a_generate_that_fails_is_said_once_and_the_loss_stays(
    seq2seq: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("`decoder_start_token_id` has to be defined")

    monkeypatch.setattr(transformers.Speech2TextForConditionalGeneration, "generate", fail)
    config = with_limit(seq2seq, 12)
    both = replace(config.train.eval[0], name="again")
    found = evaluate_alone(replace(config, train=replace(config.train, eval=(*config.train.eval, both))))
    assert found is not None
    assert [each.result.wer for each in found.outcomes] == [None, None]
    assert all(each.result.loss > 0 for each in found.outcomes)
    assert caplog.text.count("no WER, since `generate` of Speech2TextForConditionalGeneration in") == 1
    assert "(ValueError: `decoder_start_token_id` has to be defined)" in caplog.text


_TEXTS = """
name = "texts"
[source]
kind = "text"
manifest = "train.jsonl"
[audio]
features = "none"
[text]
tokenizer = "symbols"
prompt = "plain"
[plan]
edges = [16, 32]
batch_size = 4
lockstep = 1
[run]
cache_root = "caches"
num_workers = 1
[train]
model = "llama"
init = "random"
max_steps = 20
learning_rate = 1e-2
"""


def test_a_causal_model_is_trained_on_texts_alone(folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"t{i}", "text": f"of {'ab'[i % 2]}{i % 7}"}) for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "texts.toml").write_text(_TEXTS + _SET.replace("ctc.toml", "texts.toml"))
    foreign.llama(folder / "llama", vocab_size=64)
    config = forebay.load_config(folder / "texts.toml", overrides=[f'train.output_dir="{tmp_path}"'])
    build_here(config)
    report = run(config)
    assert report is not None
    assert report.loss_last < 0.7 * report.loss_first
    [line] = (tmp_path / "texts" / "eval.jsonl").read_text().splitlines()
    assert json.loads(line)["wer"] is None
    assert json.loads(line)["loss"] < report.loss_first


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's DataLoader about pinned memory
def test_the_trainer_takes_the_same_batches(folder: Path, tmp_path: Path) -> None:
    config = load(folder)
    model = load_model(folder / "model", seed=0, init="random")
    losses = trained_by_trainer(model, make_loader(config, dp_rank=0, dp_world_size=1), tmp_path)
    assert losses[-1] < 0.9 * losses[0]
