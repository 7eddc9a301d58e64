"""The seal of a merge or a subset: shards of the parts, linked, and what stands beside these, made anew."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.config.remote import is_url, url_or_path
from forebay.errors import CacheMismatchError, ConfigError
from forebay.preprocess.probes import beyond_promise
from forebay.store.cache import Cache, open_cache
from forebay.store.key import SHORT, TEXT, differences, digest, recipe_key, record
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Group, Ints, ListedItems
from forebay.store.lookup import CONFINED, SOURCES_NAME
from forebay.store.memo import FILE_NAME as MEMO_NAME
from forebay.store.memo import Memo
from forebay.store.metadata import check_description, check_file, foreign_values
from forebay.store.seal import Contents
from forebay.store.shard import ShardEntry, shard_name
from forebay.store.source_comparison import steps_differences, steps_of
from forebay.store.source_files import StoredSource, dump_sources, load_sources
from forebay.terminal import CommandReport
from forebay.visible import from_here, human_bytes

REJECTED = "rejected.jsonl"
_REJECTION = record({"sample_id": TEXT, "kind": TEXT, "reason": TEXT})
_NAMED = 3
"""Names of caches, splits or versions that are written out."""
Rejection = Mapping[str, str]
"""A row that is no sample: `sample_id`, `kind` (excluded or failed), `reason`."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A sealed cache and what is taken of it. kept: int64, the indices of the samples that are taken, ascending."""

    cache: Cache
    kept: Ints


def opened(place: str | os.PathLike[str], *, command: str) -> Cache:
    """Returns the cache of a folder of this machine. command: what to run once it is here, for messages.

    Raises ConfigError for a cache of a store, whose shards cannot be linked, CacheError where it is not whole.
    """
    text = url_or_path(os.fspath(place))
    cache = None if is_url(text) else open_cache(text)
    if cache is None or cache.mirror is not None:
        url = text if cache is None else cache.place
        raise ConfigError(
            f"{url} lies in a store, and shards are linked from a folder of this machine; run: forebay cache pull "
            f"{url} DIR, then forebay cache {command} DIR"
        )
    check_description(cache.folder, cache.metadata)
    if "sample_id" not in cache.column_names:
        raise CacheMismatchError(f"{cache.place} has no field sample_id; run: forebay preprocess CONFIG --rebuild")
    return cache


def require_one_recipe(caches: Sequence[Cache]) -> None:
    """Raises CacheMismatchError, with the field, both values and both caches, where values were made in two ways.

    What `[source]` chooses, names, splits and the layout of shards may differ.
    """
    for other in caches[1:]:
        first = caches[0]
        for field, one, two in _disagreements(first, other):
            raise CacheMismatchError(
                f"cannot merge {first.place} and {other.place}: {field} is {_short(one)} in the first and "
                f"{_short(two)} in the second; build both with one setting and one forebay, then merge: "
                "forebay preprocess CONFIG",
                code="FB414",
            )


def _disagreements(first: Cache, other: Cache) -> list[tuple[str, Any, Any]]:
    steps = steps_differences(first.metadata["recipe"], other.metadata["recipe"])
    found = [(row["field"], row["wanted"], row["stored"]) for row in steps]
    one, two = ({"probe": cache.metadata["probe"], "constants": _of_all(cache)} for cache in (first, other))
    for name, constants in other.constants.groups.items():
        if (what := beyond_promise(first.constants.of(name), constants)) is not None:
            found.append((f"model.{name} on its machine", "what it is", what))
    found += [(row["field"], row["wanted"], row["stored"]) for row in differences(one, two)]
    codecs = (first.metadata.get("codec"), other.metadata.get("codec"))
    found += [("vision.codec", *codecs)] if codecs[0] != codecs[1] else []
    fields: list[Mapping[str, Any]] = [{f["name"]: f for f in cache.metadata["fields"]} for cache in (first, other)]
    found += [(f"field {row['field']}", row["wanted"], row["stored"]) for row in differences(*fields)]
    for name in ("fields", "length_names"):  # their order too
        one, two = first.metadata[name], other.metadata[name]
        found += [(name, one, two)] if one != two else []
    return found


def _of_all(cache: Cache) -> dict[str, Any]:
    """Returns the constants but those of the machine: within the promise of a model these may differ."""
    return {n: value for n, value in cache.constants.items() if n.rpartition(".")[2] not in ("sample", "made_with")}


