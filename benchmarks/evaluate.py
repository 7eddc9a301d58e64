"""Measures what an evaluation costs beside bare `generate` and jiwer: `python -m benchmarks.evaluate [--tiny] [--json]
[--rounds N]`.

The demo's Whisper, with random weights, writes texts for the demo's clips: once as an evaluation of a run does, with
loss, rates by language and worst samples, and once as a plain loop over the same batches, which are made
beforehand: `generate` with the prompts of the batch, the tokenizer's `batch_decode`, jiwer's WER and CER. The two take
turns. `evaluation_times_bare` is the median of the ratios of CPU seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jiwer
import torch
from transformers import AutoTokenizer, GenerationMixin

from benchmarks.report import arguments, machine, median, ratio, show, timed
from forebay.config.tree import Config
from forebay.preprocess.pipeline import build
from forebay.pretrained import from_folder
from forebay.steps.recipe import load_config
from forebay.train.evaluation.evaluations import Evaluations
from forebay.train.evaluation.generate import prompts_of
from forebay.train.loop.launch import make_accelerator
from forebay.train.models.model_folder import load_model, model_facts

CONFIG = Path(__file__).parents[1] / "configs/demo_speech.toml"


def demo(folder: str, *, num_samples: int, max_tokens: int) -> Config:
    """Returns the demo config with one set to evaluate, and no files but under `folder`."""
    document = CONFIG.read_text().replace('"../', f'"{CONFIG.parents[1]}/')
    head, _, tail = document.partition("[[train.eval]]")
    this = Path(folder) / "demo.toml"
    this.write_text(head + tail[tail.index("[run]") :])
    evaluated = Path(folder) / "evaluated.toml"
    entry = f'name = "demo"\nconfig = "demo.toml"\nmax_samples = {num_samples}\ngenerate_max_tokens = {max_tokens}\n'
    evaluated.write_text(f"{this.read_text()}\n[[train.eval]]\n{entry}")
    this.write_text(this.read_text().replace(f'"{CONFIG.parents[1]}/caches"', f'"{folder}/caches"'))
    build(load_config(str(this)))
    return load_config(str(evaluated))


def bare(model: Any, batches: Sequence[Any], tokenizer: Any, *, max_tokens: int) -> tuple[float, float]:
    """Returns WER and CER of a plain loop over ready batches."""
    references: list[str] = []
    hypotheses: list[str] = []
    for batch in batches:
        labels = batch["labels"]
        prompts = prompts_of(batch["decoder_input_ids"], labels, labels_are_shifted=True, pad_token_id=0)
        with torch.no_grad():
            ids = GenerationMixin.generate(
                model,
                batch["input_features"],
                decoder_input_ids=prompts.ids,
                max_new_tokens=max_tokens,
                max_length=None,
                do_sample=False,
            )
        hypotheses += tokenizer.batch_decode(ids[:, prompts.ids.shape[1] :], skip_special_tokens=True)
        references += tokenizer.batch_decode(labels.masked_fill(labels < 0, 0), skip_special_tokens=True)
    references = [text or "-" for text in references]
    words, characters = jiwer.process_words(references, hypotheses), jiwer.process_characters(references, hypotheses)
    return float(words.wer), float(characters.cer)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    num_samples, max_tokens = (4, 6) if options.tiny else (52, 64)
    rounds = 1 if options.tiny else options.rounds or 10
    with tempfile.TemporaryDirectory() as folder:
        config = demo(folder, num_samples=num_samples, max_tokens=max_tokens)
        facts = model_facts(Path(config.train.model or ""))
        evaluations = Evaluations(config, facts=facts, accelerator=make_accelerator(config, has_text_alone=False))
        model = load_model(facts.folder, seed=0, init="random")
        tokenizer = from_folder(AutoTokenizer, facts.folder)
        batches = [batch for batch, _ in evaluations.sets[0].loader]  # with what stands beside
        full_s, bare_s = [], []
        for _ in range(rounds + 1):
            full_s.append(timed(lambda: evaluations.now(step=0, model=model)))
            model.eval()
            bare_s.append(timed(lambda: bare(model, batches, tokenizer, max_tokens=max_tokens)))
            model.train()
    full, plain = ([cost.cpu_s for cost in costs[1:]] for costs in (full_s, bare_s))  # the first round warms up
    document = {
        "machine": machine("torch", "transformers", "jiwer"),
        "samples": num_samples,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "evaluation_cpu_s": median(full),
        "bare_cpu_s": median(plain),
        "evaluation_times_bare": ratio(full, plain),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
