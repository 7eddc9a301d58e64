"""What the headers of some recordings, or images, say: durations, rates, sizes. Nothing is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import SampleError
from forebay.init.tree import Clock, spread
from forebay.store.image.formats import image_size
from forebay.store.sound_headers import header_info

SECONDS = 1.2
"""Headers are read for so long; MP3 and Ogg take all of their bytes."""
MAX_BYTES = 64 * 1024 * 1024
_MAX_PIXELS = 89_478_485


@dataclass(slots=True)
class Sounds:
    """What the headers of recordings say. unreadable: how many say nothing."""

    seconds: list[float] = field(default_factory=list)
    rates: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0

    @property
    def looked_at(self) -> int:
        """How many recordings were looked at."""
        return len(self.seconds) + self.unreadable

    @property
    def mean_s(self) -> float:
        """The mean duration, 0.0 where none is known."""
        return sum(self.seconds) / len(self.seconds) if self.seconds else 0.0

    def add(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Adds the recording of `size` bytes that `read` reads."""
        info = header_info(read, size, max_bytes=MAX_BYTES) if size else None
        if info is None or info.num_samples <= 0:
            self.unreadable += 1
            return
        self.seconds.append(info.duration_s)
        self.rates[info.sample_rate_hz] += 1
        self.channels[info.channels] += 1
        self.formats[info.format] += 1

    def add_bytes(self, data: bytes) -> None:
        """Adds an encoded recording."""
        self.add(lambda start, count: data[start : start + count], len(data))


@dataclass(slots=True)
class Pictures:
    """What the headers of images say. unreadable: how many say nothing."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    unreadable: int = 0

    @property
    def looked_at(self) -> int:
        """How many images were looked at."""
        return len(self.sizes) + self.unreadable

    def add_bytes(self, data: bytes) -> None:
        """Adds an encoded image."""
        try:
            self.sizes.append(image_size(data, max_pixels=_MAX_PIXELS, sample_id="image"))
        except SampleError:
            self.unreadable += 1


def sounds_of(paths: Sequence[Path]) -> Sounds:
    """Returns what the headers of some of the files say; a file that cannot be read counts as unreadable."""
    sounds = Sounds()
    for path in Clock(SECONDS).while_left(spread(paths)):
        try:
            with open(path, "rb") as file:
                descriptor = file.fileno()
                sounds.add(lambda at, n, d=descriptor: os.pread(d, n, at), os.fstat(descriptor).st_size)  # type: ignore[misc]
        except OSError:
            sounds.unreadable += 1
    return sounds


def pictures_of(paths: Sequence[Path]) -> Pictures:
    """Returns what the headers of some of the files say; a file that cannot be read counts as unreadable."""
    pictures = Pictures()
    for path in Clock(SECONDS).while_left(spread(paths)):
        try:
            with open(path, "rb") as file:
                pictures.sizes.append(image_size(file, max_pixels=_MAX_PIXELS, sample_id=path.name))
        except (OSError, SampleError):
            pictures.unreadable += 1
    return pictures


def sounds_in(values: Iterable[bytes]) -> Sounds:
    """Returns what the headers of encoded recordings say, as far as the time goes."""
    sounds, clock = Sounds(), Clock(SECONDS)
    for value in values:
        sounds.add_bytes(value)
        if clock.is_over():
            break
    return sounds


def pictures_in(values: Iterable[bytes]) -> Pictures:
    """Returns what the headers of encoded images say, as far as the time goes."""
    pictures, clock = Pictures(), Clock(SECONDS)
    for value in values:
        pictures.add_bytes(value)
        if clock.is_over():
            break
    return pictures
