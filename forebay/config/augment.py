"""`[[augment]]`: what is changed of a sample after it was read, another way in every epoch. In no key of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from forebay.config.data import STRICT, at_least

AugmentKind = Literal["spec_augment", "gain", "noise", "reverb", "speed", "flip", "colour", "function"]
_OF: Mapping[str, frozenset[str]] = {
    "spec_augment": frozenset(
        ("time_prob", "time_length", "time_min_masks", "feature_prob", "feature_length", "feature_min_masks")
    ),
    "gain": frozenset(("db",)),
    "noise": frozenset(("cache", "snr_db")),
    "reverb": frozenset(("cache",)),
    "speed": frozenset(("factors",)),
    "flip": frozenset(),
    "colour": frozenset(("brightness", "contrast")),
    "function": frozenset(("function", "processes", "changes_length")),
}
"""The settings of each kind, beside `kind` and `probability`."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "gain": ("db",),
    "noise": ("cache", "snr_db"),
    "reverb": ("cache",),
    "speed": ("factors",),
    "function": ("function",),
}
OF_WAVEFORMS = ("gain", "noise", "reverb", "speed")
"""The kinds that need the samples of a recording."""
OF_IMAGES = ("flip", "colour")
"""The kinds that change images, in packs of patches too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """One change of samples, drawn by (`loader.seed`, epoch, id of the sample): the same on any rank, after any resume.

    They are made in the order of the file, of training batches alone. Run-time: in no key.
    """

    __pydantic_config__ = STRICT

    kind: AugmentKind
    """`spec_augment`: stretches of frames and of bins become 0. `gain`, `noise`, `reverb`, `speed`: of waveforms.
    `flip`: images are mirrored. `colour`: they are brighter or darker, of more or less contrast. `function`: yours."""
    probability: float = 1.0
    """Share of the samples that are changed."""
    time_prob: float | None = None
    """Of `spec_augment`: share of the frames in masks, which may overlap. Left out, this and the next five: the numbers
    of `train.model` (`mask_time_prob`, ...), and without a model those of Whisper."""
    time_length: int | None = None
    """Frames of a mask."""
    time_min_masks: int | None = None
    """Masks of a clip at least."""
    feature_prob: float | None = None
    """Share of the bins in masks."""
    feature_length: int | None = None
    """Bins of a mask."""
    feature_min_masks: int | None = None
    """Masks of bins at least."""
    db: tuple[float, ...] | None = None
    """Of `gain`: lowest and highest gain in decibels."""
    cache: str | None = field(default=None, metadata={"path": True, "url": True})
    """Of `noise` and `reverb`: folder or URL of a cache of waveforms, noises or impulse responses, at the same rate."""
    snr_db: tuple[float, ...] | None = None
    """Of `noise`: lowest and highest ratio of the recording's power to the noise's, in decibels."""
    factors: tuple[float, ...] | None = None
    """Of `speed`: one of these is drawn: 1.1 is faster, shorter and higher."""
    brightness: tuple[float, ...] | None = None
    """Of `colour`: lowest and highest factor of all bytes of an image."""
    contrast: tuple[float, ...] | None = None
    """Of `colour`: lowest and highest factor of what lies between a byte, made brighter first, and 127.5."""
    function: str | None = None
    """Of `function`: `"file.py:name"` beside the config, with `allow_code = true` under `[run]`. It takes the stored
    fields of a sample and a `numpy.random.Generator`, and returns fields."""
    processes: int | None = None
    """Of `function`: processes that call it. Left out, or 0: the loader's threads do."""
    changes_length: bool | None = None
    """Of `function`: whether arrays may get another length."""

    def __post_init__(self) -> None:
        given = {each.name for each in fields(self) if getattr(self, each.name) is not None}
        given -= {"kind", "probability"}
        if foreign := sorted(given - _OF[self.kind]):
            owners = [kind for kind, names in _OF.items() if foreign[0] in names]
            raise ValueError(f'{foreign[0]} is of kind {", ".join(owners)}, and kind is "{self.kind}"')
        if missing := [name for name in _NEEDED.get(self.kind, ()) if name not in given]:
            raise ValueError(f'kind "{self.kind}" needs {" and ".join(missing)}')
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability is {self.probability}, wanted more than 0, at most 1")
        at_least(self, 0, "time_prob", "feature_prob", "time_min_masks", "feature_min_masks", "processes")
        at_least(self, 1, "time_length", "feature_length")
        for name in ("time_prob", "feature_prob"):
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at most 1")
        if self.kind == "colour" and not given:
            raise ValueError('kind "colour" needs brightness or contrast')
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("db", "snr_db", "brightness", "contrast"):
            pair = getattr(self, name)
            if pair is not None and (len(pair) != 2 or pair[0] > pair[1]):
                raise ValueError(f"{name} is {list(pair)}, wanted [lowest, highest]")
        for name in ("brightness", "contrast"):
            if min(getattr(self, name) or (0,)) < 0:
                raise ValueError(f"{name} is {list(getattr(self, name))}, wanted factors of 0 or more")
        if self.factors is not None and not (self.factors and all(0.5 <= factor <= 2 for factor in self.factors)):
            raise ValueError(f"factors is {list(self.factors)}, wanted numbers from 0.5 to 2")
