"""Values of every family of models, held against a plain loop over transformers' own classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers as T
from PIL import Image, ImageOps

from forebay import load_config
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.model.tiny_frozen import RATE_HZ, save_tiny

DEMO = Path(__file__).parents[3] / "demo"
AUDIO = ("mimi", "encodec", "dac", "xcodec", "hubert", "w2v_bert", "whisper")
TEXT = ("t5", "clip_text", "qwen3", "bert")
IMAGE = ("siglip", "dinov2", "clip_vision")
LENGTHS_S = (0.3, 1.1, 0.52, 0.9, 0.7)
TEXTS = ("one", "a longer text of several words", "one", "two words", "and one more text")


class Corpus:
    """One cache of recordings, or of photos, with what every family makes of them."""

    def __init__(self, folder: Path, *groups: str) -> None:
        self.folder = folder
        for name in groups:
            save_tiny(name, folder / name)
        self.clips = [self._clip(number, seconds) for number, seconds in enumerate(LENGTHS_S)]
        rows = [f'{{"audio": "{n}.wav", "text": "{text}", "id": "{n}"}}\n' for n, text in enumerate(TEXTS)]
        (folder / "rows.jsonl").write_text("".join(rows))
        for name in ("photos",) if set(groups) & set(IMAGE) else ():
            shutil.copytree(DEMO / "vision" / "photos", folder / name)

    def _clip(self, number: int, seconds: float) -> Any:
        rng = np.random.default_rng(number)
        clip = (rng.standard_normal(round(seconds * RATE_HZ)) * 3000).astype(np.int16)
        soundfile.write(self.folder / f"{number}.wav", clip, RATE_HZ)
        return clip.astype(np.float32) / np.float32(32768)

    def config(self, text: str) -> Any:
        (self.folder / "config.toml").write_text(text + '\n[run]\ncache_root = "caches"\nnum_workers = 1\n')
        return load_config(self.folder / "config.toml")

    def cache(self, text: str) -> Cache:
        return open_cache(build_here(self.config(text)).cache)


def section(name: str, takes: str, *more: str) -> str:
    return "\n".join(["[[model]]", f'name = "{name}"', f'folder = "{name}"', f'takes = "{takes}"', *more, ""])


SPEECH = 'name = "tiny"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n[plan]\nkind = "bucket"\nbatch_size = 3\n'
PHOTOS = SPEECH.replace("jsonl", "folder", 1).replace("rows.jsonl", "photos") + '[text]\nprompt = "none"\n'


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Cache]:
    corpus = Corpus(tmp_path_factory.mktemp("speech"), *AUDIO, *TEXT)
    more = {"bert": 'keep = {bert = {output = "mean", dtype = "float32"}}'}
    sections = [section(name, "audio") for name in AUDIO] + [section(n, "text", more.get(n, "")) for n in TEXT]
    return corpus, corpus.cache(SPEECH + "".join(sections))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Cache]:
    corpus = Corpus(tmp_path_factory.mktemp("photos"), *IMAGE)
    return corpus, corpus.cache(PHOTOS + "".join(section(name, "image") for name in IMAGE))


def of_sample(cache: Cache, name: str, index: int) -> Any:
    value = cache.read(index)[name]
    return value[0] if isinstance(value, tuple) else value


def heard(folder: Path, name: str, clip: Any) -> Any:
    """Returns the answer of transformers to a clip alone: codes [frames, codebooks], or states [steps, size]."""
    inputs = T.AutoFeatureExtractor.from_pretrained(folder)(clip, sampling_rate=RATE_HZ, return_tensors="pt")
    with torch.inference_mode():
        model = T.AutoModel.from_pretrained(folder).eval()
        if name in ("mimi", "encodec"):
            codes = model.encode(inputs["input_values"], inputs["padding_mask"]).audio_codes
            return (codes[0] if codes.ndim == 4 else codes)[0].T
        if name in ("dac", "xcodec"):
            return model.encode(inputs["input_values"]).audio_codes[0].T
        if name == "whisper":
            return model.encoder(**inputs).last_hidden_state[0]
        return model(**inputs).last_hidden_state[0]


@pytest.mark.parametrize("name", AUDIO)
def test_recordings(speech: tuple[Corpus, Cache], name: str) -> None:
    corpus, cache = speech
    for index in range(len(cache)):
        wanted = heard(corpus.folder / name, name, corpus.clips[int(cache.sample_id(index))])
        found = of_sample(cache, name, index)
        if wanted.is_floating_point():
            np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-3, atol=2e-3)  # float16, made in a batch
        else:
            assert found.dtype == (np.uint8 if name != "encodec" else np.uint16)
            np.testing.assert_array_equal(found, wanted.numpy())
        assert cache.lengths[f"num_{name}"][index] == len(found)


@pytest.mark.parametrize("name", TEXT)
def test_texts_are_their_own_tokens_and_each_is_stored_once(speech: tuple[Corpus, Cache], name: str) -> None:
    corpus, cache = speech
    tokenizer = T.AutoTokenizer.from_pretrained(corpus.folder / name)
    loader = T.T5EncoderModel if name == "t5" else T.AutoModel
    model = loader.from_pretrained(corpus.folder / name).eval()
    for index in range(len(cache)):
        tokens = tokenizer(TEXTS[int(cache.sample_id(index))], return_tensors="pt")
        with torch.inference_mode():
            wanted = model(**tokens).last_hidden_state[0].numpy()
        found = of_sample(cache, name, index)
        wanted = wanted.mean(axis=0) if name == "bert" else wanted
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
        assert found.dtype == (np.float32 if name == "bert" else np.float16)
    assert sum(entry.rows for _, entry in cache.shard_entries(name)) == len(set(TEXTS))


@pytest.mark.parametrize("name", IMAGE)
def test_photos(photos: tuple[Corpus, Cache], name: str) -> None:
    corpus, cache = photos
    processor = T.AutoImageProcessor.from_pretrained(corpus.folder / name, backend="pil")
    model = T.AutoModel.from_pretrained(corpus.folder / name).eval()
    assert cache.groups == (*sorted(IMAGE), "text")
    for index in range(len(cache)):
        (path,) = (p for p in (corpus.folder / "photos").rglob("*") if p.stem == cache.sample_id(index))
        inputs = processor(ImageOps.exif_transpose(Image.open(path)).convert("RGB"), return_tensors="pt")
        with torch.inference_mode():
            wanted = model(**inputs).last_hidden_state[0].numpy()
        np.testing.assert_allclose(of_sample(cache, name, index), wanted, rtol=2e-3, atol=2e-3)


def test_batches_have_outputs_and_masks(speech: tuple[Corpus, Cache]) -> None:
    corpus, cache = speech
    loader = make_loader(load_config(corpus.folder / "config.toml", overrides=['loader.cache="require"']))
    loader.set_epoch(0)
    for batch in loader:
        rows = len(batch["mimi"])
        assert batch["mimi"].shape[2] == 4
        assert batch["mimi"].dtype == torch.int64
        assert batch["bert"].shape == (rows, 32)
        assert batch["whisper"].shape == (rows, 1500, 32)
        assert "whisper_mask" not in batch
        assert batch["t5_mask"].sum() == sum((batch["t5"] != 0).any(dim=2).sum(dim=1))
    assert {name: values["model"] for name, values in cache.constants.groups.items() if name in ("mimi", "dac")} == {
        "mimi": "equal in batches of 1",
        "dac": "equal in batches of 1",
    }
