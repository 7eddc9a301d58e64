"""One frozen tree from one TOML file: the whole, and its sections but those that have a file of their own.

Every field is in the recipe key unless its section says that it is run-time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from forebay.config.data import MEANINGS, SOURCE_KINDS, STRICT, SourceConfig, at_least
from forebay.config.frozen_models import ModelConfig, TokenPattern
from forebay.config.plan import ByKind, MixtureConfig, PackConfig, PlanConfig
from forebay.config.remote import RemoteConfig, is_url
from forebay.config.train import OF_IMAGES, AugmentConfig, RunConfig, TrainConfig
from forebay.visible import from_here, quoted


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFeaturesConfig:
    """Features that are made of a cache of waveforms where the batch lies, behind what `[[augment]]` changes."""

    __pydantic_config__ = STRICT

    features: Literal["log_mel", "qwen3_asr", "w2v_bert"]
    """As `audio.features`: within 1e-5 of the cached log-mels, within 1e-3 of a bin's power for `w2v_bert`."""
    n_mels: Literal[80, 128] | None = None
    """Bins of `log_mel`. Left out: 80."""

    def __post_init__(self) -> None:
        if self.n_mels is not None and self.features != "log_mel":
            raise ValueError(f'n_mels is of features = "log_mel", and features is "{self.features}"')


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
    """Seed of the order, of random crops, latents and captions, and of random weights under `train.init`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of floating-point batch fields."""
    form: Literal["padded", "ragged"] = "padded"
    """`ragged`: a batch is what the cache holds of its samples, one behind the other, and where each begins."""
    device_features: DeviceFeaturesConfig | None = None
    crop_s: float | None = None
    """Seconds of a random crop of each sample, new every epoch. Batches then hold `wav`, and `feats` under
    `w2v_bert`."""
    latent: Literal["sample", "mean"] = "sample"
    """Latents of an autoencoder. `sample`: drawn of their distribution, by seed, epoch and sample id. `mean`: its mean,
    which evaluations take anyway."""
    caption: Literal["sample", "first"] = "sample"
    """Texts of a row that `[source.captions]` gives a model. `sample`: one of them, all as likely, by seed, epoch and
    sample id, the same for every model. `first`: the first one, which evaluations take anyway."""
    caption_dropout: float = 0.0
    """Share of the samples that have the output for the empty text instead, for classifier-free guidance. Needs
    `source.captions.empty`."""
    pixels: Literal["uint8", "float32", "float16", "bfloat16"] = "float32"
    """Type of `pixel_values` in packs. `uint8`: patches as stored, in an object that only `to_model_inputs` takes."""
    varlen: bool = False
    """Packs carry `cu_seq_lens_q/k` and `max_length_q/k` for flash attention."""
    tokens: dict[str, TokenPattern] = field(default_factory=dict, hash=False)
    """Codes of a codec as tokens, by field: `{codes = {delay = 1, bos = 2048, pad = 2048}}`."""
    num_threads: int = 2
    """Threads that fill batches. 0: batches are filled in the caller's thread."""
    prefetch: int = 4
    """Batches that are filled ahead."""
    pin_memory: bool | None = None
    """Whether batches lie in pinned memory. Left out: where CUDA is present."""
    max_open_shards: int = 256
    """Shards of a cache that are mapped at once."""

    def __post_init__(self) -> None:
        at_least(self, 1, "prefetch", "max_open_shards")
        at_least(self, 0, "num_threads")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout is {self.caption_dropout}, wanted a share between 0 and 1")


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
    which ones. With a larger number the same samples stay and others come. Each of several columns must take it."""

    def __post_init__(self) -> None:
        for column, most in (self.quota or {}).items():
            if most < 1:
                raise ValueError(f"quota.{column} is {most}, wanted 1 or more; leave samples out by where")

    @property
    def is_given(self) -> bool:
        """Whether any sample may be left out."""
        return self != FilterConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class PitchConfig:
    """The pitch at each frame of `mel`, in Hz, 0 where there is no voice: a field `pitch`, by YIN (JASA 111(4), 2002).

    Only beside `features = "mel"`. Without this section no pitch is stored; a field left out is its default.
    """

    __pydantic_config__ = STRICT

    min_hz: float = 65.0
    """The lowest pitch that is looked for."""
    max_hz: float = 600.0
    """The highest pitch that is looked for."""
    threshold: float = 0.25
    """A frame has a voice where a period differs from the next by less than this share. The paper has 0.1; at 0.25 the
    frames of speech that have a voice are those of WORLD's DIO in 85 % of cases."""

    def __post_init__(self) -> None:
        if not 20 <= self.min_hz < self.max_hz <= 5_000:
            raise ValueError(f"min_hz is {self.min_hz} and max_hz {self.max_hz}, wanted 20 <= min_hz < max_hz <= 5000")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}, wanted a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioConfig:
    """The part of the audio that is stored."""

    __pydantic_config__ = STRICT

    sample_rate_hz: int = 16_000
    """Samples a second of `waveform` and `mel`. The other features are defined at 16000 Hz."""
    features: str = "log_mel"
    """Which features are stored: a step by its name, or a class of your own, `"steps/my_fbank.py:Fbank40"` beside the
    config or the name of an entry point `"forebay.steps"`, with `allow_code = true` under `[run]` in the file itself.
    `none`: samples are text alone, of a source of kind "text". `lengths`: nothing but how long recordings are, beside
    `[[model]]`, where it is the default."""
    keep_waveform: bool = False
    """Also store the decoded waveform (int16) beside the features."""
    energy: bool = False
    """Also store `energy`, the L2 norm of each frame's magnitudes, beside `features = "mel"`."""
    pitch: PitchConfig | None = None
    speeds: tuple[float, ...] = ()
    """Also store what is made of each recording at these speeds, 0.5 to 2 and 1.0 among them. Training takes one of
    them, by (`loader.seed`, epoch, id); an evaluation and everything that looks take 1.0. For `waveform` the kind
    `speed` of `[[augment]]` does it without a cache of its own."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Every other field of the section: the settings of that step, which checks them itself."""

    def __post_init__(self) -> None:
        if not 1_000 <= self.sample_rate_hz <= 384_000:
            raise ValueError(f"sample_rate_hz is {self.sample_rate_hz}, wanted 1000 to 384000")
        if self.speeds and (1.0 not in self.speeds or not all(0.5 <= speed <= 2 for speed in self.speeds)):
            raise ValueError(f"speeds is {list(self.speeds)}, wanted numbers from 0.5 to 2, and 1.0 among them")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The part of the images that is stored; a config with this section is about images and conversations."""

    __pydantic_config__ = STRICT

    processor: str = field(default="", metadata={"path": True, "hub": True})
    """Folder with the preprocessor_config.json of an image processor of transformers, or a model of the Hub at one
    commit (`owner/name@COMMIT`); in the key by content. Left out only beside `images = "none"`."""
    images: Literal["auto", "patches", "processor", "none"] = "auto"
    """What is stored of an image. `patches`: those of Qwen2-VL's family, of which batches are packs. `processor`: what
    the processor gives of the image, whatever its class. `auto`: patches where the processor is of that family and
    `text.prompt = "chat"` finds the family's tokens in the tokenizer, else as the processor gives them. `none`: nothing
    of the images themselves, beside `[[model]]`, where it is the default."""
    codec: Literal["raw", "zstd", "webp", "source"] = "raw"
    """How images lie on disk, of `images = "processor"` raw or zstd; in the folder's name and the shard keys, not in
    the key: the values are the same."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Every other field of the section: the settings of the step, `qwen2_vl` for patches, else `processor`."""

    def __post_init__(self) -> None:
        if not self.processor and self.images != "none":
            raise ValueError("processor is missing: name the folder of an image processor")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How transcripts become tokens."""

    __pydantic_config__ = STRICT

    tokenizer: str = field(default="", metadata={"path": True, "hub": True})
    """Folder with the tokenizer's files, or a model of the Hub at one commit (`owner/name@COMMIT`); in the key by their
    content. `label` and `none` need none."""
    prompt: str = "plain"
    """How a text is written before it is tokenised: a step by its name. With `[vision]`: `chat` conversations, `label`
    classes, `plain` texts of images (CLIP, SigLIP), `none` images alone."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Every other field of the section: the settings of that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """How the bytes are cut. In the shard keys, not in the key: the values are the same."""

    __pydantic_config__ = STRICT

    rows_per_shard: int = 512
    """Rows of one source file in a shard. Texts without audio: 8 times as many."""

    def __post_init__(self) -> None:
        if not 1 <= self.rows_per_shard <= 1_000_000:
            raise ValueError(f"rows_per_shard is {self.rows_per_shard}, wanted 1 to 1000000")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole file; paths in it are absolute."""

    __pydantic_config__ = STRICT

    name: str
    """First part of the cache folder's name."""
    source: SourceConfig = field(metadata={"example": '{kind = "jsonl", manifest = "train.jsonl"}'})
    """Of `[[mixture.source]]`: as one of its caches has it, and the sections of what is made too."""
    audio: AudioConfig | None = None
    """Without `[vision]` it may be left out: its defaults."""
    text: TextConfig | None = None
    """With `[vision]` it may be left out: the processor's folder, prompt "chat"."""
    vision: VisionConfig | None = None
    model: tuple[ModelConfig, ...] = ()
    """Frozen models whose outputs are stored: one table `[[model]]` each."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    plan: Annotated[PlanConfig, ByKind()] | None = None
    filter: FilterConfig = field(default_factory=FilterConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    augment: tuple[AugmentConfig, ...] = ()
    """What is changed of a sample below the cut, in order: one table `[[augment]]` each."""
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    path: str = ""
    """The file it was read from, for messages; set by `load_config`."""
    given: tuple[str, ...] = ()
    """The overrides that it was read with, for messages; set by `load_config`."""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "._-" for c in self.name) or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} becomes a folder: use letters, digits, '.', '_', '-'")
        split = self.source.split
        if not split or not all(c.isalnum() or c in "._-" for c in split):
            raise ValueError(f"source.split {split!r} becomes a folder: use letters, digits, '.', '_', '-'")
        taken = {kind: model.folder for model in self.model for kind in model.taken}
        if "image" in taken and (self.vision is None or not self.vision.processor):
            vision = self.vision or VisionConfig(images="none")
            object.__setattr__(self, "vision", replace(vision, processor=taken["image"]))
        if not self.vision and self.audio is None:
            object.__setattr__(self, "audio", AudioConfig(features="lengths") if "audio" in taken else AudioConfig())
        if self.vision and self.audio is None and self.text is None and self.vision.images != "none":
            object.__setattr__(self, "text", TextConfig(tokenizer=self.vision.processor, prompt="chat"))
        self._check_mixture()
        self._check_padded()
        if self.mixture.source and self.loader.cache_dir is not None:
            raise ValueError(
                "loader.cache_dir names one cache; with a mixture give each its own: [[mixture.source]] cache"
            )

        if self.run.cache_root.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"run.cache_root is {self.run.cache_root!r}, and a web server lists no folders: name one cache of it "
                "by loader.cache_dir, or a root in s3://, gs:// or az://"
            )

    def _check_mixture(self) -> None:
        """Raises ValueError for what the mixture of a plan of packs, or of another plan, is not."""
        mixture = self.mixture
        if not isinstance(self.plan, PackConfig):
            if mixture.shares_of != "tokens":
                raise ValueError('mixture.shares_of is of packs; leave it out, or set plan.kind = "pack"')
            return
        if mixture.column is not None or mixture.asr_ratio is not None:
            raise ValueError(
                'plan.kind is "pack", and mixture.column and mixture.asr_ratio are of plans with buckets; give each '
                "part a config of its own with a [filter], and name them in [[mixture.source]]"
            )
        has_weights = any(entry.weight is not None for entry in mixture.source) or mixture.change
        if mixture.batches == "mixed" and (has_weights or mixture.temperature != 1):
            raise ValueError(
                'mixture.batches is "mixed", and packs of samples of all sources hold each sample once; for weights '
                'set mixture.batches = "per_source", which makes each pack of one source'
            )

    def _check_padded(self) -> None:
        """Raises ValueError for what is done with padded batches where there are none."""
        is_packed, is_ragged = isinstance(self.plan, PackConfig), self.loader.form == "ragged"
        if not (is_packed or is_ragged):
            return
        found = 'plan.kind is "pack"' if is_packed else 'loader.form is "ragged"'
        kinds = [each.kind for each in self.augment if is_ragged or each.kind not in OF_IMAGES]
        if kinds:
            raise ValueError(f"augment of kind {kinds[0]} changes padded batches, and {found}; leave one of both out")
        if self.loader.tokens:
            raise ValueError(f"loader.tokens are of padded batches, and {found}; leave one of both out")
        if self.loader.device_features is not None:
            raise ValueError(f"loader.device_features makes padded batches, and {found}; leave one of both out")
        if self.loader.caption_dropout:
            raise ValueError(f"loader.caption_dropout is of padded batches, and {found}; leave one of both out")

    @property
    def subjects(self) -> tuple[str, ...]:
        """The words for what the sections say is made, by which kinds of source say what they hold."""
        return (*(["speech"] if self.audio else []), *(["vision"] if self.vision else []))

    @property
    def meaning(self) -> str:
        """The name of what a row of the source is, or the `file.py:Class` that says it."""
        return self.source.meaning or self.default_meaning

    @property
    def default_meaning(self) -> str:
        """The meaning of rows where `source.meaning` is left out."""
        prompt = "chat" if self.text is None else self.text.prompt
        if not self.vision and (self.text is None or self.audio is None or prompt != "chat"):
            kind = SOURCE_KINDS.get(self.source.kind)
            return "recordings" if kind is None else kind.meaning
        return next((facts.name for facts in MEANINGS.values() if facts.prompt == prompt), "conversations")

    @property
    def codec(self) -> str | None:
        """How images lie on disk: the `codec` of the caches' metadata. None for audio and texts."""
        return self.vision.codec if self.vision and self.vision.images != "none" else None

    @property
    def named(self) -> str:
        """The words of a command that mean this config: its file, and the overrides."""
        words = [from_here(self.path)]
        for override in self.given:
            is_root = override.partition("=")[0].strip() == "run.cache_root"
            words += ["--cache-root", from_here(self.run.cache_root)] if is_root else ["--set", override]
        return " ".join(map(quoted, words))

    @property
    def cache_root(self) -> Path:
        """Folder of this machine under which caches are looked for and built; that of `remote_root` on this node."""
        return stand_in(self.run.cache_root, self.remote)

    @property
    def remote_root(self) -> str | None:
        """URL under which caches are looked for and put, where `run.cache_root` is one."""
        return self.run.cache_root if is_url(self.run.cache_root) else None


def stand_in(cache_root: str, remote: RemoteConfig) -> Path:
    """Returns the folder for a cache root: itself, or what stands for a URL on this node, another for each endpoint."""
    if not is_url(cache_root):
        return Path(cache_root)
    return remote.folder / "roots" / hashlib.sha256(f"{remote.endpoint or ''} {cache_root}".encode()).hexdigest()[:16]
