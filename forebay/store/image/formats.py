"""Image files of nine formats, told by their first bytes: opened by Pillow's reader, or measured by their headers."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

from forebay.errors import DecodeError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_HEAD_BYTES = 30
_GIF, _PNG, _RIFF = (b"GIF87a", b"GIF89a"), b"\x89PNG\r\n\x1a\n", b"RIFF"

MoreImages = Literal["avif", "jpeg2000", "16-bit", "first_frame"]
EVERY_IMAGE: tuple[MoreImages, ...] = get_args(MoreImages)
"""What `source.more_images` may name."""
_BY_CHOICE: dict[str, MoreImages] = {"AVIF": "avif", "JPEG 2000": "jpeg2000"}
_UNREAD = (
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyp", "HEIC or MP4"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"JXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"8BPS", "PSD"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
)
"""Forms of images that are told and not read: where their marks stand, what they are called."""

# What Pillow's readers raise for bytes that are no image. MemoryError is no property of the bytes.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


# A filter and no `catch_warnings`, which restores a list that other threads have changed meanwhile.
_QUIET = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)


def open_image(
    file: BinaryIO, *, max_pixels: int, sample_id: str, more: Collection[MoreImages] = (), frame: int | None = None
) -> ImageFile:
    """Returns the image of a file at its beginning, no pixel decoded: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM.

    more: what else is read: AVIF, JPEG 2000, samples of more than 8 bits, which conversion to RGB clips at 255, and of
    several frames or pages the first. frame: the one of these that is meant, from 0.

    The reader is called directly, not through `Image.open`: no other of Pillow's readers (EPS runs ghostscript) sees
    the bytes, and Pillow's own pixel limit, a global of the process, neither warns nor has to be changed: ours decides.

    Raises DecodeError `empty_file`, `unreadable_image`, `too_many_pixels` (by the header, before anything is allocated
    for pixels), `animated_image` (more than one frame or page), `no_such_frame` or `format` (those of `_UNREAD`; modes
    I;16, I and F; 16-bit RGB is fine, Pillow takes its upper 8). An OSError of the file comes through.
    """
    head = file.read(_HEAD_BYTES)
    if not head:
        raise DecodeError("empty_file", f"sample {sample_id}: the image is empty (0 bytes); write or list it again")
    name = next((name for at, magic, name in _UNREAD if head.startswith(magic, at)), None)
    reader = _reader(head) if name is None else _reader_by_choice(name) if _BY_CHOICE.get(name) in more else None
    if reader is None:
        advice = f" or name it in source.more_images: {_BY_CHOICE[name]}" if name in _BY_CHOICE else ""
        raise DecodeError(
            "format" if name else "unreadable_image",
            f"sample {sample_id}: {name or repr(head[:12])} is no JPEG, PNG, WebP, GIF, BMP, TIFF or PPM; convert "
            f"it{advice}",
        )
    _check_pixels(_claimed_size(head), max_pixels, sample_id)
    file.seek(0)
    with reading(max_pixels=max_pixels, sample_id=sample_id):
        image = reader(file)
        is_animated = bool(getattr(image, "is_animated", False))
    _check_pixels(image.size, max_pixels, sample_id)
    if frame is not None:
        _show(image, frame, max_pixels, sample_id)
    elif is_animated and "first_frame" not in more:
        raise DecodeError(
            "animated_image",
            f"sample {sample_id}: more than one frame or page; say which one by frame: 0 beside its name, or take the "
            "first of all: source.more_images: first_frame",
        )
    if (image.mode.startswith("I") or image.mode == "F") and "16-bit" not in more:
        raise DecodeError(
            "format",
            f"sample {sample_id}: values of mode {image.mode}, which conversion to RGB clips at 255; write it with 8 "
            "bits, or have it clipped: source.more_images: 16-bit",
        )
    return image


def _show(image: ImageFile, frame: int, max_pixels: int, sample_id: str) -> None:
    """Makes a frame or page the one that is read. Raises DecodeError `no_such_frame`, and as `open_image` does."""
    with reading(max_pixels=max_pixels, sample_id=sample_id):
        try:
            image.seek(frame)
        except EOFError as err:
            count = getattr(image, "n_frames", 1)
            said = f"sample {sample_id}: frame {frame} is asked for, and the last of the file is {count - 1}"
            raise DecodeError("no_such_frame", f"{said}; frames count from 0") from err
    _check_pixels(image.size, max_pixels, sample_id)


@contextlib.contextmanager
def reading(*, max_pixels: int, sample_id: str) -> Iterator[None]:
    """Makes what Pillow raises for bytes that are no image a DecodeError; what the disk raises comes through.

    What it warns of (corrupt EXIF: a line a tag, thousands an image) is neither an error, whatever the process makes of
    warnings, nor printed: Pillow goes on without that tag, and so does every training that reads such an image. For
    that this process ignores UserWarnings of Pillow's modules from here on.
    """
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_QUIET[3].pattern)
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    try:
        yield
    except (DecompressionBombError, DecompressionBombWarning) as err:  # of parts larger than the whole
        raise _too_many_pixels(str(err), max_pixels, sample_id) from err
    except _UNREADABLE as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise
        raise DecodeError(
            "unreadable_image", f"sample {sample_id}: {type(err).__name__}: {err}; write the image again"
        ) from err


_READERS = {
    "Jpeg": (b"\xff\xd8\xff",),  # of an MPO, several JPEGs in one, the first: as Pillow does
    "Png": (_PNG,),
    "Gif": _GIF,
    "Bmp": (b"BM",),
    "Tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
}
"""How files begin, by Pillow's names of their readers; WebP and PPM differ further behind."""


