"""The fields of conversations: those that are taken, those that would change what a row means, and all others.

A row may ask something of an item: a stretch of a clip, frames and sizes of a video, size and frame of an image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.errors import SampleError, TextError
from forebay.rows.manifest import LISTS, NOUNS, VIDEO_FIELDS, MediaPlace, file_place
from forebay.rows.readers.json_lines import JsonError, parse_nested, string_of
from forebay.rows.segments import BOUNDS, STRETCH, Bounds, stretch_fields, stretch_of
from forebay.steps.image.still_settings import STILL, Still
from forebay.steps.image.video_settings import SAMPLING, Sampling

MESSAGES = ("messages", "conversations")
IMAGES = (LISTS["image"], "image")
VIDEOS = VIDEO_FIELDS[-1]
"""The kind of parts that are videos, which are items of the group `image`."""
NAMED_BY: Mapping[str, tuple[str, ...]] = {
    **{group: (column, group) for group, column in LISTS.items()},
    VIDEOS: VIDEO_FIELDS,
}
"""The fields of a row that name its items, by the kind of their parts."""
NOUNS_OF_PARTS: Mapping[str, str] = {**NOUNS, VIDEOS: "video"}
TOOLS, REASONING, VIDEO, AUDIO = "has_tools", "has_reasoning", "has_video", "has_audio"
IMAGE = "has_images"
PREFERENCES, PIXEL_LIMITS = "preference_data", "image_pixel_limits"
FRAMES, STRETCH_OF_VIDEO = "video_as_frames", "video_stretch"
PARTLY_LEARNT = "loss_weight"
WHAT = {
    TOOLS: "tools and their calls",
    REASONING: "reasoning apart from the answer",
    VIDEO: "videos",
    FRAMES: "frames of a video that are no files",
    STRETCH_OF_VIDEO: "a stretch of a video",
    AUDIO: "audio in a conversation over images",
    IMAGE: "images in a conversation over sound",
    PREFERENCES: "answers to prefer or to reject",
    PARTLY_LEARNT: "which part of a message is learnt",
    PIXEL_LIMITS: "a size of one image, other than that of the processor",
}
IDS = frozenset({"sample_id", "id"})
LEARNT_OF_ROW = ("loss_scale", "train", "mask")
"""Fields of a row that speak of all its messages. `loss` and `weight` of a row are figures about it."""
TOOLS_OF_ROW: tuple[str, ...] = ("tools", "functions")
OBJECTS = "objects"
"""The field of a row that has the boxes and names which tags stand for."""
_COMMON = IDS | {"system", OBJECTS, *TOOLS_OF_ROW, *LEARNT_OF_ROW}
WITH_MESSAGES = _COMMON | {"messages", "conversations"}
WITH_QUESTION = _COMMON | {"question", "answer"}
ANSWERS = {"question": "answer", "query": "response", "instruction": "output"}
"""The fields that ask, by those that answer: forebay's own, ms-swift's and alpaca's."""
ASKED: Mapping[str, frozenset[str]] = {
    "question": WITH_QUESTION,
    "query": _COMMON | {"query", "response", "history"},
    "instruction": _COMMON | {"instruction", "input", "output", "history"},
    "text": _COMMON | {"text"},
}
PAIRED: tuple[str, ...] = ("prompt", "chosen", "rejected", "rejected_response")
"""The fields of two answers to one question; `prompt` alone is none of them."""
BESIDE = (
    "system",
    OBJECTS,
    *LEARNT_OF_ROW,
    *TOOLS_OF_ROW,
    *PAIRED,
    "text",
    *sorted({*ASKED["query"], *ASKED["instruction"]} - WITH_QUESTION),
)
"""The fields of these forms that no column of `[source.columns]` names."""
LEARNT = {"loss": True, "weight": True, "loss_scale": True, "train": True, "mask": False}
"""Fields that say of a message whether it is learnt, by what they say then."""
MESSAGE = frozenset({"role", "from", "content", "value", *LEARNT})
CALLS: tuple[str, ...] = ("tool_calls", "function_call")
REASONED: tuple[str, ...] = ("reasoning_content", "reasoning", "thinking")
CALL = "call"
"""The role of a message that is a call by itself; it is the assistant's."""
ROLES: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("tool_call", "function_call"), CALL),
}
OF_ROLE: Mapping[str, frozenset[str]] = {
    "assistant": MESSAGE.union(CALLS, REASONED),
    "tool": MESSAGE.union(("name", "tool_call_id")),
}
"""The fields of messages of a role; of any other MESSAGE."""
TEXT_PART = frozenset({"type", "text"})
REFUSED_OF_ROW: Mapping[str, str] = {
    **dict.fromkeys(CALLS, TOOLS),
    **dict.fromkeys(REASONED, REASONING),
    **dict.fromkeys(("videos", "video"), VIDEO),
    **dict.fromkeys((*PAIRED[1:], "rejected_messages", "rejected_images"), PREFERENCES),
}
REFUSED_OF_MESSAGE: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    **dict.fromkeys((*TOOLS_OF_ROW, "tool_call_id"), TOOLS),
    **dict.fromkeys(("train_detail", "training_detail"), PARTLY_LEARNT),
}
REFUSED_OF_PART: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    **dict.fromkeys(TOOLS_OF_ROW, TOOLS),
    **dict.fromkeys(("max_pixels", "min_pixels", "total_pixels", "resized_height", "resized_width"), PIXEL_LIMITS),
    **dict.fromkeys(("video_start", "video_end"), STRETCH_OF_VIDEO),
}


