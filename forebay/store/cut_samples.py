"""Samples of which some are cut into pieces, as a source: conversations that are longer than a pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError
from forebay.store.image.codec import SECONDS, VIDEO_GRIDS, VIDEO_PATCHES
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, Group, Ints
from forebay.store.selection import Selection
from forebay.store.source import Sample, SampleBatch, SampleSource

ItemKind = Literal["image", "video", "audio"]
"""A kind of items in conversations. Images and videos are items of one group, and stand apart in samples."""


class CutPiece(NamedTuple):
    """The tokens and items that a piece has of its sample.

    It has the first `head` tokens, and those from `start` up to below `end`; of the items of each kind likewise.
    patches: of its images and videos. frames, samples: of its clips. learnt: its tokens that are targets.
    """

    head: int
    start: int
    end: int
    head_images: int
    first_image: int
    end_image: int
    head_videos: int
    first_video: int
    end_video: int
    head_clips: int
    first_clip: int
    end_clip: int
    patches: int
    frames: int
    samples: int
    learnt: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the piece."""
        return self.head + self.end - self.start

    @property
    def sizes(self) -> Ints:
        """Tokens, patches and frames of the piece, int64 [3], which a pack has room for or not."""
        return np.array([self.num_tokens, self.patches, self.frames])

    def bounds(self, *kinds: ItemKind) -> tuple[int, int, int]:
        """Returns how many items of some kinds are of the first tokens, and between which its others lie."""
        own = [self[(at := 3 + 3 * get_args(ItemKind).index(kind)) : at + 3] for kind in kinds]
        head, first, end = map(sum, zip(*own, strict=True))
        return head, first, end

    def lengths(self) -> dict[str, int]:
        """Returns how long the piece is, by the names of `SampleSource.lengths`."""
        of_groups = self.bounds("image", "video"), self.bounds("audio")
        images, clips = (head + end - first for head, first, end in of_groups)
        counts = {"num_tokens": self.num_tokens, "num_images": images, "num_audios": clips}
        return counts | {"num_patches": self.patches, "num_frames": self.frames, "num_audio_samples": self.samples}

    def of_tokens(self, values: Array) -> Array:
        """Returns the piece's part of a field with a row a token."""
        own = values[self.start : self.end]
        return np.concatenate((values[: self.head], own)) if self.head else own

    def of_items(self, values: Any, *kinds: ItemKind) -> Any:
        """Returns the piece's part of a field with an array, or a row, an item of some kinds."""
        count, first, end = self.bounds(*kinds)
        head, own = values[:count], values[first:end]
        if isinstance(values, tuple):
            return head + own
        return np.concatenate((head, own)) if len(head) else own


class CutSamples(Selection):
    """The samples of one source, some of which are cut. Pieces of a sample share its id, and stand side by side.

    cut: int64 [num_pieces, 17]: the index here of each piece, rising, and its `CutPiece`. What is in no row is whole.
    counts: `samples` that are cut, the `pieces` of them, and pieces that are left out as `nothing_learnt`.
    """

    are_whole = False

    def __init__(
        self,
        source: SampleSource,
        places: Ints,
        cut: Ints,
        *,
        key: str,
        counts: Mapping[str, int],
        filter_key: str | None = None,
    ) -> None:
        """places: int64 [num_samples], which sample of `source` each is a piece of, rising. key: of these pieces.

        filter_key: of what the samples were chosen by; None: as of `source`.
        """
        super().__init__(source, places, key=key)
        self.filter_key, self.choice = filter_key or source.filter_key, getattr(source, "choice", None)
        self.cut, self.counts = np.asarray(cut, np.int64), dict(counts)
        self._pieces = {row[0]: CutPiece(*row[1:]) for row in self.cut.tolist()}

    @cached_property
    def lengths(self) -> Mapping[str, Array]:  # type: ignore[override]  # mypy takes it for read-only
        """int32 [num_samples] by name; see `SampleSource`."""
        found, pieces = dict(super().lengths), [piece.lengths() for piece in self._pieces.values()]
        for name in found.keys() & {name for piece in pieces for name in piece}:
            found[name] = np.array(found[name])
            found[name][self.cut[:, 0]] = [piece[name] for piece in pieces]
        return found

    def piece(self, index: int) -> CutPiece | None:
        """Returns what a sample has of the one that it is cut from; None of a whole one."""
        return self._pieces.get(index)

    def learnt(self, whole: Array) -> Array:
        """Returns how many tokens each learns. whole: of all samples of `source`."""
        found = whole[self.places]
        found[self.cut[:, 0]] = self.cut[:, -1]
        return found

    def read_one(self, index: int) -> tuple[Sample, int]:
        """See `SampleSource`. What stands in for a bad sample here is no longer than the piece that is asked for."""
        for own in self._candidates(index):
            sample, read = super().read_one(own)
            if read == own:
                return self._cut(sample, own), own
        raise CacheCorruptError(f"{self.place}: sample {index} is bad, and no good one is as short")

    def read_batch(self, indices: Sequence[int]) -> SampleBatch | None:
        """See `SampleSource`."""
        return super().read_batch(indices) if self._pieces.keys().isdisjoint(indices) else None

    def text_of(self, index: int) -> tuple[Sample, str]:
        """See `SampleSource`; the text is that of the whole sample."""
        sample, text = super().text_of(index)
        return self._cut(sample, index), text

    def ids_digest(self) -> str:
        """Returns the digest of the ids of the source, and of what each sample has of it."""
        return digest({"of": super().ids_digest(), "cut": xxhash.xxh3_128_hexdigest(self.cut.tobytes())})

    def _cut(self, sample: Sample, index: int) -> Sample:
        piece = self._pieces.get(index)
        if piece is None:
            return sample
        groups = {spec.name: spec.group for spec in self.fields.values()}
        return {
            name: piece.of_tokens(values) if groups.get(name) == TEXT else piece.of_items(values, _kind(name, groups))
            for name, values in sample.items()
        }

    def _candidates(self, index: int) -> Iterator[int]:
        yield index
        lengths = (self.lengths[name] for name in ("num_tokens", "num_patches", "num_frames") if name in self.lengths)
        fits = np.flatnonzero(np.all([length <= length[index] for length in lengths], axis=0))
        yield from (own for own in np.roll(fits, -np.searchsorted(fits, index)).tolist() if own != index)


def _kind(name: str, groups: Mapping[str, Group]) -> ItemKind:
    """The kind of the items that a field of samples is of."""
    if name in (SECONDS, VIDEO_GRIDS, VIDEO_PATCHES):
        return "video"
    return "audio" if groups.get(name) == "audio" else "image"
