"""The rows of samples that are made on the fly, with their lengths: made once, those with images kept under the root.

Plans are made of lengths, so the first batch needs those of all samples: headers and tokens. They are kept by recipe,
and used again as long as every file has the stat that it had.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.preprocess.group import EXCLUDING
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.preprocess.listing_folder import (
    files_of,
    manifest_in,
    moved_since,
    read_document,
    require_sound,
    save_listing,
    table_of,
)
from forebay.preprocess.text_group import TOKENS
from forebay.rows.manifest import Manifest, described
from forebay.rows.named_files import require_confined
from forebay.rows.source_table import SourceFiles
from forebay.steps.step import REJECTED
from forebay.steps.text.transcript import DETECTED_FIELDS
from forebay.store.files import sweep
from forebay.store.inputs import located
from forebay.store.key import SHORT, digest
from forebay.store.layout import LISTINGS, Array
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import localized
from forebay.store.source_files import SourceFile
from forebay.task_map import Map
from forebay.terminal import Progress

logger = logging.getLogger(__name__)


DOCUMENT = "listing.json"
_KINDS = ("failed", "excluded")
_VERSION = 6
_PIECE = 4096
"""Rows tokenised at once."""


@dataclass(frozen=True)
class Rejected:
    """The rows left out of `num_rows`, by reason, as a build counts them: bad rows, and good ones not wanted."""

    num_rows: int
    failed: Counter[str]
    excluded: Counter[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Rejected:
        """Returns what the listing left out."""
        counts = {kind: Counter(found) for kind, found in manifest.counts().items()}
        return cls(len(manifest.rows) + counts["failed"].total(), counts["failed"], counts["excluded"])

    def add(self, reason: str) -> None:
        """Counts a row that was listed and cannot be used."""
        (self.excluded if reason in EXCLUDING else self.failed)[reason] += 1

    def __str__(self) -> str:
        kinds = (("bad", self.failed), ("not wanted", self.excluded))
        told = [(kind, ", ".join(f"{reason} {count}" for reason, count in sorted(own.items()))) for kind, own in kinds]
        return "left out: " + ("; ".join(f"{kind}: {reasons}" for kind, reasons in told if reasons) or "none")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The rows that can be used, and how long they are as far as that is known without decoding.

    lengths: int32 [rows] by name. said: columns of the row table that texts were given by what was made of them, None
    where there are none. rejected: what was left out.
    """

    manifest: Manifest
    lengths: Mapping[str, Array]
    rejected: Rejected
    said: pa.Table | None = None
    listed_at_ns: int = 0

    @property
    def rows(self) -> pa.Table:
        """The rows, as of a manifest."""
        return self.manifest.rows

    @property
    def files(self) -> Sequence[SourceFile]:
        """The files, as of a manifest."""
        return self.manifest.files


