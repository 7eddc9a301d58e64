"""Settings of a Qwen-VL's video processor, and its arithmetic: which frames of a video, how large, at what times.

It is that of `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor` of transformers (5.23), which need torchvision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError, SampleError
from forebay.store.image.image_settings import ImageSettings, grid_thw, setting_value

Family = Literal["qwen2", "qwen2_5", "qwen3"]
"""Which Qwen-VL. It is shown time not at all, by positions, by texts before each frame; boxes as `BoxWriter` says."""
_FILES = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", ""))
_OLD_FILE = ("preprocessor_config.json", "")
_OF_TYPE: Mapping[str, Family] = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2_5", "qwen3_vl": "qwen3"}
_OF_PROCESSOR: Mapping[str, Family] = {
    "Qwen2VLProcessor": "qwen2",
    "Qwen2_5_VLProcessor": "qwen2_5",
    "Qwen3VLProcessor": "qwen3",
    "Qwen3VLVideoProcessor": "qwen3",
}
_CLASSES: Mapping[Family, tuple[str, ...]] = {
    "qwen2": ("Qwen2VLVideoProcessor",),
    "qwen2_5": ("Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor"),
    "qwen3": ("Qwen3VLVideoProcessor",),
}
_DEFAULTS: Mapping[Family, dict[str, Any]] = {
    "qwen2": {"min_pixels": 128 * 28 * 28, "max_pixels": 28 * 28 * 768},
    "qwen3": {
        "patch_size": 16,
        "min_pixels": 128 * 32 * 32,
        "max_pixels": 32 * 32 * 768,
        "max_video_tokens": 768,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
}
_FIXED: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "num_frames": None,
    "do_center_crop": None,
    "do_pad": None,
}
"""What this arithmetic is of; a document that says another thing is refused."""
_MOST_ASPECT = 200
_ABOVE_LEAST = 1.05
"""The most pixels over the least ones, at least, where `total_pixels` bounds them."""
_SLACK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """The settings of a video processor; the defaults are those of `Qwen2VLVideoProcessor`.

    min_pixels, max_pixels: of a resized frame, in the family `qwen3` of all sampled frames together.
    """

    family: Family
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int
    max_pixels: int
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    tokens_per_second: int = 2
    """Positions that a second of a video takes in the family `qwen2_5`: `vision_config` of the model's config.json; 2
    is what Qwen has published."""

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    def indices(self, num_frames: int, fps: float, asked: Sampling) -> list[int]:
        """Returns which of `num_frames` frames are shown, as the processor's `sample_frames` says, rising.

        fps: of the video; 0 of a list of frames, all of which are shown. Of a stretch the frames of it are sampled as
        those of a video. Raises SampleError `too_few_frames` where the processor refuses so short a video,
        `too_many_frames` for a list above what is shown of a video, `segment_past_end`.
        """
        if not fps:
            return self._all(num_frames, asked)
        stretch = asked.stretch(num_frames, fps)
        return [stretch.start + i for i in self._sampled(len(stretch), fps, asked)]

    def _sampled(self, num_frames: int, fps: float, asked: Sampling) -> list[int]:
        count = self._count(num_frames, fps, asked) if num_frames else 0
        if self.family == "qwen3" and count >= self.temporal_patch_size:
            return [int(i) for i in np.linspace(0, num_frames - 1, count).round()]
        if self.family == "qwen3" or count < 1 or count > num_frames:
            raise SampleError(
                "too_few_frames",
                f"{num_frames} frames at {fps:g} a second, of which {asked} takes {count}; the processor takes "
                f"{self.temporal_patch_size} or more; ask for fewer, or leave the video out",
            )
        import torch

        return [int(i) for i in torch.arange(0, num_frames, num_frames / count).int()]

    def _all(self, num_frames: int, asked: Sampling) -> list[int]:
        least = self.temporal_patch_size if self.family == "qwen3" else 1
        most = self.max_frames if asked.max_frames is None else asked.max_frames
        if num_frames > most:
            raise SampleError(
                "too_many_frames",
                f"a list of {num_frames} frames, max_frames is {most}; raise vision.max_frames, or list fewer",
            )
        if num_frames < least:
            raise SampleError("too_few_frames", f"a list of {num_frames} frames, the processor takes {least} or more")
        return [*range(num_frames)]

    def _count(self, num_frames: int, fps: float, asked: Sampling) -> int:
        copies = self.temporal_patch_size
        if asked.nframes is not None:
            return asked.nframes if self.family == "qwen3" else round(asked.nframes / copies) * copies
        least = self.min_frames if asked.min_frames is None else asked.min_frames
        most = self.max_frames if asked.max_frames is None else asked.max_frames
        wanted = num_frames / fps * (asked.fps or 0)
        if self.family == "qwen3":
            return min(max(int(wanted), least), most, num_frames)
        most = min(most, num_frames) // copies * copies
        return math.floor(min(max(wanted, least), most, num_frames) / copies) * copies

    def of_call(self, asked: Sampling, count: int) -> VideoSettings:
        """Returns the settings of the call for a video of `count` shown frames, whose part has limits of its own.

        They are of a frame, as `fetch_video` of qwen_vl_utils has them; `size` in the family `qwen3` is of all.
        Raises SampleError `bad_sampling` where the most are below the least.
        """
        frames = count if self.family == "qwen3" else 1
        least, most = self.min_pixels, self.max_pixels
        if asked.min_pixels is not None:
            least = asked.min_pixels * frames
        if asked.max_pixels is not None:
            most = asked.max_pixels * frames
        if asked.total_pixels is not None:
            share = asked.total_pixels * self.temporal_patch_size * frames // count
            most = min(most, max(share, int(least * _ABOVE_LEAST)))
        if most < least and (most, least) != (self.max_pixels, self.min_pixels):
            raise SampleError("bad_sampling", f"{asked}: {least} pixels at least, and {most} at most")
        return replace(self, min_pixels=least, max_pixels=most)

    def grid(self, count: int, width: int, height: int) -> tuple[int, int, int]:
        """Returns the grid of patches (t, rows, columns) of `count` frames of a size, as displayed.

        The last frame is repeated up to a multiple of `temporal_patch_size`. Raises SampleError `aspect_ratio`.
        """
        t = -(-count // self.temporal_patch_size)
        if self.family == "qwen3":
            rows, columns = self._size_of_all(count, height, width)
            return t, rows // self.patch_size, columns // self.patch_size
        most = self.max_pixels
        if self.cap_pixels_per_frame:
            whole = int(self.max_video_tokens * self.factor**2 * 0.9)
            most = max(min(most, whole * self.temporal_patch_size // count), int(self.min_pixels * 1.05))
        still = ImageSettings(
            patch_size=self.patch_size, merge_size=self.merge_size, min_pixels=self.min_pixels, max_pixels=most
        )
        _, rows, columns = grid_thw(width, height, still)
        return t, rows, columns

    def _size_of_all(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width under bounds of all frames together: `smart_resize` of video_processing_qwen3_vl.py."""
        factor, most = self.factor, self.max_pixels
        if self.cap_pixels_per_frame:
            cap = self.max_video_tokens * factor**2
            most = max(min(cap, most // count), int(self.min_pixels * 1.05)) * count
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > _MOST_ASPECT:
            raise SampleError(
                "aspect_ratio", f"{width}x{height} pixels: one side is more than {_MOST_ASPECT} times the other"
            )
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        frames = round(count / self.temporal_patch_size) * self.temporal_patch_size
        if frames * rows * columns > most:
            beta = math.sqrt((count * height * width) / most)
            rows, columns = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif frames * rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (count * height * width))
            rows, columns = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return rows, columns

    def seconds(self, indices: Sequence[int], fps: float) -> list[str]:
        """Returns what stands before each pair of frames, in the family `qwen3` alone: `<0.5 seconds>`."""
        if self.family != "qwen3":
            return []
        copies = self.temporal_patch_size
        padded = [*indices, *[indices[-1]] * (-len(indices) % copies)]
        firsts, lasts = padded[::copies], padded[copies - 1 :: copies]
        return [f"<{(first / fps + last / fps) / 2:.1f} seconds>" for first, last in zip(firsts, lasts, strict=True)]

    def second_per_grid(self, count: int, num_frames: float, fps: float) -> float:
        """Returns the seconds of a step of the grid in time: `second_per_grid_ts` of Qwen2_5_VLProcessor."""
        return self.temporal_patch_size / (count / num_frames * fps)

    def constants(self) -> dict[str, Any]:
        """Returns what a collator must know of videos: how time is shown, the table of values."""
        times = {"tokens_per_second": self.tokens_per_second} if self.family == "qwen2_5" else {}
        return {"video_family": self.family, "video_table": self.table().tolist(), **times}

    def table(self) -> npt.NDArray[np.float32]:
        """Returns float32 [3, 256]: what the processor makes of each uint8 value of each channel.

        Rescaled and normalised at once, as `rescale_and_normalize` of transformers' torchvision backend does.
        """
        import torch

        mean, std = (torch.tensor(each) * (1.0 / self.rescale_factor) for each in (self.image_mean, self.image_std))
        values = torch.arange(256, dtype=torch.float32)[None].expand(3, -1).clone()
        return np.asarray(values.sub_(mean[:, None]).div_(std[:, None]).numpy())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Which frames of a video are asked for, and how large: `fps` within min_frames and max_frames, or `nframes`.

    Of a list of frames all are: `sample_fps` says how far apart they are, `raw_fps` how far by their numbers.
    video_start, video_end: the stretch of a file, in seconds. min_pixels, max_pixels: of a frame. total_pixels: of all,
    where `temporal_patch_size` frames count once.
    """

    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    sample_fps: float | None = None
    raw_fps: float | None = None
    video_start: float | None = None
    video_end: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.given().items())

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, defaults: Sampling) -> Sampling:
        """Returns this with what it leaves open from `defaults`; `nframes` leaves nothing open."""
        return self if self.nframes is not None else replace(defaults, **self.given())

    def stretch(self, num_frames: int, fps: float) -> range:
        """Returns the frames of a stretch: those that begin in it, as `fetch_video` of qwen_vl_utils has them.

        Raises SampleError `segment_past_end` where it ends behind the video, but for a frame or a tenth of a second.
        """
        start_s, end_s, length_s = self.video_start or 0, self.video_end, num_frames / fps
        if max(start_s, end_s or 0) > length_s + max(1 / fps, _SLACK_S):
            raise SampleError("segment_past_end", f"{self}, and the video has {length_s:.2f} s; correct the row")
        last = num_frames - 1 if end_s is None else min(math.floor(end_s * fps), num_frames - 1)
        return range(math.ceil(start_s * fps), last + 1)

    def timed(self, num_frames: int, fps: float) -> tuple[float, float]:
        """Returns the frames of a video and how many of them a second has, as its metadata say to the processor.

        fps: 0 of a list of frames. Without `sample_fps` it is taken for 24 a second, as transformers does; with it the
        metadata are those that `fetch_video` of qwen_vl_utils gives.
        """
        if fps or self.sample_fps is None:
            return num_frames, fps or _FPS_OF_FRAMES
        raw_fps = self.sample_fps if self.raw_fps is None else self.raw_fps
        return num_frames / self.sample_fps * raw_fps, raw_fps

    def check(self, *, is_list: bool) -> None:
        """Raises SampleError `bad_sampling` for what is not asked of a list of frames, or of a file."""
        wrong = [name for name in self.given() if name not in _OF_BOTH and (name in _OF_FRAMES) != is_list]
        if wrong:
            kind = "a list of frames, all of which are shown" if is_list else "a file, which is no list of frames"
            raise SampleError("bad_sampling", f"{', '.join(wrong)} of a video is given beside {kind}; remove it")

    def to_text(self) -> str:
        return json.dumps(self.given(), sort_keys=True)

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Sampling:
        """Returns what the fields of a part say. Raises SampleError `bad_sampling` for what is no such number."""
        values = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        for name, value in values.items():
            kind, most = "a number" if name in _REALS else "an integer", 1e12 if name.endswith("_pixels") else 1e6
            is_number = isinstance(value, int | float if name in _REALS else int) and not isinstance(value, bool)
            if not is_number or not (0 < value < most or (name, value) == ("video_start", 0)):
                raise SampleError("bad_sampling", f"{where}: {name} is {str(value)[:60]!r}, wanted {kind} above 0")
        if values.get("video_start", 0) >= values.get("video_end", math.inf):
            raise SampleError("bad_sampling", f"{where}: video_end is not behind video_start")
        if "raw_fps" in values and "sample_fps" not in values:
            raise SampleError("bad_sampling", f"{where}: raw_fps stands there without sample_fps")
        if "nframes" in values and (others := {"fps", "min_frames", "max_frames"} & {*values}):
            raise SampleError("bad_sampling", f"{where}: nframes stands beside {', '.join(sorted(others))}")
        return cls(**values)


SAMPLING = tuple(f.name for f in fields(Sampling))
"""The fields of a part that say which frames of its video are shown."""
_OF_FRAMES = frozenset({"sample_fps", "raw_fps"})
_OF_BOTH = ("min_pixels", "max_pixels", "total_pixels")
_REALS = ("fps", "video_start", "video_end", *_OF_FRAMES)
_FPS_OF_FRAMES = 24
"""What transformers takes for frames without metadata."""


def video_settings(folder: Path, images: ImageSettings) -> VideoSettings:
    """Returns the settings of the video processor in the folder of an image processor.

    From `video_processor` of processor_config.json, else video_preprocessor_config.json, else, as transformers does,
    from preprocessor_config.json. Raises ConfigError, naming file and field, for what is no video processor of a
    Qwen-VL, and for patches that are other than those of images.
    """
    documents = [(path, document) for path, document in _documents(folder) if document is not None]
    if not documents:
        raise _unusable(f"{folder} holds no video processor, wanted {_FILES[1][0]}")
    family, (path, document) = family_in(folder), documents[0]
    if family is None:
        raise _unusable(
            f"{folder} says neither by processor_class nor by model_type in config.json which Qwen-VL it is of, "
            f"wanted one of {', '.join(_OF_PROCESSOR)}"
        )
    kind = str(document.get("video_processor_type") or _CLASSES[family][0])
    if kind.removesuffix("Fast") not in _CLASSES[family]:
        raise _unusable(f"{path}: video_processor_type is {kind}, wanted {_CLASSES[family][0]} beside its processor")
    for name, wanted in _FIXED.items():
        if document.get(name, wanted) not in (wanted, None, False if wanted is None else wanted):
            raise _unusable(f"{path}: {name} is {json.dumps(document[name])}, wanted {json.dumps(wanted)}")
    size = document.get("size") if isinstance(document.get("size"), dict) else {}
    assert isinstance(size, dict)
    given = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")} | {
        name: value for name, value in document.items() if value is not None
    }
    given["tokens_per_second"] = _model_config(folder).get("vision_config", {}).get("tokens_per_second")
    shown = VideoSettings(family=family, **_DEFAULTS["qwen3" if family == "qwen3" else "qwen2"])
    found = {
        f.name: setting_value(path, f.name, given[f.name], getattr(shown, f.name))
        for f in fields(VideoSettings)
        if f.name != "family" and given.get(f.name) is not None
    }
    made = replace(shown, **found)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        if getattr(made, name) != getattr(images, name):
            raise _unusable(
                f"{path}: {name} is {getattr(made, name)}, that of images {getattr(images, name)}, wanted the same"
            )
    if min(made.min_pixels, made.max_pixels, made.min_frames, made.max_frames) < 1:
        raise _unusable(f"{path}: bounds of pixels and frames are {made}, wanted 1 or more")
    return made


def _documents(folder: Path) -> Iterator[tuple[Path, Any]]:
    for name, key in (*_FILES, _OLD_FILE):
        document = _json(folder / name)
        yield folder / name, (document.get(key) if key else document) or None


def family_in(folder: Path) -> Family | None:
    """Returns which Qwen-VL the model of a folder is, by its processor, else by its config.json; None of any other."""
    names = [_json(folder / name) for name in ("processor_config.json", _FILES[1][0], _OLD_FILE[0])]
    names += [_json(folder / "processor_config.json").get("video_processor") or {}]
    said = {str(each.get(field)) for each in names for field in ("processor_class", "video_processor_type")}
    found = [family for name, family in _OF_PROCESSOR.items() if name in said]
    found = found or [family for name, family in _OF_TYPE.items() if name == _model_config(folder).get("model_type")]
    return found[0] if len({*found}) == 1 else None


def _model_config(folder: Path) -> dict[str, Any]:
    return _json(folder / "config.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise _unusable(f"{path} is no JSON: {err}") from err
    return found if isinstance(found, dict) else {}


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"vision.fps is set for videos, and {why}; correct the folder, or leave vision.fps out", code="FB107"
    )
