"""`processor`: images as any image processor of transformers makes them, codes and a table of values where it can."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from forebay.config.code import facts_of
from forebay.config.tree import Config, LoaderConfig
from forebay.errors import ConfigError, SampleError
from forebay.spans import DECODE, PATCHES, span
from forebay.steps.audio.declared import form_of
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.processor.codes import Encoder, NotInTable
from forebay.steps.image.processor.processor_call import NoArrayError, Output, array_of, ask
from forebay.steps.image.processor.whole import image_processor_of
from forebay.steps.image.video_step import ShowsVideos
from forebay.steps.step import Stored
from forebay.steps.table import unknown
from forebay.store.image.codec import decode_image
from forebay.store.image.stored_items import FEATURES
from forebay.store.layout import Array

if TYPE_CHECKING:
    from PIL.Image import Image


Size = tuple[int, int]
"""Width and height of an image as displayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processed(ShowsVideos):
    """The outputs of a processor for one image alone. `processor` is the digest of its files, `folder` their place."""

    name: ClassVar[str] = "processor"
    given: ClassVar[frozenset[str]] = ShowsVideos.given | {"folder"}
    later: ClassVar[frozenset[str]] = ShowsVideos.later | {"sound"}
    stored_as: ClassVar[str] = FEATURES
    axes: ClassVar[dict[str, str | int]] = {"image_grid_thw": 1}
    apart: ClassVar[str] = "give the processor a fixed size"
    code: ClassVar[str | None] = "FB125"
    fills: ClassVar[bool] = False
    plan: ClassVar[str] = "batch_size = 32"
    is_of_transformers: ClassVar[bool] = True

    folder: str = field(default="", compare=False)
    table: bool = True
    """Whether floats of which a channel takes few values are stored as codes of one or two bytes, and a table."""
    leave_out: tuple[str, ...] = ()
    """Outputs of the processor that are not stored: what is no array, and what the model does not need."""
    sound: bool = False
    """Whether the sound of videos is heard: it is a clip of the conversation, whose tokens alternate with those of the
    frames as the processor writes them. Needs `fps` and `[audio]`."""
    version: int = 2

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form that the cache declares. Raises ConfigError where it is none.

        Beside a conversation images have the outputs that the model's whole processor hands on.
        """
        form, names = form_of(stored, "form"), stored.get("image_outputs")
        if not isinstance(names, list):
            return form
        kept = tuple(field for field in form.fields if field.name in names or field.mask_of in names)
        if not any(field.is_stored for field in kept):
            raise ConfigError(
                f"{stored.name}: image_outputs are {names}, and its form has none of them; rebuild it: "
                "forebay preprocess",
                code="FB125",
            )
        return replace(form, fields=kept)

    @classmethod
    def no_prompt(cls, prompt: str, prompts: Mapping[str, Any]) -> str:
        return f'text.prompt is "{prompt}", with images of a processor {unknown(prompts, prompt)}'

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what is not for arrays of a processor: codecs of patches, packs, seconds, settings of packs."""
        vision, plan, loader, found = config.vision, config.plan, config.loader, []
        is_alone = config.audio is None or "audio" not in facts_of(config).lists  # clips that are listed have packs
        if vision is not None and vision.codec not in ("raw", "zstd"):
            found.append(
                f'vision.codec is "{vision.codec}", which holds patches alone; images of a processor are "raw" or '
                '"zstd"'
            )
        if plan is not None and plan.kind == "pack" and is_alone:
            found.append(
                'plan.kind is "pack", wanted "bucket" or "window": packs are of patches, and images of a processor '
                'stand in batches, for example [plan] kind = "bucket" with batch_size = 32'
            )
        elif plan is not None and plan.kind == "pack" and vision is not None and vision.settings.get("fps"):
            found.append(
                'plan.kind is "pack" and vision.fps asks for videos, whose positions beside clips packs do not have; '
                'set plan.kind = "bucket" with batch_size, or leave vision.fps out'
            )
        elif plan is not None and plan.kind != "pack" and plan.batch_seconds is not None and config.audio is None:
            found.append("plan.batch_seconds is of audio, and images have no seconds; give plan.batch_size")
        default = LoaderConfig()
        if loader.varlen != default.varlen and is_alone:
            found.append("loader.varlen is of packs of patches; leave it out")
        if loader.pixels != default.pixels:
            found.append(
                f'loader.pixels is "{loader.pixels}" and is of patches; loader.dtype is that of what a processor '
                "gives, and make_loader(device=...) copies codes and expands them there; leave it out"
            )
        if (
            vision is not None
            and vision.settings.get("sound")
            and (config.audio is None or not vision.settings.get("fps"))
        ):
            found.append("vision.sound is of the sound of videos; set vision.fps, and [audio] for the clips that it is")
        return [*found, *super(Processed, cls).contradictions(config)]

    def opened(self, form: BatchForm | None = None) -> OpenProcessor:
        """Returns the processor, loaded; a process does that once. Raises ConfigError.

        form: what a probe found, in whatever process. None: this process probes, which takes up to some seconds.
        """
        if form is None:
            return _opened(self, self.folder)
        return OpenProcessor(self, _loaded(self, self.folder), form=form)


