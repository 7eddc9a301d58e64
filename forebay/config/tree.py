"""One frozen tree from one TOML file. Every field is in the recipe key unless its section says that it is run-time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from forebay.config.crop import crop_samples
from forebay.config.steps import Alpha, LearnThrough

STRICT = {"extra": "forbid", "strict": True}
"""Read by pydantic when a file is loaded: unknown fields are refused, types are not coerced."""

SourceKind = Literal["tar", "filelist", "webdataset", "jsonl", "hf", "ljspeech", "text"]
VISION_KINDS: tuple[SourceKind, ...] = ("jsonl", "hf", "webdataset")


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
    duration_tolerance: float | None = None
    """Seconds by which a clip may be shorter than its manifest says before it fails as `duration_mismatch`, and longer before
    it is counted and named. None: the larger of 0.5 s and 5 % of what the manifest says."""
    languages: tuple[str, ...] | None = None
    max_samples: int | None = None
    exclude: tuple[str, ...] = ()
    """Sample ids to leave out, for example one that crashes the decoder."""
    max_sample_bytes: int = 256 * 1024 * 1024
    """A sample whose file, or whose decoded float32 waveform, is larger fails as `too_large` instead of filling memory."""
    confined: bool = False
    """Refuse a manifest that names a file outside of its folder, also by a link: for manifests of strangers. In no key: it
    changes no value."""
    audio_column: str = "audio"
    text_column: str = "text"
    language_column: str = "language"
    image_column: str = "image"
    question_column: str = "question"
    answer_column: str = "answer"
    messages_column: str = "messages"
    """Column names of an `hf` source."""
    rows: str | None = None
    """Of a source with `[vision]`: the rows of its manifest to take, as a Python slice: `"0:1000"`, `"::10"`."""
    max_pixels: int = 89_478_485
    """An image whose header says more fails as `too_many_pixels` before a pixel is decoded. The default is Pillow's own limit."""

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
        if self.duration_tolerance is not None and not 0 <= self.duration_tolerance < math.inf:
            raise ValueError(
                f"duration_tolerance is {self.duration_tolerance}, wanted 0 or more seconds, for example 0.5; "
                "a day (86400) lets every clip pass"
            )
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}, wanted 1 or more")
        if self.max_sample_bytes < 1:
            raise ValueError(f"max_sample_bytes is {self.max_sample_bytes}, wanted 1 or more")
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels is {self.max_pixels}, wanted 1 or more")
        if self.rows is not None:
            row_slice(self.rows)

    @property
    def manifests(self) -> tuple[str, ...]:
        """The manifest entries as a tuple, also where the file names just one."""
        return (self.manifest,) if isinstance(self.manifest, str) else self.manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioConfig:
    """What is stored of the audio."""

    __pydantic_config__ = STRICT

    sample_rate_hz: int = 16_000
    features: Literal["log_mel", "qwen3_asr", "w2v_bert", "waveform", "none"] = "log_mel"
    """`none`: samples are text alone, of a source of kind "text"."""
    n_mels: Literal[80, 128] | None = None
    """Bins of `log_mel` (80 when left out); the other features fix their own."""
    dtype: Literal["float16", "float32", "int16"] | None = None
    """Of the stored features; left out: float16, float32 for w2v_bert, int16 for waveform."""
    keep_waveform: bool = False
    """Also store the decoded waveform (int16) beside the features."""

    def __post_init__(self) -> None:
        if self.features == "none":
            self._check_none()
            return
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

    def _check_none(self) -> None:
        for name, default in {"sample_rate_hz": 16_000, "n_mels": None, "dtype": None, "keep_waveform": False}.items():
            if getattr(self, name) != default:
                raise ValueError(f'{name} is {getattr(self, name)!r} and features = "none" has no audio; leave it out')


