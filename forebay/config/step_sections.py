"""`[audio]`, `[vision]`, `[text]` and `[layout]`: what is stored of samples, and in shards of how many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay.config.data import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class PitchConfig:
    """The pitch at each frame of `mel`, in Hz, 0 where there is no voice: a field `pitch`, by YIN (JASA 111(4), 2002).

    Only beside `features = "mel"`. Without this section no pitch is stored; without a field in it the defaults are
    taken.
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
    `none`: samples are text alone, of a source of kind "text"."""
    keep_waveform: bool = False
    """Also store the decoded waveform (int16) beside the features."""
    energy: bool = False
    """Also store `energy`, the L2 norm of each frame's magnitudes, beside `features = "mel"`."""
    pitch: PitchConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Every other field of the section: the settings of that step, which checks them itself."""

    def __post_init__(self) -> None:
        if not 1_000 <= self.sample_rate_hz <= 384_000:
            raise ValueError(f"sample_rate_hz is {self.sample_rate_hz}, wanted 1000 to 384000")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The part of the images that is stored; a config with this section is about images and conversations."""

    __pydantic_config__ = STRICT

    processor: str = field(metadata={"path": True, "hub": True})
    """Folder with the preprocessor_config.json of an image processor of transformers, or a model of the Hub at one
    commit (`owner/name@COMMIT`); in the key by content."""
    images: Literal["auto", "patches", "processor"] = "auto"
    """What is stored of an image. `patches`: those of Qwen2-VL's family, of which batches are packs. `processor`: what
    the processor gives of the image, whatever its class. `auto`: patches where the processor is of that family and
    `text.prompt = "chat"` finds the family's tokens in the tokenizer, else as the processor gives them."""
    codec: Literal["raw", "zstd", "webp", "source"] = "raw"
    """How images lie on disk, of `images = "processor"` raw or zstd; in the folder's name and the shard keys, not in
    the key: the values are the same."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Every other field of the section: the settings of the step, `qwen2_vl` for patches, else `processor`."""


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
