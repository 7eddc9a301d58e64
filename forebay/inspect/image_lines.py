"""The parts of the report that only a cache of images has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forebay.inspect.histogram import bars
from forebay.inspect.layout import entry, table
from forebay.inspect.units import human_bytes

_BAR = 50
_CODECS = {
    "raw": "uint8 patches, read as they are",
    "zstd": "uint8 patches, compressed",
    "webp": "lossless WebP of the resized image",
    "source": "the source file, decoded and resized at load",
}


def images_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields how many images there are and how large; `facts` is the document of `cache_facts`."""
    images = facts["images"]
    yield "images"
    yield entry("stored", f"{images['stored']:,}, each once a shard; {images['distinct']:,} different ones")
    yield entry("used", f"{images['used']:,} times in {facts['num_samples']:,} samples")
    yield entry("codec", f"{facts['codec']}: {_CODECS[facts['codec']]}")
    if facts["bytes_per_image"] is not None:
        yield entry("an image", beside_float32(facts["bytes_per_image"], facts["float32_bytes_per_image"]))


def histogram_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the histograms of tokens and patches a sample."""
    for number, (name, histogram) in enumerate(facts["histograms"].items()):
        if number:
            yield ""
        yield from count_lines(f"{name} a sample", histogram["edges"], histogram["samples"], of="samples")


def count_lines(head: str, edges: Sequence[int], counts: Sequence[int], *, of: str) -> Iterator[str]:
    """Yields a histogram: bins [edges[i], edges[i + 1]), the last one closed, and how many there are `of` in each."""
    bins = list(_bins(edges, counts))
    drawn = bars(np.array([count for _, count in bins]), width=_BAR)
    rows = [[name, f"{count:,}", bar] for (name, count), bar in zip(bins, drawn, strict=True)]
    yield from table([head, of, ""], rows, left=0, last_left=True)


def _bins(edges: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yields the range and the count of every bin, empty neighbours as one."""
    for is_empty, places in itertools.groupby(range(len(counts)), key=lambda i: counts[i] == 0):
        numbers = list(places)
        groups = [numbers] if is_empty else [[number] for number in numbers]
        yield from ((f"{edges[g[0]]:,} - {edges[g[-1] + 1]:,}", counts[g[0]]) for g in groups)


def beside_float32(stored: float, as_float32: float | None, *, where: str = "stored") -> str:
    """Returns bytes as stored, `where` says where, beside what float32 `pixel_values` would take."""
    if as_float32 is None:
        return f"{human_bytes(stored)} {where}; the grids cannot be read (--verify says why)"
    ratio = f", {as_float32 / stored:.3g} times as much" if stored else ""
    return f"{human_bytes(stored)} {where}; as float32 pixel_values {human_bytes(as_float32)}{ratio}"
