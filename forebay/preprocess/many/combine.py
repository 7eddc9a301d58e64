"""What is sealed of the parts of a merge or a subset: their shards, linked, and what stands beside these, made anew."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forebay.preprocess.many.parts import Part
from forebay.store.cache import Cache
from forebay.store.derived import steps_of
from forebay.store.key import digest, recipe_key
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Ints
from forebay.store.lookup import CONFINED, SOURCES_NAME
from forebay.store.memo import FILE_NAME as MEMO_NAME
from forebay.store.memo import Memo
from forebay.store.metadata import check_file, foreign_values
from forebay.store.schema import TEXT, record
from forebay.store.seal import Contents
from forebay.store.shard import ShardEntry
from forebay.store.source_files import StoredSource, dump_sources, load_sources

REJECTED = "rejected.jsonl"
_REJECTION = record({"sample_id": TEXT, "kind": TEXT, "reason": TEXT})
_NAMED = 3
"""Names of caches, splits or versions that are written out."""

Rejection = Mapping[str, str]
"""A row that is no sample: `sample_id`, `kind` (excluded or failed), `reason`."""

Entries = tuple[tuple[Path, ShardEntry], ...]
"""File and entry of the shards of one number, a group each."""


@dataclass(frozen=True, kw_only=True)
class Linked:
    """The shards that the samples of some parts lie in, each once, and where each sample lies in them.

    shards: cache, number in that cache, and files, of every shard. slots: int64 [num_samples].
    """

    shards: Sequence[tuple[Cache, int, Entries]]
    slots: Ints

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Linked:
        """Returns the shards of the samples that are taken. A shard that several caches have, by content, is one."""
        numbers: dict[tuple[str, ...], int] = {}
        shards: list[tuple[Cache, int, Entries]] = []
        slots = [np.zeros(0, np.int64)]
        for part in parts:
            cache = part.cache
            taken = cache.slots[part.kept]
            used, inverse = np.unique(taken >> ROW_BITS, return_inverse=True)
            files = [cache.shard_entries(group) for group in cache.groups]
            moved = np.zeros(len(used), np.int64)
            for place, number in enumerate(used.tolist()):
                entries = tuple(group[number] for group in files)
                known = tuple(digest_ for _, entry in entries for digest_ in (entry.key, entry.xxh3_128))
                moved[place] = numbers.setdefault(known, len(shards))
                shards += [(cache, number, entries)] if moved[place] == len(shards) else []
            slots.append((moved[inverse] << ROW_BITS) | (taken & ROW_MASK))
        return cls(shards=shards, slots=np.concatenate(slots))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for _, _, entries in self.shards for _, entry in entries)

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of the values of the samples that were taken, each image of a shard once."""
        total = 0
        for cache, number, rows in self._rows():
            with foreign_values(cache.folder):
                total += _row_bytes(cache, number, rows)
        return total

    def _rows(self) -> Iterator[tuple[Cache, int, Ints]]:
        """Yields every shard with the rows of it that are samples."""
        ordered = np.sort(self.slots)
        bounds = np.searchsorted(ordered, np.arange(len(self.shards) + 1) << ROW_BITS)
        for place, (cache, number, _) in enumerate(self.shards):
            yield cache, number, ordered[bounds[place] : bounds[place + 1]] & ROW_MASK


def _row_bytes(cache: Cache, number: int, rows: Ints) -> int:
    total = 0
    for group in cache.groups:
        shard = cache.shard(group, number)
        found = rows if group == "text" else _media_rows(cache, number, rows)
        for field in shard.fields:
            counts = shard.lengths(field.name)[found].sum()
            total += int(counts) * field.numpy_dtype.itemsize * math.prod(field.shape)
    return total


def _media_rows(cache: Cache, number: int, rows: Ints) -> Ints:
    """Returns the media rows of text rows: the same places, or the images that they name, each once."""
    if "media_rows" not in cache.metadata:
        return rows
    values, offsets = cache.shard("text", number).column(cache.metadata["media_rows"])
    is_taken = np.zeros(len(offsets) - 1, bool)
    is_taken[rows] = True
    return np.asarray(np.unique(values[np.repeat(is_taken, np.diff(offsets))]))


