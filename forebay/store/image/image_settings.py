"""The settings of a Qwen2-VL image processor, read from its folder without transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from forebay.errors import ConfigError, SampleError

_NESTED, _PLAIN = "processor_config.json", "preprocessor_config.json"
_SPELLINGS = ("Fast", "Pil")
"""What names of processors end in, in documents of different years."""
_QWEN = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
"""Qwen-VL's own; transformers has the first one alone, for all of them."""
_GLM: dict[str, Any] = {"min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15000, "enlarges": True}
_FAMILY: dict[str, dict[str, Any]] = {
    **{name: {} for name in _QWEN},
    "CohereCompassImageProcessor": {},
    "Ernie4_5_VLMoeImageProcessor": {"temporal_patch_size": 1, "max_pixels": 28 * 28 * 6177},
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
}
"""The processors that cut patches as Qwen2-VL's, and their own defaults where these are others. What transformers makes
of their pixels is compared before a build, bit for bit."""

_MAX_ASPECT_RATIO = 200
_MAX_NUMBER = 1e300
"""JSON holds integers that no float can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """The settings of a `Qwen2VLImageProcessor`; the defaults are that class's own (transformers 5)."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    """Bounds of a resized image: this is the processor's `size.shortest_edge`, `max_pixels` its `size.longest_edge`."""
    max_pixels: int = 28 * 28 * 1280
    resample: int = 3
    """A number of `PIL.Image.Resampling`; 3 is bicubic."""
    do_resize: bool = True
    do_convert_rgb: bool = True
    """Always true: `image_settings` refuses other processors, which would treat a transparent colour differently."""
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    enlarges: bool = False
    """Whether an image with a side below `factor` is enlarged before its grid is found. In that family (GLM-4V) the
    bounds count the pixels of all temporal copies; here they are of one."""

    @property
    def factor(self) -> int:
        """The number that both sides of a resized image are multiples of."""
        return self.patch_size * self.merge_size

    @property
    def patch_bytes(self) -> int:
        """The length of a stored row: 3 channels of one patch, one temporal copy."""
        return 3 * self.patch_size**2

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values; `enlarges` where it is so: older caches have no such entry."""
        values = asdict(self)
        if not self.enlarges:
            del values["enlarges"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Self:
        """Returns the settings that `to_json` wrote; ConfigError, KeyError or AttributeError for anything else."""
        where, defaults = Path("image"), {field.name: field.default for field in fields(cls)}
        settings = _checked(
            where, {name: setting_value(where, name, value, defaults[name]) for name, value in doc.items()}
        )
        return cls(**asdict(settings))


def image_settings(folder: Path) -> ImageSettings:
    """Returns the settings of the image processor in a folder.

    From `image_processor` of processor_config.json where that is there, else from preprocessor_config.json; missing
    fields have the class's defaults; `min_pixels` and `max_pixels` win over `size`. All as transformers 5 reads them.

    Raises ConfigError, naming file and field, for what is no Qwen2-VL processor or has a value of another kind.
    """
    return settings_in(*processor_document(folder))


def is_native(document: Mapping[str, Any]) -> bool:
    """Returns whether a processor's document is one of Qwen-VL's own, whose packs are those models', by its type."""
    return _base(document.get("image_processor_type")) in _QWEN


def class_name(document: Mapping[str, Any]) -> str:
    """Returns the name in transformers, without Fast or Pil, of the class of a document."""
    name = _base(document.get("image_processor_type"))
    return _QWEN[0] if name in _QWEN else name


def _base(kind: Any) -> str:
    name = kind if isinstance(kind, str) else ""
    for ending in _SPELLINGS:
        name = name.removesuffix(ending)
    return name


def settings_in(path: Path, document: Mapping[str, Any]) -> ImageSettings:
    """Returns the settings in a processor's document, as `image_settings` does; `path` names it in messages."""
    kind = document.get("image_processor_type")
    if (name := _base(kind)) not in _FAMILY:
        raise ConfigError(
            f"{path}: image_processor_type is {json.dumps(kind)}, wanted {_QWEN[0]} or one that cuts patches as it "
            f"does ({', '.join(sorted({*_FAMILY} - {*_QWEN}))}): point vision.processor at such a model, or set "
            'images = "processor" under [vision]',
            code="FB107",
        )
    own = _FAMILY[name]
    size = document.get("size") or {}
    if not isinstance(size, dict):
        raise ConfigError(f"{path}: size is {json.dumps(size)}, wanted an object of shortest_edge and longest_edge")
    given = {name: value for name, value in document.items() if value is not None and name != "enlarges"}
    if own.get("enlarges"):  # these classes know bounds as `size` alone
        given = {name: value for name, value in given.items() if name not in ("min_pixels", "max_pixels")}
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    values = {**own, **{name: value for name, value in edges.items() if value is not None}, **given}
    wanted = {f.name: f for f in fields(ImageSettings)}
    found = {
        name: setting_value(path, name, values[name], wanted[name].default)
        for name in wanted
        if values.get(name) is not None
    }
    return _of_one_copy(path, _checked(path, found))


def _of_one_copy(path: Path, settings: ImageSettings) -> ImageSettings:
    """Returns the settings with bounds of one temporal copy, where their class counts all copies."""
    copies = settings.temporal_patch_size
    if not settings.enlarges or copies == 1:
        return settings
    if settings.min_pixels % copies or settings.max_pixels % copies:
        raise ConfigError(
            f"{path}: size is {settings.min_pixels} to {settings.max_pixels} pixels, wanted multiples of "
            f'temporal_patch_size {copies}: set images = "processor" under [vision]',
            code="FB107",
        )
    return replace(settings, min_pixels=settings.min_pixels // copies, max_pixels=settings.max_pixels // copies)


def grid_thw(width: int, height: int, settings: ImageSettings) -> tuple[int, int, int]:
    """Returns the grid of patches (1, rows, columns) that an image of this size, as displayed, is resized to.

    Both sides become multiples of patch_size * merge_size, their product lies in [min_pixels, max_pixels] as far as
    that allows, the aspect ratio stays about the same: `smart_resize` of transformers' image_processing_qwen2_vl.py.

    Raises SampleError `aspect_ratio` above 200, and `indivisible_size` where the processor does not resize and a side
    is no multiple.
    """
    factor = settings.factor
    if not settings.do_resize:
        if width % factor or height % factor:
            raise SampleError(
                "indivisible_size",
                f"{width}x{height} pixels are no multiples of {factor} and the processor has do_resize = false: "
                "resize the image or set do_resize",
            )
        return 1, height // settings.patch_size, width // settings.patch_size
    if settings.enlarges and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise SampleError(
            "aspect_ratio",
            f"{width}x{height} pixels: one side is more than {_MAX_ASPECT_RATIO} times the other, which the processor "
            "refuses: crop the image or leave it out",
        )
    # Python's round, to even, and this order of operations: the reference's floats.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > settings.max_pixels:
        beta = math.sqrt((height * width) / settings.max_pixels)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif rows * columns < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (height * width))
        rows = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return 1, rows // settings.patch_size, columns // settings.patch_size


def processor_document(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that defines an image processor, and what it holds; ConfigError for none, and no JSON object."""
    for name in (_NESTED, _PLAIN):
        path = folder / name
        if not path.is_file():
            continue
        try:
            document = json.loads(path.read_bytes())
        except OSError as err:
            raise ConfigError(f"vision.processor: cannot read {path}: {err.strerror}", code="FB107") from err
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"{path} is no JSON: {err}; save the processor again") from err
        if name == _NESTED:
            document = document.get("image_processor") if isinstance(document, dict) else None
            if document is None:
                continue
        if not isinstance(document, dict):
            raise ConfigError(f"{path} holds no JSON object; save the processor again", code="FB107")
        return path, document
    raise ConfigError(
        f"vision.processor: {folder} holds no image processor (no {_PLAIN}, no image_processor in {_NESTED}); "
        "save one there with processor.save_pretrained(folder)",
        code="FB107",
    )


def setting_value(path: Path, name: str, value: Any, default: Any) -> Any:
    """Returns a value of a document as its field has it. Raises ConfigError for another kind than the default's."""
    if isinstance(default, tuple):
        numbers = list(value) if isinstance(value, list) else [value] * 3
        if len(numbers) == 3 and all(_is_number(number) for number in numbers):
            return tuple(float(number) for number in numbers)
    elif isinstance(default, int):  # a truth value, or a number
        if type(value) is type(default):
            return value
    elif _is_number(value):
        return float(value)
    kind = "3 numbers" if isinstance(default, tuple) else type(default).__name__
    raise ConfigError(f"{path}: {name} is {json.dumps(value)}, wanted {kind}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _checked(path: Path, values: dict[str, Any]) -> ImageSettings:
    settings = ImageSettings(**values)
    for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{path}: {name} is {getattr(settings, name)}, wanted 1 or more")
    if not settings.do_convert_rgb:
        raise ConfigError(f"{path}: do_convert_rgb is false, wanted true: only RGB images can be stored")
    if settings.resample not in range(6):
        raise ConfigError(f"{path}: resample is {settings.resample}, wanted 0 to 5 (PIL.Image.Resampling)")
    return settings
