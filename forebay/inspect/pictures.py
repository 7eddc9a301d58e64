"""The images of a sample as pictures: rebuilt from patches, as their model sees them, or the file that was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.config.url import is_url
from forebay.errors import SampleError
from forebay.inspect.processed import ProcessedImage, ProcessedSample
from forebay.inspect.sample import ImageSample, Sample, StoredImage
from forebay.inspect.seen import matrix
from forebay.store.image.pixels import decode_image
from forebay.store.layout import Array

_MAX_PIXELS = 89_478_485
_MAX_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image to be shown. about: lines that stand below its name. grid, merge: its patches, where it has some.

    pixels: uint8 [height, width, 3].
    """

    pixels: Array
    name: str
    about: tuple[str, ...] = ()
    grid: tuple[int, int] = (0, 0)
    merge: int = 1


def pictures_of(sample: Sample, *, merge: int = 1, config: Config | None = None) -> list[Picture]:
    """Returns a picture for each image of a sample, in its order; none of a sample without images.

    merge: patches a side that one token is of, where patches are stored. config: where files are looked for that
    images were made of, if the order of their patches is not known.
    """
    if isinstance(sample, ImageSample):
        return [_stored(image, merge=merge) for image in sample.images]
    if isinstance(sample, ProcessedSample):
        return [_processed(image, config) for image in sample.images]
    return []


def _stored(image: StoredImage, *, merge: int) -> Picture:
    about = (f"grid {' x '.join(map(str, image.grid))}", f"{image.size} px")
    return Picture(pixels=image.pixels, name=image.name, about=about, grid=image.grid[1:], merge=merge)


def _processed(image: ProcessedImage, config: Config | None) -> Picture:
    about = image.lines()
    if (view := image.view) is not None:
        return Picture(pixels=view.pixels, name=image.name, about=(*about, view.how))
    main = max(image.arrays.values(), key=lambda array: array.size)
    if not main.size:
        return Picture(pixels=matrix(main), name=image.name, about=(*about, "nothing is stored of it"))
    original = None if config is None else original_of(image, config)
    if original is not None:
        why = "the file itself: how its patches lie in it is not known"
        return Picture(pixels=original, name=image.name, about=(*about, why))
    why = "its values, a row a patch: how they lie in the image is not known"
    return Picture(pixels=matrix(main), name=image.name, about=(*about, why))


def original_of(image: ProcessedImage, config: Config) -> Array | None:
    """Returns the pixels of the file that an image was made of; None where it is not there, or holds other bytes.

    Images inside of tars and tables are not looked for.
    """
    for path in _candidates(image.name, config):
        try:
            if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            if xxhash.xxh3_128_hexdigest(data) == image.hash:
                return np.asarray(decode_image(data, max_pixels=_MAX_PIXELS, sample_id=image.name))
        except (OSError, ValueError, SampleError):
            continue
    return None


def _candidates(name: str, config: Config) -> Iterator[Path]:
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        return
    for manifest in _on_disk(config.source.places):
        yield (manifest if manifest.is_dir() else manifest.parent) / inner


def _on_disk(manifests: Sequence[str]) -> list[Path]:
    return [Path(manifest) for manifest in manifests if not is_url(manifest)]
