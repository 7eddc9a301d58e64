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


def original_of(name: str, content: str, config: Config) -> Array | None:
    """Returns the pixels of the file that an image was made of; None where it is not there, or holds other bytes.

    content: xxh3-128 of its bytes. Images inside of tars and tables are not looked for.
    """
    for path in _candidates(name, config):
        try:
            if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            if xxhash.xxh3_128_hexdigest(data) == content:
                return np.asarray(decode_image(data, max_pixels=_MAX_PIXELS, sample_id=name))
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
