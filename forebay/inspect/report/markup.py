"""Elements of a page. Text is escaped where it enters an element, so nothing that data say becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any, TypeAlias

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
