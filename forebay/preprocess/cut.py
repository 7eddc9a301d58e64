"""Where shards begin and end, and what each is named by. Pure: rows in, shard keys out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.rows.kept_columns import column_of, fields_of
from forebay.steps.recipe import Recipe
from forebay.store.key import digest
from forebay.store.layout import Array, Group, format_of

NO_TEXT = "no_text"
"""Why a row without a text is left out, where its kind of source needs one."""

_ROW_COLUMNS: Mapping[Group, tuple[str, ...]] = {
    "media": ("sample_id", "member", "offset", "size"),
    "text": ("sample_id", "text", "language", "prompt"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One shard: rows [start, stop) of the listing and its key in each group."""

    index: int
    start: int
    stop: int
    num_media: int
    """Rows of the media shard: those of the listing, or the different images of them."""
    keys: Mapping[Group, str]


def cut_rows(groups: Array, *, rows_per_shard: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of every shard: up to `rows_per_shard` consecutive rows of one source file.

    groups: int [rows], the file that each row is cut by (its tar; the manifest, where media are files of their own).
    """
    if not len(groups):
        return []
    borders = np.flatnonzero(np.diff(groups)) + 1
    cuts = []
    for start, stop in zip([0, *borders.tolist()], [*borders.tolist(), len(groups)], strict=True):
        cuts += [(a, min(a + rows_per_shard, stop)) for a in range(start, stop, rows_per_shard)]
    return cuts


def name_cuts(
    recipe: Recipe,
    rows: pa.Table,
    *,
    names: Sequence[str],
    hashes: Sequence[str],
    probe: Mapping[Group, str],
    rows_per_shard: int,
    groups: Sequence[Group],
    needs_text: bool = False,
) -> Iterator[Cut]:
    """Yields every shard with its keys in these groups.

    A media key is made of the steps, the probe and, for each row, the bytes it is decoded from (its file by content and
    its place in it); a text key of the steps, the probe, and the rows' text, language, prompt, source name and kept
    columns. needs_text: rows without a text are left out as NO_TEXT.
    """
    files = rows["file"].to_numpy()
    steps: dict[Group, list[dict[str, Any]]] = {
        "media": [step.identity() for step in recipe.media_steps],
        "text": [step.identity() for step in recipe.text_steps],
    }
    by_group: dict[Group, Sequence[str]] = {"media": hashes, "text": names}
    for index, (start, stop) in enumerate(cut_rows(rows["group"].to_numpy(), rows_per_shard=rows_per_shard)):
        part = rows.slice(start, stop - start)
        keys: dict[Group, str] = {}
        used, inverse = np.unique(files[start:stop], return_inverse=True)
        for group in groups:
            document = {
                "format_version": format_of(groups),
                "group": group,
                "steps": steps[group],
                "probe": probe[group],
                "files": [by_group[group][i] for i in used.tolist()],
                "rows": columns_digest(part.select(_ROW_COLUMNS[group]), inverse),
            }
            if group == "text":
                document |= kept_document(part)
            if group == "text" and needs_text and part["text"].null_count:
                document["null_text"] = NO_TEXT
            keys[group] = digest(document)
        num_media = stop - start if "media" in groups else 0
        yield Cut(index=index, start=start, stop=stop, num_media=num_media, keys=keys)


def kept_document(rows: pa.Table) -> dict[str, Any]:
    """Returns what the key of a text shard says of the kept columns of its rows; nothing where there is none."""
    if not (kept := fields_of(rows)):
        return {}
    values = pa.table({field.name: column_of(rows, field.name) for field in kept})
    return {"columns": [[field.name, field.dtype] for field in kept], "column_values": columns_digest(values)}


def columns_digest(rows: pa.Table, files: Array | None = None) -> str:
    """Returns the xxh3-128 of the values alone: arrow's own bytes depend on slicing and chunking."""
    state = xxhash.xxh3_128(np.ascontiguousarray([] if files is None else files, np.int64).tobytes())
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        state.update(f"{name}:{len(column)}\0".encode())
        state.update(np.packbits(column.is_null().to_numpy(zero_copy_only=False)).tobytes())
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            kind = np.int64 if pa.types.is_integer(column.type) else np.float64
            column = column.fill_null(0) if column.null_count else column
            state.update(np.ascontiguousarray(column.to_numpy(), kind).tobytes())
            continue
        # Neither call is free for a column that needs it not, and there are six columns a shard.
        binary = column if column.type == pa.large_string() else column.cast(pa.large_string())
        binary = binary.fill_null("") if binary.null_count else binary
        offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
        state.update(np.diff(offsets).tobytes())
        data = binary.buffers()[2]
        state.update(memoryview(data)[offsets[0] : offsets[-1]] if data is not None else b"")
    return state.hexdigest()
