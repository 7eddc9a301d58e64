"""A class of the user at work: what it declares, held against what it returns for every clip.

Steps of installed packages: entry points of the group `forebay.steps`, looked up without importing any of them.

[project.entry-points."forebay.steps"]
fbank40 = "my_package.steps:Fbank40"
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from forebay.errors import BuildError, ConfigError, DecodeError
from forebay.steps.audio.declared import require_frame
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.form_values import shown_shape
from forebay.steps.run_code import refusing
from forebay.steps.step import Fields
from forebay.store.layout import Array
from forebay.visible import an

_GIVEN = frozenset({"dtype", "shape", "pad", "side", "multiple", "length", "mask_of"})
"""What a class may say of a field."""

RESERVED = frozenset(
    ("sample_id", "num_audio_samples", "failure", "message", "index", "text", "language", "prompt", "source")
)
"""Names of what rows have beside features; no field has one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A class with its settings. Each thread has an instance of its own, so that what one keeps no other sees."""

    cls: type
    arguments: Mapping[str, Any]
    label: str
    form: BatchForm
    instances: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(cls, own: Any, *, label: str, settings: Mapping[str, Any], rate_hz: int, dtype: str) -> Opened:
        """Returns a class at work. dtype: in which float32 is stored.

        Raises ConfigError where the class does not take these settings, raises when it is made, lacks a member, or
        declares fields that are none.
        """
        if not isinstance(own, type):
            raise ConfigError(f"{label} is {an(type(own).__name__)}, wanted a class", code="FB128")
        arguments = _arguments(own, settings, rate_hz, label)
        instance = _made(own, arguments, label)
        members = {name: _member(instance, name, label) for name in ("compute", "num_frames", "fields")}
        if lacks := [name for name in ("compute", "num_frames") if not callable(members[name])]:
            raise ConfigError(f"{label} has no method {' and no method '.join(lacks)}; add it", code="FB128")
        try:
            fields = forms_declared(members["fields"], dtype)
            form = BatchForm(made_by=own.__name__, fields=fields, promise=Promise(kind="exact"))
        except ValueError as err:
            raise ConfigError(f"{label}: its fields: {err}; see docs/data.md", code="FB128") from err
        return cls(own, arguments, label, form)

    @property
    def instance(self) -> Any:
        """The instance of this thread."""
        found = getattr(self.instances, "own", None)
        if found is None:
            found = self.instances.own = _made(self.cls, self.arguments, self.label)
        return found

    def num_frames(self, num_samples: int) -> int:
        """Returns the length of the axis that grows for a clip; 0 for an empty one.

        Where no axis grows, what is stored of each clip is equally long.
        """
        main = self.form.main
        if not num_samples:
            return 0
        if not main.grows:
            return main.shape[0] or 0 if main.shape else 1
        what = f"{self.label}: num_frames({num_samples})"
        with refusing(lambda said: BuildError(f"{what} raised {said}", code="FB128")):
            found = self.instance.num_frames(num_samples)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 0:
            raise BuildError(f"{what} returned {found!r:.80}, wanted an integer, 0 or more", code="FB128")
        return int(found)

    def made(self, clip: Array) -> Fields:
        """Returns the fields of a clip as they are stored. Raises DecodeError or BuildError; see `Own.make`."""
        with refusing(lambda said: DecodeError("step_failed", f"{self.label} raised {said}")):
            result = self.instance.compute(clip.copy())
        wanted = {form.name: form for form in self.form.stored}
        if not isinstance(result, Mapping) or result.keys() != wanted.keys():
            found = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
            raise self._differs(f"returned {found}, declared a dict of {sorted(wanted)}")
        stored: Fields = {}
        for name, form in wanted.items():
            stored |= self._stored(form, result[name])
        self._count(clip, stored)
        require_frame(self.form, stored, clip)
        return stored

    def _stored(self, form: FieldForm, array: Any) -> Fields:
        declared = f"{form.dtype} {shown_shape(form.shape)}"
        if isinstance(array, np.generic):
            array = np.asarray(array)
        if not isinstance(array, np.ndarray):
            raise self._differs(f"returned {type(array).__name__} as {form.name}, declared an array {declared}")
        if array.dtype != form.dtype or not form.fits(array.shape):
            raise self._differs(
                f"returned {form.name} as {array.dtype} {shown_shape(array.shape)}, declared {declared}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DecodeError(
                "not_finite",
                f"{self.label}: {form.name}: {int((~np.isfinite(array)).sum())} of {array.size} values are NaN or "
                "infinite",
            )
        if form.length is not None and (longest := max(array.shape[axis] for axis in form.grows)) > form.length:
            raise DecodeError(
                "step_failed", f"{self.label} made {longest} frames of {form.name}, and a batch has {form.length}"
            )
        try:
            fields = form.stored(array)
        except ValueError as err:
            raise DecodeError("not_finite", f"{self.label}: {err}; set audio.dtype") from err
        # An array of the class's own may hold the next clip before this one is written.
        return {name: v.copy() if np.may_share_memory(v, array) else v for name, v in fields.items()}

    def _count(self, clip: Array, stored: Fields) -> None:
        main = self.form.main
        wanted, found = self.num_frames(len(clip)), len(stored[main.name])
        if wanted != found:
            raise self._differs(
                f"returned {found} frames of {main.name} for a clip of {len(clip)} samples, num_frames says {wanted}"
            )

    def _differs(self, what: str) -> BuildError:
        return BuildError(f"{self.label} {what}; correct the class", code="FB128")


def _arguments(own: type, settings: Mapping[str, Any], rate_hz: int, label: str) -> Mapping[str, Any]:
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{label}: its arguments cannot be read: {err}", code="FB128") from err
    arguments = {**settings, **({"sample_rate_hz": rate_hz} if "sample_rate_hz" in signature.parameters else {})}
    try:
        signature.bind(**arguments)
    except TypeError as err:
        takes = ", ".join(name for name in signature.parameters if name != "sample_rate_hz") or "none"
        raise ConfigError(f"{label}: [audio] has settings for it: {err}; it takes {takes}", code="FB128") from err
    return arguments


def _made(own: type, arguments: Mapping[str, Any], label: str) -> Any:
    what = f"{label} cannot be made of its settings: it raised"
    with refusing(lambda said: ConfigError(f"{what} {said}", code="FB128")):
        return own(**json.loads(json.dumps(arguments)))


def _member(instance: Any, name: str, label: str) -> Any:
    with refusing(lambda said: ConfigError(f"{label}: its {name} raised {said}; correct the class", code="FB128")):
        return getattr(instance, name, None)


def forms_declared(declared: Any, dtype: str, *, most: int = 1) -> tuple[FieldForm, ...]:
    """Returns the forms of what a class says of its fields; ValueError for what is none.

    dtype: of stored float32. most: axes of a field that grow.
    """
    if not isinstance(declared, Mapping) or not declared:
        raise ValueError(f"wanted a dict of names and what each is, got {declared!r:.80}")
    return tuple(_form(name, given, dtype, most) for name, given in declared.items())


def _form(name: Any, given: Any, dtype: str, most: int) -> FieldForm:
    if not isinstance(given, Mapping) or not given.keys() <= _GIVEN or name in RESERVED:
        raise ValueError(f"{name!r:.80} is {given!r:.80}, wanted a new name and some of {', '.join(sorted(_GIVEN))}")
    is_mask = given.get("mask_of") is not None
    values: dict[str, Any] = {"dtype": "int64", "shape": [None]} if is_mask else {"dtype": "float32"}
    values |= {key: value for key, value in given.items() if value is not None}
    if "shape" not in values:
        raise ValueError(f"{name} has no shape, for example [None, 80]")
    values["shape"] = list(values["shape"]) if isinstance(values["shape"], (list, tuple)) else values["shape"]
    on_disk = {"float32": dtype, "bool": "uint8"}
    stored = values["dtype"]
    try:
        form = FieldForm.from_json({"name": name, "stored_dtype": on_disk.get(stored, stored), **values})
    except (ValueError, TypeError) as err:
        raise ValueError(f"{name!r:.80}: {err}") from err
    if len(form.grows) > most:
        raise ValueError(f"{name} has {len(form.grows)} axes that grow, wanted {most} at most")
    if not form.grows and (padded := [key for key in ("length", "multiple") if key in given]):
        raise ValueError(
            f"{name} has the shape {shown_shape(form.shape)} and {padded[0]} = {given[padded[0]]!r:.80}: that is of an "
            "axis that grows, written as None"
        )
    return form


GROUP = "forebay.steps"


def names() -> list[str]:
    """Returns the names of all installed steps, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def entry_named(name: str) -> EntryPoint | None:
    """Returns the installed step of a name, None where there is none. Raises ConfigError where several have it."""
    found = {(entry.value, distribution(entry)): entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) > 1:
        who = " and ".join(sorted(f"{value} of {of}" for value, of in found))
        raise ConfigError(f'audio.features: "{name}" is the name of {who}; uninstall one of them', code="FB128")
    return next(iter(found.values()), None)


