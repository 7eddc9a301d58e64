"""The examples of model steps learn, each as a user would start it, on the demo's recordings."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers as T

from forebay import load_config
from forebay.train import make_loader
from tests.steps.model.tiny_frozen import save_tiny, save_vae

ROOT = Path(__file__).parents[3]
SPEECH = f"""name = "spoken"
[source]
kind = "tar"
manifest = "{ROOT / "demo/speech/train.parquet"}"
max_samples = 24
[plan]
kind = "bucket"
batch_size = 8
edges_s = [30]
[train]
max_steps = 30
learning_rate = 0.01
[run]
num_workers = 1
"""
TALKER = """
[text]
tokenizer = "codes"
prompt = "tts"
[loader]
tokens = {codes = {delay = 1, bos = 64, eos = 65, pad = 66}}
[[model]]
name = "codes"
folder = "codes"
takes = "audio"
"""
STATES = """
[[model]]
name = "states"
folder = "hubert"
takes = "audio"
keep = {states = {output = "last_hidden_state", dtype = "float32"}}
"""
FLOW = """name = "painted"
[source]
kind = "folder"
manifest = "photos"
meaning = "captions"
[source.captions]
empty = true
[loader]
caption_dropout = 0.1
[plan]
by = ["area", "aspect"]
batch_size = 4
[train]
max_steps = 30
learning_rate = 0.003
[run]
num_workers = 1
[[model]]
name = "latents"
folder = "vae"
takes = "image"
size = 64
shapes = 2
step = 16
[[model]]
name = "words"
folder = "t5"
takes = "text"
"""


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_talker_learns_from_codec_tokens_and_texts(tmp_path: Path) -> None:
    save_tiny("dac", tmp_path / "codes")
    T.AutoTokenizer.from_pretrained(ROOT / "demo/speech/model").save_pretrained(tmp_path / "codes")
    (tmp_path / "talker.toml").write_text(SPEECH + TALKER)
    losses = example("talker_on_codes").main(str(tmp_path / "talker.toml"), [])
    assert len(losses) == 30
    assert np.log(67) * 0.8 < losses[0] < np.log(67) * 1.5
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_a_classifier_learns_as_with_the_encoder_in_its_loop(tmp_path: Path) -> None:
    save_tiny("hubert", tmp_path / "hubert")
    path = tmp_path / "states.toml"
    path.write_text(SPEECH + STATES)
    module = example("classifier_on_states")
    losses = module.main(str(path), [])
    assert np.mean(losses[-5:]) < 0.9 * losses[0]

    config = load_config(path)
    loader: Any = make_loader(config, with_columns=["sample_id", "language"])
    languages = sorted(set(loader.source.table(["language"])["language"].to_pylist()))
    batches = online(loader, tmp_path / "hubert")
    taken = itertools.islice(batches, 30)
    wanted = module.train(taken, languages, size=32, learning_rate=0.01, seed=config.loader.seed)
    assert losses == pytest.approx(wanted, abs=1e-4)


def online(loader: Any, folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """Yields the states that transformers gives for the recordings of each batch, one recording at a time."""
    extractor, model = T.AutoFeatureExtractor.from_pretrained(folder), T.AutoModel.from_pretrained(folder).eval()
    clips = {path.stem: soundfile.read(path, dtype="float32")[0] for path in unpacked(folder.parent / "clips")}
    for _ in itertools.count():
        for _, columns in loader:
            with torch.inference_mode():
                heard = [
                    model(**extractor(clips[name], sampling_rate=16_000, return_tensors="pt")).last_hidden_state[0]
                    for name in columns["sample_id"]
                ]
            states = torch.nn.utils.rnn.pad_sequence(heard, batch_first=True).clone()
            lengths = torch.tensor(list(map(len, heard)))
            yield states, torch.arange(states.shape[1]) < lengths[:, None], columns["language"]


def unpacked(folder: Path) -> list[Path]:
    for path in sorted((ROOT / "demo/speech").glob("*.tar")):
        with tarfile.open(path) as tar:
            tar.extractall(folder, [each for each in tar if each.name.endswith(".flac")], filter="data")
    return sorted(folder.rglob("*.flac"))


def test_a_flow_learns_from_latents_and_words(tmp_path: Path) -> None:
    save_vae(tmp_path / "vae")
    save_tiny("t5", tmp_path / "t5")
    shutil.copytree(ROOT / "demo/vision/photos", tmp_path / "photos")
    for path in [*(tmp_path / "photos").iterdir()]:
        path.with_suffix(".txt").write_text(f"a photo of {path.stem}")
    (tmp_path / "flow.toml").write_text(FLOW)
    losses = example("flow_on_latents").main(str(tmp_path / "flow.toml"), [])
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
