"""Positions of Qwen3-VL's multimodal rotary embedding (mrope), for a sample or for all samples of a pack at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.errors import CacheMismatchError
from forebay.store.layout import Array


def mrope_positions(
    input_ids: Array,
    grids: Array,
    *,
    image_token_id: int,
    merge_size: int,
    starts: Array | Sequence[int] = (0,),
    out: Array | None = None,
) -> Array:
    """Returns int64 [3, n], the positions in time, height and width, as the model's `get_rope_index` has them.

    input_ids: integer [n]. grids: integer [k, 3], `image_grid_thw` in the order of the images in `input_ids`.
    starts: where the segments of a pack begin, rising, the first at 0; positions count from 0 in each of them.
    out: int64 [3, n] to write to.

    A text token stands one behind what is before it, on all three axes. An image of h x w merged patches stands at one
    point in time, spreads over h and w from there, and what follows it stands max(h, w) further on (Qwen2-VL, section
    2.1). Raises CacheMismatchError where the image tokens are not those of the grids.
    """
    sizes = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
    rows, columns = sizes[:, 1] // merge_size, sizes[:, 2] // merge_size
    counts = rows * columns
    ends = np.cumsum(counts)
    image_tokens = np.flatnonzero(input_ids == image_token_id)
    _check(image_tokens, frames=sizes[:, 0], counts=counts, ends=ends)
    # How far each token moves on what comes behind it: an image does so at its last token.
    steps = np.ones(len(input_ids), dtype=np.int64)
    steps[image_tokens] = 0
    steps[image_tokens[ends - 1]] = np.maximum(rows, columns)
    places = np.cumsum(steps)
    places -= steps
    first = np.asarray(starts)
    if len(first) > 1:
        places -= np.repeat(places[first], np.diff(first, append=len(input_ids)))
    positions = np.empty((3, len(input_ids)), dtype=np.int64) if out is None else out
    positions[:] = places
    # 32-bit: integer division is the dearest step here, and slower in 64.
    within = np.arange(len(image_tokens), dtype=np.int32) - np.repeat((ends - counts).astype(np.int32), counts)
    down, across = np.divmod(within, np.repeat(columns.astype(np.int32), counts))
    positions[1, image_tokens] += down
    positions[2, image_tokens] += across
    return positions


def _check(image_tokens: Array, *, frames: Array, counts: Array, ends: Array) -> None:
    wanted = int(counts.sum())
    if len(image_tokens) != wanted:
        raise CacheMismatchError(
            f"input_ids hold {len(image_tokens)} image tokens, image_grid_thw wants {wanted}; "
            "the text was made for other images: run forebay preprocess --rebuild"
        )
    if (frames != 1).any() or (counts < 1).any():
        raise CacheMismatchError(
            "image_grid_thw has an image without patches or of several frames; only still images are known"
        )
    if (image_tokens[ends - 1] - image_tokens[ends - counts] != counts - 1).any():
        raise CacheMismatchError(
            "the image tokens of an image do not stand together, as image_grid_thw wants them; "
            "run forebay preprocess --rebuild"
        )
