"""Which samples a page shows, and why each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import CacheError, ConfigError
from forebay.inspect.page.doubts import Doubts, PageColumns
from forebay.store.layout import Array
from forebay.store.sample_ids import read_ids

SHOWN = 24
"""Samples with sound and pictures in a page."""

_MAX_IDS = 200
_HEARD = 2_000
"""Recordings in which clipping is looked for."""

_HEARD_BYTES = 400_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One sample to show, and why. index: in the cache."""

    index: int
    why: str = ""


def spread(columns: PageColumns) -> list[Chosen]:
    """Returns up to 24 samples that stand for all: every language by its share, from its shortest to its longest.

    Of images with classes: every class by its share.
    """
    if len(columns) <= SHOWN:
        return [Chosen(index=index) for index in range(len(columns))]
    names, codes = columns.classes or columns.languages
    shares = _shares(np.bincount(codes, minlength=len(names)))
    chosen: list[int] = []
    for code, count in shares.items():
        own = np.flatnonzero(codes == code)
        own = own[np.argsort(columns.length[own], kind="stable")]
        chosen += own[((np.arange(count) + 0.5) / count * len(own)).astype(np.int64)].tolist()
    return [Chosen(index=index) for index in sorted(set(chosen))]


def _shares(counts: Array) -> dict[int, int]:
    """Returns how many of 24 each language gets: one at least, the others by their samples; of many the largest."""
    largest = np.argsort(-counts, kind="stable")[:SHOWN]
    largest = largest[counts[largest] > 0]
    given = np.ones(len(largest), np.int64)
    held = counts[largest].astype(np.float64)
    for _ in range(SHOWN - len(largest)):
        room = np.where(given < held, held / (given + 1), 0.0)
        if not room.any():
            break
        given[int(np.argmax(room))] += 1
    return dict(zip(largest.tolist(), given.tolist(), strict=True))


def longest(columns: PageColumns) -> list[Chosen]:
    """Returns the 24 longest samples, the longest first."""
    order = np.argsort(-columns.length, kind="stable")[:SHOWN]
    return [Chosen(index=index, why=f"number {place} by length") for place, index in enumerate(order.tolist(), 1)]


def worst(columns: PageColumns, doubts: Doubts, *, padding: Array | None) -> list[Chosen]:
    """Returns up to 24 samples that are worst in one of three ways, taken in turn.

    Their transcript does not fit their length (`Doubts.misfits`, the farthest ones first); their waveform
    stands at full scale (share of its samples, of up to 2,000 recordings spread over the cache); a batch of the plan
    pads them most (padding: share of what is computed for a sample, float64 [num_samples], NaN outside the plan).
    """
    lists = [_unfit(columns, doubts), _clipped(columns), _padded(padding)]
    found: dict[int, Chosen] = {}
    for place in range(SHOWN):
        for chosen in lists:
            if place < len(chosen) and len(found) < SHOWN:
                found.setdefault(chosen[place].index, chosen[place])
    return list(found.values())


def _unfit(columns: PageColumns, doubts: Doubts) -> list[Chosen]:
    if doubts.z is None or columns.rate is None:
        return []
    return [
        Chosen(index=i, why=f"{columns.rate[i]:.1f} characters a second{away}: {doubts.checks[i]}")
        for i in doubts.misfits[:SHOWN].tolist()
        for away in [f", {doubts.z[i]:+.1f} deviations from its language" if np.isfinite(doubts.z[i]) else ""]
    ]


def _clipped(columns: PageColumns) -> list[Chosen]:
    """Reads waveforms of samples that are spread evenly, and no more than 400 MB of them."""
    cache = columns.cache
    if "waveform" not in cache.fields:
        return []
    shares: list[tuple[float, int]] = []
    left = _HEARD_BYTES
    for index in np.unique(np.linspace(0, len(cache) - 1, min(len(cache), _HEARD)).astype(np.int64)).tolist():
        try:
            waveform = cache.read(index)["waveform"]
        except CacheError:
            continue  # its card says why, where it is shown
        shares.append((clipped_share(waveform), index))
        left -= waveform.nbytes
        if left < 0:
            break
    shares.sort(key=lambda found: (-found[0], found[1]))
    return [
        Chosen(index=index, why=f"{100 * share:.2f} % of its waveform stands at full scale")
        for share, index in shares[:SHOWN]
        if share > 0
    ]


def clipped_share(waveform: Array) -> float:
    """Returns the share of a waveform that stands at full scale, int16 or float32, with an equal neighbour.

    A single sample at full scale is a peak; clipping holds it there.
    """
    if len(waveform) < 2:
        return 0.0
    top = 32767 if waveform.dtype == np.int16 else 1.0
    full = (waveform >= top) | (waveform <= -top)
    return float(np.count_nonzero(full[1:] & full[:-1]) / len(waveform))


def _padded(padding: Array | None) -> list[Chosen]:
    if padding is None:
        return []
    known = np.nan_to_num(padding)
    order = np.argsort(-known, kind="stable")[:SHOWN].tolist()
    return [
        Chosen(index=i, why=f"{100 * known[i]:.0f} % of its row is padding in its bucket") for i in order if known[i]
    ]


def by_ids(columns: PageColumns, text: str) -> list[Chosen]:
    """Returns the samples that `--ids` names: a file with an id a line, or ids with commas between them.

    Raises ConfigError for ids that the cache does not have, more than 200 of them, or none.
    """
    wanted = list(dict.fromkeys(_named(text)))
    if not wanted:
        raise ConfigError(f"--ids {text}: no ids in it; name a file with an id a line, or ids like a,b")
    if len(wanted) > _MAX_IDS:
        raise ConfigError(f"--ids names {len(wanted):,} samples, a report shows at most {_MAX_IDS}; name fewer")
    places = _places(columns.ids, wanted)
    if missing := [name for name in wanted if name not in places]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"--ids: {columns.cache.place} has no sample {missing[0]!r}{more} of the {len(wanted)} named; "
            f"every id: forebay inspect {columns.cache.place} --export FILE.parquet"
        )
    return [Chosen(index=places[name]) for name in wanted]


def _named(text: str) -> Iterable[str]:
    if not os.path.isfile(text):  # also of a list that is too long for a path
        return [name for part in text.split(",") if (name := part.strip())]
    found: list[str] = read_ids(Path(text), setting="--ids").to_pylist()
    return found


def _places(ids: pa.ChunkedArray, wanted: list[str]) -> Mapping[str, int]:
    values = pa.array([name.encode("utf-8", "backslashreplace").decode() for name in wanted], pa.large_string())
    found = pc.index_in(ids.cast(pa.large_string()), value_set=values).to_numpy()
    rows = np.flatnonzero(np.isfinite(found)) if found.dtype.kind == "f" else np.flatnonzero(found >= 0)
    places: dict[str, int] = {}
    for row in rows.tolist():
        places.setdefault(wanted[int(found[row])], row)
    return places
