"""Pages are made of templates, and text that these show never becomes an element."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from forebay.inspect.page.words import asset, data_url, environment, page, policy, script_json, url_size
from forebay.visible import printable, printable_lines
from tests.inspect.page.html import read_page

ANYTHING = st.text(st.characters(exclude_categories=()), max_size=60) | st.sampled_from(
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "]]>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "&lt;b&gt;",
        "\u2028\u2029\u202e\x00\x7f\ud800",
        "javascript:alert(1)",
    ]
)


@given(ANYTHING, ANYTHING)
def test_text_and_attributes_come_back_as_text_and_attributes(text: str, value: str) -> None:
    template = environment().from_string('<p title="{{ value|line }}">{{ text }}<b>{{ text }}</b></p>')
    found = read_page(template.render(text=text, value=value))
    assert found.odd == []
    assert [name for name, _ in found.tags] == ["p", "b"]
    assert found.tags[0][1] == {"title": printable(value)}
    assert "".join(found.texts) == 2 * printable_lines(text)


@given(st.recursive(ANYTHING | st.integers() | st.none(), lambda s: st.lists(s) | st.dictionaries(ANYTHING, s)))
def test_json_in_a_page_is_the_same_json_and_ends_no_element(document: object) -> None:
    text = script_json(document)
    assert text.isascii()
    assert not set("<>&\x7f") & set(text)
    assert not any(unicodedata.category(c) == "Cc" for c in text)
    assert json.loads(text) == document
    found = read_page(page("page.html", "a page", data=document))
    assert found.odd == []
    assert found.data == document
    assert len(found.elements("script")) == 2


TEMPLATES = [path.name for path in resources.files("forebay.inspect.page").joinpath("assets").iterdir()]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith(".html")])
def test_a_template_trusts_nothing_and_cleans_what_stands_in_attributes(name: str) -> None:
    text = asset(name)
    assert environment().autoescape is True
    assert not re.search(r"\|\s*safe|autoescape|Markup|xmlattr", text)
    assert not re.search(r"=\{\{|='", text), "an attribute stands in double quotes"
    for shown in re.findall(r'(?:alt|title)="([^"]*)"', text):
        assert all("|line" in value or value.strip() in NUMBERS for value in re.findall(r"{{(.*?)}}", shown)), shown


NUMBERS = {"seconds", "loop.index0", "piece.about", "titles[loop.index0]"}
"""Values of attributes that forebay makes of numbers and of its own words."""


def test_what_is_not_given_to_a_template_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ nothing }}").render()


def test_the_policy_names_the_script_and_style_of_the_page_and_no_host() -> None:
    document = page("page.html", "a page", data={})
    found = read_page(document)
    rules = next(element["content"] for element in found.elements("meta") if "http-equiv" in element)
    assert rules == policy()
    assert rules.startswith("default-src 'none'; ")
    scripts = [text for attributes, text in found.scripts if not attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    named = re.findall(r"(?:script|style)-src 'sha256-([^']+)'", rules)
    assert sorted(digests) == sorted(named)
    assert "unsafe" not in rules
    assert "http" not in rules
    assert "connect-src" not in rules
    assert "connect-src 'self'" in policy(origin="'self'")


def test_a_page_names_no_address_of_the_network() -> None:
    text = page("page.html", "a page", data={})
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "url(" not in asset("report.css")
    assert "@import" not in asset("report.css")
    for word in ("eval(", "innerHTML", "insertAdjacentHTML", "document.write", 'setAttribute("style"'):
        assert word not in asset("report.js"), word


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000])
def test_the_size_of_a_url_is_no_less_than_its_length(size: int) -> None:
    assert url_size(b"x" * size) >= len(data_url(b"x" * size, "image/png"))
