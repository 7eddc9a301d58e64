"""Values that forebay stores of a foreign class: by its own public functions, from a folder, as by a user's config."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from benchmarks.zoo.classes import CannotError, quiet
from forebay.errors import ConfigError
from forebay.steps.audio.extractor.extractor_call import OpenExtractor, load_extractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_step
from forebay.steps.audio.extractor.extractor_probe import probed
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.processor_step import Processed
from forebay.store.image.image_settings import is_native, processor_document
from forebay.store.layout import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """A form, and what makes the arrays that it stores of one clip or image. left_out: outputs that a config names."""

    form: BatchForm
    make: Callable[[Any], Mapping[str, Array]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the class's call, beside what every call says."""
    left_out: tuple[str, ...] = ()
    native: str = ""
    """What forebay uses instead for a folder of these settings: a step of its own."""

    @property
    def nests(self) -> bool:
        """Whether all images of a sample are one row of a batch."""
        return any(each.join == "nest" for each in self.form.fields)


def our_extractor(folder: Path, *, dtype: Literal["float16", "float32"]) -> Ours:
    """Returns how forebay stores an extractor's outputs. Raises CannotError with its message if it refuses the folder.

    What a message says to leave out is left out, as a user would.
    """

    def opened(leave_out: tuple[str, ...]) -> Ours:
        read = ExtractorFolder.read(folder)
        found = OpenExtractor.of(load_extractor(read), processor_class=read.processor_class, leave_out=leave_out)
        form = probed(found, dtype=dtype).form
        step = native_step(read, dtype=dtype)
        native = "" if step is None else f'`features = "{step.name}"`'
        return Ours(form=form, make=found.alone, options=found.call.options, native=native)

    return _without_what_is_refused(opened, folder=folder)


def our_processor(folder: Path) -> Ours:
    """Returns how forebay stores an image processor's outputs; as `our_extractor`."""

    def opened(leave_out: tuple[str, ...]) -> Ours:
        found = Processed(processor="0" * 32, folder=str(folder), leave_out=leave_out).opened()

        def make(image: Image.Image) -> Mapping[str, Array]:
            file = io.BytesIO()
            image.save(file, "PNG")
            with quiet():
                return found.make(file.getvalue(), sample_id="image")

        _, document = processor_document(folder)
        return Ours(form=found.form, make=make, native='`images = "patches"`' if is_native(document) else "")

    return _without_what_is_refused(opened, folder=folder)


def _without_what_is_refused(opened: Callable[[tuple[str, ...]], Ours], *, folder: Path) -> Ours:
    left_out: tuple[str, ...] = ()
    while True:
        try:
            with quiet():
                return replace(opened(left_out), left_out=left_out)
        except ConfigError as err:
            named = re.search(r'leave_out = \["(\w+)"\]', str(err))
            if named is None or named[1] in left_out:
                said = str(err).replace(str(folder), "FOLDER")  # another one in each run
                raise CannotError(f"forebay: {said}") from err
            left_out = (*left_out, named[1])
