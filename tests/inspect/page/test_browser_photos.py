"""The page of photos in a real browser: grids of patches, packs to scale."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from forebay import cli
from tests.inspect.conftest import Built
from tests.inspect.page.browser import launched, needs_chromium, playwright, visit

playwright()
pytestmark = needs_chromium
browser = pytest.fixture(scope="module")(launched)


def test_photos_have_their_grids_and_packs_are_drawn(browser: Any, photos: Built, tmp_path: Path) -> None:
    path = tmp_path / "photos.html"
    assert cli.main(["inspect", str(photos.config), "--html", str(path)]) == cli.DONE
    found = visit(browser, path.as_uri())
    page = found.page
    page.locator(".image").first.scroll_into_view_if_needed()
    assert page.locator(".image svg.grid").first.is_visible()
    page.keyboard.press("g")
    assert not page.locator(".image svg.grid").first.is_visible()
    assert page.locator("svg.rows rect.images").count() > 0
    assert page.locator(".t.image").count() > 0
    assert found.said == []
    picture = PIL.Image.open(io.BytesIO(page.screenshot()))
    assert len(picture.convert("RGB").resize((64, 45)).getcolors(64 * 45) or []) > 50
    page.close()
