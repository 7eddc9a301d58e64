"""A pack as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.inspect.image_lines import beside_float32
from forebay.inspect.image_sample import ImageSample
from forebay.inspect.image_sample_lines import conversation_lines, image_lines
from forebay.inspect.layout import entry, table
from forebay.inspect.pack import Pack
from forebay.inspect.units import human_share
from forebay.visible import printable


def pack_lines(pack: Pack) -> Iterator[str]:
    """Yields a pack: what it holds in all, its segments as a table, then their images and texts one by one."""
    facts = pack.to_json()
    yield f"pack {pack.index} of {pack.num_packs:,}"
    yield entry("segments", f"{len(pack.segments):,}")
    fill = f"{human_share(facts['fill'])} fill, {facts['pad_tokens']:,} left over"
    yield entry("tokens", f"{pack.num_tokens:,} of {pack.seq_len:,}: {fill}; {facts['num_learnt']:,} are learnt")
    limit = "" if pack.max_patches is None else f" of {pack.max_patches:,}"
    yield entry("images", f"{facts['num_images']:,}, {facts['num_patches']:,}{limit} patches")
    if pack.images:
        yield entry("bytes", beside_float32(facts["stored_bytes"], facts["float32_bytes"]))
    yield ""
    yield from _segment_table(facts["segments"])
    for number, sample in enumerate(pack.segments):
        yield ""
        yield from _segment(number, sample)


def _segment_table(segments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        [
            str(number),
            f"{segment['start']:,} - {segment['end']:,}",
            f"{segment['row']['num_tokens']:,}",
            f"{segment['num_learnt']:,}",
            str(len(segment["images"])),
            f"{segment['row']['num_patches']:,}",
            str(segment["index"]),
            printable(segment["row"]["sample_id"]),
        ]
        for number, segment in enumerate(segments)
    ]
    head = ["segments", "places", "tokens", "learnt", "images", "patches", "sample", "id"]
    yield from table(head, rows, left=1, last_left=True)


def _segment(number: int, sample: ImageSample) -> Iterator[str]:
    yield f"segment {number}: {printable(sample.row['sample_id'])}"
    if sample.images:
        yield from image_lines(sample.images, indent="  ")
    yield from conversation_lines(sample.conversation)
