"""The site of the documents: its pages, its links, and the checks that `make docs` makes of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs/make_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_assembled_and_in_the_navigation(script: Any, tmp_path: Path) -> None:
    assert script.unlisted() == []
    script.assemble(tmp_path / "pages", runs=False)
    there = {path.relative_to(tmp_path / "pages").as_posix() for path in (tmp_path / "pages").rglob("*.md")}
    assert there == {*script.pages().values(), "examples.md", "configs.md", "api.md"}
    assert {"index.md", "first-look.md", "decisions/project.md"} <= there
    api = (tmp_path / "pages/api.md").read_text()
    assert "### forebay.train.make_loader\n\n```python\nmake_loader(" in api
    assert "### forebay.errors.ConfigError" in api
    assert "The same as `forebay.Cache`." in api
    assert "```python\nfrom pathlib import Path\n\nimport forebay" in (tmp_path / "pages/first-look.md").read_text()
    assert "## plain_loop.py\n\n```python\n" in (tmp_path / "pages/examples.md").read_text()


def test_what_names_a_document_links_to_it(script: Any) -> None:
    text = "See `docs/caches.md`, `examples/plain_loop.py`, `forebay/cli/`.\n```\n`docs/caches.md`\n```\n"
    found = script.translated(text, name="docs/decisions/x.md", place="decisions/x.md")
    assert found == (
        "See [`docs/caches.md`](../caches.md), [`examples/plain_loop.py`](../examples.md#plain_looppy), "
        "`forebay/cli/`.\n"
        "```\n`docs/caches.md`\n```\n"
    )
    assert script.translated("[a](ARCHITECTURE.md#rooms)", name="README.md", place="index.md") == (
        "[a](architecture.md#rooms)"
    )
    with pytest.raises(SystemExit, match=r"README.md: the link to nowhere.md leads to no page"):
        script.translated("[a](nowhere.md)", name="README.md", place="index.md")


def test_lists_and_bars_are_as_the_generator_reads_them(script: Any) -> None:
    def translated(text: str) -> str:
        return str(script.translated(text, name="README.md", place="index.md"))

    assert translated("text:\n- one\n  more\n- two\n") == "text:\n\n- one\n  more\n- two\n"
    assert translated("| `a \\| b` | c \\| d |") == "| `a | b` | c \\| d |"


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<a href="b.html">', []),
        ('<a href="b.html#here">', []),
        ('<a href="b.html#gone">', ["a.html: b.html#gone has no such place"]),
        ('<a href="c.html">', ["a.html: c.html is not there"]),
        ('<a href="https://example.com">', []),
        ('<script src="https://unpkg.com/x">', ["a.html: loads https://unpkg.com/x"]),
        ('<link rel="stylesheet" href="//fonts.example.com/x">', ["a.html: loads //fonts.example.com/x"]),
        ('<img src="data:image/png;base64,AAAA">', []),
        ("<style>@import 'https://example.com/x.css'</style>", ["a.html: loads https://example.com/x.css"]),
        ("<style>p {background: url(https://example.com/x.png)}</style>", ["a.html: loads https://example.com/x.png"]),
    ],
)
def test_a_link_to_nowhere_and_a_load_from_elsewhere_are_found(
    html: str, found: list[str], script: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<h1 id="here">')
    assert list(script.problems(tmp_path)) == found