def content_digest(entry: EntryPoint) -> str:
    """Returns the sha256 over the content of the distribution of a step, without importing it.

    That is its RECORD: the hash of every file that it installed, by the file's name. Scripts, bytecode and the files of
    metadata are left out: they say how and where something was installed. A distribution whose RECORD does not hold the
    module (an editable one) has the files of the module's package read instead. Raises ConfigError without either.
    """
    listed = sorted(_recorded(entry)) or sorted(_read(entry))
    if not listed:
        raise ConfigError(
            f'audio.features: the files of "{entry.name}", {entry.value} of {distribution(entry)}, are not there; '
            "install the package again",
            code="FB128",
        )
    return hashlib.sha256("".join(f"{name}\0{found}\n" for name, found in listed).encode()).hexdigest()


def edited_file(entry: EntryPoint) -> str | None:
    """Returns a file of the step's package that is not what the RECORD says, None where all are."""
    dist = entry.dist
    for name, recorded in _recorded(entry):
        if dist is not None and _is_of(name, _top(entry)) and _sha256(Path(str(dist.locate_file(name)))) != recorded:
            return name
    return None


def _recorded(entry: EntryPoint) -> Iterator[tuple[str, str]]:
    """Yields the installed files and their hashes where RECORD holds the step's package, nothing where it does not."""
    files = (entry.dist.files if entry.dist is not None else None) or []
    kept = {str(path): path for path in files if _is_content(PurePosixPath(str(path)))}
    if not any(_is_of(name, _top(entry)) for name in kept):
        return
    for name, path in kept.items():
        if path.hash is None or path.hash.mode != "sha256":
            yield name, _sha256(Path(str(path.locate())))
        else:
            yield name, _as_hex(path.hash.value)


