"""The table of what is kept under a root: a line a kind. Survey, `ls`, `du`, `rm`, `prune` and the guard read it.

What a cache was made of, in words; and the rules by which each kind goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.caches import ours
from forebay.caches.root_items import Kept, RootItem, Survey, Told, Verdict
from forebay.errors import CacheError, ConfigError, ManifestError, TarError
from forebay.rows.readers.line_blocks import ENDING, indexed_text
from forebay.store.files import hash_file
from forebay.store.inputs import SAMPLES
from forebay.store.layout import BUILDING, INPUTS, LISTINGS, PLANS, TAR_INDEX, TEXT_INDEX, TEXTS
from forebay.store.lookup import Sealed
from forebay.store.memo import FILE_NAME as MEMO
from forebay.store.metadata import FILE_NAME
from forebay.store.remote.small_files import LISTED
from forebay.store.source_comparison import FILE_NAME as INDEX
from forebay.store.source_comparison import described, is_derived
from forebay.store.texts import LOCK
from forebay.tar.index import indexed_tar
from forebay.terminal import counted
from forebay.visible import did_you_mean, printable

_NAMES_SHOWN = 80
_DIGITS = 8
"""Of a digest, where it is shown beside words."""


def made_of(document: Mapping[str, Any], *, tokenizers: Mapping[str, str]) -> str:
    """Returns what a cache was made of: features, texts, source. tokenizers: folders by the digest of a tokenizer."""
    recipe = document.get("recipe", {})
    try:
        steps = [*_steps(recipe, tokenizers)]
        if is_derived(recipe):
            return _short(f"{described(recipe)}; {'; '.join(steps)}")
        return "; ".join([*steps, _source(recipe)])
    except (TypeError, ValueError, AttributeError, ArithmeticError):  # signed by somebody who is not forebay
        return "settings that forebay does not write"


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
    numbers = [hours for hours in found if isinstance(hours, (int, float)) and 0 <= hours < 1e12]
    return float(sum(numbers)) if numbers else None


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _digest(value: Any) -> str:
    return _short(str(value)[:_DIGITS])


def _short(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= _NAMES_SHOWN else f"{text[: _NAMES_SHOWN - 3]}..."


def _left(what: str) -> Verdict:
    return lambda *_: (True, f"{what} of a process that is gone")


def _of_plan(item: RootItem, survey: Survey, staying: Sequence[RootItem]) -> tuple[bool, str]:
    if survey.origin is not None:
        return False, f"its cache may lie in {survey.origin}"
    plan: Any = item.document.get("plan")
    named = plan.get("cache_keys") if isinstance(plan, dict) else None
    keys = {cache.document["key"] for cache in staying}
    if not isinstance(named, list) or any(str(key) in keys for key in named):
        return False, "its cache stays"
    return True, "no cache of its key is here"


def _of_inputs(item: RootItem, survey: Survey, staying: Sequence[RootItem]) -> tuple[bool, str]:
    """A cache is found by the list of what its iterator yielded, so that list stays as long as the cache does."""
    listed = hash_file(survey.root.folder / item.name / SAMPLES)
    for cache in (cache for cache in staying if cache.remote is None):
        try:
            sources = Sealed(folder=survey.root.folder / cache.name, metadata=dict(cache.document)).sources()
        except (CacheError, OSError) as err:
            return False, f"what {cache.name} was made of cannot be read: {err}"
        if any(source.xxh3_128 == listed for source in sources):
            return False, f"{cache.name} is found by it; it goes by its name, or behind that cache"
    return True, "no cache here was made of it; the next build runs the iterator"


def _of_index(what: str, indexed: Callable[[Path], tuple[str | None, bool]]) -> Verdict:
    """Returns the rule of indexes: one goes whose file is gone or another one.

    A text that has grown is another one: its index would be gone on with, but nothing says that it will be.
    """

    def verdict(item: RootItem, survey: Survey, _: Sequence[RootItem]) -> tuple[bool, str]:
        try:
            file, is_current = indexed(survey.root.folder / item.name)
        except (TarError, ManifestError) as err:
            return True, str(err)
        if file is None:
            return False, f"which {what} it is of is not known from here"
        return (False, f"of {file}") if is_current else (True, f"{file} is gone, or another one by now")

    return verdict


def _cache_told(metadata: Mapping[str, Any], tokenizers: Mapping[str, str]) -> Told:
    number, hours, words = metadata["num_samples"], hours_of(metadata), made_of(metadata, tokenizers=tokenizers)
    facts = {"key": metadata["key"], "made_of": words, "num_samples": number, "hours": hours}
    return facts, counted(int(number), "samples") + ("" if hours is None else f", {hours:.3g} h"), words


def _texts_told(document: Mapping[str, Any], _: Mapping[str, str]) -> Told:
    number, words = document["num_texts"], texts_of(document)
    return {"made_of": words, "num_texts": number}, counted(number, "texts"), words


_HEX_16, _HEX_32 = "[0-9a-f]{16}", "[0-9a-f]{32}"
_TARS, _LINES = _of_index("tar", indexed_tar), _of_index("text", indexed_text)
_ALL = (
    Kept(
        "cache",
        "caches",
        names="(?s)[^.].*",
        inside=ours.CACHE,
        lock=FILE_NAME,
        is_noted=True,
        rule="caches",
        told=_cache_told,
    ),
    Kept(
        "texts",
        "kept texts",
        TEXTS,
        _HEX_16,
        inside=ours.KEPT_TEXTS,
        lock=LOCK,
        is_growing=True,
        is_noted=True,
        rule="caches",
        told=_texts_told,
        one="kept texts",
    ),
    Kept(
        "inputs",
        "samples of iterators",
        INPUTS,
        _HEX_32,
        inside=ours.INPUTS,
        builders="any",
        verdict=_of_inputs,
        told=lambda *_: ({}, "", "samples that an iterator yielded"),
        one="samples of an iterator",
    ),
    Kept("plan", "plans", PLANS, inside=ours.PLAN, lock=FILE_NAME, is_noted=True, verdict=_of_plan),
    Kept("tar index", "tar indexes", TAR_INDEX, rf"{_HEX_32}\.parquet", "file", verdict=_TARS),
    Kept("text index", "indexes of lines of text", TEXT_INDEX, _HEX_32 + re.escape(ENDING), "file", verdict=_LINES),
    Kept(
        "listing",
        "listings",
        LISTINGS,
        "[0-9a-f]{8,64}",
        inside=ours.LISTING,
        is_growing=True,
        verdict=lambda *_: (True, "made again when it is needed"),
    ),
    Kept("hashes", "remembered hashes", names=re.escape(MEMO), form="file"),
    Kept("source index", "indexes of sources", names=re.escape(INDEX), form="file"),
    Kept(
        "build",
        "unfinished builds",
        BUILDING,
        rf"{_HEX_16}(-rebuild|-stage)?",
        inside=ours.BUILD,
        lock="lock",
        builders="itself",
        is_growing=True,
        verdict=_left("an unfinished build"),
        rule="leftovers",
    ),
    Kept(
        "prepared",
        "prepared builds",
        BUILDING,
        f"prepared-{_HEX_16}",
        beside=(".lock", ".submitted.json"),
        inside=ours.PREPARED,
        builders="of its key",
        is_growing=True,
        verdict=_left("a prepared build"),
        rule="leftovers",
    ),
    Kept("leftover", "leftovers", lock=FILE_NAME, is_growing=True, verdict=_left("a leftover"), rule="leftovers"),
    Kept("known", "caches of a store that are known here", names=re.escape(LISTED)),
)
KINDS: Mapping[str, Kept] = {kept.name: kept for kept in _ALL}
"""By their names, in the order in which they are listed."""
FOREIGN = Kept("foreign", "")
"""What is not forebay's, or cannot be read as such."""


