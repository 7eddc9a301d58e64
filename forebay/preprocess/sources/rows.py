"""The common form of every manifest: a columnar table of candidate samples, and what was left out of it and why.

Sample ids made unique, without losing a sample whose id was only derived from a file name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ManifestError
from forebay.preprocess.sources.naming import path_stem
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

Kind = Literal["excluded", "failed"]


ROW_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.large_string(), nullable=False),
        pa.field("explicit_id", pa.bool_(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("file", pa.int32(), nullable=False),
        pa.field("member", pa.large_string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("duration_s", pa.float64(), nullable=False),
        pa.field("stated_s", pa.float64()),
        pa.field("language", pa.large_string()),
        pa.field("prompt", pa.large_string()),
        pa.field("text", pa.large_string()),
    ]
)
"""Columns of `Manifest.rows`; strings have 64-bit offsets, so that 75 million rows fit one chunk."""


REJECTED_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.large_string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("message", pa.large_string(), nullable=False),
    ]
)
"""Columns of `Manifest.rejected`."""


CONVERSATION_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.large_string(), nullable=False),
        pa.field("explicit_id", pa.bool_(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("images", pa.list_(pa.int32()), nullable=False),
        pa.field("image_group", pa.int64(), nullable=False),
    ]
)
"""Columns of `Manifest.rows` of conversations: `text` in the canonical form, `images` (into `Manifest.images`, one for each
image part, in order), `image_group` (rows of one number share images; they are consecutive, numbers rise). Because of that
order `row`, the place in the listing, does not rise."""


IMAGE_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("member", pa.large_string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("hash", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
    ]
)
"""Columns of `Manifest.images`, each content once: a place that `MediaReader` takes (that of its first use), the xxh3-128
of the encoded bytes as 32 hex digits, width and height in pixels as displayed."""


WHOLE_FILE = -1
"""`size` of a row whose media is a file of its own (offset 0), or a row of an `hf` file (offset: the row number)."""


UNLOCATED = -2
"""`size` of a row of a tar whose member has not been looked up yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Candidate samples in the order in which shards are cut.

    files: every file whose content defines the samples, manifests first; an index into it is called a file below.
    rows: `row` int64 (position in the listing, rising), `sample_id`, `explicit_id` (given by the manifest, not derived from
    a name), `group` int32 (file that the shards are cut by: the tar, the hf file, else the manifest; rows of one group
    are consecutive), `file` int32 (file that holds the media), `member` (its name in a tar, or ""), `offset` and `size`
    int64 in bytes (see WHOLE_FILE, UNLOCATED), `duration_s` float64 (NaN: not known yet), `stated_s` float64 (what the
    manifest says of the duration, or the metadata beside the clip; null: nothing), `language`, `prompt`, `text` (null: not
    given).
    rejected: `row`, `sample_id`, `kind` ("excluded" by a setting, "failed" because of the data), `reason`, `message`.
    absent: files that are named but cannot be opened; all their rows have failed.
    images: of conversations only (see CONVERSATION_SCHEMA, which their rows are of): the different images, see IMAGE_SCHEMA.
    unused: rows by the name of a field or column that they have and nothing takes, as far as they were looked at.
    """

    files: tuple[SourceFile, ...]
    rows: pa.Table
    rejected: pa.Table = field(default_factory=lambda: REJECTED_SCHEMA.empty_table())
    absent: tuple[int, ...] = ()
    images: pa.Table | None = None
    unused: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Rejected samples whose data is to blame."""
        return sum(self.counts()["failed"].values())

    def failed(self) -> Iterator[tuple[str, str, str]]:
        """Yields (sample id, reason, message) of every sample that failed, in the order of the listing."""
        failed = self.rejected.filter(pc.equal(self.rejected["kind"], "failed"))
        yield from zip(*(failed[name].to_pylist() for name in ("sample_id", "reason", "message")), strict=True)

    def counts(self) -> dict[Kind, dict[str, int]]:
        """Returns the number of rejected samples by kind and reason."""
        counts: dict[Kind, dict[str, int]] = {"excluded": {}, "failed": {}}
        grouped = self.rejected.group_by(["kind", "reason"], use_threads=False).aggregate([([], "count_all")])
        for entry in sorted(grouped.to_pylist(), key=lambda e: str(e["reason"])):
            counts[entry["kind"]][entry["reason"]] = entry["count_all"]
        return counts


