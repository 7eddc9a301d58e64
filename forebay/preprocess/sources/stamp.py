"""The stat of every source file from before it is read: what is read later is of the same bytes as long as the stat is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from forebay.store.memo import Stat, stat_now
from forebay.store.source_files import SourceFile

_YOUNG_NS = 2_000_000_000
_TICK_S, _COARSE_TICK_S = 0.02, 2.0
"""Time stamps move in ticks of the kernel's clock, 10 ms at most; those of whole seconds (FAT, old NFS) every two seconds."""
_WAITS = 3


def stamped(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Returns the files with their stat as it is now; those that have one keep it.

    A file that was changed just now could be changed again in the same tick and keep its stat: where there is one, this waits
    for the next tick, once for all of them. One stat a file.
    """
    todo = [number for number, file in enumerate(files) if file.stat is None]
    stats = {number: stat_now(files[number].path) for number in todo}
    now_ns = time.time_ns()
    young = [number for number, stat in stats.items() if stat is not None and stat[-1] > now_ns - _YOUNG_NS]
    for _ in range(_WAITS):
        if not young:
            break
        time.sleep(max(_tick_s(stats[number]) for number in young))
        again = {number: stat_now(files[number].path) for number in young}
        young = [number for number in young if again[number] != stats[number]]
        stats |= again
    return [replace(file, stat=stats[number]) if number in stats else file for number, file in enumerate(files)]


def _tick_s(stat: Stat | None) -> float:
    return _TICK_S if stat is None or stat[-1] % 1_000_000_000 else _COARSE_TICK_S