def _short(value: Any) -> str:
    text = value[:SHORT] if isinstance(value, str) and len(value) in (32, 64) else value
    return f"{text!r:.80}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A shard of a cache, which is linked."""

    cache: Cache
    group: Group
    number: int
    path: Path
    entry: ShardEntry

    def sample_bytes(self, rows: Ints) -> int:
        """Returns the bytes of the values of some of its rows."""
        with foreign_values(self.cache.folder):
            shard = self.cache.shard(self.group, self.number)
            sizes = {f.name: f.numpy_dtype.itemsize * math.prod(f.shape) for f in shard.fields}
            return sum(int(shard.lengths(name)[rows].sum()) * size for name, size in sizes.items())


class _Lot:
    """The shards of groups whose rows lie together, each once: one that several caches have, by content, is one."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.links: list[list[Link]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def moved(self, cache: Cache, slots: Ints) -> Ints:
        """Returns where rows of a cache lie in this lot, which gets the shards of these rows."""
        used, inverse = np.unique(slots >> ROW_BITS, return_inverse=True)
        files = {group: dict(enumerate(cache.shard_entries(group))) for group in self.groups}
        moved = np.zeros(len(used), np.int64)
        for place, number in enumerate(used.tolist()):
            with foreign_values(cache.folder):
                links = [
                    Link(cache=cache, group=g, number=number, path=f[number][0], entry=f[number][1])
                    for g, f in files.items()
                ]
            known = tuple(digest_ for link in links for digest_ in (link.entry.key, link.entry.xxh3_128))
            moved[place] = self._numbers.setdefault(known, len(self.links))
            self.links += [links] if moved[place] == len(self.links) else []
        return np.asarray((moved[inverse] << ROW_BITS) | (slots & ROW_MASK))


@dataclass(frozen=True, kw_only=True)
class Linked:
    """The shards that the samples of some parts and their items lie in, each once, and where these lie in them.

    shards: by group. slots: int64 [num_samples]. items: of the groups whose items samples list.
    """

    shards: Mapping[Group, Sequence[Link]]
    slots: Ints
    items: Mapping[Group, ListedItems]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Linked:
        """Returns the shards of the samples that are taken."""
        first = parts[0].cache
        together = _Lot([group for group in first.groups if group not in first.listed])
        slots = np.concatenate([together.moved(part.cache, part.cache.slots[part.kept]) for part in parts])
        lots, items = [together], {}
        for group in first.listed:
            lots.append(_Lot([group]))
            taken = [part.cache.items(group).of(part.kept) for part in parts]
            counts = np.concatenate([[0], *(np.diff(found.offsets) for found in taken)])
            moved = [lots[-1].moved(part.cache, found.slots) for part, found in zip(parts, taken, strict=True)]
            items[group] = ListedItems(np.cumsum(counts), np.concatenate(moved))
        shards = {
            group: [links[place] for links in lot.links] for lot in lots for place, group in enumerate(lot.groups)
        }
        return cls(shards={group: shards[group] for group in first.groups}, slots=slots, items=items)

    @property
    def links(self) -> list[Link]:
        """The shards of all groups."""
        return list(itertools.chain.from_iterable(self.shards.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(link.entry.size_bytes for link in self.links)

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of the values of the samples that were taken, each item of a shard once."""
        total = 0
        for group, links in self.shards.items():
            rows = np.unique(self.items[group].slots if group in self.items else self.slots)
            bounds = np.searchsorted(rows, np.arange(len(links) + 1) << ROW_BITS)
            for link, (start, stop) in zip(links, itertools.pairwise(bounds), strict=True):
                total += link.sample_bytes(rows[start:stop] & ROW_MASK)
        return total


