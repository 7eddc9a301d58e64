"""Encoded bytes to a mono waveform; every way in which a sample can be wrong has its reason.

The sound of stored samples from their sources, for those who look into a cache that keeps no waveforms.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.errors import DecodeError, ForebayError
from forebay.rows.list_rows import list_row, list_rows
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.own import meaning_of
from forebay.rows.media_reader import MediaReader
from forebay.rows.segments import Bounds, RecordingParts, segment_of, wav_bytes
from forebay.spans import RESAMPLE, span
from forebay.steps.audio.audio_section import in_conversations
from forebay.steps.audio.film_sound import film_sound, is_film
from forebay.steps.audio.waveform import Decode, Waveform
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache
from forebay.store.layout import Array
from forebay.store.lookup import SOURCES_NAME
from forebay.store.memo import Memo
from forebay.store.remote.raw.raw_sources import localized, place_of
from forebay.store.sound_containers import AudioInfo, PcmAudio, has_length, one_stream, parsed_header, plain_pcm
from forebay.store.source_files import load_sources

if TYPE_CHECKING:
    from soundfile import LibsndfileError, SoundFile


Decoded = npt.NDArray[np.float32] | npt.NDArray[np.int16]
_MIN_RATE_HZ, _MAX_RATE_HZ = 1_000, 384_000
_UNKNOWN_FRAMES = 1 << 62
_BLOCK_FRAMES = 1 << 18
_LOOK_AHEAD = 8192
"""Samples at the lower of two rates, behind which the input's end moves no bit of soxr HQ (FFT blocks)."""
_UNRECOGNISED, _MALLOC_FAILED, _SEEK_FAILED = 1, 17, 39
_MAGICS = (b"fLaC", b"RIFF", b"RIFX", b"RF64", b"BW64", b"OggS", b"FORM", b"ID3")


def decode_audio(
    data: bytes, step: Decode, *, sample_id: str, want: Literal["float32", "int16"] = "float32"
) -> Decoded:
    """Returns the mono waveform [num_samples] at `step.sample_rate_hz`: mean of channels, soxr HQ, the first `clip_s`.

    float32, 1.0 being full scale. With want="int16" the samples of a 16-bit mono source at that rate come unchanged as
    int16; any other source still comes as float32, for the caller to round. The same bytes give the same waveform.

    Raises DecodeError, which names the sample, with the reason `empty_file`, `too_large`, `unknown_format`,
    `corrupt_audio`, `bad_sample_rate`, `truncated_audio`, `chained_audio` (see `one_stream`), `header_mismatch` (fewer
    samples than an exact header claims), `empty_audio` or `not_finite`. Sizes are checked before anything is allocated
    for them. What is no property of the sample (MemoryError, OSError) comes through.
    """
    import soundfile

    if not data:
        raise DecodeError("empty_file", f"sample {sample_id}: the file is empty (0 bytes); write or list it again")
    if len(data) > step.max_sample_bytes:
        _refuse_size(sample_id, "the file", len(data), step)
    plain = plain_pcm(data)
    if plain is not None:
        waveform = _read_plain(plain, step, sample_id=sample_id, want=want)
        return _clipped(_resampled(waveform, plain.sample_rate_hz, step, sample_id=sample_id), step)
    claim = parsed_header(lambda offset, size: data[offset : offset + size], len(data))
    if claim is not None:
        _check_rate(claim.sample_rate_hz, sample_id)
    else:
        data, problem = one_stream(data)
        if problem is not None:
            raise DecodeError(problem[0], f"sample {sample_id}: {problem[1]}")
    try:
        with _as_file(data) as opened, soundfile.SoundFile(opened, closefd=False) as file:
            is_exact = file.format != "MP3" or has_length(data)
            waveform = _read(file, claim, step, sample_id=sample_id, want=want, is_exact=is_exact)
            rate_hz = file.samplerate
    except soundfile.LibsndfileError as err:
        _refuse_undecodable(err, data, sample_id)
    if waveform.dtype == np.int16:
        return _clipped(waveform, step)
    if not np.isfinite(waveform).all():
        raise DecodeError("not_finite", f"sample {sample_id}: the audio holds NaN or infinity; write it again")
    return _clipped(_resampled(waveform, rate_hz, step, sample_id=sample_id), step)


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[int | io.BytesIO]:
    """Yields what libsndfile reads `data` from: a BytesIO, or beside other threads the descriptor of a file in memory.

    From a BytesIO libsndfile calls back into Python for every block and waits for the GIL each time: beside one busy
    thread (the uncached path decodes in threads) that is seven times as slow. Alone it saves the copy.
    """
    if threading.active_count() == 1:
        yield io.BytesIO(data)
        return
    descriptor = os.memfd_create("forebay")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_plain(audio: PcmAudio, step: Decode, *, sample_id: str, want: str) -> Decoded:
    """Returns what `_read` gives for such a file: libsndfile divides 16-bit samples by 32768, exact in float32."""
    _check_rate(audio.sample_rate_hz, sample_id)
    claimed, channels = audio.samples.shape
    samples = audio.samples[: _frames_for_clip(step, audio.sample_rate_hz)]
    if samples.size * 4 > step.max_sample_bytes:
        _refuse_size(sample_id, f"the audio ({claimed} samples by its header)", samples.size * 4, step)
    if want == "int16" and channels == 1 and audio.sample_rate_hz == step.sample_rate_hz:
        return samples[:, 0].astype(np.int16)
    return _mono(samples.astype(np.float32) * np.float32(2**-15))


