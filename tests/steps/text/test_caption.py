"""`plain` under `[vision]`: batches of texts are those of the model's own processor, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessorPil,
    CLIPProcessor,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Siglip2ImageProcessorPil,
    Siglip2Processor,
    SiglipImageProcessorPil,
    SiglipProcessor,
)

from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.batch import collate
from forebay.steps.form import BatchForm
from forebay.steps.text.caption import Caption, CaptionEncoder

WORDS = ("a", "photo", "of", "the", "dog", "cat")
TEXTS = ("a photo of the dog", "the cat", "a")
SIZE = {"height": 16, "width": 16}


def clip_tokenizer(**options: Any) -> CLIPTokenizer:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "th", "the</w>", "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[("t", "h"), ("th", "e</w>")], model_max_length=20, **options)


def word_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    vocab = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **{**names, "model_max_length": 12, **options})


def clip() -> CLIPProcessor:
    return CLIPProcessor(CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIZE), clip_tokenizer())


def siglip() -> SiglipProcessor:
    return SiglipProcessor(SiglipImageProcessorPil(size=SIZE), word_tokenizer())


def siglip2() -> Siglip2Processor:
    return Siglip2Processor(Siglip2ImageProcessorPil(), word_tokenizer(padding_side="left"))


MODELS: dict[str, Any] = {"clip": clip, "siglip": siglip, "siglip2": siglip2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a processor for each model."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(root / name)
    word_tokenizer(model_max_length=1 << 40).save_pretrained(root / "endless")
    (root / "endless" / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    return root


def step_of(folder: Path, **settings: Any) -> Caption:
    return Caption(
        tokenizer=tokenizer_digest(folder),
        processor=processor_digest(folder),
        tokenizer_folder=str(folder),
        processor_folder=str(folder),
        **settings,
    )


def allocate(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


def batch_of(encoder: CaptionEncoder, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns a batch as a reader makes it: from what is stored and the form in the metadata alone."""
    form = BatchForm.from_json(json.loads(json.dumps(encoder.constants["text_form"])))
    samples = [encoder.encode(text, [(8, 6)], sample_id="x") for text in texts]
    assert all({*sample} == {spec.name for spec in form.specs()} for sample in samples)
    arrays = [{name: [array] for name, array in form.arrays(sample).items()} for sample in samples]
    return dict(collate(form, arrays, dtype=torch.bfloat16, allocate=allocate))


@pytest.mark.parametrize(
    ("name", "settings", "call"),
    [
        ("clip", {}, {"padding": True}),
        ("clip", {"padding": "max_length"}, {"padding": "max_length"}),
        ("clip", {"max_length": 9, "truncation": True}, {"padding": True, "max_length": 9, "truncation": True}),
        ("siglip", {}, {"padding": "max_length"}),
        ("siglip", {"padding": "longest"}, {"padding": True}),
        ("siglip2", {}, {}),
        ("siglip2", {"max_length": 5}, {"max_length": 5}),
    ],
)
def test_batches_are_those_of_the_processor(
    name: str, settings: dict[str, Any], call: dict[str, Any], folder: Path
) -> None:
    encoder = step_of(folder / name, **settings).opened(Path(), merge_size=None)
    assert str(encoder.form.promise) == "exact"
    images = [Image.new("RGB", (20, 24))] * len(TEXTS)
    expected = MODELS[name]()(text=list(TEXTS), images=images, return_tensors="pt", **call)
    found = batch_of(encoder, TEXTS)
    assert {*found} == {"input_ids", "attention_mask"}
    assert found.keys() | {key for key in expected if "pix" in key or key == "spatial_shapes"} == expected.keys()
    for key, values in found.items():
        assert values.dtype == expected[key].dtype
        assert torch.equal(values, expected[key]), key


@given(texts=st.lists(st.text(st.sampled_from("thedogcat é1!"), max_size=12), min_size=1, max_size=4))
def test_any_texts_are_padded_as_the_tokenizer_does(texts: list[str], folder: Path) -> None:
    encoder = step_of(folder / "clip").opened(Path(), merge_size=None)
    expected = encoder.tokenizer(texts, padding=True, return_tensors="pt")
    for name, values in batch_of(encoder, texts).items():
        assert torch.equal(values, expected[name])


def test_a_text_that_is_too_long_is_left_out_or_cut(folder: Path) -> None:
    text = "the dog " * 20
    with pytest.raises(TextError, match=r"x: 41 tokens, and a text has at most 12; set text.truncation") as caught:
        step_of(folder / "siglip").opened(Path(), merge_size=None).encode(text, [], sample_id="x")
    assert caught.value.reason == "label_too_long"
    cut = step_of(folder / "siglip", truncation=True).opened(Path(), merge_size=None).encode(text, [], sample_id="x")
    assert len(cut["input_ids"]) == 12
    whole = step_of(folder / "siglip2").opened(Path(), merge_size=None).encode(text * 4, [], sample_id="x")
    assert len(whole["input_ids"]) == 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a <|endoftext|> dog", "special_token_in_text"),
        ("<|startoftext|>", "special_token_in_text"),
        ("a\0", "bad_text"),
    ],
)
def test_control_tokens_in_a_text_are_refused(text: str, reason: str, folder: Path) -> None:
    with pytest.raises(TextError, match="clean it") as caught:
        step_of(folder / "clip").opened(Path(), merge_size=None).encode(text, [], sample_id="x")
    assert caught.value.reason == reason


def test_what_the_tokenizer_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text.max_length: .* has no limit"):
        step_of(folder / "endless", padding="max_length").opened(Path(), merge_size=None)
    assert step_of(folder / "endless").opened(Path(), merge_size=None).form.fields[0].length is None
    word_tokenizer(pad_token=None).save_pretrained(tmp_path / "unpadded")
    (tmp_path / "unpadded" / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"names no pad_token"):
        step_of(tmp_path / "unpadded").opened(Path(), merge_size=None)
    document = tmp_path / "unpadded" / "tokenizer_config.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "auto_map": {"AutoTokenizer": "x.Y"}}))
    with pytest.raises(ConfigError, match=r"auto_map"):
        step_of(tmp_path / "unpadded").opened(Path(), merge_size=None)
    step = step_of(folder / "clip")
    changed = Caption(tokenizer="0" * 64, processor=step.processor, tokenizer_folder=step.tokenizer_folder)
    with pytest.raises(ConfigError, match=r"they changed in between"):
        changed.opened(Path(), merge_size=None)


def test_ids_are_texts_again(folder: Path) -> None:
    encoder = step_of(folder / "clip").opened(Path(), merge_size=None)
    stored = encoder.encode("the dog", [], sample_id="x")
    assert encoder.decode(stored["input_ids"]) == "the dog"
    assert step_of(folder / "clip").fields() == encoder.form.specs("text")
