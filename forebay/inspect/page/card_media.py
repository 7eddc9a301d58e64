"""Images of a sample as files of bounded size, and the grid of their patches as paths to lay over them.

What a recording looks like: its stored features over time, or the spectrum of its waveform, as a PNG.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import PIL.Image

from forebay.inspect.page.markup import url_size
from forebay.store.layout import Array

_SIDES = (640, 448, 320, 224, 128, 64)
"""Pixels of an image's longer side, the best first."""

MAX_LINES = 400
"""Lines of a grid: those of a larger one would be a grey area."""


def webp(pixels: Array, *, side: int) -> bytes:
    """Returns pixels uint8 [height, width, 3] as a WebP whose longer side is at most `side`."""
    image = PIL.Image.fromarray(pixels)
    image.thumbnail((side, side), PIL.Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80, method=2)
    return buffer.getvalue()


def webps(images: Sequence[Array], *, budget: int) -> list[bytes] | None:
    """Returns all images at one bound of size, together no longer than `budget` as URLs; None: no size fits."""
    for side in _SIDES:
        found: list[bytes] = []
        left = budget
        for pixels in images:
            found.append(webp(pixels, side=side))
            left -= url_size(found[-1])
            if left < 0:
                break
        if left >= 0:
            return found
    return None


def grid_paths(rows: int, columns: int, merge: int) -> tuple[str, str] | None:
    """Returns the borders of patches as two SVG paths, fine ones and the heavier ones of a token (merged patches).

    None for a grid with too many lines to be seen.
    """
    if rows + columns > MAX_LINES or min(rows, columns) < 1:
        return None
    across = [(x, f"M{x} 0V{rows}") for x in range(1, columns)]
    lines = [*across, *((y, f"M0 {y}H{columns}") for y in range(1, rows))]
    fine, heavy = (" ".join(line for at, line in lines if (at % merge > 0) is is_fine) for is_fine in (True, False))
    return fine or "M0 0", heavy or "M0 0"


HOP_S = 0.01
"""Between two frames of stored features, where a cache says nothing else."""

_WINDOW_S = 0.025
_BINS = 96
_RAMP = ((255, 255, 255), (203, 228, 232), (110, 178, 190), (30, 118, 138), (10, 66, 88), (6, 27, 43))
"""From silence to the loudest: paper to deep water, and inverted where the page is dark."""

_LEVELS = 48
"""Colours of a picture: more are not seen, and make the file larger."""


def features_of(tensors: Mapping[str, Any]) -> str | None:
    """Returns the field of a sample that holds features over time, [frames, bins]; None where there is none."""
    for name in ("input_features", "fbanks", *tensors):
        value = tensors.get(name)
        if isinstance(value, np.ndarray) and value.ndim == 2 and value.shape[1] >= 8 and value.dtype.kind == "f":
            return name
    return None


def hop_s(constants: Mapping[str, Any]) -> float:
    """Returns the seconds between two frames of a cache's features."""
    return constants["hop_length"] / constants["sample_rate_hz"] if "hop_length" in constants else HOP_S


def picture_of(
    tensors: Mapping[str, Any], *, rate_hz: int, columns: int, hop_s: float = HOP_S
) -> tuple[bytes, str, float] | None:
    """Returns a PNG at most `columns` wide, what it shows, and the seconds it covers; None where there is nothing.

    The features where the sample has some, else log powers of its waveform (25 ms Hann windows, linear frequencies).
    """
    name = features_of(tensors)
    if name is not None and len(tensors[name]):
        values = tensors[name]
        frames, bins = values.shape
        return png(_reduced(values, columns)), f"{name}: {bins} bins over {frames:,} frames", frames * hop_s
    waveform = tensors.get("waveform")
    if not isinstance(waveform, np.ndarray) or len(waveform) < int(_WINDOW_S * rate_hz) or waveform.ndim != 1:
        return None
    what = f"spectrum of the waveform, 0 to {rate_hz / 2000:g} kHz"
    return png(_spectrum(waveform, rate_hz, columns)), what, len(waveform) / rate_hz


def png(values: Array) -> bytes:
    """Returns values [columns, bins] as a PNG in the ramp of colours, time to the right and high bins on top."""
    low, high = np.percentile(values, (3.0, 99.7))
    share = np.clip((values - low) / max(float(high - low), 1e-6), 0.0, 1.0)
    image = PIL.Image.fromarray(np.rint(share.T[::-1] * (_LEVELS - 1)).astype(np.uint8), "P")
    image.putpalette(_palette())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _palette() -> list[int]:
    places = np.linspace(0, 1, len(_RAMP))
    wanted = np.linspace(0, 1, _LEVELS)
    channels = [np.interp(wanted, places, [colour[c] for colour in _RAMP]) for c in range(3)]
    return [round(value) for value in np.stack(channels, axis=1).ravel().tolist()]


def _reduced(values: Array, columns: int) -> Array:
    """Returns float32 [at most columns, bins], the mean of frames that share a column."""
    held = np.nan_to_num(np.asarray(values, np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    step = -(-len(held) // columns)
    if step <= 1:
        return held
    starts = np.arange(0, len(held), step)
    counts = np.diff(np.append(starts, len(held)))
    return np.asarray(np.add.reduceat(held, starts, axis=0) / counts[:, None])


def _spectrum(waveform: Array, rate_hz: int, columns: int) -> Array:
    width = int(_WINDOW_S * rate_hz)
    hop = max(int(HOP_S * rate_hz), (len(waveform) - width) // columns + 1)
    starts = np.arange(0, len(waveform) - width + 1, hop)
    frames = waveform[starts[:, None] + np.arange(width)].astype(np.float32)
    power = np.abs(np.fft.rfft(np.nan_to_num(frames) * np.hanning(width), axis=1)) ** 2
    top = min(_BINS, power.shape[1])
    edges = np.unique(np.linspace(0, power.shape[1], top, endpoint=False).astype(np.int64))
    banded = np.add.reduceat(power, edges, axis=1)
    loud = float(banded.max()) or 1.0
    return np.asarray(np.log10(np.maximum(banded, loud * 1e-7)))
