"""A size and a frame that a row asks of one image: they are as the processor of transformers and Pillow have them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from forebay import load_config
from forebay.errors import DecodeError, SampleError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.steps.image.still_settings import Still
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import decode_image, frame_file
from forebay.store.image.formats import image_size
from forebay.store.image.image_settings import ImageSettings, grid_thw
from forebay.train.select import make_loader, select
from tests.images.test_boxes import by_ms_swift, config_of, folder_of, texts_of
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo
from tests.preprocess.vision.test_alpha import pixel_values
from tests.steps.image.test_any_processor import made
from tests.store.image.variants import exif, with_alpha
from tests.store.image.variants import photo as demo_photo

SIZES: dict[str, dict[str, int]] = {
    "processor": {},
    "small": {"max_pixels": 16384},
    "large": {"min_pixels": 60_000},
    "both": {"min_pixels": 20_000, "max_pixels": 40_000},
    "size": {"resized_height": 100, "resized_width": 230},
    "tiny": {"resized_height": 3, "resized_width": 5},
}


def frames() -> list[Image.Image]:
    """Four pictures, one of them grey, one with alpha."""
    pictures: list[Image.Image] = [demo_photo(n).resize((90, 70)) for n in range(4)]
    return [pictures[0], pictures[1].convert("L").convert("RGB"), with_alpha(pictures[2]), pictures[3]]


def animated(kind: str) -> bytes:
    file, (first, *rest) = io.BytesIO(), frames()
    if kind == "TIFF":  # pages of several sizes, one turned
        rest = [rest[0].convert("L").resize((40, 61)), *rest[1:]]
        first.save(file, kind, save_all=True, append_images=rest)
    else:
        ways: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "GIF": {"disposal": 2, "transparency": 0}}
        first.save(file, kind, save_all=True, append_images=rest, duration=50, **ways.get(kind, {}))
    return file.getvalue()


def shown(data: bytes, frame: int) -> Image.Image:
    """The frame as Pillow seeks it."""
    with Image.open(io.BytesIO(data)) as image:
        image.seek(frame)
        return ImageOps.exif_transpose(image)


def asked(sample_id: str, **part: Any) -> dict[str, Any]:
    content = [{"type": "image", **part}, {"type": "text", "text": "What?"}]
    return {
        "id": sample_id,
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A."}],
    }


def by_name(cache: Any) -> dict[str, int]:
    return {cache.sample_id(index): index for index in range(len(cache))}


@pytest.mark.parametrize("codec", ["raw", "zstd", "webp", "source"])
@pytest.mark.few("webp", "source")
def test_an_image_of_a_size_is_what_the_processor_is_told_to_make(codec: str, tmp_path: Path) -> None:
    corpus, data = PhotoCorpus(tmp_path), photo(3, width=301, height=190)
    corpus.add_photo("a.jpg", data)
    corpus.rows = [asked(name, image="a.jpg", **size) for name, size in SIZES.items()]
    corpus.rows.append({"id": "row", "image": {"image": "a.jpg", **SIZES["both"]}, "question": "What?", "answer": "A."})
    corpus.write_manifest()
    config = corpus.config(f"vision.codec={codec}")
    cache, processor = open_cache(build_here(config).cache), load_processor(DEMO / "model", "pil")
    assert sum(entry.rows for _, entry in cache.shard_entries("image")) == len(SIZES)
    online, image = select(corpus.config(f"vision.codec={codec}", 'loader.cache="off"')), Image.open(io.BytesIO(data))
    for name, index in by_name(cache).items():
        size = SIZES["both" if name == "row" else name]
        if "resized_height" in size:
            _, rows, columns = grid_thw(
                size["resized_width"],
                size["resized_height"],
                ImageSettings(patch_size=16, min_pixels=4096, max_pixels=16384 * 1024),
            )
            wanted = processor([image.resize((columns * 16, rows * 16), 3)], do_resize=False, return_tensors="np")
        else:
            bounds = {"shortest_edge": size.get("min_pixels", 16384), "longest_edge": size.get("max_pixels", 131072)}
            wanted = processor([image], size=bounds, return_tensors="np")
        sample = cache.read(index)
        assert sample["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist(), name
        assert np.array_equal(pixel_values(cache, index), wanted["pixel_values"]), name
        assert (sample["input_ids"] == cache.constants["image_token_id"]).sum() == len(wanted["pixel_values"]) // 4
        apart = online.read(by_name(online)[name])
        assert np.array_equal(apart["input_ids"], sample["input_ids"])
        assert np.array_equal(apart["patches"][0], sample["patches"][0])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_a_frame_is_the_one_that_pillow_seeks(kind: str, tmp_path: Path) -> None:
    corpus, data = PhotoCorpus(tmp_path), animated(kind)
    corpus.add_photo("a.img", data)
    corpus.rows = [asked(f"{n}", image="a.img", frame=n) for n in (3, 0, 2, 1)]
    corpus.rows.append(asked("sized", image="a.img", frame=2, max_pixels=16384))
    corpus.rows.append(asked("gone", image="a.img", frame=4))
    corpus.rows.append(asked("none", image="a.img"))
    corpus.write_manifest()
    processor = load_processor(DEMO / "model", "pil")
    for codec in ("raw", "source"):
        report = build_here(corpus.config(f"vision.codec={codec}"))
        rejected = {row["sample_id"]: row["reason"] for row in json_lines(Path(report.cache) / "rejected.jsonl")}
        assert rejected == {"gone": "no_such_frame", "none": "animated_image"}
        cache = open_cache(report.cache)
        for name, index in by_name(cache).items():
            frame, most = (2, 16384) if name == "sized" else (int(name), 131072)
            size = {"shortest_edge": 16384, "longest_edge": most}
            wanted = processor([shown(data, frame)], size=size, return_tensors="np")
            assert np.array_equal(pixel_values(cache, index), wanted["pixel_values"]), name
    for alpha in ("white", "drop"):
        one = decode_image(data, max_pixels=1 << 20, sample_id="a", alpha=alpha, frame=2)
        file = frame_file(data, max_pixels=1 << 20, sample_id="a", alpha=alpha, frame=2)
        assert np.array_equal(np.asarray(one), np.asarray(decode_image(file, max_pixels=1 << 20, sample_id="a")))
    for frame in range(4):
        assert image_size(data, max_pixels=1 << 20, sample_id="a", frame=frame) == shown(data, frame).size


def test_a_still_is_its_frame_0_and_a_turned_one_is_turned() -> None:
    file = io.BytesIO()
    demo_photo(1).resize((90, 70)).save(file, "JPEG", exif=exif(6))
    plain = decode_image(file.getvalue(), max_pixels=1 << 20, sample_id="a")
    found = decode_image(file.getvalue(), max_pixels=1 << 20, sample_id="a", frame=0)
    assert np.array_equal(np.asarray(found), np.asarray(plain))
    assert image_size(file.getvalue(), max_pixels=1 << 20, sample_id="a", frame=0) == (70, 90)
    for frame in (1, 1 << 39):
        with pytest.raises(DecodeError, match=rf"frame {frame} is asked for, and the last of the file is 0") as caught:
            image_size(file.getvalue(), max_pixels=1 << 20, sample_id="a", frame=frame)
        assert caught.value.reason == "no_such_frame"


def test_any_processor_takes_frames_and_refuses_sizes_by_name(tmp_path: Path) -> None:
    processor, data = made("CLIPImageProcessorPil"), animated("GIF")
    processor.save_pretrained(tmp_path / "clip")
    (tmp_path / "a.gif").write_bytes(data)
    rows: list[dict[str, Any]] = [{"id": f"{n}", "image": {"path": "a.gif", "frame": n}} for n in range(4)]
    rows += [{"id": "sized", "image": {"path": "a.gif", "frame": 1, "max_pixels": 9}}]
    rows += [
        {"id": "odd", "image": {"path": "a.gif", "crop": [0, 0, 1, 1]}},
        {"id": "bad", "image": {"path": "a.gif", "frame": "x"}},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        {
            "name": "x",
            "source": {"kind": "jsonl", "manifest": str(tmp_path / "train.jsonl")},
            "vision": {"processor": str(tmp_path / "clip")},
            "text": {"prompt": "none"},
            "plan": {"batch_size": 1},
            "run": {"cache_root": str(tmp_path / "caches"), "num_workers": 1, "max_failed_share": 1.0},
        }
    )
    report = build_here(config)
    rejected = {row["sample_id"]: row["reason"] for row in json_lines(Path(report.cache) / "rejected.jsonl")}
    assert rejected == {"sized": "image_pixel_limits", "odd": "bad_row", "bad": "no_such_frame"}
    loader: Any = make_loader(config, shuffle=False, with_ids=True)
    for batch, (name,) in loader:
        wanted = processor([shown(data, int(name))], return_tensors="pt")
        assert (batch["pixel_values"] == wanted["pixel_values"]).all()


def test_tars_and_tables_have_them_too(tmp_path: Path) -> None:
    data = animated("WEBP")
    size = {"min_pixels": 20_000, "max_pixels": 40_000}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        text = json.dumps(
            {"images": [{"image": "a.webp", "frame": 2, **size}], "question": "<image>What?", "answer": "A."}
        )
        for name, content in (("s.webp", data), ("s.json", text.encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    image = {"bytes": data, "path": "a.webp", "frame": 2, **size}
    plain = {"bytes": photo(1), "path": "b.jpg", **dict.fromkeys(("frame", *size))}
    bad = {**plain, "frame": 5}
    columns = {"image": [image, plain, bad], "question": ["What?"] * 3, "answer": ["A."] * 3}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    corpus, found = PhotoCorpus(tmp_path), []
    for kind, manifest, refused in (("webdataset", "a.tar", {}), ("table", "a.parquet", {"no_such_frame": 1})):
        report = build_here(corpus.config(f"source.kind={kind}", f"source.manifest={manifest}"))
        assert report.failed == refused
        cache: Cache = open_cache(report.cache)
        found.append(cache.read(0))
    assert len(cache) == 2
    one, other = found
    for name in ("patches", "image_grid_thw", "input_ids"):
        assert np.array_equal(np.asarray(one[name]), np.asarray(other[name]))


_NUMBERS = st.integers(1, 1 << 22)


@given(width=st.integers(1, 3000), height=st.integers(1, 3000), least=_NUMBERS, most=_NUMBERS)
def test_a_grid_is_within_what_is_asked_or_refused_by_name(width: int, height: int, least: int, most: int) -> None:
    settings = ImageSettings(patch_size=16)
    asked = Still(min_pixels=least, max_pixels=most)
    aspect = max(width, height) / min(width, height)
    if least > most or aspect > 200:
        with pytest.raises(SampleError, match="min_pixels is" if least > most else "200 times"):
            asked.grid(width, height, settings, 1 << 22)
        return
    _, rows, columns = asked.grid(width, height, settings, 1 << 40)
    assert (1, rows, columns) == grid_thw(
        width, height, ImageSettings(patch_size=16, min_pixels=least, max_pixels=most)
    )
    with pytest.raises(SampleError, match="it is resized to"):
        asked.grid(width, height, settings, rows * columns * 256 - 1)


def test_boxes_are_scaled_with_the_size_that_is_asked(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen2_5")
    said = {"question": "<image>Where?", "answer": "<bbox>", "objects": {"bbox": [[10, 3, 75, 79]]}}
    sizes: list[dict[str, int]] = [{}, {"min_pixels": 60_000}, {"resized_height": 280, "resized_width": 560}]
    rows = [{**said, "image": {"image": "p0.jpg", **size}} for size in sizes]
    cache = open_cache(build_here(config_of(tmp_path, rows)).cache)
    shown = Image.open(tmp_path / "p0.jpg")
    wanted = []
    for index, size in enumerate(sizes):
        grid = cache.read(index)["image_grid_thw"][0]
        if "min_pixels" in size:
            bounds = {"shortest_edge": 60_000, "longest_edge": 131072}
            assert grid.tolist() == load_processor(folder, "pil")([shown], size=bounds)["image_grid_thw"][0].tolist()
        wanted.append(by_ms_swift("qwen2_5", "list", [10, 3, 75, 79], shown, grid, 14))
    assert len({*wanted}) == len(sizes)
    for text, box in zip(texts_of(folder, cache), wanted, strict=True):
        assert f"assistant\n{box}<|im_end|>" in text
