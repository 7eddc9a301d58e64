"""The contents of a cache, made of the rows of finished shards: samples, their lengths, the counts and the lists."""

from __future__ import annotations

import contextlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config import Config
from forebay.preprocess.group import EXCLUDING, Coded, Coder, Finished
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.workspace import Failure
from forebay.store.layout import ROW_BITS, TEXT, Array, Constants, FieldSpec, Group, ListedItems
from forebay.store.lookup import CONFINED
from forebay.store.seal import Contents
from forebay.store.shard import Shard, ShardEntry, shard_fields
from forebay.version import __version__

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
    files: Mapping[str, bytes | memoryview],
    messages: Mapping[tuple[str, str], str],
) -> Contents:
    """Returns what is sealed. rows: those of the finished shards. files: what is known of the sources, by name.

    messages: by sample and reason, where known.
    """
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
        "made_with": _versions(listing, constants),
    }
    return Contents(
        fields=groups.fields(),
        shards=finished,
        items={group: items.of(kept) for group, items in rows.items.items()},
        arrays={"slots.npy": rows.slots[keep], "lengths.npy": np.ascontiguousarray(rows.lengths[:, keep])},
        files={**files, "rejected.jsonl": _jsonl(rejections)},
        document=document,
    )


def _versions(listing: Listing, constants: Constants) -> dict[str, Any]:
    return {
        "forebay": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **listing.recipe.made_with,
        **{name: value for of_one in constants.groups.values() for name, value in of_one.get("made_with", {}).items()},
    }


def _rejections(listing: Listing, rows: Rows, messages: Mapping[tuple[str, str], str]) -> list[Rejection]:
    """The rows that the listing left out, then the rows that the steps refused."""
    rejected = listing.manifest.rejected
    listed = list(zip(*(rejected[name].to_pylist() for name in _REJECTED), strict=True))
    refused = np.flatnonzero(rows.reasons.codes)
    if not len(refused):
        return listed  # `take` would put the ids of all rows together
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


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Every row of every text shard, in order, which is that of the listing: what `assemble` decides about.

    slots: int64 [rows]. reasons: why a row is no sample, empty where it is one. languages: empty where a row has none.
    lengths: int32 [names, rows], as `Groups.length_names`. failures: the bad rows that no receipt lists. items: slots
    of the items of the groups that rows list.
    """

    slots: Array
    reasons: Coded
    languages: Coded
    lengths: Array
    failures: tuple[Failure, ...] = ()
    items: Mapping[Group, ListedItems]


def read_rows(listing: Listing, finished: Finished) -> Rows:
    """Returns every row of finished shards, which are those of a listing in its order."""
    groups = listing.groups
    fields, why, spoken = groups.fields(), Coder(), Coder()

    def reasons(shard: Shard) -> Array:
        return why.column(shard, "failure")

    def read(group: Group, *makes: Callable[[Shard], Array]) -> list[Array]:
        return _columns(finished[group], shard_fields(fields, group), makes)

    codes, tokens, languages = read(TEXT, reasons, groups.text.lengths, lambda shard: _languages(shard, spoken))
    lengths = {"num_tokens": tokens}
    slots: dict[Group, ListedItems] = {}
    for group in groups.items:
        items = listing.items[group.name]
        found, counts = read(group.name, reasons, group.lengths)
        failed = items.first(found)
        # What a row is itself comes first, then its text, then what it lists.
        codes = np.where(codes, codes, failed) if items.is_listed else np.where(failed, failed, codes)
        for name, numbers in zip(group.length_names, counts.reshape(len(group.length_names), -1), strict=True):
            lengths[name] = items.sums(numbers)
        if items.offsets is not None:
            slots[group.name] = ListedItems(items.offsets, _slots(finished[group.name])[items.places])
    failures: list[Failure] = []
    for group in groups.items:
        codes = np.where(codes, codes, group.refused(lengths, listing.rows, why))
        failures += group.refusals(lengths, listing.rows, codes, why)
    return Rows(
        slots=_slots(finished[TEXT]),
        reasons=why.coded(codes),
        languages=spoken.coded(languages),
        lengths=np.stack([_as_int32(lengths[name]) for name in groups.length_names]),
        failures=tuple(failures),
        items=slots,
    )


def summary(listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:
    """Returns what metadata.json says of the samples that are kept, beside their number."""
    groups = listing.groups
    lengths = dict(zip(groups.length_names, rows.lengths, strict=True))
    found: dict[str, Any] = {"clipped": 0, "longer": 0, "languages": {}}
    for group in groups.items:
        found |= group.summary(lengths, listing.rows, listing.items[group.name], keep)
    if "language" in {field.name for field in groups.text.fields()}:
        found["languages"] = _spoken(groups, lengths, rows, keep)
    return found


def _spoken(groups: Groups, lengths: Mapping[str, Array], rows: Rows, keep: Array) -> dict[str, Any]:
    samples = rows.languages.counts(keep).tolist()
    hours = np.zeros(len(samples))
    if groups.recipe.audio is not None:
        rate_hz = groups.recipe.audio.decode.sample_rate_hz
        hours = rows.languages.counts(keep, lengths["num_audio_samples"]) / rate_hz / 3600
    return {
        name or "unknown": {"samples": count, "hours": length}
        for name, count, length in sorted(zip(rows.languages.names, samples, hours.tolist(), strict=True))
        if count
    }


def _columns(
    shards: Sequence[tuple[Path, ShardEntry]], fields: Sequence[FieldSpec], makes: Sequence[Callable[[Shard], Array]]
) -> list[Array]:
    """Returns what each function makes of all shards, put together along the last axis; one shard is mapped at once."""
    found: list[list[Array]] = [[] for _ in makes]
    for path, entry in shards:
        shard = Shard(path, entry, fields)
        for parts, make in zip(found, makes, strict=True):
            parts.append(make(shard))
        shard.drop_pages()
    return [np.concatenate(parts, axis=-1) if parts else np.zeros(0, np.int32) for parts in found]


def _slots(shards: Sequence[tuple[Path, ShardEntry]]) -> Array:
    """Returns the slot of every row of all shards, in order: int64 [rows]."""
    found = [(np.int64(index) << ROW_BITS) | np.arange(entry.rows) for index, (_, entry) in enumerate(shards)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _languages(shard: Shard, spoken: Coder) -> Array:
    if all(field.name != "language" for field in shard.fields):
        return np.zeros(shard.entry.rows, np.int32)
    return spoken.column(shard, "language")


def _as_int32(lengths: Array) -> Array:
    """Returns lengths as `lengths.npy` holds them. Raises OverflowError for a sample that no int32 can count."""
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise OverflowError(f"a sample of {lengths.max()} elements does not fit int32 lengths")
    return lengths.astype("<i4")
