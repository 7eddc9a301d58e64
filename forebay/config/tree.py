"""One frozen tree from one TOML file. Every field is in the recipe key unless its section says that it is run-time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

STRICT = {"extra": "forbid", "strict": True}
"""Read by pydantic when a file is loaded: unknown fields are refused, types are not coerced."""

SourceKind = Literal["tar", "filelist", "webdataset", "jsonl", "hf", "ljspeech"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Which samples: the raw data and the filters over it."""

    __pydantic_config__ = STRICT

    kind: SourceKind
    manifest: str | tuple[str, ...] = field(metadata={"path": True})
    """File, folder or glob, or a list of them; relative to the config file. Its path is not in the key, its content is."""
    split: str = "train"
    min_duration_s: float = 0.0
    max_duration_s: float | None = None
    overlong: Literal["keep", "clip", "drop"] = "keep"
    languages: tuple[str, ...] | None = None
    max_samples: int | None = None
    exclude: tuple[str, ...] = ()
    """Sample ids to leave out, for example one that crashes the decoder."""
    max_sample_bytes: int = 256 * 1024 * 1024
    """A sample whose file, or whose decoded float32 waveform, is larger fails as `too_large` instead of filling memory."""
    audio_column: str = "audio"
    text_column: str = "text"
    language_column: str = "language"
    """Column names of an `hf` source."""

    def __post_init__(self) -> None:
        if not self.manifests or not all(self.manifests):
            raise ValueError(f"manifest is {self.manifest!r}, wanted a file, a folder or a glob, or a list of them")
        if self.min_duration_s < 0:
            raise ValueError(f"min_duration_s is {self.min_duration_s}, wanted 0 or more")
        if self.max_duration_s is not None and self.max_duration_s <= self.min_duration_s:
            raise ValueError(
                f"max_duration_s ({self.max_duration_s}) is not above min_duration_s ({self.min_duration_s})"
            )
        if self.overlong != "keep" and self.max_duration_s is None:
            raise ValueError(f'overlong = "{self.overlong}" needs max_duration_s')
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}, wanted 1 or more")
        if self.max_sample_bytes < 1:
            raise ValueError(f"max_sample_bytes is {self.max_sample_bytes}, wanted 1 or more")

    @property
    def manifests(self) -> tuple[str, ...]:
        """The manifest entries as a tuple, also where the file names just one."""
        return (self.manifest,) if isinstance(self.manifest, str) else self.manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioConfig:
    """What is stored of the audio."""

    __pydantic_config__ = STRICT

    sample_rate_hz: int = 16_000
    features: Literal["log_mel", "qwen3_asr", "w2v_bert", "waveform"] = "log_mel"
    n_mels: Literal[80, 128] | None = None
    """Bins of `log_mel` (80 when left out); the other features fix their own."""
    dtype: Literal["float16", "float32", "int16"] | None = None
    """Of the stored features; left out: float16, float32 for w2v_bert, int16 for waveform."""
    keep_waveform: bool = False
    """Also store the decoded waveform (int16) beside the features."""

    def __post_init__(self) -> None:
        if self.n_mels is not None and self.features != "log_mel":
            raise ValueError(f'n_mels is only for features = "log_mel", not "{self.features}"')
        if self.features != "waveform" and self.sample_rate_hz != 16_000:
            raise ValueError(
                f'features = "{self.features}" is defined at 16000 Hz; sample_rate_hz is {self.sample_rate_hz}'
            )
        if self.features == "waveform":
            if self.dtype == "float16":
                raise ValueError('dtype of features = "waveform" is "int16" or "float32", not "float16"')
            if self.keep_waveform:
                raise ValueError('keep_waveform is only for features other than "waveform"')
        elif self.dtype == "int16":
            raise ValueError(f'dtype of features = "{self.features}" is "float16" or "float32", not "int16"')
        if not 1_000 <= self.sample_rate_hz <= 384_000:
            raise ValueError(f"sample_rate_hz is {self.sample_rate_hz}, wanted 1000 to 384000")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How transcripts become tokens."""

    __pydantic_config__ = STRICT

    tokenizer: str = field(metadata={"path": True})
    """Folder with the tokenizer's files; in the key by their content."""
    prompt: Literal["whisper", "qwen3_asr", "plain"] = "plain"
    language_tag_mode: Literal["auto", "always", "none"] = "auto"
    normalize: Literal["nfkc", "none"] = "nfkc"
    max_label_tokens: int | None = None
    """Longer labels exclude the sample, reason `label_too_long`. Whisper's limit is 448."""

    def __post_init__(self) -> None:
        if self.max_label_tokens is not None and self.max_label_tokens < 1:
            raise ValueError(f"max_label_tokens is {self.max_label_tokens}, wanted 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """How the bytes are cut. In the shard keys, not in the key: the values are the same."""

    __pydantic_config__ = STRICT

    rows_per_shard: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.rows_per_shard <= 1_000_000:
            raise ValueError(f"rows_per_shard is {self.rows_per_shard}, wanted 1 to 1000000")


CLASSIC_EDGES_S = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Which samples form which batch. Has its own key on top of the cache's."""

    __pydantic_config__ = STRICT

    kind: Literal["bucket"] = "bucket"
    edges_s: tuple[float, ...] = CLASSIC_EDGES_S
    """Upper edges in seconds; buckets are [0, e0), [e0, e1), ...; the last one is closed and takes all that is longer."""
    batch_seconds: float | None = None
    """Budget of padded seconds a batch; exactly one of this and `batch_size`."""
    batch_size: int | tuple[int, ...] | None = None
    """Samples a batch, one number or one a bucket."""
    lockstep: int = 8
    """Micro-batches come in groups of this many from one bucket."""
    tail: Literal["short", "drop", "pad"] = "short"
    """What the last, incomplete batch of a bucket becomes."""

    def __post_init__(self) -> None:
        if not self.edges_s or any(b <= a for a, b in zip((0.0, *self.edges_s), self.edges_s, strict=False)):
            raise ValueError(f"edges_s must rise from above 0, got {list(self.edges_s)}")
        if (self.batch_seconds is None) == (self.batch_size is None):
            raise ValueError("give exactly one of batch_seconds and batch_size")
        if self.batch_seconds is not None and self.batch_seconds <= 0:
            raise ValueError(f"batch_seconds is {self.batch_seconds}, wanted more than 0")
        sizes = self.batch_size if isinstance(self.batch_size, tuple) else (self.batch_size,)
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError(f"batch_size is {self.batch_size}, wanted 1 or more")
        if isinstance(self.batch_size, tuple) and len(self.batch_size) != len(self.edges_s):
            raise ValueError(f"batch_size has {len(self.batch_size)} entries for {len(self.edges_s)} buckets")
        if self.lockstep < 1:
            raise ValueError(f"lockstep is {self.lockstep}, wanted 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The reference loop and the loader. Run-time: in no key."""

    __pydantic_config__ = STRICT

    model: str | None = field(default=None, metadata={"path": True})
    """Folder of a transformers model: weights where it has them, else random ones from its config.json."""
    cache: Literal["auto", "require", "off"] = "auto"
    cache_dir: str | None = field(default=None, metadata={"path": True})
    """A cache named outright; its recipe is still compared."""
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
    output_dir: str = field(default="../runs", metadata={"path": True})
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of floating-point batch fields."""
    num_threads: int = 2
    """Threads of the loader that fill batches; 0: in the caller's thread."""
    prefetch: int = 4
    """Batches filled ahead."""
    pin_memory: bool | None = None
    """None: pinned where CUDA is present."""
    max_open_shards: int = 256

    def __post_init__(self) -> None:
        for name in ("max_steps", "grad_acc", "log_every", "prefetch", "max_open_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        for name in ("warmup_steps", "checkpoint_every", "num_threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where and with what. Run-time: in no key."""

    __pydantic_config__ = STRICT

    cache_root: str = field(default="../caches", metadata={"path": True})
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole file; paths in it are absolute."""

    __pydantic_config__ = STRICT

    name: str
    source: SourceConfig
    audio: AudioConfig = field(default_factory=AudioConfig)
    text: TextConfig | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    plan: PlanConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    path: str = ""
    """The file it was read from, for messages; set by `load_config`."""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "._-" for c in self.name) or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} becomes a folder: use letters, digits, '.', '_', '-'")
        split = self.source.split
        if not split or not all(c.isalnum() or c in "._-" for c in split):
            raise ValueError(f"source.split {split!r} becomes a folder: use letters, digits, '.', '_', '-'")

    @property
    def cache_root(self) -> Path:
        """Folder under which caches are looked for and built."""
        return Path(self.run.cache_root)
