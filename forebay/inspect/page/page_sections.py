"""The sections of a page about a whole cache: what `cache.html` shows, made of an overview."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.listed_groups import form_rows
from forebay.inspect.page.doubts import LABEL, NEAR_S
from forebay.inspect.page.markup import chart
from forebay.inspect.page.overview import Overview
from forebay.inspect.page.words import recipe_lines, shortened, time_text
from forebay.inspect.sizes import count_histogram
from forebay.steps.text.pace import PACE
from forebay.visible import human_bytes

_MAX_LANGUAGES, _MAX_REASONS, _MAX_SOURCES, _MAX_MISFITS, _MAX_CLASSES, _MAX_FIELDS = 60, 40, 12, 30, 16, 200
_NAME = 120


def sections_of(overview: Overview) -> dict[str, Any]:
    """Returns all that the sections say of a cache but for its cards, by the names of the template."""
    facts, columns = overview.facts, overview.columns
    own = {"tokens": count_histogram(columns.tokens)} if "histograms" not in facts else facts["histograms"]
    return {
        "overview": overview,
        "facts": facts,
        "columns": columns,
        "doubts": overview.doubts,
        "pace": PACE,
        "folder": Path(facts["folder"]).name,
        "lead": _lead(overview),
        "figures": list(_figures(overview)),
        "counts": own,
        "sizes": facts.get("image_sizes"),
        **_languages(facts),
        **_classes(facts),
        **_misfits(overview),
        **_left_out(overview),
        "made": list(_made(facts)),
        "form": [[shortened(cell, 200) for cell in row] for row in form_rows(facts)] if "form" in facts else [],
        "fields": [
            [
                shortened(name, _NAME),
                field["dtype"],
                f"[{', '.join(map(str, field['shape']))}]" if field["role"] == "tensor" else "a column",
                field["group"],
            ]
            for name, field in list(facts["fields"].items())[:_MAX_FIELDS]
        ],
        "sources": _sources(overview),
        "recipe": json.dumps(facts["recipe"], indent=1, ensure_ascii=False),
    }


def _lead(overview: Overview) -> str:
    """Returns what a sample holds, in a sentence."""
    recipe = overview.facts["recipe"]
    lines = dict(recipe_lines(recipe))
    if "processor" in overview.facts:
        lines["vision"] = f"images as {overview.facts['processor']['made_by']} gives them"
    named = [lines[section].split("; processor")[0] for section in ("audio", "vision") if section in lines]
    parts = [line.replace("; ", ", ") for line in named]
    prompt = (recipe.get("text") or {}).get("prompt", overview.columns.cache.constants.get("prompt"))
    if prompt not in (None, "none"):
        parts.append("a class each" if prompt == LABEL else f"texts under the prompt {prompt}")
    return "; ".join(parts)


def _figures(overview: Overview) -> Iterable[tuple[str, str]]:
    facts, columns = overview.facts, overview.columns
    yield "samples", f"{facts['num_samples']:,}"
    if columns.seconds is not None:
        yield "of sound", time_text(facts["hours"] * 3600)
    if "histograms" in facts:
        yield "images", f"{facts['images']['distinct']:,}"
    if columns.has_tokens:
        yield "tokens", f"{facts['num_tokens']:,}"
    if "classes" in facts:
        yield "classes", f"{facts['classes']['num_classes']:,}"
    languages = [name for name in facts["languages"] if name != "unknown"]
    if languages:
        yield ("language" if len(languages) == 1 else "languages"), f"{len(languages):,}"
    yield "on disk", human_bytes(facts["size_bytes"])
    yield "left out", f"{sum(int(count) for kind in ('excluded', 'failed') for count in facts[kind].values()):,}"


def _languages(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the languages, and where those that were detected are not the manifest's."""
    languages = {} if set(facts["languages"]) == {"unknown"} else facts["languages"]
    is_heard = facts["histogram"] is not None
    part = "hours" if is_heard else "samples"
    ordered = sorted(languages.items(), key=lambda item: (-item[1][part], item[0]))
    top = max([found[part] for _, found in ordered] + [1e-12])
    sound = {name: [time_text(3600 * found["hours"])] if is_heard else [] for name, found in ordered}
    detection = facts["detection"] or {"languages": [], "disagreements": []}
    return {
        "language_head": ["language", "samples", *(["sound"] if is_heard else []), ""],
        "languages": [
            [shortened(name, _NAME), f"{found['samples']:,}", *sound[name], chart("bar", found[part] / top)]
            for name, found in ordered
        ],
        "detected": ", ".join(
            f"{shortened(entry['language'], _NAME)} {entry['samples']:,} ({entry['confidence']:.2f})"
            for entry in detection["languages"][:_MAX_LANGUAGES]
        ),
        "disagreements": [
            [
                shortened(f"{pair['manifest']}, detected {pair['detected']}", _NAME),
                f"{pair['samples']:,}",
                shortened(", ".join(pair["ids"]), _NAME),
            ]
            for pair in detection["disagreements"][:_MAX_LANGUAGES]
        ],
    }