class OpenProcessor:
    """A processor of transformers and the form of what it gives."""

    def __init__(self, step: Processed, processor: Any, *, form: BatchForm) -> None:
        """Takes an image processor and its form, as `probe` found it."""
        self.form = form
        self._step, self._processor = step, processor
        self._encoders = {stored.name: Encoder(stored.table) for stored in form.stored if stored.table is not None}

    def __reduce__(self) -> Any:
        # A worker loads the processor and takes the form as it is: a probe takes seconds where images become large.
        return _again, (self._step, self._step.folder, self.form)

    def make(self, data: bytes, *, sample_id: str, size: Size | None = None) -> dict[str, Array]:
        """Returns the arrays of an encoded image by the name of the field, codes where there is a table.

        size: of the image as its header says, by which texts were written.

        Raises SampleError for an image that cannot be decoded, or that the processor refuses; ConfigError where the
        processor gives what is not of the form that was found.
        """
        with span(DECODE):
            image = decode_image(data, sample_id=sample_id, **self._step.decoding)
            require_size(image, size, sample_id=sample_id)
        with span(PATCHES):
            try:
                answer = ask(self._processor, [image])
            except Exception as err:  # whatever a foreign class raises of an image
                said = " ".join(str(err).split())
                raise SampleError(
                    "refused_image",
                    f"{self.form.made_by} does not take {image.width}x{image.height} pixels: {type(err).__name__}: "
                    f"{said:.300}",
                ) from err
            if new := sorted(answer.keys() - {field.name for field in self.form.fields} - {*self._step.leave_out}):
                raise ConfigError(
                    f"{sample_id}: {self.form.made_by} gives {', '.join(new)}, as for no image of the probe; "
                    "leave the image out, or the output: leave_out under [vision]",
                    code="FB142",
                )
            return {stored.name: self._array(stored, answer, sample_id) for stored in self.form.stored}

    def _array(self, stored: FieldForm, answer: Mapping[str, Output | NoArrayError], sample_id: str) -> Array:
        found = answer.get(stored.name)
        if found is None and stored.join == "cat":
            # An output that the processor gives of some images alone: of this one it has no rows.
            found = np.empty([length or 0 for length in stored.shape], stored.dtype)
        if not isinstance(found, np.ndarray) or (found.ndim and stored.join != "cat" and len(found) != 1):
            shown = list(found.shape) if isinstance(found, np.ndarray) else "no array"
            raise self._other(stored, sample_id, f"{shown} for one image")
        array = array_of(found, stored.join)
        if not stored.fits(array.shape) or array.dtype.name != stored.dtype:
            raise self._other(stored, sample_id, f"{array.dtype.name} {list(array.shape)}")
        if stored.table is None:
            return array
        try:
            return self._encoders[stored.name].codes(array)
        except NotInTable as err:
            raise ConfigError(
                f"{sample_id}: {self.form.made_by} gives {stored.name} of {err.value!r} in channel {err.channel}, "
                f"which is none of the {stored.table.values.shape[1]} values that the probe found; "
                "set table = false under [vision] to store floats",
                code="FB124",
            ) from err

    def _other(self, stored: FieldForm, sample_id: str, found: str) -> ConfigError:
        wanted = [("n" if length is None else length) for length in stored.shape]
        return ConfigError(
            f"{sample_id}: {self.form.made_by} gives {stored.name} as {found}, the probe found {stored.dtype} "
            f'{wanted}; leave the image out, or the output: leave_out = ["{stored.name}"] under [vision]',
            code="FB124",
        )


def require_size(image: Image, size: Size | None, *, sample_id: str) -> None:
    """Raises SampleError where a decoded image has another size than its header says."""
    if size is not None and image.size != size:
        raise SampleError(
            "unreadable_image",
            f"{sample_id}: its header gives {size[0]}x{size[1]} pixels as displayed, its pixels are "
            f"{image.width}x{image.height}; save the image again",
        )


@functools.lru_cache(maxsize=4)
def _loaded(step: Processed, folder: str) -> Any:  # noqa: ARG001  its digest is that of the folder's files
    return image_processor_of(Path(folder))


@functools.lru_cache(maxsize=4)
def _opened(step: Processed, folder: str) -> OpenProcessor:
    from forebay.steps.image.processor.processor_probe import probe  # with it comes torch, which no key needs

    processor = _loaded(step, folder)
    return OpenProcessor(step, processor, form=probe(processor, leave_out=step.leave_out, table=step.table))


_pickled: dict[tuple[Processed, str], OpenProcessor] = {}
"""Of this process, where it got them from another one: tasks that bring the same processor share it."""


def _again(step: Processed, folder: str, form: BatchForm) -> OpenProcessor:
    if (step, folder) not in _pickled:
        _pickled.clear()
        _pickled[step, folder] = step.opened(form)
    return _pickled[step, folder]
