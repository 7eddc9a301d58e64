"""Rows that are conversations over images: each in any of the usual forms to the canonical one.

Which fields a conversation may have: those that are taken, those that would change its meaning, and all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.config.data import SourceColumns
from forebay.errors import SampleError, TextError
from forebay.rows.manifest import LISTS, Meaning, MeantRow, MediaPlace, Record, file_place
from forebay.rows.readers.json_lines import JsonError, id_of, parse_nested, string_of

Image = TypeVar("Image")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_TAG = re.compile(r"\n?<image>\n?|<img>([^<>]+)</img>")
MESSAGES = ("messages", "conversations")
IMAGES = (LISTS["image"], "image")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
TOOLS, REASONING, VIDEO, AUDIO = "has_tools", "has_reasoning", "has_video", "has_audio"
BOXES, PREFERENCES, PIXEL_LIMITS = "has_boxes", "preference_data", "image_pixel_limits"
PARTLY_LEARNT = "loss_weight"
_WHAT = {
    TOOLS: "tools and their calls",
    REASONING: "reasoning apart from the answer",
    VIDEO: "videos",
    AUDIO: "audio in a conversation over images",
    BOXES: "boxes of objects",
    PREFERENCES: "answers to prefer or to reject",
    PARTLY_LEARNT: "which part of a message is learnt",
    PIXEL_LIMITS: "a size of one image, other than that of the processor",
}
IDS = frozenset({"sample_id", "id"})
LEARNT_OF_ROW = ("loss_scale", "train", "mask")
"""Fields of a row that speak of all its messages. `loss` and `weight` of a row are figures about it."""
_COMMON = IDS | {"system", *IMAGES, *LEARNT_OF_ROW}
WITH_MESSAGES = _COMMON | {"messages", "conversations"}
WITH_QUESTION = _COMMON | {"question", "answer"}
LEARNT = {"loss": True, "weight": True, "loss_scale": True, "train": True, "mask": False}
"""Fields that say of a message whether it is learnt, by what they say then."""
MESSAGE = frozenset({"role", "from", "content", "value", *LEARNT})
TEXT_PART = frozenset({"type", "text"})
IMAGE_PART = frozenset({"type", "image"})
REFUSED_OF_ROW: Mapping[str, str] = {
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), TOOLS),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASONING),
    **dict.fromkeys(("videos", "video"), VIDEO),
    **dict.fromkeys(("audios", "audio"), AUDIO),
    "objects": BOXES,
    **dict.fromkeys(("rejected_response", "rejected", "chosen", "rejected_messages", "rejected_images"), PREFERENCES),
}
REFUSED_OF_MESSAGE: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    "tool_call_id": TOOLS,
    **dict.fromkeys(("train_detail", "training_detail"), PARTLY_LEARNT),
}
REFUSED_OF_PART: Mapping[str, str] = {
    **REFUSED_OF_ROW,
    **dict.fromkeys(("max_pixels", "min_pixels", "resized_height", "resized_width"), PIXEL_LIMITS),
}
REFUSED_ROLES: Mapping[str, str] = dict.fromkeys(
    ("tool", "function", "tool_call", "tool_response", "function_call", "observation"), TOOLS
)
_REFUSED_TAGS = {"video": VIDEO, "audio": AUDIO, "bbox": BOXES, "ref-object": BOXES}
_REFUSED_TAG = re.compile(rf"<({'|'.join(_REFUSED_TAGS)})>")


class ListsImages(Meaning):
    """Rows that list images, and are no item themselves."""

    def identifier(self, fields: Mapping[str, Any]) -> str | None:
        try:
            given = id_of(fields, ("sample_id", "id"))
        except JsonError as err:
            raise text_error(err) from err
        if given == "":
            raise TextError("bad_conversation", "field id is empty, wanted an id")
        return given


class Conversations(ListsImages):
    """A conversation as `canonical` takes it, and any number of images."""

    beside: ClassVar[tuple[str, ...]] = ("system", *LEARNT_OF_ROW)
    refuses: ClassVar[frozenset[str]] = frozenset({"system", *REFUSED_OF_ROW})
    lists_any: ClassVar[bool] = True
    bad: ClassVar[str | None] = "bad_conversation"

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:  # noqa: ARG002
        text, used = canonical(*with_images(record), unknown=unknown)
        return MeantRow(text=text, items={"image": used})

    def lacking(self, found: Collection[str], columns: SourceColumns) -> str | None:
        if "messages" in found or {"question", "answer"} <= {*found}:
            return None
        return f"{columns.messages}, nor {columns.question} and {columns.answer}"


def with_images(record: Record) -> tuple[dict[str, Any], list[MediaPlace]]:
    """Returns the fields of a record, nested JSON decoded, and its images. Raises SampleError."""
    images: list[MediaPlace] = []
    if record.media is not None:
        found = [place if place is None else file_place(place) for place in record.media]
        images = [place for place in found if place is not None]
        if len(images) < len(found):
            raise SampleError("missing_file", "its image has neither bytes nor a path")
    fields = decoded_fields(record)
    if record.media is None:
        images = [*map(file_place, image_names(fields))]
    return fields, images


def decoded_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a record, nested JSON decoded. Raises TextError where it is none."""
    fields = record.fields
    for name in record.nested:
        text = fields.get(name)
        if isinstance(text, str) and (name not in IMAGES or text.lstrip().startswith("[")):
            try:
                fields = {**fields, name: parse_nested(text)}
            except JsonError as err:
                raise text_error(JsonError(f"field {name}: {err}", reason=err.reason)) from err
    return fields


