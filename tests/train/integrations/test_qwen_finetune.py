"""The items and batches of qwen-vl-finetune, equal to its documented rules written out with transformers' own parts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from forebay.config import Config, PackConfig
from forebay.errors import CacheMismatchError, ConfigError
from forebay.preprocess import build
from forebay.train import load_model
from forebay.train.integrations.qwen_finetune import make_supervised_data_module
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo_corpus

TOKENIZER = AutoTokenizer.from_pretrained(DEMO / "model")
PROCESSOR = SimpleNamespace(tokenizer=TOKENIZER)
LIMITS = {"min_pixels": 16_384, "max_pixels": 131_072}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "image": "p0.jpg", "conversations": [("human", "<image>\n\nWhat is it? "), ("gpt", " A cat.\n")]},
    {"id": "b", "conversations": [("human", "  Who are you?\t"), ("gpt", "A model.")]},
    {
        "id": "c",
        "image": ["p1.jpg", "p2.jpg"],
        "conversations": [
            *(("human", " first <image> \n and then\n<image>"), ("gpt", "Two photos.")),
            *(("human", "<image>".replace("<image>", "Which is red?\n")), ("gpt", "Neither one\n\n of them.")),
        ],
    },
    {"id": "d", "image": "p3.jpg", "conversations": [("human", "<image>"), ("gpt", "A dog, it says.")]},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    found = photo_corpus(tmp_path_factory.mktemp("qwen"))
    turns = [[{"from": who, "value": said} for who, said in row["conversations"]] for row in ROWS]
    found.rows = [{**row, "conversations": own} for row, own in zip(ROWS, turns, strict=True)]
    found.write_manifest()
    build(config_of(found))
    return found


def config_of(corpus: PhotoCorpus) -> Config:
    text = [
        f"text.tokenizer={DEMO / 'model'}",
        "text.prompt=chat",
        "text.learn_through=newline",
        "text.strip_text=true",
    ]
    config = corpus.config(*text)
    return replace(config, plan=PackConfig(seq_len=200))


def module(corpus: PhotoCorpus, **changes: Any) -> dict[str, Any]:
    given = {"dataset_use": config_of(corpus), "data_packing": False, "data_flatten": False, **LIMITS, **changes}
    return make_supervised_data_module(PROCESSOR, SimpleNamespace(**given))


def original(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Texts around `<image>` are stripped, and left out if empty; learnt is what follows `assistant` and a line end, up
    to the end of the turn and one token more."""
    names = [row["image"]] if isinstance(row.get("image"), str) else row.get("image", [])
    messages: list[dict[str, Any]] = []
    for who, said in row["conversations"]:
        parts = [said] if who == "gpt" else [part.strip() for part in re.split("(<image>)", said) if part.strip()]
        content = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts]
        messages.append({"role": "user" if who == "human" else "assistant", "content": content})
    made: dict[str, Any] = {}
    if names:
        processor = Qwen2VLImageProcessorPil.from_pretrained(DEMO / "model")
        made = dict(processor([Image.open(folder / name) for name in names], return_tensors="pt"))
    pad = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
    ids: list[int] = []
    counts = iter(made["image_grid_thw"].prod(1).tolist() if made else [])
    for token in TOKENIZER.apply_chat_template(messages, tokenize=True, return_dict=False):
        ids += [token] * (next(counts) // 4 if token == pad else 1)
    header, end = TOKENIZER("assistant\n")["input_ids"], TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    labels, place = [-100] * len(ids), 0
    while place < len(ids):
        if ids[place : place + len(header)] == header:
            start = place + len(header)
            place = ids.index(end, start)
            labels[start : place + 2] = ids[start : place + 2]
        place += 1
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), **made}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(DEMO / "model", seed=0, init="random")


def with_positions(item: dict[str, Any], model: Any) -> dict[str, Any]:
    kinds = (item["input_ids"] == model.config.image_token_id).int()
    positions, _ = model.model.get_rope_index(
        item["input_ids"], mm_token_type_ids=kinds, image_grid_thw=item.get("image_grid_thw")
    )
    return {**item, "position_ids": positions, "attention_mask": [item["input_ids"].shape[1]]}


