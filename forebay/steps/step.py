"""The step protocol: its settings, what it makes of a sample above the cut, and what a batch holds of that below it.

A step is a frozen dataclass. Its fields are its identity: they and the class's name are in keys. `version` is bumped
when the same input gives other bytes. A module of a step is imported when its name is asked for, also where nothing is
computed (keys, lookup, `inspect`): so torch, transformers and the spectrum engine are imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from forebay.errors import ConfigError, DecodeError
from forebay.store.image.codec import Alpha
from forebay.store.image.formats import MoreImages
from forebay.store.image.stored_items import FEATURES
from forebay.store.layout import Array, Constants, FieldSpec, Group
from forebay.store.source import Sample, SampleSource

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    import pyarrow as pa
    import torch

    from forebay.config.tree import Config
    from forebay.steps.form import BatchForm
    from forebay.steps.text.row_encoder import RowEncoder

Batch: TypeAlias = "dict[str, torch.Tensor]"
Dtype: TypeAlias = "torch.dtype"
Fields = dict[str, Array]
"""What a step makes of one sample, by the name of the field."""
PaddingSide = Literal["left", "right"]
MODEL = "model"
"""What caches call the features of a group that a model made."""
CLIPS = "clips"
"""What caches call the features of clips that conversations list, as their processor gives them."""
HEARS_VIDEOS = "use_audio_in_video"
"""What caches and batches call it that videos have their sound among the clips, as models of the omni family do."""
REJECTED = "rejected_"
"""Before the names of the fields of a rejected answer."""
ClipDtype = Literal["float32", "int16"]
_MAX_MAGNITUDE = 1e10
"""Above it, the power of a frame leaves float32. Full scale is 1."""
_GROUP_SAMPLES = 1 << 20
"""Samples that are laid out together, 4 MiB: enough to fill chunks, and freed memory of this size is used again."""


class Allocate(Protocol):
    """Makes uninitialised tensors, by the name of the batch field that they are for."""

    def __call__(self, name: str, shape: tuple[int, ...], *, dtype: Dtype) -> torch.Tensor:
        """Returns a contiguous CPU tensor that shares memory with no other living tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step above the cut.

    name: what a config calls the step; its key in the table. stored_as: the step whose stored form and batches this
    one's values have, and by whose name caches call them; empty where that is the step itself. given: the fields that
    no config sets beside that name, for example the digest of a folder. axes: what the first axis of each field counts,
    or its length where that is the same for all samples. libraries: modules that it imports when it makes values.
    later: fields that the step has had for some time only, whose defaults are what it did before.
    """

    name: ClassVar[str] = ""
    stored_as: ClassVar[str] = ""
    axes: ClassVar[dict[str, str | int]] = {}
    given: ClassVar[frozenset[str]] = frozenset()
    later: ClassVar[frozenset[str]] = frozenset()
    libraries: ClassVar[tuple[str, ...]] = ()

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description of the step: its class name and every field that is compared."""
        return {"step": type(self).__name__, **self.compared()}

    def compared(self) -> dict[str, Any]:
        """Returns the fields that are the step's identity: not a path, which has `compare=False`, beside a digest.

        Those of `later` where they are no default: keys from before they were there stay as they are.
        """
        known = {f.name: f for f in fields(self) if f.compare}
        kept = {name: value for name, value in asdict(self).items() if name in known}
        return {name: value for name, value in kept.items() if name not in self.later or value != known[name].default}

    @classmethod
    def completed(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a config with what one of them stands for."""
        return dict(settings)

    @classmethod
    def form(cls) -> str:
        """Returns the name of the step whose stored form and batches the values have."""
        return cls.stored_as or cls.name

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:  # noqa: ARG003
        """Returns what the sections of a config say that the step cannot do together."""
        return []


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored values that a batch form is made of: a cache's name for messages, its constants and its fields.

    group: whose constants go before those of the same name of others.
    """

    name: str
    constants: Constants
    fields: Mapping[str, FieldSpec]
    group: Group | None = None

    @classmethod
    def of(cls, source: SampleSource) -> Stored:
        """Returns what the forms of a source are made of."""
        return cls(f"cache {source.key[:16]}", source.constants, source.fields)

    def get(self, name: str) -> Any:
        """Returns a constant; None where the cache has none of that name."""
        own = {} if self.group is None else self.constants.of(self.group)
        return own[name] if name in own else self.constants.get(name)

    def constant(self, name: str) -> Any:
        """Returns a constant. Raises ConfigError where the cache has none of that name."""
        value = self.get(name)
        if value is None:
            raise ConfigError(
                f"{self.name}: its metadata has no {name}, which its batches need; rebuild it: forebay preprocess"
            )
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemStep(Step):
    """Items to what is stored of them, and this to a batch.

    items: what items are called. unit: what the second budget of packs counts of them. apart: what to do where items
    stand in no batch together, and code: of that error. fills: whether padding is a share of frames; else of the
    tokens beside them, or of items. stands_in: the plan in which alone batches are made, empty for any. plan: what a
    `[plan]` section for them may say.
    """

    items: ClassVar[str] = "clips"
    unit: ClassVar[str] = "frames"
    apart: ClassVar[str] = "rebuild the cache: forebay preprocess"
    code: ClassVar[str | None] = None
    fills: ClassVar[bool] = True
    stands_in: ClassVar[str] = ""
    plan: ClassVar[str] = "batch_seconds = 120"

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form in which batches have what a cache stores of this step."""
        raise NotImplementedError

    @classmethod
    def no_prompt(cls, prompt: str, prompts: Mapping[str, Any]) -> str:
        """Returns what to say of a `text.prompt` that does not stand beside the items. prompts: those that do."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioStep(ItemStep):
    """Waveforms to stored features, and these to a batch. A new one has `fields`, `num_frames`, `make` and `batch`.

    has_audio: whether a sample has features. reads_sound: whether they are made of sound; else a source holds them, and
    the step has `opened`, `num_samples` and `check` of its own. sample_rate_hz: the one rate that the features are
    defined at, None for any. max_s: seconds of a clip that are used. clip_dtypes: of the waveforms that `compute`
    takes. min_samples: of a clip or crop. grid_samples: where a crop may start, as a multiple; None where frames depend
    on the whole clip, so that nothing can be cut from them.
    """

    has_audio: ClassVar[bool] = True
    reads_sound: ClassVar[bool] = True
    sample_rate_hz: ClassVar[int | None] = 16_000
    max_s: ClassVar[float | None] = None
    clip_dtypes: ClassVar[tuple[ClipDtype, ...]] = ("float32",)
    min_samples: ClassVar[int] = 1
    grid_samples: ClassVar[int | None] = None

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields that `compute` makes, in the order in which they are stored; none for text alone."""
        raise NotImplementedError

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the stored length of the first field for clips of these lengths, integers [num_clips].

        An empty clip has no frames.
        """
        raise NotImplementedError

    def size_bytes(self, num_samples: Array) -> int:
        """Returns about how much is stored of clips of these lengths: here the first field."""
        if not (fields := self.fields()):
            return 0
        width = fields[0].numpy_dtype.itemsize * int(np.prod(fields[0].shape, dtype=np.int64))
        return width * int(np.sum(self.num_frames(num_samples)))

    def opened(self, data: bytes) -> Array:
        """Returns a clip that `compute` takes, of what a source holds of it; raises DecodeError as `check` does.

        For a step that reads no sound. data: an array as .npy.
        """
        raise NotImplementedError

    @classmethod
    def wanted_rate_hz(cls, settings: Mapping[str, Any]) -> int | None:  # noqa: ARG003
        """Returns the one rate at which features of these settings are defined, None for any."""
        return cls.sample_rate_hz

    def num_samples(self, clip: Array) -> int:
        """Returns how many audio samples a clip is or stands for."""
        return len(clip)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the fields of clips that passed `check`, about 2^20 samples a call."""
        raise NotImplementedError

    def refused(self, num_samples: int) -> DecodeError | None:  # noqa: ARG002
        """Returns why no clip of so many samples is made, as far as its length says it."""
        return None

    @classmethod
    def no_prompt(cls, prompt: str, prompts: Mapping[str, Any]) -> str:  # noqa: ARG003
        """See `ItemStep`."""
        return f'text.prompt = "{prompt}" is only for a config with [vision]'

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns where `[source.columns]` names features and the step makes them, or the other way round."""
        column, is_read = config.source.columns.features, not cls.reads_sound
        return [no_such_column("features", column, "audio.features", cls.name)] if is_read == (column is None) else []

    @classmethod
    def crop(cls, stored: Stored, *, num_samples: int) -> BatchForm:
        """Returns the form of batches of crops of so many audio samples, the field that is counted last.

        Each field is cut from where its crop starts, by its `hop`. Of a step that has a grid.
        """
        raise NotImplementedError

    @property
    def constants(self) -> dict[str, Any]:
        """Facts that a cache states of all samples beside the step's name and the sample rate."""
        return {"n_mels": None}

    @property
    def made_with(self) -> dict[str, str]:
        """Packages beside forebay's own that made the values, and their versions."""
        return {}

    def check_code(self) -> None:
        """Returns if a build may trust the step: same values for the same clip. Only code of the user is in doubt.

        Asked once, before anything is built. Raises ConfigError for a step that cannot be trusted.
        """

    @property
    def clip_dtype(self) -> ClipDtype:
        """The dtype in which a clip is decoded for this step."""
        return self.clip_dtypes[0]

    def check(self, clip: Array) -> None:
        """Returns for a clip that `compute` accepts.

        Raises DecodeError otherwise, reason `empty_audio` (no samples), `not_finite` (NaN, infinity or a magnitude
        above 1e10, whose power float32 cannot hold) or `too_short` (fewer samples than the reference needs). Raises
        TypeError for an array of another dtype or shape: a mistake of the caller.
        """
        if clip.ndim != 1 or clip.dtype not in self.clip_dtypes:  # `dtype.name` would cost more than the whole check
            wanted = " or ".join(self.clip_dtypes)
            raise TypeError(f"a clip is {clip.dtype} {list(clip.shape)}, {self} takes {wanted} [num_samples]")
        if clip.size == 0:
            raise DecodeError("empty_audio", "the audio has no samples")
        if clip.dtype == np.float32:
            _check_finite(clip)
        if clip.size < self.min_samples:
            raise DecodeError(
                "too_short",
                f"the audio has {clip.size} samples, {self.name} needs {self.min_samples}: raise min_duration_s",
            )

    def compute(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the fields of each clip, named and typed as `fields` says.

        waveforms: float32 mono [num_samples] at 16 kHz (any rate for `waveform`, int16 too); each passes `check`, whose
        errors this raises for the first clip that does not. The arrays returned are C-contiguous and own their memory,
        except that `waveform` hands on what needs no conversion.

        A clip's bytes do not depend on the other clips of the call, their order, or the number of threads.
        """
        for clip in waveforms:
            self.check(clip)
        return [fields for group in _groups(waveforms) for fields in self.make(group)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStep(ItemStep):
    """Images to what is stored of them, by the name that `vision.images` has for it.

    is_of_transformers: whether a class of transformers makes the values.
    """

    items: ClassVar[str] = "images"
    unit: ClassVar[str] = "patches"
    is_of_transformers: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset({"more_images"})
    libraries: ClassVar[tuple[str, ...]] = ("PIL.Image", "torch", "transformers")

    processor: str
    max_pixels: int = 89_478_485
    """Of the encoded image, above which it fails before it is decoded."""
    max_sample_bytes: int = 256 * 1024 * 1024
    """Of the encoded image."""
    alpha: Alpha = "white"
    """`white`: transparent images are laid on white. `drop`: the colours under the alpha show, as where a processor is
    given a path."""
    more_images: tuple[MoreImages, ...] = ()
    """See `source.more_images`."""

    @property
    def decoding(self) -> dict[str, Any]:
        """How `decode_image` is to read an image."""
        return {"max_pixels": self.max_pixels, "alpha": self.alpha, "more": self.more_images}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStep(Step):
    """A step that turns the text of a row into fields. A new prompt has `fields` and `opened`.

    given: of these fields, which a recipe gives to a step that declares them: `tokenizer` and `processor`, digests of
    the files in the folders of `text.tokenizer` and `vision.processor`; `tokenizer_folder` and `processor_folder`,
    their paths (str), which are no part of the identity: `field(compare=False)`; `line`, see `Transcript`.
    needs_items: how many items a row must list; None: any number. beside: features, as caches call them, of which
    samples must have some. can_pack: whether packs have a row of it. is_of_texts: whether a row has to have a text.
    takes_symbols: whether a table of the texts' own symbols serves; else it is the tokenizer of a model. batch_names:
    the fields of a batch that are its own beside any items.
    """

    needs_items: ClassVar[int | None] = None
    beside: ClassVar[frozenset[str]] = frozenset({FEATURES, MODEL})
    can_pack: ClassVar[bool] = False
    is_of_texts: ClassVar[bool] = False
    takes_symbols: ClassVar[bool] = False
    batch_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def stands_beside(cls, items: Mapping[Group, str]) -> bool:
        """Whether texts of the step stand beside such items: what caches call the features of each group."""
        return not cls.beside.isdisjoint(items.values())

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer's files; None for a prompt without one."""
        return getattr(self, "tokenizer", None) or None

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the tensor fields that its encoder makes; loads what says them."""
        raise NotImplementedError

    def fields_of(self, form: BatchForm | None) -> tuple[FieldSpec, ...]:
        """Returns `fields` where the form that the encoder declares is known already: nothing is loaded.

        A step that stores more than its form says, for example `label_mask`, adds that here.
        form: `text_form` of the encoder's constants; None: it has none.
        """
        return self.fields() if form is None else form.specs("text")

    def opened(self, folder: Path, *, merge_size: int | None) -> RowEncoder:
        """Returns what writes rows, which loads what that needs; a worker keeps it.

        folder: of the tokenizer. merge_size: of images as patches.
        """
        raise NotImplementedError

    def of_rows(self, rows: pa.Table, different: Callable[[str], list[str]]) -> Self:  # noqa: ARG002
        """Returns the step for the rows of a listing. Raises ConfigError where they are not what its settings say.

        different: the values of a kept column by its name, each once, sorted.
        """
        return self

    def document(self) -> dict[str, Any]:
        """Returns what keys say of the step."""
        return self.compared()

    def without_code(self) -> Self:
        """Returns the step without functions of the user."""
        return self

    def check(self) -> None:
        """Returns if a build may trust the step. Raises ConfigError for code of the user that cannot be trusted."""

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch | None:  # noqa: ARG003
        """Returns the form in which batches have the stored tokens; None where nothing is stored."""
        return None

    @classmethod
    def row(cls, stored: Stored) -> RowText:
        """Returns the form in which packs have the stored tokens."""
        raise ConfigError(
            f'{stored.name}: plan.kind is "pack", and packs have no text of prompt {cls.name!r}; set plan.kind = '
            '"bucket" with batch_size'
        )

    @classmethod
    def row_tokens(cls, num_tokens: Any, num_frames: Any) -> Any:  # noqa: ARG003
        """Returns how many tokens samples of so many stored ones, and frames, have in a pack; ints or elementwise."""
        return num_tokens


class RowText(Protocol):
    """Stored tokens as one row of a pack: what can be pickled."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the tokens of each sample in the row."""

    def __call__(self, samples: Sequence[Sample]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the fields of the row, integers [tokens], and those of one number a sample."""


class TextBatch(Protocol):
    """Stored tokens as the text fields of a batch: a function that can be pickled."""

    def __call__(self, samples: Sequence[Sample], *, padding_side: PaddingSide, allocate: Allocate) -> Batch:
        """Returns the text fields of a batch, all int64. padding_side: of `input_ids`."""


def no_such_column(name: str, column: str | None, setting: str, value: object) -> str:
    """Returns what to say where `[source.columns]` and a step differ about what is read. value: of the setting."""
    return (
        f"source.columns.{name} is {column!r} and {setting} is {value!r}; {name} that the source holds need "
        f'source.kind = "hf", source.columns.{name} = "{name if column is None else column}" and {setting} = "given"'
    )


def _check_finite(clip: Array) -> None:
    # One fast read; NaN and infinity spread into the sum. Only a clip that fails it is looked at closely.
    with np.errstate(over="ignore", invalid="ignore"):
        if float(np.dot(clip, clip)) <= _MAX_MAGNITUDE**2:
            return
    bad = ~(np.abs(clip) <= _MAX_MAGNITUDE)
    if bad.any():
        first = int(bad.argmax())
        raise DecodeError(
            "not_finite",
            f"{int(bad.sum())} of {clip.size} samples are NaN, infinite or above {_MAX_MAGNITUDE:.0e}, "
            f"where full scale is 1; the first is {clip[first]} at {first}",
        )


def _groups(waveforms: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """Yields runs of clips of about _GROUP_SAMPLES together, so that memory does not grow with the call."""
    first = samples = 0
    for index, clip in enumerate(waveforms):
        samples += clip.size
        if samples >= _GROUP_SAMPLES or index == len(waveforms) - 1:
            yield waveforms[first : index + 1]
            first, samples = index + 1, 0
