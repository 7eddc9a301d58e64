"""`[loader]` and `[mixture]`: which cache is read, how batches are handed out, and which sources share them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forebay.config.data import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How batches are read. Run-time: in no key."""

    __pydantic_config__ = STRICT

    cache: Literal["auto", "require", "off"] = "auto"
    """`auto`: the cache of the config's recipe, else the raw data with a warning. `require`: a missing cache is an
    error. `off`: the raw data."""
    cache_dir: str | None = field(default=None, metadata={"path": True, "url": True})
    """Folder or URL of the one cache to read, wherever it lies. Its recipe must still be that of the config."""
    verify: Literal["touch", "open", "never"] = "touch"
    """When a cache's bytes are compared with their checksums. `touch`: a sample at its first read. `open`: all of them
    when the cache is opened. `never`: not at all."""
    seed: int = 0
    """Seed of the order, of random crops, and of random weights under `train.init`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of floating-point batch fields."""
    crop_s: float | None = None
    """Seconds of a random crop of each sample, new every epoch. Batches then hold `wav`, and `feats` under
    `w2v_bert`."""
    pixels: Literal["uint8", "float32", "float16", "bfloat16"] = "float32"
    """Type of `pixel_values` in packs. `uint8`: patches as stored, in an object that only `to_model_inputs` takes."""
    pack_shapes: Literal["natural", "fixed"] = "natural"
    """`natural`: a pack is as long as its samples. `fixed`: a pack is padded to one of `patch_classes` numbers of
    patches, and to `plan.seq_len` tokens and those of the widest step between two classes: up to twice as many."""
    patch_classes: int = 8
    """Numbers of patches that fixed packs are padded to. A compiled model is compiled for as many shapes."""
    varlen: bool = False
    """Packs carry `cu_seq_lens_q/k` and `max_length_q/k` for flash attention."""
    num_threads: int = 2
    """Threads that fill batches. 0: batches are filled in the caller's thread."""
    prefetch: int = 4
    """Batches that are filled ahead."""
    pin_memory: bool | None = None
    """Whether batches lie in pinned memory. Left out: where CUDA is present."""
    max_open_shards: int = 256
    """Shards of a cache that are mapped at once."""

    def __post_init__(self) -> None:
        for name in ("prefetch", "max_open_shards", "patch_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is {self.num_threads}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """A cache of a mixture, and its weight."""

    __pydantic_config__ = STRICT

    cache: str | None = field(default=None, metadata={"path": True, "url": True})
    """Folder or URL of the cache."""
    config: str | None = field(default=None, metadata={"path": True})
    """Instead of the folder: the config whose cache is read."""
    weight: float | None = None
    """Weight, of any scale. Left out everywhere: hours, or of images samples, to the power of `mixture.temperature`."""

    def __post_init__(self) -> None:
        if (self.cache is None) == (self.config is None):
            raise ValueError("give exactly one of cache and config")
        if self.weight is not None and self.weight < 0:
            raise ValueError(f"weight is {self.weight}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Which sources share an epoch, by which weights. Run-time: in no key."""

    __pydantic_config__ = STRICT

    source: tuple[MixtureSource, ...] = ()
    """Several caches by weight, instead of the config's own: one table `[[mixture.source]]` each."""
    column: str | None = None
    """Instead of several caches: a column of the config's own cache, `language` or `source`. Its values are then the
    sources."""
    weights: dict[str, float] | None = None
    """Weight of each value of `column`. Left out: hours, or of images samples."""
    temperature: float = 1.0
    """Weights that are left out are hours, or of images samples, to this power: 1 is proportional, less lifts the small
    ones."""
    batches: Literal["mixed", "per_source"] = "mixed"
    """`mixed`: a micro-batch holds samples of all sources. `per_source`: a micro-batch holds samples of one source."""
    exhausted: Literal["repeat", "end"] = "repeat"
    """What a source that runs out does. `repeat`: it begins again, counted. `end`: it ends the epoch."""
    asr_ratio: float | None = None
    """Share of micro-batches with audio, instead of weights, where one of the caches has no audio."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, wanted 0 or more")
        if self.source and self.column is not None:
            raise ValueError("give one of source and column: several caches, or the values of a column of one")
        given = [entry.weight is not None for entry in self.source]
        if any(given) and not all(given):
            raise ValueError(f"source has {sum(given)} weights for {len(given)} caches; give all of them, or none")
        if self.weights is not None and self.column is None:
            raise ValueError('weights needs column, for example "language"')
        for name, weight in (self.weights or {}).items():
            if weight < 0:
                raise ValueError(f"weights.{name} is {weight}, wanted 0 or more")
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

    @property
    def is_given(self) -> bool:
        """Whether sources are mixed."""
        return bool(self.source) or self.column is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Which samples of what is read are used. In no key of a cache: nothing is built again. In the key of a plan, the
    files by the ids that they hold. The settings apply in this order, each to what the one before has left."""

    __pydantic_config__ = STRICT

    where: str | None = None
    """Condition over the columns of the row table, for example `language in ('hi', 'ta') and duration_s < 12`: `and`,
    `or`, `not`, comparisons, `in` a list, `is None`. Where a column is null, no comparison with it holds, and `not` of
    one neither."""
    ids: str | None = field(default=None, metadata={"path": True})
    """File with an id a line, UTF-8. Only these samples are used."""
    drop_ids: str | None = field(default=None, metadata={"path": True})
    """File with an id a line, UTF-8. These samples are not used."""
    quota: dict[str, int] | None = None
    """Samples at most of each value of a column, by column: `{language = 50_000}`. A hash of a sample's id decides
    which ones. With a larger number the same samples stay and others come. Of several columns each must take the
    sample."""

    def __post_init__(self) -> None:
        for column, most in (self.quota or {}).items():
            if most < 1:
                raise ValueError(f"quota.{column} is {most}, wanted 1 or more; leave samples out by where")

    @property
    def is_given(self) -> bool:
        """Whether any sample may be left out."""
        return self != FilterConfig()
