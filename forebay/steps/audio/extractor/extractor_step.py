"""`extractor`: what a feature extractor of transformers makes of a clip alone, in a batch form that a probe finds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.config.pretrained_folder import model_place
from forebay.errors import ConfigError, DecodeError
from forebay.steps.audio.declared import Declared, require_frame
from forebay.steps.audio.extractor.extractor_call import Arrays, OpenExtractor, load_extractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_step
from forebay.steps.audio.extractor.extractor_probe import Probed, probed
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, Fields
from forebay.steps.table import made
from forebay.store.layout import Array

_log = logging.getLogger(__name__)
PROBES: dict[Extractor, Probed] = {}
"""What this process, or the one that sent a step here, has probed. A probe costs up to some seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extractor(Declared):
    """Every output of a folder's feature extractor, by its own name and with its own dtype.

    digest: of the folder's files, never their path. kind: the extractor's class as the folder names it, or the
    model_type by which transformers finds it. rate_hz: of the clips.
    """

    name: ClassVar[str] = "extractor"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    given: ClassVar[frozenset[str]] = frozenset({"digest", "kind", "rate_hz"})

    extractor: str = field(default="", compare=False)
    """Folder with the preprocessor_config.json or processor_config.json of a feature extractor of transformers, or
    a model of the Hub at one commit (`owner/name@COMMIT`); in the key by content."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored values that are floats."""
    leave_out: tuple[str, ...] = ()
    """Outputs of the extractor that are not stored."""
    digest: str
    kind: str
    rate_hz: int
    version: int = 2

    def __post_init__(self) -> None:
        if not self.extractor:
            raise ValueError(
                'features = "extractor" needs extractor = "FOLDER", a folder with a preprocessor_config.json'
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), {f.name: getattr(self, f.name) for f in fields(self)}, PROBES.get(self))

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, folder: Path, rate_hz: int) -> AudioStep:
        """Returns the step of a config's settings; one of ours where it makes the extractor's values.

        folder: of the config, which `extractor` is relative to. Reads the extractor's files, not transformers. Raises
        ConfigError where they define none, or one of another sample rate.
        """
        try:
            path = Path(model_place(str(settings.get("extractor", "")), folder))
        except ConfigError as err:
            raise ConfigError(f"audio.extractor: {err}", code="FB102") from err
        found = ExtractorFolder.read(path)
        step = made(cls, {**settings, "extractor": str(path)}, **cls.facts(found), rate_hz=rate_hz)
        stated = found.document.get("sampling_rate")
        if type(stated) is int and stated != rate_hz:
            raise ConfigError(rate_problem(step.kind or str(path), stated, rate_hz), code="FB121")
        native = None if step.leave_out else cls.native(found, dtype=step.dtype)
        return step if native is None else native

    @classmethod
    def facts(cls, found: ExtractorFolder) -> dict[str, Any]:
        """Returns the fields that a folder says."""
        return {"digest": found.digest, "kind": found.kind or found.model_type}

    @classmethod
    def native(cls, found: ExtractorFolder, *, dtype: Literal["float16", "float32"]) -> AudioStep | None:
        """Returns the step of ours that makes the values of a folder's extractor; None where none does."""
        return native_step(found, dtype=dtype)

    @property
    def made_with(self) -> dict[str, str]:
        return {"transformers": version("transformers")}

    def check_code(self) -> None:
        """Returns if the probe finds nothing wrong; logs where batches are not those of the extractor itself."""
        form = self.batch_form()
        if form.promise.kind == "alone":
            _log.warning(
                "audio.extractor: each clip is stored as %s makes it alone, and beside others it makes another: %s; "
                "docs/vision.md says what that means",
                form.made_by,
                form.promise.why,
            )

    @classmethod
    def completed(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, **({"leave_out": tuple(sorted(settings["leave_out"]))} if "leave_out" in settings else {})}

    def probe(self) -> Probed:
        """Returns what a probe finds of the extractor, once a process. Loads transformers.

        Raises ConfigError where the extractor cannot be loaded, is of another sample rate, or gives what cannot be
        stored.
        """
        if self not in PROBES:
            folder, extractor = self._loaded()
            found = OpenExtractor.of(extractor, processor_class=folder.processor_class, leave_out=self.leave_out)
            if found.sample_rate_hz != self.rate_hz:
                raise ConfigError(rate_problem(found.name, found.sample_rate_hz, self.rate_hz), code="FB121")
            PROBES[self] = probed(found, dtype=self.dtype)
        return PROBES[self]

    def batch_form(self) -> BatchForm:
        return self.probe().form

    def num_frames(self, num_samples: Array) -> Array:
        """Returns about how many frames clips have, int64; exactly where lengths follow the probe's rule."""
        return self.probe().frames(num_samples)

    def size_bytes(self, num_samples: Array) -> int:
        return self.probe().size_bytes(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns every output for each clip, made of that clip alone.

        Raises DecodeError, reason `extractor_failed` for a clip that the extractor does not take or makes another form
        of, `not_finite` where it makes NaN, infinity or what the stored dtype cannot hold, `too_short` where it makes
        no frame.
        """
        form, extractor = self.batch_form(), opened(self)
        return [self._fields(form, extractor.alone(waveform), waveform) for waveform in waveforms]

    def own_batch(self, waveforms: Sequence[Array]) -> Arrays:
        """Returns the batch that the extractor itself makes of clips float32 [num_samples], as its users call it.

        What the extractor raises comes through.
        """
        self.probe()  # it knows the call
        return opened(self).batch(waveforms)

    def _fields(self, form: BatchForm, made: Mapping[str, Array], waveform: Array) -> Fields:
        found: Fields = {}
        if new := sorted(made.keys() - {each.name for each in form.fields}):
            raise _failed(form, waveform, f"gives {', '.join(new)}, which it gave in no clip of the probe")
        for each in form.fields:
            if each.name not in made:
                if each.mask_of is None:
                    raise _failed(form, waveform, f"gives no {each.name}")
                continue
            array = made[each.name]
            if each.mask_of is not None:
                if not (array == 1).all():
                    raise _failed(form, waveform, f"marks padding in {each.name}, where it marked none in the probe")
                continue
            found |= self._stored(form, each, array, waveform)
        require_frame(form, found, waveform)
        return found

    def _stored(self, form: BatchForm, each: FieldForm, array: Array, waveform: Array) -> Fields:
        if each.stored_dtype == "float16" and array.size and float(np.abs(array).max()) > 65_504.0:
            raise DecodeError(
                "not_finite",
                f"{form.made_by} makes {float(np.abs(array).max()):g} in {each.name}, which float16 does not hold; "
                'set audio.dtype = "float32"',
            )
        try:
            return each.stored(array)
        except ValueError as err:
            raise _failed(form, waveform, f"gives another form than in the probe: {err}") from err

    def _loaded(self) -> tuple[ExtractorFolder, Any]:
        folder = ExtractorFolder.read(Path(self.extractor))
        if folder.digest != self.digest:
            raise ConfigError(
                f"audio.extractor: {self.extractor} changed since the command began; run the command again",
                code="FB121",
            )
        return folder, load_extractor(folder)


def rate_problem(name: str, wanted_hz: int, rate_hz: int) -> str:
    """Returns what is wrong where an extractor is of another sample rate than the config's clips."""
    return (
        f"audio.extractor: {name} is defined at {wanted_hz} Hz; sample_rate_hz is {rate_hz}: "
        f"set audio.sample_rate_hz = {wanted_hz}"
    )


def _failed(form: BatchForm, waveform: Array, what: str) -> DecodeError:
    return DecodeError("extractor_failed", f"{form.made_by} {what}, for a clip of {waveform.size} samples")


@lru_cache(maxsize=4)
def opened(step: Extractor) -> OpenExtractor:
    """Returns the extractor of a step; a process keeps the last ones."""
    return OpenExtractor(step._loaded()[1], step.probe().call, step.leave_out)


def _received(kind: type[Extractor], values: dict[str, Any], probe: Probed | None) -> Extractor:
    """Returns a step that was sent to this process, with what its sender had probed."""
    step = kind(**values)
    if probe is not None:
        PROBES.setdefault(step, probe)
    return step
