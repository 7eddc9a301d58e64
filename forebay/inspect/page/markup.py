"""Elements of a page. Text is escaped where it enters an element, so nothing that data say becomes markup.

Bars and rows as SVG whose widths are shares of the page: they stretch, their text does not.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, TypeAlias

import numpy as np

from forebay.inspect.page.plan_history import DrawnPlan, PackSegment
from forebay.store.layout import Array
from forebay.visible import printable, printable_lines


class Html(str):
    """Markup that enters a page as it is. Only this module and the pages' own constants make it."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"

_DROP = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path fill="#0b7285" d="M8 1c3 4 5 6 5 9a5 5 0 0 1-10 0c0-3 2-5 5-9z"/></svg>'
)
"""The icon of a page: without one a browser would ask for it."""

_VOID = frozenset({"br", "img", "input", "link", "meta"})


def tag(name_: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Returns an element. children: text is escaped and made printable, None left out, lists are taken apart.

    attributes: `class_` is class, `aria_label` aria-label; None and False are left out, True has no value.
    """
    head = "".join(_attribute(key, value) for key, value in attributes.items())
    inner = joined(children)
    return Html(f"<{name_}{head}>" if name_ in _VOID else f"<{name_}{head}>{inner}</{name_}>")


def joined(children: Iterable[Child]) -> Html:
    """Returns children one after the other, as `tag` takes them."""
    return Html("".join(map(_child, children)))


def text_of(value: str) -> str:
    """Returns text as it may stand between tags: every character is seen, none is markup."""
    return html.escape(printable_lines(value), quote=True)


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return text_of(child)
    if isinstance(child, int | float):
        return text_of(str(child))
    return joined(child)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(printable(str(value)), quote=True)}"'


def data_url(data: bytes, media_type: str) -> str:
    """Returns bytes as a URL that needs no network."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def url_size(data: bytes) -> int:
    """Returns how long `data_url` makes bytes, about."""
    return 4 * (len(data) // 3 + 1) + 32


def script_json(document: Any) -> str:
    """Returns JSON that may stand inside a `script` element: no character of it can end the element."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\x7f", "\\u007f")


def asset(name: str) -> str:
    """Returns a style sheet or script that stands beside this module."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def policy(*, origin: str = "") -> str:
    """Returns what a page may load: its own script and style, and media that stand in it, or at its `origin` too."""
    media = f"{origin} data:".strip()
    rules = {
        "default-src": "'none'",
        "script-src": _digest(asset("report.js")),
        "style-src": _digest(asset("report.css")),
        "img-src": media,
        "media-src": media,
        **({"connect-src": origin} if origin else {}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def page(title: str, body: Html, *, data: Any, origin: str = "") -> str:
    """Returns a whole document. data: what the script reads, as JSON. origin: see `policy`."""
    head = joined(
        [
            tag("meta", charset="utf-8"),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(origin=origin))}">'),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("link", rel="icon", href=data_url(_DROP, "image/svg+xml")),
            Html(f"<style>{asset('report.css')}</style>"),
        ]
    )
    blocks = Html(
        f'<script type="application/json" id="data">{script_json(data)}</script><script>{asset("report.js")}</script>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{blocks}</body></html>\n'


_HEIGHT, _AXIS = 164, 20
_MAX_TICKS = 6
_ROW, _GAP = 20, 6
_THIN, _THIN_GAP = 7, 2


def histogram(edges: Sequence[float], counts: Sequence[int], *, unit: str, what: str) -> Html:
    """Returns bins [edges[i], edges[i + 1]) as bars of equal width; each says its range and count when pointed at."""
    top, number = max([*counts, 1]), max(len(counts), 1)
    width = 100 / number
    bars = [
        tag(
            "rect",
            tag("title", f"{number_text(edges[i])} to {number_text(edges[i + 1])} {unit}: {count:,} {what}"),
            x=percent(i * width + 0.08 * width),
            width=percent(0.84 * width),
            y=round((_HEIGHT - 4) * (1 - count / top) + 4, 1),
            height=round((_HEIGHT - 4) * count / top, 1),
            rx=2,
            class_="bar",
        )
        for i, count in enumerate(counts)
        if count
    ]
    step = -(-number // _MAX_TICKS)
    places = [*range(0, number - step // 2, step), number]
    ticks = [
        tag(
            "text",
            number_text(edges[i]) + (f" {unit}" if i == number else ""),
            x=percent(i * width),
            y=_HEIGHT + 15,
            class_="tick first" if not place else "tick last" if i == number else "tick minor" if place % 2 else "tick",
        )
        for place, i in enumerate(places)
    ]
    base = tag("line", x1="0", x2="100%", y1=_HEIGHT + 0.5, y2=_HEIGHT + 0.5, class_="base")
    most = counts.index(max(counts)) if counts else 0
    label = f"{what} by {unit}: {sum(counts):,} in all, most between {number_text(edges[most])} and "
    label += f"{number_text(edges[most + 1])} {unit}"
    return tag(
        "svg", bars, base, ticks, width="100%", height=_HEIGHT + _AXIS, role="img", aria_label=label, class_="chart"
    )


def bar(share: float, *, held: float | None = None) -> Html:
    """Returns a bar for a cell of a table; held: the share of it that is filled, the rest is padding."""
    whole = tag("rect", x="0", y=2, width=percent(100 * share), height=8, rx=2, class_="bar" if held is None else "pad")
    own = (
        None
        if held is None
        else tag("rect", x="0", y=2, width=percent(100 * share * held), height=8, rx=2, class_="bar")
    )
    return tag("svg", whole, own, width="100%", height=12, aria_hidden="true", class_="cellbar")


def packs(drawn: Sequence[DrawnPlan]) -> Html:
    """Returns packs, each a row as wide as `seq_len`: samples as segments, their image tokens in another colour."""
    parts: list[Html] = []
    for place, pack in enumerate(drawn):
        y = place * (_ROW + _GAP)
        used = sum(segment.length for row in pack.rows for segment in row)
        about = f"{pack.label}: {int(used):,} of {int(pack.room):,} tokens, {len(pack.rows[0])} samples"
        parts.append(tag("rect", tag("title", about), x="0", y=y, width="100%", height=_ROW, class_="room"))
        parts += _segments(pack.rows[0], pack.room, y=y, height=_ROW, unit="tokens")
    height = len(drawn) * (_ROW + _GAP)
    label = f"{len(drawn)} packs drawn to scale, from the emptiest to the fullest"
    return tag("svg", parts, width="100%", height=height, role="img", aria_label=label, class_="rows")


def batch(drawn: DrawnPlan, *, scale: float, unit: str) -> Html:
    """Returns the rows of one batch, the longest first; what follows a row is padding. scale: the length of 100 %."""
    parts: list[Html] = []
    for place, row in enumerate(drawn.rows):
        y = place * (_THIN + _THIN_GAP)
        parts.append(
            tag("rect", x="0", y=y, width=percent(100 * drawn.room / scale), height=_THIN, rx=1.5, class_="pad")
        )
        parts += _segments(row, scale, y=y, height=_THIN, unit=unit)
    height = len(drawn.rows) * (_THIN + _THIN_GAP)
    held = sum(segment.length for row in drawn.rows for segment in row)
    share = 1 - held / (drawn.room * len(drawn.rows)) if drawn.room else 0.0
    label = f"a batch of {drawn.label}: {len(drawn.rows)} rows, {100 * share:.0f} % padding"
    return tag("svg", parts, width="100%", height=max(height, 1), role="img", aria_label=label, class_="rows")


def _segments(row: Sequence[PackSegment], room: float, *, y: int, height: int, unit: str) -> list[Html]:
    parts: list[Html] = []
    start = 0.0
    for place, segment in enumerate(row):
        title = tag("title", f"sample {segment.index}: {number_text(segment.length)} {unit}")
        shade = "segment" if place % 2 == 0 else "segment odd"
        parts.append(_box(start, segment.length, room, y=y, height=height, kind=shade, title=title))
        parts += [
            _box(start + first, end - first, room, y=y, height=height, kind="images", title=title)
            for first, end in segment.images
        ]
        start += segment.length
    return parts


def _box(start: float, length: float, room: float, *, y: int, height: int, kind: str, title: Html) -> Html:
    whole = max(room, 1e-9)
    return tag(
        "rect",
        title,
        x=percent(100 * start / whole),
        y=y,
        width=percent(100 * length / whole),
        height=height,
        class_=kind,
    )


def fills(values: Array) -> Html:
    """Returns a histogram of how full packs are, in percent."""
    shares = np.clip(100 * values, 0, 100)
    low = int(min(90, np.floor(shares.min() / 10) * 10)) if len(shares) else 0
    edges = np.linspace(low, 100, 11)
    counts = np.histogram(shares, edges)[0].tolist()
    return histogram(edges.tolist(), counts, unit="% full", what="packs")


def percent(value: float) -> str:
    """Returns a share of the width, as short as it is exact enough."""
    return f"{max(value, 0.0):.3f}".rstrip("0").rstrip(".") + "%"


def number_text(value: float) -> str:
    """Returns a number as a person writes it."""
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:,.2f}".rstrip("0").rstrip(".")
