"""Rows that are conversations, over images and clips: each in any of the usual forms to the canonical one.

Which fields a conversation may have: those that are taken, those that would change its meaning, and all others.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.config.data import SourceColumns
from forebay.errors import SampleError, TextError
from forebay.rows.manifest import Meaning, MeantRow, MediaPlace, Record, file_place
from forebay.rows.meanings.chat_fields import (
    ANSWERS,
    ARTICLES,
    ASKED,
    AUDIO,
    BESIDE,
    CALL,
    IMAGE,
    LEARNT,
    LEARNT_OF_ROW,
    MESSAGE,
    MESSAGES,
    NAMED_BY,
    NOUNS_OF_PARTS,
    OBJECTS,
    OF_ROLE,
    REFUSED_OF_MESSAGE,
    REFUSED_OF_PART,
    REFUSED_OF_ROW,
    ROLES,
    TEXT_PART,
    TOOLS_OF_ROW,
    VIDEO,
    VIDEOS,
    WITH_MESSAGES,
    asked_of,
    frames_place,
    is_given,
    list_in,
    of_openai,
    refusal,
    sound_of_video,
    unknown_fields,
    with_asked,
)
from forebay.rows.meanings.chat_forms import (
    TAGS,
    add_message,
    beside_of,
    calls_in,
    fill_boxes,
    joined_pair,
    tools_of,
    two_rows,
)
from forebay.rows.readers.json_lines import JsonError, id_of, parse_nested, string_of
from forebay.steps.image.video_settings import Sampling
from forebay.steps.text.chat.conversation import COUNTED
from forebay.store.layout import Group

Item = TypeVar("Item")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ASKED = "asked"
"""The key of a part under which what it asks of its item stands until items are gathered."""
_BOX_TAG = rf"<(?P<box>{'|'.join(TAGS)})>"
_PART_NAMES: Mapping[str, tuple[str, ...]] = {
    VIDEOS: (VIDEOS, "path", "url"),
    "audio": ("audio", "path", "url", "audio_url"),
    "image": ("image", "path", "url"),
}
"""The fields of a part that may name its item."""
_OF_GROUP: Mapping[str, str] = {"audio": AUDIO, "image": IMAGE, VIDEOS: VIDEO}
"""The reason of a conversation with items of a kind that the config has not."""


@dataclass(frozen=True, slots=True)
class _Forms:
    """The parts, tags and fields that conversations with items of some groups, or with videos, may have.

    refused: reasons by field, of other groups. tag: of an item, its group or the name in `<img>`. refused_tag: of what
    cannot be stored.
    """

    groups: tuple[Group, ...]
    refused: Mapping[str, str]
    tags: Mapping[str, str]
    tag: re.Pattern[str]
    refused_tag: re.Pattern[str]

    @classmethod
    def of(cls, groups: Collection[Group]) -> _Forms:
        """Returns the forms of conversations with items of these groups."""
        return _forms(tuple(group for group in NAMED_BY if group in groups))

    @property
    def named_by(self) -> frozenset[str]:
        """The fields of a row that name items."""
        return frozenset(name for group in self.groups for name in NAMED_BY[group])

    @property
    def known(self) -> str:
        """The types of parts, for a message."""
        return ", ".join(["text", *self.groups[:-1]]) + f" or {self.groups[-1]}"


@functools.cache
def _forms(groups: tuple[Group, ...]) -> _Forms:
    others = {group: reason for group, reason in _OF_GROUP.items() if group not in groups}
    refused = {name: reason for group, reason in others.items() for name in NAMED_BY[group]}
    tag = rf"\n?<({'|'.join(groups)})>\n?" + (r"|<img>([^<>]+)</img>" if "image" in groups else "()")
    refused_tag = re.compile(rf"<({'|'.join(others)})>" if others else "(?!)")
    return _Forms(groups, refused, others, re.compile(rf"{tag}|{_BOX_TAG}"), refused_tag)


class ListsItems(Meaning):
    """Rows that list images, and are no item themselves."""

    def identifier(self, fields: Mapping[str, Any]) -> str | None:
        try:
            given = id_of(fields, ("sample_id", "id"))
        except JsonError as err:
            raise text_error(err) from err
        if given == "":
            raise TextError("bad_conversation", "field id is empty, wanted an id")
        return given


class Conversations(ListsItems):
    """A conversation as `canonical` takes it, and any number of images and clips."""

    beside: ClassVar[tuple[str, ...]] = BESIDE
    refuses: ClassVar[frozenset[str]] = frozenset({"system", *REFUSED_OF_ROW, *NAMED_BY["audio"]})
    lists_any: ClassVar[bool] = True
    bad: ClassVar[str | None] = "bad_conversation"

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:  # noqa: ARG002
        kinds = (*self.facts.groups, *([VIDEOS] if self.facts.has_videos else []))
        text, used = canonical(*with_items(record, kinds), unknown=unknown)
        if self.facts.has_videos:
            used = _by_group(text, used, has_sound=self.facts.has_sound)
        return MeantRow(text=text, items=used)

    def lacking(self, found: Collection[str], columns: SourceColumns) -> str | None:
        pairs = [*ANSWERS.items(), ("question", "chosen"), ("prompt", "chosen"), ("chosen", "rejected")]
        if {"messages", "text"} & {*found} or any({*pair} <= {*found} for pair in pairs):
            return None
        return f"{columns.messages}, nor {columns.question} and {columns.answer}"


def with_items(record: Record, groups: Collection[Group]) -> tuple[dict[str, Any], dict[Group, list[MediaPlace]]]:
    """Returns the fields of a record, nested JSON decoded, and its items of some groups. Raises SampleError."""
    given = record.media or {}
    items: dict[Group, list[MediaPlace]] = {}
    for group, places in given.items():
        if None in places:
            raise SampleError("missing_file", f"its {NOUNS_OF_PARTS[group]} has neither bytes nor a path")
        if (wrong := next((place for place in places if isinstance(place, JsonError)), None)) is not None:
            raise text_error(wrong)
        items[group] = [
            file_place(place, of=ARTICLES[group]) for place in places if isinstance(place, MediaPlace | str)
        ]
    fields = decoded_fields(record)
    for group in groups:
        if group not in items:
            items[group] = [file_place(name, of=ARTICLES[group]) for name in item_names(fields, group)]
    return fields, items


def _by_group(text: str, used: Mapping[str, Sequence[Any]], *, has_sound: bool) -> dict[Group, list[Any]]:
    """Returns the items of each group, in the order of their parts: videos stand among the images. text: canonical.

    has_sound: their sound stands among the clips. Raises SampleError `no_sound` for a list of frames then.
    """
    rest = {kind: iter(items) for kind, items in used.items()}
    found: dict[Group, list[Any]] = {kind: [] for kind in used if kind != VIDEOS}
    for part in (part for message in json.loads(text) for part in message["content"] if part["type"] in rest):
        found["image" if part["type"] == VIDEOS else part["type"]].append(item := next(rest[part["type"]]))
        if part["type"] == VIDEOS and has_sound:
            found["audio"].append(sound_of_video(item))
    return found


def decoded_fields(record: Record) -> dict[str, Any]:
    """Returns the fields of a record, nested JSON decoded. Raises TextError where it is none."""
    fields = record.fields
    if record.nested:  # of a table, whose types fill up what other rows have
        structs = [name for name in ("messages", *TOOLS_OF_ROW) if isinstance(fields.get(name), list)]
        fields = {**fields, **{name: _without_nulls(fields[name]) for name in structs}}
    for name in record.nested:
        text = fields.get(name)
        is_name = any(name in names for names in NAMED_BY.values())
        if isinstance(text, str) and (not is_name or text.lstrip().startswith("[")):
            try:
                fields = {**fields, name: parse_nested(text)}
            except JsonError as err:
                raise text_error(JsonError(f"field {name}: {err}", reason=err.reason)) from err
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def canonical(
    fields: Mapping[str, Any], items: Mapping[Group, Sequence[Item]], *, unknown: set[str] | None = None
) -> tuple[str, dict[Group, list[Item | str]]]:
    """Returns a conversation as canonical JSON, and by group its items in the order of their parts.

    fields: `messages` (or `conversations`) of `role` and `content` (or `from`: human, gpt; and `value`), or those of
    `ANSWERS`, with `input` and a `history` of [question, answer], or a `text` without an answer; `system`,
    a message to put first. A content is a string, in which `<image>` and `<audio>` (with a newline before and after it)
    or `<img>name</img>` stand for an item, or parts `{"type": "text", "text"}`,
    `{"type": "image"}` and `{"type": "image", "image": name}`, and so of `audio`, whose name may stand under `path` or
    `url` too; parts may ask something of their item, see `asked_of`. `LEARNT` of an assistant's message say whether it
    is learnt, `LEARNT_OF_ROW` of a row whether any is.
    items: of each group that a conversation may have, what tags and parts without a name stand for, in order; anything,
    a named part gives its name. A question without a tag has them before it. unknown: the names of all other fields
    that have a value are added to it, as `name`, `messages.name`, `messages.content.name`.

    The canonical form is a list of `{"role": "system"|"user"|"assistant"|"tool", "content": [parts]}`, parts without
    names, and `"loss": false` in messages of the assistant that are not learnt. The first message has the `tools` of
    the row; see `beside_of` for what else a message may have, and `joined_pair` for two answers.
    Raises TextError `image_count_mismatch` or `audio_count_mismatch` where there are more or fewer tags than items,
    `bad_conversation` for what is none of these forms, a reason of `conversation_fields` for what would lose its
    meaning, and `two_conversations`, `two_system_messages`, `two_values` or `loss_weight` for what contradicts itself
    or is no 0 or 1.
    """
    unknown, forms = set() if unknown is None else unknown, _Forms.of(items)
    try:
        made = functools.partial(
            _conversation, forms=forms, counts={group: len(each) for group, each in items.items()}, unknown=unknown
        )
        two = two_rows(fields)
        conversation = made(fields) if two is None else joined_pair(*map(made, two))
    except JsonError as err:
        raise text_error(err) from err
    used = {group: _used(conversation, group, items[group]) for group in forms.groups}
    return _encode(conversation), used


def _used(conversation: Sequence[Mapping[str, Any]], group: Group, items: Sequence[Item]) -> list[Item | str]:
    """Returns the items of a group in the order of the parts, which lose their names."""
    parts = [part for message in conversation for part in message["content"] if part["type"] == group]
    tags = sum(group not in part for part in parts)
    if tags != len(items):
        noun, article = NOUNS_OF_PARTS[group], "a" if group == VIDEOS else "an"
        raise TextError(
            COUNTED[group],
            f"has {tags} {group} tags for {len(items)} {noun}s; give a tag, or {article} {group} part, "
            f"for every {noun}",
        )
    rest = iter(items)
    return [
        with_asked(part.pop(group) if group in part else next(rest), group, part.pop(_ASKED, None)) for part in parts
    ]


def item_names(fields: Mapping[str, Any], group: Group) -> list[str | MediaPlace]:
    """Returns the names that `images` or `image` gives, none where both are missing or null; for one, a string will do.

    Of both, the one that holds any. A clip or an image may be an object of its name and what is asked of it. Raises
    TextError `bad_conversation` for other types. group: whose fields.
    """
    names = [name for name in NAMED_BY[group] if fields.get(name) is not None]
    if not names:
        return []
    name = next((name for name in names if is_given(fields[name])), names[0])
    values = fields[name] if isinstance(fields[name], list) else [fields[name]]
    try:
        return [_listed(value, name, group) for value in values]
    except JsonError as err:
        raise text_error(err) from err


def _listed(value: Any, name: str, group: Group) -> str | MediaPlace:
    if group == VIDEOS and isinstance(value, list):
        return frames_place(value, f"field {name}")
    if group == VIDEOS and value is True:  # see `table_records`
        raise JsonError(f"field {name} holds bytes, wanted the name of a file")
    if group == VIDEOS or not isinstance(value, dict):
        return string_of({name: value}, (name,), required=True) or ""
    asked, taken = asked_of(value, group, f"field {name}")
    if group == "image" and (others := sorted({*filter(value.get, value)}.difference(_PART_NAMES[group], taken))):
        raise JsonError(f"field {name}: an object has {others[0]}, wanted {', '.join((*_PART_NAMES[group], *taken))}")
    named: str | MediaPlace = with_asked(string_of(value, _PART_NAMES[group], required=True), group, asked)
    return named


def text_error(err: JsonError) -> TextError:
    """Returns the error of a conversation for what is wrong with its JSON."""
    return TextError(err.reason or "bad_conversation", str(err))


def _conversation(
    fields: Mapping[str, Any], forms: _Forms, counts: Mapping[Group, int], unknown: set[str]
) -> list[dict[str, Any]]:
    given = [name for name in (*MESSAGES, *ANSWERS) if fields.get(name) is not None]
    held = [name for name in given if is_given(fields[name])]
    if len(held) > 1:
        raise JsonError(f"has both {held[0]} and {held[1]}, wanted one conversation", reason="two_conversations")
    with_messages = bool(given) and given[0] in MESSAGES
    taken = (WITH_MESSAGES if with_messages else ASKED[given[0] if given else "text"]) | forms.named_by
    unknown.update(unknown_fields(fields, taken, {**REFUSED_OF_ROW, **forms.refused}))
    unknown.update(
        NAMED_BY[group][1] for group in forms.groups if all(is_given(fields.get(name)) for name in NAMED_BY[group])
    )
    if not given and not is_given(fields.get("text")):
        raise JsonError("has neither messages nor a question; give messages, or question and answer")
    if with_messages:
        conversation = _messages(fields[given[0]], given[0], forms, unknown)
    else:
        conversation = _asked(fields, given[0] if given else "text", forms, counts)
    if not _is_learnt({name: fields.get(name) for name in LEARNT_OF_ROW}, "assistant", "the row"):
        conversation = [{**each, "loss": False} if each["role"] == "assistant" else each for each in conversation]
    conversation = [*_system(fields, conversation, forms, unknown), *conversation]
    unknown.update(fill_boxes(conversation, fields))
    return [{**conversation[0], "tools": tools}, *conversation[1:]] if (tools := tools_of(fields)) else conversation


def _asked(fields: Mapping[str, Any], name: str, forms: _Forms, counts: Mapping[Group, int]) -> list[dict[str, Any]]:
    """The turns of a question, after those of its `history`, or one of a text; items without a tag come first."""
    asked, more = string_of(fields, (name,)) or "", string_of(fields, ("input",)) if name == "instruction" else None
    answer = [] if name == "text" else [string_of(fields, (ANSWERS[name],), required=True) or ""]
    history = _history(fields) if "history" in ASKED[name] else ()
    pairs = [*history, ["\n".join(filter(None, (asked, more))), *answer]]
    questions = [list(_split(question, f"field {name}", forms)) for question, *_ in pairs]
    for group in reversed(forms.groups):
        if not any(part["type"] == group for question in questions for part in question):
            how = {_ASKED: Sampling()} if group == VIDEOS else {}
            questions[0][:0] = [{"type": group, **how} for _ in range(counts[group])]
    answer_tags = re.compile(_BOX_TAG if is_given(fields.get(OBJECTS)) else "(?!)(?P<box>)")
    turns = [
        [("user", question), *(("assistant", list(_tagged(answer, answer_tags))) for answer in answers)]
        for question, (_, *answers) in zip(questions, pairs, strict=True)
    ]
    return [{"role": role, "content": said} for turn in turns for role, said in turn]


def _history(fields: Mapping[str, Any]) -> Iterator[list[str]]:
    """The earlier questions of a row with their answers."""
    for pair in list_in(fields, "history") if is_given(fields.get("history")) else ():
        if not isinstance(pair, list) or len(pair) != len(("question", "answer")):
            raise JsonError(f"field history has {str(pair)[:60]!r}, wanted [question, answer]")
        yield [string_of({"history": text}, ("history",), required=True) or "" for text in pair]


def _system(
    fields: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]], forms: _Forms, unknown: set[str]
) -> Iterator[dict[str, Any]]:
    """The message of a row's field `system`; an empty one is none."""
    if not is_given(fields.get("system")):
        return
    if any(message["role"] == "system" for message in conversation):
        raise JsonError(
            "field system is given beside a message of role system, wanted one of them", reason="two_system_messages"
        )
    yield {"role": "system", "content": list(_parts(fields["system"], "field system", forms, unknown))}


