"""Boxes, points and names of objects in a conversation, as a Qwen-VL is shown them.

Numbers are ms-swift's: thousandths of the image for Qwen2-VL and Qwen3-VL, pixels of the resized image for Qwen2.5-VL,
each `round(x / width * w)`. So are the two ways to write them: control tokens, which Qwen2-VL has learnt, and the lists
of Qwen's guides since.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from forebay.errors import ConfigError, TextError
from forebay.steps.image.video_settings import Family, family_in
from forebay.steps.text.chat.conversation import Message, bad_conversation
from forebay.steps.text.row_encoder import Size
from forebay.store.image.image_settings import ImageSettings, grid_thw, image_settings

BoxStyle = Literal["tokens", "list"]
TOKENS = tuple(f"<|{name}_{end}|>" for name in ("object_ref", "box") for end in ("start", "end"))
"""Before and behind a name, before and behind a box."""
_KINDS = ("box", "ref")
_THOUSANDTHS: Size = (1000, 1000)
Sizes = tuple[int, ...]
"""Of an image, see `with_boxes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxWriter:
    """How the model of a processor is shown boxes. images: how its images are resized, where boxes are in pixels."""

    family: Family
    style: BoxStyle
    images: ImageSettings | None = None

    @classmethod
    def of(cls, folder: Path, style: BoxStyle | None) -> BoxWriter | None:
        """Returns the writer of a processor's folder; None of a family whose boxes are not known.

        Raises ConfigError where a style is given for such a family.
        """
        with suppress(ConfigError):  # of files of another form
            if (family := family_in(folder)) is not None:
                images = image_settings(folder) if family == "qwen2_5" else None
                return cls(family=family, style=style or ("tokens" if family == "qwen2" else "list"), images=images)
        if style is None:
            return None
        raise ConfigError(
            f'text.boxes is "{style}", and {folder} is of no Qwen-VL, and how others are shown boxes is not known; '
            "leave it out",
            code="FB107",
        )

    def text(self, part: dict[str, Any], sizes: Sequence[Sizes], *, sample_id: str) -> str:
        """Returns what stands for a box or a name. sizes: see `with_boxes`. Raises TextError `box_outside_image`."""
        is_ref = part["type"] == "ref"
        text = part["text"] if is_ref else self._numbers(part, sizes, sample_id)
        before, behind = TOKENS[:2] if is_ref else TOKENS[2:]
        return f"{before}{text}{behind}" if self.style == "tokens" else text

    def _numbers(self, part: dict[str, Any], sizes: Sequence[Sizes], sample_id: str) -> str:
        box, size = part["box"], sizes[part["image"]]
        of = (1, 1) if part.get("norm") else size[:2]
        if not all(0 <= x <= side for x, side in zip(box, of * 2, strict=False)):
            raise TextError(
                "box_outside_image",
                f"{sample_id}: box {box} lies outside of image {part['image']}, of {of[0]}x{of[1]}"
                f"{'' if part.get('norm') else ' pixels as displayed'}; correct the manifest",
            )
        shown = [round(x / side * to) for x, side, to in zip(box, of * 2, self._shown(size) * 2, strict=False)]
        if self.style == "list":
            return str(shown)
        return ",".join(f"({x},{y})" for x, y in zip(shown[::2], shown[1::2], strict=True))

    def _shown(self, size: Sizes) -> Size:
        """Returns the width and height in which numbers are written."""
        if self.images is None:
            return _THOUSANDTHS
        width, height, *grid = size
        rows, columns = grid or grid_thw(width, height, self.images)[1:]
        return columns * self.images.patch_size, rows * self.images.patch_size


def with_boxes(
    conversation: Sequence[Message], writer: BoxWriter | None, sizes: Sequence[Sizes], *, sample_id: str
) -> list[Message]:
    """Returns the messages with texts in the places of boxes and names.

    sizes: width and height of the images in order, as displayed, with the rows and columns of their patches where
    these may be other than the processor's. Raises TextError `has_boxes` where there is no writer, and
    `box_outside_image`.
    """
    return [_written(message, writer, sizes, sample_id) for message in conversation]


def _written(message: Message, writer: BoxWriter | None, sizes: Sequence[Sizes], sample_id: str) -> Message:
    if "rejected" in message:
        message = {**message, "rejected": with_boxes(message["rejected"], writer, sizes, sample_id=sample_id)}
    boxes = [part for part in message["content"] if part["type"] in _KINDS]
    if not boxes:
        return message
    if writer is None:
        raise TextError(
            "has_boxes",
            f"{sample_id}: has boxes or names of objects, which are shown to Qwen-VL alone, and not where vision.crops "
            "cuts parts of images away; write them as text, leave crops out, or remove the row",
        )
    if any(part.get("image", 0) >= len(sizes) for part in boxes):
        raise bad_conversation(sample_id, f"a box is of an image that the sample has not, which has {len(sizes)}")
    texts = [
        {"type": "text", "text": writer.text(part, sizes, sample_id=sample_id)} if part["type"] in _KINDS else part
        for part in message["content"]
    ]
    # One text, as a person would have written it: white space is left out at its ends alone.
    joined: list[dict[str, Any]] = []
    for is_text, found in groupby(texts, lambda part: part["type"] == "text"):
        run = [*found]
        joined += [{"type": "text", "text": "".join(part["text"] for part in run)}] if is_text else run
    return {**message, "content": joined}
