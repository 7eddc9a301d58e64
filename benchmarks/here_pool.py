"""A stand-in of `forebay.preprocess.pool.Pool`, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class HerePool:
    """A pool that works in its own process: no worker starts, and none loads transformers anew."""

    devices: tuple[str, ...] = ()

    def __init__(self, num_workers: int = 1, *, shows: bool = True, modules: Sequence[str] = ()) -> None:  # noqa: ARG002
        self.num_workers, self.shows = num_workers, shows

    def __enter__(self) -> HerePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Returns `function(item)` of every item."""
        return [function(item) for item in items]

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yields every task with its result."""
        for task in tasks:
            yield task, function(task)

    def at_work(self) -> list[tuple[Any, int]]:
        """Returns nothing: who would ask waits until a task is done."""
        return []
