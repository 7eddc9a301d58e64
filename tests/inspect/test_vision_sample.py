"""`forebay inspect --sample I` of a cache of images: conversation, images, what is learnt, and the picture."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forebay.errors import CacheError
from forebay.inspect.listed_groups import PatchItem
from forebay.inspect.picture import draw_tiles, rows_of, sample_title
from forebay.inspect.plan_lines import count_lines
from forebay.inspect.sample import Sample, read_sample, spoken
from forebay.inspect.seen_images import Picture, count_histogram
from forebay.store.cache import open_cache
from forebay.store.image.codec import Codec, decode_image, resized
from forebay.store.image.image_settings import ImageSettings
from tests.commands import inspected
from tests.inspect.conftest import Built, hash_of


def index_of(photos: Built, sample_id: str) -> int:
    return int(open_cache(photos.folder).samples["sample_id"].to_pylist().index(sample_id))


def images_of(sample: Sample) -> list[PatchItem]:
    return [item for item in sample.shown if isinstance(item, PatchItem)]


@pytest.mark.parametrize("codec", ["raw", "zstd", "webp", "source"])
def test_images_are_those_of_the_source_resized_whatever_the_codec(photos: Built, tmp_path: Path, codec: Codec) -> None:
    cache = open_cache(photos.folder if codec == "raw" else photos.with_codec(tmp_path, codec))
    settings = ImageSettings.from_json(cache.constants["image"])
    sample = read_sample(cache, index_of(photos, "both"), config=None)
    assert [image.name for image in sample.shown] == ["dogs.jpg", "bird.jpg"]
    for image in images_of(sample):
        path = photos.corpus.folder / image.name
        decoded = decode_image(path.read_bytes(), max_pixels=1 << 26, sample_id="x")
        assert np.array_equal(image.pixels, resized(decoded, settings))
        assert image.hash == hash_of(path)
        assert image.float32_bytes == image.num_patches * 1536 * 4
        about = image.to_json()
        assert [about["height"], about["width"]] == [16 * side for side in image.grid[1:]]
        assert json.loads(json.dumps(about)) == about
        if codec == "source":
            assert image.stored_bytes == path.stat().st_size


def test_the_row_is_that_of_the_row_table(photos: Built) -> None:
    cache = open_cache(photos.folder)
    for index, wanted in enumerate(cache.samples.to_pylist()):
        sample = read_sample(cache, index, config=None)
        place = {name: sample.row[name] for name in ("shard", "shard_row")}
        assert {"index": index, **sample.row} == {**wanted, **place}
        assert place["shard"] << 32 | place["shard_row"] == int(cache.slots[index])
        assert (
            sum(image.num_patches for image in images_of(sample))
            == len(sample.tensors["patches"])
            == wanted["num_patches"]
        )


def test_what_is_learnt_is_what_the_assistant_says(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    index = index_of(photos, "both")
    sample = json.loads(inspected(capsys, photos.config, "--sample", index, "--json"))["sample"]
    labels, mask = sample["labels"], open_cache(photos.folder).read(index)["label_mask"]
    assert [run["text"] for run in labels["learnt"]] == [
        "The second.\nThe first is two dogs.<|im_end|>",
        "Yes.<|im_end|>",
    ]
    learnt = [place for run in labels["learnt"] for place in range(run["start"], run["end"])]
    assert learnt == np.flatnonzero(mask).tolist()
    pads = sample["row"]["num_patches"] // 4
    assert labels["with_special_tokens"].count("<|image_pad|>") == pads
    out = inspected(capsys, photos.config, "--sample", index)
    assert f"labels: {len(mask)} tokens, {len(learnt)} of them are learnt" in out
    assert "[image 1] Which costs $5 or less?" in " ".join(out.split())
    assert "The second.\n             The first is two dogs.\n" in out
    assert "<|image_pad|> x " in out
    assert out.count("<|image_pad|>") == 2


def test_without_a_config_texts_are_shown_and_nothing_is_decoded(
    photos: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    out = inspected(capsys, photos.folder, "--sample", index_of(photos, "text-only"))
    assert "images: none" in out
    assert "  user       Which metal is liquid?\n  assistant  Mercury.\n" in out
    assert "not decoded: a cache does not hold its tokenizer" in out


def test_an_index_outside_is_named_with_the_range(photos: Built) -> None:
    with pytest.raises(CacheError, match=r"--sample 8: .* has 8 samples \(0 to 7\)"):
        read_sample(open_cache(photos.folder), 8, config=None)


def test_an_image_is_said_where_it_was_shown() -> None:
    text, image = {"type": "text", "text": " a  b "}, {"type": "image"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image, image, text, image]},
        {"role": "assistant", "content": [text]},
        {"role": "user", "content": [text, image, text]},
    ]
    assert spoken(messages) == [
        ("user", "[image 0] [image 1] a  b [image 2]"),
        ("assistant", "a  b"),
        ("user", "a  b [image 3] a  b"),
    ]


def test_the_picture_shows_the_images_as_rebuilt(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, index = tmp_path / "a.png", index_of(photos, "both")
    assert inspected(capsys, photos.folder, "--sample", index, "--png", path).endswith(f"wrote {path}\n")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width < 1440  # nothing is white beside two photos
    sample = read_sample(open_cache(photos.folder), index, config=None)
    figure = draw_tiles([image.picture(None) for image in sample.shown], title=sample_title(sample))
    for axes, shown in zip(figure.axes, images_of(sample), strict=True):
        assert np.array_equal(np.asarray(axes.images[0].get_array()), shown.pixels)
        box = axes.get_window_extent()
        assert box.width / box.height == pytest.approx(shown.pixels.shape[1] / shown.pixels.shape[0])
    title, *captions = [text.get_text() for text in figure.texts]
    assert title.split("\n")[0] == f"sample {index} · both"
    assert "Which costs $5 or less?" in title
    for caption, shown in zip(captions, images_of(sample), strict=True):
        _, rows, columns = shown.grid
        assert caption.split("\n") == [shown.name, f"grid 1 x {rows} x {columns}", f"{columns * 16} x {rows * 16} px"]


def test_a_picture_of_no_images_says_so(photos: Built) -> None:
    sample = read_sample(open_cache(photos.folder), index_of(photos, "text-only"), config=None)
    figure = draw_tiles([image.picture(None) for image in sample.shown], title=sample_title(sample))
    assert figure.texts[-1].get_text() == "no images"


def test_long_names_keep_their_end_within_their_tile() -> None:
    pixels = np.zeros((400, 20, 3), np.uint8)
    figure = draw_tiles(
        [Picture(pixels=pixels, mark="#12 ", name="folder/" * 30 + "end.jpg", about=("grid 1 x 200", "3200 x 3200 px"))]
        * 3,
        title="t",
    )
    for text in figure.texts[1:]:
        assert text.get_text().startswith("#12 …")
        assert "end.jpg\ngrid" in text.get_text()
    boxes = [text.get_window_extent() for text in figure.texts[1:]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("aspects", [[200.0], [0.005], [1.0] * 300, [0.005, 200.0, 1.5] * 9, []])
def test_rows_hold_every_image_in_order_inside_the_page(aspects: list[float]) -> None:
    rows = rows_of(aspects)
    assert [number for row, _ in rows for number in row] == list(range(len(aspects)))
    for row, height_in in rows:
        assert 0 < height_in <= 4.6
        assert sum(aspects[number] * height_in for number in row) <= 11.71


@pytest.mark.parametrize("lengths", [[], [0], [7] * 5, [1, 2, 10**6], list(range(300, 5000, 7)), [5] * 999 + [80_000]])
def test_every_sample_is_in_one_bin(lengths: list[int]) -> None:
    found = count_histogram(np.array(lengths, np.int32))
    edges, samples = found["edges"], found["samples"]
    assert (sum(samples), edges) == (len(lengths), sorted(set(edges)))
    assert len(samples) == len(edges) - 1 <= 18
    for low, high, count in zip(edges[:-1], edges[1:], samples, strict=True):
        last = high == edges[-1]
        assert count == sum(low <= n < high or (last and n == high) for n in lengths)


def test_empty_neighbours_are_one_line() -> None:
    lines = list(count_lines("tokens", [0, 10, 20, 30, 40, 45], [2, 0, 0, 1, 4], of="samples"))
    assert [line.split()[:4] for line in lines[1:]] == [
        ["0", "-", "10", "2"],
        ["10", "-", "30", "0"],
        ["30", "-", "40", "1"],
        ["40", "-", "45", "4"],
    ]


def test_calls_reasoning_and_rejected_answers_are_said() -> None:
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "So"}]}
    messages = [{**said, "reasoning_content": "hm", "tool_calls": [call]}, {**said, "rejected": [said]}]
    assert spoken(messages) == [
        ("assistant", '[thinks hm] So [calls zoom {"x": 1}]'),
        ("assistant", "So"),
        ("rejected", "So"),
    ]
