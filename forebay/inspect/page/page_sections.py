"""The sections of a page about a whole cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.page import markup
from forebay.inspect.page.doubts import LABEL, NEAR_S, DoubtGroups
from forebay.inspect.page.markup import Html, tag
from forebay.inspect.page.overview import Overview
from forebay.inspect.page.plan_page import classes_panel, form_panel, line, panel, size_charts, table
from forebay.inspect.page.words import recipe_lines, shortened, time_text
from forebay.inspect.sizes import count_histogram
from forebay.steps.text.pace import PACE
from forebay.visible import human_bytes

_MAX_LANGUAGES, _MAX_REASONS, _MAX_SOURCES, _MAX_MISFITS = 60, 40, 12, 30
_NAME = 120


def hero(overview: Overview) -> Html:
    """Returns what the cache is, in one look."""
    facts = overview.facts
    folder = Path(facts["folder"]).name
    return tag(
        "section",
        tag("p", f"Sealed cache, split {shortened(facts['split'], _NAME)}", class_="eyebrow"),
        tag("h1", shortened(facts["name"], _NAME)),
        tag(
            "p",
            tag("code", shortened(folder, 200)),
            f" sealed {overview.sealed}" if overview.sealed else None,
            class_="key",
        ),
        tag("p", _lead(overview), class_="lead"),
        tag("dl", [_figure(*figure) for figure in _figures(overview)], class_="figures"),
        class_="hero",
        id="top",
    )


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
    return shortened("; ".join(parts), 400)


def _figure(name: str, value: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value))


def _figures(overview: Overview) -> Iterable[tuple[str, str]]:
    facts, columns = overview.facts, overview.columns
    yield "samples", f"{facts['num_samples']:,}"
    if columns.seconds is not None:
        yield "of sound", time_text(facts["hours"] * 3600)
    if _has_images(overview):
        yield "images", f"{facts['images']['distinct']:,}"
    if columns.has_tokens:
        yield "tokens", f"{facts['num_tokens']:,}"
    if "classes" in facts:
        yield "classes", f"{facts['classes']['num_classes']:,}"
    languages = [name for name in facts["languages"] if name != "unknown"]
    if languages:
        yield ("language" if len(languages) == 1 else "languages"), f"{len(languages):,}"
    yield "on disk", human_bytes(facts["size_bytes"])
    yield "left out", f"{_left_out(facts):,}"


def _left_out(facts: Mapping[str, Any]) -> int:
    return sum(int(count) for kind in ("excluded", "failed") for count in facts[kind].values())


def lengths(overview: Overview) -> Html:
    """Returns the histograms."""
    facts = overview.facts
    drawn: list[Html] = []
    if facts["histogram"] is not None:
        found = facts["histogram"]
        drawn.append(panel("Lengths", markup.histogram(found["edges_s"], found["samples"], unit="s", what="samples")))
    for name, found in _counts(overview).items():
        chart = markup.histogram(found["edges"], found["samples"], unit=name, what="samples")
        if len(found["samples"]) == 1 and found["edges"][1] - found["edges"][0] == 1:
            chart = tag("p", f"{found['edges'][0]:,}, all of them.", class_="about")
        drawn.append(panel(f"{name.capitalize()} a sample", chart))
    drawn += size_charts(facts)
    spoken = [_languages(facts), _detection(facts["detection"]), classes_panel(facts)]
    return tag("section", tag("h2", "Shape"), tag("div", drawn, spoken, class_="charts"), id="shape")


def _counts(overview: Overview) -> dict[str, Any]:
    if "histograms" in overview.facts:
        return dict(overview.facts["histograms"])
    return {"tokens": count_histogram(overview.columns.tokens)}


def _languages(facts: Mapping[str, Any]) -> Html | None:
    languages = facts["languages"]
    if not languages or set(languages) == {"unknown"}:
        return None
    is_heard = facts["histogram"] is not None
    part = "hours" if is_heard else "samples"
    ordered = sorted(languages.items(), key=lambda item: (-item[1][part], item[0]))
    top = max(ordered[0][1][part], 1e-12)
    body = [
        line(
            shortened(name, _NAME),
            f"{found['samples']:,}",
            *([time_text(3600 * found["hours"])] if is_heard else []),
            markup.bar(found[part] / top),
            numbers=1 + is_heard,
        )
        for name, found in ordered[:_MAX_LANGUAGES]
    ]
    head = ["language", "samples", *(["sound"] if is_heard else []), ""]
    more = len(ordered) - _MAX_LANGUAGES
    note = tag("p", f"and {more:,} more; forebay inspect --json lists them all", class_="note") if more > 0 else None
    return panel("Languages", table(head, body), note)


def _detection(found: Mapping[str, Any] | None) -> Html | None:
    """Returns the languages that were detected, and which of them are not the manifest's; None where none was."""
    if found is None:
        return None
    pairs = found["disagreements"][:_MAX_LANGUAGES]
    body = [
        line(
            shortened(f"{pair['manifest']}, detected {pair['detected']}", _NAME),
            f"{pair['samples']:,}",
            shortened(", ".join(pair["ids"]), _NAME),
            numbers=1,
        )
        for pair in pairs
    ]
    detected = ", ".join(
        f"{shortened(entry['language'], _NAME)} {entry['samples']:,} ({entry['confidence']:.2f})"
        for entry in found["languages"][:_MAX_LANGUAGES]
    )
    about = f"{detected or 'none'}. Without: {found['unsaid'] + found['unknown']:,}."
    rows = table(["manifest", "samples", "ids"], body) if body else None
    return panel("Detected languages", tag("p", about, class_="note"), rows)


