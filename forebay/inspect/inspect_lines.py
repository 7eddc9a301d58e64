"""The reports on a cache, a sample and a pack as lines for a terminal.

They are plain text, at most 100 columns where paths allow it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.inspect.facts import Pack, class_lines
from forebay.inspect.listed_groups import SeenItem, beside_float32, form_rows
from forebay.inspect.plan_lines import count_lines, plan_lines
from forebay.inspect.sample import Sample, spoken, summary
from forebay.store.layout import Array
from forebay.terminal import (
    LABEL,
    bars,
    entry,
    human_hours,
    human_number,
    human_share,
    paragraph,
    settings_text,
    table,
    wrapped,
)
from forebay.visible import human_bytes, printable

_MAX_LANGUAGES = 24
_MAX_IDS = 48
"""Characters of the ids that a line names."""


def report_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report on an opened cache; `facts` is the document of `cache_facts`."""
    yield from _identity(facts)
    has_items = "histograms" in facts
    is_own = facts["histogram"] is not None or not has_items
    sections = {
        listed_lines: has_items,
        _languages: is_own,
        detection_lines: is_own and facts["detection"] is not None,
        _fields: True,
        _durations: is_own,
        histogram_lines: has_items,
        form_lines: "form" in facts,
        class_lines: "classes" in facts,
    }
    for section in (*(section for section, is_said in sections.items() if is_said), _plans, _skipped, _recipe):
        yield ""
        yield from section(facts)


def verify_lines(verify: Mapping[str, Any]) -> Iterator[str]:
    """Yields what verifying found; `verify` is the document of a `VerifyReport`."""
    where = f" in {printable(verify['place'])}" if "place" in verify else ""
    checked = human_bytes(verify["checked_bytes"]) + where
    if verify["ok"]:
        yield f"verify: ok, {checked} are the bytes that were sealed"
        return
    yield f"verify: {len(verify['problems'])} problems, {checked} are the bytes that were sealed"
    yield from (f"  {printable(problem)}" for problem in verify["problems"])


def _identity(facts: Mapping[str, Any]) -> Iterator[str]:
    groups = facts["groups"]
    parts = ", ".join(f"{name} {human_bytes(group['size_bytes'])}" for name, group in groups.items())
    per_hour = "" if facts["bytes_per_hour"] is None else f"; {human_bytes(facts['bytes_per_hour'])} an hour"
    shards = " + ".join(f"{group['num_shards']} {name}" for name, group in groups.items())
    made_with = ", ".join(f"{name} {version}" for name, version in facts["made_with"].items())
    yield f"{Path(facts['folder']).name}: a sealed cache, format {facts['format_version']}"
    yield entry("name", f"{facts['name']}, split {facts['split']}")
    yield entry("folder", printable(facts["folder"]))
    yield entry("key", facts["key"])
    yield entry("recipe key", facts["recipe_key"])
    yield entry("samples", ", ".join([f"{facts['num_samples']:,}", *_held(facts)]))
    yield from wrapped(entry("shards", ""), f"{shards}, at most {facts['rows_per_shard']:,} rows each")
    yield from wrapped(entry("size", ""), f"{human_bytes(facts['size_bytes'])} ({parts}){per_hour}")
    yield from wrapped(entry("made with", ""), made_with)
    for group, promise in facts["promises"].items():
        yield from wrapped(entry("batches", ""), f"{group}: {printable(promise)}")
    for name, variants in ((name, group["variants"]) for name, group in groups.items() if group["variants"]):
        yield from wrapped(entry("variants", ""), f"{name}: {printable(', '.join(variants))}")
    for group, texts in facts.get("captions", {}).items():
        said = "{min} to {max} texts a row, mean {mean}, {blank} blank ones passed over".format(**texts)
        yield entry("captions", f"{group}: {said}")
    for part in facts["made_of"]:
        taken = f"{part['taken']:,} of {part['num_samples']:,} samples"
        yield entry("made of", f"{part['key'][:16]} {part['name']}: {taken}")


