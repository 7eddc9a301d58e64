"""The checks find doubtful samples in one set, and between two; pure: facts and limits in, findings out.

Between two sets it is samples of the same content: of a set that is learnt from and one that is evaluated on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from forebay.inspect.checks.limits import BY_NAME, Limits, Severity, misfits
from forebay.inspect.checks.measured import Finding, Measured
from forebay.inspect.checks.text_letters import LISTED, listed_hashes
from forebay.preprocess.group import EXCLUDING
from forebay.steps.text.script import scripts_of
from forebay.store.layout import Array, Ints
from forebay.terminal import first_of
from forebay.visible import printable


def finding(
    found: Measured,
    row: int,
    check: str,
    message: str,
    *,
    value: float | str | None = None,
    limit: float | str | None = None,
    other: str | None = None,
    other_set: str | None = None,
) -> Finding:
    """Returns a finding of a check about a sample of a set; row: -1: about the set as a whole."""
    is_sample = row >= 0
    return Finding(
        check=check,
        severity=BY_NAME[check].severity,
        set=found.name,
        sample_id=found.sample_id(row) if is_sample else "",
        row=int(found.places[row]) if is_sample else -1,
        source=found.file(row) if is_sample else "",
        message=message,
        value=round(value, 4) if isinstance(value, float) else value,
        limit=limit,
        other=other,
        other_set=other_set,
    )


_SHOWN = 5


def class_findings(found: Measured, limits: Limits) -> Iterator[Finding]:
    """Yields what is doubtful of the classes of a set; nothing of a set without classes."""
    if found.classes is None:
        return
    usable = found.usable().tolist()
    first: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for row, names in enumerate(found.classes.names):
        for name in set(names) if usable[row] else ():
            first.setdefault(name, row)
            counts[name] += 1
    missing = [name for name in found.classes.known if name not in counts]
    empty = {"folders of classes without an image": found.classes.folders, "classes without a sample": missing}
    for what, names in empty.items():
        if names:
            said = f"{what}, {len(names)}: {first_of(list(map(_shown, names)), _SHOWN)}"
            yield finding(found, -1, "empty_class", said, value=len(names), limit=0)
    if not counts:
        return
    if len(counts) == 1 and sum(counts.values()) > 1:
        [(name, count)] = counts.items()
        yield finding(found, -1, "single_class", f"all {count} samples have the class {_shown(name)}", value=1, limit=2)
        return
    for name, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
        if count < limits.min_class_samples:
            samples = "1 sample" if count == 1 else f"{count} samples"
            message = f"its class {_shown(name)} has {samples}, the limit is {limits.min_class_samples:g}"
            yield finding(found, first[name], "small_class", message, value=count, limit=limits.min_class_samples)
    yield from _uneven(found, counts, limits)


def _uneven(found: Measured, counts: Counter[str], limits: Limits) -> Iterator[Finding]:
    """Compares the largest class with the smallest of those that have samples enough."""
    held = {name: count for name, count in counts.items() if count >= limits.min_class_samples}
    if len(held) < 2:
        return
    (large, most), (small, least) = (pick(held.items(), key=lambda item: item[1]) for pick in (max, min))
    if most / least >= limits.class_ratio:
        message = (
            f"{_shown(large)} has {most} samples, {_shown(small)} {least}: {most / least:.3g} times as many, the limit "
            f"is {limits.class_ratio:g}"
        )
        yield finding(found, -1, "uneven_classes", message, value=most / least, limit=limits.class_ratio)


def _shown(name: str) -> str:
    text = printable(name)
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


_BY_DURATION = frozenset({"too_long", "too_short"})
"""Reasons that only say that a filter of the config works."""
_RATES_HZ = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)


def judged(found: Measured, limits: Limits) -> Iterator[Finding]:
    """Yields what the checks find in a set, but for its duplicates: see `forebay.inspect.checks.judge`."""
    dropped = set() if found.dropped is None else set(found.places[found.dropped].tolist())
    yield from (each for each in _judged(found, limits) if each.row not in dropped)


def _judged(found: Measured, limits: Limits) -> Iterator[Finding]:
    yield from _refused(found)
    if "loudest_dbfs" in found.facts:
        yield from _sound(found, limits)
    if "file_rate_hz" in found.facts:
        yield from _rates(found, limits)
    if "seconds" in found.facts and "chars" in found.facts:
        yield from _speed(found, limits)
        yield from _annotations(found, limits)
    if "overlap_s" in found.facts:
        is_shared = found.facts["overlap_s"] > limits.overlap_s
        says = "{value:.2f} s of it are of an earlier segment too, the limit is {limit:g} s"
        yield from _each(found, "overlap", is_shared, "overlap_s", says, limit=limits.overlap_s)
    if "chars" in found.facts:
        yield from _scripts(found, limits)
        yield from _repeats(found, limits)
    yield from _images(found, limits)
    yield from class_findings(found, limits)
    yield from _words(found, limits)


def _refused(found: Measured) -> Iterator[Finding]:
    for each in found.refused:
        severity: Severity = "warning" if each.reason in EXCLUDING else "error"
        yield Finding(
            check=each.reason,
            severity="info" if each.reason in _BY_DURATION else severity,
            set=found.name,
            sample_id=each.sample_id,
            row=each.place,
            source=found.file(each.row) if each.row >= 0 else "",
            message=each.message,
        )


def _rows(mask: Array) -> list[int]:
    rows: list[int] = np.flatnonzero(mask).tolist()
    return rows


def _each(
    found: Measured, check: str, mask: Array, fact: str, says: str, *, limit: float | None = None, kind: type = float
) -> Iterator[Finding]:
    """Yields a finding of each row of a mask. says: with the `{value}` of the fact in braces, and its `{limit}`."""
    for row in _rows(mask):
        value = kind(found.facts[fact][row])
        yield finding(found, row, check, says.format(value=value, limit=limit), value=value, limit=limit)


def _sound(found: Measured, limits: Limits) -> Iterator[Finding]:
    facts, loud = found.facts, limits.quiet_dbfs
    is_silent = (facts["loudest_dbfs"] < loud) & ~found.meant_silent()
    says = "its loudest piece of 20 ms has {value:.1f} dBFS, the limit is {limit:g}"
    yield from _each(found, "silent", is_silent, "loudest_dbfs", says, limit=loud)
    says = f"{{value:.1%}} of its pieces are below {loud:g} dBFS, the limit is {{limit:.0%}}"
    is_quiet = (facts["quiet"] >= limits.quiet_share) & ~is_silent & ~found.meant_silent()
    yield from _each(found, "mostly_silent", is_quiet, "quiet", says, limit=limits.quiet_share)
    says = "{value:.2%} of its samples are at full scale, the limit is {limit:.2%}"
    is_bad = facts["clipped"] >= limits.badly_clipped_share
    yield from _each(found, "clipping", is_bad, "clipped", says, limit=limits.badly_clipped_share)
    is_some = (facts["clipped"] >= limits.clipped_share) & ~is_bad
    yield from _each(found, "some_clipping", is_some, "clipped", says, limit=limits.clipped_share)
    says = "above 60 % of its band it has {value:.0f} dB of its power, the limit is {limit:g}"
    is_narrow = (facts["band_db"] < limits.band_db) & ~is_silent
    yield from _each(found, "narrow_band", is_narrow, "band_db", says, limit=limits.band_db)
    says = "its mean is {value:.1%} of full scale, the limit is {limit:.1%}"
    yield from _each(found, "dc_offset", facts["offset"] >= limits.dc_offset, "offset", says, limit=limits.dc_offset)


def _rates(found: Measured, limits: Limits) -> Iterator[Finding]:
    facts, wanted = found.facts, found.rate_hz or 0
    says = "the file has {value} Hz, the config {limit}: a build upsamples it"
    is_low = facts["file_rate_hz"] < wanted
    yield from _each(found, "low_rate", is_low, "file_rate_hz", says, limit=wanted, kind=int)
    assert found.longer is not None
    seconds, stated_s = facts["seconds"], facts["stated_s"]
    moved = np.abs(seconds - stated_s) > limits.rate_match * stated_s
    for row in _rows(moved & np.isfinite(facts["file_rate_hz"])):
        rate = int(facts["file_rate_hz"][row])
        ratio = float(stated_s[row] / seconds[row])
        # The rate at which the clip would be as long as was stated, where that is one that people use.
        fits = (each for each in _RATES_HZ if each != rate and abs(ratio * each / rate - 1) <= limits.rate_match)
        real = next(fits, None)
        if real is not None:
            said = f"{seconds[row]:.2f} s at the {rate} Hz of its header, {stated_s[row]:.2f} s by its manifest: as if "
            said += f"its samples were of {real} Hz; correct the header, or the manifest"
            yield finding(found, row, "wrong_rate", said, value=rate, limit=real)
        elif found.longer[row]:
            heard, stated = float(seconds[row]), float(stated_s[row])
            said = f"{heard:.2f} s of audio, its manifest says {stated:.2f} s"
            yield finding(found, row, "longer_than_stated", said, value=heard, limit=stated)


def _speed(found: Measured, limits: Limits) -> Iterator[Finding]:
    """Yields texts that are spoken too fast or too slowly, or far from the median of its language."""
    misfit = misfits(
        found.facts["chars"], found.facts["seconds"], found.language_of, pace=limits.pace, usable=found.usable()
    )
    for name, rows in misfit.rows():
        for row in rows.tolist():
            rate, language, number = float(misfit.per_s[row]), found.language(row), int(found.language_of[row])
            limit = limits.max_chars_per_s if name == "too_many_chars" else limits.min_chars_per_s
            said = f"the limit is {limit:g}"
            if name == "chars_outlier":
                middle, spread = misfit.ranges[number]
                low, high = (float(np.exp(middle + sign * limits.outlier_deviations * spread)) for sign in (-1, 1))
                median = f"the median of {language or 'all'} is {np.exp(middle):.1f}"
                said = f"{median} and the limits are {low:.1f} and {high:.1f}"
                limit = round(high if rate > high else low, 4)
            chars, seconds = int(found.facts["chars"][row]), float(found.facts["seconds"][row])
            said = f"{chars} characters in {seconds:.2f} s, {rate:.2f} a second, {said}"
            yield finding(found, row, name, said, value=rate, limit=limit)


def _scripts(found: Measured, limits: Limits) -> Iterator[Finding]:
    facts = found.facts
    judged_ = facts["letters"] >= limits.min_letters
    is_wrong = judged_ & (facts["foreign"] >= limits.wrong_script_share) & (facts["is_known"] > 0)
    is_mixed = judged_ & (facts["foreign"] >= limits.mixed_script_share) & ~is_wrong
    wrong, mixed = limits.wrong_script_share, limits.mixed_script_share
    for name, mask, limit in (("wrong_script", is_wrong, wrong), ("mixed_scripts", is_mixed, mixed)):
        for row in _rows(mask):
            share, language = float(facts["foreign"][row]), found.language(row)
            scripts = scripts_of(language) if language else None
            written = (
                f"{language} is written in {', '.join(sorted(scripts))}" if scripts else "its language is not known"
            )
            most = f"most of them {facts['script'][row]}: {written}"
            said = f"{share:.0%} of its letters are not, {most}; the limit is {limit:.0%}"
            yield finding(found, row, name, said, value=share, limit=limit)
    says = "the word {value!r} mixes scripts whose letters look alike"
    yield from _each(found, "mixed_word", facts["word"] != "", "word", says, kind=str)


def _repeats(found: Measured, limits: Limits) -> Iterator[Finding]:
    chars, usable = found.facts["chars"], found.usable()
    refused = {each.row for each in found.refused if each.reason == "empty_text"}
    has_texts = bool((chars > 0).any())
    for row in _rows((chars == 0) & has_texts & ~found.meant_silent()):
        if row not in refused:
            yield finding(found, row, "empty_text", "its text is empty", value=0, limit=1)
    hashes = np.where(usable & (chars >= limits.repeated_min_chars), found.content["text"], 0)
    values, counts = np.unique(hashes, return_counts=True)
    often = (values != 0) & (counts >= limits.repeated_texts)
    times = dict(zip(values[often].tolist(), counts[often].tolist(), strict=True))
    for row in _rows(np.isin(hashes, values[often])):
        count, limit = times[int(hashes[row])], limits.repeated_texts
        said = f"{count} samples have its text, the limit is {limit:g}"
        yield finding(found, row, "repeated_text", said, value=count, limit=limit)


def _words(found: Measured, limits: Limits) -> Iterator[Finding]:
    if "cut" in found.facts:
        says = "the last {value} tokens of its text are cut off"
        yield from _each(found, "cut_text", found.facts["cut"] > 0, "cut", says, limit=0, kind=int)
    if "loops" in found.facts:
        says, loops = "the same words stand {value} times in a row, the limit is {limit:g}", limits.loops
        is_loop = found.facts["loops"] >= loops
        yield from _each(found, "looping_text", is_loop, "loops", says, limit=loops, kind=int)


def _annotations(found: Measured, limits: Limits) -> Iterator[Finding]:
    breaks, digits, limit = found.facts["breaks"], found.facts["digits"], limits.max_digit_share
    for row in _rows((breaks > 0) | (digits > limit)):
        said = f"its text has {breaks[row]:.0f} tabs or line ends, and {digits[row]:.0%} of it are digits"
        value = float(digits[row])
        yield finding(found, row, "annotation_text", f"{said}, the limit is {limit:.0%}", value=value, limit=limit)


def _images(found: Measured, limits: Limits) -> Iterator[Finding]:
    images = found.images
    if images is None:
        return
    side = np.minimum(images.width, images.height)
    checks = {
        "tiny_image": ((side > 0) & (side < limits.min_image_side), side, limits.min_image_side),
        "blank_image": (images.range < limits.blank_range, images.range, limits.blank_range),
    }
    owners = np.repeat(np.arange(len(found)), np.diff(images.starts))
    for name, (mask, values, limit) in checks.items():
        for use in _rows(mask[images.flat]):
            image = int(images.flat[use])
            value, said = int(values[image]), f"{images.width[image]} x {images.height[image]} pixels"
            if name == "blank_image":
                said = f"values that differ by {value} of 255"
            message = f"image {images.names[image]} has {said}, the limit is {limit:g}"
            yield finding(found, int(owners[use]), name, message, value=value, limit=limit)


_OF_SOUND = ("sound", "file")
"""The hashes that a recording is known by in raw data, and in a cache that keeps waveforms."""


def contents(found: Measured, limits: Limits) -> dict[str, Ints]:
    """Returns hashes of each sample's content by what they are of, int64 [samples]; 0 where nothing is to be compared.

    Silent clips are left out: all of one length are the same, and are told of as silent.
    """
    kinds = [name for name in found.content if name in _OF_SOUND or name.startswith("stored")]
    images, listed = found.images, [name for name in found.content if name.startswith(LISTED)]
    if images is not None or listed:
        names = [*kinds[-1:], *(["text"] if found.classes is None else []), *listed]
        said = sum((found.content[name] for name in names), np.zeros(len(found), np.int64))
        shown = 0 if images is None else listed_hashes(images.hashes, images.starts, images.flat)
        return {"conversation" if names else "image": said + shown}
    kinds = kinds if any(found.content[name].any() for name in kinds) else ["text"]
    usable = found.usable()
    if kinds != ["text"] and "loudest_dbfs" in found.facts:
        usable &= ~(found.facts["loudest_dbfs"] < limits.quiet_dbfs)
    return {name: np.where(usable, found.content.get(name, 0), 0) for name in kinds}


def duplicates(found: Measured, limits: Limits) -> Iterator[Finding]:
    """Yields the samples whose content an earlier one has, and of those with two texts all of them."""
    known = contents(found, limits)
    # One kind tells all: two files of the same bytes are decoded to the same samples.
    kind = next((name for name in (*_OF_SOUND, *known) if name in known and known[name].any()), None)
    if kind is None:
        return
    texts = found.content.get("text", np.zeros(len(found), np.int64))
    for rows in _groups(known[kind]):
        if kind not in ("text", "conversation") and len(set(texts[rows].tolist())) > 1:
            yield from _contradictions(found, rows, texts)
            continue
        first = found.sample_id(rows[0])
        for row in rows[1:]:
            yield finding(found, row, "duplicate", f"its content is that of {first!r}", other=first)


def _contradictions(found: Measured, rows: Sequence[int], texts: Ints) -> Iterator[Finding]:
    for row in rows:
        other = next(each for each in rows if texts[each] != texts[row])
        name = found.sample_id(other)
        what, text = ("image", "class") if found.classes is not None else ("recording", "text")
        message = f"its {what} is that of {name!r}, whose {text} is another one; one of the two is wrong"
        yield finding(found, row, "contradiction", message, other=name)


def _groups(hashes: Ints) -> Iterator[list[int]]:
    """Yields the rows of each hash that more than one has, by their first; rows rise."""
    order = np.argsort(hashes, kind="stable")
    order = order[hashes[order] != 0]
    if not len(order):
        return
    borders = np.concatenate([[0], np.flatnonzero(np.diff(hashes[order])) + 1, [len(order)]])
    many = np.flatnonzero(np.diff(borders) > 1)
    yield from sorted(order[borders[i] : borders[i + 1]].tolist() for i in many.tolist())


def leaks(found: Measured, other: Measured, limits: Limits, *, first: int | None = None) -> Iterator[Finding]:
    """Yields the samples of a set whose content another one has. first: only so many usable samples of that count."""
    counted = np.cumsum(other.usable()) <= (len(other) if first is None else first)
    ours, theirs = contents(found, limits), contents(other, limits)
    twins = np.full(len(found), -1)
    for kind in ours.keys() & theirs.keys():
        met = _met(ours[kind], np.where(counted, theirs[kind], 0))
        twins = np.where(twins < 0, met, twins)
    for row in np.flatnonzero(twins >= 0).tolist():
        name = other.sample_id(int(twins[row]))
        yield finding(
            found, row, "leak", f"its content is that of {name!r} of {other.name}", other=name, other_set=other.name
        )
    if found.images is not None and other.images is not None:
        yield from _shared_images(found, other, counted, twins >= 0)


def comparable(found: Measured, other: Measured, limits: Limits) -> bool:
    """Returns whether two sets have content that can be compared."""
    return bool(contents(found, limits).keys() & contents(other, limits).keys())


def _met(ours: Ints, theirs: Ints) -> Ints:
    """Returns the first row of theirs that has each hash, -1 where none has; 0 is no hash."""
    order = np.argsort(theirs, kind="stable")
    sorted_ = theirs[order]
    place = np.searchsorted(sorted_, ours)
    inside = np.minimum(place, max(len(sorted_) - 1, 0))
    is_met = (place < len(sorted_)) & (ours != 0)
    if len(sorted_):
        is_met &= sorted_[inside] == ours
        return np.where(is_met, order[inside], -1)
    return np.full(len(ours), -1)


def _shared_images(found: Measured, other: Measured, counted: Array, is_leak: Array) -> Iterator[Finding]:
    assert found.images is not None
    assert other.images is not None
    uses = np.repeat(np.arange(len(other)), np.diff(other.images.starts))
    where: dict[str, int] = {}
    for use, image in enumerate(other.images.flat.tolist()):
        if counted[uses[use]]:
            where.setdefault(other.images.hashes[image], int(uses[use]))
    for row in range(len(found)):
        used = found.images.flat[found.images.starts[row] : found.images.starts[row + 1]].tolist()
        shared = [image for image in used if found.images.hashes[image] in where]
        if shared and not is_leak[row]:
            name = other.sample_id(where[found.images.hashes[shared[0]]])
            message = f"image {found.images.names[shared[0]]} is of {name!r} of {other.name} too"
            yield finding(found, row, "shared_image", message, other=name, other_set=other.name)