def _read(
    file: SoundFile, claim: AudioInfo | None, step: Decode, *, sample_id: str, want: str, is_exact: bool
) -> Decoded:
    """Returns the mono samples at the file's own rate; where the step clips, as many as that needs.

    is_exact: whether the header knows how many there are; where it does not, those that are there are all.
    """
    rate_hz = file.samplerate
    _check_rate(rate_hz, sample_id)
    is_unchanged = file.subtype == "PCM_16" and file.channels == 1 and rate_hz == step.sample_rate_hz
    dtype = "int16" if want == "int16" and is_unchanged else "float32"
    limit = _frames_for_clip(step, rate_hz)
    if file.frames >= _UNKNOWN_FRAMES:
        return _read_unknown_length(file, dtype, limit, step, sample_id=sample_id)
    # Of a file that was cut off libsndfile gives the frames that are left, not the frames that it should have.
    claimed = max(file.frames, claim.num_samples if claim else 0)
    if not claimed:
        raise DecodeError("empty_audio", f"sample {sample_id}: the file holds no audio; write or list it again")
    wanted = claimed if limit is None else min(claimed, limit)
    size_bytes = wanted * file.channels * 4
    if size_bytes > step.max_sample_bytes:
        _refuse_size(sample_id, f"the audio ({claimed} samples by its header)", size_bytes, step)
    # In one read: soundfile seeks after each, and mp3 does not go on where it was. What is claimed but not there is
    # allocated, never touched.
    samples = file.read(wanted, dtype=dtype, always_2d=True)
    if len(samples) < wanted and (is_exact or not len(samples)):
        raise DecodeError(
            "header_mismatch",
            f"sample {sample_id}: its header claims {claimed} samples, {len(samples)} are there; write it again",
        )
    return _mono(samples)


def _read_unknown_length(file: SoundFile, dtype: str, limit: int | None, step: Decode, *, sample_id: str) -> Decoded:
    """Returns the mono samples of a FLAC stream that was written without its length, by ffmpeg to a pipe for example.

    soundfile seeks to where it is after each read. That fails at the end of such a stream, after the buffer was filled;
    how far is seen by a mark that no sample equals: as 32-bit numbers, samples of up to 24 bits end in eight zero bits.
    """
    from soundfile import LibsndfileError

    mark = 1
    blocks: list[npt.NDArray[np.int32]] = []
    count = 0
    while limit is None or count < limit:
        block = np.full((_BLOCK_FRAMES, file.channels), mark, np.int32)
        try:
            block = file.read(out=block)
        except LibsndfileError as err:
            if err.code != _SEEK_FAILED:
                raise
        filled = int((block[:, 0] != mark).sum())
        blocks.append(block[:filled])
        count += filled
        if count * file.channels * 4 > step.max_sample_bytes:
            _refuse_size(sample_id, "the audio", count * file.channels * 4, step)
        if filled < _BLOCK_FRAMES:
            break
    if not count:
        raise DecodeError("empty_audio", f"sample {sample_id}: the file holds no audio; write or list it again")
    samples = np.concatenate(blocks)[:limit]
    if dtype == "int16":
        return (samples[:, 0] >> 16).astype(np.int16)
    return _mono(samples.astype(np.float32) / np.float32(1 << 31))


