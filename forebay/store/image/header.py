"""The size of an image from its header: what planning needs of every image before one is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

from forebay.store.image.formats import open_image, reading

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_ORIENTATION = 0x0112
_PNG_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0", b"exif\0", b"xmp\0")
"""Of PNG text chunks from which Pillow takes an orientation."""


def image_size(data: bytes | BinaryIO, *, max_pixels: int, sample_id: str) -> tuple[int, int]:
    """Returns (width, height) as displayed: the size of `decode_image`'s result, the EXIF or XMP orientation applied.

    data: the encoded image, or a seekable file of it, of which only headers are read; all bytes of a WebP and a GIF, whose
    readers look for a second frame. No pixel is decoded, except of a PNG with an orientation behind its pixels, within
    `max_pixels`.

    Raises DecodeError as `open_image` does.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    file.seek(0)
    image = open_image(file, max_pixels=max_pixels, sample_id=sample_id)
    with reading(max_pixels=max_pixels, sample_id=sample_id):
        orientation = _orientation(image, file)
    width, height = image.size
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _orientation(image: ImageFile, file: BinaryIO) -> object:
    from PIL.Image import Image

    if image.format == "TIFF":  # its reader has swapped the sides already, and turns the pixels itself
        return 1
    if image.format == "PNG" and not _has_late_orientation(file):
        return Image.getexif(image).get(_ORIENTATION)  # PngImageFile's own decodes first
    return image.getexif().get(_ORIENTATION)


def _has_late_orientation(file: BinaryIO) -> bool:
    """Whether a PNG may have an orientation behind its first pixels (PNG specification, 5.3: length, type, data, CRC)."""
    before = file.tell()
    position, has_pixels, found = 8, False, False
    while not found:
        file.seek(position)
        head = file.read(32)
        kind = head[4:8]
        if len(head) < 8 or kind == b"IEND":
            break
        is_keyed = kind in (b"tEXt", b"zTXt", b"iTXt") and head[8:].startswith(_PNG_KEYWORDS)
        found = has_pixels and (kind == b"eXIf" or is_keyed)
        has_pixels = has_pixels or kind == b"IDAT"
        position += 12 + int.from_bytes(head[:4], "big")
    file.seek(before)
    return found
