"""A sample as a card of a page: what it is, how it sounds and looks, and what of its text is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.inspect.report.choose import Chosen, clipped_share
from forebay.inspect.report.columns import Columns
from forebay.inspect.report.markup import data_url, url_size
from forebay.inspect.report.photos import webp, webps
from forebay.inspect.report.sound import clips
from forebay.inspect.report.spectrum import HOP_S, hop_s, picture_of
from forebay.inspect.report.tokens import Piece, learnt_mask, pieces_of
from forebay.inspect.sample import ImageSample, StoredImage, image_settings_of, read_sample, spoken
from forebay.store.layout import Array

MAX_IMAGES = 6
"""Of a sample that a page shows."""

_PICTURE_COLUMNS = 800
SERVED_SIDE = 1_280
SERVED_COLUMNS = 2_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    """Where a waveform is heard. url: None: nowhere, and the note says why."""

    url: str | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An image or a spectrum. url: None: it was left out. about: what it shows. seconds: that a spectrum covers."""

    url: str | None
    about: str
    size: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (0, 0)
    merge: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Card:
    """One sample as a page shows it. problem: why it cannot be read; then there is nothing but its row.

    spoken: who says what, in order; of a transcript one text without a name.
    """

    index: int
    sample_id: str
    language: str
    why: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    spoken: Sequence[tuple[str, str]] = ()
    pieces: Sequence[Piece] = ()
    num_tokens: int = 0
    num_learnt: int = 0
    sound: Sound | None = None
    spectrum: Seen | None = None
    images: Sequence[Seen] = ()
    more_images: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A card and what its media are made of. tensors: of a recording, whose frames are `hop_s` seconds apart.

    merge: patches a side that one token is of.
    """

    card: Card
    waveform: Array | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    stored: Sequence[StoredImage] = ()
    merge: int = 1
    hop_s: float = HOP_S

    def picture(self, *, rate_hz: int, columns: int) -> tuple[bytes, str, float] | None:
        """Returns what `picture_of` gives for the recording."""
        return picture_of(self.tensors, rate_hz=rate_hz, columns=columns, hop_s=self.hop_s)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads samples as cards. tokenizer: of `load_tokenizer`; None: tokens are shown as numbers."""

    columns: Columns
    tokenizer: Any = None

    def read(self, chosen: Chosen) -> Reading:
        """Returns a sample's card without media, and what they are made of; damage is said on the card."""
        index = chosen.index
        names, codes = self.columns.languages
        start = Card(
            index=index,
            sample_id=str(self.columns.ids[index].as_py()),
            language=names[int(codes[index])],
            why=chosen.why,
        )
        try:
            sample = read_sample(self.columns.cache, index, config=None)
        except CacheError as err:
            return Reading(card=replace(start, problem=str(err)))
        tensors = sample.tensors
        text = str(sample.row.get("text") or "")
        has_tokens = "input_ids" in tensors
        pieces = self._pieces(tensors) if has_tokens else []
        card = replace(
            start,
            row={name: value for name, value in sample.row.items() if name not in ("text", "images")},
            facts=self._facts(index, tensors),
            spoken=tuple(spoken(sample.conversation)) if isinstance(sample, ImageSample) else (("", text),),
            pieces=tuple(pieces),
            num_tokens=len(tensors["input_ids"]) if has_tokens else 0,
            num_learnt=int(np.count_nonzero(learnt_mask(tensors))) if has_tokens else 0,
        )
        if isinstance(sample, ImageSample):
            settings = image_settings_of(self.columns.cache)
            return Reading(card=card, stored=sample.images, merge=settings.merge_size)
        if self.columns.seconds is None:
            return Reading(card=card)
        seconds = hop_s(self.columns.cache.constants)
        return Reading(card=card, waveform=tensors.get("waveform"), tensors=tensors, hop_s=seconds)

    def _pieces(self, tensors: Mapping[str, Any]) -> list[Piece]:
        image_id = self.columns.cache.constants.get("image_token_id")
        return pieces_of(tensors, image_id=image_id, tokenizer=self.tokenizer)

    def _facts(self, index: int, tensors: Mapping[str, Any]) -> dict[str, str]:
        columns = self.columns
        found: dict[str, str] = {}
        if columns.seconds is not None:
            found["length"] = f"{columns.seconds[index]:.2f} s"
        found["tokens"] = f"{columns.tokens[index]:,}"
        if columns.rate is not None and np.isfinite(columns.rate[index]):
            found["characters a second"] = f"{columns.rate[index]:.1f}"
        if isinstance(tensors.get("waveform"), np.ndarray) and (share := clipped_share(tensors["waveform"])):
            found["at full scale"] = f"{100 * share:.2f} %"
        return found


