"""`declared`: features whose batch form the cache itself declares, whatever made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from forebay.errors import ConfigError, DecodeError
from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Stored
from forebay.store.layout import Array, FieldSpec, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared(AudioStep):
    """A step that says in a `BatchForm` what it makes; a cache keeps the form, and reading needs nothing else.

    A step of this kind has `batch_form`, `num_frames` and `make`.
    """

    name: ClassVar[str] = "declared"
    stored_as: ClassVar[str] = "declared"
    sample_rate_hz: ClassVar[int | None] = None

    def batch_form(self) -> BatchForm:
        """Returns the form of what `make` gives. It may load what makes it: never ask where only a key is wanted."""
        raise NotImplementedError

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the form, the one that frames are counted by first."""
        form = self.batch_form()
        specs = form.specs()
        main = form.main.name
        return tuple(sorted(specs, key=lambda spec: spec.name != main))

    @property
    def constants(self) -> dict[str, Any]:
        return {"n_mels": None, "form": self.batch_form().to_json()}

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form that the cache declares. Raises ConfigError where it is none."""
        return form_of(stored, "form", group="audio")


def require_frame(form: BatchForm, stored: Mapping[str, Array], clip: Array) -> None:
    """Returns where a clip has a frame of the field that frames are counted by.

    Raises DecodeError, reason `too_short`, where it has none: in a batch it would be padding alone.
    """
    if form.main.grows and not len(stored[form.main.name]):
        raise DecodeError(
            "too_short",
            f"{form.made_by} makes no frame of {form.main.name} of a clip of {clip.size} samples: raise min_duration_s",
        )


def form_of(stored: Stored, name: str, *, group: Group | None = None) -> BatchForm:
    """Returns the form that a constant of a cache holds. Raises ConfigError where it holds none.

    group: whose fields must be on disk as the form says. None: who opened the cache has compared them.
    """
    try:
        form = BatchForm.from_json(stored.constant(name))
        for wanted in form.specs(group) if group is not None else ():
            if stored.fields.get(wanted.name) != wanted:
                raise ValueError(
                    f"the field {wanted.name} is {stored.fields.get(wanted.name)}, the form wants {wanted}"
                )
        return form
    except ValueError as err:
        raise ConfigError(
            f"{stored.name}: its metadata declares no form of batches that forebay writes: {err}; "
            "rebuild it: forebay preprocess"
        ) from err


def interpolated(lengths: Sequence[tuple[int, int]], num_samples: Array) -> Array:
    """Returns about how many frames clips have, int64, by a line through (samples, frames) of two clips.

    An estimate: what is stored is counted.
    """
    (first, few), (last, many) = lengths
    slope = (many - few) / max(last - first, 1)
    return np.maximum(np.round(few + (num_samples - first) * slope), 0).astype(np.int64)
