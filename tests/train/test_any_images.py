"""Models of images of no family, from pictures to a checkpoint: classes, pairs, and conversations."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forebay
from forebay.config import Config
from forebay.config.train import EvalConfig
from forebay.errors import CacheMismatchError
from forebay.steps.text.symbols import Special, SymbolTable
from forebay.train.evaluation.evaluations import evaluate_alone, line_of
from forebay.train.loop.run import run
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo
from tests.train.models import foreign
from tests.vlm_families import model_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
DEMO = Path(__file__).parents[2] / "demo" / "vision"
TEXTS = {"a": "a dog", "b": "a cat", "c": "a bird"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine photos in folders of three classes, each with a text, a processor for 16 x 16 pixels, and letters."""
    folder = tmp_path_factory.mktemp("images")
    for number, path in enumerate(sorted((DEMO / "photos").glob("*.jpg"))[:9]):
        name = "abc"[number % 3]
        target = folder / "set" / name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.with_suffix(".txt").write_text(f"{TEXTS[name]} {number}")
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessorPil(size=size).save_pretrained(folder / "processor")
    table = SymbolTable.of(["abcdefghijklmnopqrstuvwxyz 0123456789"], split="characters", special=Special(eos="</s>"))
    (folder / "letters").mkdir()
    for name, data in table.files().items():
        (folder / "letters" / name).write_bytes(data)
    return folder


def config_of(folder: Path, out: Path, model: Path, **text: Any) -> Config:
    document = {
        "name": "images",
        "source": {"kind": "folder", "manifest": str(folder / "set")},
        "vision": {"processor": str(folder / "processor")},
        "text": text,
        "plan": {"kind": "bucket", "batch_size": 3, "lockstep": 1},
        "train": {
            "model": str(model), "init": "random", "max_steps": 30, "learning_rate": 1e-2, "output_dir": str(out),
            "log_every": 30,
        },
        "run": {"cache_root": str(folder / "caches"), "num_workers": 1},
    }  # fmt: skip
    return forebay.load_config(document)


def with_set(config: Config) -> Config:
    """Returns the config with an evaluation of its own samples."""
    [cache] = [path for path in config.cache_root.glob("images-*") if path.is_dir()]
    return replace(config, train=replace(config.train, eval=(EvalConfig(name="all", cache=str(cache)),)))


def test_classes_of_folders_are_learnt(folder: Path, tmp_path: Path) -> None:
    model = foreign.vit(tmp_path / "model", id2label=dict(enumerate("abc")))
    config = config_of(folder, tmp_path / "runs", model, prompt="label")
    build_here(config)
    first = next(iter(make_loader(config, dp_rank=0, dp_world_size=1)))
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "pixel_values": (3, 3, 16, 16),
        "labels": (3,),
    }
    report = run(config)
    assert report is not None
    assert report.loss_first == pytest.approx(load_model(model, seed=0, init="random")(**first).loss.item(), rel=1e-4)
    assert report.loss_last < 0.8 * report.loss_first
    assert (Path(str(report.checkpoint)) / "preprocessor_config.json").is_file()
    found = evaluate_alone(with_set(config))
    assert found is not None
    [outcome] = found.outcomes
    assert (outcome.result.wer, outcome.result.num_samples) == (None, 9)
    trained = load_model(Path(str(report.checkpoint)), seed=0).eval()
    batches = list(make_loader(config, dp_rank=0, dp_world_size=1))
    with torch.no_grad():
        outputs = [trained(**batch) for batch in batches]
    losses = [output.loss.item() for output in outputs]
    assert outcome.result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    right = [output.logits.argmax(-1) == batch["labels"] for output, batch in zip(outputs, batches, strict=True)]
    assert outcome.result.accuracy is not None
    assert outcome.result.accuracy == outcome.result.f1_micro == pytest.approx(torch.cat(right).float().mean().item())
    assert f"all accuracy {100 * outcome.result.accuracy:.2f} %, F1 " in line_of(outcome.result)


def test_a_set_of_other_classes_is_refused_though_the_model_names_none(folder: Path, tmp_path: Path) -> None:
    model = foreign.vit(tmp_path / "model", id2label={number: f"LABEL_{number}" for number in range(3)})
    config = config_of(folder, tmp_path / "runs", model, prompt="label", classes=["c", "b", "a"])
    build_here(config)
    other = config_of(folder, tmp_path / "runs", model, prompt="label", classes=["c", "a", "b"])
    cache = build_here(other).cache
    config = replace(config, train=replace(config.train, eval=(EvalConfig(name="dev", cache=str(cache)),)))
    with pytest.raises(CacheMismatchError, match=r'"dev": class 1 is \'a\' in .* and \'b\' in the training data; give'):
        run(config)


def test_other_numbers_and_names_of_classes_are_refused_with_both(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path, foreign.vit(tmp_path / "two", id2label={0: "a", 1: "b"}), prompt="label")
    build_here(config)
    with pytest.raises(CacheMismatchError, match=r"the cache has 3 classes, and the model in .*two has 2"):
        run(config)
    names = {0: "a", 1: "c", 2: "b"}
    config = config_of(folder, tmp_path, foreign.vit(tmp_path / "order", id2label=names), prompt="label")
    with pytest.raises(CacheMismatchError, match=r"class 1 is 'b' in the cache and 'c' in the model in .*order"):
        run(config)


def test_pairs_of_images_and_texts_are_learnt(folder: Path, tmp_path: Path) -> None:
    model = foreign.siglip(tmp_path / "model", vocab_size=64, max_position_embeddings=16)
    config = config_of(folder, tmp_path / "runs", model, prompt="plain", tokenizer=str(folder / "letters"))
    build_here(config)
    report = run(config)
    assert report is not None
    assert report.loss_last < 0.9 * report.loss_first


def test_conversations_of_a_smolvlm_are_learnt(tmp_path: Path) -> None:
    model = model_folder("smolvlm", tmp_path)
    corpus = PhotoCorpus(tmp_path)
    for number in range(2):
        corpus.add_photo(f"p{number}.jpg", photo(number, width=64 + 40 * number))
        corpus.ask(f"q{number}", f"p{number}.jpg", answer="A cat.")
    document: dict[str, Any] = {
        "name": "chat",
        "source": {"kind": "jsonl", "manifest": str(tmp_path / "train.jsonl")},
        "vision": {"processor": str(model), "images": "processor"},
        "text": {"prompt": "chat", "tokenizer": str(model)},
        "plan": {"kind": "bucket", "batch_size": 2, "lockstep": 1},
        "train": {"model": str(model), "init": "random", "max_steps": 8, "learning_rate": 1e-2},
        "run": {"cache_root": str(tmp_path / "caches"), "num_workers": 1},
    }
    document["train"]["output_dir"] = str(tmp_path / "runs")
    config = forebay.load_config(document)
    build_here(config)
    [batch] = make_loader(config, dp_rank=0, dp_world_size=1)
    assert {"pixel_values", "input_ids", "attention_mask", "labels"} <= set(batch)
    report = run(config)
    assert report is not None
    facts = model_facts(model, config)
    assert facts.model_class == "SmolVLMForConditionalGeneration"
    own = load_model(model, seed=0, init="random", facts=facts)(**batch).loss.item()
    assert report.loss_first == pytest.approx(own, rel=1e-4)
    assert report.loss_last < 0.8 * report.loss_first
