"""Two tasks over raw images and what is said of them: some of them, made as a build makes them, and measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError
from forebay.lint.clips import TEXT_FACTS, Bad
from forebay.lint.text import answers, folded_hash, loops, signed, text_facts
from forebay.preprocess.group import Read
from forebay.preprocess.images.samples import loaded_text
from forebay.preprocess.vision.modality import Vision
from forebay.rows.image_facts import Images
from forebay.rows.manifest import reduced
from forebay.rows.media_reader import MediaReader
from forebay.steps.image.processor.step import Processed
from forebay.steps.text.caption import CaptionEncoder
from forebay.store.image.pixels import decode_image
from forebay.store.layout import Array, Ints
from forebay.store.source_files import SourceFile

_KINDS = {"label": "class", "plain": "text", "none": "nothing"}


def kind_of(prompt: Any) -> str:
    """Returns what a row's text is under a prompt: `conversation`, `text`, `class` or `nothing`."""
    return _KINDS.get(str(prompt), "conversation")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTask:
    """Rows of images or of what is said, as `media_rows` and `conversation_rows` give them, and their files.

    modality: with the codec `raw`, so that no image is encoded anew.
    """

    start: int
    rows: pa.Table
    files: tuple[SourceFile, ...]
    modality: Vision | Images
    max_open_tars: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    @property
    def kind(self) -> str:
        """What a row's text is."""
        return kind_of(self.modality.recipe.text.name) if isinstance(self.modality, Images) else "conversation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What was measured of texts beside images, a value a row. facts: float64 by name. hashes: int64.

    strings: by name.
    """

    facts: Mapping[str, Array]
    strings: Mapping[str, Sequence[str]]
    hashes: Ints


class _Measuring:
    """Reads encoded images, and writes into `ranges` what lies between the darkest and the brightest value of each."""

    def __init__(self, read: Read, step: Processed, ranges: Array) -> None:
        self._read, self._step, self._ranges, self._row = read, step, ranges, 0

    def __call__(self, file: int, offset: int, size: int) -> bytes:
        row, self._row = self._row, self._row + 1
        data = self._read(file, offset, size)
        with contextlib.suppress(SampleError):  # the build's own step says what is wrong
            image = decode_image(data, max_pixels=self._step.max_pixels, sample_id="", alpha=self._step.alpha)
            self._ranges[row] = np.ptp(np.asarray(image))
        return data


def measure_images(task: PictureTask) -> tuple[Array, list[Bad]]:
    """Returns the range between the darkest and the brightest value of each image, and those that a build refuses."""
    ranges = np.full(len(task.rows), np.nan)
    bad: list[Bad] = []
    with MediaReader(
        task.files,
        max_open=task.max_open_tars,
        max_bytes=task.modality.max_sample_bytes,
        column=task.modality.media_column,
        as_listed=True,
    ) as read:
        is_any = isinstance(task.modality, Images)
        taken = _Measuring(read, task.modality.recipe.images, ranges) if isinstance(task.modality, Images) else read
        for row, values in enumerate(task.modality.media_samples(task.rows, taken)):
            if "failure" in values:
                bad.append((row, values["failure"], values["message"]))
            elif not is_any:
                ranges[row] = np.ptp(values["patches"])
    return ranges, bad


def measure_texts(task: PictureTask) -> tuple[Said, list[Bad]]:
    """Returns what is measured of what is said of images, and the rows that a build refuses."""
    made = task.modality.text_samples(task.rows, [file.name for file in task.files])
    bad = [(row, values["failure"], values["message"]) for row, values in enumerate(made) if "failure" in values]
    texts = task.rows["text"].to_pylist()
    said = said_of(texts, task.kind)
    if isinstance(task.modality, Images) and task.kind == "text":
        encoder = loaded_text(task.modality.recipe.text)
        if isinstance(encoder, CaptionEncoder):
            cut = np.array([encoder.cut_tokens(text) for text in texts], np.float64)
            said = Said(facts={**said.facts, "cut": cut}, strings=said.strings, hashes=said.hashes)
    return said, bad


def said_of(texts: Sequence[str], kind: str) -> Said:
    """Returns what is measured of texts. kind: of `kind_of`."""
    if kind == "conversation":
        found = [conversation_facts(text) for text in texts]
        facts = {"loops": np.array([each[0] for each in found], np.float64)}
        return Said(facts=facts, strings={}, hashes=np.array([each[1] for each in found], np.int64))
    if kind == "text":
        known = [text_facts(text, "") for text in texts]
        return Said(
            facts={name: np.array([getattr(each, name) for each in known], np.float64) for name in TEXT_FACTS},
            strings={name: [getattr(each, name) for each in known] for name in ("script", "word")},
            hashes=np.array([each.hash for each in known], np.int64),
        )
    hashes = [
        signed(xxhash.xxh3_64_intdigest(t.encode("utf-8", "surrogatepass"))) if kind == "class" else 0 for t in texts
    ]
    return Said(facts={}, strings={}, hashes=np.array(hashes, np.int64))


def classes_in(texts: Sequence[str], *, is_multi: bool) -> list[list[str]]:
    """Returns the classes of each row by its text. is_multi: texts are JSON lists."""
    if not is_multi:
        return [[text] for text in texts]
    return [[str(each) for each in json.loads(text)] for text in texts]


def conversation_facts(text: str) -> tuple[int, int]:
    """Returns how often the assistant says the same words in a row, and a hash of who says what."""
    said = [message["role"] + " " + _text(message) for message in json.loads(text)]
    return max((loops(answer.split()) for answer in answers(text)), default=1), folded_hash("\n".join(said).split())


def _text(message: dict[str, Any]) -> str:
    return "".join(part.get("text", "\0") for part in message["content"])