def test_items_are_those_of_the_original_rules(corpus: PhotoCorpus, model: Any) -> None:
    data = module(corpus)["train_dataset"]
    assert len(data) == len(ROWS)
    assert data.lengths == [data[index]["input_ids"].shape[1] for index in range(len(ROWS))]
    for index in range(len(data)):
        row = next(row for row in ROWS if row["id"] == data.source.sample_id(index))
        wanted, found = with_positions(original(row, corpus.folder), model), data[index]
        assert found.keys() == wanted.keys()
        assert found.pop("attention_mask") == wanted.pop("attention_mask")
        for name, values in wanted.items():
            assert torch.equal(found[name], values), (row["id"], name)


def test_batches_have_the_names_shapes_and_the_loss_of_their_samples(corpus: PhotoCorpus, model: Any) -> None:
    one, flat, packs = module(corpus), module(corpus, data_flatten=True), module(corpus, data_packing=True)
    items = list(one["train_dataset"])
    padded, row = one["data_collator"](items), flat["data_collator"](items)
    sizes = [item["input_ids"].shape[1] for item in items]
    assert one["eval_dataset"] is None
    assert padded.keys() == row.keys()
    assert padded["pixel_values_videos"] is padded["video_grid_thw"] is None
    assert padded["input_ids"].shape == padded["attention_mask"].shape == (len(items), max(sizes))
    assert row["attention_mask"].tolist() == np.cumsum([0, *sizes]).tolist()
    assert row["position_ids"].shape == (3, 1, sum(sizes))
    for number, item in enumerate(items):
        assert torch.equal(padded["position_ids"][:, number, : sizes[number]], item["position_ids"][:, 0])
        assert (padded["position_ids"][:, number, sizes[number] :] == 1).all()
    with torch.no_grad():
        loss = model(**{name: value for name, value in padded.items() if value is not None}).loss
        total, targets = 0.0, 0
        for item in items:
            own = {name: value for name, value in item.items() if name not in ("attention_mask", "position_ids")}
            kinds = (item["input_ids"] == model.config.image_token_id).int()
            count = int((item["labels"] != -100).sum())
            total += float(model(**own, mm_token_type_ids=kinds).loss) * count
            targets += count
    assert float(loss) == pytest.approx(total / targets, abs=1e-5)
    held = packs["train_dataset"]
    assert sum(len(item["attention_mask"]) for item in held) == len(ROWS) > len(held)
    batch = packs["data_collator"](list(held))
    assert sorted(np.diff(batch["attention_mask"]).tolist()) == sorted(sizes)
    assert sorted(batch["labels"][0].tolist()) == sorted(row["labels"][0].tolist())
    texts = [item for item in items if "pixel_values" not in item]
    assert len(texts) == 1
    assert flat["data_collator"](texts)["pixel_values"] is None


def test_arguments_that_are_not_those_of_the_samples_are_refused(corpus: PhotoCorpus) -> None:
    with pytest.raises(CacheMismatchError, match="max_pixels is 131072 in the samples and 451584"):
        module(corpus, max_pixels=28 * 28 * 576)
    with pytest.raises(ConfigError, match="qwen-vl-finetune needs"):
        module(corpus, dataset_use=replace(config_of(corpus), plan=None))
    args = {"dataset_use": config_of(corpus), "data_packing": False, "data_flatten": False, **LIMITS}
    other = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(DEMO.parent / "text/model"))
    with pytest.raises(CacheMismatchError, match="image_token_id"):
        make_supervised_data_module(other, SimpleNamespace(**args))
    short = AutoTokenizer.from_pretrained(DEMO / "model", model_max_length=20)
    own = make_supervised_data_module(SimpleNamespace(tokenizer=short), SimpleNamespace(**args))
    with pytest.raises(ConfigError, match="model_max_length is 20"):
        own["data_collator"](list(own["train_dataset"]))
