"""Measures indexing a tar beside `tarfile.getmembers`: `python -m benchmarks.tar_index [--tiny] [--json]`.

The tar has 10,000 members, the file is in memory, and there is one thread. The two contestants take turns in one run.
Times are medians, and the ratio is the median of the ratios of the turns. Both must list the same members, which is
checked first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.tar.header import TarIndex
from forebay.tar.index import load_index
from forebay.tar.scan import scan_tar

GOAL = 8.0
CLIP_BYTES, TRANSCRIPT_BYTES = 40_000, 300


class Layout(NamedTuple):
    """name: of the figure; sizes: of the members in turn, in bytes; goal: the wanted ratio, or None."""

    name: str
    tar_format: int
    sizes: tuple[int, ...]
    member: str = "clips/{:06d}"
    mtime: float = 0
    goal: float | None = None


LAYOUTS = (
    Layout("clips_and_transcripts", tarfile.USTAR_FORMAT, (CLIP_BYTES, TRANSCRIPT_BYTES), goal=GOAL),
    Layout("clips", tarfile.USTAR_FORMAT, (CLIP_BYTES,), goal=GOAL),
    Layout("transcripts", tarfile.USTAR_FORMAT, (TRANSCRIPT_BYTES,), goal=GOAL),
    Layout("gnu_long_names", tarfile.GNU_FORMAT, (CLIP_BYTES, TRANSCRIPT_BYTES), member="d" * 110 + "/{:06d}"),
    Layout("pax_float_times", tarfile.PAX_FORMAT, (CLIP_BYTES, TRANSCRIPT_BYTES), mtime=1.5),
)


class _Repeated:
    """A file of one byte repeated, which holds no memory."""

    def read(self, size: int) -> bytes:
        return b"x" * size


def write_tar(path: Path, layout: Layout, count: int) -> None:
    with tarfile.open(path, "w", format=layout.tar_format) as tar:
        for number in range(count):
            info = tarfile.TarInfo(layout.member.format(number))
            info.size, info.mtime = layout.sizes[number % len(layout.sizes)], layout.mtime
            tar.addfile(info, _Repeated())  # type: ignore[arg-type]  # it reads, and that is all that is asked


def by_tarfile(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()


def check_equal(index: TarIndex, members: list[tarfile.TarInfo]) -> None:
    ours = list(zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True))
    theirs = [(member.name, member.offset_data, member.size) for member in members]
    if ours != theirs or index.refused:
        raise SystemExit(f"{index.path}: the two indexes differ; no figure is worth anything")


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(layout: Layout, *, count: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "members.tar"
        write_tar(path, layout, count)
        check_equal(scan_tar(path), by_tarfile(path))
        pairs = [(seconds(lambda: scan_tar(path)), seconds(lambda: by_tarfile(path))) for _ in range(turns)]
        load_index(path, cache_root=folder)
        kept = [seconds(lambda: load_index(path, cache_root=folder)) for _ in range(turns)]
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    return {
        "us_per_member": round(statistics.median(ours for ours, _ in pairs) / count * 1e6, 2),
        "tarfile_us_per_member": round(statistics.median(theirs for _, theirs in pairs) / count * 1e6, 2),
        "kept_us_per_member": round(statistics.median(kept) / count * 1e6, 2),
        "ratio": round(ratio, 2),
        "goal": layout.goal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run of a second, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--members", type=int, default=10_000)
    arguments = parser.parse_args()
    count, turns = (200, 3) if arguments.tiny else (arguments.members, 7)
    found = {layout.name: measure(layout, count=count, turns=turns) for layout in LAYOUTS}
    if arguments.json:
        print(json.dumps({"members": count, "turns": turns, **found}, indent=1))
        return 0
    print(f"{count} members, {turns} turns            us a member    tarfile       kept      ratio")
    for name, row in found.items():
        goal = f"(goal {row['goal']:g})" if row["goal"] else ""
        figures = (row["us_per_member"], row["tarfile_us_per_member"], row["kept_us_per_member"], row["ratio"])
        print(f"{name:28}" + "".join(f"{figure:11.2f}" for figure in figures), goal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
