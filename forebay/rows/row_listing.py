"""A listing of one source: what its pieces and its tasks are, and in which waves these are run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.audio_facts import as_listed, locate_files
from forebay.rows.eligible import FIRST_WAVE, next_wave
from forebay.rows.image_facts import ListedImages
from forebay.rows.manifest import Manifest
from forebay.rows.named_files import NamedFiles, manifest_files
from forebay.rows.reader import FilePiece, RecordingLister, RowReader, no_records, reader_of
from forebay.rows.record import Meaning
from forebay.rows.row_pieces import ReadPiece, RowPart
from forebay.store.remote.raw.arriving import is_remote, run_on_sources
from forebay.store.source_files import SourceFile
from forebay.task_map import Map

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RowListing:
    """A listing of one source: where its rows are read from and what they mean.

    map_: runs the tasks, `map` or one over processes. is_hashed: of a store whole files are downloaded ahead, since
    they will be hashed, even if an index would do.
    """

    source: SourceConfig
    meaning: Meaning
    cache_root: str
    map_: Map = map
    is_hashed: bool = False
    reader: RowReader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", reader_of(self.source))

    @functools.cached_property
    def lister(self) -> RecordingLister:
        """How rows that are items themselves are listed and located: by column where the reader can, else by record."""
        found, own = self.reader.recordings, self.meaning.own
        if found is not None and self.meaning.by_column and found.group == own:
            return found
        if self.reader.read is no_records:
            raise ManifestError(
                f'source.kind is "{self.source.kind}", which has no rows for source.meaning = '
                f'"{self.meaning.facts.name}"; list them in a table or as JSON lines',
                code="FB144",
            )
        if own is None:
            return RecordingLister(locate=as_listed)
        return RecordingLister(locate=found.locate if found is not None and self.reader.holds_media else locate_files)

    @functools.cached_property
    def manifests(self) -> Sequence[SourceFile]:
        """The source files, with the stat that they have before they are read."""
        return manifest_files(self.source, meaning=self.meaning.facts.name)

    def pieces(self) -> Iterator[FilePiece]:
        """Yields the pieces of the source files."""
        yield from self.reader.pieces_of(self.source, self.manifests, meaning=self.meaning, cache_root=self.cache_root)

    def parts(self, pieces: Sequence[FilePiece]) -> list[RowPart]:
        """Returns what the records of pieces mean."""
        own = None if self.meaning.lists_all else self.lister.read
        read = ReadPiece(own or self.reader.read)
        return self.run(read, pieces, lambda piece: [piece.path], total=len(self.manifests))

    def run(
        self, function: Callable[[T], R], tasks: Sequence[T], needs: Callable[[T], Sequence[str]], *, total: int
    ) -> list[R]:
        """Returns `function(task)` of every task, in their order."""
        return run_on_sources(self.map_, function, tasks, needs, is_remote=is_remote(self.source), total=total)

    def images(self) -> ListedImages:
        """Returns the images that rows list, none yet."""
        files = NamedFiles(self.manifests, self.source)
        return ListedImages(self.source, files, self.map_, self.reader, self.cache_root)

    def in_waves(
        self,
        tasks: Iterator[T],
        run: Callable[[Sequence[T]], Sequence[R]],
        judge: Callable[[Sequence[R], bool], tuple[Manifest | None, int]],
        *,
        first: int | None,
        total: int | None = None,
    ) -> Manifest:
        """Returns what a judge makes of the results of tasks, of no more of these than it takes.

        judge: (results so far, whether they are all) -> (the listing, or None where more is needed; the good rows).
        first: tasks of the first wave; None: all. total: of all tasks, where that is known.
        """
        results: list[R] = []
        wave = first
        while True:
            batch = list(itertools.islice(tasks, wave))
            results += run(batch)
            is_all = wave is None or len(batch) < wave or len(results) == total
            manifest, rows = judge(results, is_all)
            if manifest is not None:
                return manifest
            remote = is_remote(self.source)
            wave = next_wave(wave or 1, looked_at=len(results), rows=rows, source=self.source, is_remote=remote)

    @property
    def first_wave(self) -> int:
        """Tasks that are run at once, at first, where the rest of them may be needless."""
        return 1 if is_remote(self.source) else FIRST_WAVE

    def is_enough(self, num_good: int) -> bool:
        """Whether so many rows are all that are wanted."""
        return self.source.max_samples is not None and num_good >= self.source.max_samples
