"""The batch of one pack: several conversations in one row, kept apart by their positions.

How long the batches of packs are: as long as their samples, or padded to a few fixed shapes for a compiled model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.errors import CacheMismatchError, ConfigError, PlanError
from forebay.steps.batch import IGNORED, fresh
from forebay.steps.step import Allocate
from forebay.store.layout import Array
from forebay.store.source import SampleSource
from forebay.train.collate.patches import HostExpansion, PatchBatch, as_filler, model_inputs, patch_table, weight_of

PackedSample = Mapping[str, Any]
"""`input_ids` int32 [n], `label_mask` uint8 [n], `image_grid_thw` int32 [k, 3], `patches`: k arrays uint8 [n_i, w]."""

_PADDING_IMAGE = 256
"""Merged patches of the largest image of padding: attention in it is as cheap as in an image of 512 x 512."""


class PackCollator:
    """Makes the batch of one pack's samples. Picklable, without state: threads may share it.

    | field | |
    |---|---|
    | `input_ids`, `labels` | int64 [1, S]; labels -100 where `label_mask` is 0, at the first token of a segment, in
    padding |
    | `position_ids` | int64 [4, 1, S]: a text row that counts from 0 in every segment, and three rows of mrope |
    | `image_grid_thw` | int64 [k, 3] |
    | `pixel_values` | [P, temporal_patch_size * w] in `dtype` |
    | `use_cache` | False |
    | `cu_seq_lens_q`, `cu_seq_lens_k` | int32 [segments + 1], under `varlen`; the same tensor |
    | `max_length_q`, `max_length_k` | Python int, under `varlen` |

    `model(**batch)` takes it. With no attention mask and no key-value cache, transformers reads the segments from the
    text row: what comes out equals separate forward passes (5.23: 0.0 eager, 3e-7 sdpa).

    Without a `dtype` the batch is a `PatchBatch` with `patches`, uint8 [P, w], instead of the last two fields; then
    `model(**to_model_inputs(batch, constants))`.

    Padding is a segment of its own behind the samples. Padded patches are images of zeros whose image tokens stand at
    the head of that segment, with positions as of text: nothing attends to them and no label is there, so results and
    gradients are those without padding. A pack without images has one such image of a single token in any case: the
    vision tower then takes part in every step, as data-parallel gradients want it.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        shapes: PackShapes | None = None,
        dtype: torch.dtype | None = torch.float32,
        varlen: bool = False,
    ) -> None:
        """Takes from `source` its constants only.

        shapes: None: batches as long as their samples. dtype: float32, float16 or bfloat16: `pixel_values`, expanded
        here; None: `patches` as stored, to be expanded on the device. varlen: segment lengths for flash attention,
        which otherwise reads them from the positions, waiting for the device. Other attentions pass over them. Raises
        ConfigError for constants that are missing or no dtype of pixels.
        """
        constants = source.constants
        name = f"cache {source.key[:16]}"
        wanted = ("image_token_id", "pad_token_id", "patch_size", "merge_size", "temporal_patch_size", "patch_table")
        for constant in wanted:
            if constants.get(constant) is None:
                raise ConfigError(
                    f"{name}: its metadata has no {constant}, which packs need; rebuild it: forebay preprocess"
                )
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"dtype of pixel_values is {dtype}, wanted torch.float32, torch.float16 or torch.bfloat16"
            )
        self._image_token_id, self._pad_token_id = int(constants["image_token_id"]), int(constants["pad_token_id"])
        self._merge_size = int(constants["merge_size"])
        self._width = 3 * int(constants["patch_size"]) ** 2
        self._copies = int(constants["temporal_patch_size"])
        if shapes is not None and shapes.merge_size != self._merge_size:
            raise ConfigError(f"{name}: merge_size is {self._merge_size}, that of the shapes is {shapes.merge_size}")
        self.shapes, self.varlen = shapes, varlen
        self._expansion = None
        if dtype is not None:
            self._expansion = HostExpansion(patch_table(constants), dtype=dtype, temporal_patch_size=self._copies)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | PatchBatch:
        """Returns the batch of these samples in memory of its own; a `collate_fn` for torch's DataLoader."""
        arrays = [{name: _as_arrays(v) for name, v in sample.items()} for sample in samples]
        batch = self.collate(arrays, allocate=fresh)
        return batch if weight_of(samples) else as_filler(batch)

    def collate(self, samples: Sequence[PackedSample], *, allocate: Allocate) -> dict[str, Any] | PatchBatch:
        """Returns the batch of these samples in tensors that `allocate` makes; every element of them is written.

        Raises CacheMismatchError where a sample's text and images do not fit, PlanError where a pack is over the
        shapes.
        """
        if not samples:
            raise ValueError("a pack needs at least one sample")
        layout = self._layout(samples)
        grids = np.concatenate([sample["image_grid_thw"] for sample in samples])
        fields = {
            **self._tokens(samples, layout, grids, allocate),
            **self._images(samples, layout, grids, allocate),
            **self._lengths(layout, allocate),
        }
        return PatchBatch(fields) if self._expansion is None else model_inputs(fields)

    def count_frames(self, samples: Sequence[PackedSample]) -> tuple[int, int]:
        """Returns (tokens of the samples, tokens of their batch); the difference is padding."""
        layout = self._layout(samples)
        return layout.used, layout.num_tokens

    def _layout(self, samples: Sequence[PackedSample]) -> _Layout:
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        used, patches = int(lengths.sum()), sum(len(image) for sample in samples for image in sample["patches"])
        unit = self._merge_size**2
        if self.shapes is None:
            room = patches or unit
            num_tokens = used + (room - patches) // unit
        else:
            room, num_tokens = self.shapes.num_patches(used, patches), self.shapes.num_tokens
        return _Layout(lengths, used, patches, num_tokens=num_tokens, num_patches=room)

    def _tokens(
        self, samples: Sequence[PackedSample], layout: _Layout, grids: Array, allocate: Allocate
    ) -> dict[str, torch.Tensor]:
        used, total, starts = layout.used, layout.num_tokens, layout.starts
        input_ids, labels = (allocate(name, (1, total), dtype=torch.int64) for name in ("input_ids", "labels"))
        position_ids = allocate("position_ids", (4, 1, total), dtype=torch.int64)
        ids, targets, positions = input_ids.numpy()[0], labels.numpy()[0], position_ids.numpy()[:, 0]
        np.concatenate([sample["input_ids"] for sample in samples], out=ids[:used])
        mask = np.concatenate([sample["label_mask"] for sample in samples])
        targets.fill(IGNORED)
        np.copyto(targets[:used], ids[:used], where=mask != 0)
        targets[starts] = IGNORED
        np.subtract(np.arange(used), np.repeat(starts, layout.lengths), out=positions[0, :used])
        mrope_positions(
            ids[:used],
            grids,
            image_token_id=self._image_token_id,
            merge_size=self._merge_size,
            starts=starts,
            out=positions[1:, :used],
        )
        images = used + layout.padded_patches // self._merge_size**2
        ids[used:images], ids[images:] = self._image_token_id, self._pad_token_id
        positions[:, used:] = np.arange(total - used)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}

    def _images(
        self, samples: Sequence[PackedSample], layout: _Layout, grids: Array, allocate: Allocate
    ) -> dict[str, torch.Tensor]:
        images = [image for sample in samples for image in sample["patches"]]
        sizes = [len(image) for image in images]
        if sizes != grids.prod(axis=1).tolist():
            raise CacheMismatchError(
                f"images have {sizes} patches, image_grid_thw wants {grids.prod(axis=1).tolist()}; "
                "run forebay preprocess --rebuild"
            )
        padding = self._padding_grids(layout.padded_patches)
        image_grid_thw = allocate("image_grid_thw", (len(grids) + len(padding), 3), dtype=torch.int64)
        np.concatenate([grids, padding], out=image_grid_thw.numpy())
        name, dtype, copies = "patches", torch.uint8, 1
        if self._expansion is not None:
            name, dtype, copies = "pixel_values", self._expansion.dtype, self._copies
        out = allocate(name, (layout.num_patches, copies * self._width), dtype=dtype)
        end = 0
        # Padding goes the way of the images, so that patches expanded here and on a device are equal there too.
        for image in (*images, np.broadcast_to(np.uint8(0), (layout.padded_patches, self._width))):
            start, end = end, end + len(image)
            if self._expansion is None:
                out.numpy()[start:end] = image
            else:
                self._expansion(image, out[start:end])
        return {"image_grid_thw": image_grid_thw, name: out}

    def _padding_grids(self, num_patches: int) -> Array:
        """Returns int32 [k, 3]: images of one merged patch's height that have so many patches together."""
        merged = num_patches // self._merge_size**2
        widths = [_PADDING_IMAGE] * (merged // _PADDING_IMAGE) + [merged % _PADDING_IMAGE] * (
            merged % _PADDING_IMAGE > 0
        )
        grids = [(1, self._merge_size, self._merge_size * width) for width in widths]
        return np.array(grids, dtype=np.int32).reshape(-1, 3)

    def _lengths(self, layout: _Layout, allocate: Allocate) -> dict[str, Any]:
        if not self.varlen:
            return {}
        ends = np.cumsum(layout.lengths).tolist() + [layout.num_tokens] * (layout.num_tokens > layout.used)
        bounds = allocate("cu_seq_lens", (len(ends) + 1,), dtype=torch.int32)
        bounds.numpy()[:] = [0, *ends]
        longest = max(int(layout.lengths.max()), layout.num_tokens - layout.used)
        return {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }


