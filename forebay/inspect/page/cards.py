"""A sample as a card of a page: what it is, how it sounds and looks, and what of its text is learnt.

Waveforms are files that a browser plays, images are files of bounded size, and a recording is its features over time
or the spectrum of its waveform.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import PIL.Image
import soundfile

from forebay.config.tree import Config
from forebay.errors import CacheError
from forebay.inspect.listed_groups import names_items
from forebay.inspect.page.page_samples import Chosen, PageColumns, clipped_share
from forebay.inspect.page.words import TokenPiece, data_url, learnt_mask, pieces_of, repeated_ids, shortened, url_size
from forebay.inspect.sample import read_sample, spoken
from forebay.inspect.seen_images import Picture
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
    places, wanted = np.linspace(0, 1, len(_RAMP)), np.linspace(0, 1, _LEVELS)
    channels = [np.interp(wanted, places, [colour[c] for colour in _RAMP]) for c in range(3)]
    image.putpalette([round(value) for value in np.stack(channels, axis=1).ravel().tolist()])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


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
    top = min(96, power.shape[1])
    edges = np.unique(np.linspace(0, power.shape[1], top, endpoint=False).astype(np.int64))
    banded = np.add.reduceat(power, edges, axis=1)
    loud = float(banded.max()) or 1.0
    return np.asarray(np.log10(np.maximum(banded, loud * 1e-7)))


_WAYS = tuple((kind, most_s) for most_s in (30.0, 10.0, 4.0, 1.5) for kind in ("FLAC", "MP3"))
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
    about = (16, 3 if is_float else 1, 1, rate_hz, rate_hz * width, width, 8 * width)
    return struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVEfmt ", *about, b"data", size)


MAX_IMAGES = 6
"""The most images of a sample that a page shows."""
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,3}")
_ROLE, _MAX_CELLS = 240, 40
SERVED_SIDE = 1_280
SERVED_COLUMNS = 2_400


@dataclass(frozen=True, kw_only=True, slots=True)
class CardSound:
    """The place where a waveform is heard. url: None: nowhere, and the note says why."""

    url: str | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenImage:
    """An image or a spectrum. url: None: it was left out. about: what it shows. seconds: that a spectrum covers.

    grid: rows and columns of patches, grid_paths: their borders. notes: what else is said of an image: its patches, or
    what its fields are.
    """

    url: str | None
    about: str
    size: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (0, 0)
    grid_paths: tuple[str, str] | None = None
    seconds: float = 0.0
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Card:
    """One sample as a page shows it. problem: why it cannot be read; then there is nothing but its row.

    spoken: who says what, in order; of a transcript one text without a name. num_learnt: None: no target.
    """

    index: int
    sample_id: str
    language: str
    why: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    spoken: Sequence[tuple[str, str]] = ()
    pieces: Sequence[TokenPiece] = ()
    num_tokens: int = 0
    num_learnt: int | None = None
    sound: CardSound | None = None
    spectrum: SeenImage | None = None
    images: Sequence[SeenImage] = ()
    more_images: int = 0
    problem: str = ""

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Who says what, without empty turns."""
        return [(shortened(role, _ROLE), text) for role, text in self.spoken if role or text]

    @property
    def lang(self) -> str | None:
        """The language as HTML takes it; None where it is no code."""
        return self.language if _LANGUAGE.fullmatch(self.language) else None

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The first cells of the row as text."""
        first = list(self.row.items())[:_MAX_CELLS]
        return [(name, value if isinstance(value, str) else json.dumps(value, default=str)) for name, value in first]


@dataclass(frozen=True, kw_only=True)
class CardReading:
    """A card and what its media are made of. tensors: of a recording, whose frames are `hop_s` seconds apart.

    silence: why there is no waveform, where there is none.
    """

    card: Card
    waveform: Array | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    hop_s: float = HOP_S
    silence: str = ""

    def picture(self, *, rate_hz: int, columns: int) -> tuple[bytes, str, float] | None:
        """Returns what `picture_of` gives for the recording."""
        return picture_of(self.tensors, rate_hz=rate_hz, columns=columns, hop_s=self.hop_s)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads samples as cards. tokenizer: of `load_tokenizer`; None: tokens are shown as numbers.

    config: where files are looked for that images were made of, see `pictures_of`. sound: gives the waveform of a row
    from its source; None: there is no config, or the cache keeps them.
    """

    columns: PageColumns
    tokenizer: Any = None
    config: Config | None = None
    sound: Callable[[Mapping[str, Any]], Array | None] | None = None

    def read(self, chosen: Chosen) -> CardReading:
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
            return CardReading(card=replace(start, problem=str(err)))
        tensors = dict(sample.tensors)
        if sample.items and "input_ids" in tensors and not tensors.keys() & {"label_mask", "prefix_len"}:
            # The text beside an image is given, where nothing says what of it is learnt.
            tensors["label_mask"] = np.zeros(len(tensors["input_ids"]), np.uint8)
        waveform = tensors.get("waveform") if self.sound is None else self.sound(sample.row)
        text = str(sample.row.get("text") or "")
        has_tokens = "input_ids" in tensors
        apart = {"text", *(f"{group}s" for group in sample.items)}
        pictures = [item.picture(self.config) for item in sample.shown]
        pieces = self._pieces(tensors) if has_tokens else []
        card = replace(
            start,
            row={name: value for name, value in sample.row.items() if name not in apart},
            facts=self._facts(index, waveform),
            # A class, a caption or a transcript is one text without a name.
            spoken=(("", text),) if sample.conversation is None else spoken(sample.conversation),
            pieces=tuple(pieces),
            num_tokens=len(tensors["input_ids"]) if has_tokens else 0,
            num_learnt=int(np.count_nonzero(learnt_mask(tensors))) if self.columns.has_targets else None,
        )
        if self.columns.seconds is None:
            return CardReading(card=card, pictures=pictures)
        seconds = hop_s(self.columns.cache.constants)
        why = NO_WAVEFORM if self.sound is None else NO_SOURCE
        return CardReading(card=card, waveform=waveform, tensors=tensors, pictures=pictures, hop_s=seconds, silence=why)

    def _pieces(self, tensors: Mapping[str, Any]) -> list[TokenPiece]:
        constants = self.columns.cache.constants
        image_ids = [constants[name] for name in ("image_token_id", "video_token_id") if name in constants]
        if not image_ids and names_items(self.columns.cache):
            image_ids += repeated_ids(tensors)
        return pieces_of(tensors, image_ids=image_ids, tokenizer=self.tokenizer)

    def _facts(self, index: int, waveform: Any) -> dict[str, str]:
        columns = self.columns
        found: dict[str, str] = {}
        if columns.seconds is not None:
            found["length"] = f"{columns.seconds[index]:.2f} s"
        if columns.has_tokens:
            found["tokens"] = f"{columns.tokens[index]:,}"
        if columns.rate is not None and np.isfinite(columns.rate[index]):
            found["characters a second"] = f"{columns.rate[index]:.1f}"
        if isinstance(waveform, np.ndarray) and (share := clipped_share(waveform)):
            found["at full scale"] = f"{100 * share:.2f} %"
        return found