def contents_of(
    parts: Sequence[Part], linked: Linked, *, made: Mapping[str, Any], rejections: Mapping[str, Rejection]
) -> Contents:
    """Returns what is sealed of parts. Equal parts give equal bytes.

    made: the section of the recipe document that says what this is, by its name. rejections: rows that are no samples,
    by their line in the list of them.
    """
    first = parts[0].cache
    groups = enumerate(first.groups)
    return Contents(
        fields=tuple(first.fields.values()),
        shards={group: [entries[place] for _, _, entries in linked.shards] for place, group in groups},
        arrays={
            "slots.npy": linked.slots,
            "lengths.npy": np.concatenate([_lengths(part) for part in parts], axis=1),
        },
        files={
            SOURCES_NAME: dump_sources(_sources(parts)),
            MEMO_NAME: _memo(parts),
            REJECTED: "".join(f"{line}\n" for line in rejections).encode("utf-8"),
        },
        document=_document(parts, linked, made=made, rejections=list(rejections.values())),
    )


def rejections_of(cache: Cache) -> dict[str, Rejection]:
    """Returns the rows of a cache that are no samples, by their line in the list of them, after checking it."""
    data = _file(cache, REJECTED)
    with foreign_values(cache.folder):
        rows = {line: json.loads(line) for line in data.decode("utf-8").split("\n") if line}
        for row in rows.values():
            _REJECTION(row, "it")
    return rows


def _document(
    parts: Sequence[Part], linked: Linked, *, made: Mapping[str, Any], rejections: Sequence[Rejection]
) -> dict[str, Any]:
    documents = [part.cache.metadata for part in parts]
    first = documents[0]
    recipe = {**steps_of(first["recipe"]), "source": _shared([d["recipe"].get("source") for d in documents]), **made}
    key = recipe_key(recipe)
    return {
        "name": _joined(document["name"] for document in documents),
        "split": _joined(document["split"] for document in documents),
        "key": digest({"recipe_key": key, "made_of": [part.cache.key for part in parts]}),
        "recipe_key": key,
        "recipe": recipe,
        "made_of": [_origin(part) for part in parts],
        "num_samples": len(linked.slots),
        "length_names": first["length_names"],
        "rows_per_shard": max(document["rows_per_shard"] for document in documents),
        "probe": first["probe"],
        "constants": first["constants"],
        **{kind: _counts(rejections, kind) for kind in ("excluded", "failed")},
        "clipped": min(sum(document["clipped"] for document in documents), _num_reaching(parts)),
        # Which ones they are stands in no cache: at most so many are left.
        "longer": min(sum(document["longer"] for document in documents), len(linked.slots)),
        "unused_fields": dict(sum((Counter(document["unused_fields"]) for document in documents), Counter())),
        "languages": _languages(parts),
        **_images(linked, documents),
        **({CONFINED: True} if all(document.get(CONFINED) is True for document in documents) else {}),
        "size_bytes": linked.size_bytes,
        "made_with": {name: _joined(d["made_with"].get(name, "?") for d in documents) for name in first["made_with"]},
    }


def _origin(part: Part) -> dict[str, Any]:
    """Returns what there is to say of one cache that a cache was made of."""
    metadata = part.cache.metadata
    names = ("key", "name", "split", "recipe_key", "num_samples", "made_of")
    said = {name: metadata[name] for name in names if name in metadata}
    return {**said, "source": metadata["recipe"].get("source"), "taken": len(part.kept)}


