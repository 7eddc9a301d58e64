"""What was found, in words: the comments of a config, and the lines that the command prints."""

from __future__ import annotations

from collections import Counter
from statistics import median

from forebay.init.found import Found, counted
from forebay.init.media import Pictures, Sounds

_LANGUAGES = 8


def facts(found: Found) -> str:
    """Returns one line on what was found: how many of what, how long, which languages, which sizes."""
    parts = [counted(found.count, found.noun, is_exact=found.is_exact)]
    if found.sounds is not None and found.sounds.seconds:
        parts += _sound_facts(found, found.sounds)
    if found.pictures is not None and found.pictures.sizes:
        parts += _picture_facts(found.pictures)
    if found.classes.total():
        number = len(found.classes)
        parts.append(f"{number:,} class{'es' * (number > 1)} ({shares(found.classes)})")
    if found.languages:
        parts.append(f"languages {shares(found.languages)}")
    return ", ".join(parts)


def _sound_facts(found: Found, sounds: Sounds) -> list[str]:
    source = "headers" if sounds.rates else "rows"
    parts = [
        f"about {_hours(found.hours)} (from {len(sounds.seconds)} {source})",
        f"{_short(min(sounds.seconds))} to {_short(max(sounds.seconds))} s",
    ]
    if sounds.rates:
        parts.append(" and ".join(f"{rate:,} Hz" for rate in sorted(sounds.rates)[:4]))
    if any(count > 1 for count in sounds.channels):
        parts.append("of more than one channel, which are mixed")
    return parts


def _picture_facts(pictures: Pictures) -> list[str]:
    widths, heights = zip(*pictures.sizes, strict=True)
    middle = f"{round(median(widths))} x {round(median(heights))} pixels in the middle"
    return [f"images up to {max(widths)} x {max(heights)}, {middle} (from {len(pictures.sizes)} headers)"]


def problems(found: Found) -> list[str]:
    """Returns what a person should know of the data before a build."""
    lines = list(found.notes)
    sounds, pictures = found.sounds, found.pictures
    if sounds is not None and sounds.unreadable:
        lines.append(
            f"{sounds.unreadable} of {sounds.looked_at} recordings that were looked at cannot be read; they will fail, "
            "counted and listed (run.max_failed_share bounds their share)."
        )
    if pictures is not None and pictures.unreadable:
        lines.append(f"{pictures.unreadable} of {pictures.looked_at} images that were looked at cannot be read.")
    return lines


def shares(counts: Counter[str]) -> str:
    """Returns the commonest values and their shares: `hi 60 %, ta 40 %`."""
    total = counts.total()
    shown = [f"{name} {100 * count / total:.0f} %" for name, count in counts.most_common(_LANGUAGES)]
    return ", ".join(shown) + (f" and {len(counts) - _LANGUAGES} more" if len(counts) > _LANGUAGES else "")


def _hours(hours: float) -> str:
    if hours < 0.1:
        return f"{_short(hours * 3600)} s" if hours * 3600 < 120 else f"{hours * 60:.0f} min"
    return f"{hours:,.1f} h" if hours < 100 else f"{hours:,.0f} h"


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"