def embedded(readings: Sequence[CardReading], *, rate_hz: int, budget: int) -> list[Card]:
    """Returns the cards with their media in them, all media together no longer than `budget`.

    Pictures take up to half of it; what they leave is for sound.
    """
    spectra, left = _spectra(readings, rate_hz=rate_hz, budget=budget // 2)
    left += budget - budget // 2
    images = [reading.pictures[:MAX_IMAGES] for reading in readings]
    pixels = [image.pixels for own in images for image in own]
    files = webps(pixels, budget=left)
    urls = iter([None] * len(pixels) if files is None else [data_url(data, "image/webp") for data in files])
    left -= sum(map(url_size, files or []))
    heard = clips([reading.waveform for reading in readings], rate_hz, budget=left)
    cards = []
    for reading, own, spectrum, clip in zip(readings, images, spectra, heard, strict=True):
        seen = tuple(_seen(image, next(urls)) for image in own)
        sound = None
        if reading.tensors and not reading.card.problem:
            why = "" if clip is None else clip.note
            if clip is None:
                is_large = "its sound would make this file larger than 10 MB; --serve plays it"
                why = reading.silence if reading.waveform is None else is_large
            sound = CardSound(url=None if clip is None else data_url(clip.data, clip.media_type), note=why)
        more = len(reading.pictures) - len(seen)
        cards.append(replace(reading.card, sound=sound, spectrum=spectrum, images=seen, more_images=more))
    return cards


NO_WAVEFORM = "no waveform kept: name the config, whose sources have it, or set [audio] keep_waveform = true"
NO_SOURCE = (
    "no waveform kept, and its source is not on this machine, or not what was read: [audio] keep_waveform = true"
)


def _spectra(readings: Sequence[CardReading], *, rate_hz: int, budget: int) -> tuple[list[SeenImage | None], int]:
    """Returns a picture of each recording while there is room, and the room that is left."""
    found: list[SeenImage | None] = []
    for reading in readings:
        made = reading.picture(rate_hz=rate_hz, columns=800) if reading.tensors else None
        if made is None:
            found.append(None)
            continue
        data, about, seconds = made
        is_kept = url_size(data) <= budget
        budget -= url_size(data) if is_kept else 0
        found.append(SeenImage(url=data_url(data, "image/png") if is_kept else None, about=about, seconds=seconds))
    return found, budget


def _seen(picture: Picture, url: str | None) -> SeenImage:
    rows, columns = picture.grid
    notes = [f"{columns} × {rows} patches"] if rows else list(picture.about)
    if rows and picture.merge > 1:
        notes[0] += f", {columns // picture.merge} × {rows // picture.merge} tokens"
    return SeenImage(
        url=url,
        about=picture.name,
        size=(picture.pixels.shape[1], picture.pixels.shape[0]),
        grid=picture.grid,
        grid_paths=grid_paths(rows, columns, picture.merge),
        notes=notes,
    )


def linked(reading: CardReading, *, root: str, rate_hz: int) -> Card:
    """Returns a card whose media lie at addresses below `root`, see `forebay.inspect.page.serve`."""
    card, index = reading.card, reading.card.index
    sound = spectrum = None
    if reading.tensors and not card.problem:
        has_sound = reading.waveform is not None
        sound = CardSound(
            url=f"{root}/audio/{index}.wav" if has_sound else None, note="" if has_sound else reading.silence
        )
        made = reading.picture(rate_hz=rate_hz, columns=16)
        if made is not None:
            spectrum = SeenImage(url=f"{root}/spectrum/{index}.png", about=made[1], seconds=made[2])
    images = [_seen(picture, f"{root}/image/{index}/{place}.webp") for place, picture in enumerate(reading.pictures)]
    return replace(card, sound=sound, spectrum=spectrum, images=tuple(images))
