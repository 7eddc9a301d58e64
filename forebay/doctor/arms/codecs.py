"""The arm of codecs: what a pack of this set's items takes to read, and its bytes, under each of the codecs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from forebay.config.plan import PackConfig
from forebay.doctor.bench import Bench
from forebay.doctor.figures import Codecs, Skip
from forebay.preprocess.group import ItemGroup
from forebay.store.image.codec import Codec

_CODECS: tuple[Codec, ...] = ("raw", "zstd", "webp", "source")
_ITEMS = 24


def codecs(bench: Bench, seconds: float) -> Codecs:
    """Returns milliseconds to read a pack and bytes of a sample by codec: of some items, each stored and read."""
    plan = bench.config.plan
    group = next((each for each in bench.groups.items if each.codec is not None), None)
    if group is None or not isinstance(plan, PackConfig):
        raise Skip("only images have codecs")
    items = bench.groups.items_of(bench.picked)[group.name]
    if not len(items.table):
        raise Skip("no sample has an image")
    read_s: dict[str, list[float]] = {codec: [] for codec in _CODECS}
    sizes: dict[str, list[int]] = {codec: [] for codec in _CODECS}
    stored = [group.under(codec) for codec in _CODECS]
    rows = group.task_rows(items.table, bench.picked.files)
    ends = time.perf_counter() + seconds
    with bench.reader(group) as read:
        for place in bench.random.permutation(len(rows))[:_ITEMS].tolist():
            for each in stored:
                values = next(iter(each.samples(rows.slice(place, 1), read)))
                if "failure" in values:
                    break
                began = time.perf_counter()
                sizes[str(each.codec)].append(_read(each, values))
                read_s[str(each.codec)].append(time.perf_counter() - began)
            if time.perf_counter() > ends:
                break
    if not sizes["raw"]:
        raise Skip("no image could be read")
    offsets, _ = items.of_rows(0, len(bench.picked.rows))
    items_a_sample = float(np.diff(offsets).mean())
    tokens = np.asarray(bench.cached.lengths["num_tokens"])
    samples_a_pack = max(plan.seq_len / max(float(tokens.mean()), 1.0), 1.0)
    factor = items_a_sample * samples_a_pack
    return Codecs(
        read_ms={codec: 1e3 * statistics.fmean(each) * factor for codec, each in read_s.items()},
        bytes_a_sample={codec: statistics.fmean(each) * items_a_sample for codec, each in sizes.items()},
        own=str(group.codec),
        samples_a_pack=samples_a_pack,
    )


def _read(group: ItemGroup, values: dict[str, Any]) -> int:
    """Returns the bytes of an item's fields, whose values are made of them."""
    for value in group.joined({}, [values]).values():
        for part in value if isinstance(value, tuple) else (value,):
            np.ascontiguousarray(part).sum()  # `raw` is a mapping whose bytes are copied when they are used
    return sum(value.nbytes for value in values.values() if isinstance(value, np.ndarray))
