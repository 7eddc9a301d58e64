"""The batch of one pack: several samples in one row of tokens, kept apart by their positions, their items behind it.

How long the batches of packs are: as long as their samples, or padded to a few fixed shapes for a compiled model. Items
in a pack: images of a Qwen-VL have tokens that stand for them, positions on two axes, padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import CacheMismatchError, ConfigError, PlanError
from forebay.plan.interface import Plan
from forebay.plan.pack.alike_packs import reserved_tokens
from forebay.steps.batch import IGNORED, collate, fresh
from forebay.steps.form import BatchForm
from forebay.steps.image.qwen2_vl import GRIDS, VIDEO_VALUES, video_form
from forebay.steps.step import Allocate, Stored
from forebay.steps.table import text_step_of
from forebay.store.image.codec import SECONDS, VIDEO_GRIDS, VIDEO_PATCHES
from forebay.store.layout import TEXT, Array, Constants
from forebay.store.source import SampleSource
from forebay.train.augment.augmentation import Augmentation
from forebay.train.augment.draws import Drawing
from forebay.train.collate.forms import items_of
from forebay.train.collate.mrope import VideoTokens, mrope_positions
from forebay.train.collate.patches import PatchBatch, as_codes, as_filler, has_patches, model_inputs, weight_of

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
    videos: VideoTokens | None = None

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


class AxesOfText(PackedItems):
    """Clips of the omni family, whose tokens stand on the three axes of mrope as those of text do."""

    def positions(self, out: Array, ids: Array, items: Sequence[Arrays], starts: Array) -> None:  # noqa: ARG002
        """See `PackedItems`."""
        out[:] = np.arange(len(ids)) - np.repeat(starts, np.diff(starts, append=len(ids)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grids(PackedItems):
    """Images by their grids, (t, h, w) in patches; `merge_size`^2 patches become one token.

    Padded patches are images of zeros whose tokens stand at the head of the segment of padding, with positions as of
    text: nothing attends to them and no label is there, so results and gradients are those without padding. A pack
    without images has one such image of a single token in any case: the vision tower then takes part in every step, as
    data-parallel gradients want it.
    """

    is_in_all: bool = True
    """Whether a pack without images has that one; packs of conversations with clips lack what no sample has."""

    @property
    def least(self) -> int:
        """See `PackedItems`."""
        return self.merge_size**2 if self.is_in_all else 0

    @classmethod
    def of(cls, stored: Stored) -> Grids:
        """Returns that of a cache. Raises ConfigError for constants that are missing."""
        if (rope := stored.constants.of(TEXT).get("mrope")) is not None:
            return cls(rows=4, token=int(rope["token"]), merge_size=int(rope["merge_size"]), is_in_all=False)
        stored.constant("pad_token_id")
        token, merge_size = (int(stored.constant(name)) for name in ("image_token_id", "merge_size"))
        return cls(rows=4, token=token, merge_size=merge_size, videos=VideoTokens.of(stored))

    def check(self, items: Sequence[Arrays], units: str) -> None:
        """See `PackedItems`: grids are of the patches beside them."""
        units_of = {GRIDS: units, **({VIDEO_GRIDS: _units(units)} if self.videos else {})}
        for name, field in units_of.items():
            sizes = [len(image) for each in items for image in each[field]]
            wanted = _grids(items, name).prod(axis=1).tolist()
            if sizes != wanted:
                raise CacheMismatchError(
                    f"images have {sizes} patches, {name} wants {wanted}; run forebay preprocess --rebuild"
                )

    def positions(self, out: Array, ids: Array, items: Sequence[Arrays], starts: Array) -> None:
        """See `PackedItems`: three rows of mrope."""
        assert self.token is not None
        videos = None
        if self.videos is not None:
            seconds = [each[SECONDS] for each in items]
            videos = self.videos, _grids(items, VIDEO_GRIDS), np.concatenate([np.zeros(0, np.float32), *seconds])
        where = {"image_token_id": self.token, "merge_size": self.merge_size}
        mrope_positions(ids, _grids(items), **where, starts=starts, out=out, videos=videos)

    def padding(self, num_units: int) -> Arrays:
        """See `PackedItems`: images of one merged patch's height that have so many patches together."""
        merged, size = self.tokens(num_units), _PADDING_IMAGE
        widths = [size] * (merged // size) + [merged % size] * (merged % size > 0)
        grids = [(1, self.merge_size, self.merge_size * width) for width in widths]
        return {GRIDS: (np.array(grids, dtype=np.int32).reshape(-1, 3),)}


def _grids(items: Sequence[Arrays], name: str = GRIDS) -> Array:
    grids = (grid.reshape(-1, 3) for each in items for grid in each[name])
    return np.concatenate([np.empty((0, 3), np.int32), *grids])


def _units(of_images: str) -> str:
    """Returns the field of the patches of videos beside that of images, as values or as codes."""
    return VIDEO_VALUES if of_images == "pixel_values" else VIDEO_PATCHES


PackedSample = Mapping[str, Any]
"""For example `input_ids` int32 [n], `label_mask` uint8 [n], `image_grid_thw` int32 [k, 3], `patches`: k arrays."""


class PackCollator:
    """Makes the batch of one pack's samples. Picklable, without state: threads may share it.

    | field | |
    |---|---|
    | `input_ids`, `labels`, or what else the prompt has | int64 [1, S]; labels -100 where nothing is learnt, at the
    first token of a segment of `input_ids`, in padding |
    | `position_ids` | int64 [1, S]: counts from 0 in every segment; of images [4, 1, S], with three rows of mrope |
    | the items' own | one behind the other: `image_grid_thw` [k, 3] and `pixel_values` [P, temporal_patch_size * w], or
    `input_features` [frames, n_mels] and `input_features_lengths` [clips]; clips of conversations as in any batch |
    | of videos | `video_grid_thw` [k, 3], `pixel_values_videos` [P, temporal_patch_size * w], of Qwen2.5-VL
    `second_per_grid_ts` float32 [k]; a pack without videos has none of these |
    | `use_cache` | False |
    | `cu_seq_lens_q`, `cu_seq_lens_k` | int32 [segments + 1], under `varlen`; the same tensor |
    | `max_length_q`, `max_length_k` | Python int, under `varlen` |

    `model(**batch)` takes that of images. With no attention mask and no key-value cache, transformers reads the
    segments from the text row: what comes out equals separate forward passes (5.23: 0.0 eager, 3e-7 sdpa).

    Without a `dtype` fields with a table are codes as stored: the batch is a `PatchBatch` with `patches`, uint8 [P, w],
    instead of `pixel_values` and `use_cache`; then `model(**to_model_inputs(batch, constants))`.

    Padding is a segment of its own behind the samples. What it has of images says `Grids`.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        shapes: PackShapes | None = None,
        dtype: torch.dtype | None = torch.float32,
        varlen: bool = False,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Takes from `source` its constants and field specifications only.

        shapes: None: batches as long as their samples. dtype: float32, float16 or bfloat16: of floats, expanded here;
        None: codes as stored, to be expanded on the device. varlen: segment lengths for flash attention, which
        otherwise reads them from the positions, waiting for the device. Other attentions pass over them.
        augmentation: changes the samples for which `collate` is given their draws. Raises ConfigError for constants
        that are missing, arrays that stand in no pack, or no dtype of floats.
        """
        stored = Stored.of(source)
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"dtype of pixel_values is {dtype}, wanted torch.float32, torch.float16 or torch.bfloat16"
            )
        forms = pack_forms(stored)
        self._kind = _kind_of(stored, forms)
        if shapes is not None and shapes.merge_size != self._kind.merge_size:
            raise ConfigError(
                f"{stored.name}: merge_size is {self._kind.merge_size}, that of the shapes is {shapes.merge_size}"
            )
        text = text_step_of(source.constants)
        if text is None:
            raise ConfigError(f"{stored.name}: no packs for prompt {stored.constant('prompt')!r}")
        self._text = text.row(stored)
        self._pad_token_id = int(stored.constants.get("pad_token_id") or 0)
        self._augmentation = augmentation
        self.shapes, self.varlen, self._dtype = shapes, varlen, dtype or torch.float32
        self._is_coded = dtype is None and any(map(has_patches, forms))
        self._forms = tuple(map(as_codes, forms)) if self._is_coded else forms
        units = forms[-1].units if forms else None
        self._units = "" if units is None else units.on_disk if self._is_coded else units.name
        family = stored.constants.get("video_family")
        self._has_videos, self._gives_seconds = family is not None, family == "qwen2_5"

    has_rows = False
    """A pack has no dimension of samples, of a single one either."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | PatchBatch:
        """Returns the batch of these samples in memory of its own; a `collate_fn` for torch's DataLoader."""
        arrays = [{name: _as_arrays(v) for name, v in sample.items()} for sample in samples]
        batch = self.collate(arrays, allocate=fresh)
        return batch if weight_of(samples) else as_filler(batch)

    def collate(
        self, samples: Sequence[PackedSample], *, allocate: Allocate, drawing: Drawing | None = None
    ) -> dict[str, Any] | PatchBatch:
        """Returns the batch of these samples in tensors that `allocate` makes; every element of them is written.

        drawing: of the samples, where they are changed. Raises CacheMismatchError where a sample's text and items do
        not fit, PlanError where a pack is over the shapes.
        """
        if not samples:
            raise ValueError("a pack needs at least one sample")
        if self._augmentation is not None and drawing is not None:
            samples = self._augmentation.changed(samples, drawing.ids, drawing.draws)
        items = self._items(samples)
        layout = self._layout(samples)
        fields = {
            **self._tokens(samples, layout, items, allocate),
            **self._beside(layout, items, allocate),
            **self._lengths(layout, allocate),
        }
        return PatchBatch(fields) if self._is_coded else model_inputs(fields)

    def count_frames(self, samples: Sequence[PackedSample]) -> tuple[int, int]:
        """Returns (tokens of the samples, tokens of their batch); the difference is padding."""
        layout = self._layout(samples)
        return layout.used, layout.num_tokens

    def _items(self, samples: Sequence[PackedSample]) -> list[Arrays]:
        """Returns of every sample the fields of all its items; what is padded are those of the last group."""
        columns = {name: arrays for form in self._forms for name, arrays in form.columns(samples).items()}
        if self._has_videos:
            columns[SECONDS] = [sample[SECONDS] for sample in samples]
        rows = zip(*columns.values(), strict=True) if columns else [()] * len(samples)
        return [dict(zip(columns, each, strict=True)) for each in rows]

    def _layout(self, samples: Sequence[PackedSample]) -> _Layout:
        lengths, least = np.array(self._text.lengths(samples)), self._kind.least
        used, units, frames = int(lengths.sum()), 0, 0
        if self._units:
            units = sum(len(array) for arrays in self._forms[-1].columns(samples)[self._units] for array in arrays)
        if self.shapes is None:
            room = units or least
            return _Layout(lengths, used, units, num_tokens=used + self._kind.tokens(room - units), num_units=room)
        if self._has_videos:
            frames = sum(len(array) for sample in samples for array in sample[VIDEO_PATCHES])
        room = self.shapes.num_patches(used, units + frames) - frames + least * self._has_videos
        layout = _Layout(lengths, used, units, num_tokens=self.shapes.seq_len, num_units=room)
        return replace(layout, padded_frames=least * self._has_videos)

    def _tokens(
        self, samples: Sequence[PackedSample], layout: _Layout, items: Sequence[Arrays], allocate: Allocate
    ) -> dict[str, torch.Tensor]:
        used, total, starts = layout.used, layout.num_tokens, layout.starts
        tokens, beside = self._text(samples)
        batch: dict[str, torch.Tensor] = {}
        for name, values in tokens.items():
            batch[name] = allocate(name, (1, total), dtype=torch.int64)
            row = batch[name].numpy()[0]
            row[:used], row[used:] = values, IGNORED if name == "labels" else self._pad_token_id
        rows = self._kind.rows
        batch["position_ids"] = allocate("position_ids", (rows, 1, total)[rows == 1 :], dtype=torch.int64)
        positions = batch["position_ids"].numpy().reshape(rows, total)
        np.subtract(np.arange(used), np.repeat(starts, layout.lengths), out=positions[0, :used])
        positions[:, used:] = np.arange(total - used)
        if "input_ids" in batch:
            ids = batch["input_ids"].numpy()[0]
            self._kind.positions(positions[1:, :used], ids[:used], items, starts)
            if self._kind.token is not None:
                behind = used + self._kind.tokens(layout.padded_units)
                ids[used:behind] = self._kind.token
                if self._kind.videos is not None:
                    ids[behind : behind + self._kind.tokens(layout.padded_frames)] = self._kind.videos.token
            if "labels" in batch:  # the model moves them: the first of a segment would be learnt from the one before
                batch["labels"].numpy()[0, starts] = IGNORED
        return batch | {name: torch.from_numpy(values) for name, values in beside.items()}

    def _beside(self, layout: _Layout, items: Sequence[Arrays], allocate: Allocate) -> dict[str, torch.Tensor]:
        """Returns the items. Padding goes their way, so that what is expanded here and on a device is equal there."""
        self._kind.check(items, self._units)
        batch: dict[str, torch.Tensor] = {}
        for form in self._forms:
            is_last = form is self._forms[-1]
            held, padded = items, layout.padded_units if is_last else layout.padded_frames
            if padded:
                grids = self._kind.padding(padded)
                grids = grids if is_last else {VIDEO_GRIDS: grids[GRIDS]}
                held = [*items, {**_zeros(form, padded), **grids}]
            if any(len(array) for each in held for array in each[form.main.name]):
                batch |= collate(form, held, dtype=self._dtype, allocate=allocate, are_rows=True)
        if self._gives_seconds and VIDEO_GRIDS in batch:
            padded_s = np.ones(self._kind.tokens(layout.padded_frames), np.float32)
            batch[SECONDS] = torch.from_numpy(np.concatenate([*(each[SECONDS] for each in items), padded_s]))
        return batch

    def _lengths(self, layout: _Layout, allocate: Allocate) -> dict[str, Any]:
        if not self.varlen:
            return {}
        ends = np.cumsum(layout.lengths).tolist() + [layout.num_tokens] * (layout.num_tokens > layout.used)
        bounds = allocate("cu_seq_lens", (len(ends) + 1,), dtype=torch.int32)
        bounds.numpy()[:] = [0, *ends]
        longest = max(int(layout.lengths.max()), layout.num_tokens - layout.used)
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


