"""A model as a step: known by the content of its folder, by what is called and by what is kept of the answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forebay.config.code import Asker, source_of, spec_problem
from forebay.config.frozen_models import KeptOutput, ModelConfig
from forebay.config.pretrained_folder import hub_advice, is_whole, tokenizer_files
from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError, ForebayError
from forebay.pretrained import kernels_in
from forebay.steps.audio.declared import form_of
from forebay.steps.audio.own_step import digests_of, written_facts
from forebay.steps.form import BatchForm
from forebay.steps.image.cropped import Cropped
from forebay.steps.model.derived_outputs import DERIVED, SCORES, DerivedOutput
from forebay.steps.model.frozen_families import FAMILIES, FrozenFamily
from forebay.steps.step import MODEL, ItemStep, Stored
from forebay.store.layout import Group
from forebay.store.memo import Memo, hash_now
from forebay.task_map import mark

CODE = Asker("model.folder", "FB147")
CPU = "cpu"
_DOCUMENTS = ("config.json", "preprocessor_config.json", "processor_config.json")
_WEIGHTS = "*.safetensors"
_LANGUAGE = "AutoModelForCausalLM"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStep(ItemStep):
    """The call of a frozen model. digest: of the folder's content. What a config leaves out stays out of the identity:
    it follows from the content and from `version`. args: as JSON.
    """

    name: ClassVar[str] = MODEL
    items: ClassVar[str] = "outputs"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    label: str  # the name of a field where `keep` names none: two sections of one model are two steps, of one identity
    digest: str
    takes: Group
    call: str | None
    keep: tuple[tuple[str, str, str], ...] | None
    layer: int | None
    args: str
    dtype: str
    batch_size: int | None
    target: Cropped | None = None
    flip: bool = False
    version: int = 1
    folder: str = field(compare=False)

    @classmethod
    def of(cls, model: ModelConfig, config: Config) -> ModelStep:
        """Returns the step of a section. Raises ConfigError where the folder is not there and no digest stands for it,
        or where it has another content.
        """
        kept = None if model.keep is None else sorted(model.keep.items())
        return cls(
            label=model.name,
            digest=_digest_of(model, config),
            takes="+".join(model.taken) or str(model.takes),
            call=model.call,
            keep=None if kept is None else tuple((name, each.output, each.dtype) for name, each in kept),
            layer=model.layer,
            args=json.dumps(model.args, sort_keys=True),
            dtype=model.dtype,
            batch_size=model.batch,
            target=_target_of(model, config),
            flip=model.flip,
            folder=model.folder,
        )

    def compared(self) -> dict[str, Any]:
        """Returns all but the label, which keys hold as the name of the group."""
        return {name: value for name, value in ItemStep.compared(self).items() if name != "label"}

    def document(self) -> dict[str, Any]:
        """Returns what the recipe key says of the step: all but the batch, within whose promise the values stay."""
        return {name: value for name, value in self.compared().items() if name != "batch_size"}

    @property
    def is_code(self) -> bool:
        """Whether it is a class of the user."""
        return code_of(self.folder)[0].suffix == ".py"

    def family(self) -> FrozenFamily:
        """Returns how the model is used, by its config.json. Raises ConfigError for one that is not known, and where
        `size` is not what its images need. A class of the user has none of its own.
        """
        if self.is_code:
            return FrozenFamily(takes=self.takes)
        path, document = Path(self.folder) / "config.json", self.config_json()
        named = document.get("model_type") or document.get("_class_name")
        found = [family for family in FAMILIES.get(str(named), ()) if family.takes == self.takes]
        if not found:
            known = sorted(name for name, own in FAMILIES.items() if any(each.takes == self.takes for each in own))
            raise _refused(
                f"model.{self.label}: {path} is of {named!r}, and models that take {self.takes} are "
                f"{', '.join(known)}; or name a class of your own"
            )
        self._check_target(found[0], document)
        return found[0]

    @property
    def views(self) -> dict[str, tuple[str, bool]]:
        """Which window of an item the model is given, and whether mirrored, by the names of variants, the plain first.

        Those that are mirrored come last: so one draw mirrors what all models give of an image, or none of it.
        """
        windows = [""] if self.target is None else [*self.target.windows]
        plain = {name: (name, False) for name in windows}
        return plain | ({f"{name}_flip".lstrip("_"): (name, True) for name in windows} if self.flip else {})

    @property
    def variants(self) -> list[str]:
        """The names of what is stored of an item beside what it is."""
        return [name for name in self.views if name]

    def config_json(self) -> Mapping[str, Any]:
        """Returns the content of the folder's config.json."""
        return _document(Path(self.folder) / "config.json", self.label)

    def factor(self) -> int:
        """Returns the pixels of a side that stand for one of a latent; 1 of what is no autoencoder."""
        factor = self.family().factor
        return 1 if factor is None else factor(self.config_json())

    def least_rows(self) -> int:
        """Returns the fewest rows of an input that give a step of an output."""
        least = self.family().least
        return 1 if least is None else least(self.config_json())

    def facts(self) -> dict[str, Any]:
        """Returns what a cache's constants hold of config.json: how an autoencoder's latents are scaled for use."""
        facts = self.family().facts
        document = self.config_json() if facts else {}
        return {name: document[name] for name in facts if document.get(name) is not None}

    def _check_target(self, family: FrozenFamily, document: Mapping[str, Any]) -> None:
        target, where = self.target, f"model.{self.label}"
        if (target is None) != (family.factor is None):
            wanted = "takes images of a size in pixels; set size" if target is None else "takes no size; leave it out"
            raise _refused(f"{where}: {document.get('model_type', family.loader)} {wanted}")
        if target is None or family.factor is None:
            return
        if (channels := document.get("in_channels", 3)) != 3:
            raise _refused(f"{where}: its in_channels are {channels!r}, and images have 3")
        factor, (name, sides) = family.factor(document), target.multiples
        if any(side % factor for side in sides):
            raise _refused(
                f"{where}.{name} is {list(sides)}, and a latent of {family.loader} has a place for each {factor} "
                f"pixels of a side; give multiples of {factor}"
            )

    def outputs(self, family: FrozenFamily) -> dict[str, KeptOutput]:
        """Returns the outputs that are kept, by field."""
        if self.keep is None:
            return {self.label: KeptOutput(output=family.output)}
        return {name: KeptOutput(output=output, dtype=dtype) for name, output, dtype in self.keep}  # type: ignore[arg-type]

    @property
    def gives_scores(self) -> bool:
        """Whether nothing is kept but scores, which are columns: of the first text of a row."""
        return bool(self.keep) and {output for _, output, _ in self.keep or ()} <= SCORES

    def derived(self, family: FrozenFamily) -> list[DerivedOutput]:
        """Returns those of the kept outputs that are made of what the model returns."""
        return [DERIVED[each.output] for each in self.outputs(family).values() if each.output in DERIVED]

    def loader(self, family: FrozenFamily) -> str:
        """Returns the class that opens the folder: that of the family, or one with the head that gives an output.

        Raises ConfigError for outputs that no class gives, or no one class.
        """
        heads = {each.loaders.get(self.takes, "") for each in self.derived(family) if each.loaders}
        if len(heads) > 1 or "" in heads or (_LANGUAGE in heads and not family.is_causal):
            raise _refused(
                f"model.{self.label}.keep: {', '.join(sorted(each.output for each in self.outputs(family).values()))}"
                f" are given by no one model that takes {self.takes}; write a section each, of a model that has them"
            )
        return heads.pop() if heads else family.loader

    def arguments(self, family: FrozenFamily) -> dict[str, Any]:
        """Returns the arguments of the call, and the settings of derived outputs.

        Raises ConfigError for one that neither has.
        """
        given: dict[str, Any] = json.loads(self.args)
        known = family.args | {each.setting for each in self.derived(family) if each.setting}
        if unknown := sorted(given.keys() - known):
            takes = f"wanted {' or '.join(sorted(known))}" if known else "it takes none"
            raise _refused(f"model.{self.label}.args: {unknown[0]} is no argument of {family.call} here; {takes}")
        return given

    def batch_of(self, family: FrozenFamily) -> int:
        """Returns how many samples are given at once; one where logits are of a whole vocabulary."""
        of_family = 1 if family.is_causal and self.loader(family) != family.loader else family.batch
        return self.batch_size or of_family

    def require_unchanged(self) -> None:
        """Raises BuildError where the folder, which was just opened, has another content than the key says."""
        read = lambda paths: [hash_now(path).xxh3_128 for path in paths]  # noqa: E731
        now = folder_digest(Path(self.folder), read, with_tokenizer="text" in self.takes, label=self.label)
        if now != self.digest:
            raise BuildError(
                f"{self.folder} changed during the build (its digest was {self.digest[:16]} when that began and is "
                f"{now[:16]} now): nothing is sealed, finished shards are kept; wait until nothing writes to it, then "
                "run: forebay preprocess CONFIG",
                code="FB303",
            )

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form that the cache declares."""
        return form_of(stored, "form", group=stored.group)


def _target_of(model: ModelConfig, config: Config) -> Cropped | None:
    if model.size is None:
        return None
    return Cropped(
        processor="",
        max_pixels=config.source.max_pixels,
        max_sample_bytes=config.source.max_sample_bytes,
        more_images=config.source.more_images,
        size=model.size if isinstance(model.size, tuple) else (model.size, model.size),
        **{name: getattr(model, name) for name in ("shapes", "areas", "step", "least", "resample", "crops")},
    )


def _digest_of(model: ModelConfig, config: Config) -> str:
    folder = Path(model.folder)
    if not (code_of(model.folder)[0].is_file() if model.is_code else is_whole(folder)):
        if model.digest is not None:
            return model.digest
        raise _refused(
            f"model.{model.name}.folder: {folder} is no folder; name one with config.json and safetensors; where only "
            f"training reads the cache, set digest to what forebay key prints{hub_advice(folder, 'model')}"
        )
    if model.is_code:
        found = own_digest(*code_of(model.folder), Path(config.path).parent)
    else:
        hashes = Memo.of(config).hashes
        found = folder_digest(folder, hashes, with_tokenizer="text" in model.taken, label=model.name)
    if model.digest not in (None, found):
        raise _refused(
            f"model.{model.name}: digest is {str(model.digest)[:16]}, and {folder} has {found[:16]}; correct one "
            "of them"
        )
    return found


def code_of(folder: str) -> tuple[Path, str]:
    """Returns file and name of a class of the user. folder: `/path/of/file.py:Class`."""
    path, _, name = folder.rpartition(":")
    return Path(path), name


def own_digest(path: Path, name: str, folder: Path) -> str:
    """Returns the sha256 of what a class is: its file, its version and the files that it lists; imports nothing.

    folder: of the config. Raises ConfigError for what is no regular file at or below it, or no such class.
    """
    if problem := spec_problem(f"{os.path.relpath(path, folder)}:{name}", what="class"):
        raise CODE.refused(problem)
    content = source_of(path, folder, CODE)
    version, files = written_facts(content, path, name, CODE)
    document = [hashlib.sha256(content).hexdigest(), version, digests_of(files, path, folder, CODE)]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def folder_digest(
    folder: Path, hashes: Callable[[Sequence[Path]], Sequence[str]], *, with_tokenizer: bool, label: str
) -> str:
    """Returns the sha256 of the names and contents of a model's weights, config and preprocessor.

    hashes: of files; those of a memo are remembered by stat. Raises ConfigError where no weights are there, or
    pickled ones alone.
    """
    weights = sorted(folder.glob(_WEIGHTS))
    if not weights:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "has pickled weights alone, which run code; save them as safetensors" if pickled else "has no weights"
        raise _refused(f"model.{label}.folder: {folder} {why} (*.safetensors)")
    named = [folder / name for name in _DOCUMENTS if (folder / name).is_file()]
    tokens = tokenizer_files(folder) if with_tokenizer else []
    paths = sorted({*weights, *named, *tokens})
    state = hashlib.sha256()
    for path, found in zip(paths, hashes(paths), strict=True):
        state.update(f"{path.relative_to(folder).as_posix()}\0{found}\n".encode())
    return state.hexdigest()


def _document(path: Path, label: str) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as err:
        raise _refused(f"model.{label}: cannot read {path}: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise _refused(f"model.{label}: {path} is no JSON: {err}") from err
    if not isinstance(document, dict) or "auto_map" in document:
        raise _refused(f"model.{label}: {path} names code of its own (auto_map), and forebay runs no code of a folder")
    if kernels := list(kernels_in(document)):
        raise _refused(
            f"model.{label}: {path} asks for {kernels[0]!r}, code that transformers would fetch and run; remove that "
            "entry"
        )
    return document


@contextlib.contextmanager
def at_samples(step: ModelStep, named: Sequence[tuple[int, str]]) -> Iterator[None]:
    """Notes the first sample of a batch, and names it where the model fails. named: row and name of each.

    Raises BuildError for what a model raises; a batch that does not fit is never cut in two: values would be others.
    """
    if named:
        mark(named[0][0])
    try:
        yield
    except ForebayError:
        raise
    except Exception as err:
        where = f"the batch of {named[0][1]!r} and {len(named) - 1} more" if named else "a built-in input"
        what = "make batch smaller" if is_out_of_memory(err) else "see what its device and its libraries say"
        why = (str(err).strip() or "no message").splitlines()[0]
        raise BuildError(
            f"model.{step.label}: {type(err).__name__} at {where}: {why}; finished shards are kept; {what}, then run "
            "the command again",
            code="FB312",
        ) from err


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an exception says that memory is full, of a device or of the machine."""
    of_torch = isinstance(err, RuntimeError) and any(
        words in str(err) for words in ("out of memory", "allocate memory")
    )
    return isinstance(err, MemoryError) or of_torch


def _refused(what: str) -> ConfigError:
    return ConfigError(what, code="FB147")