def kinds_at(folder: str) -> list[Kept]:
    """Returns the kinds whose items lie in a folder of the root, the special names before all others."""
    found = [kept for kept in _ALL if kept.folder == folder and kept is not KINDS["leftover"]]
    return sorted(found, key=lambda kept: kept is KINDS["cache"])


HOLDERS = sorted({kept.folder for kept in _ALL} - {""})
"""The folders of a root that hold things of a kind."""


def kind_named(text: str) -> str:
    """Returns the kind that `--kind` of `prune` names, as `du` prints it. Raises ConfigError."""
    by_name = {name: kept for kept in _ALL for name in (_option(kept.name), _option(kept.words))}
    kept, known = by_name.get(_option(text)), f"the kinds are {', '.join(option_names())}"
    if kept is None:
        raise ConfigError(f"--kind {text}: no such kind; {known}{did_you_mean(_option(text), option_names())}")
    if kept.rule == "caches":
        raise ConfigError(f"--kind {text}: {kept.words} go by --older-than and --max-size, and caches by --unwanted")
    if kept.verdict is None:
        raise ConfigError(f"--kind {text}: no rule takes {kept.words}; {known}")
    return kept.name


def option_names() -> list[str]:
    """Returns the kinds that `--kind` takes, as it takes them."""
    return [_option(kept.name) for kept in _ALL if kept.verdict is not None]


def _option(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")
