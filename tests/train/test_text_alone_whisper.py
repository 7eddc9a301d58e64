"""Text-only micro-batches among those of a Whisper, whose decoder then attends to zeros or to silence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor

from forebay import cli
from forebay.config import Config, LoraConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.steps.recipe import load_config
from forebay.store.source import SourceUnion, source_kind
from forebay.train.evaluation.evaluations import evaluate_alone
from forebay.train.loop import launch
from forebay.train.loop.meter import StepLog
from forebay.train.loop.run import run
from forebay.train.models.lora import with_adapters
from forebay.train.models.model_folder import check_batch, check_config, check_constants, load_model, model_facts
from forebay.train.models.whisper import SILENCE, prepare_text_alone
from forebay.train.select import make_loader, select
from tests.preprocess.here_pool import build_here
from tests.text_corpus import ROOT, demo_texts, text_config, write_texts
from tests.train.tiny import NUM_MEL_FRAMES, config_of, whisper_batch, whisper_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
MODEL = ROOT / "demo" / "speech" / "model"
TextEncoder = Literal["zeros", "silence"]
TEXT = f"""\
name = "texts"
[source]
kind = "text"
manifest = "texts.jsonl"
[audio]
features = "none"
[text]
tokenizer = "{MODEL}"
prompt = "whisper"
max_label_tokens = 448
[plan]
edges = [8, 16, 32, 64]
batch_tokens = 256
lockstep = 1
[run]
cache_root = "caches"
num_workers = 1
"""


def speech_toml(folder: Path) -> str:
    """Returns `configs/demo_speech.toml` without its evaluation and with its caches and runs under `folder`."""
    toml = (ROOT / "configs" / "demo_speech.toml").read_text(encoding="utf-8")
    head, _, rest = toml.partition("[[train.eval]]")
    toml = head + rest[rest.index("[run]") :]
    toml = toml.replace('"../caches"', f'"{folder / "caches"}"').replace('"../runs"', f'"{folder / "runs"}"')
    return toml.replace("../demo", str(ROOT / "demo")).replace("num_workers = 2", "num_workers = 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both caches of the demo recordings, `texts.toml`, and `mixed.toml`: three micro-batches of four have audio."""
    made = tmp_path_factory.mktemp("whisper")
    write_texts(made / "texts.jsonl", demo_texts())
    (made / "texts.toml").write_text(TEXT, encoding="utf-8")
    (made / "speech.toml").write_text(speech_toml(made), encoding="utf-8")
    plan = "edges = [16, 64]\nbatch_tokens = 256\nbatch_seconds"
    mixture = '[mixture]\nbatches = "per_source"\nasr_ratio = 0.75\nsource = [{config = "speech.toml"}, '
    mixed = speech_toml(made).replace("batch_seconds", plan, 1) + mixture + '{config = "texts.toml"}]\n'
    (made / "mixed.toml").write_text(mixed, encoding="utf-8")
    for name in ("speech.toml", "texts.toml"):
        build_here(load_config(made / name))
    return made


def mixed_config(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "mixed.toml", overrides=["loader.num_threads=1", *overrides])


def text_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    batch = whisper_batch(seed)
    del batch["input_features"]
    return batch