def unknown_fields(
    fields: Mapping[str, Any], taken: frozenset[str], refused: Mapping[str, str], *, where: str = ""
) -> list[str]:
    """Returns the names of the fields that have a value and are not taken.

    taken: what is. refused: reasons by field. where: in front of a field's name in a message. Raises JsonError with the
    reason of the first refused field that is given; one that is null or holds nothing is not.
    """
    if fields.keys() <= taken:
        return []
    unknown = fields.keys() - taken
    for name in sorted(unknown & refused.keys()):
        if is_given(fields[name]):
            raise refusal(refused[name], f"{where}field {name} is given")
    return [name for name in unknown if name not in refused and fields[name] is not None]


def refusal(reason: str, found: str) -> JsonError:
    """Returns the error for a part of a conversation that cannot be stored. found: where it stands, with its field."""
    return JsonError(f"{found}, and {WHAT[reason]} cannot be stored; remove the row or the field", reason=reason)


def frames_place(names: Sequence[Any], where: str) -> MediaPlace:
    """Returns the place of a video whose frames are files of images, or stand in the line of their row.

    Raises JsonError `no_frames` for an empty list, `video_as_frames` for frames of another kind.
    """
    if not names:
        raise JsonError(f"{where} is an empty list; list the frames of the video", reason="no_frames")
    if not all(isinstance(name, str) and name for name in names):
        raise refusal(FRAMES, f"{where} is a list of others than names of files")
    written = (string_of({where: name}, (where,)) or "" for name in names)
    frames = tuple(file_place(name, of="a frame") for name in written)
    return frames[0]._replace(frames=frames)


def is_given(value: Any) -> bool:
    """Says whether a field holds anything: arrow writes the fields of other rows as null, and lists of nothing."""
    if isinstance(value, list):
        return any(map(is_given, value))
    if isinstance(value, dict):
        return any(map(is_given, value.values()))
    return value is not None and value != ""


def list_in(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Returns a list that a field holds, or the JSON of one. Raises JsonError for anything else."""
    value = parse_nested(fields[name]) if isinstance(fields[name], str) else fields[name]
    if not isinstance(value, list):
        raise JsonError(f"field {name} is {str(value)[:60]!r}, wanted a list")
    return value


def of_openai(part: Any) -> Any:
    """Returns a part of type `image_url`, as OpenAI writes it, as one of type `image`; any other as it is."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **rest}}:
            return {**part, **rest, "type": "image", "image_url": None, "image": url}
        case {"type": "image_url", "image_url": str(url)}:
            return {**part, "type": "image", "image_url": None, "image": url}
    return part


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
