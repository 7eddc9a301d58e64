"""The texts of a row for models of texts: its own, those of a column, orders of their tags, and the empty one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.config.data import CaptionsConfig
from forebay.preprocess.group import Items
from forebay.rows.kept_columns import column_of
from forebay.rows.manifest import Manifest, rejections, without_rows
from forebay.rows.readers.json_lines import is_storable
from forebay.store.layout import Array

_ALL_ORDERS = 5
"""Tags of which all orders are looked at: 120. Of six there are more than `shuffles` may be, and some are drawn."""
_TRIES = 512
"""At most so many are drawn: tags that occur twice have fewer orders."""


def texts_of(rows: pa.Table, captions: CaptionsConfig) -> Iterator[list[str | None]]:
    """Yields the different texts of each row: its own first, each before its orders, the empty one last.

    A row without any text has None in their place.
    """
    for text, further in zip(rows["text"].to_pylist(), _further(rows, captions), strict=True):
        given = [each for each in (text, *(further or ())) if _is_text(each)]
        found = dict.fromkeys(order for each in given for order in (each, *tag_orders(each, captions)))
        yield [*(found or [None]), *([""] if captions.empty else [])]


def tag_orders(text: str, captions: CaptionsConfig) -> list[str]:
    """Returns other orders of the tags of a text, at most `captions.shuffles`, all different, by a hash of the text."""
    if not captions.shuffles:
        return []
    tags = [tag for part in text.split(",") if (tag := part.strip())]
    head, rest = tags[: captions.keep_tags], tags[captions.keep_tags :]
    orders: Iterable[tuple[str, ...]] = itertools.permutations(rest)
    if len(rest) <= _ALL_ORDERS:
        orders = sorted(orders, key=lambda order: _hash("\0".join((*order, text))))
    else:
        orders = (tuple(sorted(rest, key=lambda tag: _hash(f"{number}\0{tag}\0{text}"))) for number in range(_TRIES))
    found = {tuple(rest): None}
    for order in itertools.takewhile(lambda _: len(found) <= captions.shuffles, orders):
        found[order] = None
    return [", ".join((*head, *order)) for order in itertools.islice(found, 1, None)]


def checked_captions(manifest: Manifest, captions: CaptionsConfig) -> Manifest:
    """Returns a manifest without the rows whose column holds something else than a list of texts (`bad_text`)."""
    rows = manifest.rows
    bad = [place for place, further in enumerate(_further(rows, captions)) if further is None]
    if not bad:
        return manifest
    left_out, column = rows.take(pa.array(bad)), str(captions.column)
    messages = [
        f"{column} is {str(value)[:60]!r}, wanted a list of texts, or its JSON; correct the row"
        for value in column_of(left_out, column).to_pylist()
    ]
    named = (left_out["row"], left_out["sample_id"])
    rejected = rejections(*named, kind="failed", reason="bad_text", message=messages)
    return replace(manifest, rows=without_rows(rows, bad), rejected=pa.concat_tables([manifest.rejected, rejected]))


def caption_counts(rows: pa.Table, items: Items, keep: Array, captions: CaptionsConfig) -> dict[str, Any]:
    """Returns how many texts the kept rows have, the empty one left out, and how many blank ones were passed over."""
    assert items.offsets is not None
    counts = (np.diff(items.offsets)[keep] - captions.empty).tolist() or [0]
    kept = rows.filter(pa.array(keep))
    blank = sum(not _is_text(each) for further in _further(kept, captions) for each in further or ())
    return {"min": min(counts), "mean": round(sum(counts) / len(counts), 3), "max": max(counts), "blank": blank}


def _further(rows: pa.Table, captions: CaptionsConfig) -> Iterator[Sequence[str | None] | None]:
    """Yields the entries of each row's list; None for what is no list of texts."""
    if captions.column is None:
        return itertools.repeat((), len(rows))
    return map(_entries, column_of(rows, captions.column).to_pylist())


def _entries(value: Any) -> Sequence[str | None] | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    try:
        found = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(
        each is None or (isinstance(each, str) and is_storable(each)) for each in found
    )
    return found if is_list else None


def _is_text(text: str | None) -> bool:
    return bool((text or "").strip())


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
