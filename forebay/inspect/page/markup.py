"""Pages from templates. All that they show is made printable and escaped: nothing that data say becomes markup.

In a template the end of a line and the indentation behind it are nothing. Its attributes show data by the filter
`line`, which leaves no line end in them.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from forebay.inspect.page.words import shortened, time_text
from forebay.terminal import human_share
from forebay.visible import human_bytes, printable, printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_DROP = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path fill="#0b7285" d="M8 1c3 4 5 6 5 9a5 5 0 0 1-10 0c0-3 2-5 5-9z"/></svg>'
)
"""The icon of a page: without one a browser would ask for it."""


@functools.cache
def environment() -> Environment:
    """Returns what renders the templates of `assets/`."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # not at import: only a page needs it
    from markupsafe import Markup

    def seen(value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return "" if value is None else printable_lines(str(value))

    made = Environment(
        autoescape=True,
        finalize=seen,
        undefined=StrictUndefined,
        loader=FunctionLoader(lambda name: re.sub(r"\n\s*", "", asset(name))),
    )
    made.filters |= {
        "bytes": human_bytes,
        "comma": lambda number: f"{number:,}",
        "g": lambda number: f"{number:g}",
        "line": lambda text: printable(str(text)),
        "number": number_text,
        "percent": percent,
        "share": human_share,
        "short": lambda text, most: text if isinstance(text, Markup) else shortened(text, most),
        "time": time_text,
    }
    return made


def chart(name: str, *data: Any) -> Markup:
    """Returns a chart of `charts.html`."""
    made: Markup = getattr(environment().get_template("charts.html").module, name)(*data)
    return made


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
    """Returns a style sheet, a script or a template that stands beside this module."""
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


def page(template: str, title: str, *, data: Any, origin: str = "", **shown: Any) -> str:
    """Returns a whole document. data: what the script reads, as JSON. origin: see `policy`. shown: of the template."""
    from markupsafe import Markup

    return (
        environment()
        .get_template(template)
        .render(
            title=title,
            policy=policy(origin=origin),
            icon=data_url(_DROP, "image/svg+xml"),
            style=Markup(asset("report.css")),
            script=Markup(asset("report.js")),
            data=Markup(script_json(data)),
            **{"home": "#top", "links": (), **shown},
        )
    )


def percent(value: float) -> str:
    """Returns a share of the width, as short as it is exact enough."""
    return f"{max(value, 0.0):.3f}".rstrip("0").rstrip(".") + "%"


def number_text(value: float) -> str:
    """Returns a number as a person writes it."""
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:,.2f}".rstrip("0").rstrip(".")
