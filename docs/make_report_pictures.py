"""Makes `docs/images/report.png` and `report-vision.png`: pages of `forebay inspect --html`, as a browser shows them.

The demo's caches are built in a temporary folder. Needs Debian's `chromium`, the package `playwright`, and for the
look of the kept pictures the fonts Inter and JetBrains Mono (`apt-get install fonts-inter fonts-jetbrains-mono`).
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import PIL.Image
from playwright.sync_api import sync_playwright

from forebay.config.tree import Config
from forebay.inspect.page.overview import CardChoice
from forebay.inspect.page.page_command import ReportOptions, report
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import load_config

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 400_000

_SPEECH = "en_agent-pass,es_tt-weasels,fr_tt-monkeysintro,it_conf-leaderhasleft,ru_dir-welcome,it_followme_no-recording"
_VISION = "bird-2,bridge-2"
_WIDTH, _HEIGHT, _SCALE = 1240, 1150, 2


def main() -> None:
    """Writes both pictures."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        root = Path(name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        speech = _config("demo_speech", root, "audio.keep_waveform=true")
        page = _page(browser, speech, root, CardChoice(ids=_SPEECH))
        # A clip that is being heard: its picture shows where.
        page.evaluate("document.querySelector('.card audio').currentTime = 1.4")
        page.wait_for_timeout(500)
        _save(page, IMAGES / "report.png")
        page = _page(browser, _config("demo_vision", root), root, CardChoice(ids=_VISION), scale=1.35)
        page.evaluate("scrollTo(0, document.getElementById('samples').offsetTop - 30)")
        page.wait_for_timeout(500)
        _save(page, IMAGES / "report-vision.png")
        browser.close()


def _config(name: str, root: Path, *settings: str) -> Config:
    config = load_config(ROOT / "configs" / f"{name}.toml", overrides=[f"run.cache_root={root}", *settings])
    build(config)
    return config


def _page(browser: Any, config: Config, root: Path, choice: CardChoice, *, scale: float = _SCALE) -> Any:
    path = root / "report.html"
    report(config, ReportOptions(html=path, choice=choice))
    page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, device_scale_factor=scale)
    page.goto(path.as_uri())
    page.wait_for_timeout(500)
    return page


def _save(page: Any, path: Path) -> None:
    picture = PIL.Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colours in (256, 192, 128, 96, 64):
        palette = picture.quantize(colours, kmeans=2)
        picture.quantize(palette=palette, dither=PIL.Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise SystemExit(f"{path} has {path.stat().st_size} bytes, wanted at most {MAX_BYTES}")


if __name__ == "__main__":
    main()
