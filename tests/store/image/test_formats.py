from __future__ import annotations

import io
import resource
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from forebay.errors import DecodeError
from forebay.store.image.codec import decode_image
from forebay.store.image.formats import EVERY_IMAGE, MoreImages, image_size
from tests.store.image.variants import PHOTOS, bombs, cut_short, late_png, photo, refused, saved, variants

LIMIT = 89_478_485


class Counting(io.BytesIO):
    """A file that counts what is read of it."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_sizes_are_those_of_the_decoded_images() -> None:
    for name, data in variants():
        size = decode_image(data, max_pixels=LIMIT, sample_id=name).size
        assert image_size(data, max_pixels=LIMIT, sample_id=name) == size, name
        assert image_size(io.BytesIO(data), max_pixels=LIMIT, sample_id=name) == size, name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF", "PPM"])
def test_a_header_is_little_of_a_file(kind: str) -> None:
    file = Counting(saved(photo(0).resize((900, 700)), kind))
    assert image_size(file, max_pixels=LIMIT, sample_id="a") == (900, 700)
    assert file.taken < 9000


def test_text_behind_the_pixels_of_a_png_decodes_nothing() -> None:
    whole = late_png(photo(0), b"")
    garbled = whole.replace(whole[60:200], bytes(140))
    assert image_size(garbled, max_pixels=LIMIT, sample_id="a") == photo(0).size


@pytest.mark.parametrize("name", refused())
def test_what_is_no_sample_has_its_reason(name: str) -> None:
    data, reason = refused()[name]
    with pytest.raises(DecodeError, match="sample s7: ") as caught:
        image_size(data, max_pixels=LIMIT, sample_id="s7")
    assert caught.value.reason == reason
    with pytest.raises(DecodeError, match="sample s7: ") as caught:
        decode_image(data, max_pixels=LIMIT, sample_id="s7")
    assert caught.value.reason == reason


BY_CHOICE: dict[str, MoreImages] = {
    "animated GIF": "first_frame",
    "animated WebP": "first_frame",
    "APNG": "first_frame",
    "TIFF of pages": "first_frame",
    "AVIF": "avif",
    "JPEG 2000": "jpeg2000",
    **dict.fromkeys(("16 bit PNG", "16 bit TIFF", "16 bit PGM", "32 bit TIFF", "float TIFF"), "16-bit"),
}


@pytest.mark.parametrize("name", BY_CHOICE)
def test_what_is_read_by_choice_is_as_pillow_converts_it(name: str) -> None:
    data, choice = refused()[name][0], BY_CHOICE[name]
    with pytest.raises(DecodeError, match=f"source.more_images: {choice}"):
        image_size(data, max_pixels=LIMIT, sample_id="s7", more=[each for each in EVERY_IMAGE if each != choice])
    with Image.open(io.BytesIO(data)) as opened:
        wanted = ImageOps.exif_transpose(opened).convert("RGB")
    found = decode_image(data, max_pixels=LIMIT, sample_id="s7", alpha="drop", more=(choice,))
    assert image_size(data, max_pixels=LIMIT, sample_id="s7", more=(choice,)) == found.size == wanted.size
    assert np.array_equal(np.asarray(found), np.asarray(wanted))


def test_a_pillow_without_a_reader_refuses_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import AvifImagePlugin

    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    with pytest.raises(DecodeError, match="AVIF is no JPEG") as caught:
        image_size(refused()["AVIF"][0], max_pixels=LIMIT, sample_id="s7", more=EVERY_IMAGE)
    assert caught.value.reason == "format"


def test_bombs_take_no_memory_and_warn_of_nothing() -> None:
    files = bombs()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, data in files.items():
            with pytest.raises(DecodeError, match=f"{name}: .*limit {LIMIT}; scale it down or raise source.max_pixels"):
                decode_image(data, max_pixels=LIMIT, sample_id=name)
    assert not caught
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def test_the_limit_is_ours_alone() -> None:
    data = bombs()["PNG, all there"]  # 144 Mpx: Pillow would warn
    assert image_size(data, max_pixels=144_000_000, sample_id="a") == (12_000, 12_000)
    with pytest.raises(DecodeError, match="12000x12000 = 144000000 pixels by its header, limit 143999999"):
        image_size(data, max_pixels=143_999_999, sample_id="a")
    assert image_size(bombs()["PNG"], max_pixels=1 << 40, sample_id="a") == (60_000, 60_000)


def test_the_disk_is_not_the_image() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 0:
                raise OSError(5, "Input/output error")
            return super().read(size)

    with pytest.raises(OSError, match="Input/output error"):
        image_size(Failing(PHOTOS[0].read_bytes()), max_pixels=LIMIT, sample_id="a")


def test_a_cut_image_still_has_its_size() -> None:
    for kind, data in cut_short().items():
        if kind != "WEBP":  # its reader wants all of the file
            assert image_size(data, max_pixels=LIMIT, sample_id=kind) == (160, 120)
