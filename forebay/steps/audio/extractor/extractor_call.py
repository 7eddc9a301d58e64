"""A feature extractor of transformers as forebay calls it: loaded from a document, clips to named arrays."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import math
import random
import re
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from forebay.errors import ConfigError, DecodeError
from forebay.pretrained import from_document, offline
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, refused
from forebay.store.layout import Array
from forebay.visible import an

Arrays = dict[str, Array]
_log = logging.getLogger(__name__)
_OURS = ("sampling_rate", "return_tensors", "device")
"""What forebay says itself when it calls an extractor."""
_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError)
"""What an extractor raises for a clip that it cannot take. What is no property of the clip comes through."""
_KINDS = "fiub"
_SUFFIX = "FeatureExtractor"
"""How the names of these classes end."""
_ONE_AT_A_TIME = threading.RLock()
"""Nobody promises that an extractor may be called by several threads, as those of an uncached loader."""


class OutputError(ConfigError):
    """An output of an extractor cannot be stored. name: of the output. what: it is."""

    code = "FB122"

    def __init__(
        self, extractor: str, name: str, what: str, advice: str = "that cannot be stored; leave it out"
    ) -> None:
        super().__init__(extractor, name, what, advice)
        self.name, self.what = name, what

    @property
    def is_drawn(self) -> bool:
        """Whether the output moves when it is asked for again; any other one cannot be stored at all."""
        return self.what.startswith(AGAIN)

    def __str__(self) -> str:
        extractor, name, what, advice = self.args
        return f'audio.extractor: {extractor} gives {name}, {what}; {advice}: audio.leave_out = ["{name}"]'


@dataclass(frozen=True, slots=True)
class Call:
    """How an extractor is called: with these options, for arrays ("np") or tensors ("pt")."""

    options: Mapping[str, Any]
    tensors: str


@dataclass(frozen=True, slots=True)
class OpenExtractor:
    """An extractor and the call that its users make. leave_out: outputs that are not kept."""

    extractor: Any
    call: Call
    leave_out: tuple[str, ...] = ()
    watched: list[int] = field(default_factory=list, compare=False)
    """The samples of the shortest and the longest clip over which nothing was drawn by chance. Extractors draw for all
    clips, or for long ones: what is between these two is not watched again, which would cost 0.3 ms a clip."""

    @classmethod
    def of(cls, extractor: Any, *, processor_class: str = "", leave_out: Sequence[str] = ()) -> Self:
        """Returns an extractor with the call of the processor that it belongs to, or with padding where it asks for it.

        Raises ConfigError where the extractor takes no batch of two clips, or has no sample rate.
        """
        name, rate = type(extractor).__name__, getattr(extractor, "sampling_rate", None)
        if not isinstance(rate, int) or rate < 1:
            raise ConfigError(
                f"audio.extractor: {name} has the sampling_rate {rate!r}, wanted an integer", code="FB121"
            )
        options = _options_of(extractor, processor_class)
        pair = [np.zeros(rate // 2, np.float32), np.zeros(rate, np.float32)]
        problem: Exception | None = None
        for call in (
            Call({**options, **more}, tensors) for more in ({}, {"padding": True}) for tensors in ("np", "pt")
        ):
            made = cls(extractor, call, tuple(leave_out))
            try:
                output = made._called(pair)
                made._arrays(output)
            except OutputError as err:
                if err.what != RAGGED:
                    raise
                problem = problem or err
            except _FAILURES as err:
                problem = problem or err
            else:
                made._require_named(output)
                return made
        raise ConfigError(
            f"audio.extractor: {name} takes no batch of two clips of silence: {type(problem).__name__}: {problem}",
            code="FB121",
        ) from problem

    @property
    def name(self) -> str:
        """The extractor's class, or that of the processor whose part it is."""
        return str(getattr(self.extractor, "made_by", type(self.extractor).__name__))

    @property
    def sample_rate_hz(self) -> int:
        """The sample rate of the clips that the extractor takes."""
        return int(self.extractor.sampling_rate)

    def batch(self, clips: Sequence[Array]) -> Arrays:
        """Returns the extractor's own batch of clips, float32 [num_samples] each: arrays [num_clips, ...] by name.

        Raises OutputError for an output that is no such array; what the extractor raises comes through.
        """
        return self._arrays(self._called(clips))

    def _called(self, clips: Sequence[Array]) -> Mapping[str, Any]:
        # NaN is found and named with its clip; numpy's warning names neither, and silence of the probe has it too.
        with _ONE_AT_A_TIME, offline(), np.errstate(divide="ignore", invalid="ignore"):
            output: Mapping[str, Any] = self.extractor(
                [np.array(clip) for clip in clips],  # its own copies: some extractors write into what they are given
                sampling_rate=self.sample_rate_hz,
                return_tensors=self.call.tensors,
                **self.call.options,
            )
        return output

    def _arrays(self, output: Mapping[str, Any]) -> Arrays:
        return {name: self._array(name, value) for name, value in output.items() if name not in self.leave_out}

    def alone(self, clip: Array) -> Arrays:
        """Returns what the extractor makes of one clip, without the axis of the batch.

        Raises DecodeError `extractor_failed` for a clip that the extractor does not take, or cuts into several, and
        `not_finite` where it makes NaN or infinity of it.
        """
        is_watched = not self.watched or not self.watched[0] <= clip.size <= self.watched[-1]
        before = _random_states() if is_watched else ()
        try:
            output = self.batch([clip])
            if is_watched and before != _random_states():
                self.require_same(output, self.batch([clip]), f"{clip.size / self.sample_rate_hz:.1f} s")
            elif is_watched:
                self.watched[:] = [min((*self.watched, clip.size)), max((*self.watched, clip.size))]
        except OutputError:
            raise
        except _FAILURES as err:
            if "allocate memory" in str(err):
                raise MemoryError(str(err)) from err
            raise DecodeError(
                "extractor_failed", f"{self.name} raises for {clip.size} samples: {type(err).__name__}: {err}"[:600]
            ) from err
        for name, array in output.items():
            if array.ndim == 0 or len(array) != 1:
                raise DecodeError(
                    "extractor_failed",
                    f"{self.name} gives {name} {list(array.shape)} for one clip of "
                    f"{clip.size / self.sample_rate_hz:.1f} s: it cuts long clips into pieces; limit them: "
                    "source.max_duration_s",
                )
            if array.dtype.kind == "f" and not _is_finite(array):
                raise DecodeError(
                    "not_finite", f"{self.name} makes NaN or infinity in {name} of a clip of {clip.size} samples"
                )
        return {name: array[0] for name, array in output.items()}

    def require_same(self, one: Arrays, other: Arrays, length: str) -> None:
        """Raises ConfigError where an extractor gave other values when it was asked again. length: of the clip."""
        moved = [name for name in one if not np.array_equal(one[name], other.get(name, ()), equal_nan=True)]
        if moved:
            raise OutputError(
                self.name,
                moved[0],
                f"{AGAIN} for the same clip of {length}",
                "a cache holds values that stay: switch the randomness off in the folder's preprocessor_config.json "
                "(dither = 0.0, another truncation, and the like), take only shorter clips by source.max_duration_s "
                "where it comes with long ones, or leave the output out",
            )

    def _require_named(self, output: Mapping[str, Any]) -> None:
        """Raises ConfigError where an output is to be left out that the extractor does not give, or all are."""
        if unknown := sorted(set(self.leave_out).difference(output)):
            raise ConfigError(
                f"audio.leave_out names {unknown[0]!r}, and {self.name} gives {', '.join(output)}; take it out",
                code="FB122",
            )
        if not set(output).difference(self.leave_out):
            raise ConfigError(
                f"audio.leave_out names all that {self.name} gives: {', '.join(output)}; keep what the model reads",
                code="FB122",
            )

    def _array(self, name: str, value: Any) -> Array:
        array = _as_array(value)
        if isinstance(array, str):
            raise OutputError(self.name, name, array)
        return array


