"""`[train]` and `[run]`: how a run learns, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forebay.config.data import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """One `[[train.mixture]]`: a cache, by its folder or as the one that answers a config, and its weight."""

    __pydantic_config__ = STRICT

    cache: str | None = field(default=None, metadata={"path": True})
    config: str | None = field(default=None, metadata={"path": True})
    weight: float | None = None
    """Of any scale; left out everywhere: hours to the power of `train.mixture_temperature`."""

    def __post_init__(self) -> None:
        if (self.cache is None) == (self.config is None):
            raise ValueError("give exactly one of cache and config")
        if self.weight is not None and self.weight < 0:
            raise ValueError(f"weight is {self.weight}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The reference loop and the loader. Run-time: in no key."""

    __pydantic_config__ = STRICT

    model: str | None = field(default=None, metadata={"path": True})
    """Folder of a transformers model."""
    init: Literal["pretrained", "random"] = "pretrained"
    """The weights in that folder, which must be there, or random ones from its config.json and `seed`."""
    cache: Literal["auto", "require", "off"] = "auto"
    cache_dir: str | None = field(default=None, metadata={"path": True})
    """A cache named outright; its recipe is still compared."""
    verify: Literal["touch", "open", "never"] = "touch"
    """When a cache's bytes are compared with their checksums: a sample at its first read, everything at opening, or never."""
    seed: int = 0
    max_steps: int = 100
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    grad_acc: int = 1
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    log_every: int = 10
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    usage_every: int = 100
    """Steps between lines of logs/data_usage.jsonl; checkpoints and the end write one too. 0: no log."""
    usage_ids: bool = False
    """Also log which samples were used, compactly."""
    output_dir: str = field(default="runs", metadata={"path": True})
    """Folder of runs; by default `runs` beside the config file."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of floating-point batch fields."""
    crop_s: float | None = None
    """Seconds of a random crop of each sample, new every epoch: batches are `wav` and, of w2v_bert, `feats`."""
    pixels: Literal["uint8", "float32", "float16", "bfloat16"] = "float32"
    """Of packs: `pixel_values` in this dtype; `uint8`: patches as stored, in an object that only `to_model_inputs` takes."""
    pack_shapes: Literal["natural", "fixed"] = "natural"
    """Of packs: as long as their samples, or padded to `plan.seq_len` tokens and `patch_classes` numbers of patches."""
    patch_classes: int = 8
    """Numbers of patches that fixed packs are padded to: as many shapes are compiled."""
    varlen: bool = False
    """Packs carry `cu_seq_lens_q/k` and `max_length_q/k` for flash attention."""
    num_threads: int = 2
    """Threads of the loader that fill batches; 0: in the caller's thread."""
    prefetch: int = 4
    """Batches filled ahead."""
    pin_memory: bool | None = None
    """None: pinned where CUDA is present."""
    max_open_shards: int = 256
    mixture: tuple[MixtureSource, ...] = ()
    """Several caches by weight, instead of the config's own."""
    mixture_column: str | None = None
    """Or the values of this column of the config's own cache by weight: `language`, `source`."""
    mixture_weights: dict[str, float] | None = None
    """Weight of each value of `mixture_column`; left out: by hours."""
    mixture_temperature: float = 1.0
    """Weights that are left out are hours to this power: 1 is proportional, less lifts the small ones."""
    mixture_batches: Literal["mixed", "per_source"] = "mixed"
    """Whether a micro-batch holds samples of all sources, or of one."""
    mixture_exhausted: Literal["repeat", "end"] = "repeat"
    """What a source that runs out does: it begins again, counted, or it ends the epoch."""
    asr_ratio: float | None = None
    """Share of micro-batches with audio, instead of weights, where one of the caches of `mixture` has none."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "grad_acc", "log_every", "prefetch", "max_open_shards", "patch_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        for name in ("warmup_steps", "checkpoint_every", "usage_every", "num_threads", "mixture_temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 0 or more")
        self._check_mixture()

    def _check_mixture(self) -> None:
        if self.mixture and self.mixture_column is not None:
            raise ValueError("give one of mixture and mixture_column: several caches, or the values of a column of one")
        if self.mixture and self.cache_dir is not None:
            raise ValueError("cache_dir names one cache; with mixture give each its own: [[train.mixture]] cache")
        given = [entry.weight is not None for entry in self.mixture]
        if any(given) and not all(given):
            raise ValueError(f"mixture has {sum(given)} weights for {len(given)} caches; give all of them, or none")
        if self.mixture_weights is not None and self.mixture_column is None:
            raise ValueError('mixture_weights needs mixture_column, for example "language"')
        for name, weight in (self.mixture_weights or {}).items():
            if weight < 0:
                raise ValueError(f"mixture_weights.{name} is {weight}, wanted 0 or more")
        if self.mixture_temperature != 1 and (any(given) or self.mixture_weights is not None):
            raise ValueError("give one of weights and mixture_temperature, which makes weights of hours")
        if self.asr_ratio is not None:
            self._check_asr_ratio(any(given))

    def _check_asr_ratio(self, has_weights: bool) -> None:
        if not 0 < self.asr_ratio < 1:  # type: ignore[operator]  # asked only where it is given
            raise ValueError(f"asr_ratio is {self.asr_ratio}, wanted more than 0 and less than 1")
        if len(self.mixture) < 2:
            raise ValueError("asr_ratio needs [[train.mixture]], caches with audio and one without")
        if has_weights:
            raise ValueError("give one of asr_ratio and the weights of mixture")
        if self.mixture_batches != "per_source":
            raise ValueError(
                f'asr_ratio is a share of micro-batches, and mixture_batches is "{self.mixture_batches}"; set "per_source"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where and with what. Run-time: in no key."""

    __pydantic_config__ = STRICT

    cache_root: str = field(default="caches", metadata={"path": True})
    """Folder of caches; by default `caches` beside the config file."""
    num_workers: int | None = None
    """Processes of a build; left out: the cores."""
    max_failed_share: float = 0.01
    """Share of failed samples above which a build stops with their list."""
    max_open_tars: int = 64

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers}, wanted 1 or more")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share is {self.max_failed_share}, wanted 0 to 1")
        if self.max_open_tars < 1:
            raise ValueError(f"max_open_tars is {self.max_open_tars}, wanted 1 or more")
