"""Headless Chromium, driven by Playwright's client; tests of pages are skipped where one of the two is absent."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; run: apt-get install chromium")


def playwright() -> Any:
    """Returns Playwright's module, or skips the test file."""
    reason = "playwright is not installed; run: pip install playwright (its own browsers are not needed)"
    return pytest.importorskip("playwright.sync_api", reason=reason)


def launched() -> Iterator[Any]:
    """Yields a browser until the fixture ends."""
    with playwright().sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page, and what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def until(self, script: str) -> None:
        """Waits until a script is true. Playwright's own wait evaluates text in the page: its policy forbids it."""
        deadline = time.monotonic() + 20
        while not self(script):
            assert time.monotonic() < deadline, script
            self.page.wait_for_timeout(20)

    def cells(self, column: int) -> list[str]:
        """The cells of a column of the table of samples."""
        found: list[str] = self.page.locator(f"#rows tbody tr > :nth-child({column + 1})").all_inner_texts()
        return found


def visit(browser: Any, address: str, **options: Any) -> Visit:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    found = Visit(page)
    page.on("console", lambda message: found.said.append(message.text))
    page.on("pageerror", lambda error: found.said.append(str(error)))
    page.on("request", lambda request: found.asked.append(request.url))
    page.goto(address)
    found.until("document.querySelectorAll('#rows tbody tr').length > 0")
    return found
