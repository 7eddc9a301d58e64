"""Positions of tokens on the three axes of mrope: of texts, of images, and of videos as each Qwen-VL has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.errors import CacheMismatchError
from forebay.steps.step import Stored
from forebay.store.layout import Array


@dataclass(frozen=True, slots=True)
class VideoTokens:
    """The tokens of videos among those of images. token: theirs. family: how the model is shown time.

    tokens_per_second: positions of a second, of the family `qwen2_5`.
    """

    token: int
    family: str
    tokens_per_second: int = 0

    @classmethod
    def of(cls, stored: Stored) -> VideoTokens | None:
        """Returns those of a cache; None where it has no videos."""
        if "video_family" not in stored.constants:
            return None
        constants = stored.constants
        rate = int(constants.get("tokens_per_second") or 0)
        return cls(int(stored.constant("video_token_id")), str(constants["video_family"]), rate)

    def among(
        self, input_ids: Array, grids: Array, seconds: Array, *, images: Array, image_token_id: int
    ) -> tuple[Array, Array, Array]:
        """Returns which tokens are of items, bool [n], and of each run of them its grid and its step in time.

        grids, seconds: of the videos. images: grids of the images. Raises CacheMismatchError for other runs of tokens.
        """
        is_video = input_ids == self.token
        is_item = is_video | (input_ids == image_token_id)
        starts = np.flatnonzero(is_item & ~np.concatenate(([False], is_item[:-1])))
        kinds = is_video[starts]
        steps = np.float32(self.tokens_per_second) * seconds if self.family == "qwen2_5" else np.ones_like(seconds)
        if self.family == "qwen3":  # each frame stands alone, behind its time
            steps, frames = np.repeat(steps, grids[:, 0]), np.repeat(grids, grids[:, 0], axis=0)
            grids = np.concatenate([np.ones_like(frames[:, :1]), frames[:, 1:]], axis=1)
        if (int(kinds.sum()), int((~kinds).sum())) != (len(grids), len(images)):
            raise CacheMismatchError(
                f"input_ids show {int(kinds.sum())} videos or frames and {int((~kinds).sum())} images, the grids are "
                f"of {len(grids)} and {len(images)}; run forebay preprocess --rebuild"
            )
        sizes, rates = np.empty((len(kinds), 3), np.int64), np.ones(len(kinds), np.float32)
        sizes[kinds], sizes[~kinds], rates[kinds] = grids, images, steps
        return is_item, sizes, rates


def mrope_positions(
    input_ids: Array,
    grids: Array,
    *,
    image_token_id: int,
    merge_size: int,
    starts: Array | Sequence[int] = (0,),
    out: Array | None = None,
    videos: tuple[VideoTokens, Array, Array] | None = None,
) -> Array:
    """Returns int64 [3, n], the positions in time, height and width, as the model's `get_rope_index` has them.

    input_ids: integer [n]. grids: integer [k, 3], `image_grid_thw` in the order of the images in `input_ids`.
    starts: where the segments of a pack begin, rising, the first at 0; positions count from 0 in each of them.
    out: int64 [3, n] to write to. videos: their tokens, `video_grid_thw` and `second_per_grid_ts`.

    A text token stands one behind what is before it, on all three axes. An image of h x w merged patches stands at one
    point in time, spreads over h and w from there, and what follows it stands max(h, w) further on (Qwen2-VL, section
    2.1). A video is as an image at every step of its grid, each so much later as its model's `get_rope_index` says: 1,
    or tokens_per_second * second_per_grid_ts in float32, rounded down. Raises CacheMismatchError where the tokens are
    not those of the grids.
    """
    sizes = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
    if videos is None:
        is_item = input_ids == image_token_id
    else:
        tokens, *told = videos
        is_item, sizes, rates = tokens.among(input_ids, *told, images=sizes, image_token_id=image_token_id)
    image_tokens = np.flatnonzero(is_item)
    rows, columns = sizes[:, 1] // merge_size, sizes[:, 2] // merge_size
    areas = rows * columns
    counts = areas if videos is None else areas * sizes[:, 0]
    ends = np.cumsum(counts)
    _check_image_tokens(image_tokens, frames=sizes[:, 0], counts=counts, ends=ends, are_stills=videos is None)
    # How far each token moves on what comes behind it: an image does so at its last token.
    steps = np.ones(len(input_ids), dtype=np.int64)
    steps[is_item] = 0
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
    begun, moved = places[is_item], []
    if videos is not None:
        later, within = np.divmod(within, np.repeat(areas.astype(np.int32), counts))
        moved.append((later.astype(np.float32) * np.repeat(rates, counts)).astype(np.int64))
    moved += np.divmod(within, np.repeat(columns.astype(np.int32), counts))
    for row, by in zip(positions[-len(moved) :], moved, strict=True):
        row[is_item] = begun + by  # a mask is four times as fast as indices
    return positions


def _check_image_tokens(image_tokens: Array, *, frames: Array, counts: Array, ends: Array, are_stills: bool) -> None:
    wanted = int(counts.sum())
    if len(image_tokens) != wanted:
        raise CacheMismatchError(
            f"input_ids hold {len(image_tokens)} image tokens, image_grid_thw wants {wanted}; "
            "the text was made for other images: run forebay preprocess --rebuild"
        )
    if (are_stills and (frames != 1).any()) or (counts < 1).any():
        raise CacheMismatchError(
            "image_grid_thw has an image without patches or of several frames; only still images are known"
        )
    if (image_tokens[ends - 1] - image_tokens[ends - counts] != counts - 1).any():
        raise CacheMismatchError(
            "the image tokens of an image do not stand together, as image_grid_thw wants them; "
            "run forebay preprocess --rebuild"
        )
