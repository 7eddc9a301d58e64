"""Samples of the same content: within a set, and between a set that is learnt from and one that is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from forebay.inspect.checks.judge import finding
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.measured import Finding, ImageFacts, Measured
from forebay.inspect.checks.text_letters import signed
from forebay.store.layout import Array, Ints

_OF_SOUND = ("sound", "file")
"""What a recording is known by in raw data, and in a cache that keeps waveforms."""


def contents(found: Measured, limits: Limits) -> dict[str, Ints]:
    """Returns hashes of each sample's content by what they are of, int64 [samples]; 0 where nothing is to be compared.

    Silent clips are left out: all of one length are the same, and are told of as silent.
    """
    kinds = [name for name in found.content if name in _OF_SOUND or name.startswith("stored")]
    if found.images is not None:
        names = [*kinds[-1:], *(["text"] if found.classes is None else [])]
        said = sum((found.content[name] for name in names), np.zeros(len(found), np.int64))
        return {"image" if not names else "conversation": _conversations(said, found.images)}
    kinds = kinds if any(found.content[name].any() for name in kinds) else ["text"]
    usable = found.usable()
    if kinds != ["text"] and "loudest_dbfs" in found.facts:
        usable &= ~(found.facts["loudest_dbfs"] < limits.quiet_dbfs)
    return {name: np.where(usable, found.content.get(name, 0), 0) for name in kinds}


def _conversations(texts: Ints, images: ImageFacts) -> Ints:
    """Returns a hash of what is said and of the images that it is about."""
    of_images = [bytes.fromhex(name) for name in images.hashes]
    made = []
    for row, text in enumerate(texts.tolist()):
        used = images.flat[images.starts[row] : images.starts[row + 1]].tolist()
        made.append(
            signed(xxhash.xxh3_64_intdigest(b"".join(of_images[image] for image in used), text & (1 << 64) - 1))
        )
    return np.array(made, np.int64)


def duplicates(found: Measured, limits: Limits) -> Iterator[Finding]:
    """Yields the samples whose content an earlier one has, and of those with two texts all of them."""
    known = contents(found, limits)
    # One kind tells all: two files of the same bytes are decoded to the same samples.
    kind = next((name for name in (*_OF_SOUND, *known) if name in known and known[name].any()), None)
    if kind is None:
        return
    texts = found.content.get("text", np.zeros(len(found), np.int64))
    for rows in _groups(known[kind]):
        if kind not in ("text", "conversation") and len(set(texts[rows].tolist())) > 1:
            yield from _contradictions(found, rows, texts)
            continue
        first = found.sample_id(rows[0])
        for row in rows[1:]:
            yield finding(found, row, "duplicate", f"its content is that of {first!r}", other=first)


def _contradictions(found: Measured, rows: Sequence[int], texts: Ints) -> Iterator[Finding]:
    for row in rows:
        other = next(each for each in rows if texts[each] != texts[row])
        name = found.sample_id(other)
        what, text = ("image", "class") if found.classes is not None else ("recording", "text")
        message = f"its {what} is that of {name!r}, whose {text} is another one; one of the two is wrong"
        yield finding(found, row, "contradiction", message, other=name)


def _groups(hashes: Ints) -> Iterator[list[int]]:
    """Yields the rows of each hash that more than one has, by their first; rows rise."""
    order = np.argsort(hashes, kind="stable")
    order = order[hashes[order] != 0]
    if not len(order):
        return
    borders = np.concatenate([[0], np.flatnonzero(np.diff(hashes[order])) + 1, [len(order)]])
    many = np.flatnonzero(np.diff(borders) > 1)
    yield from sorted(order[borders[i] : borders[i + 1]].tolist() for i in many.tolist())


def leaks(found: Measured, other: Measured, limits: Limits, *, first: int | None = None) -> Iterator[Finding]:
    """Yields the samples of a set whose content another one has. first: only so many usable samples of that count."""
    counted = np.cumsum(other.usable()) <= (len(other) if first is None else first)
    ours, theirs = contents(found, limits), contents(other, limits)
    twins = np.full(len(found), -1)
    for kind in ours.keys() & theirs.keys():
        met = _met(ours[kind], np.where(counted, theirs[kind], 0))
        twins = np.where(twins < 0, met, twins)
    for row in np.flatnonzero(twins >= 0).tolist():
        name = other.sample_id(int(twins[row]))
        yield finding(
            found, row, "leak", f"its content is that of {name!r} of {other.name}", other=name, other_set=other.name
        )
    if found.images is not None and other.images is not None:
        yield from _shared_images(found, other, counted, twins >= 0)


def comparable(found: Measured, other: Measured, limits: Limits) -> bool:
    """Returns whether two sets have content that can be compared."""
    return bool(contents(found, limits).keys() & contents(other, limits).keys())


def _met(ours: Ints, theirs: Ints) -> Ints:
    """Returns the first row of theirs that has each hash, -1 where none has; 0 is no hash."""
    order = np.argsort(theirs, kind="stable")
    sorted_ = theirs[order]
    place = np.searchsorted(sorted_, ours)
    inside = np.minimum(place, max(len(sorted_) - 1, 0))
    is_met = (place < len(sorted_)) & (ours != 0)
    if len(sorted_):
        is_met &= sorted_[inside] == ours
        return np.where(is_met, order[inside], -1)
    return np.full(len(ours), -1)


def _shared_images(found: Measured, other: Measured, counted: Array, is_leak: Array) -> Iterator[Finding]:
    assert found.images is not None
    assert other.images is not None
    uses = np.repeat(np.arange(len(other)), np.diff(other.images.starts))
    where: dict[str, int] = {}
    for use, image in enumerate(other.images.flat.tolist()):
        if counted[uses[use]]:
            where.setdefault(other.images.hashes[image], int(uses[use]))
    for row in range(len(found)):
        used = found.images.flat[found.images.starts[row] : found.images.starts[row + 1]].tolist()
        shared = [image for image in used if found.images.hashes[image] in where]
        if shared and not is_leak[row]:
            name = other.sample_id(where[found.images.hashes[shared[0]]])
            message = f"image {found.images.names[shared[0]]} is of {name!r} of {other.name} too"
            yield finding(found, row, "shared_image", message, other=name, other_set=other.name)