_OMNI = ("Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor")


def _kind_of(stored: Stored, forms: Sequence[BatchForm]) -> PackedItems:
    """Returns what the items of a cache demand of a pack."""
    if GRIDS in {field.name for form in forms for field in form.fields}:
        return Grids.of(stored)
    is_omni = any(form.is_listed for form in forms) and stored.constant("text_form")["made_by"] in _OMNI
    return AxesOfText(rows=4) if is_omni else PackedItems()


def pack_forms(stored: Stored) -> tuple[BatchForm, ...]:
    """Returns the forms that the items of a cache have in packs, a group each, images last.

    Raises ConfigError where they can stand in none.
    """
    items = items_of(stored)
    try:
        made_by = stored.constants.get("text_form", {}).get("made_by")
        if len(items) > 1 and made_by not in _OMNI:
            who = " and ".join(each.who for each in items)
            known = f"{made_by or 'their model'} is none of {', '.join(_OMNI)}, whose positions are known"
            raise ValueError(f"packs hold items of one group, and samples have {who}: {known}")
        # A model takes clips of conversations, and images beside them, as they stand in any batch.
        is_listed = any(each.form.is_listed for each in items)
        forms = tuple(each.form if is_listed else each.form.packed() for each in items)
        videos = video_form(stored.constants)
        return forms if videos is None else (videos, *forms)
    except ValueError as err:
        raise ConfigError(
            f'{stored.name}: plan.kind is "pack", and {err}; set plan.kind = "bucket" with batch_size'
        ) from err


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a batch: samples' tokens [0, used), padding's [used, num_tokens); rows of items alike."""

    lengths: Array
    used: int
    units: int
    num_tokens: int
    num_units: int
    padded_frames: int = 0
    """Patches of the video of padding."""

    @property
    def starts(self) -> Array:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def padded_units(self) -> int:
        return self.num_units - self.units


def _zeros(form: BatchForm, num_units: int) -> Arrays:
    return {field.name: (np.zeros((num_units, *field.shape[1:]), field.stored_dtype),) for field in form.stored}


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return tuple(map(_as_arrays, value)) if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShapes:
    """Fixed shapes: `seq_len` tokens always, and one of `patch_classes` numbers of patches.

    Patches are padded by images of their own, whose image tokens stand in the padded tail of the tokens: the model
    wants an image token for every `merge_size`^2 patches. The plan of the packs has left room for them. Where samples
    may have videos, classes are of the patches of both; an image and a video of `reserved` / 2 tokens each stand beside
    them in every pack, so that the model calls its tower as often for all.
    """

    seq_len: int
    """Tokens of every batch."""
    patch_classes: tuple[int, ...]
    """Rising, of patches or other rows of items; () where samples have none."""
    merge_size: int = 2
    """Its square is the patches of a token. 0: no token stands for rows of items."""
    reserved: int = 0

    def __post_init__(self) -> None:
        unit, classes = max(self.merge_size, 1) ** 2, self.patch_classes
        if any(size < 1 or size % unit for size in classes) or list(classes) != sorted(set(classes)):
            raise PlanError(f"patch_classes are {classes}, wanted rising multiples of {unit}")

    @classmethod
    def of(cls, plan: Plan, settings: PlanConfig | None, constants: Constants) -> PackShapes | None:
        """Returns those of a plan of packs; None where its packs are as long as their samples."""
        if not isinstance(settings, PackConfig) or not settings.has_shapes:
            return None
        merge_size = int(constants.get("merge_size", 0))
        reserved = reserved_tokens(constants)
        return cls(seq_len=settings.seq_len, patch_classes=plan.patch_classes, merge_size=merge_size, reserved=reserved)

    def num_patches(self, num_tokens: int, num_patches: int) -> int:
        """Returns the smallest class with room for a pack and its padding. Raises PlanError where none has."""
        unit = self.merge_size**2
        for size in self.patch_classes or (0,):
            padding = (size - num_patches) // unit if unit else 0
            if size >= num_patches and num_tokens + padding <= self.seq_len - self.reserved:
                return size
        raise PlanError(
            f"a pack has {num_tokens} tokens and {num_patches} patches, and the shapes have {self.seq_len} tokens and "
            f"{' or '.join(map(str, self.patch_classes)) or 0} patches, in which the padding has tokens too; take the "
            "shapes of the plan that made the pack"
        )
