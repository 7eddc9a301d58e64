"""Caches of images that somebody damaged or made up: refused by name, never a traceback of numpy, never a bomb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, ConfigError, ForebayError
from forebay.store.cache import Cache, open_cache
from forebay.store.image.stored_items import MAX_BYTES, ArrayField, StoredArrays
from forebay.store.layout import Array, FieldSpec
from forebay.store.metadata import FILE_NAME, write_metadata
from forebay.train.collate.collator import Collator
from tests.images.processors import tiny, tiny_corpus
from tests.preprocess.here_pool import build_here

pytestmark = pytest.mark.usefixtures(tiny.__name__)
Change = Callable[[dict[str, Any]], Any]


def field(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["constants"]["image"]["form"]["fields"][0]
    return found


def changed(folder: Path, change: Change) -> Cache:
    """Opens a cache whose metadata somebody changed and signed."""
    document = json.loads((folder / FILE_NAME).read_text())
    del document["checksum"]
    change(document)
    (folder / FILE_NAME).chmod(0o644)
    write_metadata(folder, document)
    return open_cache(folder)


LIES: dict[str, tuple[Change, str]] = {
    "no form": (lambda d: d["constants"]["image"].pop("form"), "KeyError"),
    "a list": (lambda d: d["constants"]["image"].update(form=[]), "TypeError"),
    "no field": (lambda d: d["constants"]["image"]["form"].update(fields=[]), "its form has no field"),
    "another shape": (lambda d: field(d).update(shape=[3, 9, 8]), "the field pixel_values is"),
    "growing": (lambda d: field(d).update(shape=[None, None, None]), "the field pixel_values is"),
    "huge": (lambda d: field(d).update(shape=[1 << 40, 8]), "pixel_values is declared"),
    "no shape": (lambda d: field(d).update(shape="3"), "a field of its form is"),
    "objects": (lambda d: field(d).update(stored_dtype="object"), "object"),
    "a number": (lambda d: field(d).update(name=7), "a field of its form is"),
    "no group": (lambda d: d["groups"].pop("image"), "a field is {'dtype': 'uint8', 'group': 'image'"),
    "own items": (lambda d: d["groups"]["image"].update(num_items=None), "image has 1 shards, text 3"),
    "more items": (lambda d: d["groups"]["image"].update(num_items=1 << 40), "image_slots"),
    "no lengths": (lambda d: d["length_names"].remove("num_images"), "length_names has no num_images"),
}


def test_metadata_that_lie_about_images_are_refused(tmp_path: Path) -> None:
    folder = Path(build_here(tiny_corpus(tmp_path).config()).cache)
    whole = (folder / FILE_NAME).read_bytes()
    for change, message in LIES.values():
        (folder / FILE_NAME).chmod(0o644)
        (folder / FILE_NAME).write_bytes(whole)
        with pytest.raises(CacheCorruptError, match=message):
            changed(folder, change)


def test_a_form_that_reading_does_not_need_is_refused_where_batches_are_made(tmp_path: Path) -> None:
    folder = Path(build_here(tiny_corpus(tmp_path).config()).cache)
    cache = changed(folder, lambda d: field(d).update(join="knit"))
    assert cache.read(0)["pixel_values"]
    with pytest.raises(ConfigError, match=r"declares no form of batches.*: wanted the join of a field"):
        Collator(cache)


def test_a_code_that_the_table_does_not_have_is_no_batch(tmp_path: Path) -> None:
    folder = Path(build_here(tiny_corpus(tmp_path).config()).cache)

    def shorten(document: dict[str, Any]) -> None:
        table = field(document)["table"]
        table["values"] = [row[:4] for row in table["values"]]

    cache = changed(folder, shorten)
    with pytest.raises(ConfigError, match=r"a code is .*, the table has 4 values"):
        Collator(cache)([cache.read(0)])


def test_a_row_that_names_no_image_and_a_torn_image_are_named(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind="free")
    cache = open_cache(build_here(corpus.config("vision.codec=zstd")).cache, verify="never")
    path, _ = cache.shard_entries("image")[0]
    shard = cache.shard("image", 0)
    data = bytearray(path.read_bytes())
    start = bytes(data).index(shard.row(0)["pixel_values_zstd"].tobytes())
    data[start : start + 8] = bytes(8)
    path.chmod(0o644)
    path.write_bytes(data)
    damaged = open_cache(cache.folder, verify="never")
    with pytest.raises(CacheCorruptError, match=r"image: the bytes of pixel_values do not decompress"):
        damaged.read(0)
    with pytest.raises(CacheCorruptError, match=r"xxh3-64|computed"):
        open_cache(cache.folder).read(0)


_FORMS: list[tuple[int | None, ...]] = [(None, None), (3, None), (2,)]
_SHAPES = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)


@given(shape=_SHAPES, size=st.integers(0, 64), codec=st.sampled_from(["raw", "zstd"]), form=st.sampled_from(_FORMS))
def test_no_shape_that_a_row_says_ends_in_another_error(
    shape: list[int], size: int, codec: str, form: tuple[int | None, ...]
) -> None:
    one, stored = ArrayField("x", form, np.dtype("<u2"), codec == "zstd"), np.zeros(size, np.uint16)
    row: dict[str, Array] = {
        "x": stored,
        "x_zstd": np.frombuffer(b"not zstd", np.uint8),
        "x_shape": np.array(shape, np.int32),
    }
    try:
        array = one.array(row)
    except ValueError:
        return
    assert array.nbytes <= MAX_BYTES
    assert array.size == size


def test_fields_that_the_form_does_not_declare_are_not_read_as_images() -> None:
    specs = [
        FieldSpec(name="pixels", dtype="uint8", shape=(4,), group="image"),
    ]
    form = {"fields": [{"name": "pixels", "shape": [None, 4], "stored_dtype": "uint8"}]}
    metadata = {
        "constants": {"image": {"features": "images", "form": form}},
        "fields": [spec.to_json() for spec in specs],
    }
    stored = StoredArrays.of(metadata, folder=Path("cache"))
    image = np.arange(8, dtype=np.uint8).reshape(2, 4)
    sample = stored.sample({}, [{"pixels": image, "other": image}])
    assert list(sample) == ["pixels"]
    assert list(stored.joined(sample)) == ["pixels", "pixels_shape"]
    joined = stored.joined(sample)
    assert joined["pixels_shape"].tolist() == [[2, 4]]
    assert issubclass(CacheCorruptError, ForebayError)
