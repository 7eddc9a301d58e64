"""Clips of conversations: what a whole processor hands a model of a clip, by its extractor and its own call of that.

A processor calls its extractor with options that no other class knows, and gives the outputs names of its own. So its
audio part alone is made, and stands where an extractor does: the probe and the promise are those of any extractor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.errors import DecodeError
from forebay.steps.audio.extractor.extractor_call import Arrays, OpenExtractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, native_bins, refused, say
from forebay.steps.audio.extractor.extractor_probe import Probed, noise
from forebay.steps.audio.extractor.extractor_step import PROBES, Extractor, opened
from forebay.steps.audio.framing import HOP_SAMPLES
from forebay.steps.audio.log_mel import MAX_FRAMES, MAX_SAMPLES, LogMel
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.image.processor.whole import audio_part
from forebay.steps.step import CLIPS, AudioStep, Fields
from forebay.store.layout import Array, FieldSpec

_LOOKED_AT_S = 60
"""Seconds up to which the probe sees whether a processor cuts clips; of a longer one it is seen when one is listed."""
MAX_S = 30
"""Seconds of a window of Whisper's extractor."""
_TAIL_S = 0.05
"""Seconds at the end of a clip that move what is made of it, unless they are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSound(Extractor):
    """The outputs of a folder's processor for a clip. whole: its class, or the model_type that says it."""

    stored_as: ClassVar[str] = CLIPS
    given: ClassVar[frozenset[str]] = frozenset({"digest", "kind", "rate_hz", "whole"})
    fills: ClassVar[bool] = False
    whole: str = ""
    version: int = 1

    @classmethod
    def facts(cls, found: ExtractorFolder) -> dict[str, Any]:
        """See `Extractor`. Raises ConfigError for a processor whose conversations no chat template writes."""
        whole = found.processor_class or found.model_type
        if whole in _WITHOUT_TEMPLATE:
            raise refused(
                found.path,
                f"{whole} has its conversations written by mistral-common (tekken.json), which has no chat template "
                "and says no places of tokens, so nothing says where an answer begins; take a folder of another model: "
                "docs/models.md lists them",
            )
        return {**super(ConversationSound, cls).facts(found), "whole": whole}

    @classmethod
    def native(cls, found: ExtractorFolder, *, dtype: Literal["float16", "float32"]) -> AudioStep | None:
        """See `Extractor`: Whisper's log-mels, with a mask."""
        mask, bins = _MASKS.get(found.processor_class), native_bins(found, of="WhisperProcessor")
        longest = _LONGEST_S.get(found.processor_class)
        seconds = MAX_S if longest is None else found.setting("max_audio_len", longest)
        if mask is None or bins is None or not (isinstance(seconds, int | float) and MAX_S <= seconds < math.inf):
            return None
        say(str(found.path.parent), found.kind, ClipMel.__name__)
        return ClipMel(n_mels=128 if bins == 128 else 80, dtype=dtype, mask=mask, windows=int(seconds // MAX_S))

    @classmethod
    def no_prompt(cls, prompt: str, prompts: Mapping[str, Any]) -> str:  # noqa: ARG003
        """See `ItemStep`."""
        return f'text.prompt is "{prompt}", and clips of conversations stand beside vision.images = "processor" alone'

    def probe(self) -> Probed:
        """See `Extractor`, and how long a clip may be."""
        if self not in PROBES:
            found = super(ConversationSound, self).probe()
            PROBES[self] = replace(
                found, longest=_longest(OpenExtractor(self._loaded()[1], found.call, self.leave_out))
            )
        return PROBES[self]

    @property
    def longest_s(self) -> float | None:
        """The most seconds of a clip that it makes; None where nothing was cut in the probe."""
        longest = self.probe().longest
        return None if longest is None else longest / self.rate_hz

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """See `Extractor`. Raises DecodeError `clip_too_long` for a clip of which the processor would drop the end."""
        if (found := next(filter(None, (self._cut(waveform.size) for waveform in waveforms)), None)) is not None:
            raise found
        return super(ConversationSound, self).make(waveforms)

    def refused(self, num_samples: int) -> DecodeError | None:
        """See `AudioStep`. Loads the processor for a clip that is longer than the window that its folder states."""
        return None if num_samples <= _stated(self) else self._cut(num_samples)

    def _cut(self, num_samples: int) -> DecodeError | None:
        longest, looked_at = self.probe().longest, _LOOKED_AT_S * self.rate_hz
        if longest is None and num_samples > looked_at:
            more = -(-num_samples // looked_at) * looked_at  # whole minutes, so that few lengths are looked at
            longest = num_samples - 1 if not (_takes(self, more) or _takes(self, num_samples)) else None
        if longest is None or num_samples <= longest:
            return None
        return too_long(self.batch_form().made_by, num_samples, longest, self.rate_hz)

    def _loaded(self) -> tuple[ExtractorFolder, Any]:
        folder, extractor = super(ConversationSound, self)._loaded()
        part = audio_part(Path(self.extractor), extractor)
        if part is None:
            raise refused(
                folder.path,
                "it names no processor_class of sound and texts, and no model_type of one, so nothing says how clips "
                "stand in conversations; point it at the model's own folder",
            )
        return folder, SoundPart.of(part, extractor)


_WITHOUT_TEMPLATE = frozenset({"VoxtralProcessor", "VoxtralRealtimeProcessor", "voxtral", "voxtral_realtime"})
_MASKS = {
    "Qwen2AudioProcessor": "feature_attention_mask",
    "Qwen2_5OmniProcessor": "feature_attention_mask",
    "GlmAsrProcessor": "input_features_mask",
    "AudioFlamingo3Processor": "input_features_mask",
}
"""By the processors that pad clips to Whisper's 30 seconds what they call the mask of a clip's frames."""
_LONGEST_S = {"GlmAsrProcessor": 655, "AudioFlamingo3Processor": 600}
"""By those that take windows of 30 seconds, each a row of a batch: of how many seconds, unless their folder says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipMel(LogMel):
    """`LogMel` of clips, and the mask that processors of conversations have beside it, uint8 [frames].

    A clip of up to `windows` times 30 seconds is stored as its windows one behind the other, all but the last one full;
    a batch has each as a row.
    """

    stored_as: ClassVar[str] = CLIPS
    fills: ClassVar[bool] = False
    max_s: ClassVar[float | None] = None
    mask: str
    windows: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """See `LogMel`."""
        return (*super(ClipMel, self).fields(), FieldSpec(name=self.mask, dtype="uint8"))

    @property
    def constants(self) -> dict[str, Any]:
        frames = FieldForm.frames(self.fields()[0], is_moved=True, length=MAX_FRAMES, pad_of="pad_value")
        mask = FieldForm(name=self.mask, dtype="int32", shape=(None,), stored_dtype="uint8", length=MAX_FRAMES)
        promise = Promise(kind="within", limit=1e-6)
        form = BatchForm(made_by="WhisperFeatureExtractor", fields=(frames, mask), promise=promise)
        return {"n_mels": self.n_mels, "form": form.to_json()}

    @property
    def longest_s(self) -> float:
        """The most seconds of a clip that it makes."""
        return float(self.windows * MAX_S)

    def refused(self, num_samples: int) -> DecodeError | None:
        """See `AudioStep`."""
        longest = self.windows * MAX_SAMPLES
        if num_samples <= longest:
            return None
        return too_long("the model's processor", num_samples, longest, self.sample_rate_hz or 1)

    def num_frames(self, num_samples: Array) -> Array:
        """See `LogMel`: of all windows."""
        full: Array = np.maximum(num_samples - 1, 0) // MAX_SAMPLES
        return np.asarray(full * MAX_FRAMES + super(ClipMel, self).num_frames(num_samples - full * MAX_SAMPLES))

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """See `LogMel`. Raises DecodeError `clip_too_long` for a clip of more windows."""
        if (found := next(filter(None, (self.refused(waveform.size) for waveform in waveforms)), None)) is not None:
            raise found
        cut = [[w[start : start + MAX_SAMPLES] for start in range(0, w.size, MAX_SAMPLES)] for w in waveforms]
        rest = iter(super(ClipMel, self).make([window for windows in cut for window in windows]))
        return [
            self._joined(waveform, [next(rest) for _ in windows])
            for waveform, windows in zip(waveforms, cut, strict=True)
        ]

    def _joined(self, waveform: Array, windows: Sequence[Fields]) -> Fields:
        """Returns the fields of a clip; those of its last window say what stands behind it."""
        frames = np.concatenate([fields["input_features"] for fields in windows])
        # The extractor takes every 160th sample of its mask of samples.
        mask = np.ones(-(-waveform.size // HOP_SAMPLES), np.uint8)
        return {**windows[-1], "input_features": frames, self.mask: mask}


def too_long(made_by: str, num_samples: int, longest: int, rate_hz: int) -> DecodeError:
    """Returns the error for a clip of more samples than a processor takes."""
    return DecodeError(
        "clip_too_long",
        f"the clip has {num_samples / rate_hz:.2f} s, and {made_by} takes {longest / rate_hz:.2f} s of one; "
        'cut it, or set source.max_duration_s with source.overlong = "clip" or "drop"',
    )


@dataclass(frozen=True)
class SoundPart:
    """The audio part of a whole processor, called as an extractor is.

    unused: outputs that it does not hand on. options: of its calls. made_by: its class. stated: the samples that its
    extractor says it takes of a clip.
    """

    process: Callable[..., Any]
    unused: frozenset[str]
    options: Mapping[str, Any]
    sampling_rate: Any
    made_by: str
    stated: Any

    @classmethod
    def of(cls, processor: Any, extractor: Any) -> SoundPart:
        """Returns the part of a processor whose extractor this is."""
        return cls(
            processor._process_audio,
            frozenset(processor.unused_input_names),
            dict(processor._merge_kwargs()["audio_kwargs"]),
            getattr(extractor, "sampling_rate", None),
            type(processor).__name__,
            getattr(extractor, "n_samples", None),
        )

    def __call__(self, clips: Sequence[Array], **options: Any) -> dict[str, Any]:
        """Returns what the processor hands on of clips, float32 [num_samples] each."""
        outputs, _ = self.process(list(clips), **{**self.options, **options})
        return {name: value for name, value in outputs.items() if name not in self.unused}


@lru_cache(maxsize=4)
def _stated(step: ConversationSound) -> int:
    """Returns the samples of the window that a folder states, 0 where it states none."""
    stated = ExtractorFolder.read(Path(step.extractor)).document.get("n_samples")
    return stated if type(stated) is int else 0


@lru_cache(maxsize=256)
def _takes(step: ConversationSound, num_samples: int) -> bool:
    """Whether the end of a clip of so many samples moves what is made of it."""
    part, clip = opened(step), noise(num_samples, seed=7)
    try:
        return not _are_same(part.alone(clip), part.alone(clip[: -round(_TAIL_S * part.sample_rate_hz)]))
    except DecodeError:
        return False


def _are_same(one: Arrays | None, other: Arrays | None) -> bool:
    """Whether two clips become the same, or both nothing."""
    if one is None or other is None:
        return one is other
    return all(np.array_equal(one[name], other.get(name, ())) for name in one)


def _longest(part: OpenExtractor) -> int | None:
    """Returns the most samples of which all are used, of clips of up to a minute; None where nothing is cut.

    Where a clip is cut, a longer one becomes the same; one that is divided into several is too long as well.
    """
    rate_hz = part.sample_rate_hz
    clip = noise(_LOOKED_AT_S * rate_hz, seed=7)

    def made(samples: int) -> Arrays | None:
        try:
            return part.alone(clip[:samples])
        except DecodeError:
            return None

    full, tail = made(len(clip)), round(_TAIL_S * rate_hz)
    if full is not None and not _are_same(full, made(len(clip) - tail)):
        return None
    divided = int(full is None)
    stated = part.extractor.stated
    if stated is not None and [_are_same(full, made(stated + n)) for n in (divided, divided - tail)] == [True, False]:
        return int(stated)
    low, high = 0, len(clip)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _are_same(full, made(middle)) else (middle, high)
    # Samples behind the last frame move nothing: of a cut at a tenth of a second they belong to it.
    tenth = -(-high * 10 // rate_hz) * rate_hz // 10
    return low if divided else tenth if tenth - high < tail and _are_same(full, made(tenth)) else high
