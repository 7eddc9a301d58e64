"""`[[model]]`: a frozen model that runs over the data once; what it gives is stored as a group of fields of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay.config.data import STRICT, at_least

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
TAKEN = ("audio", "image", "text")
"""Kinds of items that models take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOutput:
    """An output of a model that is stored."""

    __pydantic_config__ = STRICT

    output: str = field(metadata={"example": '"last_hidden_state"'})
    """Its name in what the model returns; `mean`: the mean of `last_hidden_state` over a sample's own steps."""
    dtype: Literal["float32", "float16"] = "float16"
    """Type of the stored values that are floats. Codes are uint8 or uint16, as many as the codebook has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPattern:
    """Codes of a codec as the tokens of a language model: made at load of what is stored, in no key.

    Codebook k of [frames, codebooks] has `bos`, its codes plus k times `offset`, `eos`, all of it k times `delay`
    frames later. Tokens that are no codes are best numbered behind all codes.
    """

    __pydantic_config__ = STRICT

    delay: int = 0
    """Frames by which each codebook stands behind the one before it: MusicGen has 1."""
    offset: int = 0
    """The number by which the codes of each codebook are above those of the one before it."""
    bos: int | None = None
    """The token before the first code of each codebook."""
    eos: int | None = None
    """The token behind the last one."""
    pad: int = 0
    """The token where nothing stands: beside codebooks that are delayed, and in the padding of a batch."""

    def __post_init__(self) -> None:
        at_least(self, 0, "delay", "offset", "bos", "eos", "pad")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A model whose outputs are stored: codec tokens, latents, embeddings, states of an encoder, scores.

    Its weights are in the key by their content. What it takes is prepared as its own folder says.
    """

    __pydantic_config__ = STRICT

    name: str = field(metadata={"example": '"codes"'})
    """What the group of its fields is called, on disk and in messages; and the one field where `keep` names none."""
    folder: str = field(metadata={"path": True, "hub": True, "example": '"models/mimi"'})
    """Folder with config.json and safetensors, or a model of the Hub at one commit (`owner/name@COMMIT`); or
    `"file.py:Class"` beside the config, with `allow_code = true` under `[run]` in the file itself."""
    takes: str | tuple[Literal["image", "text"], ...] = field(metadata={"example": '"audio"'})
    """`"audio"`, `"image"` or `"text"` of a row; `["image", "text"]`: each image with the row's text; or the name of an
    earlier section, for a class of your own: the fields that it stores of an item."""
    call: str | None = None
    """The method that is called: `encode`, `forward`, `get_text_features`, ... Left out: that of its family."""
    keep: dict[str, KeptOutput] | None = None
    """Outputs by the names of the fields that hold them. Left out: what its family is taken for."""
    layer: int | None = None
    """The layer whose states stand for `last_hidden_state`: 0 are the embeddings, -1 is the last one."""
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the call: `num_quantizers = 8`, `bandwidth = 6.0`. In the key; an unknown one is refused."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and arithmetic; of a class of your own, of its stored floats."""
    batch: int | None = None
    """Samples that the model is given at once; in the keys of shards. Left out: that of its family."""
    size: int | tuple[int, int] | None = None
    """Of an autoencoder, or a class of your own that takes images: pixels that these are resized and cropped to, the
    side of a square or [width, height]."""
    shapes: int | tuple[tuple[int, int], ...] | None = None
    """At most so many sizes of the area of `size`, those by which this set of images is cropped least. Or the sizes
    themselves, [[width, height], ...]: they stay where images are added."""
    areas: tuple[int, ...] = ()
    """Areas of these sizes in pixels, in place of that of `size`: an image takes the largest that it has the pixels
    for."""
    step: int = 64
    """Sides of these sizes are multiples of it. An image with a smaller side costs its sample."""
    least: int = 1
    """A size that is found, and that fewer images would have, is left out, and they are cropped to another."""
    resample: Literal["lanczos", "bicubic"] = "lanczos"
    """Pillow's filter by which images are resized to `size`."""
    crops: int = 1
    """Windows of each image, evenly from one end to the other of the side that `size` cuts; an odd number. The middle
    one is the sample, the others are variants: the loader hands out one by (seed, epoch, sample id)."""
    flip: bool = False
    """Of a model of images: what it gives of each image and window that is mirrored left to right is a variant too."""
    digest: str | None = None
    """What `forebay key` says of the folder: stands in for it where only training reads the cache."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in TAKEN:
            raise ValueError(
                f"name is {self.name!r}, wanted letters a to z, digits and _, and none of {', '.join(TAKEN)}"
            )
        if unnamed := [name for name in self.keep or () if not name.isidentifier()]:
            raise ValueError(f"keep has a field {unnamed[0]!r:.80}, wanted letters, digits and _")
        if not isinstance(self.takes, str) and sorted(self.takes) != ["image", "text"]:
            raise ValueError(f'takes is {list(self.takes)}, wanted "audio", "image", "text" or ["image", "text"]')
        if self.digest is not None and not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest is {self.digest!r:.80}, wanted the 64 hex digits that forebay key prints")
        at_least(self, 1, "batch", "size", "areas", "step", "least", "crops")
        self._check_sizes()
        if self.crops % 2 == 0:
            raise ValueError(f"crops is {self.crops}, wanted an odd number: the centred window is one of them")
        if self.is_code and self.size is not None and self.takes != "image":
            raise ValueError('size is of images; set takes = "image", or leave it out')
        if self.is_code and self.crops > 1:
            raise ValueError("crops are of folders; a class of your own is given the centred part, leave crops out")
        if self.flip and (self.takes != "image" or self.is_code):
            raise ValueError('flip is of folders that take images; set takes = "image", or leave it out')

    def _check_sizes(self) -> None:
        if isinstance(self.shapes, int):
            at_least(self, 1, "shapes")
        elif self.shapes is not None and (not self.shapes or min(map(min, self.shapes)) < 1):
            raise ValueError(f"shapes is {self.shapes}, wanted a number, or sizes of 1 pixel or more")
        if self.size is None and (self.shapes is not None or self.areas):
            raise ValueError("shapes and areas are of images that are resized; give size")
        if self.size is None and self.crops > 1:
            raise ValueError("crops are of images that are resized; give size")
        if self.shapes is None and self.areas:
            raise ValueError("areas are of several sizes; give shapes")
        if not isinstance(self.shapes, int) and self.least > 1:
            raise ValueError("least is of sizes that are found; give shapes, a number")

    @property
    def is_code(self) -> bool:
        """Whether it is a class of the user."""
        return self.folder.rpartition(":")[0].endswith(".py")

    @property
    def taken(self) -> tuple[str, ...]:
        """Kinds of items that it takes, in the order of the alphabet; none of a model that takes what another gives."""
        if isinstance(self.takes, str):
            return (self.takes,) if self.takes in TAKEN else ()
        return tuple(sorted(self.takes))