def samples(overview: Overview, cards: Sequence[Html]) -> Html:
    """Returns the cards."""
    count, whole = len(cards), len(overview.columns)
    about = f"{count:,} of {whole:,}, {overview.how}." if count < whole else f"All {whole:,} of them."
    note = tag("p", overview.token_note, class_="note") if overview.token_note else None
    legend = [
        tag("span", name, class_=f"t {kind}")
        for kind, name in (_LEGEND if overview.columns.has_targets else ())
        if kind != "image" or _has_images(overview)
    ]
    head = tag(
        "div", tag("h2", "Samples"), tag("p", about, class_="about"), tag("p", legend, class_="legend"), class_="head"
    )
    return tag("section", head, note, tag("div", cards, class_="cards"), id="samples")


_LEGEND = (("learnt", "learnt"), ("given", "given"), ("image", "image"))


def _has_images(overview: Overview) -> bool:
    return "histograms" in overview.facts


def doubts(overview: Overview, link: Any) -> Html:
    """Returns duplicates and transcripts that do not fit. link: gives the markup that names a sample by its index."""
    found = overview.doubts
    near = (
        "The same text, whatever its case, and lengths within "
        f"{100 * NEAR_S:.0f} % of each other; texts of fewer than 12 characters are not compared."
    )
    exact = "Equal by the hashes of the stored values: features and waveform, or images and tokens or classes."
    parts = [_groups("Exact duplicates", exact, found.exact, link)]
    if overview.columns.cache.constants.get("prompt") != LABEL:
        parts.append(_groups("Near duplicates", near, found.near, link))
    if found.z is not None:
        parts.insert(0, _misfits(overview, link))
    return tag("section", tag("h2", "To look at"), tag("div", parts, class_="doubts"), id="doubts")


def _groups(name: str, about: str, groups: DoubtGroups, link: Any) -> Html:
    if not groups.num_groups:
        count = tag("p", "None found.", class_="about")
    else:
        count = tag("p", f"{groups.num_samples:,} samples in {groups.num_groups:,} groups.", class_="about")
    items = [tag("li", [[link(index), " "] for index in group]) for group in groups.shown]
    more = groups.num_groups - len(groups.shown)
    rest = tag("p", f"and {more:,} more groups", class_="note") if more > 0 else None
    return tag(
        "div",
        tag("h3", name),
        count,
        tag("p", about, class_="note"),
        tag("ul", items) if items else None,
        rest,
        class_="panel",
    )


def _misfits(overview: Overview, link: Any) -> Html:
    doubts, rate, z = overview.doubts, overview.columns.rate, overview.doubts.z
    assert rate is not None
    assert z is not None
    rows = [
        line(link(i), f"{rate[i]:.1f}", f"{z[i]:+.1f}" if np.isfinite(z[i]) else "", doubts.checks[i], numbers=2)
        for i in doubts.misfits[:_MAX_MISFITS].tolist()
    ]
    about = (
        f"As forebay lint finds them, spaces left out: over {PACE.max_per_s:g} characters a second (an error, which "
        f"--drop-ids drops); as warnings, of clips of {PACE.min_s:g} s and more, fewer than {PACE.min_per_s:g}, or "
        f"more than {PACE.deviations:g} robust deviations from the median of a language of {PACE.min_clips:g} clips or "
        "more (median absolute deviation of the logarithm)."
    )
    counts = Counter(doubts.checks.values())
    count = f"{len(doubts.misfits):,} samples: {', '.join(f'{name} {counts[name]:,}' for name in sorted(counts))}."
    more = len(doubts.misfits) - len(rows)
    rest = tag("p", f"and {more:,} more, nearer to the rest", class_="note") if more > 0 else None
    shown = table(["sample", "characters/s", "deviations", "check"], rows, numbers=2) if rows else None
    hint = tag("p", tag("code", "--worst"), " shows them above.", class_="note") if rows else None
    return tag(
        "div",
        tag("h3", "Transcripts that do not fit"),
        tag("p", count if rows else "None found.", class_="about"),
        tag("p", about, class_="note"),
        shown,
        rest,
        hint,
        class_="panel",
    )


