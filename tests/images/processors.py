"""Small processors of every kind of batch, in place of transformers' own, and configs over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import SampleError
from forebay.preprocess.image_form import _opened_processor
from forebay.preprocess.text_group import opened_text
from forebay.steps.form import BatchForm, FieldForm, Promise, Table
from forebay.steps.image.processor.processor_step import OpenProcessor, Processed, require_size
from forebay.steps.step import TextStep
from forebay.steps.table import STEPS
from forebay.steps.text.row_encoder import OneByOne, Size
from forebay.store.image.codec import decode_image
from forebay.store.layout import Array, FieldSpec
from tests.preprocess.vision.corpus import PhotoCorpus, photo

SIDE = 8
TABLE = np.linspace(-1.5, 2.5, 3 * 256).reshape(3, 256).astype(np.float32)
KINDS = ("stack", "padded", "cat", "nest", "free", "float", "wide")


def form_of(kind: str) -> BatchForm:
    """Returns the form of a kind of processor."""
    tiles: dict[str, Any] = {"dtype": "float32", "stored_dtype": "uint8", "table": Table(axis=1, values=TABLE)}
    shape = (None, 3, SIDE, SIDE)
    sizes = FieldForm(name="image_sizes", dtype="int64", stored_dtype="int64", shape=(2,))
    fields: dict[str, tuple[FieldForm, ...]] = {
        "stack": (FieldForm(name="pixel_values", shape=(3, SIDE, SIDE), **{**tiles, "table": _first()}),),
        "padded": (FieldForm(name="pixel_values", shape=shape, **tiles), sizes),
        "cat": (
            FieldForm(name="pixel_values", shape=shape, join="cat", **tiles),
            FieldForm(name="num_tiles", dtype="int64", stored_dtype="int64", shape=()),
        ),
        "nest": (FieldForm(name="pixel_values", shape=shape, join="nest", **tiles),),
        "free": (
            FieldForm(name="pixel_values", shape=(3, None, None), **{**tiles, "table": _first()}),
            FieldForm(
                name="pixel_mask", dtype="int64", stored_dtype="int64", shape=(None, None), mask_of="pixel_values"
            ),
        ),
        "float": (FieldForm(name="pixel_values", dtype="float32", stored_dtype="float32", shape=(3, SIDE, SIDE)),),
    }
    fields["alone"] = (replace(fields["free"][0], pad=None),)
    wide = np.linspace(-1, 1, 1024).reshape(1, 1024).astype(np.float32)
    small = FieldForm(name="small", dtype="float32", stored_dtype="float32", shape=(None, 4), join="cat")
    table = Table(axis=0, values=wide)
    fields["wide"] = (replace(fields["stack"][0], stored_dtype="uint16", table=table), small)
    promise = Promise(kind="alone", why="sizes differ") if kind == "alone" else Promise(kind="exact")
    return BatchForm(made_by=f"Tiny{kind.title()}", fields=fields[kind], promise=promise)


def _first() -> Table:
    return Table(axis=0, values=TABLE)


class Tiny(OpenProcessor):
    """Images at a small size, cut into tiles of 8 x 8 pixels where the kind has tiles."""

    def __init__(self, kind: str) -> None:
        self.kind, self.form = kind, form_of(kind)

    def make(self, data: bytes, *, sample_id: str, size: Size | None = None) -> dict[str, Array]:
        image = decode_image(data, max_pixels=1 << 30, sample_id=sample_id)
        require_size(image, size, sample_id=sample_id)
        if image.width == 13:
            raise SampleError("unlucky_width", f"{sample_id} is 13 pixels wide")
        columns, rows = (max(1, min(4, side // 40)) for side in image.size)
        if self.kind in ("stack", "float", "wide"):
            columns = rows = 1
        pixels = np.asarray(image.resize((columns * SIDE, rows * SIDE))).transpose(2, 0, 1)
        if self.kind in ("stack", "free", "alone"):
            return {"pixel_values": pixels}
        if self.kind == "wide":  # codes of two bytes, and an output that small images have nothing of
            small = np.full((image.width // 100, 4), image.width, np.float32)
            return {"pixel_values": pixels.astype(np.uint16) * 4, "small": small}
        if self.kind == "float":
            return {"pixel_values": pixels.astype(np.float32) / np.float32(pixels.max() + 1)}
        tiles = pixels.reshape(3, rows, SIDE, columns, SIDE).transpose(1, 3, 0, 2, 4).reshape(-1, 3, SIDE, SIDE)
        beside = {"padded": {"image_sizes": np.array(image.size)}, "cat": {"num_tiles": np.array(len(tiles))}}
        return {"pixel_values": tiles, **beside.get(self.kind, {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Letters(TextStep):
    """The letters of a conversation's last answer as `input_ids`, and `<image>` as one id a row of pixels."""

    name: ClassVar[str] = "letters"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        return self.fields_of(LetterEncoder.form)

    def fields_of(self, form: BatchForm | None) -> tuple[FieldSpec, ...]:
        return (*super(Letters, self).fields_of(form), FieldSpec(name="label_mask", dtype="uint8", group="text"))

    def opened(self, folder: Path, *, merge_size: int | None) -> LetterEncoder:
        return LetterEncoder()