def counted_rows(config: Config, groups: Groups) -> Counted:
    """Returns the rows of a config, from what was kept if that is still true; else they are listed, with progress.

    Kept are those of rows that list images, whose headers and conversations take long.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    if all(group.lists is None for group in groups.items):
        return _measured(groups, _listed(config, groups))
    manifests = list(located(config).source.places)
    name = digest({"recipe": groups.recipe.key, "manifests": manifests, "version": _VERSION})
    folder = config.cache_root / LISTINGS / name[:SHORT]
    kept = _load(folder, groups)
    if kept is not None:
        forget()
        if moved_since(config, kept.files, listed_at_ns=kept.listed_at_ns) is None:
            require_confined(kept.files, localized(config).source)
            logger.info("lengths of %d samples from %s", len(kept.rows), folder)
            return kept
    listed_at_ns = time.time_ns()
    found = _measured(groups, _listed(config, groups, map_=_with_progress))
    try:
        _save(folder, dataclasses.replace(found, listed_at_ns=listed_at_ns))
    except OSError as err:
        logger.warning("the lengths are not kept: %s cannot be written: %s", folder, err)
    return found


def _listed(config: Config, groups: Groups, *, map_: Map = map) -> Manifest:
    manifest = listed(config, groups, map_=map_)
    if manifest.unused:
        logger.warning("samples: %s", described(manifest.unused))
    return manifest


def _with_progress(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    yield from Progress(len(tasks), unit="file", desc="image headers").over(map(function, tasks))


def _measured(groups: Groups, manifest: Manifest) -> Counted:
    """Makes the text of every row; those that a build would leave out are left out."""
    rows, rejected = manifest.rows, Rejected.of(manifest)
    groups = groups.keeping(rows)
    names = SourceFiles.of(manifest.files).all_names
    counts, is_good = np.zeros(len(rows), np.int32), np.ones(len(rows), bool)
    listing = Listing(groups=groups, manifest=manifest, key="")
    told = [field.name for field in groups.text.fields() if field.name in _SAID.names]
    said: list[dict[str, Any]] = []
    with Progress(len(rows), unit="text", desc="tokenise") as bar:
        for start in range(0, len(rows), _PIECE):
            part = groups.text_rows(listing, start, min(start + _PIECE, len(rows)))
            for place, sample in enumerate(groups.text.samples(part, names), start):
                if "failure" in sample:
                    rejected.add(sample["failure"])
                    is_good[place] = False
                    continue
                counts[place] = max(len(sample.get(name, ())) for name in (TOKENS, REJECTED + TOKENS))
                if len(told) > 1:
                    said.append({name: sample[name] for name in told})
            bar.update(len(part))
    good = manifest  # a copy of all texts, where one is bad
    if not is_good.all():
        good = dataclasses.replace(manifest, rows=rows.filter(pa.array(is_good)))
    lengths = _lengths(groups, good, counts[is_good])
    table = pa.Table.from_pylist(said, schema=_SAID) if said else None
    return Counted(manifest=good, lengths=lengths, rejected=rejected, said=table)


_SAID = pa.schema(
    {
        "language": pa.large_string(),
        **{field.name: pa.large_string() if field.dtype == "str" else pa.float64() for field in DETECTED_FIELDS},
    }
)
"""The columns of rows whose languages are detected."""


def _lengths(groups: Groups, manifest: Manifest, tokens: Array) -> dict[str, Array]:
    """Returns the lengths of rows, by the names that a cache has them by, as far as they are known."""
    found: dict[str, Array] = {"num_tokens": tokens}
    items = groups.items_of(manifest)
    for group in groups.items:
        of_items = group.listed_lengths(items[group.name].table, manifest.files)
        found |= {name: items[group.name].sums(values) for name, values in of_items.items()}
    return {name: found[name].astype(np.int32) for name in groups.length_names if name in found}


def _save(folder: Path, found: Counted) -> None:
    """Keeps a listing, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    tables = {"lengths": pa.table({name: pa.array(values, pa.int32()) for name, values in found.lengths.items()})}
    if found.said is not None:
        tables["said"] = found.said
    rejected = {name: getattr(found.rejected, name) for name in ("num_rows", *_KINDS)}
    document = {"listed_at_ns": found.listed_at_ns, "rejected": rejected}
    save_listing(folder, DOCUMENT, found.manifest, tables=tables, document=document)


def _load(folder: Path, groups: Groups) -> Counted | None:
    """Returns what was kept; None where nothing was, or where it is damaged."""
    if (document := read_document(folder, DOCUMENT)) is None:
        return None
    try:
        require_sound(folder, document)
        manifest = manifest_in(folder, document, files_of(table_of(folder, "files")))
        lengths, listed_at_ns = table_of(folder, "lengths"), int(document["listed_at_ns"])
        if {*lengths.column_names} - {*groups.length_names} or len(lengths) != len(manifest.rows):
            raise ValueError(f"{folder} holds lengths of other rows")
        kinds = ({str(why): int(count) for why, count in document["rejected"][k].items()} for k in _KINDS)
        return Counted(
            manifest=manifest,
            lengths={name: lengths[name].to_numpy() for name in groups.length_names if name in lengths.column_names},
            rejected=Rejected(int(document["rejected"]["num_rows"]), *map(Counter, kinds)),
            said=table_of(folder, "said") if "said.arrow" in document["files"] else None,
            listed_at_ns=listed_at_ns,
        )
    # pyarrow's errors are ValueErrors.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as err:
        logger.warning("listing again: %s cannot be used: %s", folder, err)
        return None