def _classes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the most frequent classes, and their numbers as titles."""
    shown = facts["classes"]["counts"][:_MAX_CLASSES] if "classes" in facts else []
    whole, top = max(facts["num_samples"], 1), max([each["samples"] for each in shown] + [1])
    return {
        "classes": [
            [
                shortened(each["class"], _NAME),
                f"{each['samples']:,} ({100 * each['samples'] / whole:.0f} %)",
                chart("bar", each["samples"] / top),
            ]
            for each in shown
        ],
        "class_titles": [f"number {each['number']}" for each in shown],
    }


def _misfits(overview: Overview) -> dict[str, Any]:
    """Returns the transcripts that do not fit, each behind the index of its sample."""
    doubts, rate, z = overview.doubts, overview.columns.rate, overview.doubts.z
    counts = Counter(doubts.checks.values())
    found = ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts))
    return {
        "has_labels": overview.columns.cache.constants.get("prompt") == LABEL,
        "near_about": f"The same text, whatever its case, and lengths within {100 * NEAR_S:.0f} % of each other; "
        "texts of fewer than 12 characters are not compared.",
        "misfits_about": f"{len(doubts.misfits):,} samples: {found}." if found else "None found.",
        "misfits": [
            [i, f"{rate[i]:.1f}", f"{z[i]:+.1f}" if np.isfinite(z[i]) else "", doubts.checks[i]]
            for i in doubts.misfits[:_MAX_MISFITS].tolist()
            if rate is not None and z is not None
        ],
    }


def _left_out(overview: Overview) -> dict[str, Any]:
    """Returns what is no sample, and why."""
    facts = overview.facts
    notes = []
    if facts["clipped"]:
        clip_s = (facts["recipe"].get("audio") or {}).get("clip_s")
        notes.append(f"{facts['clipped']:,} kept for their first {clip_s} s.")
    if facts["longer"]:
        notes.append(f"{facts['longer']:,} longer than their manifest says, kept as they are.")
    rows = [
        [shortened(reason, _NAME), f"{count:,}", kind, overview.rejected.get((kind, reason), [])]
        for kind in ("failed", "excluded")
        for reason, count in sorted(facts[kind].items(), key=lambda item: (-item[1], item[0]))[:_MAX_REASONS]
    ]
    nothing = [] if rows else ["No row of the sources was left out."]
    return {"left_notes": [*nothing, *notes], "left_out": rows}


def _made(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields what the cache was made of, and how."""
    yield from (("key", facts["key"]), ("recipe key", facts["recipe_key"]), ("folder", str(facts["folder"])))
    yield from recipe_lines(facts["recipe"], made_by=facts.get("processor", {}).get("made_by", ""))
    groups = facts["groups"].items()
    yield "shards", ", ".join(f"{g['num_shards']:,} {name} ({human_bytes(g['size_bytes'])})" for name, g in groups)
    yield from (("batches", f"{group}: {promise}") for group, promise in facts["promises"].items())
    yield "made with", ", ".join(f"{name} {version}" for name, version in facts["made_with"].items())
    for part in facts["made_of"][:20]:
        yield "made of", f"{part['name']} {part['key'][:16]}: {part['taken']:,} of {part['num_samples']:,}"


def _sources(overview: Overview) -> list[list[str]]:
    names, codes = overview.columns.sources
    if not any(names):
        return []
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:_MAX_SOURCES].tolist()
    return [[shortened(names[i], _NAME), f"{counts[i]:,}"] for i in order]
