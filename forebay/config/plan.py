"""`[plan]`: which samples form which batch, one dataclass for each `kind`; what buckets are called. And `[mixture]`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from forebay.config.data import STRICT, at_least


def bucket_name(low_s: float, high_s: float) -> str:
    """Returns the name of the bucket [low_s, high_s): `b_0_3`, `b_3_8.5`."""
    return f"b_{round(low_s, 4):.9g}_{round(high_s, 4):.9g}"


class BucketRange(NamedTuple):
    """The lengths that a bucket holds, from the lower edge up to below the upper one; None: not a range of these."""

    seconds: tuple[float, float] | None
    tokens: tuple[int, int] | None
    shape: str | None = None
    """That of its samples, where buckets are shapes: `64x32`, width and height."""

    def name(self, bucket: int) -> str:
        """Returns the name by the upper edges, `b_3_5` or of a cell `b_3_5_t40`; without seconds the shape, or the
        index `bucket`.
        """
        if self.seconds is None:
            return self.shape or str(bucket)
        return bucket_name(*self.seconds) + ("" if self.tokens is None else f"_t{self.tokens[1]}")


def bucket_ranges(
    edges_s: Sequence[float],
    *,
    cells: Sequence[Sequence[int]] = (),
    edges: Sequence[int] = (),
    shapes: Sequence[str] = (),
) -> list[BucketRange]:
    """Returns the range of every bucket by its upper edges. cells: token edges of each range of seconds; (): none.

    edges: in tokens, of the buckets without seconds, which come behind the others. shapes: of buckets that are shapes.
    """
    if shapes:
        return [BucketRange(None, None, shape) for shape in shapes]
    found = []
    for number, seconds in enumerate(itertools.pairwise((0.0, *edges_s))):
        own: Iterable[tuple[int, int] | None] = itertools.pairwise((0, *cells[number])) if cells else [None]
        found += [BucketRange(seconds, tokens) for tokens in own]
    return [*found, *(BucketRange(None, tokens) for tokens in itertools.pairwise((0, *edges)))]


TOKEN_S = 0.02
CLASSIC_EDGES_S = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
Axes = tuple[Literal["duration", "tokens", "area", "aspect"], ...]
DURATION: Axes = ("duration",)
DURATION_TOKENS: Axes = ("duration", "tokens")
SHAPE: Axes = ("area", "aspect")
Tail = Literal["split", "short", "drop", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LengthsConfig:
    """The settings that all plans share whose batches hold samples of about one length."""

    __pydantic_config__ = STRICT

    kind: str
    batch_seconds: float | None = None
    """Budget of padded seconds a batch."""
    lockstep: int = 8
    """Micro-batches come in groups of this many of one bucket, so that ranks step through equal shapes."""
    tail: Tail = "split"
    """What becomes of the last, incomplete batch, and of the last step of an epoch on several ranks. `split`: the
    samples of that step are dealt over all ranks."""

    def _check(self, *names: str) -> None:
        at_least(self, 1, "lockstep", *names)
        if self.batch_seconds is not None and self.batch_seconds <= 0:
            raise ValueError(f"batch_seconds is {self.batch_seconds}, wanted more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig(_LengthsConfig):
    """Batches by ranges of length."""

    kind: Literal["bucket"] = "bucket"
    edges_s: tuple[float, ...] = CLASSIC_EDGES_S
    """Upper edges in seconds: buckets are [0, e0), [e0, e1), ... The last bucket is closed and takes all that is
    longer."""
    by: Axes = DURATION
    """The lengths that buckets are ranges of. `["duration", "tokens"]`: buckets are cells, ranges of seconds and of
    label tokens; `k` is then their number, or `edges_s` and `edges` give the grid. `["area", "aspect"]`: a bucket is
    one of the shapes that latents of images were stored in, and has a `batch_size`."""
    edges: tuple[int, ...] | None = None
    """Upper edges, in tokens, of the buckets of samples without audio, and of cells. Buckets without audio come behind
    those of `edges_s`."""
    k: int | None = None
    """This many edges instead of `edges_s`, and of `edges` where they are left out, where the lengths are padded
    least."""
    token_s: float = TOKEN_S
    """Seconds of audio that a label token costs as much as, where `by` has tokens: for the edges of `k`, in
    `batch_seconds`, and for the order of an epoch's end. 0.02: an encoder of 50 places a second, a decoder as deep."""
    batch_tokens: int | None = None
    """Budget of padded label tokens a batch, instead of the seconds or beside them."""
    batch_size: int | tuple[int, ...] | None = None
    """Samples a batch: one number, or one a bucket."""
    calibration: str | None = field(default=None, metadata={"path": True})
    """JSON file `{bucket: {"batch_size", "grad_acc"}}` with buckets by name (`b_0_3`) or index. The training loop
    applies its `grad_acc` bucket by bucket. The file is in the plan's key by its content."""
    locality: str = "global"
    """`shards:N`: the shuffle stays within a moving window of N shards, for cold or remote disks. `auto`: `global`, or,
    of a remote cache that is larger than `remote.cache_size_gb`, the widest window that each shard is downloaded for
    about once an epoch. Each source of a mixture has a window of N of its own shards. What `auto` comes to is in the
    plan's key."""

    def __post_init__(self) -> None:
        if not self.edges_s or not _rise((0.0, *self.edges_s)):
            raise ValueError(f"edges_s must rise from above 0, got {list(self.edges_s)}")
        if self.edges is not None and not (self.edges and _rise((0, *self.edges))):
            raise ValueError(f"edges must rise from above 0, got {list(self.edges)}")
        has_budget = self.batch_seconds is not None or self.batch_tokens is not None
        if has_budget + (self.batch_size is not None) + (self.calibration is not None) != 1:
            raise ValueError("give exactly one of batch_seconds and batch_size (or batch_tokens, or calibration)")
        self._check("k", "batch_tokens", "batch_size")
        if self.k is not None and self.edges_s != CLASSIC_EDGES_S:
            raise ValueError(f"give one of edges_s and k, not {list(self.edges_s)} and {self.k}")
        self._check_cells()
        num_buckets = len(self.edges_s) if self.k is None else self.k
        # With `edges`, and of shapes, the plan says it: the samples alone know how many buckets there are.
        is_known = self.edges is None and not self.has_shapes
        if isinstance(self.batch_size, tuple) and is_known and len(self.batch_size) != num_buckets:
            raise ValueError(f"batch_size has {len(self.batch_size)} entries for {num_buckets} buckets")
        count = self.locality.removeprefix("shards:")
        is_window = self.locality == f"shards:{count}" and count.isdecimal() and int(count)
        if self.locality not in ("global", "auto") and not is_window:
            raise ValueError(
                f'locality is {self.locality!r}, wanted "global", "auto" or "shards:N", for example "shards:16"'
            )

    def _check_cells(self) -> None:
        if self.by not in (DURATION, DURATION_TOKENS, SHAPE):
            wanted = " or ".join(json.dumps(each) for each in (DURATION, DURATION_TOKENS, SHAPE))
            raise ValueError(f"by is {list(self.by)}, wanted {wanted}")
        lengths = (self.edges, self.k, self.batch_seconds, self.batch_tokens, self.edges_s)
        if self.has_shapes and lengths != (*(None,) * 4, CLASSIC_EDGES_S):
            raise ValueError("by is of shapes, which have no lengths: give batch_size or calibration, no edges, no k")
        if not 0 < self.token_s < math.inf:
            raise ValueError(f"token_s is {self.token_s}, wanted more than 0")
        if not self.has_cells and self.token_s != TOKEN_S:
            raise ValueError(f'token_s is {self.token_s} and tokens count nothing; set by = ["duration", "tokens"]')
        if self.has_cells and (self.k is None) == (self.edges is None):
            raise ValueError(
                f"by has tokens: give one of k, a number of cells, and edges, in tokens, not {self._both()}"
            )

    def _both(self) -> str:
        return "none" if self.k is None else f"k = {self.k} and edges = {list(self.edges or ())}"

    @property
    def has_cells(self) -> bool:
        """Whether buckets are ranges of seconds and of tokens."""
        return "tokens" in self.by

    @property
    def has_shapes(self) -> bool:
        """Whether a bucket is a shape of stored latents."""
        return self.by == SHAPE

    @property
    def locality_shards(self) -> int | None:
        """Shards of the moving window; None where the shuffle is global, as it is for "auto" until that is decided."""
        return None if self.locality in ("global", "auto") else int(self.locality.removeprefix("shards:"))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig(_LengthsConfig):
    """A shuffle, cut into windows of `window` batches, each window sorted by length."""

    kind: Literal["window"] = "window"
    window: int = 32
    """Batches of a window."""
    batch_size: int | None = None
    """Samples a batch, instead of the seconds."""

    def __post_init__(self) -> None:
        if (self.batch_seconds is None) == (self.batch_size is None):
            raise ValueError("give exactly one of batch_seconds and batch_size")
        self._check("window", "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCosts:
    """The work of a step over a pack, of any scale: `b n + a n^2`, of its samples by tokens and of images by patches.

    The defaults are the ratios of an encoder of width 1,152 (attention costs as much as all else at 6,912 patches) and
    a language model of width 3,584 with twelve times its work a token.
    """

    __pydantic_config__ = STRICT

    patch: float = 1.0
    """`b` of an image's patches."""
    patch_squared: float = 1 / 6912
    """`a` of an image's patches."""
    token: float = 12.0
    """`b` of a sample's tokens."""
    token_squared: float = 12 / 21504
    """`a` of a sample's tokens."""

    def __post_init__(self) -> None:
        at_least(self, 0, "patch", "patch_squared", "token", "token_squared")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """Several samples in one row of `seq_len` tokens: conversations with images, recordings with text, or texts."""

    __pydantic_config__ = STRICT

    kind: Literal["pack"] = "pack"
    tail: Tail = "split"
    """What becomes of the last step of an epoch on several ranks. `split`: the samples of the step's packs are dealt
    over all ranks."""
    seq_len: int = field(metadata={"example": 8192})
    """Tokens of a pack."""
    max_patches: int | None = None
    """Image patches of a pack at most, beside its tokens. Left out: any number."""
    max_frames: int | None = None
    """The same for recordings: frames, as they are stored, of a pack at most; samples where `waveform` is stored."""
    buffer_size: int = 0
    """Samples along the cache that the packer sees at once, so that a pack's samples lie near each other. 0: all. A log
    line warns of a buffer that is smaller than a pack."""
    algorithm: Literal["best_fit", "best_fit_decreasing"] = "best_fit"
    """`best_fit`: with exact completion. Over all samples it never makes more packs than `best_fit_decreasing`, the
    usual algorithm."""
    pack_seed: int = 0
    """Seed of two draws: which samples of a length share a pack, and in which order they stand in the pack."""
    overlong: Literal["drop", "error", "truncate", "split"] = "drop"
    """What becomes of a sample above `seq_len`, `max_patches` or `max_frames`. `drop`: the sample is left out, counted
    and listed. `error`: no plan is made. Of conversations also `truncate`: the first tokens are taken, never a part of
    an image, a video or a clip; `split`: a conversation becomes several, each of which begins with a message of the
    user. What cannot be cut is left out, counted and listed."""
    truncate_side: Literal["right", "left"] = "right"
    """Where `truncate` takes tokens away. `left`: the last ones stay."""
    repeat_system: bool = False
    """Whether what `split` or a truncation at the left takes off begins with the system message all the same."""
    shapes: Literal["natural", "fixed"] = "natural"
    """`natural`: a pack is as long as its samples. `fixed`: padded to exactly `seq_len` tokens, and to one of at most
    two numbers of patches, which the plan chooses so that the least is padding; for a compiled model."""

    balance: Literal["none", "cost"] = "none"
    """`cost`: packs of like cost, which learn as many tokens, come in groups of `lockstep`, so that the ranks of a step
    take the same time. The packs are the same. Needs the cache."""
    costs: PackCosts = PackCosts()
    lockstep: int = 8
    """Packs of a group: as many as ranks, or a multiple of them."""

    def __post_init__(self) -> None:
        at_least(self, 1, "lockstep")
        if self.truncate_side == "left" and self.overlong != "truncate":
            raise ValueError(f'truncate_side is of overlong = "truncate", and overlong is "{self.overlong}"')
        if self.repeat_system and self.overlong != "split" and self.truncate_side != "left":
            raise ValueError('repeat_system is of overlong = "split", or "truncate" with truncate_side = "left"')
        if isinstance(self.costs, dict):  # as a plan's metadata has them
            object.__setattr__(self, "costs", PackCosts(**self.costs))
        if self.balance == "none" and (self.lockstep != 8 or self.costs != PackCosts()):
            raise ValueError('lockstep and costs of packs are of balance = "cost"; leave them out, or set it')
        for name, least in (("seq_len", 1), ("max_patches", 1), ("max_frames", 1), ("buffer_size", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise ValueError(f"{name} is {value}, wanted {least} to {2**31 - 1}")
        if self.algorithm == "best_fit_decreasing" and (self.buffer_size or self.budgets or self.has_shapes):
            raise ValueError(
                'algorithm = "best_fit_decreasing" packs all samples by tokens: no buffer_size, max_patches, '
                'max_frames, and no shapes = "fixed"'
            )

    @property
    def has_shapes(self) -> bool:
        """Whether packs are padded to fixed shapes."""
        return self.shapes == "fixed"

    @property
    def cuts(self) -> bool:
        """Whether conversations that are too long are cut."""
        return self.overlong in ("truncate", "split")

    @property
    def is_balanced(self) -> bool:
        """Whether packs of like cost come together."""
        return self.balance == "cost"

    @property
    def budgets(self) -> dict[str, int]:
        """The budgets beside the tokens that are given: how many of a unit a pack has at most."""
        given = {"patches": self.max_patches, "frames": self.max_frames}
        return {unit: most for unit, most in given.items() if most is not None}


LengthsConfig = BucketConfig | WindowConfig
PlanConfig = BucketConfig | WindowConfig | PackConfig
KINDS: dict[str, type[PlanConfig]] = {"bucket": BucketConfig, "window": WindowConfig, "pack": PackConfig}
"""The settings of every kind of plan."""


class ByKind:
    """Tells pydantic that a plan's `kind` says which settings there are; imports pydantic only when a file is read."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Returns pydantic's schema of `PlanConfig`."""
        from pydantic_core import core_schema

        return core_schema.tagged_union_schema(
            {kind: handler.generate_schema(settings) for kind, settings in KINDS.items()},
            discriminator=lambda given: given.get("kind", "bucket") if isinstance(given, dict) else "bucket",
        )


def _rise(edges: Sequence[float]) -> bool:
    return all(low < high for low, high in itertools.pairwise(edges))


WeightSteps = tuple[tuple[float, float], ...]
"""Pairs of a position and the weight from there on, rising from 0."""


def _check_steps(name: str, weight: float | WeightSteps) -> None:
    """Raises ValueError for a weight, or one of its steps, that is none."""
    if not isinstance(weight, tuple):
        if weight < 0:
            raise ValueError(f"{name} is {weight}, wanted 0 or more")
        return
    places = [at for at, _ in weight]
    if not places or places[0] != 0 or not all(low < high for low, high in itertools.pairwise(places)):
        raise ValueError(f"{name} has steps at {places}, wanted positions that rise from 0")
    if low := [value for _, value in weight if value < 0]:
        raise ValueError(f"{name} has a step to {low[0]}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureChange:
    """Other weights of a run that has begun: what came before stays as it was, and nothing is lost or repeated."""

    __pydantic_config__ = STRICT

    at: int
    """Micro-batch of the run from which they hold: `epoch` * batches of an epoch + `position` of a loader's state. What
    `weight` says of later places no longer counts."""
    weights: tuple[float, ...] | dict[str, float]
    """Weight of each `[[mixture.source]]` in order, or of each value of `mixture.column`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "at")
        given = self.weights.items() if isinstance(self.weights, dict) else enumerate(self.weights)
        for name, weight in given:
            _check_steps(f"weights.{name}", weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """A cache of a mixture, and its weight."""

    __pydantic_config__ = STRICT

    cache: str | None = field(default=None, metadata={"path": True, "url": True})
    """Folder or URL of the cache."""
    config: str | None = field(default=None, metadata={"path": True})
    """Instead of the folder: the config whose cache is read."""
    weight: float | WeightSteps | None = None
    """Weight, of any scale, or its steps over the run: `[[0, 1.0], [20_000, 0.3]]` is 0.3 from micro-batch 20,000 on.
    Left out everywhere: hours, or of images samples, to the power of `mixture.temperature`."""

    def __post_init__(self) -> None:
        if (self.cache is None) == (self.config is None):
            raise ValueError("give exactly one of cache and config")
        if self.weight is not None:
            _check_steps("weight", self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Which sources share an epoch, by which weights. Run-time: in no key."""

    __pydantic_config__ = STRICT

    source: tuple[MixtureSource, ...] = ()
    """Several caches by weight, instead of the config's own: one table `[[mixture.source]]` each."""
    column: str | None = None
    """Instead of several caches: a column of the config's own cache, `language` or `source`. Its values are then the
    sources."""
    weights: dict[str, float | WeightSteps] | None = None
    """Weight of each value of `column`, or its steps over the run. Left out: hours, or of images samples."""
    weights_in: Literal["micro_batches", "epochs"] = "micro_batches"
    """What the places of steps count: micro-batches of the global order, or epochs, 0.5 for half of one."""
    weights_between: Literal["step", "line"] = "step"
    """`line`: weights go straight from one step to the next, in steps of `line_step`."""
    line_step: float | None = None
    """Length of the steps of a line, in `weights_in`; a run has at most 256 stretches of other weights."""
    change: tuple[MixtureChange, ...] = ()
    """Other weights of a run that has begun: one table `[[mixture.change]]` each, rising."""
    temperature: float = 1.0
    """Weights that are left out are hours, or of images samples, to this power: 1 is proportional, less lifts the small
    ones."""
    batches: Literal["mixed", "per_source"] = "mixed"
    """`mixed`: a micro-batch holds samples of all sources; of packs one plan of all samples, without weights.
    `per_source`: a micro-batch, or a pack, holds samples of one source."""
    shares_of: Literal["packs", "samples", "tokens", "patches"] = "tokens"
    """Of packs: what weights are shares of. Left out, weights are what the packs of a source hold of it."""
    exhausted: Literal["repeat", "end"] = "repeat"
    """What a source that runs out does. `repeat`: it begins again, counted. `end`: it ends the epoch."""
    asr_ratio: float | None = None
    """Share of micro-batches with audio, instead of weights, where one of the caches has no audio."""

    def __post_init__(self) -> None:
        at_least(self, 0, "temperature")
        if self.source and self.column is not None:
            raise ValueError("give one of source and column: several caches, or the values of a column of one")
        given = [entry.weight is not None for entry in self.source]
        if any(given) and not all(given):
            raise ValueError(f"source has {sum(given)} weights for {len(given)} caches; give all of them, or none")
        if self.weights is not None and self.column is None:
            raise ValueError('weights needs column, for example "language"')
        for name, weight in (self.weights or {}).items():
            _check_steps(f"weights.{name}", weight)
        self._check_changes()
        if self.temperature != 1 and (any(given) or self.weights is not None):
            raise ValueError("give one of weights and temperature, which makes weights of hours")
        if self.asr_ratio is not None:
            self._check_asr_ratio(self.asr_ratio, has_weights=any(given))

    def _check_asr_ratio(self, ratio: float, *, has_weights: bool) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"asr_ratio is {ratio}, wanted more than 0 and less than 1")
        if len(self.source) < 2:
            raise ValueError("asr_ratio needs [[mixture.source]], caches with audio and one without")
        if has_weights:
            raise ValueError("give one of asr_ratio and the weights of source")
        if self.batches != "per_source":
            raise ValueError(
                f'asr_ratio is a share of micro-batches, and batches is "{self.batches}"; set "per_source"'
            )

    def _check_changes(self) -> None:
        weights = [*(entry.weight for entry in self.source), *(self.weights or {}).values()]
        has_steps = any(isinstance(weight, tuple) for weight in weights)
        is_line = self.weights_between == "line"
        if not has_steps and (is_line or self.weights_in == "epochs"):
            raise ValueError("weights_between and weights_in are of steps of a weight, and no weight has steps")
        if is_line != (self.line_step is not None):
            between = self.weights_between
            raise ValueError(f'line_step is {self.line_step}, and weights_between is "{between}"; a line needs a step')
        if self.line_step is not None and not 0 < self.line_step < math.inf:
            raise ValueError(f"line_step is {self.line_step}, wanted more than 0")
        places = [change.at for change in self.change]
        if not all(low < high for low, high in itertools.pairwise(places)):
            raise ValueError(f"change has places {places}, wanted rising ones")
        if self.change and not self.is_given:
            raise ValueError("change needs [[mixture.source]], or column")
        if (has_steps or self.change) and self.exhausted == "end":
            raise ValueError('exhausted = "end" begins each epoch anew, so weights cannot change over the run')

    @property
    def is_given(self) -> bool:
        """Whether sources are mixed."""
        return bool(self.source) or self.column is not None