def row_table(columns: Mapping[str, Any], *, num_rows: int) -> pa.Table:
    """Returns `columns` as a table of ROW_SCHEMA; a column left out gets its "not known" value in every row.

    A `duration_s` is what the manifest says, so it is `stated_s` too.

    An empty `language` is none: a TSV cannot say it otherwise.
    """
    given_s = columns.get("duration_s")
    if given_s is not None:
        columns = {**columns, "stated_s": pc.if_else(pc.is_nan(given_s), pa.scalar(None, pa.float64()), given_s)}
    defaults = {
        "row": lambda: pa.array(np.arange(num_rows)),
        "explicit_id": lambda: constant(False, num_rows, pa.bool_()),
        "member": lambda: constant("", num_rows, pa.large_string()),
        "offset": lambda: constant(0, num_rows, pa.int64()),
        "size": lambda: constant(WHOLE_FILE, num_rows, pa.int64()),
        "duration_s": lambda: constant(float("nan"), num_rows, pa.float64()),
        "stated_s": lambda: pa.nulls(num_rows, pa.float64()),
        "language": lambda: pa.nulls(num_rows, pa.large_string()),
        "prompt": lambda: pa.nulls(num_rows, pa.large_string()),
        "text": lambda: pa.nulls(num_rows, pa.large_string()),
    }
    language = columns.get("language")
    if language is not None:
        named = pc.if_else(pc.equal(language, ""), pa.scalar(None, pa.large_string()), language)
        columns = {**columns, "language": named}
    arrays = [
        _typed(columns[f.name], f.type) if columns.get(f.name) is not None else defaults[f.name]() for f in ROW_SCHEMA
    ]
    return pa.table(arrays, schema=ROW_SCHEMA)


def rejections(rows: Any, sample_ids: Any, *, kind: Kind, reason: str | Sequence[str], message: Any) -> pa.Table:
    """Returns a table of REJECTED_SCHEMA; `reason` and `message` are one for all rows or one a row."""
    count = len(rows)
    columns = {
        "row": rows,
        "sample_id": sample_ids,
        "kind": constant(kind, count, pa.string()),
        "reason": constant(reason, count, pa.string()) if isinstance(reason, str) else reason,
        "message": constant(message, count, pa.large_string()) if isinstance(message, str) else message,
    }
    return pa.table([_typed(columns[f.name], f.type) for f in REJECTED_SCHEMA], schema=REJECTED_SCHEMA)


def constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    """Returns `count` times one value."""
    return pa.repeat(pa.scalar(value, kind), count)


def joined(*parts: Any) -> Any:
    """Returns strings put together row by row; a part is one string for all rows or a column of them."""
    text = pa.large_string()
    typed = [pa.scalar(part, text) if isinstance(part, str) else pc.cast(part, text) for part in parts]
    return pc.binary_join_element_wise(*typed, pa.scalar("", text))


