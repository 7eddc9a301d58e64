"""Which rows of a manifest are candidates: those that the filters of `[source]` leave, and every sample id once.

Each row that is left out has its reason. A sample whose id was only derived from a file name gets another one instead.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.equal_values import first_rows
from forebay.rows.manifest import ROW_SCHEMA, WHOLE_FILE, Kind, Manifest, joined, rejections, storable
from forebay.rows.named_files import path_stem
from forebay.rows.source_table import SourceFiles
from forebay.store.layout import Array
from forebay.terminal import first_of

logger = logging.getLogger(__name__)
FIRST_WAVE = 8
"""Tasks that are run at once, at first, where `max_samples` may make the rest of them needless."""
_MAX_LANGUAGES = 20
"""That a warning lists."""


def selected_rows(rows: pa.Table, selected: slice, source: SourceConfig, *, is_all: bool) -> pa.Table:
    """Returns the rows that `source.rows` selects. Raises ManifestError where there is none, and no others follow."""
    named, chosen = ", ".join(source.manifests), np.arange(len(rows), dtype=np.int64)[selected]
    if is_all and not len(rows):
        raise ManifestError(f"{named}: no rows; add samples or name another manifest", code="FB204")
    if is_all and not len(chosen):
        raise ManifestError(
            f"{named}: source.rows is {source.rows}, which selects none of {len(rows)} rows; correct it", code="FB204"
        )
    return rows if source.rows is None else rows.take(pa.array(chosen))


def apply_filters(manifest: Manifest, source: SourceConfig) -> Manifest:
    """Returns the rows that the filters of a config leave; the others are in `rejected` as "excluded".

    A duration that no clip has (negative, infinite) fails its row, as `bad_metadata`. The reasons of others, the first
    that holds: `excluded_by_id`, `language`, `too_short`, `too_long` (with `overlong = "drop"` only: `keep` and `clip`
    keep the row). A duration that is not known yet passes, so the same filters are applied before
    and after durations are read. Languages are compared as written but for case; a row without a language is not in
    `source.languages`. Transcripts are not looked at: an edited text must not move the cut of the media.
    """
    seconds = manifest.rows["duration_s"]
    is_none = pc.or_(pc.less(seconds, 0), pc.is_inf(seconds))
    named = " s is no duration; correct the manifest"
    manifest = _reject(manifest, is_none, "bad_metadata", lambda r: joined(r["duration_s"], named), kind="failed")
    if source.exclude:
        listed = pc.is_in(manifest.rows["sample_id"], value_set=pa.array(source.exclude, pa.large_string()))
        manifest = _reject(manifest, listed, "excluded_by_id", "its id is in source.exclude")
    if source.languages is not None:
        wanted = pa.array(sorted({language.lower() for language in source.languages}), pa.large_string())
        known = pc.is_in(pc.utf8_lower(manifest.rows["language"]), value_set=wanted)
        wrong = f" is not in source.languages {list(source.languages)}"
        manifest = _reject(
            manifest,
            pc.invert(known),
            "language",
            lambda rows: joined("language ", pc.fill_null(rows["language"], "(none)"), wrong),
        )
    if source.min_duration_s > 0:
        short = pc.less(manifest.rows["duration_s"], source.min_duration_s)
        bound = f" s is below source.min_duration_s {source.min_duration_s:g}"
        manifest = _reject(manifest, short, "too_short", lambda rows: joined(rows["duration_s"], bound))
    if source.max_duration_s is not None and source.overlong == "drop":
        long = pc.greater(manifest.rows["duration_s"], source.max_duration_s)
        bound = f" s is above source.max_duration_s {source.max_duration_s:g}"
        manifest = _reject(manifest, long, "too_long", lambda rows: joined(rows["duration_s"], bound))
    return manifest


def name_absent_languages(rows: pa.Table, source: SourceConfig) -> None:
    """Logs which of `source.languages` no row has, and which languages there are."""
    found = pc.unique(pc.utf8_lower(rows["language"])).to_pylist()
    absent = [language for language in source.languages or () if language.lower() not in found]
    if not absent:
        return
    counts = pc.value_counts(pc.fill_null(rows["language"], "(none)")).to_pylist()
    counts.sort(key=lambda entry: (-entry["counts"], entry["values"]))
    there = first_of([f"{entry['values']} ({entry['counts']})" for entry in counts], _MAX_LANGUAGES)
    logger.warning(
        "source.languages: no row of %s has %s; there are %s",
        ", ".join(source.manifests),
        ", ".join(absent),
        there or "none",
    )


def next_wave(wave: int, *, looked_at: int, rows: int, source: SourceConfig, is_remote: bool) -> int:
    """Returns how many tasks to run next where `max_samples` makes some of them needless; rows: what `looked_at` gave.

    What a store is asked for in vain costs a download: of it no more than what the rows so far let expect.
    """
    if not is_remote or source.max_samples is None:
        return 2 * wave
    return max(1, math.ceil((source.max_samples - rows) * looked_at / rows)) if rows else 2 * wave


def take_first(
    manifest: Manifest, max_samples: int | None, *, is_all: bool = True, is_of_tars: bool = False
) -> Manifest:
    """Returns the first `max_samples` rows, and what was rejected before the last of them: the rest was not looked at.

    Files that no row left needs are taken off the list where only a manifest's later rows named them. Tars that are
    listed themselves (is_of_tars) stay, and count as absent: their content decides nothing. is_all: all was looked at.
    """
    if max_samples is None or len(manifest.rows) < max_samples + is_all:
        return manifest
    rows = manifest.rows.take(pa.array(np.arange(max_samples)))  # a slice would keep all of them in memory
    rejected = manifest.rejected.filter(pc.less(manifest.rejected["row"], rows["row"][-1]))
    used = 1 + max(pc.max(rows["file"]).as_py(), pc.max(rows["group"]).as_py())
    used = max([used, *(np.flatnonzero(SourceFiles.of(manifest.files).is_listed) + 1).tolist()[-1:]])
    absent = tuple(number for number in manifest.absent if number < used)
    absent += unneeded(manifest, rows) if is_of_tars else ()
    return dataclasses.replace(manifest, files=manifest.files[:used], rows=rows, rejected=rejected, absent=absent)


def unneeded(manifest: Manifest, rows: pa.Table) -> tuple[int, ...]:
    """Returns the tars behind that of the last of some rows."""
    last = pc.max(rows["group"]).as_py()
    return tuple(number for number in range(last + 1, len(manifest.files)) if number not in manifest.absent)


def _reject(
    manifest: Manifest, out: Any, reason: str, message: Callable[[pa.Table], Any] | str, *, kind: Kind = "excluded"
) -> Manifest:
    out = pc.fill_null(out, fill_value=False)
    if not pc.any(out).as_py():
        return manifest
    gone = manifest.rows.filter(out)
    rejected = rejections(
        gone["row"],
        gone["sample_id"],
        kind=kind,
        reason=reason,
        message=message if isinstance(message, str) else message(gone),
    )
    return dataclasses.replace(
        manifest, rows=manifest.rows.filter(pc.invert(out)), rejected=pa.concat_tables([manifest.rejected, rejected])
    )


def unique_ids(manifest: Manifest) -> Manifest:
    """Returns the manifest with every sample id once.

    An id derived from a file name that an earlier row already has becomes another: with its group's name in front where
    that row is of another group (`b/000.tar` and clip `x`: `b/000/x`), else its member or file name in full, or its row
    number in an `hf` file. Any other second occurrence, the same clip among them, fails as `duplicate_id`.
    An id depends on earlier rows only, so that growth at the end renames nothing.
    """
    rows = manifest.rows
    seen = first_rows(rows["sample_id"])
    if not (seen != np.arange(len(rows))).any():
        return manifest
    ids = _renamed(manifest, rows["sample_id"].combine_chunks(), seen)
    seen = first_rows(ids)
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
    files = SourceFiles.of(manifest.files)
    parts = [path_stem(name).split("/") for name in files.shown_names]
    stems = pa.array(["/".join(p for p in part if p not in {"", ".", ".."}) for part in parts], pa.large_string())
    names = pa.array(map(storable, files.all_names), pa.large_string())
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
