"""What both uncached sources do about a sample that turns out to be bad: the next good one stands in for it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from forebay.errors import SampleError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SUBSTITUTES = 100


class Substitutes:
    """Counts bad samples by reason in `failed`; threads may share it."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_told = False

    def first_good(self, make: Callable[[int], T], candidates: Iterable[int]) -> T:
        """Returns `make` of the first candidate for which it does not raise SampleError.

        Raises the last SampleError where all are bad: then it is not the samples.
        """
        last: SampleError | None = None
        for index in candidates:
            try:
                return make(index)
            except SampleError as err:
                self._note(err)
                last = err
        if last is None:
            raise ValueError("no candidate to read")
        raise last

    def _note(self, err: SampleError) -> None:
        logger.warning("reading another sample instead, %s: %s", err.reason, err)
        with self._lock:
            self.failed[err.reason] += 1
            is_first, self._is_told = not self._is_told, True
        if is_first:
            logger.warning(
                "the cache will leave such samples out, so its batches will be others: a state saved here goes on here "
                '(loader.cache = "off"), and is refused there'
            )