def _messages(messages: Any, name: str, forms: _Forms, unknown: set[str]) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise JsonError(f"field {name} is {str(messages)[:60]!r}, wanted a list of messages")
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise JsonError(f"{where} is {str(message)[:60]!r}, wanted an object")
        role = _role(message, where)
        taken = OF_ROLE.get(role, MESSAGE)
        found = unknown_fields(message, taken, {**REFUSED_OF_MESSAGE, **forms.refused}, where=f"{where}: ")
        unknown.update(f"{name}.{field}" for field in found)
        content = _one_of(message, ("content", "value"), where)
        if role == CALL:
            role, content, beside = "assistant", [], {"tool_calls": calls_in(content, where)}
        else:
            beside = beside_of(message, role, where)
        parts = [] if content is None and "tool_calls" in beside else _parts(content, where, forms, unknown, name=name)
        learnt = {} if _is_learnt(message, role, where) else {"loss": False}
        add_message(made, {"role": role, "content": list(parts), **learnt, **beside})
    return made


def _role(message: Mapping[str, Any], where: str) -> str:
    given = {name: message[name] for name in ("role", "from") if message.get(name) is not None}
    for role in given.values() or (None,):
        if not isinstance(role, str) or role not in ROLES:
            raise JsonError(f"{where}: role is {str(role)[:60]!r}, wanted one of {', '.join(ROLES)}")
    return str(_one_of({name: ROLES[role] for name, role in given.items()}, ("role", "from"), where))


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


