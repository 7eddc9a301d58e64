"""The groups whose items samples list, read for people: the items of a sample, and all of them in figures."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import CacheError
from forebay.inspect.seen_images import Picture, View, count_histogram, matrix, original_of, size_facts, view_of
from forebay.steps.form import BatchForm
from forebay.steps.step import MODEL
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS, StoredImages, unpatchify
from forebay.store.image.image_settings import ImageSettings
from forebay.store.image.stored_items import StoredArrays, StoredFields, StoredItems, shape_name, stored_items
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Group
from forebay.store.shard import shard_fields
from forebay.store.source import length_of
from forebay.terminal import entry, paragraph
from forebay.visible import human_bytes, printable

FLOAT32_BYTES = 4
_KINDS: Mapping[Group, str] = {"audio": "clip"}
_FEW = 12
"""Values of a field that are shown as numbers."""


def image_settings_of(cache: Cache) -> ImageSettings:
    """Returns the processor's settings that a cache of images was made with."""
    return ImageSettings.from_json(cache.constants["image"])


def float32_bytes(num_patches: float, settings: ImageSettings) -> float:
    """Returns the bytes of float32 `pixel_values` [num_patches, temporal_patch_size * 3 * patch_size^2]."""
    return num_patches * settings.temporal_patch_size * settings.patch_bytes * FLOAT32_BYTES


def beside_float32(stored: float, as_float32: float | None, *, where: str = "stored") -> str:
    """Returns bytes as stored, `where` says where, beside what float32 values would take."""
    if as_float32 is None:
        return f"{human_bytes(stored)} {where}; the grids cannot be read (--verify says why)"
    ratio = f", {as_float32 / stored:.3g} times as much" if stored else ""
    return f"{human_bytes(stored)} {where}; as float32 {human_bytes(as_float32)}{ratio}"


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
    kind: str = "image"

    @property
    def about(self) -> dict[str, Any]:
        """The facts of `forebay inspect --json`, beside name, place and bytes."""
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
            yield f"{item.kind} {number}: {printable(item.name)}"
            yield entry("bytes", beside_float32(item.stored_bytes, item.float32_bytes))
            for line in item.lines():
                yield from paragraph("    ", line)


