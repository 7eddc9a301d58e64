"""The arm `hf` over images as their processor gives them: its batches are those of the cache, and it trains on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ViTConfig, ViTImageProcessorPil

from forebay import load_config
from forebay.config import BucketConfig, Config
from forebay.errors import ConfigError
from forebay.measure import plain_loop as plain
from forebay.measure.compare_report import _agreement
from forebay.measure.compared_ways import arms_of
from forebay.measure.plain_loop import ProcessorCollator, agreement
from forebay.train.select import make_loader
from forebay.train.uncached.uncached_source import PlainSamples
from tests.images.test_families import corpus
from tests.measure.compare.test_turns import done, tasks
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, class_folders
from tests.steps.text.test_caption import clip

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]
CLASSES = {"bird": ["bird.jpg", "nuthatch.jpg"], "cat": ["cat.png"], "dog": ["dogs.jpg"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos with classes and captions, a tiny model of classes, and the folder of a processor of pairs."""
    root = tmp_path_factory.mktemp("hf")
    class_folders(root / "set", CLASSES)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(root / "vit")
    names = dict(enumerate(sorted(CLASSES)))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = ViTConfig(**sizes, image_size=32, id2label=names, label2id={name: n for n, name in names.items()})
    model.architectures = ["ViTForImageClassification"]
    model.save_pretrained(root / "vit")
    clip().save_pretrained(root / "clip")
    return root


def config_of(root: Path, prompt: str) -> Config:
    folder = root / ("clip" if prompt == "plain" else "vit")
    document: dict[str, Any] = {
        "name": prompt,
        "source": {"kind": "folder", "manifest": str(root / "set")},
        "vision": {"processor": str(folder)},
        "text": {"prompt": prompt, **({"tokenizer": str(folder)} if prompt == "plain" else {})},
        "plan": {"batch_size": 2},
        "loader": {"num_threads": 0},
        "train": {"model": str(folder), "init": "random", "output_dir": str(root / "runs")},
        "run": {"cache_root": str(root / "caches"), "num_workers": 1},
    }
    return load_config(document)


def compared(config: Config) -> tuple[dict[str, Any], ProcessorCollator, Any]:
    """Returns how all samples of a config's cache compare with the processor's, two in a batch."""
    build_here(config)
    source = make_loader(config, dp_rank=0, dp_world_size=1).source
    pictures = PlainSamples(config, [source.sample_id(index) for index in range(len(source))])
    pictures.write_texts()
    collator = ProcessorCollator(pictures, source)
    places = list(range(len(source)))
    batches = [places[start : start + 2] for start in places[::2]]
    found = agreement(source, pictures, collator, places=places, batches=batches)
    return found, collator, (source, pictures, places, batches)


@pytest.mark.parametrize(("prompt", "fields"), [("label", {"labels"}), ("plain", {"input_ids", "attention_mask"})])
def test_batches_of_classes_and_captions_are_the_processor_s(prompt: str, fields: set[str], root: Path) -> None:
    found, _, _ = compared(config_of(root, prompt))
    assert found["differences"] == dict.fromkeys({"pixel_values", *fields}, 0.0)
    assert (found["is_kept"], found["batches"], found["samples"], found["promise"]) == (True, 2, 4, "exact")
    assert "2 batches of 4 samples of the cache and of hf are equal bit for bit" in _agreement("hf", found)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("llava_onevision", marks=pytest.mark.wide)])
def test_batches_of_conversations_are_the_processor_s(name: str, tmp_path: Path) -> None:
    config, _ = corpus(name, tmp_path, tmp_path)
    found, _, _ = compared(config)
    assert found["is_kept"], found
    assert {"input_ids", "labels", "pixel_values"} <= found["differences"].keys()


def test_what_differs_is_named(root: Path) -> None:
    found, collator, rest = compared(config_of(root, "label"))
    source, pictures, places, batches = rest

    class Other:
        def __call__(self, samples: Any) -> Any:
            batch = collator(samples)
            batch["pixel_values"] = batch["pixel_values"] + 0.5
            del batch["labels"]
            return batch

    found = agreement(source, pictures, Other(), places=places, batches=batches)  # type: ignore[arg-type]
    assert found["differences"] == {"labels": None, "pixel_values": pytest.approx(0.5)}
    assert not found["is_kept"]
    sentence = _agreement("hf", found)
    assert "DIFFER: labels in shape, dtype or that one has it, pixel_values by up to 0.5" in sentence


def test_samples_that_a_processor_does_not_take_together_are_named(root: Path) -> None:
    _, collator, (_, pictures, _, _) = compared(config_of(root, "label"))
    with pytest.raises(ConfigError, match=r"--against hf: ViTImageProcessorPil .* does not take 1 samples together"):
        collator([{**pictures[0], "images": [object()]}])


def test_hf_trains_on_the_samples_of_each_block_with_the_losses_of_the_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numbers of workers are tried in test_turns.py; each takes seconds.
    monkeypatch.setattr(plain, "_tried_workers", lambda *_, **__: {0: 1.0})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = config_of(root, "label")
    build_here(config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=2))
    made = tasks(config, against="hf,unbucketed", steps=2, folder=tmp_path)
    found = {name: done(task) for name, task in made.items()}
    torch.set_num_threads(threads)
    (setup, turns, _), (_, own, _) = found["hf"], found["unbucketed"]
    assert setup.agreement is not None
    assert setup.agreement["is_kept"]
    assert [turn.ids for turn in turns] == [turn.ids for turn in own]
    losses = [[loss for turn in each for loss in turn.losses] for each in (turns, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_patches_are_refused() -> None:
    config = load_config(str(DEMO.parents[1] / "configs" / "demo_vision.toml"))
    with pytest.raises(ConfigError, match="stores patches"):
        arms_of("hf", dataclasses.replace(config, plan=BucketConfig(batch_size=2)))
