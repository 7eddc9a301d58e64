"""The golden caches of patches of format 4 open for ever, and the same values give the same shards today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import CacheCorruptError
from forebay.store.cache import open_cache
from forebay.store.image.codec import FIELDS, Codec
from forebay.store.seal import verify_folder
from tests.golden.make_v4_patches import CODECS, FOLDER, main, name, write_shards


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())
    return document


@pytest.mark.parametrize("codec", CODECS)
def test_every_sample_is_what_was_written(expected: dict[str, Any], codec: Codec) -> None:
    cache = open_cache(FOLDER / name(codec))
    assert (cache.key, len(cache)) == (expected["key"], len(expected["samples"]))
    assert FIELDS[codec] in cache.fields
    for index, wanted in enumerate(expected["samples"]):
        sample = cache.read(index)
        assert sorted(sample) == sorted(wanted)
        assert sample["input_ids"].tolist() == wanted["input_ids"]
        assert sample["label_mask"].tolist() == wanted["label_mask"]
        assert sample["image_grid_thw"].tolist() == wanted["image_grid_thw"]
        assert [image.tolist() for image in sample["patches"]] == wanted["patches"]
        tensors = cache[index]
        assert tensors["patches"].tolist() == [row for image in wanted["patches"] for row in image]
        assert tensors["patches"].shape[1] == 12
    assert cache.samples["sample_id"].to_pylist() == [f"chat-{n}" for n in range(len(cache))]
    assert verify_folder(cache.folder).problems == []


def test_a_flipped_number_of_an_image_is_found_before_it_is_followed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / name("raw"), tmp_path / "cache"))
    path = folder / "image_slots.npy"
    data = bytearray(path.read_bytes())
    data[len(data) - 8 * 6] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CacheCorruptError, match=r"image_slots\.npy"):
        open_cache(folder).read(0)


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_values_give_the_same_shards_today(tmp_path: Path, codec: Codec) -> None:
    if codec == "zstd":  # its bytes are the library's; what they stand for is compared above
        write_shards(tmp_path, codec)
        assert (tmp_path / "text" / "00000.tdz").read_bytes() == (FOLDER / name(codec) / "text/00000.tdz").read_bytes()
        return
    for shards in write_shards(tmp_path, codec).values():
        for path, _ in shards:
            assert path.read_bytes() == (FOLDER / name(codec) / path.relative_to(tmp_path)).read_bytes()


def test_it_is_never_written_again() -> None:
    with pytest.raises(FileExistsError, match="v4_patches"):
        main()
