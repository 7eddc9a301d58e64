"""Videos by PyAV (extra `video`): what one is, by its header and its packets, and the frames of it that are shown.

FFmpeg is given the bytes alone: playlists and other forms that would open files or URLs of their own are not read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import DecodeError
from forebay.extras import require_module
from forebay.steps.image.video_settings import VideoSettings
from forebay.store.image.codec import Pixels, patchify
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import Array

_FORMS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf"
"""Containers that are read. None opens another file."""
_SURE = (0.25, 0.05)
"""The seconds, and the share of a video's length, that its header may say too much."""
_LIKE_CONSTANT = 0.5
"""Intervals that frames of a constant rate lie off their place at most: containers round times."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """A video. width, height: as displayed. fps: frames a second, on the average where the rate varies."""

    width: int
    height: int
    num_frames: int
    fps: float


def require_av(what: str) -> None:
    """Returns where PyAV is installed. Raises MissingExtraError."""
    require_module("av", "video", what=what)


def video_facts(data: bytes, *, max_video_s: float, max_pixels: int, sample_id: str) -> VideoFacts:
    """Returns the facts of an encoded video; of its frames the first one alone is decoded.

    Raises DecodeError `empty_file`, `unreadable_video`, `no_video_stream`, `no_frames`, `video_too_long`,
    `too_many_pixels`, `truncated_video`.
    """
    with _opened(data, sample_id) as (container, stream):
        length_s = max(_header_s(container.duration, 1e-6), _header_s(stream.duration, stream.time_base))
        if length_s > max_video_s:
            raise _too_long(length_s, max_video_s, sample_id)
        if stream.width * stream.height > max_pixels:
            raise DecodeError(
                "too_many_pixels",
                f"video {sample_id}: {stream.width}x{stream.height} pixels, source.max_pixels is {max_pixels}",
            )
        times = _Times.of(container, stream, sample_id)
        if times.span_s > max_video_s:
            raise _too_long(times.span_s, max_video_s, sample_id)
    for frame in frames_at(data, [0], times.fps, sample_id=sample_id):
        return VideoFacts(frame.shape[1], frame.shape[0], len(times.ticks), times.fps)
    raise _truncated(sample_id, "its first frame does not decode")


def frames_at(data: bytes, indices: Sequence[int], fps: float, *, sample_id: str) -> Iterator[Pixels]:
    """Yields frames uint8 [height, width, 3] as displayed, in order; what lies far between and behind is not decoded.

    indices: rising; one may stand there several times. Frame i is the i-th one shown; of a video whose rate varies the
    one that is seen at i / fps seconds. Raises DecodeError as `video_facts` does.
    """
    with _opened(data, sample_id) as (container, stream):
        times = _Times.of(container, stream, sample_id)
    wanted, place = times.at(indices, fps).tolist(), 0
    for keys in (times.keys, times.keys[:0]):
        try:
            for pixels in _decoded(data, wanted[place:], keys, sample_id):
                yield pixels
                place += 1
            return
        except DecodeError:
            if not len(keys):
                raise  # and where a jump missed, from the beginning


def _decoded(data: bytes, wanted: Sequence[int], keys: Array, sample_id: str) -> Iterator[Pixels]:
    """Yields the frames of some ticks. keys: of frames that need no other, to which it jumps; none: it does not."""
    with _opened(data, sample_id) as (container, stream):
        frames, last = container.decode(stream), keys[0] if len(keys) else 0
        for tick, same in itertools.groupby(wanted):
            before = max(int(np.searchsorted(keys, tick, side="right")) - 1, 0)
            key = int(keys[before]) if len(keys) else last
            if key > last:
                container.seek(key, stream=stream)
                frames = container.decode(stream)
            frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= tick), None)
            if frame is None or frame.pts != tick or frame.is_corrupt:
                time_s = float(tick * stream.time_base)
                raise _truncated(sample_id, f"the frame at {time_s:.2f} s is damaged or missing")
            last, pixels = tick, _displayed(frame, sample_id)
            yield from (pixels for _ in same)


def probed_frames() -> list[Pixels]:
    """Returns built-in frames [60, 90, 3], by which FFmpeg's conversion of colours on this machine is known."""
    import av

    noise = np.random.default_rng(0).integers(0, 256, (3, 90, 90), np.uint8)
    frames: list[Any] = [av.VideoFrame.from_ndarray(planes, format="yuv420p") for planes in noise]
    return [frame.to_ndarray(format="rgb24") for frame in frames]


