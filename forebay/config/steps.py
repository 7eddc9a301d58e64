"""Frozen descriptions of the steps above the cut. A step's fields are its identity; code that runs it lives in `preprocess`.

Standard library only: keys are built and caches found without the code that executes steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FloatDtype = Literal["float16", "float32"]
Prompt = Literal["whisper", "qwen3_asr", "plain"]
Alpha = Literal["white", "drop"]
"""What becomes of a transparent image: laid on white, or the colours under its alpha shown."""
LearnThrough = Literal["end_of_turn", "newline"]
"""Where what is learnt of a turn ends: with the token that ends it, or with the newline behind that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Mono float32 at `sample_rate_hz`: mean of channels, soxr HQ; then the first `clip_s` seconds where that is set."""

    sample_rate_hz: int = 16_000
    clip_s: float | None = None
    max_sample_bytes: int = 256 * 1024 * 1024
    """Encoded bytes, and decoded float32 bytes, above which a sample fails instead of filling memory."""
    version: int = 2
    """Bumped when the same input gives different bytes; so in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waveform:
    """Field `waveform` [num_samples]: int16 (lossless from 16-bit sources at the same rate) or float32."""

    dtype: Literal["int16", "float32"] = "int16"
    version: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LogMel:
    """Whisper's log-mel, valid frames only: `input_features` [frames, n_mels] and the scalar `pad_value` float32 [1].

    16 kHz, n_fft 400, hop 160, slaney mel 0 to 8000 Hz; at most the first 30 s of the clip.
    """

    n_mels: Literal[80, 128] = 80
    dtype: FloatDtype = "float16"
    version: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Asr:
    """What transformers' `Qwen3ASRFeatureExtractor` gives for a clip alone, valid frames only: `input_features` [frames, 128]."""

    dtype: FloatDtype = "float16"
    version: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class W2vBert:
    """Raw filter banks of `SeamlessM4TFeatureExtractor`: `fbanks` [frames, 80], before normalisation and stacking.

    With the frames that overlap a 400-sample zero tail, so that crops on a hop boundary are slices.
    """

    dtype: FloatDtype = "float32"
    version: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAudio:
    """Nothing is read or stored of the sound: a sample is its text. No media field."""

    version: int = 1


FeatureStep = LogMel | Qwen3Asr | W2vBert | Waveform | NoAudio
MediaStep = Decode | FeatureStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """`input_ids` int32 [tokens] and `prefix_len` int32 [1]: normalised text in its prompt, tokenised.

    `tokenizer` is the digest of the tokenizer folder's files, never its path.
    """

    tokenizer: str
    prompt: Prompt = "plain"
    language_tag_mode: Literal["auto", "always", "none"] = "auto"
    normalize: Literal["nfkc", "none"] = "nfkc"
    """nfkc: Unicode NFKC, then runs of white space become one space, ends stripped."""
    max_label_tokens: int | None = None
    version: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """`patches` uint8 [n, 3 * patch_size^2] and `image_grid_thw` int32 [1, 3] of an image, as a Qwen2-VL processor cuts them.

    Decoded, turned as its EXIF says, made RGB as the processor makes an open image RGB (`alpha = "drop"`: as its
    loading of a path does), resized, cut into rows of (channel, y, x), one temporal copy; rows in merge order.
    `processor` is the digest of the processor's files, never their path.
    """

    processor: str
    backend: Literal["pil", "torchvision"] = "pil"
    max_pixels: int = 89_478_485
    """Of the encoded image, above which it fails before it is decoded."""
    max_sample_bytes: int = 256 * 1024 * 1024
    """Of the encoded image."""
    alpha: Alpha = "white"
    version: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """`input_ids` int32 [tokens] and `label_mask` uint8 [tokens] of a conversation under the tokenizer's chat template.

    Image tokens are expanded; the mask is 1 where a token is a target: in what the assistant says, and in what ends its
    turn.
    """

    tokenizer: str
    learn_through: LearnThrough = "end_of_turn"
    version: int = 2


Step = MediaStep | Tokens | Patches | Chat


def identity(step: Step) -> dict[str, Any]:
    """Returns the canonical description of a step: its class name and every field."""
    return {"step": type(step).__name__, **asdict(step)}