def storable(text: str) -> str:
    r"""Returns a name as UTF-8 can hold it: bytes that are not UTF-8 (surrogate escapes) become `\udcXX`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def grouped(table: pa.Table) -> pa.Table:
    """Returns the rows of each `group` made consecutive, groups by their first appearance; `row` is numbered anew."""
    group = table["group"].to_numpy()
    if np.any(np.diff(group) < 0):
        # Groups are numbered by first appearance, so a stable sort by number keeps manifest order inside each.
        table = table.take(pa.array(np.argsort(group, kind="stable")))
    return table.set_column(0, ROW_SCHEMA.field("row"), pa.array(np.arange(len(table))))


def require_rows(num_rows: int, manifests: Sequence[SourceFile]) -> None:
    """Raises ManifestError where the manifests name no sample at all."""
    if not num_rows:
        raise ManifestError(
            f"{', '.join(str(m.path) for m in manifests)}: no rows; add samples or name another manifest"
        )


def _typed(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if values.type == kind else pc.cast(values, kind)
    return pa.array(values, kind)


def unique_ids(manifest: Manifest) -> Manifest:
    """Returns the manifest with every sample id once.

    An id derived from a file name that an earlier row already has becomes another: with its group's name in front where
    that row is of another group (`b/000.tar` and clip `x`: `b/000/x`), else its member or file name in full, or its row
    number in an `hf` file. Any other second occurrence, the same clip among them, fails as `duplicate_id`.
    An id depends on earlier rows only, so that growth at the end renames nothing.
    """
    rows = manifest.rows
    ids = rows["sample_id"].combine_chunks()
    seen = _first_rows(ids)
    if not (seen != np.arange(len(rows))).any():
        return manifest
    ids = _renamed(manifest, ids, seen)
    seen = _first_rows(ids)
    again = seen != np.arange(len(rows))
    rows = rows.set_column(ROW_SCHEMA.get_field_index("sample_id"), ROW_SCHEMA.field("sample_id"), ids)
    twice = rows.filter(pa.array(again))
    position = pa.array(rows["row"].to_numpy()[seen[again]])
    hint = "; give the rows of the manifest a sample_id of their own"
    message = joined("sample id ", twice["sample_id"], " occurs before, at position ", position, hint)
    failed = rejections(twice["row"], twice["sample_id"], kind="failed", reason="duplicate_id", message=message)
    return dataclasses.replace(
        manifest, rows=rows.filter(pa.array(~again)), rejected=pa.concat_tables([manifest.rejected, failed])
    )


def _renamed(manifest: Manifest, ids: pa.Array, seen: Array) -> pa.Array:
    """The ids, with another one for every derived id that stands for another clip before."""
    rows = manifest.rows
    chosen = np.flatnonzero((seen != np.arange(len(rows))) & ~rows["explicit_id"].to_numpy())
    later, earlier = rows.take(pa.array(chosen)), rows.take(pa.array(seen[chosen]))
    same_clip = _all_equal(later, earlier, ("file", "member", "offset"))
    same_group = _all_equal(later, earlier, ("group",))
    stems = pa.array([_stem(file.name) for file in manifest.files], pa.large_string())
    names = pa.array([storable(file.name) for file in manifest.files], pa.large_string())
    group, file = later["group"].combine_chunks(), later["file"].combine_chunks()
    in_full = pc.case_when(
        pc.make_struct(pc.not_equal(later["size"], WHOLE_FILE), pc.not_equal(file, group)),
        later["member"],
        names.take(file),
        joined(stems.take(group), "/", later["offset"]),
    )
    new = pc.if_else(same_group, in_full, joined(stems.take(group), "/", later["sample_id"]))
    mask = np.zeros(len(rows), bool)
    mask[chosen] = ~(same_group & same_clip)
    return pc.replace_with_mask(ids, pa.array(mask), new.combine_chunks().filter(pa.array(mask[chosen])))


def _all_equal(left: pa.Table, right: pa.Table, names: Sequence[str]) -> Array:
    equal = np.ones(len(left), bool)
    for name in names:
        equal &= np.asarray(pc.equal(left[name], right[name]))
    return equal


def _first_rows(ids: pa.Array) -> Array:
    """Position of the first row with the same id, for every row."""
    encoded = ids.dictionary_encode()
    if len(encoded.dictionary) == len(ids):
        return np.arange(len(ids))
    codes = encoded.indices.to_numpy()
    # Codes are given in the order in which values first appear: each new maximum is a first row.
    first = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    return np.asarray(first[codes])


def _stem(name: str) -> str:
    parts = [part for part in path_stem(name).split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)