@dataclass(frozen=True, slots=True)
class _Layout:
    """What stands where in a batch: samples' tokens [0, used), padding's [used, num_tokens); patches alike."""

    lengths: Array
    used: int
    patches: int
    num_tokens: int
    num_patches: int

    @property
    def starts(self) -> Array:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def padded_patches(self) -> int:
        return self.num_patches - self.patches


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return tuple(map(_as_arrays, value)) if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShapes:
    """Fixed shapes: `num_tokens` tokens always, and patches up to the next of `patch_classes`.

    Patches are padded by images of their own, whose image tokens stand in the padded tail of the tokens: the model
    wants an image token for every `merge_size`^2 patches. So `num_tokens` leaves room for the widest step between two
    classes behind `seq_len`; more classes, less room.
    """

    seq_len: int
    """Most tokens that the samples of a pack have together."""
    patch_classes: tuple[int, ...]
    """Rising; the last holds the patches of any pack."""
    merge_size: int = 2

    def __post_init__(self) -> None:
        unit = self.merge_size**2
        classes = self.patch_classes
        if not classes or any(size < 1 or size % unit for size in classes) or list(classes) != sorted(set(classes)):
            raise PlanError(f"patch_classes are {classes}, wanted rising multiples of {unit}")

    @classmethod
    def even(
        cls, seq_len: int, *, max_patches: int | None = None, num_classes: int = 8, merge_size: int = 2
    ) -> PackShapes:
        """Returns `num_classes` evenly spaced classes up to `max_patches` (None: those of `seq_len` image tokens)."""
        unit = merge_size**2
        most = seq_len if max_patches is None else min(-(-max_patches // unit), seq_len)
        tokens = {-(-most * (i + 1) // num_classes) for i in range(num_classes)}
        return cls(seq_len=seq_len, patch_classes=tuple(unit * n for n in sorted(tokens)), merge_size=merge_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of every batch: `seq_len` and the room for image tokens of padding."""
        steps = [high - low for low, high in zip((0, *self.patch_classes), self.patch_classes, strict=False)]
        return self.seq_len + max(steps) // self.merge_size**2

    def num_patches(self, num_tokens: int, num_patches: int) -> int:
        """Returns the class of a pack of so many tokens and patches. Raises PlanError where it is over the shapes."""
        if num_tokens > self.seq_len or num_patches > self.patch_classes[-1]:
            raise PlanError(
                f"a pack has {num_tokens} tokens and {num_patches} patches, its batches have room for {self.seq_len} "
                f"and {self.patch_classes[-1]}; pad to the plan's own seq_len and max_patches"
            )
        return next(size for size in self.patch_classes if size >= num_patches)


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
