"""`file.py:Class`, or an entry point of the group `forebay.steps`: features that code of the user makes.

The class has five members. Its settings are what else stands under `[audio]`, given to it by name when it is made; one
that is called `sample_rate_hz` gets `audio.sample_rate_hz`.

    class Fbank40:
        version = 1                      # an integer; another number is another key
        files = ["filters.npy"]          # beside the step's file, in the key by content; may be left out
        fields = {                       # of a batch, by name; None: the axis that grows with the clip
            "input_features": {"dtype": "float32", "shape": [None, 40], "pad": 0.0},
            "attention_mask": {"dtype": "int64", "mask_of": "input_features"},
        }

        def num_frames(self, num_samples: int) -> int: ...      # the length of that axis

        def compute(self, clip) -> dict: ...                    # float32 [num_samples] to an array a field

What `compute` returns depends on the clip alone: clips are worked on in any order and in many processes. A field may
also say `side` ("right", or "left": where padding stands), `multiple` (of a padded length) and `length` (always that).

Nothing here imports that code. `version` and `files` are read as they are written in the class's body, so that a key
costs no trust.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.config.code import Asker, ask, digest_of, not_allowed, same_source, source_of, spec_problem, written
from forebay.errors import BuildError, ConfigError
from forebay.steps import run_code
from forebay.steps.audio import own_class
from forebay.steps.audio.declared import Declared
from forebay.steps.audio.own_class import Opened
from forebay.steps.form import BatchForm
from forebay.steps.step import Fields
from forebay.store.layout import Array

ASKER = Asker("audio.features", "FB128")
_PROBE_S = 300
"""Seconds after which a step that does not end with the probe clips is refused."""
Dtype = Literal["float16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Own(Declared):
    """Features that a class of the user makes, in a file beside the config or in an installed package."""

    name: ClassVar[str] = "own"

    made_by: str
    """The class, or the value of the entry point."""
    settings: Mapping[str, Any] = field(hash=False)
    dtype: Dtype = "float32"
    """Type in which float32 fields are stored."""
    rate_hz: int
    digest: str
    """sha256 of the file, or over the content of the distribution."""
    files: tuple[tuple[str, str], ...] = ()
    """Names and sha256 of the files that the class lists."""
    version: int = 1
    path: Path | None = field(default=None, compare=False)
    """Of the file; None for an entry point."""
    spec: str = field(compare=False)
    """As the config names it."""
    distribution: str = field(default="", compare=False)

    @classmethod
    def of(cls, spec: str, settings: Mapping[str, Any], *, folder: Path, allow_code: bool, rate_hz: int) -> Own:
        """Returns the step that `audio.features` names; reads files and imports nothing.

        Raises ConfigError without `[run] allow_code = true`, for what is no regular file at or below the config's
        folder, and for a class whose `version` or `files` cannot be read as they are written.
        """
        if not allow_code:
            raise ConfigError(not_allowed(ASKER.setting, spec), code="FB128")
        plain = dict(settings)
        dtype = plain.pop("dtype", "float32")
        if ":" not in spec:
            return cls(settings=plain, dtype=dtype, rate_hz=rate_hz, spec=spec, **_of_entry(spec))
        if problem := spec_problem(spec, what="class"):
            raise ConfigError(f"{ASKER.setting}: {problem}", code="FB102")
        name, _, class_name = spec.rpartition(":")
        path = folder / name
        content = source_of(path, folder, ASKER)
        version, files = written_facts(content, path, class_name, ASKER)
        return cls(
            made_by=class_name,
            settings=plain,
            dtype=dtype,
            rate_hz=rate_hz,
            digest=hashlib.sha256(content).hexdigest(),
            files=digests_of(files, path, folder, ASKER),
            version=version,
            path=path,
            spec=spec,
        )

    @property
    def label(self) -> str:
        """The name of the step in messages."""
        if self.path is None:
            return f'{ASKER.setting}: "{self.spec}" of {self.distribution}'
        return f"{ASKER.setting}: {self.path.name}:{self.made_by}"

    @property
    def made_with(self) -> dict[str, str]:
        name, _, version = self.distribution.rpartition(" ")
        return {name: version} if name else {}

    def opened_class(self) -> Opened:
        """Returns the class at work: imported once a process, from the very content that is in the key.

        Raises ConfigError where that content is not there any more, or where it cannot be run.
        """
        return _opened(self)

    def batch_form(self) -> BatchForm:
        """Returns the form that the class declares; imports it."""
        return self.opened_class().form

    def num_frames(self, num_samples: Array) -> Array:
        """Returns what the class says of these lengths; imports it."""
        different, places = np.unique(num_samples, return_inverse=True)
        frames = [self.opened_class().num_frames(count) for count in different.tolist()]
        return np.array(frames, np.int64)[places].reshape(np.shape(num_samples))

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns what the class makes of each clip.

        Raises DecodeError where it raises (`step_failed`), gives NaN or infinity (`not_finite`) or no frame
        (`too_short`), BuildError where it gives something else than it declared.
        """
        return [self.opened_class().made(clip) for clip in waveforms]

    def check_code(self) -> None:
        """Returns if the class gives the same arrays for the same clips: twice, in two processes of their own.

        The processes have other seeds of `hash`, so that an order of a set shows, and take the clips in another order
        each. Raises ConfigError where results differ, where each clip raises, and where the class cannot be run;
        BuildError where it gives something else than it declared.
        """
        runs = [run for seed in ("1", "2") for run in self._probed(seed)]
        for number, answers in enumerate(zip(*runs, strict=True)):
            self._compare(number, answers)
        if all(kind == "raised" for kind, _ in runs[0]):
            raise ConfigError(
                f"{self.label} raised for each of {len(runs[0])} probe clips, for the first {runs[0][0][1]}; compute "
                "gets a float32 array [num_samples]",
                code="FB128",
            )

    def _compare(self, number: int, answers: Sequence[tuple[str, str]]) -> None:
        kind, value = answers[0]
        if wrong := next((value for kind, value in answers if kind == "differs"), None):
            raise BuildError(wrong, code="FB128")
        # Messages of exceptions may hold addresses.
        other = next((o for o in answers if o[0] != kind or (kind == "made" and o[1] != value)), None)
        if other is not None:
            raise ConfigError(
                f"{self.label} is not deterministic: for probe clip {number} it gave {value[:80]} and then "
                f"{other[1][:80]}; what it returns may depend on nothing but the clip (no chance, no clock, no order "
                "of a set, no memory of other clips)",
                code="FB128",
            )

    def _probed(self, seed: str) -> list[list[tuple[str, str]]]:
        found = ask(
            ["-m", "forebay.steps.audio.own_probe"],
            self.question(),
            seed=seed,
            timeout_s=_PROBE_S,
            called=self.label,
            asker=ASKER,
            work="the probe clips",
        )
        if unlisted := found.get("unlisted"):
            raise unlisted_error(self.label, unlisted)
        if error := found.get("error"):
            raise ConfigError(error, code="FB128")
        return [[(kind, value) for kind, value in run] for run in found["runs"]]

    def question(self) -> dict[str, Any]:
        """Returns the step as JSON values, for `asked`."""
        return {**asdict(self), "path": None if self.path is None else str(self.path)}

    @classmethod
    def asked(cls, question: Mapping[str, Any]) -> Own:
        """Returns the step of `question`."""
        path = question["path"]
        files = tuple((name, digest) for name, digest in question["files"])
        return cls(**{**question, "files": files, "path": None if path is None else Path(path)})


