"""Some samples of a cache as a cache of its own: what `forebay cache subset` does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ConfigError
from forebay.preprocess.many.combine import Linked, Rejection, contents_of, rejections_of
from forebay.preprocess.many.parts import Part, opened
from forebay.preprocess.many.place import put, target_of
from forebay.preprocess.many.report import ManyReport
from forebay.store.cache import Cache
from forebay.store.derived import SUBSET
from forebay.store.layout import Ints
from forebay.store.row_table import strings_digest
from forebay.store.sample_ids import read_ids
from forebay.store.where import parse_where

_SHOWN = 5
"""Ids that a message lists."""


def subset(
    place: str,
    out: str,
    *,
    where: str | None = None,
    ids: Path | None = None,
    missing: Literal["refuse", "ok"] = "refuse",
    cache_root: str | None = None,
    progress: bool = False,
) -> ManyReport:
    """Makes some samples of a sealed cache a cache of its own, with its shards linked, and returns what was done.

    Samples are in the order of the cache. Shards that hold none of them are left out; of the others all bytes stay.
    where: an expression over the columns of the row table, see `forebay.store.where`. ids: a file with an id a line.
    One of the two is given. missing: what becomes of ids that the cache does not have. out: as of `merge`.
    Raises ConfigError for an expression or a list that cannot be used, or that leaves no sample.
    """
    started_s = time.monotonic()
    if (where is None) == (ids is None):
        raise ConfigError("which samples? forebay cache subset CACHE --where EXPR, or --ids FILE; one of the two")
    cache = opened(place, command="subset")
    if where is not None:
        chosen = _by_where(cache, where)
    else:
        assert ids is not None
        chosen = _by_ids(cache, ids, missing)
    part = Part(cache=cache, kept=chosen.kept)
    taken = cache.table(["sample_id"])["sample_id"].take(pa.array(chosen.kept))
    section = {"of": cache.key, "samples": strings_digest(taken), **chosen.said}
    linked = Linked.of([part])
    contents = contents_of([part], linked, made={SUBSET: section}, rejections=chosen.rejections)
    folder = target_of(out, beside=cache, cache_root=cache_root)
    counts = {"missing": chosen.missing, "repeated": chosen.repeated}
    counts["already_there"] = put(folder, contents, linked, caches=[cache], progress=progress)
    seconds = time.monotonic() - started_s
    return ManyReport.of("subset", folder, contents, parts=[part], linked=linked, seconds=seconds, **counts)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What was chosen of a cache.

    kept: int64, indices of samples. said: how, for the recipe document. rejections: of rows that were asked for and are
    no samples. missing: ids that are no samples. repeated: lines that name an id again.
    """

    kept: Ints
    said: dict[str, Any]
    rejections: dict[str, Rejection] = field(default_factory=dict)
    missing: int = 0
    repeated: int = 0


def _by_where(cache: Cache, text: str) -> _Chosen:
    where = parse_where(text, setting="--where")
    where.require_columns(cache.column_names)
    kept = np.flatnonzero(where.mask(cache.table(["index", *where.columns])))
    if not len(kept):
        raise ConfigError(f"--where {where.text}: none of the {len(cache)} samples of {cache.place} is so")
    return _Chosen(kept=kept, said={"where": where.text})


def _by_ids(cache: Cache, path: Path, missing: str) -> _Chosen:
    listed = read_ids(path, setting="--ids")
    wanted = listed.unique()
    known = cache.table(["sample_id"])["sample_id"]
    kept = np.flatnonzero(pc.is_in(known, value_set=wanted).to_numpy())
    absent = wanted.filter(pc.invert(pc.is_in(wanted, value_set=known.combine_chunks())))
    if len(absent) and missing == "refuse":
        shown = ", ".join(map(repr, absent[:_SHOWN].to_pylist())) + (", ..." if len(absent) > _SHOWN else "")
        raise ConfigError(
            f"--ids {path}: {len(absent)} of {len(wanted)} ids are no samples of {cache.place}: {shown}; correct the "
            "list, or leave them out: --missing ok",
            code="FB114",
        )
    if not len(kept):
        raise ConfigError(f"--ids {path}: none of its {len(wanted)} ids is a sample of {cache.place}", code="FB114")
    return _Chosen(
        kept=kept,
        said={},
        rejections=_rejections(cache, absent.to_pylist()),
        missing=len(absent),
        repeated=len(listed) - len(wanted),
    )


def _rejections(cache: Cache, absent: Iterable[str]) -> dict[str, Rejection]:
    asked = set(absent)
    found = rejections_of(cache) if asked else {}
    return {line: row for line, row in found.items() if row["sample_id"] in asked}