def _mono(samples: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the mean of the channels of [num_samples, channels], added in order so that no block size moves a bit."""
    total = samples[:, 0]
    if samples.shape[1] == 1:
        return total
    total = total.copy()
    for channel in range(1, samples.shape[1]):
        total += samples[:, channel]
    total /= np.float32(samples.shape[1])
    return total


def _frames_for_clip(step: Decode, rate_hz: int) -> int | None:
    """Returns how many samples at the file's rate decide the first `clip_s` seconds at the step's."""
    if step.clip_s is None:
        return None
    ahead = 0 if rate_hz == step.sample_rate_hz else _LOOK_AHEAD * rate_hz / min(rate_hz, step.sample_rate_hz)
    return math.ceil(step.clip_s * rate_hz + ahead)


def _resampled(waveform: Decoded, rate_hz: int, step: Decode, *, sample_id: str) -> Decoded:
    if rate_hz != step.sample_rate_hz:
        size_bytes = math.ceil(len(waveform) * step.sample_rate_hz / rate_hz) * 4
        if size_bytes > step.max_sample_bytes:
            _refuse_size(sample_id, f"the audio at {step.sample_rate_hz} Hz", size_bytes, step)
        import soxr

        with span(RESAMPLE):
            waveform = soxr.resample(waveform, rate_hz, step.sample_rate_hz, quality="HQ")
    if not len(waveform):
        raise DecodeError(
            "empty_audio", f"sample {sample_id}: nothing is left of the audio at {step.sample_rate_hz} Hz; remove it"
        )
    return waveform


def _clipped(waveform: Decoded, step: Decode) -> Decoded:
    return waveform if step.clip_s is None else waveform[: round(step.clip_s * step.sample_rate_hz)]


def _check_rate(rate_hz: int, sample_id: str) -> None:
    if not _MIN_RATE_HZ <= rate_hz <= _MAX_RATE_HZ:
        raise DecodeError(
            "bad_sample_rate",
            f"sample {sample_id}: its sample rate is {rate_hz} Hz, wanted {_MIN_RATE_HZ} to {_MAX_RATE_HZ}; "
            "write it again",
        )


def _refuse_size(sample_id: str, what: str, size_bytes: int, step: Decode) -> NoReturn:
    raise DecodeError(
        "too_large",
        f"sample {sample_id}: {what} takes {size_bytes} bytes, allowed are {step.max_sample_bytes};"
        " cut it, or raise source.max_sample_bytes",
    )


def _refuse_undecodable(err: LibsndfileError, data: bytes, sample_id: str) -> NoReturn:
    if err.code == _MALLOC_FAILED:
        raise MemoryError(f"libsndfile had no memory for sample {sample_id}") from err
    if err.code == _UNRECOGNISED and not data.startswith(_MAGICS):
        message = f"sample {sample_id}: no audio format begins with {data[:8]!r}; convert it to FLAC, WAV, Ogg or MP3"
        raise DecodeError("unknown_format", message) from err
    if err.code == _SEEK_FAILED:
        message = f"sample {sample_id}: its header claims more audio than there is ({err.error_string}); write it again"
        raise DecodeError("header_mismatch", message) from err
    message = f"sample {sample_id}: the audio cannot be decoded ({err.error_string}); write it again"
    raise DecodeError("corrupt_audio", message) from err


class FilmClips:
    """A reader of clips: it gives encoded bytes, or of a film, whose sound is the clip, a WAV of that."""

    def __init__(self, read: Callable[..., bytes], max_bytes: int) -> None:
        """read: as `MediaReader`. max_bytes: of a WAV."""
        self._read, self._max_bytes = read, max_bytes
        self._place: tuple[int, int, int] | None = None
        self._wav = b""

    def __call__(self, file: int, offset: int, size: int, segment: Bounds | None = None) -> bytes:
        """Raises what `read` and `film_sound` do. Of the film that was read last the sound is decoded once."""
        place = (file, offset, size)
        if self._place != place:
            try:
                data = self._read(*place, segment)
            except DecodeError as err:
                if segment is None or err.reason != "corrupt_audio":
                    raise
                data = self._read(*place)  # libsndfile reads no stretch of a film
                if not is_film(data):
                    raise
            if not is_film(data):
                return data
            found = film_sound(data, max_bytes=self._max_bytes, name="of a clip")
            self._place, self._wav = place, wav_bytes(*found)
        if segment is None:
            return self._wav
        parts = RecordingParts(io.BytesIO(self._wav), name="the sound of a video")
        with contextlib.closing(parts):
            return parts.wav(segment, max_bytes=self._max_bytes)


class Heard:
    """Decodes samples of a cache by their rows, as `audio.keep_waveform` would keep them; threads may share it."""

    def __init__(self, config: Config, cache: Cache) -> None:
        """config: of the cache. Nothing is read before a sample is asked for; then its manifest is listed."""
        self._config, self._folder = config, cache.folder
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._hashes: dict[tuple[int, str], str] = {}
        self._memo = Memo.of(config)

    def __call__(self, row: Mapping[str, Any]) -> Array | None:
        """Returns `waveform` int16 [num_samples]; None where the source is not on this machine or not what was read."""
        audio = recipe_of(self._config).audio
        if audio is None or not audio.features.reads_sound or in_conversations(self._config):
            return None
        try:
            data = self._encoded(str(row["sample_id"]))
            if data is None:
                return None
            clip = decode_audio(data, audio.decode, sample_id=str(row["sample_id"]), want="int16")
        except (ForebayError, OSError):
            return None
        found: Array = Waveform().make([clip])[0]["waveform"]
        return found if len(found) == row.get("num_audio_samples", len(found)) else None

    def clips(self, sample_id: str) -> Mapping[str, Array]:
        """Returns the waveforms int16 [num_samples] of the clips of a conversation, by what `audio_hash` says of each.

        Those whose source is on this machine; the hash is of what it holds now.
        """
        source, audio = localized(self._config).source, recipe_of(self._config).audio
        found: dict[str, Array] = {}
        with contextlib.suppress(ForebayError, OSError):
            manifest = list_row(source, meaning_of(self._config), sample_id, cache_root=self._config.cache_root)
            if manifest is None or audio is None:
                return found
            column, most = source.columns.media, source.max_sample_bytes
            with MediaReader(manifest.files, max_open=1, max_bytes=most, column=column, as_listed=True) as read:
                clips = FilmClips(read, most)
                for item in manifest.items["audio"].to_pylist():
                    data = clips(item["file"], item["offset"], item["size"], segment_of(item))
                    clip = decode_audio(data, audio.decode, sample_id=sample_id, want="int16")
                    found[item["hash"]] = Waveform().make([clip])[0]["waveform"]
        return found

    def _encoded(self, sample_id: str) -> bytes | None:
        with self._lock:
            if self._manifest is None:
                stored = load_sources(self._folder / SOURCES_NAME)
                self._hashes = {(source.entry, source.name): source.xxh3_128 for source in stored}
                self._manifest = list_rows(
                    localized(self._config).source, meaning_of(self._config), cache_root=self._config.cache_root
                )
            files, rows = self._manifest.files, self._manifest.rows
            if (place := pc.index(rows["sample_id"], sample_id).as_py()) < 0:
                return None
            row = rows.slice(place, 1).to_pylist()[0]
            number, offset, size = row["file"], row["offset"], row["size"]
            file = files[number]
            if place_of(file.path) is not None or not file.path.is_file():
                return None
            if self._memo.hashes([file.path]) != [self._hashes.get((file.entry, file.name))]:
                return None
        source = self._config.source
        column, most = source.columns.media, source.max_sample_bytes
        with MediaReader(files, max_open=1, max_bytes=most, column=column, as_listed=True) as read:
            return read(number, offset, size, segment_of(row))
