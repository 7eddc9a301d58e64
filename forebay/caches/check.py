"""`forebay cache verify`: every byte of caches hashed again; what is wrong by shard, field and sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forebay.errors import CacheError
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import ROW_BITS, Group
from forebay.store.metadata import FILE_NAME
from forebay.store.seal import VerifyReport, verify_folder
from forebay.store.shard import Shard
from forebay.store.source_files import is_derived
from forebay.terminal import CommandReport, first_of
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
                rows = _rows(shard)
                yield Damage(shard=name, fields=_fields(shard), rows=rows, samples=_ids(cache, group, number, rows))


def _fields(shard: Shard) -> list[str]:
    return [each.name for each in shard.fields if _fails(shard.column, each.name)]


def _rows(shard: Shard) -> list[int]:
    return [row for row in range(shard.entry.rows) if _fails(lambda at: shard.check_row(at, shard.row(at)), row)]


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
