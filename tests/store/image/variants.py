"""Encoded images of every kind, made of the demo photos, and files that are none."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

PHOTOS = sorted((Path(__file__).parents[3] / "demo" / "vision" / "photos").iterdir())
_ORIENTATION = 0x0112


def photo(index: int = 0) -> Image.Image:
    with Image.open(PHOTOS[index]) as image:
        return image.convert("RGB")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[_ORIENTATION] = orientation
    return tags


def xmp(orientation: int) -> bytes:
    return b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def with_alpha(image: Image.Image) -> Image.Image:
    ramp = Image.linear_gradient("L").resize(image.size)
    return Image.merge("RGBA", (*image.split(), ramp))


def palette_with_transparency(image: Image.Image, transparency: int | bytes) -> bytes:
    return saved(image.quantize(200), "PNG", transparency=transparency)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, bits: int, colour: int, pixels: bytes, late: bytes = b"") -> bytes:
    """A PNG of raw scanlines; `late` stands behind the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), late, chunk(b"IEND", b""))
    )


def late_png(image: Image.Image, late: bytes) -> bytes:
    pixels = np.asarray(image)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    return png(image.width, image.height, bits=8, colour=2, pixels=lines, late=late)


def sixteen_bit_rgb_png() -> bytes:
    values = np.random.default_rng(0).integers(0, 1 << 16, (40, 50, 3), dtype=np.uint16).astype(">u2")
    return png(50, 40, bits=16, colour=2, pixels=b"".join(b"\0" + line.tobytes() for line in values))


@functools.cache
def variants() -> tuple[tuple[str, bytes], ...]:
    """Returns names and encoded images that a processor takes: every photo, and more than fifty made of them."""
    return (
        *((path.name, path.read_bytes()) for path in PHOTOS),
        *_sizes(photo(1)),
        *_modes(photo(2).crop((20, 30, 333, 260))),
        *_containers(photo(3).resize((217, 143))),
        *_orientations(photo(4).resize((211, 120))),
    )


