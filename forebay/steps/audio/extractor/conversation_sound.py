"""Clips of conversations: what a whole processor hands a model of a clip, by its extractor and its own call of that.

A processor calls its extractor with options that no other class knows, and gives the outputs names of its own. So its
audio part alone is made, and stands where an extractor does: the probe and the promise are those of any extractor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forebay.errors import DecodeError
from forebay.steps.audio.extractor.extractor_call import Arrays, OpenExtractor
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder, refused
from forebay.steps.audio.extractor.extractor_probe import Probed, noise
from forebay.steps.audio.extractor.extractor_step import PROBES, Extractor, opened
from forebay.steps.image.processor.whole import audio_part
from forebay.steps.step import CLIPS, AudioStep, Fields
from forebay.store.layout import Array

_LOOKED_AT_S = 60
"""Seconds up to which the probe sees whether a processor cuts clips; of a longer one it is seen when it is made."""
_TAIL_S = 0.05
"""Seconds at the end of a clip that move what is made of it, unless they are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSound(Extractor):
    """What the processor of a folder makes of a clip. whole: its class, or the model_type that says it."""

    stored_as: ClassVar[str] = CLIPS
    given: ClassVar[frozenset[str]] = frozenset({"digest", "kind", "rate_hz", "whole"})
    fills: ClassVar[bool] = False
    whole: str = ""
    version: int = 1

    @classmethod
    def facts(cls, found: ExtractorFolder) -> dict[str, Any]:
        """See `Extractor`."""
        return {**super(ConversationSound, cls).facts(found), "whole": found.processor_class or found.model_type}

    @classmethod
    def native(cls, found: ExtractorFolder, *, dtype: Any) -> AudioStep | None:  # noqa: ARG003
        """Returns none: the processor's own values."""
        return None

    def probe(self) -> Probed:
        """See `Extractor`, and how long a clip may be."""
        if self not in PROBES:
            found = super(ConversationSound, self).probe()
            PROBES[self] = replace(
                found, longest=_longest(OpenExtractor(self._loaded()[1], found.call, self.leave_out))
            )
        return PROBES[self]

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """See `Extractor`. Raises DecodeError `clip_too_long` for a clip of which the processor would drop the end."""
        for waveform in waveforms:
            self._require_whole(waveform)
        return super(ConversationSound, self).make(waveforms)

    def _require_whole(self, waveform: Array) -> None:
        longest, rate_hz = self.probe().longest, self.rate_hz
        if longest is None and waveform.size > _LOOKED_AT_S * rate_hz and not _sees_end(opened(self), waveform):
            longest = waveform.size - 1
        if longest is not None and waveform.size > longest:
            raise too_long(self.batch_form().made_by, waveform.size, longest, rate_hz)

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


def _sees_end(part: OpenExtractor, clip: Array) -> bool:
    """Whether the end of a clip moves what is made of it."""
    tail = round(_TAIL_S * part.sample_rate_hz)
    return not _are_same(part.alone(clip), part.alone(clip[:-tail]))


def _are_same(one: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(one[name], other.get(name, ())) for name in one)


def _longest(part: OpenExtractor) -> int | None:
    """Returns the most samples of which all are used, of clips of up to a minute; None where nothing is cut.

    A clip that the processor divides into several is too long as well.
    """
    rate_hz, tail = part.sample_rate_hz, round(_TAIL_S * part.sample_rate_hz)
    clip = noise(_LOOKED_AT_S * rate_hz, seed=7)

    def is_whole(samples: int) -> bool:
        try:
            return _sees_end(part, clip[:samples])
        except DecodeError:
            return False

    if is_whole(len(clip)):
        return None
    # Of a clip that is cut by less than the tail the end is seen still.
    stated = part.extractor.stated
    if stated is not None and is_whole(stated + tail - 1) and not is_whole(stated + tail):
        return int(stated)
    low, high = tail + 1, len(clip)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_whole(middle) else (low, middle)
    return max(low - tail + 1, 1)