def contents_of(
    parts: Sequence[Part], linked: Linked, *, made: Mapping[str, Any], rejections: Mapping[str, Rejection]
) -> Contents:
    """Returns what is sealed of parts. Equal parts give equal bytes.

    made: the section of the recipe document that says what this is, by its name. rejections: rows that are no samples,
    by their line in the list of them.
    """
    first = parts[0].cache
    return Contents(
        fields=tuple(first.fields.values()),
        shards={group: [(link.path, link.entry) for link in links] for group, links in linked.shards.items()},
        items=linked.items,
        arrays={"slots.npy": linked.slots, "lengths.npy": np.concatenate([_lengths(part) for part in parts], axis=1)},
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
    """Returns samples and hours by language, as a build counts them."""
    first = parts[0].cache
    if "language" not in first.fields:
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
    if "image" not in linked.shards:
        return {}
    hashes = {
        name for link in linked.shards["image"] for name in link.cache.shard("image", link.number).strings("image_hash")
    }
    return {"codec": documents[0]["codec"], "num_images": len(hashes)}


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


def _own_sources(cache: Cache) -> Sequence[StoredSource]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyReport(CommandReport):
    """The document of `forebay cache merge|subset --json`; its fields are an interface."""

    action: Literal["merge", "subset"]
    cache: str
    key: str
    made_of: list[str]
    """Keys of the caches, in their order."""
    num_samples: int
    hours: float
    languages: dict[str, Any]
    shards_linked: int
    """Files that share their bytes with the caches that this one was made of."""
    shards_copied: int
    """Files on another file system than those, which cost their bytes again."""
    size_bytes: int
    """Bytes of the shards."""
    sample_bytes: int
    """Those of them that are values of samples of this cache."""
    already_there: bool
    seconds: float
    duplicates: int = 0
    """Samples of a merge that were left out, because an earlier cache has their ids."""
    missing: int = 0
    """Ids of a list that the cache does not have."""
    repeated: int = 0
    """Lines of a list that name an id again."""

    @classmethod
    def of(
        cls,
        action: Literal["merge", "subset"],
        folder: Path,
        contents: Contents,
        *,
        parts: Sequence[Part],
        linked: Linked,
        **counts: Any,
    ) -> ManyReport:
        """Returns the report of a sealed folder; `counts` are the fields that it does not tell."""
        num_linked, num_files = _num_linked(folder, linked), len(linked.links)
        return cls(
            action=action,
            cache=str(folder),
            key=contents.document["key"],
            made_of=[part.cache.key for part in parts],
            num_samples=contents.document["num_samples"],
            hours=_hours(parts),
            languages=contents.document["languages"],
            shards_linked=num_linked,
            shards_copied=num_files - num_linked,
            size_bytes=linked.size_bytes,
            sample_bytes=linked.sample_bytes,
            **counts,
        )

    def lines(self) -> Iterator[str]:
        """Yields what the command prints."""
        done = "already there" if self.already_there else {"merge": "merged", "subset": "made"}[self.action]
        hours = f", {self.hours:.3g} hours" if self.hours else ""
        yield f"{done}: {from_here(self.cache)} ({self.num_samples:,} samples{hours}, {self.seconds:.1f} s)"
        share = f" ({100 * self.sample_bytes / self.size_bytes:.0f} %)" if self.size_bytes else ""
        yield (
            f"shards: {self.shards_linked} linked, {self.shards_copied} copied; {human_bytes(self.size_bytes)}, of "
            f"which {human_bytes(self.sample_bytes)}{share} are values of these samples"
        )
        if self.duplicates:
            yield f"duplicates: {self.duplicates:,} samples left out, an earlier cache has their ids"
        if self.missing or self.repeated:
            yield f"ids: {self.missing:,} are not in the cache, {self.repeated:,} lines name an id again"
        yield f"key: {self.key}"
        yield "to use it, in a config of the same steps:"
        yield "  [loader]"
        yield f"  cache_dir = {json.dumps(self.cache, ensure_ascii=False)}"


def _num_linked(folder: Path, linked: Linked) -> int:
    """Returns how many files of a sealed folder are files of the caches that it was made of."""
    count = 0
    for group, links in linked.shards.items():
        for number, link in enumerate(links):
            with contextlib.suppress(FileNotFoundError):  # it was there already, in another layout
                count += os.path.samefile(link.path, folder / shard_name(group, number))
    return count


def _hours(parts: Sequence[Part]) -> float:
    first = parts[0].cache
    rate_hz = first.constants.get("sample_rate_hz")
    if rate_hz is None or "num_audio_samples" not in first.lengths:
        return 0.0
    heard = sum(int(part.cache.lengths["num_audio_samples"][part.kept].sum(dtype="int64")) for part in parts)
    return heard / int(rate_hz) / 3600
