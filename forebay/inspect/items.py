"""The items that a sample lists, as a person sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forebay.config.tree import Config
from forebay.inspect.pixels_seen import Picture, View, matrix, original_of, view_of
from forebay.steps.form import BatchForm
from forebay.store.cache import Cache
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import Array
from forebay.terminal import entry, paragraph
from forebay.visible import human_bytes, printable

FLOAT32_BYTES = 4
_FEW = 12
"""Values of a field that are shown as numbers."""


def image_settings_of(cache: Cache) -> ImageSettings:
    """Returns the processor's settings that a cache of images was made with."""
    return ImageSettings.from_json(cache.constants["image"])


def float32_bytes(num_patches: float, settings: ImageSettings) -> float:
    """Returns the bytes of float32 `pixel_values` [num_patches, temporal_patch_size * 3 * patch_size^2]."""
    return num_patches * settings.temporal_patch_size * settings.patch_bytes * FLOAT32_BYTES


def beside_float32(stored: float, as_float32: float | None, *, where: str = "stored") -> str:
    """Returns bytes as stored, `where` says where, beside what float32 `pixel_values` would take."""
    if as_float32 is None:
        return f"{human_bytes(stored)} {where}; the grids cannot be read (--verify says why)"
    ratio = f", {as_float32 / stored:.3g} times as much" if stored else ""
    return f"{human_bytes(stored)} {where}; as float32 pixel_values {human_bytes(as_float32)}{ratio}"


@dataclass(frozen=True, kw_only=True)
class SeenItem:
    """One item of a sample. name: of the file or member. hash: xxh3-128 of the source's bytes.

    media_row: its row in its shard. arrays: of each field as a sample has it: codes where its form has a table. form:
    None where none is declared, or a foreign one. float32_bytes: of the batch's floats.
    """

    name: str
    hash: str
    media_row: int
    arrays: Mapping[str, Array]
    stored_bytes: int
    float32_bytes: int
    form: BatchForm | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What `forebay inspect --json` says of it, beside name, place and bytes."""
        few = {name: array.tolist() for name, array in self.arrays.items() if array.size <= _FEW}
        return {"shapes": {name: list(array.shape) for name, array in self.arrays.items()}, "values": few}

    def lines(self) -> list[str]:
        """Returns each field with its shape, or of few numbers with these."""
        shapes, values = self.about["shapes"], self.about["values"]
        return [f"{name} = {values[name]}" if name in values else f"{name} {shape}" for name, shape in shapes.items()]

    @cached_property
    def view(self) -> View | None:
        """The image as its model sees it; None where the order of its patches is not known."""
        return None if self.form is None else view_of(self.form, self.arrays)

    def picture(self, config: Config | None) -> Picture:
        """Returns the item to be shown. config: where its file is looked for, if how its values lie is not known."""
        about = self.lines()
        if (view := self.view) is not None:
            return Picture(pixels=view.pixels, name=self.name, about=(*about, view.how))
        main = max(self.arrays.values(), key=lambda array: array.size)
        why = "nothing is stored of it"
        if main.size:
            original = None if config is None else original_of(self.name, self.hash, config)
            if original is not None:
                why = "the file itself: how its patches lie in it is not known"
                return Picture(pixels=original, name=self.name, about=(*about, why))
            why = "its values, a row a patch: how they lie in the image is not known"
        return Picture(pixels=matrix(main), name=self.name, about=(*about, why))

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of a sample's items in `forebay inspect --json`."""
        place = {"name": self.name, "hash": self.hash, "media_row": self.media_row}
        return {**place, **self.about, "stored_bytes": self.stored_bytes, "float32_bytes": self.float32_bytes}

    @classmethod
    def listed(cls, items: Sequence[SeenItem], *, indent: str = "") -> Iterator[str]:  # noqa: ARG003  see PatchItem
        """Yields the items of a sample for a terminal."""
        for number, item in enumerate(items):
            yield f"image {number}: {printable(item.name)}"
            yield entry("bytes", beside_float32(item.stored_bytes, item.float32_bytes))
            for line in item.lines():
                yield from paragraph("    ", line)


@dataclass(frozen=True, kw_only=True)
class PatchItem(SeenItem):
    """An image that is stored as patches. pixels: uint8 [height, width, 3], rebuilt. merge: patches a side a token."""

    grid: tuple[int, int, int]
    pixels: Array
    merge: int

    @property
    def num_patches(self) -> int:
        """Rows of `pixel_values`."""
        return self.grid[1] * self.grid[2]

    @property
    def size(self) -> str:
        """Width and height in pixels: `320 x 256`."""
        return f"{self.pixels.shape[1]} x {self.pixels.shape[0]}"

    @property
    def about(self) -> dict[str, Any]:
        """See `SeenItem`."""
        height, width = self.pixels.shape[:2]
        return {"grid": list(self.grid), "width": width, "height": height, "num_patches": self.num_patches}

    def picture(self, config: Config | None) -> Picture:  # noqa: ARG002  patches say how they lie
        """See `SeenItem`."""
        about = (f"grid {' x '.join(map(str, self.grid))}", f"{self.size} px")
        return Picture(pixels=self.pixels, name=self.name, about=about, grid=self.grid[1:], merge=self.merge)

    @classmethod
    def listed(cls, items: Sequence[Any], *, indent: str = "") -> Iterator[str]:
        """See `SeenItem`: a table."""
        head = f"{'grid':<14}{'pixels':<13}{'patches':>8}{'stored':>10}{'float32':>10}"
        yield f"{indent}{'images':<8}{head}  name"
        for number, image in enumerate(items):
            sizes = f"{human_bytes(image.stored_bytes):>10}{human_bytes(image.float32_bytes):>10}"
            cells = f"{list(image.grid)!s:<14}{image.size:<13}{image.num_patches:>8,}{sizes}"
            yield f"{indent}  {number:<6}{cells}  {printable(image.name)}"
