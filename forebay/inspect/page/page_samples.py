"""All samples as a page needs them: their columns, those that a person should look at, and those that it shows.

Ids, texts, languages and lengths are columns; no sample is read for them. Times are in seconds, counts in tokens and
characters, all of them arrays [num_samples]. Doubtful are samples that are there twice, and transcripts that do not fit
their length."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.errors import CacheError, ConfigError
from forebay.inspect.checks.limits import misfits
from forebay.inspect.facts import durations_of
from forebay.inspect.listed_groups import names_items
from forebay.store.by_hand import read_ids
from forebay.store.cache import Cache
from forebay.store.layout import Array, Group
from forebay.store.open_shards import no_such_row
from forebay.store.row_table import by_shard

LABEL = "label"
"""The prompt of images that have classes."""
OWN_LENGTHS = ("num_audio_samples", "num_frames", "num_tokens")
"""Lengths of a sample itself; others are sums over the items that it lists."""
_KNOWN = frozenset(("index", "sample_id", "text", "language", "prompt", "source", "duration_s"))


@dataclass(frozen=True)
class PageColumns:
    """The columns of a cache; each is read when it is first asked for."""

    cache: Cache

    def __len__(self) -> int:
        return len(self.cache)

    @cached_property
    def ids(self) -> pa.ChunkedArray:
        """The ids of all samples; their numbers as text where the cache has none."""
        return self._column("sample_id", map(str, range(len(self))))

    @cached_property
    def texts(self) -> pa.ChunkedArray:
        """The transcripts, or the conversations as JSON; empty where the cache has no texts."""
        return self._column("text", [""] * len(self))

    @cached_property
    def languages(self) -> tuple[list[str], Array]:
        """The languages, and which one each sample has, int32; one without a name where none is known."""
        return self._categories("language")

    @cached_property
    def classes(self) -> tuple[list[str], Array] | None:
        """The classes of images, and which one each sample has, int32; None of samples that have none, or several."""
        constants = self.cache.constants
        if not self.has_labels or constants["text_form"]["fields"][0]["shape"]:
            return None
        return self.cache.categories("text")

    @cached_property
    def sources(self) -> tuple[list[str], Array]:
        """The files that samples came from, and which one each sample has, int32."""
        return self._categories("source")

    @cached_property
    def seconds(self) -> Array | None:
        """float64; None for a cache without audio."""
        return durations_of(self.cache)

    @cached_property
    def tokens(self) -> Array:
        """int64: tokens of the text of each sample."""
        return np.asarray(self.cache.lengths["num_tokens"], np.int64)

    @property
    def has_tokens(self) -> bool:
        """Whether samples have texts that are counted by tokens: images with classes have none."""
        return "input_ids" in self.cache.fields

    @property
    def has_labels(self) -> bool:
        """Whether samples have classes, which are no texts."""
        return self.cache.constants.get("prompt") == LABEL

    @property
    def has_targets(self) -> bool:
        """Whether some tokens are learnt and others given: of a caption beside an image none is a target."""
        return self.has_tokens and (not names_items(self.cache) or "label_mask" in self.cache.fields)

    @cached_property
    def characters(self) -> Array:
        """int64: characters of each text."""
        return np.asarray(pc.utf8_length(self.texts).to_numpy(), np.int64)

    @cached_property
    def spoken(self) -> Array:
        """int64: characters of each text without white space, as `str.split` knows it."""
        spaces = pc.count_substring_regex(self.texts, r"[\t-\r\x1c-\x1f\x{85}\pZ]")
        return self.characters - np.asarray(spaces.to_numpy(), np.int64)

    @cached_property
    def rate(self) -> Array | None:
        """float64: spoken characters a second, NaN without text or sound; None for a cache without audio."""
        if self.seconds is None:
            return None
        known = (self.seconds > 0) & (self.spoken > 0)
        return np.where(known, self.spoken / np.where(known, self.seconds, 1.0), np.nan)

    @property
    def length(self) -> Array:
        """The length of each sample: its seconds, or without audio its tokens."""
        return self.tokens if self.seconds is None else self.seconds

    @cached_property
    def kept(self) -> list[str]:
        """The names of the columns that the config asked to keep."""
        known = _KNOWN.union(self.cache.lengths, (f"{group}s" for group in self.cache.listed))
        return [name for name in self.cache.column_names if name not in known]

    @cached_property
    def kept_table(self) -> pa.Table:
        """The kept columns."""
        return self.cache.table(self.kept)

    def _column(self, name: str, others: Iterable[str]) -> pa.ChunkedArray:
        if name in self.cache.column_names:
            return self.cache.table([name])[name]
        return pa.chunked_array([pa.array(others, pa.large_string())])

    def _categories(self, name: str) -> tuple[list[str], Array]:
        found = self.cache.categories(name)
        return ([""], np.zeros(len(self), np.int32)) if found is None else found


NEAR_S = 0.02
"""Share of their length by which two recordings with one text may differ and are called near duplicates."""
_TEXTS = 4_096
"""Texts that are hashed together."""
_LEAST_TEXT = 12
"""Characters that a text needs to say something: `yes` is said by many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubtGroups:
    """Samples that are alike: `shown` holds the largest groups, as indices; the counts are of all groups."""

    num_groups: int
    num_samples: int
    shown: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Doubts:
    """The doubts. exact, near: duplicates. z: float64 [num_samples], NaN where nothing is known; None: no audio.

    misfits: indices of transcripts that do not fit, the farthest first. checks: those of `forebay lint`, by index.
    """

    exact: DoubtGroups
    near: DoubtGroups
    z: Array | None
    misfits: Array
    checks: Mapping[int, str] = field(default_factory=dict)


