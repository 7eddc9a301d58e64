"""Runs a user's iterator, as a program: `python -P -m forebay.rows.readers.python_run < question > answer`.

The iterator is a class or a function of a file: what calling it gives is iterated over. A sample is a dict of `id`,
`audio` (encoded bytes, or float32 or int16 [num_samples] with `sample_rate_hz`), and, where there are any, `text`,
`language`, `prompt` and what `source.keep_columns` names. With `[vision]` it is what a line of `kind = "jsonl"` holds,
with encoded bytes in the place of paths of images.

Each sample is written as it comes: its sound to a `.media` file, where an array becomes a WAV file of the same values,
an image to a file of its own, and its line to the list. A line holds the digest of the sound, or the names of the
images, which are their digests, and nothing of the time or the machine.
"""

from __future__ import annotations

import base64
import ctypes
import inspect
import itertools
import json
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from forebay.steps.run_code import CodeError, described, loaded, serve
from forebay.store.inputs import SAMPLES

_MEDIA_BYTES = 256 << 20
"""Above it another media file begins. Shards are cut by files: with more samples those of the others stay."""
_PR_SET_PDEATHSIG = 1
_FORMATS = {"int16": (1, 16), "float32": (3, 32)}
"""WAV's number of a coding, and its bits a sample."""


_BYTES = (bytes, bytearray, memoryview)
_WRITTEN = frozenset({"xxh3_128", "media", "offset", "size"})


Listed = tuple[dict[str, Any], list[tuple[str, bytes]]]
"""A line of the list, and what is written beside it: names of files below the folder, "" for a media file."""


class InputError(Exception):
    """An iterator yielded a value that is no sample."""


def listed(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `first`, the first lines without their places, and `count`; or `error`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    source = base64.b64decode(question["source"])
    writer = _Writer(None if question["folder"] is None else Path(question["folder"]))
    first: list[str] = []
    try:
        made = loaded(source, question["path"], question["name"])
        for sample in itertools.islice(_samples(made, question["split"]), question["most"]):
            line, media = _line(_checked(sample, writer.count), writer.count, subjects=question["modality"])
            writer.write(line, media)
            if len(first) < question["first"]:
                first.append(_as_json(line))
    except (CodeError, InputError) as err:
        return {"error": str(err)}
    if not writer.count:
        return {"error": "it yielded no sample"}
    writer.close()
    return {"first": first, "count": writer.count}


def _samples(made: Any, split: str) -> Iterator[object]:
    """Yields what the user's code yields; its exceptions are InputErrors, with the number of the sample."""
    number = 0
    try:
        takes_split = "split" in inspect.signature(made).parameters
        given = made(split=split) if takes_split else made()
        if not {"__iter__", "__getitem__"}.intersection(dir(type(given))):
            raise InputError(f"calling it gives {type(given).__name__}, wanted what can be iterated over")
        for sample in given:
            yield sample
            number += 1
    except (KeyboardInterrupt, MemoryError, GeneratorExit, InputError):
        raise
    except BaseException as err:
        raise InputError(f"it raised {described(err)} instead of sample {number}") from err


def _checked(sample: object, number: int) -> dict[str, Any]:
    """Returns the fields of a sample, numbers of numpy as those of Python."""
    if not isinstance(sample, Mapping) or not all(isinstance(key, str) for key in sample):
        raise InputError(f"sample {number} is {type(sample).__name__}, wanted a dict of id, audio or image, text, ...")
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in sample.items()}
    if not isinstance(values.get("id"), str) or not values["id"]:
        raise InputError(f"sample {number} has the id {values.get('id')!r:.80}, wanted a text")
    if own := sorted(_WRITTEN.intersection(values)):
        raise InputError(f"sample {number} has a field {own[0]}, which the list has itself; call it otherwise")
    return values