def _reader(head: bytes) -> Callable[[BinaryIO], ImageFile] | None:
    name = next((name for name, marks in _READERS.items() if head.startswith(marks)), None)
    if head.startswith(_RIFF) and head[8:12] == b"WEBP":
        name = "WebP"
    elif head[:1] == b"P" and head[1:2] in b"123456":
        name = "Ppm"
    return None if name is None else getattr(importlib.import_module(f"PIL.{name}ImagePlugin"), f"{name}ImageFile")


def _reader_by_choice(name: str) -> Callable[[BinaryIO], ImageFile] | None:
    """Returns the reader of AVIF or JPEG 2000; None where this Pillow has none."""
    called = {"AVIF": "Avif", "JPEG 2000": "Jpeg2K"}[name]
    try:
        module = importlib.import_module(f"PIL.{called}ImagePlugin")
    except ImportError:  # before Pillow 11.3
        return None
    reader: Callable[[BinaryIO], ImageFile] | None = getattr(module, f"{called}ImageFile")
    return reader if getattr(module, "SUPPORTED", True) else None


def _claimed_size(head: bytes) -> tuple[int, int]:
    """Width and height by the first bytes where the reader allocates a canvas when it opens: WebP, GIF; else (0, 0).

    WebP: RFC 9649, sections 2.5 to 2.7. GIF: the logical screen descriptor.
    """
    if len(head) < _HEAD_BYTES or not head.startswith((_RIFF, *_GIF)):
        return 0, 0
    if head.startswith(_GIF):
        width, height = struct.unpack_from("<HH", head, 6)
        return width, height
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _check_pixels(size: tuple[int, int], max_pixels: int, sample_id: str) -> None:
    pixels = size[0] * size[1]
    if pixels > max_pixels:
        raise _too_many_pixels(f"{size[0]}x{size[1]} = {pixels} pixels by its header", max_pixels, sample_id)


def _too_many_pixels(found: str, max_pixels: int, sample_id: str) -> DecodeError:
    return DecodeError(
        "too_many_pixels", f"sample {sample_id}: {found}, limit {max_pixels}; scale it down or raise source.max_pixels"
    )


_ORIENTATION = 0x0112
_PNG_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0", b"exif\0", b"xmp\0")
"""Names of PNG text chunks from which Pillow takes an orientation."""


def image_size(
    data: bytes | BinaryIO,
    *,
    max_pixels: int,
    sample_id: str,
    more: Collection[MoreImages] = (),
    frame: int | None = None,
) -> tuple[int, int]:
    """Returns (width, height) as displayed: the size of `decode_image`'s result, the EXIF or XMP orientation applied.

    data: the encoded image, or a seekable file of it, of which only headers are read; all bytes of a WebP and a GIF,
    whose readers look for a second frame. No pixel is decoded, except of a PNG with an orientation behind its pixels,
    within `max_pixels`.

    more, frame: see `open_image`; frames before the one that is asked for may be decoded. Raises DecodeError as that
    does.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    file.seek(0)
    image = open_image(file, max_pixels=max_pixels, sample_id=sample_id, more=more, frame=frame)
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
    """Whether a PNG may have an orientation behind its first pixels (its specification, 5.3)."""
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
