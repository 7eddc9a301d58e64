"""What the arms of `forebay doctor` tell: plain values, which cross from the child that measured to its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["raw", "build", "cache", "step"]


class Skip(Exception):  # noqa: N818  an arm that cannot be, which is no error
    """An arm cannot be measured here; its text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one stage of a sample's way takes in one thread."""

    name: str
    kind: Kind
    """`raw`: on the way out of raw data; `build`: what only a build does; `cache`: on the way out of a cache."""
    ms: float
    """Milliseconds a sample."""
    samples: int
    """Samples that it was measured on."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What training reads. place: the sealed cache of the config, None where there is none."""

    place: str | None
    num_samples: int
    hours: float | None
    size_bytes: int
    num_shards: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The raw data."""

    num_rows: int
    hours: float | None
    is_whole: bool
    """Whether all rows were listed; False: the first ones only."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """Reading encoded samples, from the disk and from memory."""

    warm_ms: float
    cold_ms: float | None
    """None: no sample could be made cold."""
    mean_bytes: float
    samples: int
    why_not_cold: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The sample of rows that was made as a build makes it, in one thread."""

    stages: tuple[Stage, ...]
    samples: int
    cpu_ms: float
    """CPU milliseconds a sample, in all stages."""
    bytes_a_sample: float
    failed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What a batch out of a cache is made of, in one thread."""

    stages: tuple[Stage, ...]
    cold_ms: float | None = None
    why_not_cold: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What a loader gives. samples_per_s: with the rests of a loop whose step is known."""

    workers: int
    samples_per_s: float
    seconds_per_sample: float
    seconds_per_frame: float
    """What one worker takes for a batch, while all work, is the sum over its samples and over their frames."""
    batches: int

    def fill_s(self, batch: PlannedBatch) -> float:
        """Returns what one worker takes for a batch."""
        return self.seconds_per_sample * batch.samples + self.seconds_per_frame * batch.frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Loaders by the number of their workers. skipped: why some were not measured."""

    rates: Mapping[int, Rate]
    skipped: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """One batch of the plan. frames: of its samples; room: that they are padded to."""

    samples: int
    frames: int
    room: int
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """The plan of the config over what is known of the samples' lengths."""

    num_batches: int
    num_samples: int
    batches: tuple[PlannedBatch, ...]
    """The first ones of an epoch."""
    padding: float
    is_exact: bool
    """Whether the lengths are those of all samples; False: those of a sample of them, drawn again and again."""
    room_is_fixed: bool = False
    """Whether a clip takes as much room whatever its length, so that padding costs a step nothing."""
    others: tuple[OtherPlan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPlan:
    """What another setting of `[plan]` would give."""

    settings: Mapping[str, object]
    padding: float
    num_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Training steps on batches of one shape."""

    bucket: int
    samples: int
    room: int
    seconds: float
    cpu_s: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Training steps. device: what they ran on; `given` where the user said what a step takes."""

    device: str
    times: tuple[StepTime, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codecs:
    """A pack of images by codec: milliseconds to read, and bytes."""

    read_ms: Mapping[str, float]
    bytes_a_sample: Mapping[str, float]
    own: str
    samples_a_pack: float
