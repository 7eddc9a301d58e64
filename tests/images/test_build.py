"""Caches of images as their processor gives them, of every kind of batch: from photos to batches and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.build_report import BuildReport
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.formats import image_size
from forebay.store.seal import verify_folder
from forebay.train.select import select
from tests.images.processors import KINDS, Tiny, TinyCorpus, tiny, tiny_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo

pytestmark = pytest.mark.usefixtures(tiny.__name__)


def built(corpus: TinyCorpus, *overrides: str) -> tuple[BuildReport, Cache]:
    report = build_here(corpus.config(*overrides))
    return report, open_cache(report.cache)


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
        return
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    np.testing.assert_array_equal(left, right)


def same_sample(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        same(left[name], right[name])


def images_of(config: Config) -> str:
    image = recipe_of(config).image
    return "" if image is None else image.step.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few("cat", "nest", "wide", "padded")
def test_a_sample_is_what_the_processor_gives_by_either_codec_and_without_a_cache(kind: str, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    (_, raw), (_, packed) = built(corpus), built(corpus, "vision.codec=zstd")
    online = select(corpus.config("loader.cache=off"))
    assert raw.key == packed.key
    assert raw.metadata["probe"] == packed.metadata["probe"]
    for index in range(len(raw)):
        same_sample(raw.read(index), packed.read(index))
        same_sample(raw.read(index), dict(online.read(index)))
    assert [raw.sample_id(i) for i in range(len(raw))] == [online.sample_id(i) for i in range(len(online))]
    index = next(i for i in range(len(raw)) if raw.sample_id(i) == "both")
    processor = Tiny(kind)
    for place, name in enumerate(("p1.jpg", "p3.jpg")):
        wanted = processor.make((tmp_path / name).read_bytes(), sample_id=name)
        for field in processor.form.stored:
            np.testing.assert_array_equal(raw.read(index)[field.name][place], wanted[field.name])
    for cache in (raw, packed):
        assert verify_folder(cache.folder).ok


def test_an_image_is_stored_once_whatever_file_holds_it(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    corpus.add_photo("again.jpg", (tmp_path / "p0.jpg").read_bytes())
    corpus.ask("again", "again.jpg")
    report, cache = built(corpus)
    assert (report.num_samples, cache.metadata["num_images"]) == (11, 4)
    assert cache.lengths["num_images"].tolist().count(2) == 1
    rows = sum(entry.rows for _, entry in cache.shard_entries("image"))
    assert rows == 4


def test_lengths_count_tokens_images_and_the_tiles_of_processors_that_cut(tmp_path: Path) -> None:
    by_kind = {}
    for kind in ("stack", "nest"):
        (tmp_path / kind).mkdir()
        _, cache = built(tiny_corpus(tmp_path / kind, kind=kind))
        by_kind[kind] = cache.lengths
        assert cache.constants["features"] == "images"
        assert cache.constants["form"]["made_by"] == f"Tiny{kind.title()}"
        tokens = [len(cache.read(i)["input_ids"]) for i in range(len(cache))]
        assert cache.lengths["num_tokens"].tolist() == tokens
    assert set(by_kind["stack"]) == {"num_tokens", "num_images"}
    tiles = [sum(map(len, cache.read(i)["pixel_values"])) for i in range(len(cache))]
    assert by_kind["nest"]["num_patches"].tolist() == tiles


def test_bad_images_and_bad_texts_are_left_out_by_their_reasons(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    corpus.add_photo("thin.jpg", photo(5, width=13))
    corpus.add_photo("torn.jpg", photo(6)[:-300])
    corpus.ask("thin", "thin.jpg")
    corpus.ask("torn", ["p0.jpg", "torn.jpg"])
    corpus.ask("babel", "p0.jpg", answer="unreadable")
    report, cache = built(corpus)
    assert report.failed == {"unlucky_width": 1, "unreadable_image": 1, "bad_text": 1}
    assert report.num_samples == len(cache) == 10
    online = select(corpus.config("loader.cache=off"))
    assert {"thin", "torn", "babel"} - {online.sample_id(i) for i in range(len(online))} == {"babel"}
    broken = next(i for i in range(len(online)) if online.sample_id(i) == "thin")
    assert online.read(broken)["pixel_values"]


def test_an_image_of_another_size_than_its_header_says_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = tiny_corpus(tmp_path)
    corpus.add_photo("other.jpg", photo(5, width=50, height=30))
    corpus.ask("other", "other.jpg")

    def claimed(*args: Any, **named: Any) -> tuple[int, int]:
        width, height = image_size(*args, **named)
        return (width, 20) if width == 50 else (width, height)

    monkeypatch.setattr("forebay.rows.listed_media.image_size", claimed)
    report, cache = built(corpus)
    assert (report.failed, len(cache)) == ({"unreadable_image": 1}, 10)
    assert "its header gives 50x20 pixels as displayed, its pixels are 50x30" in caplog.text


def test_other_answers_make_no_image_again_and_another_processor_no_text(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    built(corpus)
    corpus.rows[0]["answer"] = "Something else."
    corpus.write_manifest()
    report, _ = built(corpus)
    assert (report.shards_written, report.shards_linked) == (1, 3)
    report, _ = built(corpus, 'vision.alpha="drop"')
    assert (report.shards_written, report.shards_linked) == (1, 3)


def test_without_text_a_batch_is_images_alone(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    config = corpus.config(prompt="none")
    corpus.rows = [{"image": f"p{n}.jpg"} for n in range(4)]
    corpus.write_manifest()
    cache = open_cache(build_here(config).cache)
    assert set(cache.read(0)) == {"pixel_values"}
    assert cache.lengths["num_tokens"].tolist() == [0] * 4
    assert cache.tokenizer is None


def test_an_image_that_is_of_another_form_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tiny_corpus(tmp_path)
    make = Tiny.make

    def wrong(self: Tiny, data: bytes, *, sample_id: str, size: tuple[int, int] | None = None) -> dict[str, Any]:
        made = make(self, data, sample_id=sample_id, size=size)
        return made if sample_id != "p2.jpg" else {"pixel_values": made["pixel_values"][:2]}

    monkeypatch.setattr(Tiny, "make", wrong)
    with pytest.raises(BuildError, match=r"p2\.jpg.*TinyStack gives pixel_values is \[2, 8, 8\], declared \[3, 8, 8\]"):
        build_here(corpus.config())


def test_what_is_stored_of_images_is_chosen_by_documents_alone(tmp_path: Path) -> None:
    native = PhotoCorpus(tmp_path)
    native.add_photo("a.jpg")
    native.ask("a", "a.jpg")
    assert images_of(native.config()) == "patches"
    assert images_of(native.config('vision.images="patches"')) == "patches"
    path = native.folder / "config.toml"
    text = path.read_text().replace('kind = "pack"\nseq_len = 400', "batch_size = 2")
    path.write_text(text + '[text]\nprompt = "none"\n')
    assert images_of(load_config(path)) == "processor"
    chat = ['text.prompt="chat"', f'text.tokenizer="{DEMO / "model"}"']
    config = load_config(path, overrides=[*chat, "vision.images=processor"])
    assert images_of(config) == "processor"
    with pytest.raises(ConfigError, match=r'plan\.kind is "bucket", wanted "pack": batches of patches are packs'):
        load_config(path, overrides=chat)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vision.codec=webp", 'vision.codec is "webp", which holds patches alone'),
        ('vision.backend="pil"', 'vision.backend is for images = "patches", and images are stored by "processor"'),
        ('text.prompt="whisper"', 'text.prompt is "whisper", with images of a processor wanted one of'),
        ("plan={kind='pack', seq_len=64}", 'plan.kind is "pack", wanted "bucket" or "window"'),
        ("plan={batch_seconds=3.0}", "plan.batch_seconds is of audio, and images have no seconds"),
        ("loader.pixels=uint8", 'loader.pixels is "uint8" and is of patches'),
        ("loader.varlen=true", "loader.varlen is of packs"),
    ],
)
def test_what_cannot_go_together_is_said_when_the_config_is_read(override: str, message: str, tmp_path: Path) -> None:
    corpus = TinyCorpus(tmp_path)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        corpus.config(override)