def left_out(overview: Overview) -> Html:
    """Returns what is no sample, and why."""
    facts = overview.facts
    rows: list[Html] = []
    for kind in ("failed", "excluded"):
        for reason, count in sorted(facts[kind].items(), key=lambda item: (-item[1], item[0]))[:_MAX_REASONS]:
            ids = overview.rejected.get((kind, reason), [])
            shown = [[tag("code", shortened(name, 80)), " "] for name in ids]
            rows.append(line(shortened(reason, _NAME), f"{count:,}", kind, shown, numbers=1))
    notes = []
    if facts["clipped"]:
        clip_s = (facts["recipe"].get("audio") or {}).get("clip_s")
        notes.append(f"{facts['clipped']:,} kept for their first {clip_s} s.")
    if facts["longer"]:
        notes.append(f"{facts['longer']:,} longer than their manifest says, kept as they are.")
    if not rows:
        notes.insert(0, "No row of the sources was left out.")
    body = table(["reason", "rows", "kind", "first ids"], rows, numbers=1) if rows else None
    place = tag("p", "The list: ", tag("code", shortened(str(facts["rejected"]), 300)), class_="note") if rows else None
    return tag(
        "section",
        tag("h2", "Left out"),
        tag("p", " ".join(notes), class_="about") if notes else None,
        body,
        place,
        id="left-out",
    )


def made(overview: Overview) -> Html:
    """Returns what the cache was made of, and how."""
    facts = overview.facts
    lines = [("key", facts["key"]), ("recipe key", facts["recipe_key"]), ("folder", str(facts["folder"]))]
    lines += list(recipe_lines(facts["recipe"], made_by=facts.get("processor", {}).get("made_by", "")))
    lines.append(
        (
            "shards",
            ", ".join(
                f"{g['num_shards']:,} {name} ({human_bytes(g['size_bytes'])})" for name, g in facts["groups"].items()
            ),
        )
    )
    lines += [("batches", f"{group}: {promise}") for group, promise in facts["promises"].items()]
    lines.append(("made with", ", ".join(f"{name} {version}" for name, version in facts["made_with"].items())))
    lines += [
        ("made of", f"{part['name']} {part['key'][:16]}: {part['taken']:,} of {part['num_samples']:,}")
        for part in facts["made_of"][:20]
    ]
    cells = [tag("div", tag("dt", shortened(name, 80)), tag("dd", shortened(text, 600))) for name, text in lines]
    return tag(
        "section",
        tag("h2", "How it was made"),
        tag("dl", cells, class_="row made"),
        form_panel(facts),
        _fields(facts),
        _sources(overview),
        _settings_of(facts["recipe"]),
        id="made",
    )


def _fields(facts: Mapping[str, Any]) -> Html:
    rows = [
        line(
            shortened(name, _NAME),
            field["dtype"],
            f"[{', '.join(map(str, field['shape']))}]" if field["role"] == "tensor" else "a column",
            field["group"],
        )
        for name, field in list(facts["fields"].items())[:200]
    ]
    return tag(
        "details",
        tag("summary", f"{len(facts['fields'])} fields"),
        table(["field", "type", "shape", "group"], rows, numbers=0),
        class_="cells",
    )


def _sources(overview: Overview) -> Html | None:
    names, codes = overview.columns.sources
    if not any(names):
        return None
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:_MAX_SOURCES].tolist()
    rows = [line(shortened(names[i], _NAME), f"{counts[i]:,}", numbers=1) for i in order]
    more = len(names) - len(rows)
    rest = tag("p", f"and {more:,} more", class_="note") if more > 0 else None
    return tag(
        "details", tag("summary", f"{len(names):,} sources"), table(["source", "samples"], rows), rest, class_="cells"
    )


def _settings_of(recipe: Mapping[str, Any]) -> Html:
    text = json.dumps(recipe, indent=1, ensure_ascii=False)
    return tag("details", tag("summary", "the recipe"), tag("pre", shortened(text, 20_000)), class_="cells")


def rows_section(overview: Overview, *, note: str) -> Html:
    """Returns the table of samples, which the script fills."""
    heads = [
        tag(
            "th",
            tag("button", column.name, type="button", data_column=i),
            scope="col",
            class_="n" if column.is_number else None,
            aria_sort="none",
        )
        for i, column in enumerate(overview.rows.shown)
    ]
    search = tag(
        "input",
        type="search",
        id="search",
        placeholder="id or text",
        aria_label="search ids and texts",
        autocomplete="off",
        spellcheck="false",
    )
    names = [name for name in overview.columns.languages[0][:500] if name]
    options = [
        tag("option", "all languages", value=""),
        *(
            tag("option", shortened(name, 60), value=str(i))
            for i, name in enumerate(overview.columns.languages[0][:500])
            if name
        ),
    ]
    chosen = tag("select", options, id="language", aria_label="language") if names else None
    head = tag(
        "div",
        tag("h2", "All samples"),
        tag("p", note, class_="about"),
        tag("div", search, chosen, class_="tools"),
        class_="head",
    )
    whole = tag("table", tag("thead", tag("tr", heads)), tag("tbody"), id="rows")
    pages = tag(
        "p",
        tag("button", "Previous", type="button", id="previous"),
        tag("span", "", id="count", role="status", aria_live="polite"),
        tag("button", "Next", type="button", id="next"),
        class_="pages",
    )
    frame = tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label="table of samples")
    return tag("section", head, frame, pages, tag("noscript", "This table needs scripts."), id="all")