def doubts_of(columns: PageColumns, *, kept: Array | None = None) -> Doubts:
    """Returns what is doubtful of all samples, by their columns and stored hashes alone; about 1 us a sample.

    kept: bool [num_samples], what a filter leaves: only there are transcripts held against each other, as lint does.
    """
    codes = content_codes(columns.cache)
    exact = _groups(codes)
    near = _groups(_near_codes(columns, codes))
    if columns.seconds is None:
        return Doubts(exact=exact, near=near, z=None, misfits=np.zeros(0, np.int64))
    usable = True if kept is None else kept
    unfit = misfits(columns.spoken, columns.seconds, columns.languages[1], usable=usable)
    checks = {row: name for name, rows in unfit.rows() for row in rows.tolist() if kept is None or kept[row]}
    found = np.array(list(checks), np.int64)
    away = np.abs(np.nan_to_num(unfit.scores[found], nan=np.inf))
    found = found[np.argsort(-away, kind="stable")]
    return Doubts(exact=exact, near=near, z=unfit.scores, misfits=found, checks=checks)


def content_codes(cache: Cache) -> Array:
    """Returns int64 [num_samples], equal for samples whose stored values are equal.

    By the hashes that the shards hold: of a recording that of its features and waveform, else that of the text's
    tokens; and of the items that a sample lists those of their bytes, in their order.
    """
    codes = np.zeros(len(cache), np.int64)
    own = next(group for group in cache.groups if group not in cache.listed)  # the text, where there is no other
    for number, samples, rows in cache.by_shard():
        shard = cache.shard(own, number)
        codes[samples] = shard.hashes[rows]
        shard.drop_pages()
    for group in cache.listed:
        listed = cache.items(group)
        starts, ends = listed.offsets[:-1], listed.offsets[1:]
        # How far each item stands from the beginning of its sample: the order of items counts.
        places = (np.arange(listed.offsets[-1]) - np.repeat(starts, ends - starts)).astype(np.uint64)
        mixed = _mixed(_item_codes(cache, group, listed.slots) + places)
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        codes = _mixed(codes.astype(np.uint64) + total[ends] - total[starts]).astype(np.int64)
    return codes


def _item_codes(cache: Cache, group: Group, slots: Array) -> Array:
    """Returns uint64 [items], equal for items of equal bytes."""
    codes = np.zeros(len(slots), np.uint64)
    lost = partial(no_such_row, cache.folder)
    for number, places, rows in by_shard(slots, cache.unit_count(group), no_such_row=lost):
        names = cache.shard(group, number).strings(f"{group}_hash")
        known = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")) for name in names]
        codes[places] = np.array(known, np.uint64)[rows]
    return codes


def _mixed(values: Array) -> Array:
    """Returns uint64 whose bits each depend on all bits of the values (the finaliser of splitmix64)."""
    z = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _near_codes(columns: PageColumns, exact: Array) -> Array:
    """Returns int64 [num_samples], equal for near duplicates, different for all others: -1 less their index.

    Near are samples with one text (whatever its case and the spaces around it) whose lengths differ by no more than
    `NEAR_S`, one from the next, and whose stored values differ.
    """
    codes = _text_codes(columns.texts)
    length = columns.length
    order = np.lexsort((length, codes))
    held, text = length[order], codes[order]
    follows = (text[1:] == text[:-1]) & (held[1:] <= held[:-1] * (1 + NEAR_S))
    runs = np.concatenate([np.zeros(1, np.int64), np.cumsum(~follows)])[: len(order)]
    found = np.empty(len(order), np.int64)
    found[order] = runs
    short = columns.characters < _LEAST_TEXT
    if columns.has_labels:
        short[:] = True  # a class is no text: it is said of many images
    # A group of equal samples is no group of near ones: of each content one stands for all.
    order = np.lexsort((exact, found))
    repeats = (np.diff(found[order]) == 0) & (np.diff(exact[order]) == 0)
    short[order[1:][repeats]] = True
    return np.where(short, -1 - np.arange(len(order)), found)


