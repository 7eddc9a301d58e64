"""What a cache was made of, in words; and sizes, ages and times as people write them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.errors import ConfigError
from forebay.store.derived import described, is_derived
from forebay.visible import printable

_UNITS = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("kMGTP", 1)}}
_AGES = {"h": 3600.0, "d": 24 * 3600.0, "w": 7 * 24 * 3600.0}
_SHOWN = 80
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
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


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


def moment(ns: int) -> str:
    """Returns a time as people write it, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ns / 1e9)) if ns > 0 else "unknown"


def ago(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
