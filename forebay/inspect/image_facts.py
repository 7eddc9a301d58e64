"""What a cache of images holds, and what it would take as float32 `pixel_values`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.inspect.histogram import count_histogram
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS
from forebay.store.image.settings import ImageSettings
from forebay.store.shard import shard_fields

logger = logging.getLogger(__name__)

_FLOAT32_BYTES = 4


def holds_images(cache: Cache) -> bool:
    """Whether a cache's media rows are images."""
    return "media_rows" in cache.metadata


def image_facts(cache: Cache) -> dict[str, Any]:
    """Returns the part of `forebay inspect --json` that only a cache of images has.

    codec; images: `stored` (each once a shard), `distinct` (of the listed rows), `used` (in all samples together);
    bytes_per_image: mean of what is stored of an image; float32_bytes_per_image: of the same images as the processor's
    `pixel_values`, null where a shard cannot be read; histograms: of the `tokens` and `patches` a sample.
    """
    stored, size_bytes = _stored_images(cache)
    patches = _stored_patches(cache)
    as_float32 = None if patches is None else float32_bytes(patches, image_settings_of(cache))
    return {
        "codec": cache.metadata["codec"],
        "images": {
            "stored": stored,
            "distinct": cache.metadata["num_images"],
            "used": int(cache.lengths["num_images"].sum(dtype=np.int64)),
        },
        "bytes_per_image": size_bytes / stored if stored else None,
        "float32_bytes_per_image": as_float32 / stored if stored and as_float32 is not None else None,
        "histograms": {name: count_histogram(cache.lengths[f"num_{name}"]) for name in ("tokens", "patches")},
    }


def pack_bytes(cache: Cache, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan with `bytes_per_pack`, its share of the cache, and `float32_bytes_per_pack`, if it is one of packs.

    The latter is what one pack's `pixel_values` take: the images of a pack as often as its samples use them.
    """
    patches = plan["statistics"].get("patches")
    if plan["kind"] != "pack" or not plan["num_packs"] or patches is None:
        return dict(plan)
    return {
        **plan,
        "bytes_per_pack": int(cache.metadata["size_bytes"]) / plan["num_packs"],
        "float32_bytes_per_pack": float32_bytes(patches["mean"], image_settings_of(cache)),
    }


def image_settings_of(cache: Cache) -> ImageSettings:
    """Returns the processor's settings that a cache of images was made with."""
    return ImageSettings.from_json(cache.constants["image"])


def float32_bytes(num_patches: float, settings: ImageSettings) -> float:
    """Returns the bytes of float32 `pixel_values` [num_patches, temporal_patch_size * 3 * patch_size^2]."""
    return num_patches * settings.temporal_patch_size * settings.patch_bytes * _FLOAT32_BYTES


def _stored_images(cache: Cache) -> tuple[int, int]:
    """Returns how many images are stored, and their bytes: from the shard table, no shard is opened."""
    field = cache.fields[FIELDS[cache.metadata["codec"]]]
    value_bytes = field.numpy_dtype.itemsize * math.prod(field.shape)
    return _count(cache, "image_grid_thw"), _count(cache, field.name) * value_bytes


def _stored_patches(cache: Cache) -> int | None:
    if cache.metadata["codec"] == "raw":
        return _count(cache, FIELDS["raw"])
    try:
        grids = [cache.shard("media", i).column("image_grid_thw")[0] for i in range(cache.num_shards)]
    except CacheError as err:
        logger.warning("the images of %s are not counted as float32: %s", cache.folder, err)
        return None
    return sum(int(grid.astype(np.int64).prod(axis=1).sum()) for grid in grids)


def _count(cache: Cache, name: str) -> int:
    """Returns the values [n, *shape] of a media field in all shards."""
    place = [field.name for field in shard_fields(list(cache.fields.values()), "media")].index(name)
    return sum(entry.spans[place][1] for _, entry in cache.shard_entries("media"))