def canonical(
    fields: Mapping[str, Any], images: Sequence[Image], *, unknown: set[str] | None = None
) -> tuple[str, list[Image | str]]:
    """Returns a conversation as canonical JSON, and its images in the order of their parts.

    fields: `messages` (or `conversations`) of `role` and `content` (or `from`: human, gpt; and `value`), or `question`
    and `answer`; `system`, a message to put first. A content is a string, in which `<image>` (with a newline before
    and after it) or `<img>name</img>` stands for an image, or parts `{"type": "text", "text"}`, `{"type": "image"}` and
    `{"type": "image", "image": name}`. `LEARNT` of an assistant's message say whether it is learnt,
    `LEARNT_OF_ROW` of a row whether any is.
    images: what tags and parts without a name stand for, in order; anything, a named part gives its name. A question
    without a tag has them before it. unknown: the names of all other fields that have a value are added to it, as
    `name`, `messages.name`, `messages.content.name`.

    The canonical form is a list of `{"role": "system"|"user"|"assistant", "content": [parts]}`, parts without names,
    and `"loss": false` in messages of the assistant that are not learnt.
    Raises TextError `image_count_mismatch` where there are more or fewer tags than images, `bad_conversation` for what
    is none of these forms, a reason of `conversation_fields` for what would lose its meaning, and `two_conversations`,
    `two_system_messages`, `two_values` or `loss_weight` for what contradicts itself or is no 0 or 1.
    """
    unknown = set() if unknown is None else unknown
    try:
        conversation = _conversation(fields, num_images=len(images), unknown=unknown)
    except JsonError as err:
        raise text_error(err) from err
    parts = [part for message in conversation for part in message["content"] if part["type"] == "image"]
    tags = sum("image" not in part for part in parts)
    if tags != len(images):
        raise TextError(
            "image_count_mismatch",
            f"has {tags} image tags for {len(images)} images; give a tag, or an image part, for every image",
        )
    rest = iter(images)
    used = [part.pop("image") if "image" in part else next(rest) for part in parts]
    return _encode(conversation), used


