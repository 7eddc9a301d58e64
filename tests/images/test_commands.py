"""The commands on caches of images as their processor gives them: they work, or say that they do not."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from forebay import cli
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.serve import Pages
from forebay.store.cache import open_cache
from tests.images.processors import tiny, tiny_corpus
from tests.preprocess.here_pool import build_here

pytestmark = pytest.mark.usefixtures(tiny.__name__)
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object) -> tuple[int, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return command


def document(run: Run, *arguments: object) -> dict[str, Any]:
    code, text = run(*arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("kind", ["stack", "free"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.few
def test_inspect_says_what_is_stored_and_shows_a_sample(kind: str, codec: str, tmp_path: Path, run: Run) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    config = corpus.config(f"vision.codec={codec}")
    report = build_here(config)
    facts = document(run, "inspect", report.cache)
    assert facts["codec"] == codec
    assert facts["processor"]["made_by"] == f"Tiny{kind.title()}"
    assert facts["images"]["distinct"] == 4
    stored = facts["images"]["stored"]
    whole = [document(run, "inspect", report.cache, "--sample", f"q{n}-0")["sample"] for n in range(4)]
    floats = [image["float32_bytes"] for sample in whole for image in sample["images"]]
    if kind == "stack":
        assert facts["float32_bytes_per_image"] == floats[0] == 3 * 8 * 8 * 4
    assert len(floats) == 4 <= stored
    assert set(facts["histograms"]) == {"tokens", "images"}
    for arguments in ((), ("--sample", "both")):
        code, text = run("inspect", report.cache, *arguments)
        assert code == 0
        assert ("p1.jpg" in text) == bool(arguments)
    assert "user       [image 0]" in text
    code, text = run("inspect", report.cache, "--verify")
    assert code == 0
    assert "verify: ok" in text


def test_exports_hold_the_arrays_of_every_image(tmp_path: Path, run: Run) -> None:
    corpus = tiny_corpus(tmp_path, kind="free")
    report = build_here(corpus.config())
    assert run("export", report.cache, "--form", "parquet", "--out", tmp_path / "table")[0] == 0
    (path,) = (tmp_path / "table").glob("*.parquet")
    rows = {row["sample_id"]: row for row in pq.read_table(path).to_pylist()}
    assert len(rows["both"]["pixel_values_shape"]) == 2
    sizes = [a * b * c for a, b, c in rows["both"]["pixel_values_shape"]]
    assert len(rows["both"]["pixel_values"]) == sum(sizes)
    assert rows["blind"]["pixel_values"] == []
    assert run("export", report.cache, "--form", "webdataset", "--out", tmp_path / "tars")[0] == 0
    (tar,) = (tmp_path / "tars").glob("*.tar")
    with tarfile.open(tar) as file:
        names = file.getnames()
    assert {"both.pixel_values.0.npy", "both.pixel_values.1.npy", "both.input_ids.npy"} <= set(names)


@pytest.mark.parametrize("kind", ["stack", "free", "nest"])
@pytest.mark.few("nest")
def test_a_picture_and_a_page_show_what_the_model_sees(kind: str, tmp_path: Path, run: Run) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    report = build_here(corpus.config())
    path, page = tmp_path / "a.png", tmp_path / "page.html"
    assert run("inspect", report.cache, "--sample", "both", "--png", path)[0] == 0
    with Image.open(path) as image:
        assert image.format == "PNG"
    assert run("inspect", report.cache, "--html", page)[0] == 0
    text = page.read_text()
    assert text.count("<img") == 4 * 2 + 2  # eight questions about one photo, one about two, one about none
    assert ("tiles of 8 x 8, in their order" in text) == (kind == "nest")
    assert ("Longest side of images" in text) == (kind == "free")
    assert ("8 × 8 pixels, all of them." in text) == (kind == "stack")
    assert "a table of 3 x 256" in text
    assert ("padding beside larger images" in text) == (kind == "free")
    assert "tokens, 10 learnt" in text


def test_pages_are_served_and_name_damage(tmp_path: Path) -> None:
    report = build_here(tiny_corpus(tmp_path).config())
    cache = open_cache(report.cache)
    pages = Pages(overview_of(cache, None, choice=CardChoice(), roots=[]), root="/token")
    answer = pages.answer("/image/0/0.webp", "")
    assert (answer.status, answer.media_type) == (200, "image/webp")
    with Image.open(io.BytesIO(b"".join(answer.parts))) as image:
        assert image.size == (8, 8)
    assert pages.answer("/image/0/1.webp", "").status == 404
    assert b"pixel_values [3, 8, 8]" in b"".join(pages.answer("/sample/0", "").parts)
    assert pages.answer("/", "").status == 200


def test_what_has_no_sound_is_no_wav(tmp_path: Path, run: Run) -> None:
    report = build_here(tiny_corpus(tmp_path).config())
    code, text = run("inspect", report.cache, "--sample", "0", "--wav", tmp_path / "a.wav")
    assert code in (1, 2)
    assert "has no audio" in text
    code, text = run("lint", report.cache)
    assert code == 0
    assert "10 samples, by its cache" in text


def test_caches_are_listed_compared_and_cut(tmp_path: Path, run: Run) -> None:
    corpus = tiny_corpus(tmp_path)
    report = build_here(corpus.config())
    root = tmp_path / "caches"
    code, text = run("cache", "ls", "--cache-root", root)
    assert code == 0
    assert "images, processor" in text
    made = document(run, "cache", "subset", report.cache, "--where", "num_images > 1", "--out", root / "some")
    assert made["num_samples"] == 1
    assert run("inspect", root / "some", "--sample", "both")[0] == 0
    code, text = run("cache", "diff", report.cache, root / "some")
    assert "1 the same in both" in text
    assert run("cache", "verify", report.cache)[0] == 0
