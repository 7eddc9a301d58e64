"""Rows of one image, with a class, a text or nothing; and what a column of classes is.

A class stands in a part's rows as JSON, so that nothing of it is lost before all rows are known: a name `"cat"`, an
integer `3`, a list of them, and `{"": "3"}` for a text of which nobody has said what it stands for (of a CSV, or a
member `.cls` of a tar). `with_labels` says what the column is then, in the metadata of the rows' schema.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import PICTURES, SourceColumns, SourceConfig
from forebay.config.remote import is_url
from forebay.errors import ManifestError, TextError
from forebay.rows.manifest import MeantRow, Record
from forebay.rows.meanings.canonical_chat import ListsItems, with_items
from forebay.rows.meanings.chat_fields import IDS, IMAGES
from forebay.rows.readers.arrow_files import class_names
from forebay.rows.readers.json_lines import JsonError, is_storable, parse_nested
from forebay.steps.text.label import LABELS_KEY, Labels
from forebay.store.remote.raw.raw_sources import walk
from forebay.terminal import first_of
from forebay.visible import printable

EXCLUDED = frozenset(("no_label", "no_text"))
"""Reasons of rows that lack what the config asks for: they are left out, and no failure."""
MAX_NUMBER = 1 << 31
"""Integers of classes are below it."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
logger = logging.getLogger(__name__)
_MANY = 1_000
"""Names that are classes rather than texts, even if no row shares one."""
_INTEGER = re.compile(r"(0|[1-9][0-9]{0,9})(\.0+)?")
"""Also `1.0`: so pandas writes integers of a column in which one is missing."""
_SHOWN = 5


class Untyped(str):
    """A text that may stand for an integer."""

    __slots__ = ()


def written_label(text: str) -> Any:
    """Returns the label that a text of a table stands for: a JSON list of labels, else one that has no type."""
    if text.lstrip().startswith("["):
        try:
            found = parse_nested(text)
        except JsonError:
            return Untyped(text)
        return found if isinstance(found, list) else Untyped(text)
    return Untyped(text)


class OneImage(ListsItems):
    """Rows of one image, and what their field `field` says of it. said: how messages call such rows."""

    field: ClassVar[str] = "image"
    said: ClassVar[str] = "images"

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:  # noqa: ARG002
        """Raises TextError `image_count_mismatch` for a row of no image or of several, and as `taken` does."""
        fields, items = with_items(record, ["image"])
        known = {*IDS, *IMAGES, self.field}
        unknown.update(field for field in fields.keys() - known if fields[field] is not None)
        text, images = self.taken(fields), items["image"]
        if len(images) != 1:
            raise TextError(
                "image_count_mismatch",
                f"has {len(images)} images, and a row of {self.said} has one; give a row an image",
            )
        return MeantRow(text=text, items={"image": images})

    def taken(self, fields: Mapping[str, Any]) -> str:  # noqa: ARG002
        """Returns the text of a row."""
        return ""

    def lacking(self, found: Collection[str], columns: SourceColumns) -> str | None:
        return None if self.field in ("image", *found) else str(getattr(columns, self.field))


class Labelled(OneImage):
    """An image with a class, or with several."""

    field: ClassVar[str] = "label"
    said: ClassVar[str] = "labels"

    def taken(self, fields: Mapping[str, Any]) -> str:
        value = _plain(fields.get("label"))
        if value is None:
            raise TextError("no_label", "has no label; give it one, or leave the row out")
        return _encode(value)

    def finished(self, rows: pa.Table, classes: Sequence[tuple[str, ...] | None]) -> pa.Table:
        return with_labels(rows, classes)

    def doubts(self, source: SourceConfig, rows: pa.Table) -> Iterator[str]:
        if empty := empty_classes(source):
            named = first_of([repr(printable(name)) for name in empty], _SHOWN)
            folders = "folder holds" if len(empty) == 1 else "folders hold"
            yield f"{len(empty)} {folders} no image, so no class has its name: {named}"
        classes = pc.unique(rows["text"])
        if len(classes) == 1 and len(rows) > 1:
            name = printable(classes[0].as_py())[:60]
            said = f"all {len(rows)} rows have one class, {name!r}"
            yield f"{said}: nothing can be learnt of it; give rows of another class"


class Captioned(OneImage):
    """An image with a text."""

    field: ClassVar[str] = "text"
    said: ClassVar[str] = "texts"

    def taken(self, fields: Mapping[str, Any]) -> str:
        value = fields.get("text")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise TextError("no_text", "has no text; give it one, or leave the row out")
        if not isinstance(value, str):
            several = "; for several texts of an image give a row each" if isinstance(value, list) else ""
            raise TextError("bad_text", f"its text is {str(value)[:60]!r}, wanted a string{several}")
        if not is_storable(value):
            raise TextError("bad_text", "its text holds half of a surrogate pair; correct the row")
        return value


