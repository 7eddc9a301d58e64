"""A sample, and a pack of samples, as lines for a terminal."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.inspect.items import SeenItem, beside_float32
from forebay.inspect.plan_facts import Pack
from forebay.inspect.sample import Sample, spoken, summary
from forebay.store.layout import Array
from forebay.terminal import entry, human_number, human_share, paragraph, table
from forebay.visible import printable

_SHOWN_IDS = 64
_REPEATED = re.compile(r"(<\|[^|<>]+\|>)\1{3,}")
_ROLE = 11


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    # These columns of the row are shown as a conversation and lists of items.
    apart = {"text", *(f"{group}s" for group in sample.items)} if sample.conversation is not None else set()
    yield f"sample {sample.index}"
    width = max(map(len, sample.row.keys() - apart))
    for name, value in sample.row.items():
        if name not in apart:
            said = printable(value) if isinstance(value, str) else json.dumps(value)
            yield from paragraph(f"  {name:<{width}}  ", said)
    yield ""
    yield from _tensor_lines(sample.tensors)
    for group, items in sample.items.items():
        yield ""
        yield from _item_lines(group, items)
    if sample.conversation is not None:
        yield ""
        yield "conversation"
        yield from conversation_lines(sample.conversation)
    if sample.labels is not None:
        yield ""
        yield from _prefix_lines(sample.labels) if "prefix_len" in sample.labels else _learnt_lines(sample)


def _item_lines(group: str, items: Sequence[SeenItem], *, indent: str = "") -> Iterator[str]:
    yield from items[0].listed(items, indent=indent) if items else [f"{indent}{group}s: none"]


def _tensor_lines(tensors: Mapping[str, Array]) -> Iterator[str]:
    """Yields dtype, shape and range of tensors as a table."""
    width = max(16, *(len(name) + 1 for name in tensors), 0)
    yield f"{'fields':<{width + 2}}{'dtype':<10}{'shape':<16}{'min':>12}{'max':>12}{'mean':>12}"
    for name, value in tensors.items():
        about = summary(value)
        numbers = "".join(f"{human_number(about[key]):>12}" for key in ("min", "max", "mean"))
        yield f"  {name:<{width}}{about['dtype']:<10}{about['shape']!s:<16}{numbers}"


def _shown_ids(ids: Sequence[object]) -> str:
    """Returns the first token ids, or groups of them."""
    return ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")


def _prefix_lines(labels: Mapping[str, Any]) -> Iterator[str]:
    ids, prefix_len = labels["ids"], labels["prefix_len"]
    yield f"labels: {len(ids)} tokens, the first {prefix_len} are the prefix (not trained on)"
    yield from paragraph("  ids      ", _shown_ids(ids))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    yield from paragraph("  text     ", printable(labels["text"]))
    yield from paragraph("  special  ", printable(labels["with_special_tokens"]))


def conversation_lines(messages: Sequence[Mapping[str, Any]], *, indent: str = "") -> Iterator[str]:
    """Yields who says what; an image stands where it was shown, by its number."""
    for role, text in spoken(messages):
        head = f"{indent}  {role:<{_ROLE}}"
        for line in text.splitlines() or [""]:
            yield from paragraph(head, printable(line))
            head = " " * len(head)


def _learnt_lines(sample: Sample) -> Iterator[str]:
    labels = sample.labels or {}
    yield f"labels: {len(labels['ids']):,} tokens, {sample.num_learnt:,} of them are learnt"
    yield from paragraph("  ids      ", _shown_ids(_grouped(labels["ids"])))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    for run in labels["learnt"]:
        yield from paragraph("  learnt   ", f"{run['start']}:{run['end']} {printable(run['text'])}")
    # A control token that is repeated stands once, with how often.
    text = _REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])} ", labels["with_special_tokens"])
    yield from paragraph("  special  ", printable(text))


def _grouped(ids: Sequence[int]) -> list[str]:
    """Returns ids, equal neighbours as one with how many they are: an image is hundreds of them."""
    runs = [(token, sum(1 for _ in same)) for token, same in itertools.groupby(ids)]
    return [str(token) if count == 1 else f"{token} x {count}" for token, count in runs]


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


def _segment(number: int, sample: Sample) -> Iterator[str]:
    yield f"segment {number}: {printable(sample.row['sample_id'])}"
    for group, items in sample.items.items():
        yield from _item_lines(group, items, indent="  ") if items else ()
    yield from conversation_lines(sample.conversation or [])
