"""The rows of a config with `[vision]`, with the grid of every image known from its header."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config import Config
from forebay.errors import SampleError
from forebay.preprocess.sources.conversation_rows import flattened
from forebay.preprocess.sources.conversations import read_conversations
from forebay.preprocess.sources.locate import Map
from forebay.preprocess.sources.rows import Manifest, rejections
from forebay.preprocess.vision.images import image_names, images_of
from forebay.store.image.settings import ImageSettings, grid_thw, image_settings

Array = np.ndarray[Any, Any]


def list_vision(config: Config, *, map_: Map = map) -> Manifest:
    """Returns the eligible conversations of a config; `images` has `grid_h` and `grid_w`, in patches after the resize.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    if config.vision is None:
        raise ValueError("a config without [vision] has no conversations")
    settings = image_settings(Path(config.vision.processor))
    return with_grids(read_conversations(config.source, cache_root=config.cache_root, map_=map_), settings)


def with_grids(manifest: Manifest, settings: ImageSettings) -> Manifest:
    """Returns a manifest whose images have grids; rows with an image that the processor refuses fail, by its reason."""
    images = images_of(manifest)
    sizes = np.stack([images["width"].to_numpy(), images["height"].to_numpy()], axis=1).astype(np.int64)
    unique, inverse = np.unique(sizes, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    grids = np.zeros((len(unique), 2), np.int32)
    refused: dict[int, SampleError] = {}
    for number, (width, height) in enumerate(unique.tolist()):
        try:
            grids[number] = grid_thw(width, height, settings)[1:]
        except SampleError as err:
            refused[number] = err
    for name, column in (("grid_h", 0), ("grid_w", 1)):
        images = images.append_column(name, pa.array(grids[inverse, column], pa.int32()))
    manifest = dataclasses.replace(manifest, images=images)
    return _without(manifest, {i: refused[n] for i, n in enumerate(inverse.tolist()) if n in refused})


def _without(manifest: Manifest, refused: dict[int, SampleError]) -> Manifest:
    """A manifest without the rows that use a refused image."""
    if not refused:
        return manifest
    offsets, flat = flattened(manifest.rows["images"])
    is_bad = np.isin(flat, list(refused))
    rows = np.repeat(np.arange(len(manifest.rows)), np.diff(offsets))
    bad, first = np.unique(rows[is_bad], return_index=True)
    culprits = flat[is_bad][first].tolist()
    left_out = manifest.rows.take(pa.array(bad))
    failed = rejections(
        left_out["row"],
        left_out["sample_id"],
        kind="failed",
        reason=[refused[image].reason for image in culprits],
        message=[f"{name}: {refused[i]}" for name, i in zip(image_names(manifest, culprits), culprits, strict=True)],
    )
    keep = np.ones(len(manifest.rows), bool)
    keep[bad] = False
    return dataclasses.replace(
        manifest,
        rows=manifest.rows.filter(pa.array(keep)),
        rejected=pa.concat_tables([manifest.rejected, failed]),
    )
