"""The column of classes of a listing: what it is, once all rows are known, and which classes there are.

A listing's rows say it in the metadata of their schema, so that it goes where the rows go.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ManifestError
from forebay.rows.meanings.reading import MAX_NUMBER
from forebay.rows.readers.arrow_files import class_names
from forebay.steps.text.label import Labels

logger = logging.getLogger(__name__)

_KEY = b"forebay.labels"
_MANY = 1_000
"""Names that are classes rather than texts, even if no row shares one."""
_INTEGER = re.compile(r"(0|[1-9][0-9]{0,9})(\.0+)?")
"""Also `1.0`: so pandas writes integers of a column in which one is missing."""


def declared_classes(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Returns the names of a ClassLabel's numbers, also of one in lists; None for another column."""
    names = class_names(schema, column, in_lists=True)
    return None if names is None else tuple(names)


def named_labels(values: Iterable[Any], classes: Sequence[str]) -> Iterator[Any]:
    """Yields the names of numbers of a ClassLabel; what is no such number stays as it is."""
    for value in values:
        yield [_named(each, classes) for each in value] if isinstance(value, list) else _named(value, classes)


def _named(value: Any, classes: Sequence[str]) -> Any:
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
    return rows.replace_schema_metadata({**(rows.schema.metadata or {}), _KEY: json.dumps(labels.to_json())})


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
    found = (rows.schema.metadata or {}).get(_KEY)
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