def _parts(
    content: Any, where: str, forms: _Forms, unknown: set[str], *, name: str = "system"
) -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        text = string_of({f"{where} content": content}, (f"{where} content",), required=True)
        yield from _split(text or "", where, forms)
        return
    refused = {**REFUSED_OF_PART, **forms.refused}
    for part in map(of_openai, content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            found = unknown_fields(part, TEXT_PART, refused, where=f"{where}: part text: ")
            yield from _text(string_of(part, ("text",), required=True) or "")
        elif kind in forms.groups:
            made, found = _item_part(part, kind, f"{where}: part {kind}", refused)
            yield made
        elif isinstance(kind, str) and kind in (reasons := {**REFUSED_OF_ROW, **forms.refused}):
            raise refusal(reasons[kind], f"{where}: a part is of type {kind}")
        else:
            raise JsonError(f"{where}: part {str(part)[:60]!r}, wanted one of type {forms.known}")
        if found:
            unknown.update(f"{name}.content.{field}" for field in found)


def _item_part(
    part: Mapping[str, Any], kind: str, where: str, refused: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a part that shows an item, and the names of its fields that are not taken. refused: reasons by field."""
    names = _PART_NAMES[kind]
    asked, taken = asked_of(part, kind, where)
    frames: MediaPlace | None = None
    if kind == VIDEOS and isinstance(listed := part.get(kind), list):
        part, frames = {**part, kind: None}, frames_place(listed, where)
    others = {name: reason for name, reason in refused.items() if name not in names}
    found = unknown_fields(part, frozenset(("type", *names, *taken)), others, where=f"{where}: ")
    given = {value for name in names if isinstance(value := part.get(name), str)}
    if len(given) + (frames is not None) > 1:
        raise JsonError(f"{where} names {' and '.join(sorted(given))} and more", reason="two_values")
    made = {"type": kind, kind: frames or string_of(part, names), _ASKED: asked}
    return {name: value for name, value in made.items() if value is not None}, found


def _split(text: str, where: str, forms: _Forms) -> Iterator[dict[str, Any]]:
    """The parts of a string with tags."""
    if "<" in text and (found := forms.refused_tag.search(text)):
        error = refusal(forms.tags[found[1]], f"{where} has the tag {found[0]}")
        raise JsonError(f"{error}; words that only look like it go into a part of type text", reason=error.reason)
    yield from _tagged(text, forms.tag)


def _tagged(text: str, tags: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    position = 0
    for tag in tags.finditer(text):
        yield from _text(text[position : tag.start()])
        if tag["box"]:
            yield {"type": TAGS[tag["box"]]}
        else:
            made = {"type": tag[1]} if tag[1] else {"type": "image", "image": tag[2]}
            yield {**made, _ASKED: Sampling()} if tag[1] == VIDEOS else made
        position = tag.end()
    yield from _text(text[position:])


def _text(text: str) -> Iterator[dict[str, Any]]:
    if text:
        yield {"type": "text", "text": text}
