"""The pages in a real browser: headless Chromium, driven by Playwright's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from tests.inspect.page.browser import Visit, launched, needs_chromium, playwright, visit
from tests.inspect.page.serve.conftest import served
from tests.store_factory import make_cache

playwright()
pytestmark = needs_chromium
browser = pytest.fixture(scope="module")(launched)
HOSTILE = '<img src=x onerror="window.hit=1">'
IDS = (
    HOSTILE,
    "</script><script>window.hit=1</script>",
    '"><svg onload=window.hit=1>',
    "plain-3",
    "plain-4",
    "plain-5",
)
TEXTS = ("<!--<script>", "</style><script>window.hit=1</script>", "\u2028\u202e{{1}}", "Hello, $5 world.")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips with waveforms, ids and texts that try to be markup."""
    root = tmp_path_factory.mktemp("browser")
    return make_cache(root, num_samples=6, keep_waveform=True, sample_ids=IDS, texts=TEXTS)


@pytest.fixture(scope="module")
def file(cache: Path) -> str:
    path = cache.parent / "report.html"
    assert cli.main(["inspect", str(cache), "--html", str(path)]) == cli.DONE
    return path.as_uri()


@pytest.fixture(params=["file", "serve"])
def open_page(request: pytest.FixtureRequest, browser: Any, cache: Path, file: str) -> Iterator[Visit]:
    if request.param == "file":
        found = visit(browser, file)
        yield found
        found.page.close()
        return
    with served(cache) as client:
        found = visit(browser, f"http://{client.host}{client.root}/")
        yield found
        found.page.close()


def test_it_runs_no_text_and_asks_nobody_but_itself(open_page: Visit) -> None:
    page = open_page.page
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.mouse.wheel(0, 20_000)
    page.wait_for_timeout(200)
    assert open_page.said == []
    assert open_page("typeof window.hit") == "undefined"
    own = page.url.rsplit("/", 1)[0]
    assert [url for url in open_page.asked if not url.startswith((own, "data:"))] == []
    assert page.locator("article.card").count() == 6
    assert page.locator("article.card h3 code").first.inner_text() == HOSTILE
    broken = "[...document.images].filter((image) => image.complete && !image.naturalWidth).length"
    assert open_page(broken) == 0
    if page.url.startswith("file:"):
        assert open_page.asked == [page.url, *(url for url in open_page.asked if url.startswith("data:"))]


def test_a_clip_plays_by_the_keyboard_and_one_at_a_time(open_page: Visit) -> None:
    page = open_page.page
    page.keyboard.press("j")
    assert open_page("document.activeElement.id") == "s0"
    page.keyboard.press(" ")
    open_page.until("document.querySelector('#s0 audio').currentTime > 0.03")
    button = page.locator("#s0 button.play")
    assert button.get_attribute("aria-label").startswith(("stop", "play"))
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert open_page("document.activeElement.id") == "s1"
    page.locator("#s1 button.play").click()
    open_page.until("document.querySelector('#s1 audio').currentTime > 0.03")
    open_page.until("document.querySelector('#s0 audio').paused")
    assert open_page.said == []


def test_a_click_on_the_picture_goes_there(open_page: Visit) -> None:
    page = open_page.page
    page.locator("#s2 .scale").scroll_into_view_if_needed()
    open_page.until("document.querySelector('#s2 .spectrum').complete")
    box = page.locator("#s2 .scale").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 10)
    half = "Number(document.querySelector('#s2 .scale').dataset.seconds) / 2 * 0.95"
    open_page.until(f"document.querySelector('#s2 audio').currentTime >= {half}")
    assert open_page("document.querySelector('#s2 audio').currentTime") > 0
    assert open_page.said == []


def test_the_table_is_sorted_searched_and_narrowed(open_page: Visit) -> None:
    page = open_page.page
    heads = page.locator("#rows thead th")
    names = [text.strip(" ↑↓") for text in heads.all_inner_texts()]
    place = names.index("seconds")
    numbers = sorted(float(text) for text in open_page.cells(place))
    for falling in (False, True):
        heads.nth(place).locator("button").click()
        wanted = "descending" if falling else "ascending"
        open_page.until(f"document.querySelectorAll('#rows th')[{place}].ariaSort === '{wanted}'")
        assert [float(text) for text in open_page.cells(place)] == sorted(numbers, reverse=falling)
    page.keyboard.press("/")
    assert open_page("document.activeElement.id") == "search"
    page.keyboard.type("PLAIN-4")
    open_page.until("document.querySelectorAll('#rows tbody tr').length === 1")
    assert open_page.cells(1) == ["plain-4"]
    assert page.locator("#count").inner_text() == "1 to 1 of 1"
    page.keyboard.press("Escape")
    page.locator("#search").fill("nowhere")
    open_page.until("document.querySelectorAll('#rows tbody tr').length === 0")
    assert page.locator("#count").inner_text() == "nothing found"
    page.locator("#search").fill("")
    page.locator("#language").select_option(label="es")
    open_page.until("document.querySelectorAll('#rows tbody tr').length === 2")
    assert set(open_page.cells(names.index("language"))) == {"es"}


def test_keys_are_shown_and_the_theme_turns(browser: Any, file: str) -> None:
    found = visit(browser, file, color_scheme="dark")
    page = found.page
    light = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] > 128"
    assert not found(light)
    page.keyboard.press("t")
    assert found(light)
    page.locator("#theme").click()
    assert not found(light)
    page.keyboard.press("?")
    assert found("document.getElementById('keys').open")
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    assert not found("document.getElementById('keys').open")
    page.emulate_media(media="print")
    assert found(light)
    assert not page.locator(".top").is_visible()
    page.close()


def test_it_is_read_at_360_pixels_and_by_a_screen_reader(open_page: Visit) -> None:
    page = open_page.page
    page.set_viewport_size({"width": 360, "height": 740})
    assert open_page("document.documentElement.scrollWidth") <= 360
    named = "button, a, input, select, img, [role=img], [role=region]"
    is_nameless = "!(part.getAttribute('aria-label') || part.alt || part.textContent.trim())"
    nameless = (
        f"[...document.querySelectorAll('{named}')].filter((part) => {is_nameless}).map((part) => part.outerHTML)"
    )
    assert open_page(nameless) == []
    assert open_page("[...document.querySelectorAll('th:not([scope])')].length") == 0
    assert open_page("document.querySelectorAll('#rows th[aria-sort=ascending]').length") == 1
    assert open_page("document.querySelectorAll('h1').length") == 1
    ids = open_page("[...document.querySelectorAll('[id]')].map((part) => part.id)")
    assert len(ids) == len(set(ids))


def test_a_sample_has_a_page_of_its_own(browser: Any, cache: Path) -> None:
    with served(cache) as client:
        found = visit(browser, f"http://{client.host}{client.root}/")
        page = found.page
        page.locator("#rows tbody a").nth(4).click()
        page.wait_for_url("**/sample/4")
        assert page.locator("h1").inner_text() == "Sample 4 of 6"
        page.get_by_role("link", name="Next").click()
        page.wait_for_url("**/sample/5")
        page.keyboard.press("k")
        page.wait_for_url("**/sample/4")
        page.keyboard.press("j")
        page.wait_for_url("**/sample/5")
        page.locator("button.play").click()
        found.until("document.querySelector('audio').currentTime > 0.03")
        assert found.said == []
        page.close()