def image_names(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names that `images` or `image` gives, none where both are missing or null; for one, a string will do.

    Of both, the one that holds any. Raises TextError `bad_conversation` for other types.
    """
    names = [name for name in IMAGES if fields.get(name) is not None]
    if not names:
        return []
    name = next((name for name in names if is_given(fields[name])), names[0])
    values = fields[name] if isinstance(fields[name], list) else [fields[name]]
    try:
        return [string_of({name: value}, (name,), required=True) or "" for value in values]
    except JsonError as err:
        raise text_error(err) from err


def text_error(err: JsonError) -> TextError:
    """Returns the error of a conversation for what is wrong with its JSON."""
    return TextError(err.reason or "bad_conversation", str(err))


def _conversation(fields: Mapping[str, Any], *, num_images: int, unknown: set[str]) -> list[dict[str, Any]]:
    given = [name for name in (*MESSAGES, "question") if fields.get(name) is not None]
    held = [name for name in given if is_given(fields[name])]
    if len(held) > 1:
        raise JsonError(f"has both {held[0]} and {held[1]}, wanted one conversation", reason="two_conversations")
    with_messages = bool(given) and given[0] in MESSAGES
    unknown.update(unknown_fields(fields, WITH_MESSAGES if with_messages else WITH_QUESTION, REFUSED_OF_ROW))
    if all(is_given(fields.get(name)) for name in IMAGES):
        unknown.add(IMAGES[1])
    if not given:
        raise JsonError("has neither messages nor a question; give messages, or question and answer")
    if with_messages:
        conversation = list(_messages(fields[given[0]], given[0], unknown))
    else:
        conversation = list(_asked(fields, num_images=num_images))
    if not _is_learnt({name: fields.get(name) for name in LEARNT_OF_ROW}, "assistant", "the row"):
        conversation = [{**each, "loss": False} if each["role"] == "assistant" else each for each in conversation]
    return [*_system(fields, conversation, unknown), *conversation]


def _asked(fields: Mapping[str, Any], *, num_images: int) -> Iterator[dict[str, Any]]:
    question = list(_split(string_of(fields, ("question",), required=True) or "", "field question"))
    if not any(part["type"] == "image" for part in question):
        question = [*({"type": "image"} for _ in range(num_images)), *question]
    yield {"role": "user", "content": question}
    yield {"role": "assistant", "content": list(_text(string_of(fields, ("answer",), required=True) or ""))}


def _system(
    fields: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]], unknown: set[str]
) -> Iterator[dict[str, Any]]:
    """The message of a row's field `system`; an empty one is none."""
    if not is_given(fields.get("system")):
        return
    if any(message["role"] == "system" for message in conversation):
        raise JsonError(
            "field system is given beside a message of role system, wanted one of them", reason="two_system_messages"
        )
    yield {"role": "system", "content": list(_parts(fields["system"], "field system", unknown))}


def _messages(messages: Any, name: str, unknown: set[str]) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise JsonError(f"field {name} is {str(messages)[:60]!r}, wanted a list of messages")
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise JsonError(f"{where} is {str(message)[:60]!r}, wanted an object")
        found = unknown_fields(message, MESSAGE, REFUSED_OF_MESSAGE, where=f"{where}: ")
        if found:
            unknown.update(f"{name}.{field}" for field in found)
        role = _role(message, where)
        content = _one_of(message, ("content", "value"), where)
        made = {"role": role, "content": list(_parts(content, where, unknown, name=name))}
        yield made if _is_learnt(message, role, where) else {**made, "loss": False}


def _role(message: Mapping[str, Any], where: str) -> str:
    given = {name: message[name] for name in ("role", "from") if message.get(name) is not None}
    for role in given.values() or (None,):
        if isinstance(role, str) and role in REFUSED_ROLES:
            raise refusal(REFUSED_ROLES[role], f"{where}: role is {role!r}")
        if not isinstance(role, str) or role not in _ROLES:
            raise JsonError(f"{where}: role is {str(role)[:60]!r}, wanted one of {', '.join(_ROLES)}")
    return str(_one_of({name: _ROLES[role] for name, role in given.items()}, ("role", "from"), where))


def _one_of(message: Mapping[str, Any], names: tuple[str, str], where: str) -> Any:
    """Returns the value of the field that is given; both may be, if they say the same."""
    values = [message[name] for name in names if message.get(name) is not None]
    held = [value for value in values if is_given(value)] or values
    if any(value != held[0] for value in held):
        raise JsonError(f"{where}: fields {' and '.join(names)} contradict each other", reason="two_values")
    return held[0] if held else None


def _is_learnt(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether a message is learnt as far as its role lets it. Only an assistant's may say no; no other may say yes."""
    given = {name: message[name] for name in LEARNT if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise JsonError(
                f"{where}: field {name} is {str(value)[:60]!r}, wanted true or false, 1 or 0", reason="loss_weight"
            )
    said = {bool(value) is LEARNT[name] for name, value in given.items()}
    if len(said) > 1:
        raise JsonError(f"{where}: fields {' and '.join(given)} contradict each other", reason="loss_weight")
    if role != "assistant" and True in said:
        raise JsonError(
            f"{where}: {' and '.join(given)} would have a message of role {role} learnt, wanted the assistant's alone",
            reason="loss_weight",
        )
    return role != "assistant" or False not in said


def _parts(content: Any, where: str, unknown: set[str], *, name: str = "system") -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        text = string_of({f"{where} content": content}, (f"{where} content",), required=True)
        yield from _split(text or "", where)
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            found = unknown_fields(part, TEXT_PART, REFUSED_OF_PART, where=f"{where}: part text: ")
            yield from _text(string_of(part, ("text",), required=True) or "")
        elif kind == "image":
            found = unknown_fields(part, IMAGE_PART, REFUSED_OF_PART, where=f"{where}: part image: ")
            image = string_of(part, ("image",))
            yield {"type": "image"} if image is None else {"type": "image", "image": image}
        elif isinstance(kind, str) and kind in REFUSED_OF_ROW:
            raise refusal(REFUSED_OF_ROW[kind], f"{where}: a part is of type {kind}")
        else:
            raise JsonError(f"{where}: part {str(part)[:60]!r}, wanted one of type text or image")
        if found:
            unknown.update(f"{name}.content.{field}" for field in found)


def _split(text: str, where: str) -> Iterator[dict[str, Any]]:
    """The parts of a string with tags."""
    if "<" not in text:
        yield from _text(text)
        return
    if found := _REFUSED_TAG.search(text):
        error = refusal(_REFUSED_TAGS[found[1]], f"{where} has the tag {found[0]}")
        raise JsonError(f"{error}; words that only look like it go into a part of type text", reason=error.reason)
    position = 0
    for tag in _TAG.finditer(text):
        yield from _text(text[position : tag.start()])
        yield {"type": "image"} if tag[1] is None else {"type": "image", "image": tag[1]}
        position = tag.end()
    yield from _text(text[position:])


def _text(text: str) -> Iterator[dict[str, Any]]:
    if text:
        yield {"type": "text", "text": text}


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
    return JsonError(f"{found}, and {_WHAT[reason]} cannot be stored; remove the row or the field", reason=reason)


def is_given(value: Any) -> bool:
    """Says whether a field holds anything: arrow writes the fields of other rows as null, and lists of nothing."""
    if isinstance(value, list):
        return any(map(is_given, value))
    if isinstance(value, dict):
        return any(map(is_given, value.values()))
    return value is not None and value != ""
