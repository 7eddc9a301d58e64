"""The page of the public API, from the `__all__` of each package's face and from docstrings.

`docs/make_site.py` puts it into the site; it is not kept in the repository.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

FACES = {
    "forebay": "What most programs need.",
    "forebay.config": "The tree of settings; `docs/config.md` explains each field.",
    "forebay.preprocess": "Raw data to a sealed cache.",
    "forebay.store": "Caches: finding, opening, verifying.",
    "forebay.plan": "Which samples form which batch, in which order; no torch.",
    "forebay.train": "Caches, or raw data, to batches.",
    "forebay.train.integrations.hf": "The Trainer of transformers.",
    "forebay.inspect": "Reports, read-only.",
    "forebay.errors": "Every error raised on purpose; `forebay explain` says more of each code.",
}

_ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (?=\S)", re.MULTILINE)


def page() -> str:
    """Returns the page as Markdown."""
    shown: dict[int, str] = {}
    head = (
        "# API\n\nWhat the packages offer: these names stay, and a change of one is in the changelog. Everything "
        "else is forebay's own affair.\n"
    )
    return "\n".join([head, *(part for face, summary in FACES.items() for part in _face(face, summary, shown))])


def _face(name: str, summary: str, shown: dict[int, str]) -> Iterator[str]:
    """Yields the parts of a face. shown: the names of what earlier faces have shown, by the identity of the object."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if inspect.isclass(v)]
    yield f"## {name}\n\n{summary}\n"
    for each in public:
        value = getattr(module, each)
        if inspect.ismodule(value) or each.startswith("__"):
            continue
        if (first := shown.setdefault(id(value), f"{name}.{each}")) == f"{name}.{each}":
            yield _entry(first, value)
        else:
            yield f"### {name}.{each}\n\nThe same as `{first}`.\n"


def _entry(name: str, value: Any) -> str:
    title = name.rpartition(".")[2]
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"### {name}\n\n`{title} = {_short(repr(value))}`\n"
    body = [f"### {name}\n", _signature(title, value), _prose(inspect.getdoc(value))]
    if inspect.isclass(value) and not issubclass(value, Exception):
        body += [part for each, member in _members(value) for part in (f"**{each}**\n", _prose(inspect.getdoc(member)))]
    if inspect.isclass(value) and issubclass(value, Exception):
        body.append(f"Code: `{value.code}`.\n" if hasattr(value, "code") else "")
    return "\n".join(body)


def _signature(title: str, value: Any) -> str:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(value) and len(signature) > 400:  # a section of the config: its page has the fields
        return ""
    signature = signature.replace("forebay.config.tree.", "").replace("'", "")
    if len(title + signature) > 100:
        signature = re.sub(r", (?=\*|\w+:)", ",\n    ", signature).replace("(", "(\n    ", 1)
    return f"```python\n{title}{signature}\n```\n"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties of a class with what they are called with."""
    for name, member in vars(kind).items():
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)):
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
            yield f"`{name}({', '.join(parameters)})`", member
        elif isinstance(member, property):
            yield f"`{name}`", member


def _prose(text: str | None) -> str:
    """Returns a docstring as Markdown: what it says of an argument is an item of a list."""
    if not text:
        return ""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if _ARGUMENT.match(paragraph):
            paragraph = _ARGUMENT.sub(r"\n- `\1`: ", paragraph)
            paragraph = re.sub(r"\n+(?!- )", "\n    ", paragraph.strip())
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs) + "\n"


def _short(text: str) -> str:
    return text if len(text) < 80 else f"{text[:77]}..."
