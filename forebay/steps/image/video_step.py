"""Settings of a step of images that may be videos too: which frames are shown of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from forebay.config.tree import Config
from forebay.steps.image.video_settings import Sampling, VideoSettings
from forebay.steps.step import ImageStep

_OF_VIDEOS = ("fps", "max_frames", "video", "max_video_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowsVideos(ImageStep):
    """A step of images, and with `fps` of videos. video: the settings of the video processor."""

    given: ClassVar[frozenset[str]] = frozenset(
        {"processor", "max_pixels", "max_sample_bytes", "more_images", "video", "max_video_s"}
    )

    fps: float | None = None
    """Frames a second that are shown of videos, within the processor's `min_frames` and `max_frames`; a part of a
    conversation may say otherwise. Without it rows with videos are refused (`has_video`)."""
    max_frames: int | None = None
    """The most frames of a video, in place of the processor's `max_frames`; a longer list of frames is refused."""
    video: VideoSettings | None = None
    max_video_s: float = 0

    def compared(self) -> dict[str, Any]:
        """See `Step`: what is of videos stands there where there are any."""
        found = super(ShowsVideos, self).compared()
        return found if self.fps else {name: value for name, value in found.items() if name not in _OF_VIDEOS}

    @property
    def sampling(self) -> Sampling:
        """Which frames of a video are shown where its part says nothing."""
        return Sampling(fps=self.fps, max_frames=self.max_frames)

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what videos are not for."""
        settings = {} if config.vision is None else config.vision.settings
        fps, most = (settings.get(name) for name in ("fps", "max_frames"))
        found = []
        if most is not None and not fps:
            found.append("vision.max_frames is of videos, which vision.fps asks for; set it, too")
        if fps is not None and not 0 < fps <= 1000:
            found.append(f"vision.fps is {fps}, wanted more than 0, and 1000 at most")
        if most is not None and most < 1:
            found.append(f"vision.max_frames is {most}, wanted 1 or more")
        return found