def _sizes(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    for box in ((0, 0, 512, 384), (3, 5, 404, 306), (100, 0, 133, 400), (0, 200, 700, 233), (10, 10, 75, 75)):
        yield f"crop {box}", saved(image.crop(box), "PNG")
    for size in ((1600, 900), (160, 90), (33, 31), (3, 2), (1, 1), (199, 1), (1, 150), (640, 641)):
        yield f"scaled to {size}", saved(image.resize(size), "PNG")


def _modes(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    alpha, grey = with_alpha(image), image.convert("L")
    yield "grey JPEG", saved(grey, "JPEG")
    yield "grey PNG", saved(grey, "PNG")
    yield "grey PNG, a transparent value", saved(grey, "PNG", transparency=200)
    yield "grey with alpha PNG", saved(alpha.convert("LA"), "PNG")
    yield "RGB PNG, a transparent colour", saved(image, "PNG", transparency=image.getpixel((5, 5)))
    yield "RGBA PNG", saved(alpha, "PNG")
    yield "RGBA WebP", saved(alpha, "WEBP", lossless=True, exact=True)
    yield "RGBA WebP, lossy", saved(alpha, "WEBP", quality=70)
    yield "RGBA TIFF", saved(alpha, "TIFF")
    yield "CMYK JPEG", saved(image.convert("CMYK"), "JPEG")
    yield "CMYK TIFF", saved(image.convert("CMYK"), "TIFF")
    yield "palette PNG", saved(image.quantize(64), "PNG")
    yield "palette PNG, 4 bits", saved(image.quantize(16), "PNG", bits=4)
    yield "palette PNG, a transparent entry", palette_with_transparency(image, 3)
    yield "palette PNG, alphas", palette_with_transparency(image, bytes(range(200)))
    yield "palette GIF", saved(image.quantize(64), "GIF")
    yield "palette GIF, a transparent entry", saved(image.quantize(64), "GIF", transparency=3)
    yield "palette BMP", saved(image.quantize(64), "BMP")
    yield "1 bit PNG", saved(image.convert("1"), "PNG")
    yield "1 bit TIFF", saved(image.convert("1"), "TIFF", compression="group4")
    yield "1 bit PBM", saved(image.convert("1"), "PPM")
    yield "16 bit RGB PNG", sixteen_bit_rgb_png()


@functools.cache
def transparent_images() -> dict[str, bytes]:
    """Returns encoded images of every form of transparency that Pillow writes, by name."""
    image = photo(5).resize((97, 64))
    alpha, grey = with_alpha(image), image.convert("L")
    levels = bytes((number * 37) % 256 for number in range(200))
    with_alphas = Image.open(io.BytesIO(palette_with_transparency(image, levels)))
    return {
        "RGBA PNG": saved(alpha, "PNG"),
        "RGBA PNG, turned": saved(alpha, "PNG", exif=exif(6)),
        "LA PNG": saved(Image.merge("LA", (grey, alpha.getchannel("A"))), "PNG"),
        "P PNG, alphas": palette_with_transparency(image, levels),
        "P PNG, an entry": palette_with_transparency(image, 3),
        "P PNG, turned": saved(with_alphas, "PNG", transparency=levels, exif=exif(8)),
        "L PNG, a value": saved(grey, "PNG", transparency=grey.getpixel((5, 5))),
        "RGB PNG, a colour": saved(image, "PNG", transparency=image.getpixel((5, 5))),
        "1 PNG, a value": saved(grey.convert("1"), "PNG", transparency=0),
        "P GIF, an entry": saved(image.quantize(64), "GIF", transparency=3),
        "WebP": saved(alpha, "WEBP", quality=70),
        "lossless WebP": saved(alpha, "WEBP", lossless=True, exact=True),
        "WebP, turned": saved(alpha, "WEBP", lossless=True, exif=exif(5)),
        "RGBA TIFF": saved(alpha, "TIFF"),
        "LA TIFF": saved(Image.merge("LA", (grey, alpha.getchannel("A"))), "TIFF"),
        "PA TIFF": saved(alpha.convert("PA"), "TIFF"),
    }


def _containers(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    yield "progressive JPEG", saved(image, "JPEG", progressive=True, quality=80)
    yield "JPEG 4:4:4", saved(image, "JPEG", subsampling=0, quality=95)
    yield "JPEG quality 10", saved(image, "JPEG", quality=10)
    yield "JPEG, optimised, a colour profile", saved(image, "JPEG", optimize=True, icc_profile=b"not a profile" * 9)
    yield "JPEG of several (MPO)", saved(image, "MPO", save_all=True, append_images=[image.rotate(90)])
    yield "PNG, level 9", saved(image, "PNG", compress_level=9)
    yield "WebP", saved(image, "WEBP", quality=60)
    yield "lossless WebP", saved(image, "WEBP", lossless=True)
    yield "BMP", saved(image, "BMP")
    yield "PPM", saved(image, "PPM")
    yield "TIFF, LZW", saved(image, "TIFF", compression="tiff_lzw")
    yield "TIFF, JPEG", saved(image, "TIFF", compression="jpeg")


def _orientations(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    for orientation in range(1, 9):
        yield f"JPEG, EXIF orientation {orientation}", saved(image, "JPEG", exif=exif(orientation))
    tags = PngImagePlugin.PngInfo()
    tags.add_itxt("XML:com.adobe.xmp", xmp(8).decode())
    yield "JPEG, EXIF orientation 9", saved(image, "JPEG", exif=exif(9))
    yield "JPEG, XMP orientation 6", saved(image, "JPEG", xmp=xmp(6))
    yield "PNG, EXIF orientation 5", saved(image, "PNG", exif=exif(5))
    yield "PNG, XMP orientation 8", saved(image, "PNG", pnginfo=tags)
    yield "PNG, EXIF behind the pixels", late_png(image, chunk(b"eXIf", exif(6).tobytes()[6:]))
    yield "PNG, XMP behind the pixels", late_png(image, chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(7)))
    yield "PNG, a date behind the pixels", late_png(image, chunk(b"tEXt", b"date:create\0" + b"2026"))
    yield "WebP, EXIF orientation 6", saved(image, "WEBP", exif=exif(6))
    yield "TIFF, orientation 6", saved(image, "TIFF", exif=exif(6))
    yield "TIFF, orientation 3", saved(image, "TIFF", exif=exif(3))


@functools.cache
def bombs() -> dict[str, bytes]:
    """Small files whose headers claim far more than 89,478,485 pixels."""
    side = 60_000
    return {
        "PNG": png(side, side, bits=8, colour=2, pixels=b""),
        "PNG, all there": png(12_000, 12_000, bits=1, colour=0, pixels=bytes(12_000 * (1 + 1500))),
        "JPEG": b"\xff\xd8\xff\xc0\x00\x11\x08"
        + struct.pack(">HH", side, side)
        + b"\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
        b"\xff\xda\x00\x0c\x03\x01\0\x02\x11\x03\x11\0\x3f\0",
        "WebP": b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + (16_382).to_bytes(3, "little") * 2 + bytes(40),
        "lossless WebP": b"RIFF\x40\0\0\0WEBPVP8L\x20\0\0\0\x2f" + (0x0FFFFFFF).to_bytes(4, "little") + bytes(40),
        "GIF": b"GIF89a"
        + struct.pack("<HH", side, side)
        + b"\0\0\0,\0\0\0\0"
        + struct.pack("<HH", side, side)
        + bytes(20),
        "BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0),
        "PPM": b"P6\n60000 60000\n255\n" + bytes(12),
        "TIFF": _tiff_bomb(side),
    }


def _tiff_bomb(side: int) -> bytes:
    entries = (
        (256, 4, side),
        (257, 4, side),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (278, 4, side),
        (279, 4, 4),
    )
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + body + bytes(4)


@functools.cache
def refused() -> dict[str, tuple[bytes, str]]:
    """Files that are no sample, and the reason of each."""
    image = photo(0).resize((64, 48))
    frames = [image, image.rotate(10), image.rotate(20)]
    jpeg, deep = saved(image, "JPEG"), np.arange(4000, dtype=np.uint16).reshape(50, 80)
    return {
        "0 bytes": (b"", "empty_file"),
        "text.jpg": (b"this is a text file, whatever its name says", "unreadable_image"),
        "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable_image"),
        "a RIFF that is a WAV": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), "unreadable_image"),
        "the start of a JPEG": (jpeg[:100], "unreadable_image"),
        "the start of a PNG": (saved(image, "PNG")[:20], "unreadable_image"),
        "the start of a WebP": (saved(image, "WEBP")[:40], "unreadable_image"),
        "animated GIF": (saved(image, "GIF", save_all=True, append_images=frames[1:]), "animated_image"),
        "animated WebP": (saved(image, "WEBP", save_all=True, append_images=frames[1:]), "animated_image"),
        "APNG": (saved(image, "PNG", save_all=True, append_images=frames[1:]), "animated_image"),
        "TIFF of pages": (saved(image, "TIFF", save_all=True, append_images=frames[1:]), "animated_image"),
        "AVIF": (saved(image, "AVIF"), "format"),
        "HEIC": (b"\0\0\0\x20ftypheic" + bytes(40), "format"),
        "JPEG 2000": (saved(image, "JPEG2000"), "format"),
        "16 bit PNG": (saved(Image.fromarray(deep), "PNG"), "format"),
        "16 bit TIFF": (saved(Image.fromarray(deep), "TIFF"), "format"),
        "16 bit PGM": (saved(Image.fromarray(deep), "PPM"), "format"),
        "32 bit TIFF": (saved(Image.fromarray(deep.astype(np.int32)), "TIFF"), "format"),
        "float TIFF": (saved(Image.fromarray(deep.astype(np.float32)), "TIFF"), "format"),
        **{f"bomb {name}": (data, "too_many_pixels") for name, data in bombs().items()},
    }


@functools.cache
def cut_short() -> dict[str, bytes]:
    """Images with a good header that end in the middle of their pixels."""
    image = photo(0).resize((160, 120))
    return {
        kind: (data := saved(image, kind))[: len(data) * 6 // 10]
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    }
