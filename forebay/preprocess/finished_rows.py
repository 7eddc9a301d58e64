"""The rows of finished shards: which are samples, how long they are, which items they list, and what is said of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.preprocess.coded import Coded, Coder
from forebay.preprocess.group import Finished
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.workspace import Failure
from forebay.store.layout import ROW_BITS, TEXT, Array, Group, ListedItems
from forebay.store.shard import Shard, shard_fields


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
    texts = [Shard(path, entry, shard_fields(fields, TEXT)) for path, entry in finished[TEXT]]
    codes = _column(texts, lambda shard: why.column(shard, "failure"), np.int32)
    lengths = {"num_tokens": _column(texts, groups.text.lengths, np.int64)}
    languages = _column(texts, lambda shard: _languages(shard, spoken), np.int32)
    slots: dict[Group, ListedItems] = {}
    for group in groups.items:
        items = listing.items[group.name]
        shards = [Shard(path, entry, shard_fields(fields, group.name)) for path, entry in finished[group.name]]
        failed = items.first(_column(shards, lambda shard: why.column(shard, "failure"), np.int32))
        # What a row is itself comes first, then its text, then what it lists.
        codes = np.where(codes, codes, failed) if items.is_listed else np.where(failed, failed, codes)
        counts = [group.lengths(shard) for shard in shards]
        for name, numbers in zip(group.length_names, _joined(counts, len(group.length_names)), strict=True):
            lengths[name] = items.sums(numbers)
        if items.offsets is not None:
            slots[group.name] = ListedItems(items.offsets, _slots(shards)[items.places])
    failures: list[Failure] = []
    for group in groups.items:
        late = group.refused(lengths, listing.rows, why)
        codes = np.where(codes, codes, late)
        failures += group.refusals(lengths, listing.rows, codes, why)
    return Rows(
        slots=_slots(texts),
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


def _column(shards: Sequence[Shard], make: Callable[[Shard], Array], dtype: Any) -> Array:
    return np.concatenate([np.zeros(0, dtype), *map(make, shards)])


def _joined(parts: Sequence[Array], count: int) -> Array:
    return np.concatenate([np.zeros((count, 0), np.int64), *parts], axis=1)


def _slots(shards: Sequence[Shard]) -> Array:
    """Returns the slot of every row of all shards, in order: int64 [rows]."""
    found = [
        (np.int64(index) << ROW_BITS) | np.arange(shard.entry.rows, dtype=np.int64)
        for index, shard in enumerate(shards)
    ]
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
