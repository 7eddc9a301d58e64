"""Promises 1, 2, 3 and 6 of vision: photos once a shard, same bytes, four codecs alike, text apart from media."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forebay.config import Config
from forebay.errors import BuildError
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.listing import resolve
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache
from forebay.store.memo import Memo
from forebay.store.seal import verify_folder
from forebay.train.select import select
from tests.preprocess.corpus import file_bytes, json_lines, shard_bytes
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo, photo_corpus

CODECS = ("raw", "zstd", "webp", "source")


def make(config: Config, **options: Any) -> BuildReport:
    return build(config, Options(progress=False, **options))


def same_sample(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys() == {"input_ids", "label_mask", "image_grid_thw", "patches"}
    assert len(left["patches"]) == len(right["patches"]) == len(left["image_grid_thw"])
    for name in ("input_ids", "label_mask", "image_grid_thw"):
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name])
    for ours, theirs in zip(left["patches"], right["patches"], strict=True):
        assert ours.dtype == theirs.dtype == np.uint8
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[PhotoCorpus, BuildReport]:
    """A corpus and its cache, which no test changes."""
    corpus = photo_corpus(tmp_path_factory.mktemp("photos"))
    return corpus, make(corpus.config())


@pytest.fixture
def corpus(built: tuple[PhotoCorpus, BuildReport], tmp_path: Path) -> PhotoCorpus:
    """A copy of that corpus, its cache included."""
    shutil.copytree(built[0].folder, tmp_path / "copy")
    return PhotoCorpus(tmp_path / "copy", rows=[dict(row) for row in built[0].rows])


def sealed(corpus: PhotoCorpus) -> Path:
    """The folder of a corpus's first cache."""
    return next(corpus.root.glob("photos-*"))


def by_id(cache: Cache) -> dict[str, int]:
    return {name: index for index, name in enumerate(cache.samples["sample_id"].to_pylist())}


def test_a_photo_is_stored_once_and_questions_about_it_stand_together(
    built: tuple[PhotoCorpus, BuildReport],
) -> None:
    corpus, report = built
    cache = open_cache(report.cache)
    assert (report.num_samples, cache.metadata["num_images"]) == (13, 4)
    ids = list(by_id(cache))
    assert ids[:3] == ["q0-0", "q0-1", "q0-2"]
    assert sorted(ids) == sorted(row["id"] for row in corpus.rows)
    count = len(cache.shard_entries("image"))
    hashes = [name for number in range(count) for name in cache.shard("image", number).strings("image_hash")]
    assert len(set(hashes)) == len(hashes) == 4
    both = cache.read(by_id(cache)["both"])
    for place, name in enumerate(("q1-0", "q3-0")):
        np.testing.assert_array_equal(both["patches"][place], cache.read(by_id(cache)[name])["patches"][0])
    assert verify_folder(Path(report.cache)).problems == []


def test_lengths_are_those_of_the_samples(built: tuple[PhotoCorpus, BuildReport]) -> None:
    cache = open_cache(built[1].cache)
    for index in range(len(cache)):
        sample = cache.read(index)
        assert cache.lengths["num_tokens"][index] == len(sample["input_ids"]) == len(sample["label_mask"])
        assert cache.lengths["num_images"][index] == len(sample["patches"])
        assert cache.lengths["num_patches"][index] == sum(len(image) for image in sample["patches"])
        assert cache.sample_id(index) == cache.samples["sample_id"][index].as_py()
        tokens = int((sample["input_ids"] == cache.constants["image_token_id"]).sum())
        assert tokens * cache.constants["merge_size"] ** 2 == cache.lengths["num_patches"][index]


