"""Reading the pages of coming batches ahead, while the disk is cold and only then."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from forebay.store.source import SampleSource

_BATCHES = 256
"""Batches whose pages are asked for after a batch that met the disk; asking costs microseconds a sample."""


class ReadAhead:
    """Asks for pages ahead from the first batch on whose filling waits for a disk, until a while goes by without one.

    Threads may share it: what they race for is a number of batches.
    """

    def __init__(self, source: SampleSource) -> None:
        """source: asked by its `will_need`, see `Cache.will_need`."""
        self._source = source
        self._left = 0

    def announce(self, indices: Iterable[int]) -> None:
        """Says which samples are read soon, in the order of reading."""
        if self._left:
            self._left -= 1
            self._source.will_need(indices)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notices whether the block, in its thread, waited for pages from a disk."""
        before = _major_faults()
        yield
        if _major_faults() > before:
            self._left = _BATCHES


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