def _held(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["histogram"] is not None:
        yield f"{human_hours(facts['hours'])} hours"
    elif "histograms" not in facts:
        yield f"{facts['num_tokens']:,} tokens, no audio"
    elif facts["num_tokens"] or "form" not in facts:
        yield f"{facts['num_tokens']:,} tokens"


def _languages(facts: Mapping[str, Any]) -> Iterator[str]:
    languages = sorted(facts["languages"].items(), key=lambda item: (-item[1]["hours"], -item[1]["samples"], item[0]))
    shown = languages[:_MAX_LANGUAGES]
    is_heard = facts["histogram"] is not None
    part, whole = ("hours", facts["hours"]) if is_heard else ("samples", facts["num_samples"])
    hours = {name: [human_hours(found["hours"])] if is_heard else [] for name, found in shown}
    share = {name: human_share(found[part] / whole) if whole else "-" for name, found in shown}
    rows = [[printable(n), f"{e['samples']:,}", *hours[n], share[n]] for n, e in shown]
    yield from table(["languages", "samples", *(["hours"] if is_heard else []), "share"], rows, left=1)
    if len(languages) > _MAX_LANGUAGES:
        yield f"  and {len(languages) - _MAX_LANGUAGES} more (--json lists them all)"


def detection_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields what was detected, and where that is not what the manifest says."""
    found = facts["detection"]
    shown = found["languages"][:_MAX_LANGUAGES]
    rows = [[printable(each["language"]), f"{each['samples']:,}", f"{each['confidence']:.3f}"] for each in shown]
    yield from table(["detected", "samples", "confidence"], rows, left=1)
    if found["unsaid"]:
        yield from wrapped("  ", f"{found['unsaid']:,} keep the manifest's language: nothing was said of them")
    if found["unknown"]:
        yield from wrapped("  ", f"{found['unknown']:,} have no language: nothing was said, and the manifest has none")
    if not found["disagreements"]:
        return
    yield ""
    yield f"{found['num_disagreements']:,} detected languages are not the manifest's"
    rows = []
    for pair in found["disagreements"][:_MAX_LANGUAGES]:
        ids = ", ".join(map(printable, pair["ids"]))
        ids = ids if len(ids) <= _MAX_IDS else f"{ids[: _MAX_IDS - 3]}..."
        rows.append([printable(pair["manifest"]), printable(pair["detected"]), f"{pair['samples']:,}", ids])
    yield from table(["  manifest", "detected", "samples", "ids"], rows, left=2, last_left=True)
    if len(found["disagreements"]) > _MAX_LANGUAGES:
        yield f"  and {len(found['disagreements']) - _MAX_LANGUAGES} more (--json lists them all)"


def _fields(facts: Mapping[str, Any]) -> Iterator[str]:
    fields = facts["fields"]
    tensors = {name: field for name, field in fields.items() if field["role"] == "tensor"}
    rows = [[n, f["dtype"], f"[{', '.join(map(str, f['shape']))}]", f["group"]] for n, f in tensors.items()]
    yield from table(["fields", "dtype", "shape", "group"], rows, left=4)
    columns = ", ".join(f"{name} ({field['dtype']})" for name, field in fields.items() if field["role"] == "table")
    yield from wrapped("  row table: ", columns)


def _durations(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["histogram"] is None:
        lengths = facts["lengths"]
        yield f"tokens a sample: {lengths['min']:,} to {lengths['max']:,}, mean {lengths['mean']:.1f}"
        return
    edges, counts = facts["histogram"]["edges_s"], facts["histogram"]["samples"]
    places = int(any(edge % 1 for edge in edges[:-1]))
    names = [f"{low:.{places}f} - {high:.{places}f}" for low, high in itertools.pairwise(edges)]
    if round(edges[-1] - edges[-2], 6) > round(edges[1] - edges[0], 6):
        names[-1] = f"{edges[-2]:.{places}f} - {edges[-1]:.1f}"
    rows = zip(names, counts, facts["histogram"]["hours"], bars(counts, beside=2 + LABEL + 18), strict=True)
    cells = [[name, f"{count:,}", human_hours(hours), bar] for name, count, hours, bar in rows]
    yield from table(["durations (s)", "samples", "hours", ""], cells, left=0, last_left=True)


def _plans(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "plans" if facts["plans"] else "plans: none yet (forebay preprocess CONFIG makes the one of its [plan])"
    for plan in facts["plans"]:
        yield from plan_lines(plan)


def _skipped(facts: Mapping[str, Any]) -> Iterator[str]:
    counts = {kind: facts[kind] for kind in ("excluded", "failed") if facts[kind]}
    if not counts and not facts["clipped"] and not facts["longer"]:
        yield "skipped: nothing"
        return
    yield "skipped"
    for kind, reasons in counts.items():
        text = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
        yield from wrapped(f"  {kind:<{LABEL - 2}}", text)
    if facts["clipped"]:
        clip_s = (facts["recipe"].get("audio") or {}).get("clip_s")
        yield entry("clipped", f"{facts['clipped']:,} kept for their first {human_number(clip_s)} s")
    if facts["longer"]:
        yield entry("longer", f"{facts['longer']:,} than their manifest says, kept as they are")
    if counts:
        yield entry("list", printable(facts["rejected"]))


def _recipe(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "recipe"
    for section, settings in facts["recipe"].items():
        text = settings_text(settings) if isinstance(settings, Mapping) else "none"
        yield from wrapped(f"  {section:<{LABEL - 3}} ", text)


_CODECS = {
    "raw": "uint8 patches, read as they are",
    "zstd": "uint8 patches, compressed",
    "webp": "lossless WebP of the resized image",
    "source": "the source file, decoded and resized at load",
}

_CODECS_OF_PROCESSOR = {
    "raw": "what the processor gives, read as it is",
    "zstd": "what the processor gives, its largest field compressed",
}


def listed_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields how many images and clips there are and how large; `facts` is the document of `cache_facts`."""
    for name, items in ((n, facts[of]) for n, of in (("clips", "audios"), ("images", "images")) if of in facts):
        yield name
        yield entry("stored", f"{items['stored']:,}, each once a source file; {items['distinct']:,} different ones")
        yield entry("used", f"{items['used']:,} times in {facts['num_samples']:,} samples")
    if "images" not in facts:
        return
    if "processor" in facts:
        yield entry("processor", printable(facts["processor"]["made_by"]))
    codecs = _CODECS_OF_PROCESSOR if "processor" in facts else _CODECS
    yield entry("codec", f"{facts['codec']}: {codecs[facts['codec']]}")
    if fixed := (facts.get("image_sizes") or {}).get("fixed"):
        yield entry("size", f"{fixed[0]} x {fixed[1]} pixels, all of them")
    if facts["bytes_per_image"] is not None:
        yield entry("an image", beside_float32(facts["bytes_per_image"], facts["float32_bytes_per_image"]))


def form_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the declared fields of batches."""
    rows = [[printable(cell) for cell in row] for row in form_rows(facts)]
    yield from table(["batches", "dtype", "shape", "stored as", ""], rows, left=5)


_SHOWN_IDS = 64


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    # These columns of the row are shown as a conversation and lists of items.
    apart = {"text", *(f"{group}s" for group in sample.items)} if sample.conversation is not None else set()
    yield f"sample {sample.index}"
    width = max(map(len, sample.row.keys() - apart))
    for name, value in sample.row.items():
        if name not in apart:
            said = printable(value) if isinstance(value, str) else json.dumps(value)
            yield from paragraph(f"  {name:<{width}}  ", said)
    yield ""
    yield from _tensor_lines(sample.tensors)
    for group, items in sample.items.items():
        yield ""
        yield from _item_lines(group, items)
    if sample.conversation is not None:
        yield ""
        yield "conversation"
        yield from conversation_lines(sample.conversation)
    if sample.labels is not None:
        yield ""
        yield from _prefix_lines(sample.labels) if "prefix_len" in sample.labels else _learnt_lines(sample)


def _item_lines(group: str, items: Sequence[SeenItem], *, indent: str = "") -> Iterator[str]:
    yield from items[0].listed(items, indent=indent) if items else [f"{indent}{group}s: none"]


def _tensor_lines(tensors: Mapping[str, Array]) -> Iterator[str]:
    """Yields dtype, shape and range of tensors as a table."""
    width = max(16, *(len(name) + 1 for name in tensors), 0)
    yield f"{'fields':<{width + 2}}{'dtype':<10}{'shape':<16}{'min':>12}{'max':>12}{'mean':>12}"
    for name, value in tensors.items():
        about = summary(value)
        numbers = "".join(f"{human_number(about[key]):>12}" for key in ("min", "max", "mean"))
        yield f"  {name:<{width}}{about['dtype']:<10}{about['shape']!s:<16}{numbers}"


def _shown_ids(ids: Sequence[object]) -> str:
    """Returns the first token ids, or groups of them."""
    return ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")


def _prefix_lines(labels: Mapping[str, Any]) -> Iterator[str]:
    ids, prefix_len = labels["ids"], labels["prefix_len"]
    yield f"labels: {len(ids)} tokens, the first {prefix_len} are the prefix (not trained on)"
    yield from paragraph("  ids      ", _shown_ids(ids))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    yield from paragraph("  text     ", printable(labels["text"]))
    yield from paragraph("  special  ", printable(labels["with_special_tokens"]))


def conversation_lines(messages: Sequence[Mapping[str, Any]], *, indent: str = "") -> Iterator[str]:
    """Yields who says what; an image stands where it was shown, by its number."""
    for role, text in spoken(messages):
        head = f"{indent}  {role:<11}"
        for line in text.splitlines() or [""]:
            yield from paragraph(head, printable(line))
            head = " " * len(head)


def _learnt_lines(sample: Sample) -> Iterator[str]:
    labels = sample.labels or {}
    yield f"labels: {len(labels['ids']):,} tokens, {sample.num_learnt:,} of them are learnt"
    # Equal neighbours are one with how many they are: an image is hundreds of them.
    runs = [(token, sum(1 for _ in same)) for token, same in itertools.groupby(labels["ids"])]
    yield from paragraph("  ids      ", _shown_ids([t if count == 1 else f"{t} x {count}" for t, count in runs]))
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    for run in labels["learnt"]:
        yield from paragraph("  learnt   ", f"{run['start']}:{run['end']} {printable(run['text'])}")
    # A control token that is repeated stands once, with how often.
    text = labels["with_special_tokens"]
    text = re.sub(r"(<\|[^|<>]+\|>)\1{3,}", lambda found: f"{found[1]} x {len(found[0]) // len(found[1])} ", text)
    yield from paragraph("  special  ", printable(text))


def pack_lines(pack: Pack) -> Iterator[str]:
    """Yields a pack: what it holds in all, its segments as a table, then their images and texts one by one."""
    facts = pack.to_json()
    yield f"pack {pack.index} of {pack.num_packs:,}"
    yield entry("segments", f"{len(pack.segments):,}")
    fill = f"{human_share(facts['fill'])} fill, {facts['pad_tokens']:,} left over"
    yield entry("tokens", f"{pack.num_tokens:,} of {pack.seq_len:,}: {fill}; {facts['num_learnt']:,} are learnt")
    limit = "" if pack.max_patches is None else f" of {pack.max_patches:,}"
    yield entry("images", f"{facts['num_images']:,}, {facts['num_patches']:,}{limit} patches")
    if pack.images:
        yield entry("bytes", beside_float32(facts["stored_bytes"], facts["float32_bytes"]))
    yield ""
    yield from _segment_table(facts["segments"])
    for number, sample in enumerate(pack.segments):
        yield ""
        yield f"segment {number}: {printable(sample.row['sample_id'])}"
        for group, items in sample.items.items():
            yield from _item_lines(group, items, indent="  ") if items else ()
        yield from conversation_lines(sample.conversation or [])


def _segment_table(segments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        [
            str(number),
            f"{segment['start']:,} - {segment['end']:,}",
            f"{segment['row']['num_tokens']:,}",
            f"{segment['num_learnt']:,}",
            str(len(segment.get("images", ()))),
            f"{segment['row'].get('num_patches', 0):,}",
            str(segment["index"]),
            printable(segment["row"]["sample_id"]),
        ]
        for number, segment in enumerate(segments)
    ]
    head = ["segments", "places", "tokens", "learnt", "images", "patches", "sample", "id"]
    yield from table(head, rows, left=1, last_left=True)


def histogram_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the histograms of tokens, images and patches a sample, those that there are."""
    sizes = facts.get("image_sizes") or {}
    shown = [(f"{name} a sample", found, "samples") for name, found in facts["histograms"].items()]
    shown += [(f"{name} side (px)", sizes[name], "images") for name in ("longest", "shortest") if sizes.get(name)]
    for number, (head, found, of) in enumerate(shown):
        if number:
            yield ""
        yield from count_lines(head, found["edges"], found["samples"], of=of, is_exact=True)
