"""Images that are read by choice: AVIF, JPEG 2000, deep samples and first frames, as the processor has them, by key."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from forebay.errors import ConfigError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.store.cache import open_cache
from forebay.train.select import select
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus
from tests.store.image.variants import photo, refused, saved

CHOSEN = ["AVIF", "JPEG 2000", "16 bit PNG", "animated GIF"]
MORE = 'source.more_images=["avif", "jpeg2000", "16-bit", "first_frame"]'


@pytest.fixture
def corpus(tmp_path: Path) -> PhotoCorpus:
    corpus = PhotoCorpus(tmp_path)
    for number, name in enumerate(CHOSEN):
        corpus.add_photo(f"{number}.img", refused()[name][0])
        corpus.ask(f"s{number}", f"{number}.img")
    corpus.add_photo("plain.jpg", saved(photo(1).resize((96, 80)), "JPEG"))
    corpus.ask("plain", "plain.jpg")
    return corpus


@pytest.mark.parametrize("codec", ["raw", "source"])
def test_they_are_samples_where_the_config_says_so(corpus: PhotoCorpus, codec: str) -> None:
    plain = build_here(corpus.config(f"vision.codec={codec}"))
    assert plain.num_samples == 1
    assert {**plain.failed, **plain.excluded} == {"format": 3, "animated_image": 1}
    config = corpus.config(f"vision.codec={codec}", MORE)
    report = build_here(config)
    assert report.num_samples == 5
    assert report.key != plain.key
    cache, processor = open_cache(report.cache), load_processor(DEMO / "model", "pil")
    apart = select(corpus.config(MORE, 'loader.cache="off"'))
    for index in range(5):
        name = cache.sample_id(index)
        data = (corpus.folder / next(row["image"] for row in corpus.rows if row["id"] == name)).read_bytes()
        with Image.open(io.BytesIO(data)) as opened:
            wanted = processor(images=[ImageOps.exif_transpose(opened)], return_tensors="np")
        table = np.array(cache.constants["patch_table"], np.float32)
        sample = cache.read(index)
        assert sample["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist()
        patches = sample["patches"][0].reshape(len(sample["patches"][0]), 3, -1)
        values = np.stack([table[channel][patches[:, channel]] for channel in range(3)], axis=1)
        doubled = wanted["pixel_values"].reshape(len(values), 3, -1, values.shape[2])
        assert np.array_equal(values, doubled[:, :, 0])
        assert all(map(np.array_equal, apart.read(index)["patches"], sample["patches"]))


def test_an_unknown_choice_is_refused(corpus: PhotoCorpus) -> None:
    with pytest.raises(ConfigError, match="more_images"):
        corpus.config('source.more_images=["heic"]')
