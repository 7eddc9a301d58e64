"""What the checks find in the classes of a set of images: such as have no sample or few, and all samples in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from forebay.lint.finding import finding, set_finding
from forebay.lint.limits import Limits
from forebay.lint.measured import Classes, Finding, Measured
from forebay.visible import printable

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
    yield from _empty(found, found.classes, counts)
    if not counts:
        return
    if len(counts) == 1 and sum(counts.values()) > 1:
        [(name, count)] = counts.items()
        yield set_finding(found, "single_class", f"all {count} samples have the class {_shown(name)}", value=1, limit=2)
        return
    for name, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
        if count < limits.min_class_samples:
            samples = "1 sample" if count == 1 else f"{count} samples"
            message = f"its class {_shown(name)} has {samples}, the limit is {limits.min_class_samples:g}"
            yield finding(found, first[name], "small_class", message, value=count, limit=limits.min_class_samples)
    yield from _uneven(found, counts, limits)


def _empty(found: Measured, classes: Classes, counts: Counter[str]) -> Iterator[Finding]:
    missing = [name for name in classes.known if name not in counts]
    for what, names in (
        ("folders of classes without an image", classes.folders),
        ("classes without a sample", missing),
    ):
        if names:
            yield set_finding(found, "empty_class", f"{what}, {len(names)}: {_list(names)}", value=len(names), limit=0)


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
        yield set_finding(found, "uneven_classes", message, value=most / least, limit=limits.class_ratio)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(_shown, names[:_SHOWN])) + more


def _shown(name: str) -> str:
    text = printable(name)
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
