"""Two tasks over raw images and conversations: some of them, made as a build makes them, and measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.lint.clips import Bad
from forebay.lint.text import answers, folded_hash, loops
from forebay.preprocess.sources.media import MediaReader
from forebay.preprocess.sources.rows import reduced
from forebay.preprocess.vision.modality import Vision
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTask:
    """Rows of images or of conversations, as `media_rows` and `conversation_rows` give them, and their files.

    modality: with the codec `raw`, so that no image is encoded anew.
    """

    start: int
    rows: pa.Table
    files: tuple[SourceFile, ...]
    modality: Vision
    max_open_tars: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversations:
    """What was measured of some conversations. loops: float64 [rows]. hashes: int64 [rows], of text and roles."""

    loops: Array
    hashes: Array
    bad: list[Bad]


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
        for row, values in enumerate(task.modality.media_samples(task.rows, read)):
            if "failure" in values:
                bad.append((row, values["failure"], values["message"]))
            else:
                ranges[row] = np.ptp(values["patches"])
    return ranges, bad


def measure_conversations(task: PictureTask) -> Conversations:
    """Returns what is measured of some conversations, and those that a build refuses."""
    made = task.modality.text_samples(task.rows, [file.name for file in task.files])
    bad = [(row, values["failure"], values["message"]) for row, values in enumerate(made) if "failure" in values]
    found = [conversation_facts(text) for text in task.rows["text"].to_pylist()]
    return Conversations(
        loops=np.array([each[0] for each in found], np.float64),
        hashes=np.array([each[1] for each in found], np.int64),
        bad=bad,
    )


def conversation_facts(text: str) -> tuple[int, int]:
    """Returns how often the assistant says the same words in a row, and a hash of who says what."""
    said = [message["role"] + " " + _text(message) for message in json.loads(text)]
    return max((loops(answer.split()) for answer in answers(text)), default=1), folded_hash("\n".join(said).split())


def _text(message: dict[str, Any]) -> str:
    return "".join(part.get("text", "\0") for part in message["content"])