def embedded(readings: Sequence[Reading], *, rate_hz: int, budget: int) -> list[Card]:
    """Returns the cards with their media in them, all media together no longer than `budget`.

    Pictures take up to half of it; what they leave is for sound.
    """
    spectra, left = _spectra(readings, rate_hz=rate_hz, budget=budget // 2)
    left += budget - budget // 2
    images = [_shown(reading.stored) for reading in readings]
    pixels = [image.pixels for own in images for image in own]
    files = webps(pixels, budget=left)
    urls = iter([None] * len(pixels) if files is None else [data_url(data, "image/webp") for data in files])
    left -= sum(map(url_size, files or []))
    heard = clips([reading.waveform for reading in readings], rate_hz, budget=left)
    cards = []
    for reading, own, spectrum, clip in zip(readings, images, spectra, heard, strict=True):
        seen = tuple(_seen(image, next(urls), merge=reading.merge) for image in own)
        sound = None
        if reading.tensors and not reading.card.problem:
            sound = Sound(url=None if clip is None else data_url(clip.data, clip.media_type), note=_note(reading, clip))
        cards.append(
            replace(
                reading.card,
                sound=sound,
                spectrum=spectrum,
                images=seen,
                more_images=len(reading.stored) - len(seen),
            )
        )
    return cards


NO_WAVEFORM = "no waveform kept: [audio] keep_waveform = true"


def _note(reading: Reading, clip: Any) -> str:
    if reading.waveform is None:
        return NO_WAVEFORM
    return "its sound would make this file larger than 10 MB; --serve plays it" if clip is None else clip.note


def _spectra(readings: Sequence[Reading], *, rate_hz: int, budget: int) -> tuple[list[Seen | None], int]:
    """Returns a picture of each recording while there is room, and the room that is left."""
    found: list[Seen | None] = []
    for reading in readings:
        made = reading.picture(rate_hz=rate_hz, columns=_PICTURE_COLUMNS) if reading.tensors else None
        if made is None:
            found.append(None)
            continue
        data, about, seconds = made
        is_kept = url_size(data) <= budget
        budget -= url_size(data) if is_kept else 0
        found.append(Seen(url=data_url(data, "image/png") if is_kept else None, about=about, seconds=seconds))
    return found, budget


def _shown(stored: Sequence[StoredImage]) -> Sequence[StoredImage]:
    return stored[:MAX_IMAGES]


def _seen(image: StoredImage, url: str | None, *, merge: int) -> Seen:
    return Seen(
        url=url,
        about=image.name,
        size=(image.pixels.shape[1], image.pixels.shape[0]),
        grid=(image.grid[1], image.grid[2]),
        merge=merge,
    )


def linked(reading: Reading, *, root: str, rate_hz: int) -> Card:
    """Returns a card whose media lie at addresses below `root`, see `forebay.inspect.report.serve`."""
    card, index = reading.card, reading.card.index
    sound = spectrum = None
    if reading.tensors and not card.problem:
        has_sound = reading.waveform is not None
        sound = Sound(url=f"{root}/audio/{index}.wav" if has_sound else None, note="" if has_sound else NO_WAVEFORM)
        made = reading.picture(rate_hz=rate_hz, columns=16)
        if made is not None:
            spectrum = Seen(url=f"{root}/spectrum/{index}.png", about=made[1], seconds=made[2])
    images = [
        _seen(image, f"{root}/image/{index}/{place}.webp", merge=reading.merge)
        for place, image in enumerate(reading.stored)
    ]
    return replace(card, sound=sound, spectrum=spectrum, images=tuple(images))


def served_image(image: StoredImage) -> bytes:
    """Returns an image of a sample as WebP."""
    return webp(image.pixels, side=SERVED_SIDE)
