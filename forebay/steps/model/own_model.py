"""`folder = "file.py:Class"`: a class of the user as a model, with `allow_code = true` under `[run]`.

    class Voice:
        version = 1                      # an integer; another number is another key
        files = ["voice.safetensors"]    # beside the file, in the key by content; may be left out
        fields = {                       # as those of a class of `audio.features`; a shape of [] is a column
            "voice": {"dtype": "float32", "shape": [192]},
            "noise": {"dtype": "float32", "shape": []},
        }

        def prepare(self, sample): ...   # {"waveform": float32 [n]}, {"image": uint8 [h, w, 3]} or {"text": str};
                                         # with `size` the image is resized and cropped to its target;
                                         # where it takes an earlier section: the fields of that, as they are stored
        def forward(self, batch): ...    # a list of what `prepare` gave, to a dict of an array a sample for each field

`args` are given to the class by name when it is made, and where its `__init__` has a parameter `device`, that: "cpu" or
"cuda:0". The `forward` of such a class runs in the process of a device, if there is one. Nothing here imports the file
before values are made; `version` and `files` are read as they are written in the class's body.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from forebay.config.code import source_of
from forebay.errors import BuildError
from forebay.steps import run_code
from forebay.steps.audio.own_class import forms_declared
from forebay.steps.audio.own_probe import files_read
from forebay.steps.audio.own_step import unlisted_error, written_facts
from forebay.steps.form import FieldForm
from forebay.steps.form_values import shown_shape
from forebay.steps.model.model_step import CODE, CPU, ModelStep, code_of, is_out_of_memory, own_digest
from forebay.store.layout import Array

_FULL_SCALE = np.float32(1 << 15)
_ONE_AT_A_TIME = threading.RLock()
"""Threads of an uncached loader share an instance, and users write for one thread."""
_RUNNING: set[int] = set()
"""The threads that run code of the user now."""


@contextlib.contextmanager
def _running() -> Iterator[None]:
    with _ONE_AT_A_TIME:
        _RUNNING.add(threading.get_ident())
        try:
            yield
        finally:
            _RUNNING.discard(threading.get_ident())


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A class of the user at work. forms: of what it gives. numbers: the dtypes of its fields of shape [].

    unlisted: files that it has read and that no key knows. device: what it was told to run on, None: it does not ask.
    """

    step: ModelStep
    own: Any
    forms: tuple[FieldForm, ...]
    numbers: Mapping[str, str]
    unlisted: set[str]
    device: str | None

    @classmethod
    def of(cls, step: ModelStep, device: str = CPU) -> Self:
        """Returns the class of a step, made with its arguments.

        Raises ConfigError where the file is another one now, where its code raises, or where it declares no fields.
        """
        path, name = code_of(step.folder)
        if (found := own_digest(path, name, path.parent)) != step.digest:
            raise CODE.refused(f"{path} has changed: it was {step.digest[:16]} and is {found[:16]}; run it again")
        content = source_of(path, path.parent, CODE)
        listed = [path, *(path.parent / file for file in written_facts(content, path, name, CODE)[1])]
        unlisted = files_read(path.parent, listed, lambda: threading.get_ident() in _RUNNING)
        try:
            with _running():
                own_class = run_code.loaded(content, str(path), name, what="class")
            made = f"made with args = {step.args} it raised"
            with _running(), run_code.refusing(lambda said: ValueError(f"{made} {said}")):
                own, told = _instance(own_class, json.loads(step.args), device)
                declared = {field: dict(given) for field, given in own.fields.items()}
            is_number = {field: given.get("shape") in ([], ()) for field, given in declared.items()}
            numbers = {field: str(given.get("dtype")) for field, given in declared.items() if is_number[field]}
            if unknown := {*numbers.values()} - {"float32", "int64"}:
                raise ValueError(f"fields of shape [] are {min(unknown)}, wanted float32 or int64")
            rest = {field: given for field, given in declared.items() if field not in numbers}
            has_shapes = step.target is not None and step.target.shapes is not None
            forms = forms_declared(rest, step.dtype, most=1 + (step.target is not None)) if rest or not numbers else ()
            if has_shapes and (not forms or forms[0].shape[1:] != (None, None)):
                raise ValueError("with shapes its first field has the shape [channels, None, None]")
        except (run_code.CodeError, ValueError) as err:
            raise CODE.refused(f"{path}:{name}: {err}; see docs/model-steps.md") from err
        return cls(step, own, forms, numbers, unlisted, told)

    @property
    def made_by(self) -> str:
        """The class."""
        return type(self.own).__name__

    @property
    def machine(self) -> dict[str, str]:
        """See `OpenModel`."""
        from forebay.steps.model.open_model import machine_of  # not at import: keys are made without torch

        return machine_of(self.device or CPU)

    @property
    def batch_size(self) -> int:
        """Samples that the class is given at once."""
        return self.step.batch_of(self.step.family())

    def declared(self, first: Mapping[str, Array]) -> tuple[tuple[FieldForm, ...], Mapping[str, str]]:  # noqa: ARG002
        """Returns the forms of fields, and the dtypes of those that are one number. first: of a sample alone."""
        return self.forms, self.numbers

    def prepared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `prepare` gives of a sample, or why it failed."""
        if "failure" in values:
            return dict(values)
        sample = {name: values[name] for name in ("waveform", "image", "text") if name in values}
        if "x" in values:  # of `CroppedForm`
            sample["image"] = values["x"].transpose(1, 2, 0)
        if "taken" in values:
            sample = values["taken"]
        elif "waveform" in sample:
            clip = sample["waveform"]
            sample["waveform"] = clip / _FULL_SCALE if clip.dtype == np.int16 else np.array(clip)
        try:
            with _running(), run_code.refusing(ValueError):
                return {"prepared": self.own.prepare(sample)}
        except ValueError as err:
            message = f"model.{self.step.label}: {self.made_by}.prepare raised {err}"
            return {"failure": "step_failed", "message": message}

    def made(self, prepared: Sequence[Mapping[str, Any]]) -> list[dict[str, Array]]:
        """Returns the arrays of each sample of a batch. Raises BuildError where the class gives what it did not say."""
        with _running(), run_code.refusing(lambda said: self._wrong(f"forward raised {said}")):
            answer = self._answer([values["prepared"] for values in prepared])
            found = {name: [np.asarray(array) for array in arrays] for name, arrays in answer.items()}
        self.require_listed()
        wanted = {form.name: form for form in self.forms if form.is_stored}
        counts = {name: len(arrays) for name, arrays in found.items()}
        if counts != (of_all := dict.fromkeys([*wanted, *self.numbers], len(prepared))):
            raise self._wrong(f"forward gave {counts} arrays by field, wanted {of_all}")
        for name, array in ((name, array) for name, arrays in found.items() for array in arrays):
            dtype, shape = (wanted[name].dtype, wanted[name].shape) if name in wanted else (self.numbers[name], ())
            if array.dtype != dtype or not (wanted[name].fits(array.shape) if name in wanted else array.ndim == 0):
                found_is, wanted_is = (f"{d} {shown_shape(s)}" for d, s in ((array.dtype, array.shape), (dtype, shape)))
                raise self._wrong(f"forward gave {name} as {found_is}, declared {wanted_is}")
        return [{name: arrays[place] for name, arrays in found.items()} for place in range(len(prepared))]

    def _answer(self, batch: Sequence[Any]) -> Any:
        try:
            return self.own.forward(batch)
        except RuntimeError as err:
            if is_out_of_memory(err):  # what to do about it, the batch says
                raise MemoryError(str(err)) from err
            raise

    def packed(self, prepared: Sequence[Mapping[str, Any]]) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Returns a batch for the class in another process, and its arrays.

        Raises BuildError for what cannot be sent.
        """
        self.require_listed()
        arrays: list[pickle.PickleBuffer] = []
        try:
            return pickle.dumps(prepared, protocol=5, buffer_callback=arrays.append), arrays
        except Exception as err:  # pickle says it in several ways, and so do objects of users
            what = f"prepare gives what no other process can be given (arrays and plain values can): {err}"
            raise self._wrong(what) from err

    def require_listed(self) -> None:
        """Raises ConfigError where the class has read a file that no key knows."""
        if self.unlisted:
            raise unlisted_error(f"{self.made_by} of model.{self.step.label}", sorted(self.unlisted))

    def _wrong(self, what: str) -> BuildError:
        path, name = code_of(self.step.folder)
        return BuildError(f"model.{self.step.label}: {path}:{name}.{what}; correct the class", code=CODE.code)


def _instance(own_class: type, arguments: dict[str, Any], device: str) -> tuple[Any, str | None]:
    """Returns an instance, and the device that it was told."""
    if "device" not in inspect.signature(own_class).parameters:
        return own_class(**arguments), None
    if "device" in arguments:
        raise TypeError("device is in args, and [run] devices says it: leave it out")
    return own_class(**arguments, device=device), device


@functools.lru_cache(maxsize=4)
def opened_own(step: ModelStep, device: str = CPU) -> OwnModel:
    """Returns the class of a step at work; a process keeps the last ones."""
    from forebay.steps.model.open_model import make_exact

    make_exact(device)
    return OwnModel.of(step, device)
