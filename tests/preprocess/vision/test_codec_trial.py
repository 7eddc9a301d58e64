"""A dry run says what each codec costs of these images: the bytes are those that a build under it stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.preprocess.codec_trial import CODECS
from forebay.store.cache import open_cache
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo


def corpus_of(folder: Path) -> PhotoCorpus:
    corpus = PhotoCorpus(folder)
    for number in range(3):
        corpus.add_photo(f"p{number}.jpg", photo(number))
        corpus.ask(f"s{number}", f"p{number}.jpg")
    corpus.ask("again", "p0.jpg")
    return corpus


def test_a_dry_run_measures_every_codec(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = corpus_of(tmp_path)
    report = build_here(corpus.config("plan.seq_len=200", "vision.codec=zstd"), dry_run=True)
    assert [cost.codec for cost in report.codecs] == list(CODECS)
    assert [cost.codec for cost in report.codecs if cost.is_own] == ["zstd"]
    cache, grid_bytes = open_cache(build_here(corpus.config()).cache), 3 * 4
    patches = sum(each.size for each in cache.read(0)["patches"]) * 3  # photos of one size
    files = sum((tmp_path / f"p{number}.jpg").stat().st_size for number in range(3))
    found = {cost.codec: cost for cost in report.codecs}
    assert found["raw"].total_bytes == patches + 3 * grid_bytes
    assert found["source"].total_bytes == files + 3 * grid_bytes
    assert found["source"].total_bytes < found["webp"].total_bytes < found["raw"].total_bytes
    for cost in report.codecs:
        assert cost.images_tried == 3  # each image once
        assert cost.ms_a_pack == pytest.approx(
            cost.ms_an_image * 200 * 4 * 3 / int(cache.lengths["num_patches"][:3].sum())
        )
    lines = list(report.lines())
    assert lines[1] == "3 images stored and read under each codec:"
    assert "codec zstd (this config): " in lines[3]
    assert build_here(corpus.config(), dry_run=True).codecs == ()
    assert caplog.records[-1].getMessage().endswith(f"forebay preprocess {corpus.config().named} --rebuild --dry-run")


def test_images_that_cannot_be_read_do_not_count(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    path = tmp_path / "p1.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    report = build_here(corpus.config("plan.seq_len=200"), dry_run=True)
    assert {cost.codec: cost.images_tried for cost in report.codecs}["raw"] == 2
