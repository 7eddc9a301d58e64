"""`forebay cache verify` hashes every byte of caches again: what is wrong by shard, field and sample.

`forebay cache diff` puts two caches side by side: recipes, sources, samples by their ids and hashes, sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forebay.caches.kinds import hours_of
from forebay.errors import CacheError
from forebay.store.cache import Cache, open_cache
from forebay.store.key import SHORT, differences
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Group, Ints
from forebay.store.lookup import SOURCES_NAME
from forebay.store.metadata import FILE_NAME, check_file
from forebay.store.seal import VerifyReport, verify_folder
from forebay.store.shard import Shard, sample_hash
from forebay.store.source_comparison import is_derived
from forebay.store.source_files import StoredSources, load_sources
from forebay.terminal import CommandReport, during, first_of, paragraph, table
from forebay.visible import from_here, human_bytes, printable

T = TypeVar("T")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Damage(CommandReport):
    """The damaged parts of a shard: fields by their checksums, samples by their hashes and ids."""

    shard: str
    fields: Sequence[str]
    rows: Sequence[int]
    samples: Sequence[str]

    def words(self) -> str:
        """Returns it for a line."""
        fields = ", ".join(self.fields) or "no field alone"
        samples = f"; samples {first_of(list(map(printable, self.samples)), _SHOWN)}" if self.samples else ""
        return f"{self.shard}: damaged in {fields}{samples}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of verifying one cache. mend: the command that makes damaged shards again."""

    place: str
    report: VerifyReport
    damages: Sequence[Damage] = ()
    mend: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns its part of the document."""
        mend = {"mend": self.mend} if self.mend else {}
        damages = [damage.to_json() for damage in self.damages]
        return {"cache": self.place, **self.report.to_json(), "damages": damages, **mend}

    def lines(self) -> Iterator[str]:
        """Yields a line where all is well, else what is wrong and how to mend it."""
        place = from_here(self.place)
        if self.report.ok:
            yield f"{place}: all {human_bytes(self.report.checked_bytes)} are as they were sealed"
            return
        number = len(self.report.problems)
        yield f"{place}: {number} file{'s are' if number > 1 else ' is'} wrong"
        for problem in self.report.problems:
            yield f"  {problem.partition('; run:')[0]}"
        for damage in self.damages:
            yield f"  {damage.words()}"
        yield f"  {'run: ' if self.mend.startswith('forebay') else ''}{self.mend}"


@dataclass(kw_only=True)
class CheckReport:
    """The result of verifying caches."""

    checked: list[Checked] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(one.report.ok for one in self.checked)

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `--json`."""
        return {"ok": self.ok, "caches": [one.to_json() for one in self.checked]}

    def lines(self) -> Iterator[str]:
        """Yields what each cache's verifying found."""
        for one in self.checked:
            yield from one.lines()


def check(folder: Path, *, place: str, config: str | None, progress: bool) -> Checked:
    """Returns what verifying a cache finds. config: the file of the config that made it, None where it is not known."""
    report = verify_folder(folder, progress=progress)
    if report.ok:
        return Checked(place=place, report=report)
    damages: list[Damage] = []
    derived = False
    try:
        cache = open_cache(folder, verify="never")
        derived = is_derived(cache.metadata["recipe"])
        if report.place is None:
            damages = list(_damages(cache, report))
    except CacheError:  # it is among the problems
        pass
    mend = _mend(place, report, config=config, derived=derived)
    return Checked(place=place, report=report, damages=damages, mend=mend)


def _mend(place: str, report: VerifyReport, *, config: str | None, derived: bool) -> str:
    if report.place is not None:
        return f"forebay cache push DIR {report.place} with a copy that is whole"
    if derived:
        again = "then make it of its caches again: forebay cache merge or subset"
        return f"forebay cache rm {from_here(place)} --yes --force; {again}"
    if all("does not belong to this cache" in problem for problem in report.problems):
        return f"move those files out of {from_here(place)}, which itself is whole"
    metadata = any(FILE_NAME in problem for problem in report.problems)
    return f"forebay preprocess {config or 'CONFIG'} --{'rebuild' if metadata else 'verify'}"


def _damages(cache: Cache, report: VerifyReport) -> Iterator[Damage]:
    """Yields what is damaged of every shard whose file is wrong and can still be mapped."""
    for group in cache.groups:
        for number, (path, _) in enumerate(cache.shard_entries(group)):
            name = path.relative_to(cache.folder).as_posix()
            if any(problem.startswith(str(path)) for problem in report.problems):
                try:
                    shard = cache.shard(group, number)
                except CacheError:  # cut off, or gone: the file's own line says so
                    continue
                rows, fields = _rows(shard), [each.name for each in shard.fields if _fails(shard.column, each.name)]
                yield Damage(shard=name, fields=fields, rows=rows, samples=_ids(cache, group, number, rows))


def _rows(shard: Shard) -> list[int]:
    def check(row: int) -> None:
        shard.check_row(row, [*shard.row(row).values()])

    return [row for row in range(shard.entry.rows) if _fails(check, row)]


def _fails(look: Callable[[T], object], of: T) -> bool:
    try:
        look(of)
    except (CacheError, ValueError, IndexError):
        return True
    return False


def _ids(cache: Cache, group: Group, number: int, rows: Sequence[int]) -> list[str]:
    """Returns the ids of the samples of damaged rows, as far as they can be read."""
    if group in cache.listed:  # these are of several samples
        return []
    try:
        found = [(cache.slots == (number << ROW_BITS | row)).nonzero()[0].tolist() for row in rows]
        return [cache.sample_id(index) for indices in found for index in indices]
    except CacheError:
        return []


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


def _sources_of(cache: Cache) -> StoredSources:
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