def test_every_codec_gives_the_same_samples_in_a_folder_of_its_own(corpus: PhotoCorpus) -> None:
    raw = open_cache(sealed(corpus))
    folders = {"raw": raw.folder}
    sizes = {"raw": media_bytes(raw)}
    for codec in CODECS[1:]:
        config = corpus.config(f"vision.codec={codec}")
        before = find_cache(config, recipe_of(config)).found
        assert before is not None
        assert before.key == raw.key  # any codec serves until there is that of the config
        report = build_here(config)
        assert (report.key, Path(report.cache).suffix) == (raw.key, f".{codec}")
        # The text shards are those of the first cache.
        assert report.shards_linked + report.shards_kept >= raw.num_shards
        cache = open_cache(report.cache)
        for index in range(len(raw)):
            same_sample(raw.read(index), cache.read(index))
        folders[codec], sizes[codec] = cache.folder, media_bytes(cache)
    assert sizes["raw"] > sizes["zstd"] > sizes["webp"] > sizes["source"]
    for codec, folder in folders.items():
        found = find_cache(
            corpus.config(f"vision.codec={codec}"), recipe_of(corpus.config(f"vision.codec={codec}"))
        ).found
        assert found is not None
        assert found.folder == folder
        assert make(corpus.config(f"vision.codec={codec}")).already_sealed


def media_bytes(cache: Cache) -> int:
    return sum(entry.size_bytes for _, entry in cache.shard_entries("image"))


def test_one_worker_gives_the_same_bytes(built: tuple[PhotoCorpus, BuildReport]) -> None:
    corpus, report = built
    other = make(corpus.config('run.cache_root="other"', "run.num_workers=1"))
    assert shard_bytes(Path(other.cache)) == shard_bytes(Path(report.cache))


def test_a_second_build_does_nothing(built: tuple[PhotoCorpus, BuildReport]) -> None:
    corpus, report = built
    before = file_bytes(Path(report.cache))
    assert make(corpus.config()).already_sealed
    assert file_bytes(Path(report.cache)) == before