def video_patches(
    frames: Iterable[Pixels], grid: Sequence[int], video: VideoSettings, settings: ImageSettings
) -> npt.NDArray[np.uint8]:
    """Returns the patches of frames as displayed, uint8 [t * h * w * temporal_patch_size, 3 * patch_size^2].

    Of each patch these rows are one row (channel, time, y, x) of the processor's. Frames are resized by torch as
    torchvision's bicubic with antialiasing does, which stays uint8; the last one is repeated. grid: (t, h, w).
    """
    t, rows, columns = grid
    size, copies = (rows * video.patch_size, columns * video.patch_size), video.temporal_patch_size
    patches = np.empty((t * copies, rows * columns, 3, settings.patch_bytes // 3), np.uint8)
    count = 0
    for frame in frames:
        patches[count] = patchify(_resized(frame, size), settings).reshape(patches.shape[1:])
        count += 1
    patches[count:] = patches[count - 1]
    split = patches.reshape(t, copies, *patches.shape[1:]).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(split).reshape(-1, settings.patch_bytes)


def _resized(frame: Pixels, size: tuple[int, int]) -> Pixels:
    import torch

    if frame.shape[:2] == size:
        return frame
    planes = torch.from_numpy(frame).permute(2, 0, 1)[None].contiguous()
    made = torch.nn.functional.interpolate(planes, size=size, mode="bicubic", align_corners=False, antialias=True)
    return np.asarray(made[0].permute(1, 2, 0).numpy())


@dataclass(frozen=True, slots=True)
class _Times:
    """When the frames of a video are shown. ticks: int64, rising, in units of `base_s` seconds. fps: of the video.

    keys: those of the frames that need no other.
    """

    ticks: Array
    keys: Array
    base_s: float
    fps: float

    @classmethod
    def of(cls, container: Any, stream: Any, sample_id: str) -> _Times:
        """Returns those that the packets say, none of which is decoded."""
        shown, keys, end_s = [], [], 0.0
        for packet in container.demux():
            if packet.size and packet.stream is stream:
                shown.append(packet.pts)
                keys += [packet.pts] * packet.is_keyframe
            end_s = max(end_s, _header_s(packet.pts, packet.time_base) + _header_s(packet.duration, packet.time_base))
        if not shown:
            raise DecodeError("no_frames", f"video {sample_id}: it has no frames; leave it out")
        if None in shown:
            raise DecodeError("unreadable_video", f"video {sample_id}: frames have no times; store it as MP4 or WebM")
        found = sorted({*shown})
        if stream.frames > len(found):
            raise _truncated(sample_id, f"its header says {stream.frames} frames, and {len(found)} are there")
        # WebM says no number of frames, but how long all of it is, sound among it.
        start_s, length_s = _header_s(container.start_time, 1e-6), _header_s(container.duration, 1e-6)
        if not stream.frames and end_s - start_s < length_s - max(_SURE[0], _SURE[1] * length_s):
            raise _truncated(sample_id, f"its header says {length_s:.2f} s, and it ends at {end_s - start_s:.2f} s")
        ticks, base_s = np.array(found, np.int64), float(stream.time_base)
        rate = float(stream.average_rate or 0)
        if len(ticks) > 1:
            mean = (len(ticks) - 1) / float((ticks[-1] - ticks[0]) * base_s)
            # A header may say anything; what the frames say holds.
            rate = rate if abs(rate - mean) <= 0.01 * mean else mean
        if not rate:
            raise DecodeError("unreadable_video", f"video {sample_id}: nothing says how long its one frame is shown")
        return cls(ticks, np.array(sorted(keys), np.int64), base_s, rate)

    @property
    def span_s(self) -> float:
        return float(self.ticks[-1] - self.ticks[0]) * self.base_s

    def at(self, indices: Sequence[int], fps: float) -> Array:
        """Returns the ticks of frames, see `frames_at`."""
        shown_s = (self.ticks - self.ticks[0]) * self.base_s
        off = np.abs(shown_s * fps - np.arange(len(shown_s))).max()
        if off > _LIKE_CONSTANT:
            places = np.searchsorted(shown_s, np.array(indices) / fps + 1e-9, side="right") - 1
        else:
            places = np.array(indices)
        return np.asarray(self.ticks[places])


@contextlib.contextmanager
def _opened(data: bytes, sample_id: str) -> Iterator[tuple[Any, Any]]:
    """Opens a video. PyAV's errors for what the bytes are become DecodeErrors."""
    import av

    if not data:
        raise DecodeError("empty_file", f"video {sample_id}: it is empty (0 bytes); write or list it again")
    options = {"format_whitelist": _FORMS, "protocol_whitelist": "none"}
    try:
        # Titles are not always UTF-8, and nobody reads them here.
        with av.open(io.BytesIO(data), options=options, metadata_errors="replace") as container:
            moving = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
            if not moving:
                raise DecodeError("no_video_stream", f"video {sample_id}: it has no moving pictures; leave it out")
            if (codec := moving[0].codec_context) is None:
                raise DecodeError("unreadable_video", f"video {sample_id}: nothing here decodes it; write it as H.264")
            codec.thread_count = 1  # a worker has one core
            codec.options = {"err_detect": "explode"}  # damage is an error, not made good
            yield container, moving[0]
    except (av.FFmpegError, IndexError) as err:
        raise DecodeError(
            "unreadable_video", f"video {sample_id}: {getattr(err, 'strerror', err)}; write the video again"
        ) from err


def _displayed(frame: Any, sample_id: str) -> Pixels:
    """The pixels of a frame, turned as its display matrix says: `rotation` degrees against the clock."""
    turns, rest = divmod(frame.rotation, 90)
    if rest:
        raise DecodeError("unreadable_video", f"video {sample_id}: it is turned by {frame.rotation} degrees")
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns % 4))


def _header_s(duration: int | None, base: Any) -> float:
    return 0.0 if duration is None else duration * float(base)


def _too_long(length_s: float, max_video_s: float, sample_id: str) -> DecodeError:
    return DecodeError(
        "video_too_long",
        f"video {sample_id}: {length_s:.1f} s, source.max_video_s is {max_video_s:g}; cut it, or raise that setting",
    )


def _truncated(sample_id: str, why: str) -> DecodeError:
    return DecodeError("truncated_video", f"video {sample_id}: {why}; write the video again")
