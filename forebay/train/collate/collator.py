"""The collate function of a source: which fields its batches have, in which dtype; random crops; and columns beside.

A crop is a function of (seed, epoch, sample id) and the clip's length alone. Rank, world size, thread, order and place
in the epoch do not enter, so a crop is the same after any resume and in any loader, cached or not, and in a mixture of
caches as in each by itself. Columns of the row table stand beside a batch: no model would take them among its fields.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from forebay.config.frozen_models import TokenPattern
from forebay.errors import ConfigError
from forebay.plan.permutation import derive_key
from forebay.steps.audio.audio_section import crop_samples
from forebay.steps.batch import collate_fields, fresh
from forebay.steps.form import BatchForm
from forebay.steps.step import HEARS_VIDEOS, Allocate, Batch, PaddingSide, Stored
from forebay.steps.table import audio_step
from forebay.store.image.codec import VIDEO_GRIDS
from forebay.store.layout import Array
from forebay.store.source import Sample, SampleSource, SourceUnion, parts_of
from forebay.train.augment.augmentation import Augmentation
from forebay.train.augment.draws import Drawing
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.collate.forms import DeclaredText, as_tokens, count_tokens, items_of, text_of
from forebay.train.collate.patches import DeviceExpansion, Filler, weight_of
from forebay.train.collate.patches import as_codes as coded
from forebay.train.collate.ragged import Crossing, can_cross

CROP_VERSION = 1
"""Bumped when the same seed, epoch, sample id and length give another crop."""
DRAW = "crop_draw"
"""The field that carries a draw beside a sample's own, int64 [1]."""
_DRAW_BITS = 63


class CropDraws:
    """The draws of one epoch: an integer in [0, 2^63) for every sample id, uniform and independent of all others."""

    __slots__ = ("_key",)

    def __init__(self, *, seed: int, epoch: int) -> None:
        self._key = derive_key("forebay crop", CROP_VERSION, seed, epoch).to_bytes(8, "little")

    def draw(self, sample_id: str) -> int:
        """Returns the draw of a sample: BLAKE2b of its id under the epoch's key, 1 us."""
        # Ids are names of tar members too, which need not be UTF-8.
        text = sample_id.encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._key).digest(), "little") >> 1

    def beside(self, sample: Mapping[str, Array], sample_id: str) -> dict[str, Array]:
        """Returns the sample's fields and its draw, which a `Collator` with `crop_s` wants."""
        return {**sample, DRAW: np.array([self.draw(sample_id)], np.int64)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A kind of crop: `num_samples` audio samples that start at a multiple of `grid_samples`, both 1 or more."""

    num_samples: int
    grid_samples: int

    def num_starts(self, clip_samples: int) -> int:
        """Returns at how many places a crop can start so that it lies inside; 1, at 0, where the clip is shorter."""
        return max(0, clip_samples - self.num_samples) // self.grid_samples + 1

    def start(self, clip_samples: int, *, draw: int) -> int:
        """Returns the audio sample at which the crop of a clip starts, every possible one as likely.

        draw: of `CropDraws`. Multiply and shift: no start is more than one draw in 2^63 / num_starts too likely.
        """
        return (draw * self.num_starts(clip_samples) >> _DRAW_BITS) * self.grid_samples


@dataclass(frozen=True, slots=True)
class Crops:
    """The crop of every sample as a batch: `wav` [B, N], and what features add (`w2v_bert`: `feats` [B, 1, T, 160]).

    N is `crop.num_samples`. A clip that is shorter than N is followed by zeros.
    """

    crop: Crop
    form: BatchForm

    @classmethod
    def of(cls, stored: Stored, *, crop_s: float) -> Crops:
        """Returns the crops of a source. Raises ConfigError where it has none of `crop_s` seconds: `crop_samples`."""
        kind, rate = stored.constants.get("features"), stored.constants.get("sample_rate_hz")
        if kind is None or rate is None:
            raise ConfigError(
                f"{stored.name}: its metadata lacks features or sample_rate_hz; rebuild it: forebay preprocess"
            )
        has_waveform = "waveform" in stored.fields
        samples = crop_samples(crop_s, features=kind, sample_rate_hz=int(rate), has_waveform=has_waveform)
        step = audio_step(kind)
        crop = Crop(num_samples=samples, grid_samples=step.grid_samples or 1)
        return cls(crop, step.crop(stored, num_samples=samples))

    def starts(self, samples: Sequence[Sample]) -> list[int]:
        """Returns where each sample's crop starts, in audio samples. Raises ConfigError for samples without a draw."""
        if not all(DRAW in sample for sample in samples):
            raise ConfigError(
                f"crops need the field {DRAW} beside each sample; pass crop_seed to SampleDataset, or use the Loader"
            )
        return [self.crop.start(len(s["waveform"]), draw=int(s[DRAW][0])) for s in samples]

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames of the clips in their crops, those of the batch): filter bank frames, else audio samples."""
        field = self.form.fields[-1]
        assert field.length is not None
        return sum(min(len(field.array(s)), field.length) for s in samples), len(samples) * field.length

    def columns(self, samples: Sequence[Sample]) -> dict[str, list[Sequence[Array]]]:
        """Returns of each field what lies inside of every sample's crop; the draw of a sample is beside it."""
        cut = [self._cut(*each) for each in zip(samples, self.starts(samples), strict=True)]
        return {field.name: [each[field.name] for each in cut] for field in self.form.stored}

    def _cut(self, sample: Sample, start: int) -> Mapping[str, Sequence[Array]]:
        found: dict[str, Sequence[Array]] = {}
        for field in self.form.stored:
            first = start // field.hop
            found[field.name] = (sample[field.on_disk][first : first + (field.length or 0)],)
        return found


