"""Whatever a stranger's cache says, its page holds the elements that forebay makes and no other."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import cli
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.serve import Pages
from forebay.inspect.page.write_pages import write_report
from forebay.store.cache import open_cache
from forebay.visible import printable, printable_lines
from tests.inspect.conftest import Built
from tests.inspect.page.html import Page, read_page
from tests.inspect.page.test_markup import ANYTHING
from tests.store_factory import make_cache

ELEMENTS = set(
    re.findall(
        r"\S+",
        "html head meta title link style body script a header nav div button main section p h1 h2 h3 code dl dt dd "
        "figure figcaption svg rect line text path table thead tbody tr th td article span details summary img audio "
        "ul li pre input select option noscript dialog kbd strong",
    )
)
ATTRIBUTES = set(
    re.findall(
        r"\S+",
        "lang charset http-equiv content name rel href type id class width height x y x1 x2 y1 y2 rx role aria-label "
        "aria-hidden aria-sort aria-live tabindex scope title alt src loading controls preload dir d viewbox "
        "preserveaspectratio open value placeholder autocomplete spellcheck data-seconds data-column",
    )
)


def assert_safe(page: Page, *, root: str = "") -> None:
    """Every element, attribute and address of a page is one that forebay makes."""
    assert page.odd == []
    assert {name for name, _ in page.tags} <= ELEMENTS
    for name, attributes in page.tags:
        assert attributes.keys() <= ATTRIBUTES, (name, attributes.keys() - ATTRIBUTES)
        for key in ("href", "src"):
            starts = ("data:", "#", f"{root}/") if root else ("data:", "#")
            assert attributes.get(key, "#").startswith(starts)
    assert len(page.elements("script")) == 2
    assert len(page.elements("style")) == 1


def _bytes(text: str) -> str:
    """A text as a shard holds it: of bytes that are no UTF-8 where it has a lone surrogate."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def _metadata(word: str) -> dict[str, Any]:
    return {
        "name": word,
        "split": word,
        "languages": {word: {"samples": 3, "hours": 1.0}},
        "excluded": {word: 2},
        "failed": {word: 1},
        "made_with": {word: word},
        "recipe": {word: {word: word}, "audio": {"features": word, "dtype": word}, "text": {"prompt": word}},
    }


@given(st.lists(ANYTHING, min_size=3, max_size=3), st.lists(ANYTHING, min_size=3, max_size=3), ANYTHING)
def test_ids_texts_and_metadata_stay_text(ids: list[str], texts: list[str], word: str) -> None:
    word = word.encode("utf-8", "replace").decode()
    ids, texts = ([_bytes(text) for text in given] for given in (ids, texts))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = make_cache(
            root, num_samples=3, features="none", sample_ids=ids, texts=texts, metadata=_metadata(word), tokenizer=None
        )
        overview = overview_of(open_cache(folder), None, choice=CardChoice(), roots=[])
        write_report(overview, root / "report.html")
        page = read_page((root / "report.html").read_text(encoding="utf-8"))
        served = Pages(overview, root="/token")
        answers = [served.answer(path, "") for path in ("/", "/sample/0", "/sample/1", "/sample/2")]
    assert_safe(page)
    assert printable_lines(word) in page.text
    for answer in answers:
        assert answer.status == 200
        assert_safe(read_page(bytes(answer.parts[0]).decode("utf-8")), root="/token")


@pytest.mark.parametrize(
    "word", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202e\x00\x1b[2J"]
)
def test_the_list_of_what_was_left_out_is_a_strangers_too(word: str, tmp_path: Path) -> None:
    ids = [f"{word} {i}" for i in range(5)]
    folder = make_cache(tmp_path, num_samples=3, failed_rows=(0, 4), sample_ids=ids)
    assert cli.main(["inspect", str(folder), "--html", str(tmp_path / "report.html")]) == cli.DONE
    page = read_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert_safe(page)
    assert printable(ids[0]) in page.text


def test_a_page_of_photos_and_plans_has_no_other_elements(photos: Built, tmp_path: Path) -> None:
    for target in (photos.config, photos.folder):
        assert cli.main(["inspect", str(target), "--html", str(tmp_path / "report.html")]) == cli.DONE
        assert_safe(read_page((tmp_path / "report.html").read_text(encoding="utf-8")))
