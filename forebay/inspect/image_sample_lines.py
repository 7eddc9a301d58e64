"""A sample of a cache of images as lines for a terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.inspect.image_sample import ImageSample, StoredImage, spoken
from forebay.inspect.layout import paragraph
from forebay.inspect.sample import row_lines, shown_ids, tensor_lines
from forebay.inspect.units import human_bytes
from forebay.visible import printable

_SHOWN_APART = ("text", "images")
"""Columns of the row that are shown as a conversation and a list of images."""
_REPEATED = re.compile(r"(<\|[^|<>]+\|>)\1{3,}")
_ROLE = 11


def image_sample_lines(sample: ImageSample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    yield f"sample {sample.index}"
    yield from row_lines({name: value for name, value in sample.row.items() if name not in _SHOWN_APART})
    yield ""
    yield from tensor_lines(sample.tensors)
    yield ""
    yield from image_lines(sample.images)
    yield ""
    yield "conversation"
    yield from conversation_lines(sample.conversation)
    yield ""
    yield from _label_lines(sample.labels, learnt=sample.num_learnt)


def image_lines(images: Sequence[StoredImage], *, indent: str = "") -> Iterator[str]:
    """Yields the images of a sample as a table."""
    if not images:
        yield f"{indent}images: none"
        return
    head = f"{'grid':<14}{'pixels':<13}{'patches':>8}{'stored':>10}{'float32':>10}"
    yield f"{indent}{'images':<8}{head}  name"
    for number, image in enumerate(images):
        sizes = f"{human_bytes(image.stored_bytes):>10}{human_bytes(image.float32_bytes):>10}"
        cells = f"{list(image.grid)!s:<14}{image.size:<13}{image.num_patches:>8,}{sizes}"
        yield f"{indent}  {number:<6}{cells}  {printable(image.name)}"


def conversation_lines(messages: Sequence[Mapping[str, Any]], *, indent: str = "") -> Iterator[str]:
    """Yields who says what; an image stands where it was shown, by its number."""
    for role, text in spoken(messages):
        head = f"{indent}  {role:<{_ROLE}}"
        for line in text.splitlines() or [""]:
            yield from paragraph(head, printable(line))
            head = " " * len(head)


def _label_lines(labels: Mapping[str, Any], *, learnt: int) -> Iterator[str]:
    yield f"labels: {len(labels['ids']):,} tokens, {learnt:,} of them are learnt"
    yield from paragraph("  ids      ", shown_ids(_grouped(labels["ids"])))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    for run in labels["learnt"]:
        yield from paragraph("  learnt   ", f"{run['start']}:{run['end']} {printable(run['text'])}")
    yield from paragraph("  special  ", printable(_without_repeats(labels["with_special_tokens"])))


def _grouped(ids: Sequence[int]) -> list[str]:
    """Returns ids, equal neighbours as one with how many they are: an image is hundreds of them."""
    runs = [(token, sum(1 for _ in same)) for token, same in itertools.groupby(ids)]
    return [str(token) if count == 1 else f"{token} x {count}" for token, count in runs]


def _without_repeats(text: str) -> str:
    """Returns a text in which a control token that is repeated stands once, with how often."""
    return _REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])} ", text)