class BatchMaker(Protocol):
    """Samples to a batch; threads share it."""

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate) -> Any:
        """Returns the batch of these samples in tensors that `allocate` makes: a dict, or a `PatchBatch`.

        One that changes samples takes `drawing` too, see `Collator`.
        """

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, or tokens, of the samples, those that their batch has room for)."""


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Collator:
    """Makes the batch of a list of samples. Picklable, without state: DataLoader workers and threads may share it.

    Its fields are those of the items' form, then those of the prompt's: `batch` of each step in `forebay.steps` says
    which, or the cache itself. All fields of text are int64.

    With `crop_s` the fields are those of `Crops`, and no text: a transcript is that of the whole clip.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        dtype: torch.dtype = torch.float32,
        padding_side: PaddingSide = "right",
        crop_s: float | None = None,
        tokens: Mapping[str, TokenPattern] | None = None,
        on_device: bool = False,
        augmentation: Augmentation | None = None,
        features: DeviceFeatures | None = None,
    ) -> None:
        """Takes from `source` its constants and field specifications only.

        source: of a union whose sources have other fields, each its own collator, as `Loader` has.
        dtype: of floating-point fields: float32, float16 or bfloat16. padding_side: of `input_ids`.
        crop_s: length of random crops; samples then have the draw of their crop beside them (`CropDraws.beside`).
        tokens: which codes stand in batches as tokens of a language model.
        on_device: `finish` makes the batch of what `collate` gives, where it lies then: items cross over one behind the
            other, or as codes.
        features: that are made of waveforms, here or where `finish` is called.
        augmentation: changes the samples for which `collate` is given their draws.
        Raises ConfigError for features, prompts or dtypes that have no batch form, or constants that are missing.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype of batches is {dtype}, wanted one of {', '.join(map(str, _DTYPES))}")
        if padding_side not in ("left", "right"):
            raise ConfigError(f"padding_side is {padding_side!r}, wanted 'left' or 'right'")
        if isinstance(source, SourceUnion) and "features" not in source.constants:
            raise ConfigError(
                f"samples of {', '.join(source.names)} stand in no common batch; make a Collator of each of "
                "`source.sources`, as forebay.train.make_loader does"
            )
        stored = Stored.of(source)
        self.dtype, self.padding_side = dtype, padding_side
        self._items = as_tokens(items_of(stored), tokens or {}, name=stored.name)
        self._text = text_of(stored)
        self._hears_videos = bool(stored.constants.get(HEARS_VIDEOS))
        if isinstance(self._text, DeclaredText) and self._text.has_pairs and augmentation is not None:
            raise ConfigError(f"{stored.name} has pairs, whose images would be changed apart; leave [[augment]] out")
        if not self._items and self._text is None:
            raise ConfigError(
                f"{stored.name}: its samples have columns alone, and a batch holds none; add audio.features, [text] or "
                "a [[model]] with outputs of several numbers, or read cache.table()"
            )
        self._augmentation, self._features, self._is_on_device = augmentation, features, on_device
        self._crossing: dict[int, Crossing] = {}
        self._expansion = DeviceExpansion(dtype=dtype)
        self._crops = None if crop_s is None else Crops.of(stored, crop_s=crop_s)
        if self._crops is not None:
            self._cross_crops(self._crops.form)
        elif on_device:
            self._cross()
        elif features is not None or (augmentation is not None and augmentation.of_batches):
            self._crossing = self._changed_crossings()

    def __call__(self, samples: Sequence[Sample | Mapping[str, torch.Tensor]]) -> Batch:
        """Returns the batch of these samples in memory of its own; a `collate_fn` for torch's DataLoader."""
        batch = self.collate([_as_arrays(sample) for sample in samples], allocate=fresh)
        return batch if weight_of(samples) else Filler(batch)

    def collate(self, samples: Sequence[Sample], *, allocate: Allocate, drawing: Drawing | None = None) -> Batch:
        """Returns the batch of these samples in tensors that `allocate` makes; every element of them is written.

        drawing: of the samples, where they are changed.
        """
        if not samples:
            raise ValueError("a batch needs at least one sample")
        if isinstance(self._text, DeclaredText):
            samples = self._text.doubled(samples)
        if self._augmentation is not None and drawing is not None:
            samples = self._augmentation.changed(samples, drawing.ids, drawing.draws)
        batch: Batch = {}
        if self._crops is not None:
            batch = self._cropped(samples, allocate=allocate, drawing=drawing)
        for place, each in enumerate(self._items if self._crops is None else ()):
            crossing = self._crossing.get(place)
            batch |= each.collate(samples, dtype=self.dtype, allocate=allocate, crossing=crossing, drawing=drawing)
        if self._crossing and not self._is_on_device:
            batch = self.finish(batch)
        if self._text is not None and self._crops is None:
            batch |= self._text(samples, padding_side=self.padding_side, allocate=allocate)
        if self._hears_videos and VIDEO_GRIDS in batch:
            told: Any = True  # a model finds no video without sound where it is told this, and no sound elsewhere
            batch[HEARS_VIDEOS] = told
        return batch

    def _cropped(self, samples: Sequence[Sample], *, allocate: Allocate, drawing: Drawing | None) -> Batch:
        assert self._crops is not None
        columns, crossing = self._crops.columns(samples), self._crossing.get(0)
        if crossing is not None:
            return crossing.collate(columns, allocate=allocate, drawing=drawing)
        return collate_fields(self._crops.form, columns, dtype=self.dtype, allocate=allocate, are_rows=True)

    def finish(self, batch: Any) -> Batch:
        """Returns the batch of what crossed over, on the device where that lies; without `on_device`, itself."""
        for crossing in self._crossing.values():
            batch = crossing.finish(batch)
        return self._expansion(batch)

    @property
    def is_finished_later(self) -> bool:
        """Whether `finish` has anything to do."""
        return bool(self._crossing) or self._expansion.has_fields

    def _cross_crops(self, form: BatchForm) -> None:
        changes = self._augmentation if self._augmentation is not None and self._augmentation.of_batches else None
        is_made = changes is not None or self._features is not None
        if is_made and not can_cross(form):
            raise ConfigError("loader.crop_s takes crops of features too, and augment is of waveforms; leave one out")
        if can_cross(form) and (is_made or self._is_on_device):
            self._crossing = {0: Crossing(form, self.dtype, changes, self._features)}

    def _changed_crossings(self) -> dict[int, Crossing]:
        """Returns the group that changes are of: where it can be finished later, by place."""
        found = [place for place, each in enumerate(self._items) if can_cross(each.form)]
        is_changed = self._augmentation is not None and self._augmentation.of_batches
        if not found and (is_changed or self._features is not None):  # nothing would be changed, and nobody would know
            raise ConfigError(
                f"augment and loader.device_features are of clips by rows of one axis that grows, and "
                f"{', '.join(each.form.made_by for each in self._items)} gives others; leave them out"
            )
        more = (self._augmentation, self._features)
        return {place: Crossing(self._items[place].form, self.dtype, *more) for place in found[:1]}

    def _cross(self) -> None:
        forms = {place: each.form for place, each in enumerate(self._items)}
        self._crossing = {place: Crossing(form, self.dtype) for place, form in forms.items() if can_cross(form)}
        if self._augmentation is not None or self._features is not None:
            self._crossing |= self._changed_crossings()
        rest = {place: form for place, form in forms.items() if place not in self._crossing}
        self._expansion = DeviceExpansion(*rest.values(), dtype=self.dtype)
        self._items = tuple(
            replace(each, form=coded(each.form)) if place in rest else each for place, each in enumerate(self._items)
        )

    def count_frames(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, of text tokens, of the samples; those that their batch has room for)."""
        if self._crops is not None:
            return self._crops.count_frames(samples)
        return self._items[0].count(samples) if self._items else count_tokens(samples)

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension of every field of batches is that of the samples."""
        return all(each.has_rows for each in self._items)


