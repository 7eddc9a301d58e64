"""Logits of a teacher, scores that become columns, and pooled outputs, held against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image, ImageOps

from forebay import load_config
from forebay.errors import ForebayError
from forebay.store.cache import Cache
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import PHOTOS, SPEECH, TEXTS, Corpus, of_sample, section
from tests.steps.model.tiny_frozen import RATE_HZ

TEACHERS = ("llama", "gpt2", "qwen3")
TOP = """args = {k = 5}
[model.keep]
%(n)s_tokens = {output = "input_ids"}
%(n)s_ids = {output = "top_ids"}
%(n)s_logits = {output = "top_logits"}"""
GOOD = "args = {label = 'good'}\nkeep = {good = {output = 'probability'}, best = {output = 'label'}}"
LOUD = "keep = {loud = {output = 'probability'}, raw = {output = 'logit'}}"


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Cache]:
    corpus = Corpus(tmp_path_factory.mktemp("scores"), *TEACHERS, "judge", "listener")
    teachers = [section(name, "text", TOP % {"n": name}) for name in TEACHERS]
    return corpus, corpus.cache(
        SPEECH + "".join(teachers) + section("judge", "text", GOOD) + section("listener", "audio", LOUD)
    )


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.few("gpt2", "qwen3")
def test_a_teacher_s_top_logits(speech: tuple[Corpus, Cache], name: str) -> None:
    corpus, cache = speech
    tokenizer = T.AutoTokenizer.from_pretrained(corpus.folder / name)
    model = T.AutoModelForCausalLM.from_pretrained(corpus.folder / name).eval()
    for index in range(len(cache)):
        tokens = tokenizer(TEXTS[int(cache.sample_id(index))], return_tensors="pt")
        with torch.inference_mode():
            wanted = model(**tokens).logits[0].topk(5)
        ids, logits = (of_sample(cache, f"{name}_{what}", index) for what in ("ids", "logits"))
        assert (ids.dtype, logits.dtype) == (np.int32, np.float16)
        np.testing.assert_array_equal(of_sample(cache, f"{name}_tokens", index), tokens["input_ids"][0])
        np.testing.assert_array_equal(ids, wanted.indices)
        np.testing.assert_allclose(logits, wanted.values, rtol=2e-3, atol=2e-3)


def test_scores_are_columns_by_which_samples_are_chosen(speech: tuple[Corpus, Cache]) -> None:
    corpus, cache = speech
    judge = T.BertForSequenceClassification.from_pretrained(corpus.folder / "judge").eval()
    listener = T.HubertForSequenceClassification.from_pretrained(corpus.folder / "listener").eval()
    tokenizer = T.AutoTokenizer.from_pretrained(corpus.folder / "judge")
    extractor = T.AutoFeatureExtractor.from_pretrained(corpus.folder / "listener")
    rows = cache.table(["sample_id", "good", "best", "loud", "raw"]).to_pylist()
    for row in rows:
        number = int(row["sample_id"])
        heard = extractor(corpus.clips[number], sampling_rate=RATE_HZ, return_tensors="pt")
        with torch.inference_mode():
            logits = judge(**tokenizer(TEXTS[number], return_tensors="pt")).logits[0]
            raw = listener(**heard).logits[0, 0]
        np.testing.assert_allclose(row["good"], logits.softmax(-1)[1], atol=1e-6)
        assert row["best"] == logits.argmax()
        np.testing.assert_allclose([row["raw"], row["loud"]], [raw, raw.sigmoid()], atol=1e-5)
    bound = sorted(row["good"] for row in rows)[2]
    wanted = {row["sample_id"] for row in rows if row["good"] > bound}
    overrides = [f"filter.where=good > {bound!r}", "loader.cache=require"]
    loader: Any = make_loader(load_config(corpus.folder / "config.toml", overrides=overrides), with_ids=True)
    loader.set_epoch(0)
    batches = list(loader)
    assert {name for _, ids in batches for name in ids} == wanted
    assert not {"good", "best", "loud", "raw"} & set(batches[0][0])
    config = load_config(corpus.folder / "config.toml", overrides=["filter.quota={best = 1}"])
    assert len(make_loader(config).source) == len({row["best"] for row in rows})


def test_texts_are_padded_on_the_right_whatever_the_tokenizer_says(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "gpt2")
    tokenizer = T.AutoTokenizer.from_pretrained(tmp_path / "gpt2", padding_side="left")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    more = "batch = 4\nargs = {k = 2}\nkeep = {ids = {output = 'top_ids'}, states = {output = 'last_hidden_state'}}"
    cache = corpus.cache(SPEECH + section("gpt2", "text", more))
    model = T.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").eval()
    for index in range(len(cache)):
        with torch.inference_mode():
            tokens = tokenizer(TEXTS[int(cache.sample_id(index))], return_tensors="pt")
            answer = model(**tokens, output_hidden_states=True)
        np.testing.assert_array_equal(of_sample(cache, "ids", index), answer.logits[0].topk(2).indices)
        np.testing.assert_allclose(of_sample(cache, "states", index), answer.hidden_states[-1][0], atol=2e-3, rtol=2e-3)


POOLED = """call = "get_%(what)s_features"
keep = {%(what)s_pooled = {output = "pooler_output", dtype = "float32"}}"""
SIMILAR = """[[model]]
name = "similarity"
folder = "clip"
takes = ["image", "text"]
keep = {similar = {output = "similarity"}}
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Cache]:
    corpus = Corpus(tmp_path_factory.mktemp("pooled"), "clip", "viewer", "siglip")
    sections = section("clip", "image", POOLED % {"what": "image"})
    sections += section("viewer", "image", "args = {label = 2}\nkeep = {third = {output = 'probability'}}")
    sections += section("siglip", "image", "keep = {whole = {output = 'pooler_output'}}")
    return corpus, corpus.cache(PHOTOS + sections)