class LetterEncoder(OneByOne):
    """Writes letters."""

    form = BatchForm(
        made_by="Letters",
        fields=(
            FieldForm(name="input_ids", dtype="int64", stored_dtype="int32", shape=(None,), pad=1),
            FieldForm(name="attention_mask", dtype="int64", stored_dtype="int64", shape=(None,), mask_of="input_ids"),
        ),
        promise=Promise(kind="exact"),
    )
    constants: dict[str, Any] = {"prompt": "letters", "text_form": form.to_json()}  # noqa: RUF012

    def encode(self, text: str, told: Sequence[Size], *, sample_id: str) -> dict[str, Array]:
        answer = json.loads(text)[-1]["content"][0]["text"] if text.startswith("[") else text
        if "unreadable" in answer:
            raise SampleError("bad_text", f"{sample_id} cannot be read")
        pixels = [2] * sum(height // 16 for _, height in told)
        ids = np.array([*pixels, *answer.encode()], np.int32)
        return {"input_ids": ids, "label_mask": (np.arange(len(ids)) >= len(pixels)).astype(np.uint8)}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with the document of a tiny processor open as one; `text.prompt = "letters"`."""

    def opened(step: Processed, form: BatchForm | None = None) -> Tiny:
        document = json.loads((Path(step.folder) / "preprocessor_config.json").read_text())
        return Tiny(document["image_processor_type"])

    monkeypatch.setattr(Processed, "opened", opened)
    monkeypatch.setitem(STEPS["text"], "letters", "tests.images.processors:Letters")
    for loaded in (_opened_processor, opened_text):
        loaded.cache_clear()


@dataclass
class TinyCorpus(PhotoCorpus):
    """Photos and questions under a tiny processor."""

    kind: str = "stack"
    rows: list[dict[str, Any]] = field(default_factory=list)

    def config(self, *overrides: str, prompt: str = "letters") -> Config:
        folder = self.folder / self.kind
        folder.mkdir(exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": self.kind}))
        path = self.folder / "config.toml"
        path.write_text(
            'name = "tiny"\n[source]\nkind = "jsonl"\nmanifest = "train.jsonl"\n'
            f'[vision]\nprocessor = "{self.kind}"\n[text]\ntokenizer = "{self.kind}"\nprompt = "{prompt}"\n'
            "[layout]\nrows_per_shard = 4\n[plan]\nbatch_size = 3\nlockstep = 2\n"
            '[run]\ncache_root = "caches"\nnum_workers = 1\nmax_failed_share = 1.0\n'
        )
        return load_config(path, overrides=overrides)


def tiny_corpus(folder: Path, *, kind: str = "stack", photos: int = 4) -> TinyCorpus:
    """Photos of different sizes with two questions each, one question about two of them, and one about none."""
    corpus = TinyCorpus(folder, kind=kind)
    for number in range(photos):
        corpus.add_photo(f"p{number}.jpg", photo(number, width=64 + 40 * number))
    for turn in range(2):
        for number in range(photos):
            corpus.ask(f"q{number}-{turn}", f"p{number}.jpg", answer="An answer." * (1 + number % 3))
    corpus.ask("both", ["p1.jpg", f"p{photos - 1}.jpg"])
    corpus.rows.append({"id": "blind", "question": "What?", "answer": "Nothing."})
    corpus.write_manifest()
    return corpus