def row_slice(text: str) -> slice:
    """Returns the slice that `source.rows` says, for example of "0:1000" or "::10". Raises ValueError for anything else."""
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and (numbers[2] is not None and numbers[2] < 1)):
        raise ValueError(f'rows is {text!r}, wanted start:stop or start:stop:step with a step above 0, as "0:1000"')
    return slice(*numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """What is stored of the images; a config with this section is one of the vision-language line."""

    __pydantic_config__ = STRICT

    processor: str = field(metadata={"path": True})
    """Folder with the preprocessor_config.json of a Qwen2-VL family image processor; in the key by content."""
    backend: Literal["pil", "torchvision"] = "pil"
    """Of the processor. The two give different pixels for some images, so it is in the key."""
    codec: Literal["raw", "zstd", "webp", "source"] = "raw"
    """How the patches lie on disk; in the folder's name and the shard keys, not in the key: the values are the same."""
    alpha: Alpha = "white"
    """`white`: transparent images are laid on white, as the processor does with an open image. `drop`: the colours
    under the alpha show, as where it is given a path."""

    def __post_init__(self) -> None:
        if self.codec == "source" and self.backend != "pil":
            raise ValueError(f'codec = "source" decodes at load with backend "pil"; backend is "{self.backend}"')


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How transcripts become tokens."""

    __pydantic_config__ = STRICT

    tokenizer: str = field(metadata={"path": True})
    """Folder with the tokenizer's files; in the key by their content."""
    prompt: Literal["whisper", "qwen3_asr", "plain", "chat"] = "plain"
    """`chat`: the folder's chat template over a conversation; the prompt of `[vision]`, and only of it."""
    language_tag_mode: Literal["auto", "always", "none"] = "auto"
    normalize: Literal["nfkc", "none"] = "nfkc"
    max_label_tokens: int | None = None
    """Longer labels exclude the sample, reason `label_too_long`. Whisper's limit is 448."""
    learn_through: LearnThrough = "end_of_turn"
    """Of prompt `chat`: what is learnt ends with the token that ends a turn, or with the newline behind that."""

    def __post_init__(self) -> None:
        if self.learn_through != "end_of_turn" and self.prompt != "chat":
            raise ValueError(f'learn_through is "{self.learn_through}", which is only for prompt = "chat"')
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
PACK_FIELDS = ("seq_len", "max_patches", "buffer_size", "algorithm", "pack_seed", "overlong")
"""Of `[plan]`: for kind "pack" alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Which samples form which batch. Has its own key on top of the cache's."""

    __pydantic_config__ = STRICT

    kind: Literal["bucket", "window", "pack"] = "bucket"
    """`bucket`: by ranges of length. `window`: a shuffle, cut into windows of `window` batches, each sorted by length.

    `pack`: several samples in one row of `seq_len` tokens; of `[vision]`.
    """
    edges_s: tuple[float, ...] = CLASSIC_EDGES_S
    """Upper edges in seconds; buckets are [0, e0), [e0, e1), ...; the last one is closed and takes all that is longer."""
    edges: tuple[int, ...] | None = None
    """Upper edges, in tokens, of the buckets of samples without audio; they come behind those of `edges_s`."""
    k: int | None = None
    """This many edges instead of `edges_s`, and of `edges` where they are left out, where the lengths are padded least."""
    window: int = 32
    """Batches of a window, under kind "window"."""
    batch_seconds: float | None = None
    """Budget of padded seconds a batch."""
    batch_tokens: int | None = None
    """Budget of padded tokens a batch, instead of the seconds or beside them."""
    batch_size: int | tuple[int, ...] | None = None
    """Samples a batch, one number or one a bucket."""
    calibration: str | None = field(default=None, metadata={"path": True})
    """JSON file `{bucket: {"batch_size", "grad_acc"}}`, buckets by name (`b_0_3`) or index; in the plan's key by its content."""
    lockstep: int = 8
    """Micro-batches come in groups of this many from one bucket."""
    tail: Literal["short", "drop", "pad"] = "short"
    """What the last, incomplete batch of a bucket, and the last step of an epoch on several ranks, become."""
    locality: str = "global"
    """`shards:N`: shuffled within a moving window of N shards, for cold or remote disks."""
    seq_len: int | None = None
    """Tokens of a pack."""
    max_patches: int | None = None
    """Image patches of a pack at most, beside its tokens."""
    buffer_size: int = 0
    """Samples that the packer sees at once, along the cache: a pack's samples lie near each other. 0: all."""
    algorithm: Literal["best_fit", "best_fit_decreasing"] = "best_fit"
    """`best_fit`: with exact completion; over all samples never more packs than `best_fit_decreasing`, the usual one."""
    pack_seed: int = 0
    """Of which samples of a length share a pack, and their order in it."""
    overlong: Literal["drop", "error"] = "drop"
    """What a sample above `seq_len` or `max_patches` becomes: left out, counted and listed, or the end of the plan."""

    def __post_init__(self) -> None:
        if self.kind == "pack":
            self._check_pack()
            return
        self._refuse(PACK_FIELDS, 'kind = "pack"')
        if not self.edges_s or any(b <= a for a, b in zip((0.0, *self.edges_s), self.edges_s, strict=False)):
            raise ValueError(f"edges_s must rise from above 0, got {list(self.edges_s)}")
        edges = (0, *(self.edges or (1,)))
        if self.edges == () or any(b <= a for a, b in itertools.pairwise(edges)):
            raise ValueError(f"edges must rise from above 0, got {list(self.edges or ())}")
        budgets = self.batch_seconds is not None or self.batch_tokens is not None
        if budgets + (self.batch_size is not None) + (self.calibration is not None) != 1:
            raise ValueError("give exactly one of batch_seconds and batch_size (or batch_tokens, or calibration)")
        sizes = self.batch_size if isinstance(self.batch_size, tuple) else (self.batch_size,)
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError(f"batch_size is {self.batch_size}, wanted 1 or more")
        if self.batch_seconds is not None and self.batch_seconds <= 0:
            raise ValueError(f"batch_seconds is {self.batch_seconds}, wanted more than 0")
        for name in ("k", "window", "batch_tokens", "lockstep"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.k is not None and self.edges_s != CLASSIC_EDGES_S:
            raise ValueError(f"give one of edges_s and k, not {list(self.edges_s)} and {self.k}")
        if self.kind == "window":
            self._check_window()
        buckets = len(self.edges_s) if self.k is None else self.k
        # With `edges` the plan says it: how many buckets there are is then known from the samples alone.
        if isinstance(self.batch_size, tuple) and self.edges is None and len(self.batch_size) != buckets:
            raise ValueError(f"batch_size has {len(self.batch_size)} entries for {buckets} buckets")
        count = self.locality.removeprefix("shards:")
        if self.locality != "global" and not (self.locality == f"shards:{count}" and count.isdecimal() and int(count)):
            raise ValueError(f'locality is {self.locality!r}, wanted "global" or "shards:N", for example "shards:16"')

    def _check_pack(self) -> None:
        of_lengths = {item.name for item in fields(self)} - {"kind", "tail", *PACK_FIELDS}
        self._refuse(sorted(of_lengths), 'kind = "bucket" and "window"')
        if self.seq_len is None:
            raise ValueError('kind = "pack" needs seq_len, the tokens of a pack, for example 8192')
        for name, least in (("seq_len", 1), ("max_patches", 1), ("buffer_size", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise ValueError(f"{name} is {value}, wanted {least} to {2**31 - 1}")
        if self.algorithm == "best_fit_decreasing" and (self.buffer_size or self.max_patches is not None):
            raise ValueError(
                'algorithm = "best_fit_decreasing" packs all samples by tokens: no buffer_size, no max_patches'
            )

    def _refuse(self, names: Sequence[str], kinds: str) -> None:
        defaults = {item.name: item.default for item in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f'{name} is only for {kinds}, not "{self.kind}"')

    def _check_window(self) -> None:
        if isinstance(self.batch_size, tuple):
            raise ValueError(f'batch_size is {list(self.batch_size)}, kind "window" has no buckets: wanted one number')
        defaults = {"edges_s": CLASSIC_EDGES_S, "edges": None, "k": None, "batch_tokens": None, "calibration": None}
        for name, default in {**defaults, "locality": "global"}.items():
            if getattr(self, name) != default:
                raise ValueError(f'{name} is only for kind = "bucket", not "window"')

    @property
    def locality_shards(self) -> int | None:
        """Shards of the moving window; None where the shuffle is global."""
        return None if self.locality == "global" else int(self.locality.removeprefix("shards:"))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole file; paths in it are absolute."""

    __pydantic_config__ = STRICT

    name: str
    source: SourceConfig
    audio: AudioConfig = field(default_factory=AudioConfig)
    text: TextConfig | None = None
    """With `[vision]` it may be left out: the processor's folder, prompt "chat"."""
    vision: VisionConfig | None = None
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
        if self.vision is not None:
            self._check_vision(self.vision)
        elif self.source.rows is not None:
            raise ValueError("source.rows is only for a config with [vision]")
        elif self.text is not None and self.text.prompt == "chat":
            raise ValueError('text.prompt = "chat" is only for a config with [vision]')
        if self.plan is not None and (self.plan.kind == "pack") != (self.vision is not None):
            wanted = '"pack"' if self.vision is not None else '"bucket" or "window"'
            raise ValueError(
                f'plan.kind is "{self.plan.kind}", wanted {wanted}: packs are of [vision], buckets of audio'
            )

        self._check_text_alone()
        if self.train.crop_s is not None:
            crop_samples(
                self.train.crop_s,
                features=self.audio.features,
                sample_rate_hz=self.audio.sample_rate_hz,
                has_waveform=self.audio.keep_waveform or self.audio.features == "waveform",
            )

    def _check_vision(self, vision: VisionConfig) -> None:
        if self.text is None:
            object.__setattr__(self, "text", TextConfig(tokenizer=vision.processor, prompt="chat"))
        elif self.text.prompt != "chat":
            raise ValueError(f'text.prompt is "{self.text.prompt}", with [vision] wanted "chat"')
        if self.source.kind not in VISION_KINDS:
            raise ValueError(
                f'source.kind is "{self.source.kind}", with [vision] wanted one of {", ".join(VISION_KINDS)}'
            )
        if self.audio != AudioConfig():
            raise ValueError("give one of [audio] and [vision]")
        foreign = {"min_duration_s": 0.0, "max_duration_s": None, "overlong": "keep", "languages": None}
        foreign["duration_tolerance"] = None
        for name, default in foreign.items():
            if getattr(self.source, name) != default:
                raise ValueError(f"source.{name} is only for audio, not for a config with [vision]")
        if self.train.crop_s is not None:
            raise ValueError("train.crop_s is only for audio, not for a config with [vision]")
        if self.train.mixture or self.train.mixture_column is not None:
            raise ValueError(
                "mixtures are of plans with buckets, not of the packs of [vision]; list all data in one manifest"
            )

    def _check_text_alone(self) -> None:
        """Holds source, audio and text together where samples have no audio."""
        kind, features = self.source.kind, self.audio.features
        if (kind == "text") != (features == "none"):
            raise ValueError(
                f'source.kind is "{kind}" and audio.features is "{features}"; text alone needs kind = "text" and '
                'features = "none"'
            )
        if features != "none":
            return
        if self.text is None or self.text.prompt != "plain":
            found = "no [text] section" if self.text is None else f'text.prompt is "{self.text.prompt}"'
            raise ValueError(
                f'{found} and audio.features is "none"; text alone is tokenised: give text.tokenizer and prompt = "plain"'
            )
        if self.source.duration_tolerance is not None:
            raise ValueError('source.duration_tolerance is for audio, and audio.features is "none"; leave it out')
        if self.source.min_duration_s or self.source.max_duration_s is not None:
            raise ValueError(
                'source.min_duration_s and max_duration_s are for audio, and audio.features is "none"; leave them out '
                "(text.max_label_tokens limits texts)"
            )

    @property
    def cache_root(self) -> Path:
        """Folder under which caches are looked for and built."""
        return Path(self.run.cache_root)
