"""Windows of images: parts that are stored beside the whole, as its variants, and decoded when they are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from forebay.store.layout import Array

if TYPE_CHECKING:
    from PIL.Image import Image

COUNTS = (1, 4, 9, 16)
"""How many windows an image may have: rows of as many columns."""


@dataclass(frozen=True, slots=True)
class ImageWindows:
    """Parts of an image that stand beside the whole as variants: `count`, a square number, none or more of them.

    Each is `share` of both sides. They are evenly spaced in rows and columns; the outer ones end with the image.
    """

    count: int = 0
    share: float = 0.8

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> Self:
        """Returns the windows that metadata.json states, [] for none. Raises ValueError for what no forebay writes."""
        found = cls(*document)
        if found.count not in (0, *COUNTS) or not 0 < found.share < 1:
            raise ValueError(f"its crops are {document!r:.40}")
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the variants, row by row."""
        return tuple(f"crop{number}" for number in range(1, self.count + 1))

    def stored(self, codec: str) -> tuple[str, ...]:
        """Returns the names of those that a codec stores: `source` has the file, and cuts them again at load."""
        return self.names if codec != "source" else ()

    def part(self, image: Image, name: str) -> Image:
        """Returns one of the windows of an image; of no name all of it."""
        if not name:
            return image
        begins, sides = [], [max(1, round(side * self.share)) for side in image.size]
        steps = math.isqrt(self.count) - 1
        places = reversed(divmod(self.names.index(name), steps + 1))
        for side, own, place in zip(image.size, sides, places, strict=True):
            begins.append(round((side - own) * place / steps) if steps else (side - own) // 2)
        left, top = begins
        return image.crop((left, top, left + sides[0], top + sides[1]))


NO_WINDOWS = ImageWindows()


class Undecoded(tuple[Array, ...]):
    """Items of a sample that are decoded when one is looked at: of a variant of its images, if it is the one chosen.

    The tuple itself holds what is stored of each.
    """

    def __new__(cls, rows: Iterable[Any], decoded: Callable[[Any], Array]) -> Self:
        """decoded: makes of what is stored of an item its array."""
        made = super().__new__(cls, rows)
        made.decoded, made.made = decoded, None
        return made

    decoded: Callable[[Any], Array]
    made: tuple[Array, ...] | None

    def _arrays(self) -> tuple[Array, ...]:
        # No cached_property: before Python 3.12 all of them take turns at one lock.
        if self.made is None:
            self.made = tuple(map(self.decoded, super().__iter__()))
        return self.made

    def __iter__(self) -> Iterator[Array]:
        return iter(self._arrays())

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Undecoded(super().__getitem__(place), self.decoded)
        return self._arrays()[place]

    def __add__(self, other: Any) -> Any:
        rows = (*super().__iter__(), *super(Undecoded, other).__iter__()) if isinstance(other, Undecoded) else None
        return (*self, *other) if rows is None else Undecoded(rows, self.decoded)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._arrays(),)