def seen(corpus: Corpus, cache: Cache, index: int) -> Any:
    (path,) = (p for p in (corpus.folder / "photos").rglob("*") if p.stem == cache.sample_id(index))
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def test_pooled_outputs_and_the_score_of_an_image(photos: tuple[Corpus, Cache]) -> None:
    corpus, cache = photos
    folders = [corpus.folder / name for name in ("clip", "viewer", "siglip")]
    processors = [T.AutoImageProcessor.from_pretrained(folder, backend="pil") for folder in folders]
    clip, siglip = (T.AutoModel.from_pretrained(folder).eval() for folder in (folders[0], folders[2]))
    viewer = T.AutoModelForImageClassification.from_pretrained(folders[1]).eval()
    third = cache.table(["third"])["third"].to_pylist()
    for index in range(len(cache)):
        inputs = [each(seen(corpus, cache, index), return_tensors="pt") for each in processors]
        with torch.inference_mode():
            pooled = clip.get_image_features(**inputs[0]).pooler_output[0]
            probability = viewer(**inputs[1]).logits.softmax(-1)[0, 2]
            whole = siglip(**inputs[2]).pooler_output[0]
        np.testing.assert_allclose(of_sample(cache, "image_pooled", index), pooled, atol=1e-5)
        np.testing.assert_allclose(of_sample(cache, "whole", index), whole, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(third[index], probability, atol=1e-6)


def test_similarity_of_an_image_and_its_text(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "clip", "siglip")
    names = sorted(path.name for path in (tmp_path / "photos").rglob("*.jpg"))[:3]
    rows = [(names[0], "one"), (names[1], "one"), (names[0], "two longer words"), (names[2], " ")]
    lines = [f'{{"image": "photos/{image}", "text": "{text}", "id": "{n}"}}\n' for n, (image, text) in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    image_text = SPEECH.replace("[plan]", 'meaning = "captions"\n[plan]') + '[text]\nprompt = "none"\n'
    cache = corpus.cache(image_text + SIMILAR + section("clip", "text", POOLED % {"what": "text"}))
    assert cache.metadata["excluded"] == {"no_text": 1}
    model = T.CLIPModel.from_pretrained(tmp_path / "clip").eval()
    processor = T.AutoImageProcessor.from_pretrained(tmp_path / "clip", backend="pil")
    tokenizer = T.AutoTokenizer.from_pretrained(tmp_path / "clip")
    similar = cache.table(["similar"])["similar"].to_pylist()
    for index in range(len(cache)):
        image, text = rows[int(cache.sample_id(index))]
        photo = ImageOps.exif_transpose(Image.open(tmp_path / "photos" / image)).convert("RGB")
        with torch.inference_mode():
            tokens = tokenizer(text, return_tensors="pt")
            answer = model(**tokens, **processor(photo, return_tensors="pt"))
            pooled = model.get_text_features(**tokens).pooler_output[0]
        cosine = torch.cosine_similarity(answer.image_embeds[0], answer.text_embeds[0], dim=0)
        np.testing.assert_allclose(similar[index], cosine, atol=1e-5)
        np.testing.assert_allclose(of_sample(cache, "text_pooled", index), pooled, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("llama", "keep = {ids = {output = 'top_ids'}}", "k is None, wanted 1 to 808"),
        ("llama", "args = {k = 809}\nkeep = {ids = {output = 'top_ids'}}", "k is 809, wanted 1 to 808"),
        ("llama", "args = {k = 1}", "k is no argument of forward here; it takes none"),
        ("judge", "args = {k = 1}\nkeep = {ids = {output = 'top_ids'}}", "no one model that takes text"),
        ("judge", "keep = {x = {output = 'probability'}}", "label is None, wanted 0 to 2 or one of bad, good, best"),
        ("judge", GOOD.replace("'good'", "'great'"), "label is 'great'"),
        ("judge", GOOD.replace("'good'", "true"), "label is True"),
        ("llama", GOOD, "lacks 1 weights of LlamaForSequenceClassification"),
        ("judge", GOOD.replace("best =", "duration_s ="), "number is called 'duration_s', which is a column"),
        ("judge", GOOD.replace("best =", "'a b' ="), "keep has a field 'a b'"),
        ("llama", "layer = 3", "layer is 3, and LlamaModel has layers 0 to 2"),
        ("judge", "call = 'generate_all'", "BertModel has no generate_all"),
        ("judge", "keep = {x = {output = 'similarity'}}", "gives no image_embeds"),
        ("judge", "takes = ['text', 'text']", "takes is"),
    ],
)
def test_what_a_model_cannot_give_is_refused(speech: tuple[Corpus, Cache], name: str, more: str, message: str) -> None:
    corpus, _ = speech
    text = section(name, "text", more)
    text = text.replace('takes = "text"\n', "") if more.startswith("takes") else text
    with pytest.raises(ForebayError, match=message):
        corpus.cache(SPEECH + text)


def test_tokens_of_texts_alone_stand_beside_a_teacher_s(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "gpt2")
    (tmp_path / "rows.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    config = corpus.config(
        'name = "tiny"\n[source]\nkind = "text"\nmanifest = "rows.txt"\n[audio]\nfeatures = "none"\n[text]\n'
        'tokenizer = "gpt2"\nprompt = "plain"\n[plan]\nkind = "bucket"\nedges = [64]\nbatch_size = 9\n'
        + section("gpt2", "text", "args = {k = 2}\nkeep = {ids = {output = 'top_ids'}}")
    )
    build_here(config)
    (batch,) = make_loader(config)
    assert {name: len(value) for name, value in batch.items()} == dict.fromkeys(
        ("ids", "ids_mask", "labels"), len(TEXTS)
    )
    assert batch["labels"].shape[1] == batch["ids"].shape[1] - 2  # without the tokens around each
