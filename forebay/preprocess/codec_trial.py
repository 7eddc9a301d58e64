"""The codecs of images on this machine and this set: bytes an image, and milliseconds to read it, of some images.

A trial is a task as a shard is; it runs where shards are made, and nothing of it is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.preprocess.build_report import CodecCost
from forebay.preprocess.group import ItemGroup, Values, narrow
from forebay.preprocess.groups import Listing
from forebay.preprocess.shard_task import ShardTask, reading
from forebay.store.image.codec import Codec
from forebay.store.layout import Array, Group, is_variant

CODECS: tuple[Codec, ...] = ("raw", "zstd", "webp", "source")
TRIED = 64
"""Images that a dry run stores and reads."""
Measured = dict[Codec, list[tuple[int, float]]]
"""Of each codec and image the bytes, and the seconds to read them."""


def measured(group: ItemGroup, samples: Callable[[ItemGroup], Iterator[Values]]) -> Measured:
    """Returns bytes and seconds of items, which `samples` makes of a group under each codec, without failures."""
    found: Measured = {}
    for codec in CODECS:
        own = group.under(codec)
        found[codec] = [read_again(own, values) for values in samples(own) if "failure" not in values]
    return found


def read_again(group: ItemGroup, values: Values) -> tuple[int, float]:
    """Returns the bytes of an item's fields, and the seconds in which values are made of one of its variants."""
    begun_s = time.perf_counter()
    for name, value in group.joined({}, [values]).items():
        if not is_variant(name):
            _touch(value)
    size = sum(value.nbytes for value in values.values() if isinstance(value, np.ndarray))
    return size, time.perf_counter() - begun_s


def _touch(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value.copy()  # `raw` is a view of the file, whose bytes are copied when they are used
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for each in value:
            _touch(each)


def try_codecs(task: ShardTask) -> Measured:
    """Returns what the codecs of a task's images cost, in a worker."""
    group = task.groups.item_group(task.group)
    with reading(task) as read:
        return measured(group, lambda own: own.samples(task.rows, read(own)))


def codec_costs(
    config: Config, listing: Listing, run: Callable[[Any, Iterator[ShardTask]], Iterable[tuple[ShardTask, Measured]]]
) -> tuple[CodecCost, ...]:
    """Returns what each codec costs of each group of patches. run: one trial after the other, in workers."""
    groups = [group for group in listing.groups.items if group.codec is not None and group.merge_size is not None]
    tasks = (_task(config, listing, group.name) for group in groups if len(listing.items[group.name].table))
    return tuple(cost for task, found in run(try_codecs, tasks) for cost in _costs(config, listing, task.group, found))


def _task(config: Config, listing: Listing, group: Group) -> ShardTask:
    items = listing.items[group].table
    count = min(TRIED, len(items))
    is_near = not listing.files.is_of_store.any()
    places = np.linspace(0, len(items) - 1, count).astype(np.int64) if is_near else np.arange(count)
    own = listing.groups.item_group(group)
    files, rows = narrow(own.task_rows(items.take(pa.array(places)), listing.files), listing.files)
    named: dict[str, Any] = {"key": "", "folder": config.cache_root, "groups": listing.groups}
    return ShardTask(group=group, rows=rows, files=files, max_open_tars=config.run.max_open_tars, **named)


def _costs(config: Config, listing: Listing, name: Group, found: Measured) -> Iterator[CodecCost]:
    group, items = listing.groups.item_group(name), listing.items[name]
    a_pack = _images_a_pack(config, group, np.asarray(group.listed_lengths(items.table, listing.files)["num_patches"]))
    for codec, images in found.items():
        if images:
            size, seconds = (statistics.fmean(each) for each in zip(*images, strict=True))
            yield CodecCost(
                group=name,
                codec=codec,
                images_tried=len(images),
                bytes_an_image=size,
                ms_an_image=1000 * seconds,
                ms_a_pack=None if a_pack is None else 1000 * seconds * a_pack,
                total_bytes=round(size * items.different),
                is_own=codec == group.codec,
            )


def _images_a_pack(config: Config, group: ItemGroup, patches: Array) -> float | None:
    """Returns the images of mean size that fill a pack, as if it held no text; None for another plan."""
    if not isinstance(config.plan, PackConfig) or group.merge_size is None:
        return None
    return config.plan.seq_len * group.merge_size**2 / max(float(patches.mean()), 1.0)
