"""Waveforms as files that a browser plays: small ones for a page, and the stored samples themselves as WAV."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soundfile

from forebay.inspect.report.markup import url_size
from forebay.store.layout import Array

_WAYS = (
    ("FLAC", 30.0),
    ("MP3", 30.0),
    ("FLAC", 10.0),
    ("MP3", 10.0),
    ("FLAC", 4.0),
    ("MP3", 4.0),
    ("FLAC", 1.5),
    ("MP3", 1.5),
)
"""Formats and the seconds of a clip that are kept, the best first."""

_MAX_BYTES = (1 << 32) - 1 - 36
_TYPES = {"FLAC": "audio/flac", "MP3": "audio/mpeg"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A waveform as a file. note: what was left out of it, or how it was changed; empty: nothing."""

    data: bytes
    media_type: str
    note: str


def clips(waveforms: Sequence[Array | None], rate_hz: int, *, budget: int) -> list[Clip | None]:
    """Returns each waveform (int16 or float32, mono) as a file, all of them together no longer than `budget` as URLs.

    Whole and without loss where that fits, else as MP3, else cut; all clips in the same way. None where there is no
    waveform, or no room at all.
    """
    for kind, most_s in _WAYS:
        found: list[Clip | None] = []
        left = budget
        for waveform in waveforms:
            clip = None if waveform is None else _clip(waveform, rate_hz, kind=kind, most_s=most_s)
            left -= 0 if clip is None else url_size(clip.data)
            found.append(clip)
            if left < 0:
                break
        if left >= 0 and all(
            (clip is None) == (waveform is None) for clip, waveform in zip(found, waveforms, strict=True)
        ):
            return found
    return [None] * len(waveforms)


def _clip(waveform: Array, rate_hz: int, *, kind: str, most_s: float) -> Clip | None:
    kept = waveform[: int(most_s * rate_hz)]
    notes = []
    if len(kept) < len(waveform):
        notes.append(f"the first {most_s:g} of {len(waveform) / rate_hz:.1f} s")
    if kind == "MP3":
        notes.append("as MP3, to keep this file small")
    if waveform.dtype != np.int16:
        notes.append("in 16 bits")
        kept = np.clip(np.nan_to_num(kept), -1.0, 1.0)
    buffer = io.BytesIO()
    try:
        soundfile.write(buffer, kept, rate_hz, format=kind, **({"subtype": "PCM_16"} if kind == "FLAC" else {}))
    except (soundfile.LibsndfileError, ValueError, TypeError, RuntimeError):
        return None  # a rate that the format does not know
    return Clip(data=buffer.getvalue(), media_type=_TYPES[kind], note=", ".join(notes))


def wav_head(waveform: Array, rate_hz: int) -> bytes:
    """Returns what stands before the values of a mono waveform, int16 or float32, in a WAV file."""
    is_float = waveform.dtype != np.int16
    # Of more than 4 GiB a WAV cannot say how much it is, and players read on.
    width, size = waveform.dtype.itemsize, min(waveform.nbytes, _MAX_BYTES)
    about = struct.pack("<HHIIHH", 3 if is_float else 1, 1, rate_hz, rate_hz * width, width, 8 * width)
    return b"".join(
        [
            b"RIFF",
            struct.pack("<I", 36 + size),
            b"WAVEfmt ",
            struct.pack("<I", 16),
            about,
            b"data",
            struct.pack("<I", size),
        ]
    )
