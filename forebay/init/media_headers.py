"""The headers of some recordings, images and videos, in summary."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import BinaryIO, ClassVar, Self

from forebay.errors import SampleError
from forebay.init.folder_files import Clock
from forebay.init.questions import BESIDE
from forebay.steps.image.video_frames import VideoFacts, video_facts
from forebay.store.image.formats import image_size
from forebay.store.sound_containers import header_info

SECONDS = 1.2
"""Headers are read for so long; MP3 and Ogg take all of their bytes."""
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Headers:
    """Summary of the headers of some media. noun: their name. unreadable: how many say nothing. then: what follows."""

    noun: ClassVar[str]
    then: ClassVar[str] = ""
    unreadable: int = 0

    def read(self, file: BinaryIO) -> None:
        """Adds what the header of one says. Raises SampleError for one that says nothing."""
        raise NotImplementedError

    def add(self, media: bytes | Path) -> None:
        """Adds an encoded recording or image, or a file of it; one that cannot be read counts as unreadable."""
        try:
            with io.BytesIO(media) if isinstance(media, bytes) else open(media, "rb") as file:
                self.read(file)
        except (OSError, SampleError):
            self.unreadable += 1

    @classmethod
    def of(cls, media: Iterable[bytes | Path]) -> Self:
        """Returns what the headers of media say, as far as the time goes."""
        found = cls()
        for each in Clock(SECONDS).while_left(media):
            found.add(each)
        return found

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class Sounds(Headers):
    """A summary of the headers of recordings."""

    noun = "recordings"
    then = "; they will fail, counted and listed (run.max_failed_share bounds their share)"
    seconds: list[float] = field(default_factory=list)
    rates: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)

    def read(self, file: BinaryIO) -> None:
        """See `Headers`."""

        def part(start: int, count: int) -> bytes:
            file.seek(start)
            return file.read(count)

        size = file.seek(0, os.SEEK_END)
        info = header_info(part, size, max_bytes=_MAX_BYTES) if size else None
        if info is None or info.num_samples <= 0:
            raise SampleError("corrupt_audio", "its header says nothing")
        self.seconds.append(info.duration_s)
        self.rates[info.sample_rate_hz] += 1
        self.channels[info.channels] += 1

    def facts(self, hours: float) -> list[str]:
        """Returns how long, at which rates. hours: about, of all recordings."""
        if not self.seconds:
            return []
        source = "headers" if self.rates else "rows"
        parts = [
            f"about {_hours(hours)} (from {len(self.seconds)} {source})",
            f"{_short(min(self.seconds))} to {_short(max(self.seconds))} s",
        ]
        if self.rates:
            parts.append(" and ".join(f"{rate:,} Hz" for rate in sorted(self.rates)[:4]))
        if any(count > 1 for count in self.channels):
            parts.append("of more than one channel, which are mixed")
        return parts


@dataclass(slots=True)
class Pictures(Headers):
    """A summary of the headers of images."""

    noun = BESIDE["none"].noun
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def read(self, file: BinaryIO) -> None:
        """See `Headers`."""
        self.sizes.append(image_size(file, max_pixels=89_478_485, sample_id="image"))

    def facts(self) -> list[str]:
        """Returns how large the images are."""
        if not self.sizes:
            return []
        widths, heights = zip(*self.sizes, strict=True)
        middle = f"{round(median(widths))} x {round(median(heights))} pixels in the middle"
        return [f"images up to {max(widths)} x {max(heights)}, {middle} (from {len(self.sizes)} headers)"]


@dataclass(slots=True)
class Films(Headers):
    """A summary of the headers of videos. Raises MissingExtraError where nothing here reads them."""

    noun = "videos"
    seen: list[VideoFacts] = field(default_factory=list)

    def read(self, file: BinaryIO) -> None:
        """See `Headers`."""
        data = file.read(_MAX_BYTES)
        self.seen.append(video_facts(data, max_video_s=3600, max_pixels=89_478_485, sample_id="video"))

    def facts(self) -> list[str]:
        """Returns how long the videos are."""
        seconds = [each.num_frames / each.fps for each in self.seen]
        return [f"videos of {_short(min(seconds))} to {_short(max(seconds))} s"] if seconds else []


def _hours(hours: float) -> str:
    if hours < 0.1:
        return f"{_short(hours * 3600)} s" if hours * 3600 < 120 else f"{hours * 60:.0f} min"
    return f"{hours:,.1f} h" if hours < 100 else f"{hours:,.0f} h"


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"
