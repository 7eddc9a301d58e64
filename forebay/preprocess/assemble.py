"""The contents of a cache, made of finished shards: which rows are samples, their lengths, the counts and the lists."""

from __future__ import annotations

import contextlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.config import Config
from forebay.preprocess.cut import NO_TEXT
from forebay.preprocess.finished_rows import Rows, summary
from forebay.preprocess.group import Finished
from forebay.preprocess.groups import Listing
from forebay.store.layout import Constants, Group
from forebay.store.lookup import CONFINED
from forebay.store.seal import Contents
from forebay.store.source_files import dump_sources
from forebay.version import __version__

EXCLUDING = frozenset({"empty_text", "label_too_long", "no_phones", NO_TEXT, "too_long", "too_short"})
"""Reasons that say that a good sample is not wanted; all others say that a sample is bad."""

Rejection = tuple[str, str, str, str]
"""One row that is no sample: its id, whether it was filtered (`excluded`) or bad (`failed`), why, and in words."""

_REJECTED = ("sample_id", "kind", "reason", "message")


def assemble(
    config: Config,
    listing: Listing,
    finished: Finished,
    rows: Rows,
    *,
    probe: Mapping[Group, str],
    constants: Constants,
    memo: bytes,
    messages: Mapping[tuple[str, str], str],
) -> Contents:
    """Returns what is sealed. rows: those of the finished shards. messages: by sample and reason, where known."""
    groups, keep = listing.groups, rows.reasons.codes == 0
    kept = np.flatnonzero(keep)
    rejections = _rejections(listing, rows, messages)
    document = {
        "name": config.name,
        "split": config.source.split,
        "key": listing.key,
        "recipe_key": listing.recipe.key,
        "recipe": listing.recipe.document,
        "num_samples": int(keep.sum()),
        "length_names": list(groups.length_names),
        "rows_per_shard": groups.shard_rows(config.layout.rows_per_shard),
        "probe": dict(probe),
        "constants": constants.to_json(),
        "excluded": _counts(rejections, "excluded"),
        "failed": _counts(rejections, "failed"),
        "unused_fields": dict(listing.manifest.unused),
        **summary(listing, rows, keep),
        **({CONFINED: True} if config.source.confined else {}),
        "size_bytes": sum(entry.size_bytes for shards in finished.values() for _, entry in shards),
        "made_with": {"forebay": __version__, "numpy": np.__version__, "python": platform.python_version()}
        | listing.recipe.made_with,
    }
    return Contents(
        fields=groups.fields(),
        shards=finished,
        items={group: items.of(kept) for group, items in rows.items.items()},
        arrays={"slots.npy": rows.slots[keep], "lengths.npy": np.ascontiguousarray(rows.lengths[:, keep])},
        files={
            "sources.parquet": dump_sources(listing.sources()),
            "hashes.memo": memo,
            "rejected.jsonl": _jsonl(rejections),
        },
        document=document,
    )


def _rejections(listing: Listing, rows: Rows, messages: Mapping[tuple[str, str], str]) -> list[Rejection]:
    """The rows that the listing left out, then the rows that the steps refused."""
    rejected = listing.manifest.rejected
    listed = list(zip(*(rejected[name].to_pylist() for name in _REJECTED), strict=True))
    refused = np.flatnonzero(rows.reasons.codes)
    ids = listing.rows["sample_id"].take(pa.array(refused)).to_pylist()
    reasons = [rows.reasons.names[code] for code in rows.reasons.codes[refused].tolist()]
    kinds = ("excluded" if reason in EXCLUDING else "failed" for reason in reasons)
    said = (messages.get(pair, f"see: forebay explain {pair[1]}") for pair in zip(ids, reasons, strict=True))
    return [*listed, *zip(ids, kinds, reasons, said, strict=True)]


def messages_of(folder: Path) -> dict[tuple[str, str], str]:
    """Returns what a cache says of the rows that it left out, by sample and reason; nothing where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        rows = [json.loads(line) for line in (folder / "rejected.jsonl").read_bytes().splitlines()]
        return {(row["sample_id"], row["reason"]): row["message"] for row in rows}
    return {}


def _counts(rejections: Sequence[Rejection], kind: str) -> dict[str, int]:
    return dict(sorted(Counter(reason for _, found, reason, _ in rejections if found == kind).items()))


def _jsonl(rejections: Sequence[Rejection]) -> bytes:
    lines = (json.dumps(dict(zip(_REJECTED, rejection, strict=True))) for rejection in rejections)
    return "".join(f"{line}\n" for line in lines).encode("ascii")
