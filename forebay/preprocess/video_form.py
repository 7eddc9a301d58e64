"""Videos among the images of a config: their grids, and the patches of the frames that are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import SampleError
from forebay.steps.image.still_settings import Still
from forebay.steps.image.video_frames import frames_at, video_patches
from forebay.steps.image.video_settings import Sampling, VideoSettings
from forebay.steps.image.video_step import ShowsVideos
from forebay.store.image.codec import Pixels, decode_image
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import Array

OF_VIDEO = ("grid_t", "video", "num_frames", "fps", "frames")
"""The columns of a listing that say what is known of a video beside its size."""


@dataclass(frozen=True, slots=True)
class ShownVideos:
    """Which frames of videos are shown, and how large. step: of the images."""

    step: ShowsVideos
    settings: ImageSettings

    def with_grids(self, images: pa.Table) -> tuple[pa.Table, dict[int, SampleError]]:
        """Returns items with the columns of `OF_VIDEO` and `grid_h`, `grid_w`, and of bad ones why, by their place.

        Of images the grids are those of `Still.grid`, without `step.video` in the columns `grid_h` and `grid_w` alone.
        """
        names = ["width", "height", *(("num_frames", "fps") if self.step.video else [])]
        known = [images[name].to_numpy().astype(np.float64) for name in names]
        asked = _codes(images["still"])
        known.insert(0, asked.indices.fill_null(-1).to_numpy().astype(np.float64))
        if self.step.video:
            videos = _codes(images["video"])
            known.append(videos.indices.fill_null(-1).to_numpy().astype(np.float64))
        unique, inverse = np.unique(np.stack(known, axis=1), axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        grids = np.zeros((len(unique), 3), np.int32)
        refused: dict[int, SampleError] = {}
        for number, (still, width, height, *video) in enumerate(unique.tolist()):
            try:
                if video and video[-1] >= 0:
                    how = videos.dictionary[int(video[-1])].as_py()
                    grids[number] = self._grid(how, video, int(width), int(height))
                elif not self.step.is_of_transformers:
                    own = Still.read(None if still < 0 else asked.dictionary[int(still)].as_py())
                    grids[number] = own.grid(int(width), int(height), self.settings, self.step.max_pixels)
            except SampleError as err:
                refused[number] = err
        for place, name in ((1, "grid_h"), (2, "grid_w"), *(((0, "grid_t"),) if self.step.video else ())):
            images = images.append_column(name, pa.array(grids[inverse, place], pa.int32()))
        return images, {i: refused[n] for i, n in enumerate(inverse.tolist()) if n in refused}

    def _grid(self, asked: str, video: Sequence[float], width: int, height: int) -> tuple[int, int, int]:
        """Returns the grid of a video of (frames, frames a second, ...) and a size. Raises SampleError."""
        count = len(self.shown(asked, *video[:2]))
        t, rows, columns = self.video.of_call(self.asked(asked), count).grid(count, width, height)
        if (pixels := rows * columns * self.settings.patch_size**2) > self.step.max_pixels:
            said = f"a frame is resized to {pixels} pixels, source.max_pixels is {self.step.max_pixels}"
            raise SampleError("too_many_pixels", f"{said}; lower min_pixels of the video, or raise that setting")
        return t, rows, columns

    def asked(self, text: str) -> Sampling:
        """Returns what is asked of a video. text: of `Sampling.to_text`."""
        return Sampling(**json.loads(text)).over(self.step.sampling)

    def shown(self, asked: str, num_frames: float, fps: float) -> list[int]:
        """Returns which frames of a video are shown. asked: of `Sampling.to_text`. Raises SampleError."""
        return self.video.indices(int(num_frames), fps, self.asked(asked))

    @property
    def video(self) -> VideoSettings:
        """The settings of the video processor."""
        assert self.step.video is not None
        return self.step.video

    def make(self, row: Mapping[str, Any], data: bytes | Iterator[bytes]) -> tuple[Array, Array, Array]:
        """Returns the patches of a video as `video_patches` has them, its grid int32 [1, 3] and `seconds` [1]."""
        shown, grid = (
            self.shown(row["video"], row["num_frames"], row["fps"]),
            [row[f"grid_{axis}"] for axis in ("t", "h", "w")],
        )
        if isinstance(data, bytes):
            frames = frames_at(data, shown, row["fps"], sample_id=row["sample_id"])
        else:
            frames = self._decoded(data, row["sample_id"])
        patches = video_patches(frames, grid, self.video, self.settings)
        return patches, np.array([grid], np.int32), np.array([self.seconds(row)], np.float32)

    def seconds(self, row: Mapping[str, Any]) -> float:
        """Returns the seconds of a step of the grid of a video in time."""
        asked = self.asked(row["video"])
        count = len(self.shown(row["video"], row["num_frames"], row["fps"]))
        return self.video.second_per_grid(count, *asked.timed(row["num_frames"], row["fps"]), asked)

    def _decoded(self, frames: Iterator[bytes], sample_id: str) -> Iterator[Pixels]:
        """Yields frames that are images. Raises SampleError for one of another size, whatever its header says."""
        size: tuple[int, int] | None = None
        for number, data in enumerate(frames, 1):
            image = decode_image(data, sample_id=f"{sample_id}, frame {number}", **self.step.decoding)
            if image.size != (size := size or image.size):
                raise SampleError("frame_sizes", f"frame {number} of {sample_id} has another size than the first")
            yield np.array(image)


def _codes(texts: pa.ChunkedArray) -> pa.DictionaryArray:
    return pa.chunked_array([texts.combine_chunks()], pa.string()).combine_chunks().dictionary_encode()