def _line(values: dict[str, Any], number: int, *, subjects: str) -> Listed:
    """Returns what the list says of a sample, and its media. A sound beside images is named as they are."""
    what, media = f"sample {number}, {values['id']!r:.80}", list[tuple[str, bytes]]()
    if "speech" in subjects:
        data = _encoded(values.pop("audio", None), values.pop("sample_rate_hz", None), what)
        name = _named(data, "sounds", "media") if "vision" in subjects else ""
        values |= {"audio": name} if name else {"xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        media.append((name, data))
    for field in ("image", "images") if "vision" in subjects else ():
        if field not in values:
            continue
        given = values[field]
        images = given if isinstance(given, (list, tuple)) else [given]
        if wrong := [type(image).__name__ for image in images if not isinstance(image, _BYTES)]:
            raise InputError(f"{what}: {field} has {wrong[0]}, wanted encoded bytes")
        named = [(_named(bytes(image), "images", "image"), bytes(image)) for image in images]
        media += named
        names = [name for name, _ in named]
        values[field] = names if isinstance(given, (list, tuple)) else names[0]
    try:
        _as_json(values)
    except (TypeError, ValueError, RecursionError) as err:
        raise InputError(f"{what}: {err}; wanted texts and numbers") from err
    return values, media


def _named(data: bytes, folder: str, ending: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(data)
    return f"{folder}/{digest[:2]}/{digest}.{ending}"


def _as_json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, allow_nan=False)


def _encoded(audio: object, rate_hz: object, what: str) -> bytes:
    if isinstance(audio, _BYTES):
        return bytes(audio)
    if not isinstance(audio, np.ndarray) or audio.ndim != 1 or audio.dtype.name not in _FORMATS:
        found = f"{audio.dtype} {list(audio.shape)}" if isinstance(audio, np.ndarray) else type(audio).__name__
        raise InputError(f"{what}: audio is {found}, wanted encoded bytes, or float32 or int16 [num_samples]")
    if not isinstance(rate_hz, (int, np.integer)) or isinstance(rate_hz, bool) or not 0 < rate_hz < 1 << 31:
        raise InputError(f"{what}: sample_rate_hz is {rate_hz!r:.80}, wanted an integer beside an array")
    return wav(audio, int(rate_hz))


def wav(audio: np.ndarray[Any, Any], rate_hz: int) -> bytes:
    """Returns a WAV file of int16 or float32 values."""
    coding, bits = _FORMATS[audio.dtype.name]
    data = audio.astype(audio.dtype.newbyteorder("<"), copy=False).tobytes()
    if len(data) >= (1 << 32) - 64:
        raise InputError(f"an array of {len(data)} bytes is more than a WAV file holds; yield encoded bytes")
    head = struct.pack("<HHIIHH", coding, 1, rate_hz, rate_hz * bits // 8, bits // 8, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


class _Writer:
    """The list and the media files of a folder; without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.count = 0
        self._folder = folder
        self._list: BinaryIO | None = None if folder is None else (folder / SAMPLES).open("wb")
        self._media: BinaryIO | None = None
        self._name, self._number, self._has_images = "", 0, False
        self._last: tuple[str, dict[str, Any]] = "", {}
        """The digest and the place of the last sound: segments of one recording follow each other."""

    def write(self, line: Mapping[str, Any], media: list[tuple[str, bytes]]) -> None:
        """Writes one sample."""
        self.count += 1
        if self._folder is None or self._list is None:
            return
        place: dict[str, Any] = {}
        for name, data in media:
            if not name:
                if self._last[0] != line["xxh3_128"]:
                    self._last = line["xxh3_128"], self._place(self._folder, data)
                place = self._last[1]
            elif not (path := self._folder / name).exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self._has_images = True
        self._list.write(f"{_as_json({**line, **place})}\n".encode("ascii"))

    def _place(self, folder: Path, data: bytes) -> dict[str, Any]:
        """Writes a sound behind the others and returns where it stands."""
        if self._media is None or self._media.tell() >= _MEDIA_BYTES:
            _synced(self._media)
            self._name = f"{self._number:05d}.media"
            self._media = (folder / self._name).open("wb")
            self._number += 1
        offset = self._media.tell()
        self._media.write(data)
        return {"media": self._name, "offset": offset, "size": len(data)}

    def close(self) -> None:
        """Leaves all of it on disk."""
        for file in (self._media, self._list):
            _synced(file)
        if self._has_images:
            os.sync()  # once, instead of for each of many small files


def _synced(file: BinaryIO | None) -> None:
    if file is not None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


if __name__ == "__main__":
    serve(lambda question: listed(question))