def _read(entry: EntryPoint) -> Iterator[tuple[str, str]]:
    """Yields the files of the package of a step and their hashes, found without importing the package."""
    try:
        spec = importlib.util.find_spec(_top(entry))
    except (ImportError, ValueError):
        return
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for path in folder.rglob("*"):
            name = f"{_top(entry)}/{path.relative_to(folder).as_posix()}"
            if path.is_file() and _is_content(PurePosixPath(name)) and "/." not in name:
                yield name, _sha256(path)
    if not folders and spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin).name, _sha256(Path(spec.origin))


def _is_content(path: PurePosixPath) -> bool:
    is_metadata = any(part.endswith((".dist-info", ".egg-info")) for part in path.parts)
    return ".." not in path.parts and "__pycache__" not in path.parts and not is_metadata


def _is_of(name: str, top: str) -> bool:
    return PurePosixPath(name).parts[0].partition(".")[0] == top


def _top(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        return f"unreadable: {err.strerror}"


def _as_hex(value: str) -> str:
    """Returns a hash of RECORD, base64 without its padding, as hex digits."""
    import base64
    import binascii

    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return value


def distribution(entry: EntryPoint) -> str:
    """Returns the name and version of the distribution of a step, as `name 1.0`."""
    dist: Distribution | None = entry.dist
    return "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"
