"""Pages as a browser parses them, for tests that ask what stands in one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Page:
    """tags: every element in order, its name and attributes; text: what is read; data: what the script is given."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[tuple[dict[str, str], str]] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def data(self) -> Any:
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("type"))

    def elements(self, name: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.tags if found == name]


VOID = {"br", "img", "input", "link", "meta"}


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if len(attributes) != len(attrs):
            self.page.odd.append(f"{tag} has an attribute twice")
        self.page.tags.append((tag, attributes))
        if tag not in VOID:
            self.page.open.append(tag)
        if tag in ("script", "style"):
            self.page.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        if not self.page.open or self.page.open.pop() != tag:
            self.page.odd.append(f"</{tag}> ends nothing")

    def handle_data(self, data: str) -> None:
        if self.page.open and self.page.open[-1] in ("script", "style"):
            attributes, text = self.page.scripts[-1]
            self.page.scripts[-1] = (attributes, text + data)
        else:
            self.page.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.page.odd.append(f"a comment: {data[:40]}")

    def unknown_decl(self, data: str) -> None:
        self.page.odd.append(f"a declaration: {data[:40]}")

    def handle_pi(self, data: str) -> None:
        self.page.odd.append(f"an instruction: {data[:40]}")


def read_page(text: str) -> Page:
    """Returns a page, whose elements all end as they begin."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    if parser.page.open:
        parser.page.odd.append(f"{parser.page.open} do not end")
    return parser.page