def _as_arrays(sample: Sample | Mapping[str, torch.Tensor]) -> Sample:
    return {name: _as_array(value) for name, value in sample.items()}


def _as_array(value: Any) -> Any:
    """Returns a tensor as an array; what is a tuple, an array an image, as a tuple of arrays."""
    if isinstance(value, tuple):
        return tuple(map(_as_array, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


_ID = "sample_id"
"""Asked for by sample: of all samples the ids would be most of a row table."""


class BatchColumns:
    """Values of some columns by sample. A column is read once, as a whole; threads share it."""

    def __init__(self, source: SampleSource, names: Sequence[str]) -> None:
        """Reads the columns. Raises ConfigError, with the nearest name and all of them, for one that no source has.

        Where only some of several sources have a column, it is None for the samples of the others.
        """
        self._source, self._names = source, tuple(names)
        self._parts = parts_of(source)
        _require_names(names, [name for part in self._parts for name in part.column_names])
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._columns = {name: [_read(part, name) for part in self._parts] for name in names if name != _ID}

    def of(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Returns the columns of some samples, by name, in their order."""
        wanted = np.asarray(indices, np.int64)
        return {name: self._values(name, wanted) for name in self._names}

    def _values(self, name: str, indices: Array) -> list[Any]:
        if name == _ID:
            return [self._source.sample_id(index) for index in indices.tolist()]
        columns = self._columns[name]
        if len(columns) == 1:
            return _taken(columns[0], indices)
        found: list[Any] = [None] * len(indices)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            inside = indices[places] - (self._ends[number] - len(self._parts[number]))
            for place, value in zip(places.tolist(), _taken(columns[number], inside), strict=True):
                found[place] = value
        return found


def _read(part: SampleSource, name: str) -> Any:
    return part.table([name])[name].combine_chunks() if name in part.column_names else None


def _taken(column: Any, indices: Array) -> list[Any]:
    if column is None:
        return [None] * len(indices)
    values: list[Any] = column.take(pa.array(indices)).to_pylist()
    return values


def _require_names(names: Sequence[str], known: Sequence[str]) -> None:
    if isinstance(names, str):
        raise ConfigError(f'with_columns is the text {names!r}, wanted names: with_columns=("{names}",)')
    there = list(dict.fromkeys(known))
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"with_columns: no column {name!r}{hint}; there are {', '.join(there)}; to have more, set "
                "source.keep_columns and run: forebay preprocess CONFIG",
                code="FB202",
            )
