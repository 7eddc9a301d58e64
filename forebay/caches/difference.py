"""`forebay cache diff`: two caches side by side: recipes, sources, samples by their ids and hashes, sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.caches.kinds import hours_of
from forebay.errors import CacheError
from forebay.progress import during
from forebay.store.cache import Cache
from forebay.store.key import SHORT, differences
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Group, Ints
from forebay.store.lookup import SOURCES_NAME
from forebay.store.metadata import check_file
from forebay.store.shard import sample_hash
from forebay.store.source_files import StoredSource, load_sources
from forebay.terminal import first_of, paragraph, table
from forebay.visible import from_here, human_bytes

_SHOWN = 5


_WORDS: Mapping[Group, str] = {"image": "images", "text": "texts"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: what it is called, its recipe, its cache; None where a config has none yet."""

    name: str
    recipe: Mapping[str, Any]
    cache: Cache | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what it is, for the document."""
        if self.cache is None:
            return {"name": self.name, "cache": None}
        metadata = self.cache.metadata
        return {
            "name": self.name,
            "cache": self.cache.place,
            "key": self.cache.key,
            "num_samples": len(self.cache),
            "hours": hours_of(metadata),
            "size_bytes": metadata.get("size_bytes"),
        }


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names that only one side has, names that both have in another state, and how many are the same."""

    only_a: Sequence[str]
    only_b: Sequence[str]
    changed: Mapping[str, Sequence[str]]
    same: int

    def to_json(self) -> dict[str, Any]:
        """Returns numbers, and the first names of each."""
        found = {"only_a": self.only_a, "only_b": self.only_b, **self.changed}
        return {
            **{name: len(names) for name, names in found.items()},
            "same": self.same,
            "first": {name: list(names[:_SHOWN]) for name, names in found.items() if names},
        }


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """How two caches differ. sources, samples: None where a side has no cache."""

    a: Side
    b: Side
    recipe: Sequence[Mapping[str, Any]]
    sources: Names | None = None
    samples: Names | None = None

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        parts = [self.sources, self.samples]
        return not self.recipe and not any(
            part is None or part.only_a or part.only_b or any(part.changed.values()) for part in parts
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `--json`."""
        return {
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "same": self.is_same,
            "recipe": [{"field": d["field"], "a": d["wanted"], "b": d["stored"]} for d in self.recipe],
            "sources": None if self.sources is None else self.sources.to_json(),
            "samples": None if self.samples is None else self.samples.to_json(),
        }

    def lines(self) -> Iterator[str]:
        """Yields both sides, the fields that differ, then sources and samples that do."""
        yield from table(["", "samples", "hours", "size", "key"], [_row("A", self.a), _row("B", self.b)], left=1)
        for letter, side in (("A", self.a), ("B", self.b)):
            yield f"{letter}: {from_here(side.name)}" + (", which has no cache yet" if side.cache is None else "")
        if not self.recipe:
            yield "the recipes are the same"
        for found in self.recipe:
            yield from paragraph(
                f"  {found['field']}: ", f"{found['wanted']!r:.200} in A, {found['stored']!r:.200} in B"
            )
        yield from _lines("source files", self.sources)
        yield from _lines("samples", self.samples)


def _row(letter: str, side: Side) -> list[str]:
    if side.cache is None:
        return [letter, "-", "-", "-", "-"]
    hours = hours_of(side.cache.metadata)
    size = side.cache.metadata.get("size_bytes")
    return [
        letter,
        f"{len(side.cache):,}",
        "-" if hours is None else f"{hours:.3g}",
        human_bytes(size) if isinstance(size, int) else "-",
        side.cache.key[:SHORT],
    ]


def _lines(what: str, names: Names | None) -> Iterator[str]:
    if names is None:
        return
    found = {
        "only in A": names.only_a,
        "only in B": names.only_b,
        **{f"other {k}": v for k, v in names.changed.items()},
    }
    yield f"{what}: {names.same:,} the same in both" + "".join(f", {len(v):,} {k}" for k, v in found.items() if v)
    for words, first in found.items():
        if first:
            yield from paragraph(f"  {words}: ", first_of(first, _SHOWN))


def compare(a: Side, b: Side, *, progress: bool) -> DiffReport:
    """Returns how two sides differ. Of samples ids and hashes are read, and no values; raises CacheError, KeyError."""
    recipe = differences(a.recipe, b.recipe)
    if a.cache is None or b.cache is None:
        return DiffReport(a=a, b=b, recipe=recipe)
    with during("compare", is_shown=progress):
        samples = _samples(a.cache, b.cache)
    return DiffReport(a=a, b=b, recipe=recipe, sources=_sources(a.cache, b.cache), samples=samples)


def _sources(a: Cache, b: Cache) -> Names:
    ours, theirs = ({(s.entry, s.name): s for s in _sources_of(cache)} for cache in (a, b))
    both = ours.keys() & theirs.keys()
    changed = [name for place in sorted(both) if ours[place].xxh3_128 != theirs[place].xxh3_128 for name in [place[1]]]
    return Names(
        only_a=[name for _, name in sorted(ours.keys() - both)],
        only_b=[name for _, name in sorted(theirs.keys() - both)],
        changed={"content": changed},
        same=len(both) - len(changed),
    )


def _sources_of(cache: Cache) -> list[StoredSource]:
    path = cache.folder / SOURCES_NAME
    if SOURCES_NAME in cache.metadata["files"]:
        check_file(path, cache.metadata["files"][SOURCES_NAME], verify=True)
    return load_sources(path)


def _samples(a: Cache, b: Cache) -> Names:
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = [cache.table(["sample_id"])["sample_id"].combine_chunks() for cache in (a, b)]
    at = pc.index_in(ids[0], value_set=ids[1])
    only_b = ids[1].filter(pc.invert(pc.is_in(ids[1], value_set=ids[0])))
    is_both = at.is_valid().to_numpy(zero_copy_only=False)
    theirs = at.drop_null().to_numpy()
    common: Any = ids[0].filter(pa.array(is_both))
    changed, is_same = {}, np.ones(len(common), bool)
    hashes = [_hashes(cache) for cache in (a, b)]
    for group in sorted(hashes[0].keys() | hashes[1].keys()):
        ours, others = (found.get(group) for found in hashes)
        differs = np.ones(len(common), bool)
        if ours is not None and others is not None:
            differs = ours[is_both] != others[theirs]
        changed[_WORDS.get(group, group)] = common.filter(pa.array(differs)).to_pylist()
        is_same &= ~differs
    return Names(
        only_a=ids[0].filter(pa.array(~is_both)).to_pylist(),
        only_b=only_b.to_pylist(),
        changed=changed,
        same=int(is_same.sum()),
    )


def _hashes(cache: Cache) -> dict[Group, Array]:
    """Returns the hash of every sample's stored values in each group, in the order of the samples.

    Where items lie that samples list says nothing of a sample: its hash is of the hashes of its items.
    """
    found: dict[Group, Array] = {}
    for group in cache.groups:
        if group not in cache.listed:
            found[group] = _of_rows(cache, group, cache.slots)
            continue
        items = cache.items(group)
        hashes, bounds = _of_rows(cache, group, items.slots), itertools.pairwise(items.offsets.tolist())
        found[group] = np.array([sample_hash([hashes[start:stop]]) for start, stop in bounds], np.int64)
    return found


def _of_rows(cache: Cache, group: Group, slots: Ints) -> Array:
    numbers, found = slots >> ROW_BITS, np.zeros(len(slots), np.int64)
    try:
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            found[here] = cache.shard(group, number).hashes[slots[here] & ROW_MASK]
    except IndexError as err:
        raise CacheError(
            f"{cache.place}: a sample names {group} items that are not there; run: forebay cache verify {cache.place}"
        ) from err
    return found
