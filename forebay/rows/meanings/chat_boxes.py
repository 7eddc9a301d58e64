"""Boxes, points and names of objects as ms-swift writes them: a row's `objects`, and tags in its messages.

The documentation of ms-swift ("Custom dataset", "Grounding") says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.rows.meanings.chat_fields import OBJECTS, is_given, list_in
from forebay.rows.readers.json_lines import JsonError, parse_nested, string_of

TAGS: Mapping[str, str] = {"bbox": "box", "ref-object": "ref"}
"""The tags of a string, by the type of the parts that they become."""
_FIELDS = frozenset({"ref", "bbox", "bbox_type", "image_id"})
_POINT, _BOX = 2, 4
_MOST = 1e9


def fill_boxes(conversation: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> set[str]:
    """Gives every part of a tag what `objects` has for it, in their order; returns that field's unused names.

    A box becomes `{"type": "box", "box": [x1, y1, x2, y2] or [x, y], "image": its number}`, with `"norm": true` where
    numbers are shares of the image's sides; a name `{"type": "ref", "text"}`. Raises JsonError `box_count_mismatch`,
    `bad_box`, `box_reversed` and `box_image`.
    """
    objects = fields.get(OBJECTS) if is_given(fields.get(OBJECTS)) else {}
    objects = parse_nested(objects) if isinstance(objects, str) else objects
    if not isinstance(objects, dict):
        raise _bad(f"field {OBJECTS} is {str(objects)[:60]!r}, wanted an object of ref and bbox")
    parts = [part for message in conversation for part in message["content"]]
    num_images = sum(part["type"] == "image" for part in parts)
    given = {"box": [*_boxes(objects, num_images)], "ref": [{"text": name} for name in _names(objects)]}
    for tag, kind in TAGS.items():
        shown = [part for part in parts if part["type"] == kind]
        if len(shown) != len(given[kind]):
            raise JsonError(
                f"has {len(shown)} <{tag}> tags for {len(given[kind])} of {OBJECTS}; give as many, and a tag as a "
                "string of the content; words that only look like it go into a part of type text",
                reason="box_count_mismatch",
            )
        for part, value in zip(shown, given[kind], strict=True):
            part.update(value)
    return {f"{OBJECTS}.{name}" for name, value in objects.items() if name not in _FIELDS and is_given(value)}


def _names(objects: Mapping[str, Any]) -> Iterator[str]:
    for name in _list(objects, "ref"):
        yield string_of({"ref": name}, ("ref",), required=True) or ""


def _boxes(objects: Mapping[str, Any], num_images: int) -> Iterator[dict[str, Any]]:
    boxes, images, kind = _list(objects, "bbox"), _list(objects, "image_id"), objects.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise _bad(f"bbox_type is {str(kind)[:60]!r}, wanted real or norm1")
    if images and len(images) != len(boxes):
        raise JsonError(f"has {len(images)} image_id for {len(boxes)} boxes", reason="box_count_mismatch")
    for box, image in zip(boxes, images or [0] * len(boxes), strict=True):
        is_box = isinstance(box, list) and len(box) in (_POINT, _BOX)
        if not is_box or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in box):
            raise _bad(f"a box is {str(box)[:60]!r}, wanted [x1, y1, x2, y2] or [x, y]")
        if not all(-_MOST < x < _MOST for x in box):
            raise _bad(f"a box is {str(box)[:60]!r}, wanted numbers of pixels")
        if len(box) == _BOX and (box[0] > box[2] or box[1] > box[3]):
            raise JsonError(f"box {box} has its first corner behind its second; exchange them", reason="box_reversed")
        if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < num_images:
            raise JsonError(f"box {box} is of image {image}, and the row has {num_images}", reason="box_image")
        yield {"box": box, "image": image, **({"norm": True} if kind == "norm1" else {})}


def _list(objects: Mapping[str, Any], name: str) -> list[Any]:
    return list_in(objects, name) if is_given(objects.get(name)) else []


def _bad(found: str) -> JsonError:
    return JsonError(found, reason="bad_box")