def test_a_new_question_or_template_decodes_nothing_again(corpus: PhotoCorpus) -> None:
    cache = open_cache(sealed(corpus))
    num_shards, images = cache.num_shards, len(cache.shard_entries("image"))
    corpus.rows[0]["answer"] = "Another answer."
    corpus.write_manifest()
    report = build_here(corpus.config())
    assert report.shards_written == 1
    assert report.shards_linked + report.shards_kept == num_shards - 1 + images
    model = corpus.folder / "model"
    shutil.copytree(DEMO / "model", model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{# another #}" + template)
    report = build_here(corpus.config(f'text.tokenizer="{model}"', 'text.prompt="chat"'))
    assert report.shards_written == num_shards
    assert report.shards_linked + report.shards_kept == images


def test_a_damaged_shard_of_images_is_made_again_to_the_same_bytes(corpus: PhotoCorpus) -> None:
    folder = sealed(corpus)
    wanted = shard_bytes(folder)
    path = folder / "image" / "00000.tdz"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert not build_here(corpus.config(), verify=True).already_sealed
    assert shard_bytes(folder) == wanted


def hostile(name: str) -> bytes:
    """Bytes of an image that cannot be used."""
    if name == "truncated":
        data = photo(9)
        return data[: len(data) // 2]
    if name == "empty":
        return b""
    buffer = io.BytesIO()
    if name == "sixteen":
        Image.fromarray(np.zeros((64, 64), np.uint16)).save(buffer, "PNG")
    elif name == "animated":
        frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
        frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    elif name == "long":
        Image.new("RGB", (4000, 10)).save(buffer, "PNG")
    elif name == "large":
        Image.new("RGB", (400, 300)).save(buffer, "PNG")
    else:
        return b"no image at all"
    return buffer.getvalue()


REASONS = {
    "truncated": "unreadable_image",
    "empty": "empty_file",
    "sixteen": "format",
    "animated": "animated_image",
    "long": "aspect_ratio",
    "large": "too_many_pixels",
    "text": "unreadable_image",
}


def test_bad_images_cost_their_samples_and_are_counted_and_named(corpus: PhotoCorpus) -> None:
    for name in REASONS:
        corpus.add_photo(f"{name}.jpg", hostile(name))
        corpus.ask(name, f"{name}.jpg")
    corpus.ask("half", ["p0.jpg", "truncated.jpg"])
    corpus.ask("gone", "gone.jpg")
    corpus.rows.append({"id": "tags", "image": "p0.jpg", "question": "<image><image> Which?", "answer": "Both."})
    corpus.write_manifest()
    limit = "source.max_pixels=90000"
    report = build_here(corpus.config(limit))
    wanted = {**REASONS, "half": "unreadable_image", "gone": "missing_file", "tags": "image_count_mismatch"}
    assert (report.num_samples, report.failed) == (13, dict(sorted(Counter(wanted.values()).items())))
    rejected = json_lines(Path(report.cache) / "rejected.jsonl")
    assert {row["sample_id"]: row["reason"] for row in rejected} == wanted
    # Uncached, a truncated image shows when it is decoded, not in its header: "truncated" and "half" are still listed.
    assert len(select(corpus.config(limit, 'loader.cache="off"'))) == 15
    with pytest.raises(BuildError, match=r"(?s)bad so far.*max_failed_share = 0.*too_many_pixels"):
        build_here(corpus.config(limit, "run.max_failed_share=0", 'run.cache_root="strict"'))


def test_uncached_samples_are_those_of_the_cache(built: tuple[PhotoCorpus, BuildReport]) -> None:
    corpus, report = built
    cache = open_cache(report.cache)
    for _ in range(2):  # listed, then from what was kept
        online = select(corpus.config('loader.cache="off"'))
        assert len(online) == len(cache)
        assert online.constants == cache.constants
        assert online.fields == cache.fields
        for name, lengths in cache.lengths.items():
            np.testing.assert_array_equal(lengths, online.lengths[name])
        for index in range(len(cache)):
            same_sample(dict(cache.read(index)), dict(online.read(index)))


def test_kept_lengths_are_made_again_when_a_photo_changes(
    corpus: PhotoCorpus, caplog: pytest.LogCaptureFixture
) -> None:
    config = corpus.config('loader.cache="off"')
    caplog.set_level("INFO")
    first = select(config)
    caplog.clear()
    assert "lengths of" not in caplog.text
    select(config)
    assert "lengths of 13 samples" in caplog.text
    caplog.clear()
    corpus.add_photo("p0.jpg", photo(1, width=300, height=200))
    second = select(config)
    assert "lengths of" not in caplog.text
    assert second.lengths["num_patches"][0] > first.lengths["num_patches"][0]
    listing = next((corpus.root / ".listings").glob("*/images"))
    listing.write_bytes(b"damaged")
    assert len(select(config)) == 13


def test_a_bad_sample_gives_way_to_one_that_fits(corpus: PhotoCorpus) -> None:
    data = (corpus.folder / "p3.jpg").read_bytes()
    (corpus.folder / "p3.jpg").write_bytes(data[: len(data) // 2])
    source: Any = select(corpus.config('loader.cache="off"'))
    index = int(np.argmax(source.lengths["num_patches"]))
    sample = source.read(index)
    assert source.failed["unreadable_image"] >= 1
    assert len(sample["input_ids"]) <= source.lengths["num_tokens"][index]
    assert sum(map(len, sample["patches"])) <= source.lengths["num_patches"][index]


def test_an_image_that_changed_after_it_was_listed_gives_way_and_is_counted(corpus: PhotoCorpus) -> None:
    source: Any = select(corpus.config('loader.cache="off"'))
    shutil.copyfile(corpus.folder / "p1.jpg", corpus.folder / "p3.jpg")
    for index in range(len(source)):
        sample = source.read(index)
        assert sum(map(len, sample["patches"])) <= source.lengths["num_patches"][index]
    assert source.failed["source_changed"] >= 1


def test_an_image_that_kills_a_worker_is_named_with_the_samples_to_exclude(
    built: tuple[PhotoCorpus, BuildReport],
) -> None:
    config = built[0].config()
    listing = resolve(config, Memo(config.cache_root), map, recipe=recipe_of(config))
    groups, found = listing.groups, {}
    for cut in groups.cuts(listing, probe={"image": "", "text": ""}, rows_per_shard=100):
        if cut.group == "text":
            assert groups.used_by(listing, cut, 0) == ("sample 'q0-0'", ["q0-0"])
            continue
        for position in range(cut.rows):
            name, samples = groups.used_by(listing, cut, position)
            found[name] = sorted(samples)
    assert found["image 'p0.jpg'"] == ["q0-0", "q0-1", "q0-2"]
    assert found["image 'p1.jpg'"] == ["both", "q1-0", "q1-1", "q1-2"]
    assert len(found) == 4
