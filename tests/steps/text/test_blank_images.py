"""Blank images: what becomes of a conversation does not depend on those before it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from forebay.steps.text.chat.processor_ids import BlankImages, blank_image

Talk = tuple[tuple[int, int], ...]

TALKS: tuple[Talk, ...] = (
    ((64, 48), (300, 3)),
    ((300, 3), (64, 48)),
    ((64, 48), (64, 48)),
    ((64, 48), (640, 400), (30, 90)),
)


class Guessing:
    """A processor as Emu3's: the axis of colours of all images is guessed of the first, which may not be thin.

    pads: to the largest image, so that the pixels of each are not those of all.
    """

    def __init__(self, *, pads: bool) -> None:
        self._pads = pads

    def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
        sizes = [image.size for talk in images for image in talk]
        if sizes[0][1] == 3:
            raise ValueError("an image of 3 rows may have its colours first")
        side = max(width * height for width, height in sizes)
        pixels = [np.zeros((1, side if self._pads else 16), np.float32) for _ in sizes]
        return {"pixel_values": np.concatenate(pixels), "image_sizes": np.array(sizes)}


def outcome(blank: BlankImages, talk: Talk) -> str:
    try:
        made = blank([[blank_image(size) for size in talk]])
    except ValueError as err:
        return str(err)
    return str({name: (value.shape, value.dtype) for name, value in made.items()})


def test_what_becomes_of_images_does_not_depend_on_those_before() -> None:
    for pads in (False, True):
        alone = {talk: outcome(BlankImages(Guessing(pads=pads)), talk) for talk in TALKS}
        assert [talk for talk, said in alone.items() if "3 rows" in said] == [TALKS[1]]
        for order in itertools.permutations(TALKS):
            blank = BlankImages(Guessing(pads=pads))
            assert {talk: outcome(blank, talk) for talk in order} == alone
