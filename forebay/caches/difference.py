"""`forebay cache diff`: two caches side by side: recipes, sources, samples by their ids and hashes, sizes.

What a cache was made of, in words; and sizes, ages and times as people write them.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import CacheError, ConfigError
from forebay.progress import during
from forebay.store.cache import Cache
from forebay.store.derived import described, is_derived
from forebay.store.key import SHORT, differences
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Group, Ints
from forebay.store.lookup import SOURCES_NAME
from forebay.store.metadata import check_file
from forebay.store.shard import sample_hash
from forebay.store.source_files import StoredSource, load_sources
from forebay.terminal import first_of, paragraph, table
from forebay.visible import from_here, human_bytes, printable

_UNITS = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("kMGTP", 1)}}
_AGES = {"h": 3600.0, "d": 24 * 3600.0, "w": 7 * 24 * 3600.0}
_NAMES_SHOWN = 80
_MOST_HOURS = 1e12
_DIGITS = 8
"""Of a digest, where it is shown beside words."""


def made_of(document: Mapping[str, Any], *, tokenizers: Mapping[str, str]) -> str:
    """Returns what a cache was made of: features, texts, source. tokenizers: folders by the digest of a tokenizer."""
    try:
        return _made_of(document.get("recipe", {}), tokenizers)
    except (TypeError, ValueError, AttributeError, ArithmeticError):  # signed by somebody who is not forebay
        return "settings that forebay does not write"


def _made_of(recipe: Mapping[str, Any], tokenizers: Mapping[str, str]) -> str:
    if is_derived(recipe):
        return _short(f"{described(recipe)}; {'; '.join(_steps(recipe, tokenizers))}")
    return "; ".join([*_steps(recipe, tokenizers), _source(recipe)])


def _steps(recipe: Mapping[str, Any], tokenizers: Mapping[str, str]) -> Iterator[str]:
    audio, vision, text = (_section(recipe, name) for name in ("audio", "vision", "text"))
    if audio:
        yield _audio(audio)
    if vision:
        yield f"images, processor {_digest(vision.get('processor'))}"
    if text and text.get("prompt") != "none":
        prompt = "chat" if vision else _short(text.get("prompt", "text"))
        tokenizer = str(text.get("tokenizer"))
        folder = f" ({_short(tokenizers[tokenizer])})" if tokenizer in tokenizers else ""
        yield f"text {prompt}, tokenizer {_digest(tokenizer)}{folder}"


def _audio(audio: Mapping[str, Any]) -> str:
    parts = [_short(audio.get("features", "audio"))]
    if isinstance(bins := audio.get("n_mels"), int):
        parts.append(f"{bins} bins")
    if isinstance(rate := audio.get("sample_rate_hz"), int):
        parts.append(f"{rate / 1000:g} kHz")
    if isinstance(dtype := audio.get("dtype"), str):
        parts.append(_short(dtype))
    return ", ".join([*parts, *(["with waveforms"] if audio.get("keep_waveform") is True else [])])


def _source(recipe: Mapping[str, Any]) -> str:
    source = _section(recipe, "source")
    parts = [f"{_short(source.get('kind', 'source'))} {_short(source.get('split', ''))}".rstrip()]
    if isinstance(languages := source.get("languages"), list):
        parts.append(f"languages {_short(' '.join(map(str, languages)))}")
    if isinstance(most := source.get("max_samples"), int):
        parts.append(f"{most} samples at most")
    return ", ".join(parts)


def texts_of(document: Mapping[str, Any]) -> str:
    """Returns what kept texts are: which steps made them."""
    identity = _section(document, "identity")
    steps = identity.get("normalize")
    if isinstance(steps, list):
        return f"texts as {', '.join(_step(step) for step in steps) or 'nothing'} made them"
    language = _section(identity, "language")
    languages = language.get("languages")
    among = f" among {_short(' '.join(map(str, languages)))}" if isinstance(languages, list) and languages else ""
    model = f", model {_digest(language['model'])}" if language.get("model") else ""
    return f"languages of texts{among}{model}" if language else "texts of unknown steps"


def _step(step: Any) -> str:
    if not isinstance(step, dict):
        return "unknown"
    own = [
        value for name, value in step.items() if name not in ("step", "version") and isinstance(value, str) and value
    ]
    return " ".join([_short(step.get("step", "unknown")), *(_digest(value) for value in own[:2])])


def hours_of(document: Mapping[str, Any]) -> float | None:
    """Returns the hours of audio of a cache, None where it has none."""
    found = [entry.get("hours") for entry in _section(document, "languages").values() if isinstance(entry, dict)]
    numbers = [hours for hours in found if isinstance(hours, (int, float)) and 0 <= hours < _MOST_HOURS]
    return float(sum(numbers)) if numbers else None


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _digest(value: Any) -> str:
    return _short(str(value)[:_DIGITS])


def _short(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= _NAMES_SHOWN else f"{text[: _NAMES_SHOWN - 3]}..."


def parse_size(text: str) -> int:
    """Returns the bytes of a size as `500G`, `1.5TB` or `800 MB`, in units of 1000. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([kKMGTP]?B?)", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{text!r:.40} is no size; wanted a number and a unit: 500GB, 1.5TB, 800MB")
    unit = found[2].replace("K", "k")
    return int(float(found[1]) * _UNITS[unit if unit in _UNITS else f"{unit}B"])


def parse_age(text: str) -> float:
    """Returns the seconds of an age as `30d`, `12h` or `8w`. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([hdw])", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{text!r:.40} is no age; wanted a number and h, d or w: 30d, 12h, 8w")
    return float(found[1]) * _AGES[found[2]]


def counted(number: int, noun: str) -> str:
    """Returns a number of things in words: `1 cache`, `12,000 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(ns: int) -> str:
    """Returns a time as people write it, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ns / 1e9)) if ns > 0 else "unknown"


def ago(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


_SHOWN = 5


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


def _sources_of(cache: Cache) -> list[StoredSource]:
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


_WORDS: Mapping[Group, str] = {"image": "images", "text": "texts"}


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
