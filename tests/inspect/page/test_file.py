"""`forebay inspect --html`: one file with all that it says, its size bounded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forebay import cli
from forebay.inspect.page import write_pages as write
from forebay.inspect.page.cards import NO_WAVEFORM
from forebay.inspect.page.page_samples import PageColumns
from forebay.store.cache import open_cache
from tests.inspect.conftest import Built
from tests.inspect.page.html import Page, read_page
from tests.store.trees import tree
from tests.store_factory import make_cache


def written(folder: Path, out: Path, *arguments: str) -> Page:
    assert cli.main(["inspect", str(folder), "--html", str(out), *arguments]) == cli.DONE
    page = read_page(out.read_text(encoding="utf-8"))
    assert page.odd == []
    return page


def test_a_page_says_what_the_cache_is_and_plays_its_waveforms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cache(tmp_path / "caches", keep_waveform=True)
    before = tree(tmp_path / "caches")
    page = written(folder, tmp_path / "report.html", "--json")
    assert tree(tmp_path / "caches") == before
    said = json.loads(capsys.readouterr().out)
    assert said["samples"] == [0, 1, 2, 3, 4, 5]
    assert said["written"] == [str(tmp_path / "report.html")]
    assert said["size_bytes"] == (tmp_path / "report.html").stat().st_size
    key = open_cache(folder).key
    for text in (folder.name, key, "Sealed cache, split train", "log_mel features", "the waveform is kept", "plain"):
        assert text in page.text, text
    assert len(page.elements("article")) == 6
    audio = page.elements("audio")
    assert len(audio) == 6
    assert all(element["src"].startswith("data:audio/flac;base64,") for element in audio)
    assert all(element["alt"] for element in page.elements("img"))
    assert page.data["rows"][2][1] == "clip-0002"
    assert "Tokens are numbers here: a cache does not hold its tokenizer" in page.text


def test_the_same_cache_gives_the_same_page(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=30, keep_waveform=True)
    pages = []
    for name in ("a.html", "b.html"):
        written(folder, tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_features_without_a_waveform_are_drawn_and_no_sound_is_made_up(tmp_path: Path) -> None:
    page = written(make_cache(tmp_path), tmp_path / "report.html")
    assert page.elements("audio") == []
    assert page.text.count(NO_WAVEFORM) == 6
    assert NO_WAVEFORM.startswith("no waveform kept: name the config")
    assert len([image for image in page.elements("img") if image["class"] == "spectrum"]) == 6


def test_texts_alone_have_neither(tmp_path: Path) -> None:
    page = written(make_cache(tmp_path, features="none"), tmp_path / "report.html")
    assert page.elements("audio") == page.elements("img") == []
    assert NO_WAVEFORM not in page.text
    assert "Привет, мир" in page.text


def test_what_was_left_out_is_counted_by_reason_with_its_first_ids(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=4, failed_rows=(1, 3))
    page = written(folder, tmp_path / "report.html")
    assert "corrupt_audio" in page.text
    assert "clip-0001" in page.text
    assert "clip-0003" in page.text
    assert "No row of the sources was left out" not in page.text


def test_photos_stand_with_their_grids_conversations_and_packs(photos: Built, tmp_path: Path) -> None:
    page = written(photos.config, tmp_path / "report.html")
    assert len([image for image in page.elements("img") if image["src"].startswith("data:image/webp")]) == 8
    assert len([element for element in page.elements("svg") if element.get("class") == "grid"]) == 8
    assert "20 × 16 patches, 10 × 8 tokens" in page.text
    assert "Which costs $5 or less?" in page.text
    assert "the plan of this config" in page.text
    assert [element for element in page.elements("rect") if element.get("class") == "images"]
    learnt = [element for element in page.elements("span") if element.get("class") == "t learnt"]
    assert len(learnt) > 20
    assert "unreadable_image" in page.text or "corrupt" in page.text or "failed" in page.text
    assert "Tokens are numbers here" not in page.text
    folder = written(photos.folder, tmp_path / "folder.html")
    assert "Tokens are numbers here" in folder.text
    assert "a plan beside this cache" in folder.text


def test_chosen_samples_come_first_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cache(tmp_path, num_samples=40, keep_waveform=True)
    out = tmp_path / "report.html"

    def shown(*arguments: str) -> list[int]:
        page = written(folder, out, "--json", *arguments)
        indices: list[int] = json.loads(capsys.readouterr().out)["samples"]
        assert [element["id"] for element in page.elements("article")] == [f"s{index}" for index in indices]
        assert page.data["cards"] == indices
        assert len(page.data["rows"]) == 40
        return indices

    assert shown("--ids", "clip-0007,clip-0002") == [7, 2]
    lengths = open_cache(folder).lengths["num_audio_samples"]
    assert shown("--longest") == np.argsort(-lengths, kind="stable")[:24].tolist()
    few = PageColumns(open_cache(folder))
    assert few.rate is not None
    assert set(shown("--worst")) == set(np.flatnonzero(few.rate > 40).tolist())
    assert "deviations" not in (page := out.read_text(encoding="utf-8")).split("<article")[1].split("</header>")[0]
    assert "characters a second: too_many_chars" in page
    assert len(shown()) == 24


def test_a_damaged_sample_is_named_on_its_card(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=4, keep_waveform=True)
    offset = open_cache(folder).shard_entries("audio")[0][1].spans[0][0]
    with open(folder / "audio" / "00000.tdz", "r+b") as file:
        file.seek(offset + 3)
        byte = file.read(1)
        file.seek(offset + 3)
        file.write(bytes([byte[0] ^ 1]))
    page = written(folder, tmp_path / "report.html")
    assert page.text.count("This sample cannot be read.") == 1
    assert len(page.elements("audio")) == 3


def test_the_file_is_never_larger_than_10_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["long words " * 20_000, "\U0001f600" * 5_000]
    folder = make_cache(tmp_path, num_samples=40, keep_waveform=True, max_duration_s=2.0, texts=texts)
    written(folder, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= write.MAX_BYTES
    full = (tmp_path / "report.html").stat().st_size
    for limit in (full - 1, full // 2, 350_000):
        monkeypatch.setattr(write, "MAX_BYTES", limit)
        page = written(folder, tmp_path / "report.html")
        assert (tmp_path / "report.html").stat().st_size <= limit
        assert len(page.elements("article")) == 24
    assert "larger than 10 MB" in page.text


def test_more_rows_than_a_page_holds_are_chosen_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.inspect.page.overview.MAX_ROWS", 30)
    monkeypatch.setattr("forebay.inspect.page.write_pages.MAX_ROWS", 30)
    folder = make_cache(tmp_path, num_samples=100)
    page = written(folder, tmp_path / "report.html")
    rows = [row[0] for row in page.data["rows"]]
    assert len(rows) <= 30
    assert rows == sorted(set(rows))
    assert set(page.data["cards"]) <= set(rows)
    assert f"{len(rows)} of 100" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "x.html", "--serve"], "--html and --serve do not go together"),
        (["--html", "x.html", "--sample", "0"], "--html and --sample do not go together"),
        (["--html", "x.html", "--wav", "x.wav"], "--html and --wav do not go together"),
        (["--html", "x.html", "--verify"], "--html and --verify do not go together"),
        (["--serve", "--export", "x.parquet"], "--serve and --export do not go together"),
        (["--serve", "--bucket-manifests", "x"], "--serve and --bucket-manifests do not go together"),
        (["--html", "x.html", "--usage", "x"], "--html and --usage do not go together"),
        (["--html", "x.html", "--port", "80"], "--port goes with --serve"),
        (["--port", "80"], "--port goes with --html FILE or --serve"),
        (["--serve", "--port", "70000"], "--port is 70000, wanted 0 to 65535"),
        (["--serve", "--port", "-1"], "--port is -1"),
        (["--ids", "a"], "--ids goes with --html FILE or --serve"),
        (["--longest"], "--longest goes with --html FILE or --serve"),
        (["--html", "x.html", "--longest", "--worst"], "--longest and --worst do not go together"),
        (["--html", "x.html", "--ids", "a", "--worst"], "--ids and --worst do not go together"),
        (["--html", "x.html", "--ids", "nobody"], "has no sample 'nobody'"),
        (["--html", "nowhere/x.html"], "there is no folder"),
        (["--html", "."], "is a folder; name a file"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_cache(tmp_path / "caches")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", str(folder), *arguments]) == cli.BAD_CONFIG
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["caches"]


def test_a_plan_and_the_inside_of_a_cache_are_refused(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.html"
    assert cli.main(["inspect", str(photos.plan), "--html", str(out)]) == cli.BAD_CONFIG
    assert "is a plan; name its cache, or a config" in capsys.readouterr().err
    assert cli.main(["inspect", str(photos.folder), "--html", str(photos.folder / "x.html")]) == cli.BAD_CONFIG
    assert "which is sealed" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path), "--html", str(out)]) == cli.FAILED
    assert not out.exists()
