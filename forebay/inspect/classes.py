"""How many samples of a cache of images have each class."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.store.cache import Cache
from forebay.terminal import human_share, table
from forebay.visible import printable

logger = logging.getLogger(__name__)

_PROMPT = "label"
_SHOWN = 24


def class_facts(cache: Cache) -> dict[str, Any]:
    """Returns `classes` of `forebay inspect --json`; nothing of a cache without classes, or far away.

    num_classes: one more than the largest number. is_multi: a sample has a list. counts: `class`, its `number` and
    `samples`, the most frequent first. absent: named classes that no sample has.
    """
    if cache.constants.get("prompt") != _PROMPT or cache.mirror is not None:
        return {}
    try:
        found = cache.categories("text")
    except CacheError as err:
        logger.warning("the classes of %s are not counted: %s", cache.place, err)
        return {}
    return {} if found is None else {"classes": _facts(cache.constants, *found)}


def _facts(constants: Mapping[str, Any], texts: list[str], codes: Any) -> dict[str, Any]:
    is_multi = bool(constants["text_form"]["fields"][0]["shape"])
    counts: Counter[str] = Counter()
    for text, samples in zip(texts, np.bincount(codes, minlength=len(texts)).tolist(), strict=True):
        counts.update({str(name): samples for name in (json.loads(text) if is_multi else [text])})
    names: list[str] | None = constants["classes"]
    numbers = {} if names is None else {name: number for number, name in enumerate(names)}
    order = sorted(counts, key=lambda name: (-counts[name], name))
    return {
        "num_classes": constants["num_classes"],
        "is_multi": is_multi,
        "counts": [
            {
                "class": name,
                "number": numbers.get(name, int(name) if name.isdecimal() else None),
                "samples": counts[name],
            }
            for name in order
        ],
        "absent": sum(name not in counts for name in names or ()),
    }


def class_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields how many samples have each class, for a terminal; `facts` is the document of `cache_facts`."""
    found, whole = facts["classes"], facts["num_samples"]
    rows = [
        [printable(each["class"]), f"{each['number']}", f"{each['samples']:,}", human_share(each["samples"] / whole)]
        for each in found["counts"][:_SHOWN]
    ]
    yield from table([f"{found['num_classes']:,} classes", "number", "samples", "share"], rows, left=1)
    if len(found["counts"]) > _SHOWN:
        yield f"  and {len(found['counts']) - _SHOWN:,} more (--json lists them all)"
    if found["absent"]:
        yield f"  {found['absent']:,} classes have no sample"
