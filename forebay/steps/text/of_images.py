"""What the text beside images is made by: conversations, captions, labels or nothing, of a config with `[vision]`.

A text shard is made without pixels: what a step needs to know of an image is its size, which its header says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from forebay.steps.form import BatchForm
from forebay.steps.step import Step
from forebay.store.layout import Array, FieldSpec

Size = tuple[int, int]
"""(width, height) of an image as displayed, in pixels of its file."""


class ImagesTextEncoder(Protocol):
    """What writes the text of a row as fields. A worker keeps the one of its step."""

    @property
    def constants(self) -> dict[str, Any]:
        """What a cache says of all samples: `prompt` (the name of the step), and `text_form` where there are fields."""
        ...

    def encode(self, text: str, sizes: Sequence[Size], *, sample_id: str) -> dict[str, Array]:
        """Returns the fields of a row, as `ImagesText.fields` says. Raises SampleError for a row of no use.

        text: of the row: a conversation in canonical form (JSON), a caption or a label. sizes: of its images in order.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesText(Step):
    """Texts beside images whose cache has `features = "images"`. A new one has `fields` and `encoder`.

    It stands in the table `OF_IMAGES` by the name that `text.prompt` has for it. given: of these fields, which a recipe
    gives to a step that declares them: `tokenizer` and `processor`, digests of the files in the folders of
    `text.tokenizer` and `vision.processor`; `tokenizer_folder` and `processor_folder`, their paths (str), which are no
    part of the identity: `field(compare=False)`. needs_images: how many images a row must have; None: any number.
    """

    of_images: ClassVar[bool] = True
    needs_images: ClassVar[int | None] = None

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the tensor fields that `encode` makes, all of the group "text"."""
        raise NotImplementedError

    def fields_of(self, form: BatchForm | None) -> tuple[FieldSpec, ...]:
        """Returns `fields` where the form that the encoder declares is known already: nothing is loaded.

        A step that stores more than its form says, for example `label_mask`, adds that here.
        form: `text_form` of the encoder's constants; None: it has none.
        """
        return () if form is None else form.specs("text")

    def encoder(self) -> ImagesTextEncoder:
        """Returns what writes texts: it loads what that needs. Called once in a worker, for each step."""
        raise NotImplementedError
