"""A data set of Whisper features and labels, made of demo recordings by transformers as people make them."""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import soundfile

from forebay.config import Config
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import load_config
from forebay.store.layout import Array
from tests.rows.helpers import read_rows

ROOT = Path(__file__).parents[1]
SPEECH = ROOT / "configs" / "demo_speech.toml"
MODEL = ROOT / "demo" / "speech" / "model"
NUM_CLIPS = 6

FORMS: dict[str, Any] = {
    "lists": datasets.List(datasets.List(datasets.Value("float32"))),
    "array2d": datasets.Array2D((80, 3000), "float32"),
    "fixed": datasets.List(datasets.List(datasets.Value("float16"), length=3000), length=80),
}
"""Types that the column of features has in data sets, by a name."""


@dataclass(frozen=True)
class Recordings:
    """Demo recordings, as the extractor and the tokenizer of the demo model have them.

    features: float32 [clips, 80, 3000]. labels: as `WhisperTokenizer` gives them.
    """

    features: Array
    labels: list[list[int]]
    texts: list[str]


def recordings() -> Recordings:
    """Returns the first demo recordings."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizerFast

    config = load_config(SPEECH)
    with tempfile.TemporaryDirectory() as root:  # for the index of the tars
        listed = read_rows(config.source, cache_root=root)
    rows = listed.rows.slice(0, NUM_CLIPS).select(["file", "offset", "size", "text"]).to_pylist()
    with MediaReader(listed.files, max_open=2) as read:
        clips = [soundfile.read(io.BytesIO(read(r["file"], r["offset"], r["size"])), dtype="float32") for r in rows]
    assert {rate for _, rate in clips} == {16_000}
    extractor = WhisperFeatureExtractor.from_pretrained(str(MODEL))
    features = extractor([clip for clip, _ in clips], sampling_rate=16_000, return_tensors="np")["input_features"]
    tokenizer = WhisperTokenizerFast.from_pretrained(str(MODEL), language="en", task="transcribe")
    texts = [row["text"] for row in rows]
    return Recordings(features, [tokenizer(text).input_ids for text in texts], texts)


def save(
    folder: Path, features: Any, labels: list[list[int]] | None, *, form: str = "lists", **columns: list[Any]
) -> Path:
    """Makes `folder` what `save_to_disk` writes of these columns."""
    types = {"input_features": FORMS[form]}
    values: dict[str, Any] = {"input_features": list(features), **columns}
    if labels is not None:
        types["labels"], values["labels"] = datasets.List(datasets.Value("int64")), labels
    types |= {name: datasets.Value("string") for name in columns}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(values, features=datasets.Features(types)).save_to_disk(str(folder))
    return folder


def given_config(folder: Path, *overrides: str, has_labels: bool = True) -> Config:
    """Returns the config of the set at `folder / "set"`; caches and runs lie under `folder`."""
    path = folder / "given.toml"
    labels = 'labels = "labels"\n' if has_labels else ""
    text = f'[text]\ntokenizer = "{MODEL}"\nprompt = "given"\nmax_label_tokens = 448\n' if has_labels else ""
    path.write_text(
        f'name = "given"\n[source]\nkind = "hf"\nmanifest = "set"\n[source.columns]\nfeatures = "input_features"\n'
        f'{labels}[audio]\nfeatures = "given"\n{text}'
        "[layout]\nrows_per_shard = 4\n[plan]\nedges_s = [5, 10, 30]\nbatch_seconds = 30\nlockstep = 1\n"
        f'[train]\nmodel = "{MODEL}"\ninit = "random"\nmax_steps = 2\n'
        '[run]\ncache_root = "caches"\nnum_workers = 1\n'
    )
    return load_config(path, overrides=overrides)


def padded_labels(labels: list[list[int]]) -> Array:
    """Returns labels as the usual collator of a Trainer makes them: without the start token, -100 behind the end."""
    bare = [ids[1:] for ids in labels]
    rows = np.full((len(bare), max(map(len, bare))), -100)
    for row, ids in zip(rows, bare, strict=True):
        row[: len(ids)] = ids
    return rows
