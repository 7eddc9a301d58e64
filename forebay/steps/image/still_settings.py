"""A row may ask something of one image: bounds of its pixels, or its size, beside its processor's, and its frame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from forebay.errors import SampleError
from forebay.store.image.image_settings import ImageSettings, grid_thw

_MOST = 1 << 40
_TOKENS = (4, 16384)
"""The tokens that an image of a size of its own has, at least and at most, in `fetch_image` of qwen_vl_utils."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Still:
    """The wishes of a row for one image. min_pixels, max_pixels: in the places of the processor's own.

    resized_height, resized_width: in pixels, instead; rounded to whole tokens as `fetch_image` of qwen_vl_utils does.
    frame: of an animation, or a file of several pages, from 0.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    frame: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Still | None:
        """Returns what those of STILL that a part has say, None where it has none.

        Raises SampleError `bad_pixel_limits` or `no_such_frame` for what is no such number, and for fields that
        contradict each other.
        """
        values = dict(given)
        for name, value in values.items():
            least = 0 if name == "frame" else 1
            if type(value) is not int or not least <= value < _MOST:
                said = f"{where}: {name} is {str(value)[:60]!r}, wanted an integer of {least} or more"
                raise SampleError("no_such_frame" if name == "frame" else "bad_pixel_limits", said)
        given_sizes = {*values} - {"frame"}
        if any(name.startswith("resized_") for name in given_sizes) and given_sizes != {*STILL[2:4]}:
            said = f"{where} has {', '.join(sorted(given_sizes))}, wanted {' and '.join(STILL[2:4])} alone"
            raise SampleError("bad_pixel_limits", said)
        return cls(**values) if values else None

    @classmethod
    def read(cls, text: str | None) -> Still:
        """Returns what `to_text` wrote; None: nothing is asked."""
        return cls(**json.loads(text)) if text else cls()

    def to_text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, sort_keys=True)

    @property
    def has_size(self) -> bool:
        """Whether the image has another size than the processor's."""
        return self != Still(frame=self.frame)

    def grid(self, width: int, height: int, settings: ImageSettings, most: int) -> tuple[int, int, int]:
        """Returns the grid of patches (1, rows, columns) of an image of a size, as displayed.

        most: pixels, of the resized image. Raises SampleError as `grid_thw` does, `bad_pixel_limits` where the least
        pixels are above the most, `image_pixel_limits` for a processor that knows no such bounds, `too_many_pixels`.
        """
        if not self.has_size:
            return grid_thw(width, height, settings)
        if settings.enlarges or not settings.do_resize:
            raise SampleError("image_pixel_limits", "the processor has no size for one image alone; remove the fields")
        if self.resized_height is None or self.resized_width is None:
            least, largest = self.min_pixels or settings.min_pixels, self.max_pixels or settings.max_pixels
        else:
            width, height = self.resized_width, self.resized_height
            least, largest = (count * settings.factor**2 for count in _TOKENS)
        if least > largest:
            said = f"min_pixels is {least} and max_pixels {largest}, of the image or else the processor"
            raise SampleError("bad_pixel_limits", f"{said}; correct the row")
        _, rows, columns = grid_thw(width, height, replace(settings, min_pixels=least, max_pixels=largest))
        if (pixels := rows * columns * settings.patch_size**2) > most:
            said = f"it is resized to {pixels} pixels, source.max_pixels is {most}"
            raise SampleError("too_many_pixels", f"{said}; lower what the row asks for, or raise that setting")
        return 1, rows, columns


STILL = tuple(f.name for f in fields(Still))
"""The fields of a part that say which size its image has, and which frame of it is shown."""