def _text_codes(texts: pa.ChunkedArray) -> Array:
    """Returns int64 [num_samples]: the first sample with each text, whatever its case and the spaces around it."""
    hashes = np.zeros(len(texts), np.uint64)
    start = 0
    for part in pa.table([texts], ["text"]).to_batches(max_chunksize=_TEXTS):
        said = pc.utf8_lower(pc.utf8_trim_whitespace(part["text"])).to_pylist()
        hashes[start : start + len(said)] = [xxhash.xxh3_64_intdigest(text.encode()) for text in said]
        start += len(said)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)])


_MAX_GROUPS, _MAX_MEMBERS = 40, 12


def _groups(codes: Array) -> DoubtGroups:
    """Returns the groups of equal codes with more than one member."""
    _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    many = np.flatnonzero(counts > 1)
    largest = many[np.argsort(-counts[many], kind="stable")][:_MAX_GROUPS]
    shown = tuple(tuple(np.flatnonzero(inverse == code)[:_MAX_MEMBERS].tolist()) for code in largest)
    return DoubtGroups(num_groups=len(many), num_samples=int(counts[many].sum()), shown=shown)


SHOWN = 24
"""Samples with sound and pictures in a page."""
_MAX_IDS = 200
_HEARD = 2_000
"""Recordings in which clipping is looked for."""


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
    counts = np.bincount(codes, minlength=len(names))
    largest = np.argsort(-counts, kind="stable")[:SHOWN]
    largest = largest[counts[largest] > 0]
    given = np.ones(len(largest), np.int64)
    held = counts[largest].astype(np.float64)
    for _ in range(SHOWN - len(largest)):
        room = np.where(given < held, held / (given + 1), 0.0)
        if not room.any():
            break
        given[int(np.argmax(room))] += 1
    shares = dict(zip(largest.tolist(), given.tolist(), strict=True))
    chosen: list[int] = []
    for code, count in shares.items():
        own = np.flatnonzero(codes == code)
        own = own[np.argsort(columns.length[own], kind="stable")]
        chosen += own[((np.arange(count) + 0.5) / count * len(own)).astype(np.int64)].tolist()
    return [Chosen(index=index) for index in sorted(set(chosen))]


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
    known = np.zeros(0) if padding is None else np.nan_to_num(padding)
    padded = [
        Chosen(index=i, why=f"{100 * known[i]:.0f} % of its row is padding in its bucket")
        for i in np.argsort(-known, kind="stable")[:SHOWN].tolist()
        if known[i]
    ]
    unfit = []
    if columns.rate is not None and doubts.z is not None:
        for i in doubts.misfits[:SHOWN].tolist():
            away = f", {doubts.z[i]:+.1f} deviations from its language" if np.isfinite(doubts.z[i]) else ""
            why = f"{columns.rate[i]:.1f} characters a second{away}: {doubts.checks[i]}"
            unfit.append(Chosen(index=i, why=why))
    lists = [unfit, _clipped(columns), padded]
    found: dict[int, Chosen] = {}
    for place in range(SHOWN):
        for chosen in lists:
            if place < len(chosen) and len(found) < SHOWN:
                found.setdefault(chosen[place].index, chosen[place])
    return list(found.values())


def _clipped(columns: PageColumns) -> list[Chosen]:
    """Reads waveforms of samples that are spread evenly, and no more than 400 MB of them."""
    cache = columns.cache
    if "waveform" not in cache.fields:
        return []
    shares: list[tuple[float, int]] = []
    left = 400_000_000
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


def by_ids(columns: PageColumns, text: str) -> list[Chosen]:
    """Returns the samples that `--ids` names: a file with an id a line, or ids with commas between them.

    Raises ConfigError for ids that the cache does not have, more than 200 of them, or none.
    """
    is_file = os.path.isfile(text)  # not so for a list that is too long for a path
    named = read_ids(Path(text), setting="--ids").to_pylist() if is_file else map(str.strip, text.split(","))
    wanted = list(dict.fromkeys(name for name in named if name or is_file))
    if not wanted:
        raise ConfigError(f"--ids {text}: no ids in it; name a file with an id a line, or ids like a,b")
    if len(wanted) > _MAX_IDS:
        raise ConfigError(f"--ids names {len(wanted):,} samples, a report shows at most {_MAX_IDS}; name fewer")
    values = pa.array([name.encode("utf-8", "backslashreplace").decode() for name in wanted], pa.large_string())
    found = pc.fill_null(pc.index_in(columns.ids.cast(pa.large_string()), value_set=values), -1).to_numpy()
    places: dict[str, int] = {}
    for row in np.flatnonzero(found >= 0).tolist():
        places.setdefault(wanted[int(found[row])], row)
    if missing := [name for name in wanted if name not in places]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"--ids: {columns.cache.place} has no sample {missing[0]!r}{more} of the {len(wanted)} named; "
            f"every id: forebay inspect {columns.cache.place} --export FILE.parquet"
        )
    return [Chosen(index=places[name]) for name in wanted]