def _is_finite(values: Array) -> bool:
    # One fast read, into which NaN and infinity spread.
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(values.reshape(-1), values.reshape(-1)))
    return math.isfinite(total) or bool(np.isfinite(values).all())


RAGGED = "arrays of different shapes"
AGAIN = "other values when it is asked again"


def _random_states() -> tuple[object, ...]:
    """Returns the states of the generators that code draws from without asking: another state, something was drawn."""
    state = np.random.get_state(legacy=False)["state"]
    states = [random.getstate(), state["key"].tobytes(), state["pos"]]
    if "torch" in sys.modules:
        import torch

        states.append(torch.random.get_rng_state().numpy().tobytes())
    return tuple(states)


def _as_array(value: Any) -> Array | str:
    """Returns an output as an array of a dtype that is stored, or what it is instead."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if not isinstance(value, (np.ndarray, list, tuple)):
        return an(type(value).__name__)
    try:
        array = np.asarray(value)
    except ValueError:
        return RAGGED
    if array.dtype == object and array.ndim == 1 and all(isinstance(item, (np.ndarray, list)) for item in array):
        return RAGGED
    if array.dtype.kind not in _KINDS or array.dtype.name in ("uint16", "uint32", "uint64"):
        return f"{an(type(value).__name__)} of {type(array.flat[0]).__name__ if array.size else 'nothing'}"
    return np.ascontiguousarray(array, np.float32) if array.dtype.kind == "f" else np.ascontiguousarray(array)


def load_extractor(folder: ExtractorFolder) -> Any:
    """Returns transformers' extractor of a folder's document, made without another look at the folder.

    Raises ConfigError for a class that transformers does not have (with the nearest name), one that needs a package
    that is not installed, and settings that the class does not take.
    """
    import transformers

    kind = folder.kind or _kind_of(folder)
    try:
        cls = _known(folder, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of filter banks; they are as the folder wants them
            return from_document(cls, folder.document)
    except ImportError as err:
        raise _needs(folder, kind, err) from err
    except ConfigError:  # it says already what is wrong
        raise
    except _FAILURES as err:
        raise refused(
            folder.path, f"does not load as {an(kind)} (transformers {transformers.__version__}): {err!r}"
        ) from err


def _known(folder: ExtractorFolder, kind: str) -> Any:
    import transformers

    cls = getattr(transformers, kind, None) if kind.endswith(_SUFFIX) else None
    if not hasattr(cls, "from_dict"):
        # All names end alike, so that only what stands before says which one is near.
        names = [name.removesuffix(_SUFFIX) for name in dir(transformers) if name.endswith(_SUFFIX)]
        near = difflib.get_close_matches(kind.removesuffix(_SUFFIX), names, n=1)
        raise refused(
            folder.path,
            f"feature_extractor_type is {kind!r}, which transformers {transformers.__version__} does not have"
            + (f"; did you mean {near[0]}{_SUFFIX}?" if near else "; take a folder whose class it has"),
        )
    return cls


def _kind_of(folder: ExtractorFolder) -> str:
    """Returns the class that transformers takes for the model_type of config.json."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES as NAMES

    found = NAMES.get(folder.model_type)
    if found is None:
        raise refused(
            folder.path,
            f"it names no feature_extractor_type, and no config.json beside it has a model_type that says it "
            f"({folder.model_type or 'none'}); save the extractor again with extractor.save_pretrained(folder)",
        )
    return str(found)


def _needs(folder: ExtractorFolder, kind: str, err: ImportError) -> ConfigError:
    named = re.search(r"requires (?:the )?([\w.-]+) library", str(err)) or re.search(r"named '([\w.]+)'", str(err))
    package = named.group(1) if named else str(err).strip().split("\n")[0]
    return refused(
        folder.path,
        f"{kind} needs the package {package}, which is not installed; install it beside forebay, or take features of "
        "forebay's own",
    )


def _options_of(extractor: Any, processor_class: str) -> dict[str, Any]:
    """Returns what the processor of an extractor says when it calls it, as far as the extractor has such options.

    The processor's class is the one that the folder names, else the one that is called like the extractor.
    """
    name = processor_class or type(extractor).__name__.replace("FeatureExtractor", "Processor")
    try:
        said = getattr(getattr(importlib.import_module("transformers"), name, None), "audio_kwargs", None)
    except ImportError:  # of a class whose package is not installed
        said = None
    taken = set(inspect.signature(type(extractor).__call__).parameters).difference(_OURS)
    return {option: value for option, value in said.items() if option in taken} if isinstance(said, dict) else {}