def _shared(found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns the settings that all sections have alike."""
    sections = [section or {} for section in found]
    return {name: value for name, value in sections[0].items() if all(s.get(name) == value for s in sections)}


def _joined(texts: Iterable[str]) -> str:
    """Returns different texts as one, in their order."""
    found = list(dict.fromkeys(texts))
    return "+".join(found[:_NAMED]) + (f"+{len(found) - _NAMED}" if len(found) > _NAMED else "")


def _counts(rejections: Sequence[Mapping[str, str]], kind: str) -> dict[str, int]:
    return dict(sorted(Counter(row["reason"] for row in rejections if row["kind"] == kind).items()))


def _lengths(part: Part) -> Array:
    names = part.cache.metadata["length_names"]
    return np.stack([np.asarray(part.cache.lengths[name])[part.kept] for name in names])


def _languages(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns samples and hours by language, as a build counts them; images have no language."""
    first = parts[0].cache
    if "media_rows" in first.metadata:
        return {}
    samples: Counter[str] = Counter()
    spoken: Counter[str] = Counter()
    for part in parts:
        nothing = np.zeros(len(part.cache), np.int32)
        names, codes = part.cache.categories("language") or ([""], nothing)
        kept, durations = codes[part.kept], part.cache.lengths.get("num_audio_samples", nothing)
        heard = np.bincount(kept, durations[part.kept], len(names))
        samples.update(dict(zip(names, np.bincount(kept, minlength=len(names)).tolist(), strict=True)))
        spoken.update(dict(zip(names, heard.astype(np.int64).tolist(), strict=True)))
    rate_hz = first.constants.get("sample_rate_hz", 1)
    return {
        name or "unknown": {"samples": count, "hours": spoken[name] / rate_hz / 3600}
        for name, count in sorted(samples.items())
        if count
    }


def _num_reaching(parts: Sequence[Part]) -> int:
    """Returns how many samples are as long as a clip may be: only of these more may have been there."""
    first = parts[0].cache
    clip_s = (first.metadata["recipe"].get("audio") or {}).get("clip_s")
    if clip_s is None or "num_audio_samples" not in first.lengths:
        return 0
    limit = round(clip_s * first.constants["sample_rate_hz"])
    return sum(int((part.cache.lengths["num_audio_samples"][part.kept] >= limit).sum()) for part in parts)


def _images(linked: Linked, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what metadata.json says of images alone."""
    if "media_rows" not in documents[0]:
        return {}
    count = sum(document["num_images"] for document in documents)
    if linked.shards and "image_hash" in linked.shards[0][0].fields:
        count = len({name for cache, number, _ in linked.shards for name in _image_hashes(cache, number)})
    return {"codec": documents[0]["codec"], "media_rows": documents[0]["media_rows"], "num_images": count}


def _image_hashes(cache: Cache, number: int) -> list[str]:
    return cache.shard("media", number).strings("image_hash")


def _sources(parts: Sequence[Part]) -> list[StoredSource]:
    """Returns the files that all were made of; those of each cache keep their order, and get entries of their own.

    Caches of the same files share the entries.
    """
    found: dict[tuple[StoredSource, ...], int] = {}
    sources: list[StoredSource] = []
    entries = 0
    for part in parts:
        own = tuple(_own_sources(part.cache))
        if own in found:
            continue
        found[own] = entries
        sources += [replace(source, entry=source.entry + entries) for source in own]
        entries += 1 + max((source.entry for source in own), default=-1)
    return sources


def _own_sources(cache: Cache) -> list[StoredSource]:
    if SOURCES_NAME not in cache.metadata["files"]:
        return []
    _file(cache, SOURCES_NAME)
    return load_sources(cache.folder / SOURCES_NAME)


def _memo(parts: Sequence[Part]) -> bytes:
    memo = Memo(parts[0].cache.folder)
    for part in parts[1:]:
        memo.add_file(part.cache.folder / MEMO_NAME)
    return memo.dump()


def _file(cache: Cache, name: str) -> bytes:
    """Returns a file beside the shards, empty where there is none. Raises CacheCorruptError where it is damaged."""
    entry = cache.metadata["files"].get(name)
    if entry is None:
        return b""
    check_file(cache.folder / name, entry, verify=True)
    return (cache.folder / name).read_bytes()
