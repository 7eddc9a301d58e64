"""Tables whose rows name images: with a conversation, a class, a text, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.init.choose import Chooser
from forebay.init.columns import Candidate, class_columns, columns_named, id_columns, text_columns
from forebay.init.conversation import USED, images_of_row, texts_of_row
from forebay.init.found import Found
from forebay.init.media import pictures_of
from forebay.init.readings.roles import Tables, only, pick, splits_note, unlike_usual
from forebay.init.reads import NOUNS, classes_of, columns_beside
from forebay.init.table import Row, Table
from forebay.rows.meanings.conversation import IMAGES


def vision_found(tables: Tables, images: Sequence[Candidate], chooser: Chooser) -> Found:
    """Returns what is found of rows that name images. images: the columns that may do so."""
    table = tables.first
    image = pick(table, "image", _of_lines(table, images), chooser) if images else None
    folder = next((each.folder for each in images if each.name == image), None) or table.path.parent
    prompt, notes = columns_beside(table, image, chooser)
    columns = vision_columns(prompt, table, image, chooser)
    is_lines = table.form == "jsonl" and not unlike_usual(**_plain_names(columns))
    rows = _rows(prompt, table, columns)
    named = [images_of_row(row, None if is_lines else image) for row, _ in rows]
    return Found(
        kind="jsonl" if is_lines else "table",
        modality="vision",
        prompt=prompt,
        manifests=tables.paths,
        source={} if folder == table.path.parent else {"image_dir": folder},
        columns={} if is_lines else unlike_usual(**columns),
        noun=NOUNS[prompt],
        count=tables.count,
        is_exact=tables.is_exact,
        pictures=pictures_of([folder / written for names in named for written in names]),
        texts=[text for _, text in rows if text],
        images_a_row=[len(names) for names in named],
        others=tuple(n for n in table.names if n not in {*USED, *columns.values()} and table.values(n)),
        notes=[*splits_note(tables.others), *notes],
        **classes_found(table, columns),
    )


def _rows(prompt: str, table: Table, columns: Mapping[str, str | None]) -> list[tuple[Row, str]]:
    """Returns the rows that hold what is read of them, and the words of each."""
    if prompt == "plain":
        return [(row, str(row.get(columns["text"] or ""))) for row in table.rows]
    if prompt != "chat":
        return [(row, "") for row in table.rows]
    words = {role: name for role, name in columns.items() if role not in ("image", "id") and name}
    return [(row, text) for row in table.rows if (text := texts_of_row(row, **words)) is not None]


def classes_found(table: Table, columns: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns how often each class was met, and whether no other one can be."""
    name = columns.get("label")
    if name is None:
        return {}
    counts = classes_of(table, name)
    counts.update(dict.fromkeys(table.classes.get(name, ()), 0))
    is_whole = name in table.classes or (table.is_exact and table.num_rows == len(table.rows))
    return {"classes": counts, "has_all_classes": is_whole}


def vision_columns(prompt: str, table: Table, image: str | None, chooser: Chooser) -> dict[str, str | None]:
    """Returns the columns that are read beside images."""
    if prompt == "chat":
        return conversation_columns(table, image, chooser)
    columns, taken = {"image": image}, [name for name in (image,) if name]
    if prompt == "label":
        columns["label"] = pick(table, "label", class_columns(table, taken=taken), chooser, may_lack=False)
    if prompt == "plain":
        columns["text"] = pick(table, "text", text_columns(table, taken=taken)[:1], chooser, may_lack=False)
    taken_now = tuple(columns.values())
    return {**columns, "id": _id_beside(table, taken_now, chooser)}


def _of_lines(table: Table, images: Sequence[Candidate]) -> Sequence[Candidate]:
    """Returns one candidate where JSON lines have `image` in some rows and `images` in others: both are read."""
    usual = [each for each in images if each.name in IMAGES]
    both = all(sum(row.get(name) is not None for name in IMAGES) <= 1 for row in table.rows)
    return usual[:1] if table.form == "jsonl" and usual and both else images


def _plain_names(columns: dict[str, str | None]) -> dict[str, str | None]:
    """Returns the columns with `images` and `conversations` under the names that are the same in JSON lines."""
    same = {"images": "image", "conversations": "messages"}
    return {role: same.get(name or "", name) for role, name in columns.items()}


def conversation_columns(table: Table, image: str | None, chooser: Chooser) -> dict[str, str | None]:
    """Returns the columns of question and answer, or of messages, beside a column of images."""
    messages = columns_named(table, "messages", taken=(image or "",))
    if messages or "column messages" in chooser.given:
        named = pick(table, "messages", messages[:1], chooser)
        return {"image": image, "messages": named, "id": _id_beside(table, (image, named), chooser)}
    questions = columns_named(table, "question", taken=(image or "",))
    question = pick(table, "question", questions[:1] or _prose(table, (image,)), chooser, may_lack=False)
    answers = columns_named(table, "answer", taken=(image or "", question or ""))
    answer = pick(table, "answer", answers[:1] or _prose(table, (image, question)), chooser, may_lack=False)
    found = _id_beside(table, (image, question, answer), chooser)
    return {"image": image, "question": question, "answer": answer, "id": found}


def _id_beside(table: Table, taken: tuple[str | None, ...], chooser: Chooser) -> str | None:
    candidates = id_columns(table, taken=[name for name in taken if name])
    return only(candidates, "id", table, chooser, is_open=False)


def _prose(table: Table, taken: tuple[str | None, ...]) -> list[Candidate]:
    return text_columns(table, taken=[name for name in taken if name])
