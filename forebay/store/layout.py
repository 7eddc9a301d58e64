"""The layout of a sample: its fields and constants, shared by the shard writer, the reader and all that collates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np

METADATA = "metadata.json"
"""The document of a cache or plan, which is written last and removed first: it says that the folder is whole."""
FORMAT_VERSION = 4
"""The form of the bytes on disk, the only one that is read. A change is breaking: it brings a new golden cache under
tests/golden. Forms 1 to 3 were never released."""
PLANS, TAR_INDEX, TEXT_INDEX, TEXTS, INPUTS = "plans", "tar_index", "text_index", "texts", "inputs"
BUILDING, LISTINGS, NOTES = ".building", ".listings", ".used"
"""The folders of a cache root that hold things of a kind: `forebay.caches.kinds` says which."""
Group = str
"""The name of a group of fields: one chain of steps makes them of one kind of item, in shards of its own."""
TEXT: Group = "text"
"""The group in which a row is a sample. In every other group it has items: one, itself, or those that it lists."""
CHOICES = "captions"
"""The constant of a group whose items a sample lists to choose from: a batch has one, the first if none is drawn."""
_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
NULL_TEXT = b"\xff"
"""How a nullable text field holds a null: no UTF-8 text has this byte."""


def is_group_name(name: object) -> bool:
    """Whether a group may have this name, which names its folder and its files."""
    return isinstance(name, str) and _GROUP_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One named tensor of a sample: an array [n, *shape] of `dtype`, where n differs from sample to sample.

    group: what makes it and where it lies; a step leaves it empty, and its group fills it in.
    role: `tensor` fields are handed out with a sample; `table` fields form the row table (UTF-8 bytes where dtype is
    `str`, one element a row otherwise). nullable: of a table field of texts, which then tells a null, NULL_TEXT, from
    an empty text; of numbers a row without an element is null anyway.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    group: Group = ""
    role: Literal["tensor", "table"] = "tensor"
    nullable: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the stored values; strings are stored as UTF-8 bytes."""
        return np.dtype("uint8" if self.dtype == "str" else self.dtype).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        """Returns the description kept in metadata.json."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FieldSpec:
        """Returns the spec of a description read from metadata.json."""
        return cls(**{**document, "shape": tuple(document["shape"])})


def variant_name(field: str, variant: str) -> str:
    """Returns the name of a field of a variant: `field~variant`; of the plain one, which has no name, `field`."""
    return f"{field}~{variant}" if variant else field


def is_variant(field: str) -> bool:
    """Whether a field is of a variant, and not of the plain one."""
    return "~" in field


Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
SIDES = ("_height", "_width")
"""Behind the name of a group: the lengths of its samples that say their shape, where a batch is of one shape."""
ROW_BITS = 32
"""A slot is `shard << ROW_BITS | row`."""
ROW_MASK = (1 << ROW_BITS) - 1


@dataclass(frozen=True, slots=True)
class ListedItems:
    """The items of a group that each sample lists.

    offsets: int64 [num_samples + 1], rising from 0. slots: int64 [offsets[-1]]: of sample i those from offsets[i] on.
    """

    offsets: Ints
    slots: Ints

    def places(self, samples: Ints) -> Ints:
        """Returns where in `slots` the items of these samples stand, in their order."""
        starts = np.asarray(self.offsets[samples])
        counts = np.asarray(self.offsets[samples + 1]) - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return np.asarray(np.arange(total) + np.repeat(starts - (ends - counts), counts))

    def of(self, samples: Ints) -> ListedItems:
        """Returns the items of these samples, in their order."""
        counts = np.asarray(self.offsets[samples + 1]) - np.asarray(self.offsets[samples])
        return ListedItems(np.concatenate(([0], np.cumsum(counts))), self.slots[self.places(samples)])

    def first(self) -> ListedItems:
        """Returns the first item of each sample, all of which list one."""
        return ListedItems(np.arange(len(self.offsets)), self.slots[self.offsets[:-1]])


class Constants(Mapping[str, Any]):
    """The constants of every group of a source, text last.

    As a mapping it has those of all groups by name; what models make comes last. Where several groups have one of a
    name, that of the first group has the name alone, and those of the others stand behind their group: `image.form`.
    """

    __slots__ = ("_by_name", "groups")

    def __init__(self, groups: Mapping[Group, Mapping[str, Any]]) -> None:
        order = sorted(groups, key=lambda group: (group == TEXT, "takes" in groups[group], group))
        self.groups: dict[Group, dict[str, Any]] = {group: dict(groups[group]) for group in order}
        self._by_name: dict[str, Any] = {}
        for group, values in self.groups.items():
            self._by_name |= {f"{group}.{n}" if n in self._by_name else n: value for n, value in values.items()}

    @classmethod
    def common(cls, found: Sequence[Constants]) -> Self:
        """Returns what several sources have alike."""
        first, *others = (each.groups for each in found)
        shared = {group: values for group, values in first.items() if all(group in other for other in others)}
        return cls(
            {
                group: {
                    name: value
                    for name, value in values.items()
                    if all(name in other[group] and other[group][name] == value for other in others)
                }
                for group, values in shared.items()
            }
        )

    def of(self, group: Group) -> Mapping[str, Any]:
        """Returns the constants of one group; of a group that is not there, none."""
        return self.groups.get(group, {})

    @property
    def has_items(self) -> bool:
        """Whether samples have items of any group beside their text."""
        return any(group != TEXT for group in self.groups)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        return self.groups == other.groups if isinstance(other, Constants) else self._by_name == other

    def __repr__(self) -> str:
        return f"Constants({self.groups!r})"

    def to_json(self) -> dict[Group, dict[str, Any]]:
        """Returns the constants as metadata.json has them."""
        return self.groups


def sorted_categories(names: list[str], codes: Array) -> tuple[list[str], Array]:
    """Returns the names that occur, sorted, and the codes that point into them, int32."""
    used = sorted(np.unique(codes).tolist(), key=names.__getitem__)
    moved = np.zeros(len(names), np.int32)
    moved[used] = np.arange(len(used))
    return [names[code] for code in used], moved[codes]
