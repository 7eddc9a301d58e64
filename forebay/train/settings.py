"""How a loader works: what `Loader` takes beside what it reads, in one value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.errors import ConfigError
from forebay.train.collate.text import PaddingSide


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """How a loader works; impossible values raise ConfigError (also ValueError)."""

    seed: int = 0
    """The seed of the order, and of crops."""
    epochs: int | None = None
    """Iterations from this epoch on are empty; None: no end."""
    dtype: torch.dtype = torch.float32
    """The dtype of floating-point fields."""
    padding_side: PaddingSide = "right"
    crop_s: float | None = None
    """Batches are of random crops of so many seconds, drawn by (seed, epoch, sample id); see `collate.crop`."""
    mask_fillers: bool = False
    """Batches of weight 0 have all labels -100. A sum of token losses over ranks is then right by itself; a mean over
    the batch's own tokens is NaN."""
    as_tensordict: bool = False
    """Batches are TensorDicts."""
    num_threads: int = 2
    """Threads that fill batches; 0: batches are filled in the caller's thread, when asked."""
    prefetch: int = 4
    """Batches filled ahead."""
    pin_memory: bool | None = None
    """Host memory is pinned; None: where CUDA is present."""
    device: torch.device | str | None = None
    """Where batches are handed out: copied to a CUDA device on a side stream; None or cpu: on the host."""
    device_prefetch: int = 1
    """Batches copied to the device ahead."""

    def __post_init__(self) -> None:
        for name, least in (("num_threads", 0), ("prefetch", 1), ("device_prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r} (wanted {least} or more)")
        if self.pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory is true but torch sees no CUDA device; leave loader.pin_memory out")

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is pinned here."""
        return torch.cuda.is_available() if self.pin_memory is None else self.pin_memory