def test_a_text_is_the_sequence_of_the_tokenizer_with_its_prompt_masked(folder: Path) -> None:
    loader = make_loader(load_config(folder / "texts.toml"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = demo_texts()
    for position, batch in enumerate(loader):
        assert batch.keys() == {"decoder_input_ids", "labels"}
        for row, index in enumerate(loader.plan.order(loader.state.seed, 0).batch(position).tolist()):
            tokenizer.set_prefix_tokens(language=rows[index]["language"], task="transcribe", predict_timestamps=False)
            text = " ".join(rows[index]["text"].split())
            wanted = tokenizer(text)["input_ids"]
            length = len(wanted) - 1
            assert batch["decoder_input_ids"][row, :length].tolist() == wanted[:-1]
            assert batch["labels"][row].tolist() == [-100] * 3 + wanted[4:] + [-100] * (
                len(batch["labels"][row]) - length
            )


def test_cached_equals_uncached(folder: Path) -> None:
    configs = [load_config(folder / "texts.toml", overrides=[f'loader.cache="{mode}"']) for mode in ("require", "off")]
    assert [source_kind(select(config)) for config in configs] == ["cache", "uncached"]
    for one, two in zip(*map(make_loader, configs), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_is_that_of_transformers_with_encoder_outputs_given(tmp_path: Path) -> None:
    """`zeros` is one position of zeros; `silence` what the encoder makes of the extractor's 30 s of silence."""
    folder = whisper_folder(tmp_path)
    silence = WhisperFeatureExtractor(feature_size=80)(np.zeros(16_000, np.float32), sampling_rate=16_000)
    features = torch.from_numpy(silence["input_features"])[:, :, :NUM_MEL_FRAMES]
    assert torch.equal(features, torch.full_like(features, SILENCE))
    plain = load_model(folder, seed=3, init="random").eval()
    batch = text_batch()
    wanted = {
        "zeros": plain(encoder_outputs=(torch.zeros(2, 1, 64),), **batch).loss,
        "silence": plain(input_features=features.expand(2, -1, -1), **batch).loss,
    }
    assert wanted["zeros"] != wanted["silence"]
    for name, loss in wanted.items():
        model = load_model(folder, seed=3, init="random").eval()
        prepare_text_alone(model, name)  # type: ignore[arg-type]
        assert model(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-6)
        with_audio = whisper_batch(1)
        assert torch.equal(model(**with_audio).logits, plain(**with_audio).logits)
        given = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
        assert torch.equal(
            model(encoder_outputs=(given,), **batch).logits, plain(encoder_outputs=(given,), **batch).logits
        )


def test_a_model_with_adapters_takes_text_too(tmp_path: Path) -> None:
    """Adapters begin as nothing: the loss is that of the model alone, and only they get a gradient."""
    folder = whisper_folder(tmp_path)
    plain, inner = (load_model(folder, seed=3, init="random").eval() for _ in range(2))
    adapted = with_adapters(inner, LoraConfig(rank=2, alpha=4.0), seed=0, base=None).eval()
    for each in (plain, adapted):
        prepare_text_alone(each, "silence")
    loss = adapted(**text_batch()).loss
    assert loss.item() == pytest.approx(plain(**text_batch()).loss.item(), rel=1e-6)
    loss.backward()
    learnt = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert learnt
    assert all(".decoder." in name and ".lora_" in name for name in learnt)


@pytest.mark.wide
def test_a_compiled_model_takes_text_too(tmp_path: Path) -> None:
    # 8 s of CPU, nearly all of them torch's: the one place where the hook is traced.
    folder = whisper_folder(tmp_path, encoder_layers=1, decoder_layers=1)
    model, plain = (load_model(folder, seed=3, init="random").eval() for _ in range(2))
    for each in (model, plain):
        prepare_text_alone(each, "silence")
    model.compile(backend="eager")
    for batch in (text_batch(), whisper_batch(1)):
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_text_alone_and_fsdp_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a text gathers no weights of the encoder, for which the rank with audio beside it would wait."""
    monkeypatch.setattr(launch, "process_state", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"mixtures with text alone do not go with FSDP; use DDP"):
        launch.make_accelerator(config_of(tmp_path, model=tmp_path), has_text_alone=True)


@pytest.mark.parametrize("text_encoder", ["zeros", "silence"])
def test_the_encoder_gets_no_gradient_and_passes_once_at_most(tmp_path: Path, text_encoder: TextEncoder) -> None:
    model = load_model(whisper_folder(tmp_path), seed=3, init="random")
    prepare_text_alone(model, text_encoder)
    passes: list[Any] = []
    model.model.encoder.register_forward_pre_hook(lambda _, arguments: passes.append(arguments[0].shape))
    model(**text_batch()).loss.backward()
    assert passes == ([] if text_encoder == "zeros" else [(1, 80, NUM_MEL_FRAMES)])
    assert all(parameter.grad is None for parameter in model.model.encoder.parameters())
    assert all(parameter.grad is not None for parameter in model.model.decoder.parameters())


def test_a_model_that_nobody_prepared_raises(tmp_path: Path) -> None:
    """A batch under a model's argument names is right for `model(**batch)`, or the call raises."""
    for changes in ({}, {"apply_spec_augment": True}):
        model = load_model(whisper_folder(tmp_path, **changes), seed=3, init="random")
        with pytest.raises(AttributeError, match=r"'NoneType' object has no attribute"):
            model(**text_batch())


def test_a_mask_of_spec_augment_leaves_silence_alone(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path, apply_spec_augment=True, mask_feature_prob=0.9, mask_feature_length=2)
    model = load_model(folder, seed=3, init="random")
    prepare_text_alone(model, "silence")
    seen: list[torch.Tensor] = []
    model.model.encoder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model(**text_batch())
    assert torch.equal(seen[0], torch.full_like(seen[0], SILENCE))


@pytest.mark.parametrize("text_encoder", ["zeros", pytest.param("silence", marks=pytest.mark.wide)])
def test_the_loop_trains_on_speech_and_text_and_resumes_exactly(
    folder: Path, tmp_path: Path, text_encoder: TextEncoder
) -> None:
    # 5 s of CPU each: a Whisper hears 30 s a clip, and this is the one real run of each setting.
    def losses(name: str, steps: int, *, resume: bool = False) -> list[float]:
        lines: list[StepLog] = []
        settings = [f"train.max_steps={steps}", "train.log_every=1", f'train.output_dir="{tmp_path / name}"']
        settings += ["train.warmup_steps=10", f'train.text_encoder="{text_encoder}"', "plan.batch_seconds=10"]
        report = run(mixed_config(folder, *settings), resume=resume, log=lines.append)
        assert report is not None
        assert sum(part["share"] for part in report.parts.values()) == pytest.approx(1, abs=1e-5)
        assert sum(line.startswith("part ") for line in report.lines()) == 2
        return [line.loss for line in lines]

    whole = losses("whole", 8)
    assert losses("parts", 3) + losses("parts", 8, resume=True) == pytest.approx(whole, rel=1e-5)
    assert np.mean(whole[-3:]) < np.mean(whole[:3])


def test_the_mixture_hands_out_both(folder: Path) -> None:
    loader = make_loader(mixed_config(folder))
    assert isinstance(loader.source, SourceUnion)
    facts = model_facts(MODEL)
    for part in loader.source.sources:
        check_constants(facts, part.constants)
    fields = {"decoder_input_ids", "labels"}
    kinds = set()
    for batch in loader:
        check_batch(facts, batch)
        kinds.add(frozenset(batch))
    assert kinds == {frozenset(fields), frozenset({"input_features", *fields})}


def test_a_text_alone_run_and_inspect(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f'train.model="{MODEL}"', 'train.init="random"', "train.max_steps=2", "train.learning_rate=1e-3"]
    config = load_config(folder / "texts.toml", overrides=[*settings, f'train.output_dir="{tmp_path}"'])
    report = run(config)
    assert report is not None
    assert report.loss_last < report.loss_first
    assert cli.main(["inspect", str(folder / "texts.toml"), "--sample", "0", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert sample["row"]["text"] == sample["labels"]["text"]


def test_texts_are_evaluated_by_their_loss(folder: Path, tmp_path: Path) -> None:
    """The loss comes from a run and from `forebay eval`, which loads the checkpoint anew; no text is written."""
    sets = f'train.eval=[{{name = "texts", config = "{folder / "texts.toml"}", max_samples = 10}}]'
    settings = ["train.max_steps=1", f'train.output_dir="{tmp_path}"', "plan.batch_seconds=5", sets]
    config = mixed_config(folder, *settings, 'train.text_encoder="silence"')
    assert run(config) is not None
    [line] = (tmp_path / config.name / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    report = evaluate_alone(config)
    assert report is not None
    [outcome] = report.outcomes
    assert (outcome.result.wer, outcome.result.num_samples) == (None, 10)
    assert json.loads(line)["loss"] == pytest.approx(outcome.result.loss, rel=1e-6)


def test_texts_of_another_prompt_are_refused_before_data_is_read(tmp_path: Path) -> None:
    config = text_config(tmp_path, f'train.model="{MODEL}"')
    with pytest.raises(ConfigError, match=r"text.prompt is 'plain', but .* is a whisper model; set .* = \"whisper\""):
        run(config)
    facts = model_facts(whisper_folder(tmp_path / "model"))
    with pytest.raises(
        CacheMismatchError,
        match=r"wants 'whisper' for text without audio, the cache has 'plain'; .* forebay preprocess",
    ):
        check_constants(facts, {"features": "none", "prompt": "plain"})
    check_constants(facts, {"features": "none", "prompt": "whisper"})
    with pytest.raises(ConfigError, match=r'audio.features is "qwen3_asr", but .* takes "log_mel"'):
        check_config(facts, config_of(tmp_path, model=tmp_path / "model", model_type="qwen3_asr"))
    with pytest.raises(CacheMismatchError, match=r"no field decoder_input_ids"):
        check_batch(facts, {"input_ids": torch.zeros(1, 3), "labels": torch.zeros(1, 3)})
