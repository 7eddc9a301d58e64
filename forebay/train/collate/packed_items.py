"""Demands of items on a pack: images of a Qwen-VL have tokens that stand for them, positions on two axes, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.errors import CacheMismatchError
from forebay.steps.image.qwen2_vl import GRIDS
from forebay.steps.step import Stored
from forebay.store.layout import Array

Arrays = Mapping[str, Sequence[Array]]
"""Of each field of a form the arrays of a sample's items."""

_PADDING_IMAGE = 256
"""Merged patches of the largest image of padding: attention in it is as cheap as in an image of 512 x 512."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedItems:
    """The demands of samples' items on their pack; these items demand nothing."""

    rows: int = 1
    """Rows of positions: that of the text, and the items' own."""

    merge_size: int = 0
    """Its square is the rows of a token that stands for them. 0: no token does."""
    token: int | None = None
    """That token."""

    @property
    def least(self) -> int:
        """Rows of items that every pack has."""
        return self.merge_size**2

    def tokens(self, num_units: int) -> int:
        """Returns how many tokens stand for so many rows."""
        return num_units // self.merge_size**2 if self.merge_size else 0

    def check(self, items: Sequence[Arrays], units: str) -> None:
        """Returns where the items fit what the samples say of them; else raises CacheMismatchError."""

    def positions(self, out: Array, ids: Array, items: Sequence[Arrays], starts: Array) -> None:
        """Makes the rows of positions behind that of the text those of the tokens of the samples."""

    def padding(self, num_units: int) -> Arrays:  # noqa: ARG002
        """Returns what stands beside so many rows of padding."""
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grids(PackedItems):
    """Images by their grids, (t, h, w) in patches; `merge_size`^2 patches become one token.

    Padded patches are images of zeros whose tokens stand at the head of the segment of padding, with positions as of
    text: nothing attends to them and no label is there, so results and gradients are those without padding. A pack
    without images has one such image of a single token in any case: the vision tower then takes part in every step, as
    data-parallel gradients want it.
    """

    @classmethod
    def of(cls, stored: Stored) -> Grids:
        """Returns that of a cache. Raises ConfigError for constants that are missing."""
        stored.constant("pad_token_id")
        token, merge_size = (int(stored.constant(name)) for name in ("image_token_id", "merge_size"))
        return cls(rows=4, token=token, merge_size=merge_size)

    def check(self, items: Sequence[Arrays], units: str) -> None:
        """See `PackedItems`: grids are of the patches beside them."""
        sizes = [len(image) for each in items for image in each[units]]
        wanted = _grids(items).prod(axis=1).tolist()
        if sizes != wanted:
            raise CacheMismatchError(
                f"images have {sizes} patches, image_grid_thw wants {wanted}; run forebay preprocess --rebuild"
            )

    def positions(self, out: Array, ids: Array, items: Sequence[Arrays], starts: Array) -> None:
        """See `PackedItems`: three rows of mrope."""
        assert self.token is not None
        where = {"image_token_id": self.token, "merge_size": self.merge_size}
        mrope_positions(ids, _grids(items), **where, starts=starts, out=out)

    def padding(self, num_units: int) -> Arrays:
        """See `PackedItems`: images of one merged patch's height that have so many patches together."""
        merged, size = self.tokens(num_units), _PADDING_IMAGE
        widths = [size] * (merged // size) + [merged % size] * (merged % size > 0)
        grids = [(1, self.merge_size, self.merge_size * width) for width in widths]
        return {GRIDS: (np.array(grids, dtype=np.int32).reshape(-1, 3),)}


def _grids(items: Sequence[Arrays]) -> Array:
    return np.concatenate([grid for each in items for grid in each[GRIDS]])


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
    _check_image_tokens(image_tokens, frames=sizes[:, 0], counts=counts, ends=ends)
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


def _check_image_tokens(image_tokens: Array, *, frames: Array, counts: Array, ends: Array) -> None:
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