def contact_sheet(patches: Array, grid: tuple[int, int, int], settings: ImageSettings) -> Array:
    """Returns the frames of a video side by side, row by row, uint8 [height, width, 3]; what is left over is white.

    patches: uint8 [t * h * w, temporal_patch_size * 3 * patch_size^2], as a sample has them.
    """
    t, rows, columns = grid
    copies = settings.temporal_patch_size
    planes = patches.reshape(t, rows * columns, 3, copies, -1).transpose(0, 3, 1, 2, 4)
    frames = planes.reshape(t * copies, rows * columns, settings.patch_bytes)
    across = math.ceil(math.sqrt(len(frames)))
    height, width = rows * settings.patch_size, columns * settings.patch_size
    sheet = np.full((math.ceil(len(frames) / across), height, across, width, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        sheet[number // across, :, number % across] = unpatchify(frame, (1, rows, columns), settings)
    return sheet.reshape(-1, across * width, 3)


@dataclass(frozen=True, kw_only=True)
class PatchItem(SeenItem):
    """An image that is stored as patches. pixels: uint8 [height, width, 3], rebuilt. merge: patches a side a token.

    Of a video pixels are its `contact_sheet`.
    """

    grid: tuple[int, int, int]
    pixels: Array
    merge: int

    @property
    def num_patches(self) -> int:
        """Rows of `pixel_values`."""
        return math.prod(self.grid)

    @property
    def size(self) -> str:
        """Width and height in pixels: `320 x 256`."""
        return f"{self.pixels.shape[1]} x {self.pixels.shape[0]}"

    @property
    def about(self) -> dict[str, Any]:
        height, width = self.pixels.shape[:2]
        return {"grid": list(self.grid), "width": width, "height": height, "num_patches": self.num_patches}

    def picture(self, config: Config | None) -> Picture:  # noqa: ARG002  patches say how they lie
        about = (f"grid {' x '.join(map(str, self.grid))}", f"{self.size} px")
        if self.kind == "video":
            return Picture(pixels=self.pixels, name=self.name, about=("a video, its frames row by row", *about))
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


logger = logging.getLogger(__name__)


class ListedGroup:
    """A group whose items samples list, read for people. Here its fields are as samples have them."""

    def __init__(self, cache: Cache, group: Group, stored: Any) -> None:
        self.cache, self.group, self.stored = cache, group, stored

    def items(self, index: int, sample: Mapping[str, Any], names: str) -> tuple[SeenItem, ...]:
        """Returns the items of a sample. sample: of `Cache.read`. names: what its row calls them, JSON."""
        found, kept, slots = [], self.stored_fields, self.cache.items_of(self.group, index)
        called = map(str, json.loads(names))
        for name, slot, arrays in zip(called, slots, self.arrays(index, sample), strict=True):
            shard, row = self.cache.shard(self.group, slot >> ROW_BITS), slot & ROW_MASK
            about = {
                "name": name,
                "hash": shard.string(f"{self.group}_hash", row),
                "media_row": row,
                "arrays": arrays,
                "stored_bytes": sum(v.nbytes for name, v in shard.row(row).items() if name in kept),
            }
            found.append(self.item(about))
        return tuple(found)

    def arrays(self, index: int, sample: Mapping[str, Any]) -> Iterable[Mapping[str, Array]]:  # noqa: ARG002
        """Returns the arrays of each item of a sample, in order."""
        columns = [sample[field] for field in self.fields]
        return [dict(zip(self.fields, of_one, strict=True)) for of_one in zip(*columns, strict=True)]

    @property
    def fields(self) -> list[str]:
        """The fields of an item, as a sample has them."""
        return [field.name for field in self.stored.fields]

    def item(self, about: dict[str, Any]) -> SeenItem:
        """Returns an item. about: what all kinds have."""
        return SeenItem(**about, float32_bytes=about["stored_bytes"], kind=_KINDS.get(self.group, self.group))

    def facts(self) -> dict[str, Any]:
        """Returns the part of `forebay inspect --json` that only a cache with such items has.

        codec; images: `stored` (each once a source file), `distinct` (of the listed rows), `used` (in all samples);
        bytes_per_image: mean of what is stored of an image; float32_bytes_per_image: of the same images as the
        processor's `pixel_values`, null where a shard cannot be read; histograms: of the tokens, images and patches a
        sample, as far as they are counted.
        """
        cache, number = self.cache, self.num_stored
        specs = [cache.fields[name] for name in self.stored_fields]
        size_bytes = sum(self.count(s.name) * s.numpy_dtype.itemsize * math.prod(s.shape) for s in specs)
        as_float32 = self.float32_bytes()
        used = int(length_of(cache, f"num_{self.group}s").sum(dtype=np.int64))
        distinct = cache.metadata.get(f"num_{self.group}s", number)
        return {
            "codec": cache.metadata.get("codec"),
            f"{self.group}s": {"stored": number, "distinct": distinct, "used": used},
            f"bytes_per_{self.group}": size_bytes / number if number else None,
            f"float32_bytes_per_{self.group}": as_float32 / number if number and as_float32 is not None else None,
            "histograms": {name: count_histogram(cache.lengths[f"num_{name}"]) for name in self.counted()},
        }

    def counted(self) -> list[str]:
        """Returns what is counted a sample."""
        return ["tokens", f"{self.group}s"]

    @property
    def num_stored(self) -> int:
        """How many items are stored: from the shard table, no shard is opened."""
        return sum(entry.rows for _, entry in self.cache.shard_entries(self.group))

    @property
    def stored_fields(self) -> list[str]:
        """The fields whose bytes count."""
        fields = self.cache.fields.values()
        return [spec.name for spec in fields if (spec.group, spec.role) == (self.group, "tensor")]

    def float32_bytes(self) -> float | None:
        """Returns what all items take as the floats of a batch; None where only the shards know it."""
        return None

    def count(self, name: str) -> int:
        """Returns the values [n, *shape] of a field in all shards."""
        place = [field.name for field in shard_fields(list(self.cache.fields.values()), self.group)].index(name)
        return sum(entry.spans[place][1] for _, entry in self.cache.shard_entries(self.group))

    def columns(self, name: str) -> list[Array] | None:
        """Returns the values of a field, an array a shard; None where they cannot be read, or would be downloaded."""
        if self.cache.mirror is not None:
            return None
        try:
            count = self.cache.unit_count(self.group)
            return [self.cache.shard(self.group, number).column(name)[0].astype(np.int64) for number in range(count)]
        except CacheError as err:
            logger.warning("the %ss of %s are not counted as float32: %s", self.group, self.cache.place, err)
            return None


class PatchGroup(ListedGroup):
    """Images that are stored as patches."""

    def counted(self) -> list[str]:
        return ["tokens", "patches"]

    @cached_property
    def _settings(self) -> ImageSettings:
        return image_settings_of(self.cache)

    @property
    def stored_fields(self) -> list[str]:
        return list(self.stored.names)

    @property
    def fields(self) -> list[str]:
        return [FIELDS["raw"], "image_grid_thw"]

    def arrays(self, index: int, sample: Mapping[str, Any]) -> Iterable[Mapping[str, Array]]:
        slots = self.cache.items_of(self.group, index)
        rows = (self.cache.shard(self.group, slot >> ROW_BITS).row(slot & ROW_MASK) for slot in slots)
        return (dict(zip(self.fields, of_one, strict=True)) for of_one in self.stored.in_order(sample, rows))

    def item(self, about: dict[str, Any]) -> PatchItem:
        patches, sizes = (about["arrays"][name] for name in self.fields)
        grid = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
        is_video = patches.shape[1] > self._settings.patch_bytes
        return PatchItem(
            **about,
            grid=grid,
            pixels=(contact_sheet if is_video else unpatchify)(patches, grid, self._settings),
            merge=self._settings.merge_size,
            kind="video" if is_video else "image",
            float32_bytes=int(float32_bytes(len(patches), self._settings)),
        )

    @property
    def num_stored(self) -> int:
        return self.count("image_grid_thw")

    def float32_bytes(self) -> float | None:
        if self.stored.codec == "raw" and not self.stored.has_videos:
            return float32_bytes(self.count(FIELDS["raw"]), self._settings)
        grids = self.columns("image_grid_thw")
        return None if grids is None else float32_bytes(sum(int(g.prod(axis=1).sum()) for g in grids), self._settings)


class ArrayGroup(ListedGroup):
    """Images as their processor gives them."""

    def item(self, about: dict[str, Any]) -> SeenItem:
        arrays = about["arrays"]
        size = sum(arrays[name].size for name in self._floats)
        return SeenItem(**about, float32_bytes=size * FLOAT32_BYTES, form=self._form)

    @cached_property
    def _form(self) -> BatchForm | None:
        """The form that the cache declares; None for a foreign one, of which arrays are read nevertheless."""
        try:
            return BatchForm.from_json(self.cache.constants.of(self.group)["form"])
        except ValueError:
            return None

    @property
    def _floats(self) -> list[str]:
        """The fields of the form that are floats in a batch."""
        fields = self.cache.constants.of(self.group)["form"]["fields"]
        return [field["name"] for field in fields if field["dtype"] == "float32" and not field.get("mask_of")]

    def facts(self) -> dict[str, Any]:
        """See `ListedGroup`.

        processor: the class that made the images, and what is promised of its batches. form: the declared fields of
        batches, of a table how many values it has. image_sizes: see `size_facts`.
        """
        form, text_form = self.cache.constants.of(self.group)["form"], self.cache.constants.get("text_form")
        forms = [each["fields"] for each in (form, text_form) if each is not None]
        return {
            **super().facts(),
            "processor": {name: form[name] for name in ("made_by", "promise")},
            "form": [each | _table_size(each.get("table")) for fields in forms for each in fields],
            "image_sizes": size_facts(self.cache),
        }

    def counted(self) -> list[str]:
        lengths, names = self.cache.lengths, ("tokens", "images", "patches")
        return [name for name in names if f"num_{name}" in lengths and lengths[f"num_{name}"].any()]

    @property
    def num_stored(self) -> int:
        """See `ListedGroup`.

        Where the arrays of all fields grow, what failed cannot be told from what is stored, and counts too.
        """
        for field in self.stored.fields:
            if field.has_shape:
                return self.count(shape_name(field.name)) // len(field.shape)
            if not field.grows and not field.is_packed:
                return self.count(field.name) // ((field.shape or (1,))[0] or 1)
        return super().num_stored

    def float32_bytes(self) -> float | None:
        total = 0
        for field in self.stored.fields:
            if field.name not in self._floats:
                continue
            if not field.grows:
                total += self.num_stored * math.prod(length or 1 for length in field.shape)
            elif not field.is_packed:
                total += self.count(field.name) * math.prod(field.inner)
            elif (shapes := self.columns(shape_name(field.name))) is None:
                return None
            else:
                total += sum(int(shape.reshape(-1, len(field.shape)).prod(axis=1).sum()) for shape in shapes)
        return total * FLOAT32_BYTES


_GROUPS: Mapping[type[Any], type[ListedGroup]] = {
    StoredImages: PatchGroup,
    StoredArrays: ArrayGroup,
    StoredFields: ListedGroup,
}
"""How items are read for people, by how they are stored."""


def listed_groups(cache: Cache) -> dict[Group, ListedGroup]:
    """Returns the groups of a cache whose items samples list, but those that models made of them."""
    stored: Mapping[Group, StoredItems] = stored_items(cache.metadata, folder=cache.folder)
    named = names_items(cache)
    return {group: _GROUPS[type(found)](cache, group, found) for group, found in stored.items() if group in named}


def names_items(cache: Cache) -> list[Group]:
    """Returns the groups of which rows name their items: what a model made of them is no item of its own."""
    made = {group for group, values in cache.constants.groups.items() if values.get("features") == MODEL}
    return [group for group in cache.listed if group not in made]


def _table_size(table: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns how large the table of a declared field is, in the place of its values."""
    return {} if table is None else {"table": {"channels": len(table["values"]), "values": len(table["values"][0])}}


def form_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Returns a row a declared field: its name, dtype and shape in a batch, how it is stored, what else is declared."""
    return [
        [
            field["name"],
            field["dtype"],
            f"[{', '.join('n' if length is None else str(length) for length in field['shape'])}]",
            "not stored" if field.get("mask_of") else str(field["stored_dtype"]) + _of_table(field.get("table")),
            "; ".join(_rules(field)),
        ]
        for field in facts["form"]
    ]


def _of_table(table: Mapping[str, Any] | None) -> str:
    return "" if table is None else f", a table of {table['channels']} x {table['values']}"


def _rules(field: Mapping[str, Any]) -> Iterator[str]:
    if field.get("mask_of"):
        yield f"1 where {field['mask_of']} is, 0 in its padding"
    elif None in field["shape"] and field.get("join", "stack") != "cat":
        pad = field.get("pad", 0.0)
        yield "arrays of one shape alone" if pad is None else f"padded with {pad:g} on the {field.get('side', 'right')}"
        if field.get("length") is not None:
            yield f"to {field['length']}"
        elif field.get("multiple", 1) > 1:
            yield f"to a multiple of {field['multiple']}"
    if field.get("join") == "cat":
        yield "one behind the other"
    if field.get("join") == "nest":
        yield "those of a sample in a row"
