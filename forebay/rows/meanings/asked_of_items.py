"""A row may ask something of an item: a stretch of a clip, frames and sizes of a video, size and frame of an image."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from forebay.errors import SampleError, TextError
from forebay.rows.manifest import MediaPlace, file_place
from forebay.rows.meanings.chat_fields import VIDEOS, is_given
from forebay.rows.readers.json_lines import JsonError
from forebay.rows.segments import BOUNDS, STRETCH, Bounds, stretch_fields, stretch_of
from forebay.steps.image.still_settings import STILL, Still
from forebay.steps.image.video_settings import SAMPLING, Sampling

Asked = Bounds | Sampling | Still
ARTICLES: Mapping[str, str] = {"audio": "a clip", "image": "an image", VIDEOS: "a video"}
IN_STRUCTS: Mapping[str, frozenset[str]] = {"audio": BOUNDS.union(STRETCH), "image": frozenset(STILL)}
"""The fields of structs of a table's column that ask something of an item, by the kind of item."""


def asked_of(fields: Mapping[str, Any], kind: str, where: str) -> tuple[Asked | None, tuple[str, ...]]:
    """Returns what the fields of a part or an object ask of its item, None for nothing, and which fields these are.

    kind: of the item. where: in front of a field's name in a message. Raises JsonError for values that are none.
    """
    if kind == "audio":
        return stretch_of(fields, where), stretch_fields(fields)
    try:
        if kind == VIDEOS:
            return Sampling.of(fields, where), SAMPLING
        return Still.of({name: fields[name] for name in STILL if is_given(fields.get(name))}, where), STILL
    except SampleError as err:
        raise JsonError(str(err), reason=err.reason) from err


def with_asked(item: Any, kind: str, asked: Asked | None) -> Any:
    """Returns the place of an item with what is asked of it; the item itself where nothing is.

    Raises TextError `two_values` where the item has been asked for something else.
    """
    if asked is None:
        return item
    place = file_place(item, of=ARTICLES[kind])
    if isinstance(asked, Sampling):
        asked.check(is_list=bool(place.frames))
        return place._replace(video=asked.to_text())
    if isinstance(asked, Still):
        return _place(place, "still", asked.to_text(), place.still, "an image is asked for as")
    said = None if place.segment is None else Bounds(*place.segment)
    return _place(place, "segment", asked, said, "a clip is from")


def _place(place: MediaPlace, field: str, asked: Any, before: Any, said: str) -> MediaPlace:
    if before not in (None, asked):
        raise TextError("two_values", f"{said} {before}, and by its part {asked}")
    return place._replace(**{field: asked})


def sound_of_video(video: MediaPlace) -> MediaPlace:
    """Returns the sound of a video, or of its stretch, as a clip. Raises SampleError `no_sound` for frames."""
    if video.frames:
        raise SampleError("no_sound", "a video is a list of frames, which has no sound; leave the row out")
    asked = Sampling(**json.loads(video.video or "{}"))
    start_s, end_s = asked.video_start or 0.0, math.nan if asked.video_end is None else asked.video_end
    is_whole = not start_s and asked.video_end is None
    return video._replace(video=None, segment=None if is_whole else Bounds(start_s, end_s))