def unlisted_error(label: str, unlisted: Sequence[str]) -> ConfigError:
    """Returns the error for files that a class reads and does not list."""
    return ConfigError(
        f"{label} reads {unlisted[0]}, which it does not list, so that an edit would change no key; write "
        f"files = {json.dumps([Path(name).name for name in unlisted])} into the class, beside whose file they "
        "lie, and code of other files into that file",
        code="FB143",
    )


def own_problems(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with `[audio]` of such a step, by dotted names, as far as no file is read."""
    problem = spec_problem(name, what="class") if ":" in name else None
    found = [] if problem is None else [f"{ASKER.setting}: {problem}"]
    dtype = settings.get("dtype", "float32")
    if dtype not in ("float16", "float32"):
        found.append(f'audio.dtype: wanted "float16" or "float32", got {dtype!r:.80}')
    return found + [
        f"audio.{setting}: a setting of your own step is an argument of its class, named in letters, digits and _"
        for setting in settings
        if not setting.isidentifier()
    ]


def _of_entry(name: str) -> dict[str, Any]:
    found = own_class.entry_named(name)
    if found is None:
        listed = ", ".join(own_class.names()) or "none is installed"
        raise ConfigError(
            f'{ASKER.setting}: no installed package has a step "{name}"; its entry points {own_class.GROUP}: {listed}',
            code="FB128",
        )
    return {
        "made_by": found.value,
        "digest": own_class.content_digest(found),
        "distribution": own_class.distribution(found),
    }


@functools.lru_cache(maxsize=8)
def _opened(own: Own) -> Opened:
    cls = _from_entry(own) if own.path is None else _from_file(own, own.path)
    is_code = own.path is not None
    if is_code and (found := (getattr(cls, "version", None), tuple(sorted({*getattr(cls, "files", ())})))) != (
        wanted := (own.version, tuple(name for name, _ in own.files))
    ):
        raise ConfigError(
            f"{own.label}: version and files are {wanted} as they are written, and {found} when it runs; write them as "
            "plain values in the body of the class, and leave them",
            code="FB128",
        )
    return Opened.of(cls, label=own.label, settings=own.settings, rate_hz=own.rate_hz, dtype=own.dtype)


def _from_file(own: Own, path: Path) -> Any:
    """Returns the class of a file whose content, and that of the files it lists, is what the key says."""
    content = same_source(path, own.digest, ASKER)
    for name, digest in own.files:
        if (found := digest_of(_beside(path, name, ASKER), path.parent, ASKER)) != digest:
            raise ConfigError(
                f"{own.label}: {name} has changed: its sha256 was {digest[:16]} and is {found[:16]}; run it again",
                code="FB128",
            )
    try:
        return run_code.loaded(content, str(path), own.made_by, what="class")
    except run_code.CodeError as err:
        raise ConfigError(f"{own.label}: {path}: {err}; correct the file", code="FB128") from err


def _from_entry(own: Own) -> Any:
    """Returns what an entry point names, whose package is what the key says."""
    found = own_class.entry_named(own.spec)
    if found is None or found.value != own.made_by or own_class.content_digest(found) != own.digest:
        raise ConfigError(f"{own.label} is another one now; run it again", code="FB128")
    if (edited := own_class.edited_file(found)) is not None:
        raise ConfigError(
            f"{own.label}: {edited} was changed after it was installed, and the key knows the installed one; install "
            "the package again",
            code="FB128",
        )
    what = f"{own.label}: importing {found.value} raised"
    with run_code.refusing(lambda said: ConfigError(f"{what} {said}; correct the package", code="FB128")):
        return found.load()


def digests_of(files: Sequence[str], path: Path, folder: Path, asker: Asker) -> tuple[tuple[str, str], ...]:
    """Returns the names and sha256 of the files that the class in a file lists. folder: of the config."""
    return tuple((name, digest_of(_beside(path, name, asker), folder, asker)) for name in sorted({*files}))


def _beside(path: Path, name: str, asker: Asker) -> Path:
    """Returns the file that a class lists. Raises ConfigError where the name leads out of the folder of its file."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or not name.isprintable():
        raise asker.refused(f"{path.name} lists {json.dumps(name)}, wanted a file at or below its own folder")
    return path.parent / name


def written_facts(content: bytes, path: Path, class_name: str, asker: Asker) -> tuple[int, list[str]]:
    """Returns `version` and `files` as the body of a class has them."""
    found = written(content, path, class_name, ("version", "files"), asker)
    version, files = found.get("version"), found.get("files", [])
    body = f"the body of class {class_name} of {path}"
    if type(version) is not int:
        raise asker.refused(f"{body} needs a version: write version = 1 there")
    if not isinstance(files, (list, tuple)) or not all(isinstance(name, str) for name in files):
        raise asker.refused(f'{body} lists its files as they are written: files = ["filters.npy"]')
    return version, list(files)
