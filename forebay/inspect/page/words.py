"""The words and markup of pages: a recipe, what became of its rows, and tokens with what a loss makes of each.

All that templates show is made printable and escaped: nothing that data say becomes markup. In a template the end of a
line and the indentation behind it are nothing. Its attributes show data by the filter `line`, which leaves no line end
in them.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forebay.store.layout import Array
from forebay.terminal import human_share
from forebay.visible import human_bytes, printable, printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LIMIT = 4_000
"""Characters of one text that a page shows."""
_FIRST_IDS = 6


def shortened(text: str, limit: int = LIMIT) -> str:
    """Returns a text of at most so many characters, and says so where it was cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}… ({len(text):,} characters)"


def time_text(seconds: float) -> str:
    """Returns a length of time in the unit that fits it: `3.1 min`, `12.4 h`."""
    if seconds < 90:
        return f"{seconds:,.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:,.1f} min"
    hours = seconds / 3600
    return f"{hours:,.1f} h" if hours < 1000 else f"{hours:,.0f} h"


def sealed_at(folder: Path) -> str | None:
    """Returns when a cache's metadata was written, in UTC, by the clock of the disk; None where it cannot be told."""
    try:
        found = (folder / "metadata.json").stat().st_mtime
        return datetime.datetime.fromtimestamp(found, datetime.UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    except (OSError, ValueError, OverflowError):
        return None


def recipe_lines(recipe: Mapping[str, Any], *, made_by: str = "") -> Iterator[tuple[str, str]]:
    """Yields what each section of a recipe does, as (name, sentence). made_by: the class of an image processor."""
    makers = {"source": _source, "audio": _audio, "vision": _vision, "text": _text}
    for section, settings in recipe.items():
        if isinstance(settings, Mapping):
            others = (f"{name} {_plain(value)}" for name, value in settings.items() if value not in (None, [], {}))
            make = makers.get(section)
            parts = others if make is None else make({**settings, "made_by": made_by})
            yield section, "; ".join(part for part in parts if part) or "as it is by default"


def _source(settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"rows of kind {_plain(settings.get('kind', 'unknown'))}, split {_plain(settings.get('split', 'unknown'))}"
    languages = settings.get("languages")
    if isinstance(languages, list) and languages:
        yield f"languages {', '.join(map(_plain, languages[:20]))}"
    least, most = settings.get("min_duration_s"), settings.get("max_duration_s")
    if least:
        yield f"at least {_plain(least)} s long"
    if most:
        yield f"at most {_plain(most)} s long (longer: {_plain(settings.get('overlong', 'keep'))})"
    if settings.get("max_samples"):
        yield f"the first {_plain(settings['max_samples'])} samples"


def _audio(settings: Mapping[str, Any]) -> Iterator[str]:
    mels = f" of {_plain(settings['n_mels'])} bins" if settings.get("n_mels") else ""
    yield f"{_plain(settings.get('features', 'unknown'))} features{mels}"
    if settings.get("sample_rate_hz"):
        yield f"at {settings['sample_rate_hz']:,} Hz" if isinstance(settings["sample_rate_hz"], int) else "at some rate"
    if settings.get("dtype"):
        yield f"stored as {_plain(settings['dtype'])}"
    if "keep_waveform" in settings:
        yield "the waveform is kept beside them" if settings["keep_waveform"] else "no waveform is kept"


def _vision(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("images") == "processor":
        yield f"images as {settings['made_by'] or 'their processor'} gives them"
    else:
        yield f"images by backend {_plain(settings.get('backend', 'unknown'))}"
    if settings.get("processor"):
        yield f"processor with digest {_plain(settings['processor'])[:16]}"


def _text(settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"prompt {_plain(settings.get('prompt', 'unknown'))}"
    if settings.get("tokenizer"):
        yield f"tokenizer with digest {_plain(settings['tokenizer'])[:16]}"
    if settings.get("normalize"):
        yield f"texts normalised by {_plain(settings['normalize'])}"
    if settings.get("max_label_tokens"):
        yield f"at most {_plain(settings['max_label_tokens'])} label tokens"


def _plain(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value), 200)


def rejected_ids(path: Path, *, wanted: int) -> dict[tuple[str, str], list[str]]:
    """Returns the first ids of each (kind, reason) in a cache's list of what was left out; kinds are as in that list.

    wanted: reasons that there are; reading ends when each has its ids, or after 200,000 lines. Lines that are none of
    forebay's are passed over.
    """
    found: dict[tuple[str, str], list[str]] = {}
    if not wanted:
        return found
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            for number, line in enumerate(file):
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    entry = json.loads(line)
                    kind, reason, sample_id = (str(entry[name]) for name in ("kind", "reason", "sample_id"))
                    ids = found.setdefault((kind, reason), [])
                    ids += [sample_id] if len(ids) < _FIRST_IDS else []
                if number >= 200_000 or (
                    len(found) >= wanted and all(len(ids) >= _FIRST_IDS for ids in found.values())
                ):
                    break
    except OSError:
        return found
    return found


MAX_TOKENS = 700
"""Tokens of a sample that a page shows."""
Kind = Literal["given", "learnt", "image"]
_KINDS: Mapping[Kind, str] = {"learnt": "learnt", "given": "given, not learnt", "image": "an image's places"}
_SEEN = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})
_MAX_PIECE = 8
"""Tokens that one character may be made of, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """Neighbouring tokens of one kind. text: what they say, None without a tokenizer. count: how many they are."""

    kind: Kind
    text: str | None
    ids: tuple[int, ...]
    count: int

    @property
    def shown(self) -> str:
        """The text with white space that is seen, or the ids."""
        text = " ".join(map(str, self.ids)) if self.text is None else self.text.translate(_SEEN)
        return f"{text} × {self.count:,}" if self.kind == "image" else text

    @property
    def about(self) -> str:
        """The ids, and what a loss makes of them."""
        return f"{' '.join(map(str, self.ids))}: {_KINDS[self.kind]}"


def learnt_mask(tensors: Mapping[str, Any]) -> Array:
    """Returns bool [num_tokens]: which tokens of a sample are targets."""
    ids = tensors["input_ids"]
    if "label_mask" in tensors:
        return np.asarray(tensors["label_mask"] != 0)
    prefix = tensors.get("prefix_len")
    return np.arange(len(ids)) >= (int(prefix[0]) if prefix is not None and len(prefix) else 0)


def repeated_ids(tensors: Mapping[str, Any]) -> frozenset[int]:
    """Returns the ids that stand four times in a row or more where nothing is learnt.

    Beside images these are their places: a cache of any processor does not say which token they have.
    """
    given = np.where(learnt_mask(tensors), -1, tensors["input_ids"])
    same = (given[1:] == given[:-1]) & (given[1:] >= 0)
    runs = same[:-2] & same[1:-1] & same[2:]
    return frozenset(given[3:][runs].tolist())


def pieces_of(tensors: Mapping[str, Any], *, image_ids: Collection[int], tokenizer: Any) -> list[TokenPiece]:
    """Returns the first 700 tokens as pieces: a run of image tokens is one, so are tokens that share a character.

    tokenizer: of `load_tokenizer`; None: pieces have no text.
    """
    ids, learnt = tensors["input_ids"][:MAX_TOKENS].tolist(), learnt_mask(tensors)[:MAX_TOKENS].tolist()
    kinds: list[Kind] = [
        "image" if token in image_ids else "learnt" if target else "given"
        for token, target in zip(ids, learnt, strict=True)
    ]
    found: list[TokenPiece] = []
    start = 0
    for kind, run in itertools.groupby(kinds):
        end = start + len(list(run))
        if kind == "image":
            for token, same in itertools.groupby(ids[start:end]):
                text = None if tokenizer is None else _decoded(tokenizer, [token])
                found.append(TokenPiece(kind=kind, text=text, ids=(token,), count=len(list(same))))
        else:
            found += _read(ids[start:end], kind, tokenizer)
        start = end
    return found


def _read(ids: list[int], kind: Kind, tokenizer: Any) -> list[TokenPiece]:
    if tokenizer is None:
        return [TokenPiece(kind=kind, text=None, ids=(token,), count=1) for token in ids]
    found, start = [], 0
    while start < len(ids):
        end = start + 1
        # A character outside of ASCII may be several tokens, none of which is text by itself.
        while (text := _decoded(tokenizer, ids[start:end])).endswith("\ufffd") and end < min(
            len(ids), start + _MAX_PIECE
        ):
            end += 1
        found.append(TokenPiece(kind=kind, text=text, ids=tuple(ids[start:end]), count=end - start))
        start = end
    return found


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


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
