"""Raw photos and conversations become batches of tiny models: the processor's own batches, and the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from forebay import load_config
from forebay.config import Config
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.text.test_processor_chat import encoder_of, own_batch, own_labels
from tests.vlm_families import ANSWERS, FAMILIES, NAMES, model_folder, picture, random_model, talk

_SIZES = [(64, 48), (48, 90), (100, 60)]


Talks = dict[str, list[dict[str, Any]]]


def corpus(
    name: str, folder: Path, root: Path, *, images: str = "processor", plan: str = "batch_size = 2"
) -> tuple[Config, Talks]:
    """A config over a few conversations, one of them without an image, and these by their ids, with their images."""
    together = name not in FAMILIES or FAMILIES[name].together
    for seed, (width, height) in enumerate(_SIZES):
        picture(seed, width=width, height=height).save(folder / f"p{seed}.png")
    shown = [[0], [1, 2] if together else [1], [2], [], [0]]
    said = [["A cat."], ["Still a cat.", "A dog.", "two dogs"], ["A dog."], ["Nothing."], ["a dog", "Two cats."]]
    rows: list[dict[str, Any]] = []
    talks: Talks = {}
    for number, (places, answers) in enumerate(zip(shown, said, strict=True)):
        pictures = [Image.open(folder / f"p{image}.png").convert("RGB") for image in places]
        talks[f"q{number}"] = talk(*answers, images=pictures)
        parts = [[{k: v for k, v in p.items() if k != "image"} for p in m["content"]] for m in talks[f"q{number}"]]
        messages = [{**m, "content": p} for m, p in zip(talks[f"q{number}"], parts, strict=True)]
        rows.append({"id": f"q{number}", "image": [f"p{image}.png" for image in places], "messages": messages})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "config.toml"
    path.write_text(
        'name = "tiny"\n[source]\nkind = "jsonl"\nmanifest = "train.jsonl"\n'
        f'[vision]\nprocessor = "{model_folder(name, root)}"\nimages = "{images}"\n'
        f"[plan]\n{plan}\n"
        '[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    return load_config(path), talks


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


_SHOWN = ("gemma3", "idefics3", "internvl", "llava_onevision", "pixtral")
"""One family of each way in which images stand in a batch; `tests/steps/text/test_processor_chat.py` has them all."""


@pytest.mark.parametrize("name", [n if n in _SHOWN else pytest.param(n, marks=pytest.mark.wide) for n in NAMES])
def test_a_batch_of_the_cache_is_the_processor_s_own(name: str, root: Path, tmp_path: Path) -> None:
    config, talks = corpus(name, tmp_path, root)
    assert build_here(config).num_samples == 5
    coder, model = encoder_of(model_folder(name, root)), random_model(model_folder(name, root))
    answer = FAMILIES[name].answer if name in FAMILIES else ANSWERS[name]
    count = 0
    batches: Any = make_loader(config, with_ids=True)
    for batch, ids in batches:
        own = own_batch(coder, [talks[sample_id] for sample_id in ids])
        labels = own_labels(coder, own["input_ids"], answer=answer)
        assert sorted(batch) == sorted([*own, "labels"])
        for field, values in own.items():
            assert torch.equal(batch[field], torch.as_tensor(values)), field
        assert torch.equal(batch["labels"], labels)
        with torch.no_grad():
            assert torch.equal(model(**batch).loss, model(**own, labels=labels).loss)
        count += len(ids)
    assert count == 5


@pytest.mark.parametrize("name", [pytest.param("qwen2_vl", marks=pytest.mark.wide), "qwen2_5_vl"])
def test_packs_of_patches_have_the_loss_of_the_processor_s_batches(name: str, root: Path, tmp_path: Path) -> None:
    """Qwen2-VL and Qwen2.5-VL by the native way, too: a pack's loss is that of its samples one by one."""
    config, talks = corpus(name, tmp_path, root, images="patches", plan='kind = "pack"\nseq_len = 200')
    assert build_here(config).num_samples == 5
    coder, model = encoder_of(model_folder(name, root)), random_model(model_folder(name, root))
    batches: Any = make_loader(config, with_ids=True)
    for batch, ids in batches:
        total = count = 0.0
        with torch.no_grad():
            for sample_id in ids:
                own = own_batch(coder, [talks[sample_id]])
                labels = own_labels(coder, own["input_ids"], answer=FAMILIES[name].answer)
                targets = int((labels[:, 1:] != -100).sum())
                total += float(model(**own, labels=labels).loss) * targets
                count += targets
            assert float(model(**batch).loss) == pytest.approx(total / count, rel=1e-5)
