"""`forebay inspect --html`: one file with all that it says, its size bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay import cli
from tests.inspect.report.html import Page, read_page
from tests.store_factory import make_cache


def written(folder: Path, out: Path, *arguments: str) -> Page:
    assert cli.main(["inspect", str(folder), "--html", str(out), *arguments]) == cli.DONE
    return read_page(out.read_text(encoding="utf-8"))


def test_a_page_says_what_the_cache_is_and_plays_its_waveforms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cache(tmp_path / "caches", keep_waveform=True)
    page = written(folder, tmp_path / "report.html", "--json")
    assert json.loads(capsys.readouterr().out)["samples"] == [0, 1, 2, 3, 4, 5]
    assert folder.name in page.text
    assert len(page.elements("article")) == 6
    audio = page.elements("audio")
    assert len(audio) == 6
    assert all(element["src"].startswith("data:audio/flac;base64,") for element in audio)
    assert page.data["rows"][2][1] == "clip-0002"