def _plain(value: Any, *, is_inner: bool = False) -> Any:
    """Returns a label as JSON has it, None where it is none. Raises TextError for what is no class."""
    if isinstance(value, list | tuple) and not is_inner:
        return [_refuse(each) if (found := _plain(each, is_inner=True)) is None else found for each in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        # An integer beside missing values, as pandas writes a column of them.
        value = int(value) if value.is_integer() else _refuse(value)
    if isinstance(value, int) and value < MAX_NUMBER:
        return value if value >= 0 else None  # `datasets` writes -1 where nobody knows the class
    if isinstance(value, Untyped) and is_storable(value):
        return {"": str(value).strip()} if value.strip() else None
    if isinstance(value, str) and is_storable(value):
        return value or None
    return None if value is None else _refuse(value)


def _refuse(value: Any) -> Any:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    raise TextError(
        "bad_label",
        f"its label is {shown[:60]}, wanted a name, an integer from 0 to {MAX_NUMBER - 1}, or a list of either; "
        "correct the row",
    )


def declared_classes(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Returns the names of a ClassLabel's numbers, also of one in lists; None for another column."""
    names = class_names(schema, column, in_lists=True)
    return None if names is None else tuple(names)


def named_labels(values: Iterable[Any], classes: Sequence[str]) -> Iterator[Any]:
    """Yields the names of numbers of a ClassLabel; what is no such number stays as it is."""
    for value in values:
        yield [_name_of(each, classes) for each in value] if isinstance(value, list) else _name_of(value, classes)


def _name_of(value: Any, classes: Sequence[str]) -> Any:
    # A number that has no name stays, and is refused as `unknown_label` where classes are names.
    return classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value


def with_labels(rows: pa.Table, declared: Sequence[tuple[str, ...] | None]) -> pa.Table:
    """Returns rows whose text is their class as a person writes it, with what the column is in their schema.

    declared: by part, the names of all classes in their order. All classes are integers, or all are names; a text
    without a type is an integer where all classes are. Raises ManifestError for parts that declare different classes.
    """
    encoded = rows["text"].combine_chunks().dictionary_encode()
    different = [json.loads(text) for text in encoded.dictionary.to_pylist()]
    is_multi = any(isinstance(value, list) for value in different)
    flat = [each for value in different for each in (value if isinstance(value, list) else [value])]
    given = _declared(declared)
    as_numbers = given is None and all(_number(each) is not None for each in flat)
    texts = [_written(value, as_numbers=as_numbers, is_multi=is_multi) for value in different]
    column = pa.array(texts, pa.large_string()).take(encoded.indices)
    if as_numbers:
        top = max((found for each in flat if (found := _number(each)) is not None), default=-1)
        labels = Labels(names=None, count=top + 1, is_multi=is_multi)
    else:
        names = given if given is not None else tuple(sorted({_name(each) for each in flat}))
        if given is None:
            _tell_if_renumbered(flat, names)
        labels = Labels(names=names, count=len(names), is_multi=is_multi)
        if given is None and _MANY < len(names) == len(rows):
            logger.warning(
                "labels: each of %d rows has a class of its own, the first is %.60r; if these are texts of images, set "
                'text.prompt = "plain"',
                len(rows),
                names[0],
            )
    place = rows.schema.get_field_index("text")
    rows = rows.set_column(place, rows.schema.field(place), pc.cast(column, pa.large_string()))
    return rows.replace_schema_metadata({**(rows.schema.metadata or {}), LABELS_KEY: json.dumps(labels.to_json())})


def _tell_if_renumbered(flat: Sequence[Any], names: Sequence[str]) -> None:
    """Warns where one name among integers makes names of them all: they lose their numbers."""
    integers = {_name(each) for each in flat if _number(each) is not None}
    number = next((number for number, name in enumerate(names) if name in integers and name != str(number)), None)
    if number is not None:
        logger.warning(
            "labels: %d of %d classes are integers, and %.60r is none, so all are names: without text.classes %s has "
            "number %d; correct that row, or name all classes there",
            len(integers),
            len(names),
            next(_name(each) for each in flat if _number(each) is None),
            names[number],
            number,
        )


def labels_of(rows: pa.Table) -> Labels | None:
    """Returns what the column of classes of a listing's rows is; None for rows of something else."""
    found = (rows.schema.metadata or {}).get(LABELS_KEY)
    return None if found is None else Labels.from_json(json.loads(found))


def _declared(declared: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    different = {*declared}
    if len(different) > 1:
        shown = [", ".join(names[:5]) if names is not None else "none" for names in different]
        raise ManifestError(
            f"files of source.manifest declare different classes ({shown[0]}; {shown[1]}); write them with one "
            "ClassLabel, or list them apart",
            code="FB127",
        )
    return next(iter(different), None)


def _number(value: Any) -> int | None:
    """Returns the integer that a label is or may stand for."""
    if isinstance(value, dict):
        found = _INTEGER.fullmatch(value[""])
        return int(found[1]) if found and int(found[1]) < MAX_NUMBER else None
    return value if isinstance(value, int) else None


def _name(value: Any) -> str:
    return str(value[""] if isinstance(value, dict) else value)


def _written(value: Any, *, as_numbers: bool, is_multi: bool) -> str:
    """Returns a label as the rows have it: a name or digits, where one row has several a JSON list."""
    if not is_multi:
        return str(_number(value)) if as_numbers else _name(value)
    several = value if isinstance(value, list) else [value]
    return json.dumps([_number(each) if as_numbers else _name(each) for each in several], ensure_ascii=False)


def empty_classes(source: SourceConfig) -> list[str]:
    """Returns the folders right below those of `kind = "folder"` that hold no image at any depth, sorted.

    Hidden folders are none. Folders in a store have files in them, or are not there.
    """
    if source.kind != "folder":
        return []
    roots = [Path(manifest) for manifest in source.manifests if not is_url(manifest)]
    folders = [each for root in roots if root.is_dir() for each in root.iterdir()]
    return sorted(each.name for each in folders if each.is_dir() and each.name[0] != "." and not _has_image(each))


def _has_image(folder: Path) -> bool:
    files = (name for _, _, names in walk(folder) for name in names)
    return any(name.lower().endswith(PICTURES) and not name.startswith(".") for name in files)
